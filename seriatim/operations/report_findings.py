"""Tell: findings reach a person once. A run that died between its commit and its telling leaves
them to the next.

Next room: cli/run.py shows them; engine/findings.py says what a finding is.
"""

from __future__ import annotations

from seriatim.engine.findings import Finding
from seriatim.ledger.commit import read_head
from seriatim.ports import LedgerStore


def unreported_findings(store: LedgerStore, stream: str) -> list[Finding]:
    """Findings that are in the ledger and that nobody was told."""
    head = read_head(store, stream)
    if head is None:
        return []
    entries = [
        store.manifest_at(stream, sequence).entry
        for sequence in range(store.reported_sequence() + 1, head.ledger.sequence + 1)
    ]
    return [finding for entry in entries for finding in entry.findings]


def last_sequence(store: LedgerStore, stream: str) -> int:
    """The last entry; -1: there is none."""
    head = read_head(store, stream)
    return head.ledger.sequence if head else -1


def mark_reported(store: LedgerStore, sequence: int) -> None:
    """Everything up to this entry was told."""
    if sequence > store.reported_sequence():
        store.put_reported_sequence(sequence)
