"""The verdict of a check, per partition, made of what the suites say.

Bad data and a broken check are two different things: a check that cannot be carried out is an
error, and never a good verdict.

Next: operations/prove/suite.py has what is expected; operations/prove/evidence.py has the promises;
ledger/entries.py says what a verdict does to the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from seriatim.engine.files import File
from seriatim.engine.findings import Finding
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.ledger.model import FailedRange
from seriatim.operations.prove.evidence import Evidence
from seriatim.operations.prove.suite import Expectation, Suite


class Judgement(Struct, frozen=True, kw_only=True):
    """One expectation that one partition does not meet."""

    expectation: Expectation
    partition: Partition
    broken_count: int = 0
    """Rows that are not as expected; 1 if the expectation is about all rows together."""
    row_count: int = 0
    """Rows that were looked at."""
    example_offset: int = -1
    """The offset of one row that is not as expected."""
    found: str = ""
    """What was there instead, for people."""
    files: tuple[str, ...] = ()
    """Files with bad rows, as far as that is known."""

    @property
    def is_critical(self) -> bool:
        """Whether it makes the verdict bad."""
        return self.expectation.severity == "critical"


class BrokenCheckError(Exception):
    """An expectation that could not be checked. This is never a good verdict.

    The caller knows the stream, and raises `to_config_error` instead.
    """

    def __init__(self, expectation: Expectation, reason: str) -> None:
        super().__init__(reason)
        self.expectation = expectation
        self.reason = reason

    def to_config_error(self, stream: str) -> ConfigError:
        """The error for people."""
        name = self.expectation.name
        suite = self.expectation.suite
        return ConfigError(
            f"{stream}: the check itself is broken: {name} of {suite}",
            expects=self.expectation.describe,
            cause=self.reason[:400],
            next=f"fix {suite}, then `seriatim check {stream}`: nothing was judged by this one",
        )


class Checker(Protocol):
    """Checks data by suites. Only what is not as expected comes back.

    Raises `BrokenCheckError`, and `UnreadableFileError` (ports.py).
    """

    def check_records(
        self,
        suite: Suite,
        partition: Partition,
        files: Sequence[File],
        first_new_offsets: Mapping[str, int],
    ) -> list[Judgement]:
        """Check the records of these files from the first new offset of their topic id on."""
        ...

    def check_evidence(self, suite: Suite, evidence: Sequence[Evidence]) -> list[Judgement]:
        """Check evidence, as a frame with topic, partition, promise, holds, broken, offset."""
        ...


class CheckScope(Struct, frozen=True):
    """What of a partition is judged."""

    partition: Partition
    epoch: int
    start: int
    until: int
    files: tuple[File, ...]


def verdict_by_partition(
    scopes: Iterable[CheckScope], judgements: Iterable[Judgement]
) -> dict[str, str]:
    """Good or bad, for each partition that was judged."""
    bad_partitions = {judgement.partition for judgement in judgements if judgement.is_critical}
    verdict: dict[str, str] = {}
    for scope in scopes:
        verdict[str(scope.partition)] = "bad" if scope.partition in bad_partitions else "good"
    return verdict


def failed_ranges(
    scopes: Iterable[CheckScope], judgements: Sequence[Judgement], judged_until: int
) -> tuple[FailedRange, ...]:
    """What is bad, as one range for each bad partition."""
    ranges: list[FailedRange] = []
    for scope in scopes:
        critical_judgements = [
            judgement
            for judgement in judgements
            if judgement.partition == scope.partition and judgement.is_critical
        ]
        if critical_judgements:
            files = _blamed_files(scope, critical_judgements)
            ranges.append(_failed_range(scope, files, judged_until))
    return tuple(ranges)


def _blamed_files(scope: CheckScope, judgements: Sequence[Judgement]) -> Sequence[File]:
    """The files with bad rows; all files that were judged, if that is not known of one judgement."""
    if not all(judgement.files for judgement in judgements):
        return scope.files
    blamed_paths: set[str] = set()
    for judgement in judgements:
        blamed_paths.update(judgement.files)
    return [file for file in scope.files if file.path in blamed_paths]


def _failed_range(scope: CheckScope, files: Sequence[File], judged_until: int) -> FailedRange:
    start = scope.start
    until = scope.until
    if files:
        # A file may begin before what is new in it.
        start = max(scope.start, min(file.first_offset for file in files))
        until = max(file.last_offset + 1 for file in files)
    return FailedRange(
        partition=str(scope.partition),
        epoch=scope.epoch,
        start=start,
        until=until,
        files=tuple(file.path for file in files),
        judged_until=judged_until,
    )


def check_findings(
    judgements: Iterable[Judgement], evidence: Iterable[Evidence], judged_until: int
) -> list[Finding]:
    """What is reported to people: critical as errors, warnings as such, info not at all."""
    evidence_by_promise = {(row.partition, row.promise): row for row in evidence}
    findings: list[Finding] = []
    for judgement in judgements:
        if judgement.expectation.severity == "info":
            continue
        promise = str(judgement.expectation.meta.get("promise", ""))
        promise_evidence = evidence_by_promise.get((judgement.partition, promise))
        findings.append(_finding_of_judgement(judgement, promise_evidence, judged_until))
    return findings


def _finding_of_judgement(
    judgement: Judgement, evidence: Evidence | None, judged_until: int
) -> Finding:
    """A judgement as a finding. Evidence knows better than the suite what is wrong, and where."""
    expectation = judgement.expectation
    broken_count = judgement.broken_count
    offset = judgement.example_offset
    expected = expectation.describe
    observed = judgement.found
    if evidence is not None:
        broken_count = evidence.broken_count
        offset = evidence.offset
        expected = evidence.expected or expectation.describe
        observed = evidence.found
    rows = "not so"
    if judgement.row_count:
        rows = f"{broken_count} of {judgement.row_count} records"
    return Finding(
        finding="check",
        topic=judgement.partition.topic,
        partition=judgement.partition.number,
        offset=offset,
        expected=expected,
        found=f"{rows}: {observed}" if observed else rows,
        cause=f"{expectation.name} ({expectation.suite})",
        level="error" if judgement.is_critical else "warning",
        sequence=judged_until,
    )
