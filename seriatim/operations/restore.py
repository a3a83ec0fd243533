"""Restored: a person's decision that an older ledger is meant, so that its witness follows it.

A witness ahead of its ledger is refused by every command: going on by itself would fold messages
twice or lose them. After a deliberate restore `seriatim accept STREAM --restored` is the way out.
With a ledger the decision is an entry on it; where there is none, the witness is moved aside with
the reason in it, and the next run begins at 0.

Next room: ledger/commit.py reads and refuses; operations/accept.py decides about topics.
"""

from __future__ import annotations

from msgspec import Struct

from seriatim.errors import ConfigError, IntegrityError
from seriatim.ledger.commit import commit, read_head
from seriatim.operations.accept import decision_entry
from seriatim.ports import Clock, LedgerStore


class RestoreDecision(Struct, kw_only=True):
    """What was decided, or would be."""

    witness_sequence: int
    """The last entry that head.json had seen."""
    ledger_sequence: int
    """The last entry that is there; -1: no ledger at all."""
    contradiction: str
    reason: str
    sequence: int = -1
    """The entry that says so; -1: none was made."""
    archived_witness_path: str = ""
    """Where the witness is now, if it was moved."""


def accept_restored_ledger(
    store: LedgerStore,
    clock: Clock,
    stream: str,
    attempt: str,
    reason: str,
    *,
    dry_run: bool = False,
) -> RestoreDecision:
    """Make the witness follow the ledger that is there."""
    trouble, witness, head = _find_contradiction(store, stream), store.witness(), store.head(stream)
    if not trouble and head is not None and head.ledger.foreign_sequence >= 0:
        trouble = f"others wrote to the records table, told by entry {head.ledger.foreign_sequence}"
    if not trouble or witness is None:
        raise ConfigError(
            f"{stream}: nothing to accept: the ledger is not behind its witness",
            next=f"`seriatim status {stream}` shows how it is",
        )
    decision = RestoreDecision(
        witness_sequence=witness[0],
        ledger_sequence=head.ledger.sequence if head else -1,
        contradiction=trouble,
        reason=reason,
    )
    if dry_run:
        return decision
    store.put_reported_sequence(
        min(store.reported_sequence(), decision.ledger_sequence)
    )  # entries to come have numbers that were told before
    if head is None:
        decision.archived_witness_path = store.archive_witness(reason)
        return decision
    decision.sequence = commit(store, clock, head, decision_entry("accept", attempt, (), reason))[
        1
    ].sequence
    return decision


def _find_contradiction(store: LedgerStore, stream: str) -> str:
    """Why the ledger is refused; empty if it is not."""
    try:
        read_head(store, stream)
    except IntegrityError as error:
        return error.message
    return ""
