"""Ask: producers are asked for the snapshots that sessions need, after a run. The ledger says
which; no clock does.

What was asked is remembered as the entry up to which it was. A run that dies between its commit and
its asking leaves that to the next; one that dies between its asking and remembering it asks twice,
which costs a producer a snapshot.

Next room: ledger/snapshot_needs.py says who needs one; docs/STREAMS.md has `snapshot_requests`.
"""

from __future__ import annotations

from seriatim.errors import SeriatimError
from seriatim.ledger.model import Ledger
from seriatim.ledger.snapshot_needs import collect_snapshot_requests
from seriatim.ports import LedgerStore, SnapshotRequester


def request_snapshots_after_run(
    store: LedgerStore, requester: SnapshotRequester | None, head: Ledger
) -> str:
    """Ask, where the stream wants it. What is committed is safe without it: trouble is told, and
    fails nothing.
    """
    if requester is None:
        return ""
    try:
        request_snapshots(store, requester, head)
    except (SeriatimError, OSError) as trouble:
        return trouble.render() if isinstance(trouble, SeriatimError) else f"asked.json: {trouble}"
    return ""


def request_snapshots(store: LedgerStore, requester: SnapshotRequester, head: Ledger) -> int:
    """Ask for all that the ledger calls for and that was not asked for yet; how many requests that
    is.
    """
    sequence, sha256 = requester.last_requested_entry()
    if (sequence, sha256) == (head.sequence, head.sha256):
        return 0
    if sequence >= 0 and not store.has_manifest(
        sha256, sequence - 1
    ):  # of another ledger, put back or made anew
        sequence = -1
    wanted = collect_snapshot_requests(
        head.stream, (manifest.entry for manifest in store.entries(head.stream, sequence))
    )
    if wanted:
        requester.send(wanted)
    requester.put_last_requested_entry(head.sequence, head.sha256)
    return len(wanted)
