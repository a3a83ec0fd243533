"""Report findings: every finding is reported to a person once. A run that died between its commit
and its report leaves its findings to the next run.

Next: cli/run.py shows them; engine/findings.py says what a finding is.
"""

from __future__ import annotations

from seriatim.engine.findings import Finding
from seriatim.ledger.commit import read_head
from seriatim.ledger.manifests import REPORTED_NOTE, LedgerHead
from seriatim.ledger.model import EntryMark
from seriatim.ports import LedgerStore


def unreported_findings(
    store: LedgerStore, stream: str, head: LedgerHead | None = None
) -> list[Finding]:
    """Findings that are in the ledger and were not reported yet. `head` is the ledger, if it was just
    read.
    """
    if head is None:
        head = read_head(store, stream)
    if head is None:
        return []
    findings: list[Finding] = []
    for sequence in range(store.note(REPORTED_NOTE).sequence + 1, head.ledger.sequence + 1):
        findings += store.manifest_at(stream, sequence).entry.findings
    return findings


def mark_reported(store: LedgerStore, sequence: int) -> None:
    """Remember that everything up to this entry was reported."""
    if sequence > store.note(REPORTED_NOTE).sequence:
        store.put_note(REPORTED_NOTE, EntryMark(sequence))
