"""Checks of streams in memory: the context of a check, and the committed records to damage.

Next: seriatim/operations/prove/check.py.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from seriatim.errors import IntegrityError
from seriatim.ledger.model import File
from seriatim.memory.check import MemoryChecker, MemorySight
from seriatim.operations.prove.check import CheckContext, CheckResult, check_stream
from seriatim.operations.prove.gather_evidence import CheckTableSpec
from seriatim.operations.prove.suite import Expectation, Suites, join_suites, parse_suite
from seriatim.stream import Stream
from seriatim.testing import MemoryStream

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


def check_table_spec(stream: Stream) -> CheckTableSpec | None:
    """What a check must know of the table machine; None for another machine."""
    if stream.machine != "table":
        return None
    return CheckTableSpec(
        stream.table.key,
        tuple(stream.table.columns),
        stream.table.before,
        stream.table_machine().load,
    )


def check_context_of(memory_stream: MemoryStream, *own: Expectation, **fields: Any) -> CheckContext:
    """The context of a check of a stream in memory."""

    def read(file: File) -> list[dict[str, Any]]:
        if file.path not in memory_stream.files.files:
            raise IntegrityError(f"{file.path} is missing")
        return memory_stream.files.files[file.path].rows

    context_fields = {
        "stream": memory_stream.stream.name,
        "suites": shipped_suites(memory_stream.stream, *own),
        "ledger": memory_stream.ledger,
        "open_state": lambda: memory_stream.files,
        "records": memory_stream.files,
        "record_scanner": MemorySight(read),
        "checker": MemoryChecker(read),
        "table_spec": check_table_spec(memory_stream.stream),
        "clock": memory_stream.clock,
        "new_attempt": lambda: f"check{next(ATTEMPTS)}",
        "peak_memory_bytes": lambda: 0,
    }
    return CheckContext(**(context_fields | fields))


def run_check(memory_stream: MemoryStream, *own: Expectation) -> CheckResult:
    """Check a stream in memory."""
    return check_stream(check_context_of(memory_stream, *own))


def committed_rows(memory_stream: MemoryStream) -> list[dict[str, Any]]:
    """The committed records themselves: changing them damages the stream."""
    return [
        row
        for file in memory_stream.ledger.files_now()
        for row in memory_stream.files.files[file.path].rows
    ]
