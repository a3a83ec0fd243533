"""Restore: a person decides that a restored, older ledger is meant, so that its witness follows it.

Every command refuses a witness that is ahead of its ledger: to go on would fold messages twice, or
lose them. After a deliberate restore, `seriatim accept STREAM --restored` resolves this. If there is
a ledger, the decision becomes an entry of it. If there is none, the witness is moved aside with the
reason in it, and the next run begins at entry 0.

Next: ledger/commit.py reads the ledger and refuses; operations/accept.py decides about topics.
"""

from __future__ import annotations

from msgspec import Struct

from seriatim import __version__
from seriatim.errors import ConfigError, IntegrityError
from seriatim.ledger.commit import commit, read_head
from seriatim.ledger.entries import AcceptEntry
from seriatim.ports import Clock, LedgerStore


class RestoreDecision(Struct, kw_only=True):
    """What was decided; after a dry run, what would be decided."""

    witness_sequence: int
    """The newest entry that the witness, head.json, knows."""
    ledger_sequence: int
    """The newest entry of the ledger; -1 if there is no ledger."""
    contradiction: str
    """Why the ledger is refused, as a text for people."""
    reason: str
    sequence: int = -1
    """The entry of the decision; -1 if no entry was committed."""
    archived_witness_path: str = ""
    """Where the witness was moved to; empty if it was not moved."""


def accept_restored_ledger(
    store: LedgerStore,
    clock: Clock,
    stream: str,
    attempt: str,
    reason: str,
    *,
    dry_run: bool = False,
) -> RestoreDecision:
    """Make the witness follow the ledger as it is. Refused if the two do not contradict each other."""
    contradiction = _find_contradiction(store, stream)
    witness = store.witness()
    head = store.head(stream)
    if not contradiction and head is not None and head.ledger.foreign_sequence >= 0:
        sequence = head.ledger.foreign_sequence
        contradiction = f"others wrote to the records table, told by entry {sequence}"
    if not contradiction or witness is None:
        raise ConfigError(
            f"{stream}: nothing to accept: the ledger is not behind its witness",
            next=f"`seriatim status {stream}` shows how it is",
        )
    decision = RestoreDecision(
        witness_sequence=witness[0],
        ledger_sequence=head.ledger.sequence if head else -1,
        contradiction=contradiction,
        reason=reason,
    )
    if dry_run:
        return decision
    # New entries will get numbers that were reported before the restore. They have to be reported
    # again, so the mark goes back as well.
    reported_sequence = min(store.reported_sequence(), decision.ledger_sequence)
    store.put_reported_sequence(reported_sequence)
    if head is None:
        decision.archived_witness_path = store.archive_witness(reason)
        return decision
    entry = AcceptEntry(
        attempt=attempt,
        product_version=__version__,
        reason=reason,
    )
    _, committed = commit(store, clock, head, entry)
    decision.sequence = committed.sequence
    return decision


def _find_contradiction(store: LedgerStore, stream: str) -> str:
    """Why the ledger is refused, as a text for people; empty if it is not refused."""
    try:
        read_head(store, stream)
    except IntegrityError as error:
        return error.message
    return ""
