"""Ask: producers are asked for the snapshots that sessions need, after a run. The ledger says which; no clock does.

What was asked is remembered as the entry up to which it was. A run that dies between its commit and its asking leaves
that to the next; one that dies between its asking and remembering it asks twice, which costs a producer a snapshot.

Next room: core/ask.py says who needs one; docs/STREAMS.md has `snapshot_requests`.
"""

from __future__ import annotations

from seriatim.core.ask import asked_for
from seriatim.core.errors import SeriatimError
from seriatim.core.ledger import Ledger
from seriatim.ports import LedgerStore, Requests


def keep_asking(store: LedgerStore, requests: Requests | None, head: Ledger) -> str:
    """Ask, where the stream wants it. What is committed is safe without it: trouble is told, and fails nothing."""
    if requests is None:
        return ""
    try:
        ask(store, requests, head)
    except (SeriatimError, OSError) as trouble:
        return trouble.render() if isinstance(trouble, SeriatimError) else f"asked.json: {trouble}"
    return ""


def ask(store: LedgerStore, requests: Requests, head: Ledger) -> int:
    """Ask for all that the ledger calls for and that was not asked for yet; how many requests that is."""
    sequence, sha256 = requests.asked()
    if (sequence, sha256) == (head.sequence, head.sha256):
        return 0
    if sequence >= 0 and not store.has(sha256, sequence - 1):  # of another ledger, put back or made anew
        sequence = -1
    wanted = asked_for(head.stream, (manifest.entry for manifest in store.entries(head.stream, sequence)))
    if wanted:
        requests.send(wanted)
    requests.put_asked(head.sequence, head.sha256)
    return len(wanted)
