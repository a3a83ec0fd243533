"""Looking back at worlds in memory, for tests.

Next room: worlds.py and mending.py make the worlds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session
from seriatim.operations.inspect.bisect import INVARIANT_NAMES, Bisection, BisectResult
from seriatim.operations.inspect.explain import (
    RowExplainer,
    RowExplanation,
    parse_row_key,
    records_by_session,
)
from seriatim.operations.inspect.expression import parse_expression
from seriatim.operations.inspect.session_replay import ReplayContext, SessionReplay
from seriatim.operations.inspect.trace_step import TraceStep
from seriatim.ports import LedgerHead
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0
from tests.operations.repair_helper import MemoryReread


def looking(made: MemoryStream) -> ReplayContext:
    """What a look back at a world is made with."""
    return ReplayContext(
        stream=made.stream,
        runner=made.machine(),
        ledger=made.ledger,
        state=made.files,
        log=made.kafka,
        past_reader=MemoryReread(made),
    )


def head_of(made: MemoryStream) -> LedgerHead:
    """The world's ledger."""
    head = made.ledger.head(made.stream.name)
    assert head is not None
    return head


def way(made: MemoryStream, name: str = "s", partition: Partition = A0) -> SessionReplay:
    """A session's way."""
    return SessionReplay(looking(made), head_of(made), partition, name)


def traced(
    made: MemoryStream, name: str = "s", partition: Partition = A0, start: int = 0
) -> list[TraceStep]:
    """All steps of a session."""
    gone = way(made, name, partition)
    gone.begin_at_or_after(start)
    return list(gone.steps(gone.committed_end))


def at(made: MemoryStream, offset: int, name: str = "s", partition: Partition = A0) -> Session:
    """The session after the message at an offset, as it would be saved."""
    gone = way(made, name, partition)
    gone.begin_at(offset + 1)
    gone.fold_to(offset + 1)
    return gone.tracing_fold.session_to_save()


def rows_of(
    made: MemoryStream, name: str, partition: Partition, start: int
) -> list[dict[str, Any]]:
    """The committed records of a session from an offset on, by offset and index: their own columns."""
    life = made.accounts()[partition].topic_id
    rows = [
        row for row in made.rows(partition) if (row["session"], row["topic_id"]) == (name, life)
    ]
    rows = [row for row in rows if row["offset"] >= start]
    rows.sort(key=lambda row: (row["offset"], row["index"]))
    columns = ("offset", "index", *made.machine().columns)
    return [{column: row[column] for column in columns} for row in rows]


class MemoryLookup:
    """Committed records of a world, by what is in their columns."""

    def __init__(self, made: MemoryStream) -> None:
        self.made = made

    def find_records(self, column_values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Records with these values."""
        for row in self.made.rows():
            if all(row[name] == value for name, value in column_values.items()):
                yield row


def explained(made: MemoryStream, row: str, session: str | None = None) -> list[RowExplanation]:
    """What touched a row, in each session that has it."""
    tools = looking(made)
    key = parse_row_key(tools.runner, row)
    found = records_by_session(MemoryLookup(made), key, session, None)
    return [
        RowExplainer(tools, head_of(made), key).run(place, rows) for place, rows in found.items()
    ]


def hunted(
    made: MemoryStream, name: str, invariant: str, partition: Partition = A0, **more: Any
) -> BisectResult:
    """Where an invariant breaks."""
    gone = way(made, name, partition)
    gone.begin_at_or_after(0)
    expression = parse_expression(invariant, INVARIANT_NAMES)
    return Bisection(gone, expression.is_true, uses_state="state" in expression.names).run(
        gone.next_offset, gone.committed_end, **more
    )
