"""Check: a verdict per partition, made of what suites said. Bad data is one thing, a broken check
another.

Next room: suite.py has what is expected, evidence.py the promises; verdict.py what a verdict does
to the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from seriatim.engine.findings import Finding
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.ledger.model import File
from seriatim.ledger.verdicts import FailedRange
from seriatim.operations.prove.evidence import Evidence
from seriatim.operations.prove.suite import Expectation, Suite


class Judgement(Struct, frozen=True, kw_only=True):
    """What one expectation says of one partition."""

    expectation: Expectation
    partition: Partition
    broken_count: int = 0
    """Rows that are not as expected; 1 where it is about all of them together."""
    row_count: int = 0
    example_offset: int = -1
    """An example."""
    found: str = ""
    files: tuple[str, ...] = ()
    """Files with what is bad, as far as that is known."""


class BrokenCheckError(Exception):  # becomes a ConfigError with the stream's name
    """An expectation that could not be judged: that is never a pass."""

    def __init__(self, expectation: Expectation, reason: str) -> None:
        super().__init__(reason)
        self.expectation, self.reason = expectation, reason

    def to_config_error(self, stream: str) -> ConfigError:
        """What a person is told."""
        return ConfigError(
            f"{stream}: the check itself is broken: {self.expectation.name} of {self.expectation.suite}",
            expects=self.expectation.describe,
            cause=self.reason[:400],
            next=f"fix {self.expectation.suite}, then `seriatim check {stream}`: nothing was judged by this one",
        )


class Checker(Protocol):
    """Who judges by suites. Only what is not as expected comes back. Raises `BrokenCheckError`,
    `UnreadableFileError` (ports.py).
    """

    def check_records(
        self,
        suite: Suite,
        partition: Partition,
        files: Sequence[File],
        first_new_offsets: Mapping[str, int],
    ) -> list[Judgement]:
        """Judge the records of these files that are at or after `since`, by topic id."""
        ...

    def check_evidence(self, suite: Suite, evidence: Sequence[Evidence]) -> list[Judgement]:
        """Judge evidence, as a frame with topic, partition, promise, holds, broken, offset."""
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
    bad = {one.partition for one in judgements if one.expectation.severity == "critical"}
    return {str(scope.partition): "bad" if scope.partition in bad else "good" for scope in scopes}


def failed_ranges(
    scopes: Iterable[CheckScope], judgements: Sequence[Judgement], judged_until: int
) -> tuple[FailedRange, ...]:
    """What is bad, one stretch per partition: the files to blame, or all that were judged where
    none is known.
    """
    found = []
    for scope in scopes:
        bad = [
            one
            for one in judgements
            if one.partition == scope.partition and one.expectation.severity == "critical"
        ]
        if bad:
            blamed = {path for one in bad for path in one.files}
            files = (
                [file for file in scope.files if file.path in blamed]
                if all(one.files for one in bad)
                else scope.files
            )
            found.append(
                FailedRange(
                    partition=str(scope.partition),
                    epoch=scope.epoch,
                    start=max(
                        scope.start, min((file.first_offset for file in files), default=scope.start)
                    ),
                    until=max((file.last_offset + 1 for file in files), default=scope.until),
                    files=tuple(file.path for file in files),
                    judged_until=judged_until,
                )
            )
    return tuple(found)


def check_findings(
    judgements: Iterable[Judgement], evidence: Iterable[Evidence], judged_until: int
) -> list[Finding]:
    """What a person is told: critical as errors, warnings as such, info not at all."""
    promises = {(one.partition, one.promise): one for one in evidence}
    told = []
    for one in judgements:
        expectation = one.expectation
        if expectation.severity == "info":
            continue
        promise = promises.get((one.partition, str(expectation.meta.get("promise", ""))))
        rows = (
            f"{promise.broken_count if promise else one.broken_count} of {one.row_count} records"
            if one.row_count
            else "not so"
        )
        found = promise.found if promise else one.found
        told.append(
            Finding(
                finding="check",
                topic=one.partition.topic,
                partition=one.partition.number,
                offset=promise.offset if promise else one.example_offset,
                expected=(promise.expected if promise else "") or expectation.describe,
                found=f"{rows}: {found}" if found else rows,
                cause=f"{expectation.name} ({expectation.suite})",
                level="error" if expectation.severity == "critical" else "warning",
                sequence=judged_until,
            )
        )
    return told
