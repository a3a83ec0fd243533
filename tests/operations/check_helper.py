"""Checks of streams in memory: the context of a check, and the committed records to damage.

Next: seriatim/operations/prove/check.py.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from seriatim.engine.files import File
from seriatim.errors import IntegrityError
from seriatim.memory.check import MemoryChecker, MemorySight
from seriatim.operations.prove.check import CheckResult, check_stream
from seriatim.operations.prove.suite import (
    Checker,
    Expectation,
    Suites,
    join_suites,
    parse_suite,
)
from seriatim.ports import ProgressCallback, RecordScanner
from seriatim.stream import Stream
from seriatim.testing import MemoryStream, OpenMemoryStream

SHIPPED = Path(__file__).parents[2] / "expectations"
ATTEMPTS = count()


def shipped_suites(stream: Stream, *own: Expectation) -> Suites:
    """The suites that are shipped, with expectations of the stream's own."""
    shipped = {
        name: parse_suite((SHIPPED / f"{name}.json").read_bytes(), f"expectations/{name}.json")
        for name in SUITE_NAMES
    }
    return join_suites(shipped, own, stream.machine)


SUITE_NAMES = ("records", "ledger", "state")


def values_between(
    column: str, minimum: Any, maximum: Any, severity: Any = "critical", **meta: Any
) -> Expectation:
    """An expectation of the stream's own: values of a column lie between two limits."""
    kwargs = {"column": column, "min_value": minimum, "max_value": maximum}
    return Expectation(
        "expect_column_values_to_be_between", kwargs, severity, meta, suite="expectations/s.json"
    )


def run_check(
    memory_stream: MemoryStream,
    *own: Expectation,
    checker: Checker | None = None,
    record_scanner: RecordScanner | None = None,
    open_stream: OpenMemoryStream | None = None,
    progress: ProgressCallback = lambda _records, _total: None,
) -> CheckResult:
    """Check a stream in memory."""

    def read(file: File) -> list[dict[str, Any]]:
        if file.path not in memory_stream.files.files:
            raise IntegrityError(f"{file.path} is missing")
        return memory_stream.files.files[file.path].rows

    return check_stream(
        open_stream or memory_stream.open(),
        shipped_suites(memory_stream.stream, *own),
        checker or MemoryChecker(read),
        record_scanner or MemorySight(read),
        progress,
    )


def committed_rows(memory_stream: MemoryStream) -> list[dict[str, Any]]:
    """The committed records themselves: changing them damages the stream."""
    return [
        row
        for file in memory_stream.ledger.files_now()
        for row in memory_stream.files.files[file.path].rows
    ]
