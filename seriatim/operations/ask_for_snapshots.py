"""Snapshot requests: after a run, producers are asked for the snapshots that sessions need.

The ledger alone says which sessions these are; no clock is involved. A note beside the ledger
says up to which entry producers were asked. A run that dies between its commit and its requests leaves them to the
next run. A run that dies between its requests and remembering them asks twice, which costs a
producer one more snapshot.

Next: ledger/gaps.py says who needs one; docs/STREAMS.md describes `snapshot_requests`.
"""

from __future__ import annotations

from seriatim.errors import SeriatimError
from seriatim.ledger.gaps import collect_snapshot_requests
from seriatim.ledger.manifests import REQUESTED_NOTE
from seriatim.ledger.model import Ledger
from seriatim.ports import LedgerStore, SnapshotRequester


def request_snapshots_after_run(
    store: LedgerStore, requester: SnapshotRequester | None, head: Ledger
) -> str:
    """Ask for snapshots, if the stream wants that. Returns the error as a text for people, or "".

    What is committed is safe without the requests, so an error here does not fail the run.
    """
    if requester is None:
        return ""
    try:
        request_snapshots(store, requester, head)
    except SeriatimError as error:
        return error.render()
    except OSError as error:
        return f"asked.json: {error}"
    return ""


def request_snapshots(store: LedgerStore, requester: SnapshotRequester, head: Ledger) -> int:
    """Send all requests that the ledger calls for and that were not sent yet. Returns how many."""
    requested = store.note(REQUESTED_NOTE)
    if requested == head.mark:
        return 0
    sequence = requested.sequence
    if sequence >= 0 and not store.has_manifest(requested.sha256, sequence - 1):
        # The remembered entry belongs to another ledger: this one was restored or started anew.
        sequence = -1
    new_entries = (manifest.entry for manifest in store.entries(head.stream, sequence))
    requests = collect_snapshot_requests(head.stream, new_entries)
    if requests:
        requester.send(requests)
    store.put_note(REQUESTED_NOTE, head.mark)
    return len(requests)
