"""Checks over worlds in memory: what a check is made with, and ways to hurt what is committed.

Next room: seriatim/operations/prove/check.py.
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


def stock(stream: Stream, *own: Expectation) -> Suites:
    """The suites that are shipped, and some of one's own."""
    rooms = {
        name: parse_suite((SHIPPED / f"{name}.json").read_bytes(), f"expectations/{name}.json")
        for name in ROOMS
    }
    return join_suites(rooms, own, stream.machine)


ROOMS = ("records", "ledger", "state")


def between(
    column: str, least: Any, most: Any, severity: Any = "critical", **meta: Any
) -> Expectation:
    """An expectation of a stream's own."""
    kwargs = {"column": column, "min_value": least, "max_value": most}
    return Expectation(
        "expect_column_values_to_be_between", kwargs, severity, meta, suite="expectations/s.json"
    )


def table_of(stream: Stream) -> CheckTableSpec | None:
    """The stock machine as a check needs it."""
    if stream.machine != "table":
        return None
    return CheckTableSpec(
        stream.table.key,
        tuple(stream.table.columns),
        stream.table.before,
        stream.table_machine().load,
    )


def means(made: MemoryStream, *own: Expectation, **fields: Any) -> CheckContext:
    """A check of a world in memory."""

    def read(file: File) -> list[dict[str, Any]]:
        if file.path not in made.files.files:
            raise IntegrityError(f"{file.path} is missing")
        return made.files.files[file.path].rows

    given = {
        "stream": made.stream.name,
        "suites": stock(made.stream, *own),
        "ledger": made.ledger,
        "open_state": lambda: made.files,
        "records": made.files,
        "record_scanner": MemorySight(read),
        "checker": MemoryChecker(read),
        "table_spec": table_of(made.stream),
        "clock": made.clock,
        "new_attempt": lambda: f"check{next(ATTEMPTS)}",
        "peak_memory_bytes": lambda: 0,
    }
    return CheckContext(**(given | fields))


def checked(made: MemoryStream, *own: Expectation) -> CheckResult:
    """Check a world in memory."""
    return check_stream(means(made, *own))


def rows(made: MemoryStream) -> list[dict[str, Any]]:
    """The committed records themselves, to be hurt."""
    return [row for file in made.ledger.files_now() for row in made.files.files[file.path].rows]
