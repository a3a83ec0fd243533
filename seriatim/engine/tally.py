"""The tally: what one partition's walk met, as findings to be told, counts, and marks for the gaps
table.

Next room: fold.py writes it; ledger.py keeps it.
"""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from seriatim.engine.findings import FINDINGS_REPORTED_MAX, Finding, GapMark
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Counts, Session


class Tally:
    """Findings, counts and marks of one partition in one slice."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.findings: list[Finding] = []
        self.marks: list[GapMark] = []
        self.counts = Counts()
        self._by_kind: Counter[str] = Counter()
        self._by_level: Counter[str] = Counter()

    def new_finding(
        self, kind: str, session: str | None, offset: int, expected: str = "", found: str = ""
    ) -> Finding:
        """A finding at this partition."""
        topic, number = self.partition.topic, self.partition.number
        return Finding(
            finding=kind,
            topic=topic,
            partition=number,
            offset=offset,
            session=session,
            expected=expected,
            found=found,
        )

    def report(self, finding: Finding, *, always: bool = False) -> None:
        """Keep a finding to be told; beyond a bound it is only counted."""
        self._by_kind[finding.finding] += 1
        self._by_level[finding.level] += 1
        if always or self._by_level[finding.level] <= FINDINGS_REPORTED_MAX:
            self.findings.append(finding)

    def report_warning(self, finding: Finding, cause: str) -> None:
        """Tell what a person should know and need not act on at once."""
        self.report(replace(finding, level="warning", cause=cause))

    def count(self, kind: str, number: int = 1) -> None:
        """What the tier only counts."""
        self._by_kind[kind] += number

    def mark_damaged(
        self,
        session: Session,
        name: str,
        kind: str,
        offset: int,
        cause: str,
        *,
        quarantined: bool = False,
    ) -> None:
        """From this offset on the session's output is not to be trusted."""
        if quarantined or session.damaged_since_offset < 0:
            mark = GapMark(
                finding=kind, offset=offset, session=name, cause=cause, quarantined=quarantined
            )
            self.marks.append(mark)
        if session.damaged_since_offset < 0:
            session.damaged_since_offset = offset

    def mark_repaired(self, session: Session, name: str, offset: int, closed_by: str) -> None:
        """From this offset on it is right again; from the next one, where what is wrong came out at
        the same.
        """
        if session.damaged_since_offset >= 0:
            self.marks.append(
                GapMark(
                    finding="",
                    offset=max(offset, session.damaged_since_offset + 1),
                    session=name,
                    closed_by=closed_by,
                )
            )
            session.damaged_since_offset = -1

    def update_counts(self, contradictions: int) -> None:
        """The counts as of now."""
        self.counts.findings = dict(self._by_kind)
        if contradictions:
            self.counts.findings["precondition"] = contradictions
