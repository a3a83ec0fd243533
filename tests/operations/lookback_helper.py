"""Traces, replays and bisections of streams in memory, for tests.

Next: memory_streams.py and repair_helper.py create the streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session
from seriatim.ledger.manifests import LedgerHead
from seriatim.operations.inspect.bisect import INVARIANT_NAMES, Bisection, BisectResult
from seriatim.operations.inspect.condition import parse_condition
from seriatim.operations.inspect.explain import (
    RowExplainer,
    RowExplanation,
    parse_row_key,
    records_by_session,
)
from seriatim.operations.inspect.session_replay import SessionReplay
from seriatim.operations.inspect.tracing import TraceStep
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0


def head_of(memory_stream: MemoryStream) -> LedgerHead:
    """The head of the stream's ledger."""
    head = memory_stream.ledger.head(memory_stream.stream.name)
    assert head is not None
    return head


def session_replay(
    memory_stream: MemoryStream, name: str = "s", partition: Partition = A0
) -> SessionReplay:
    """The replay of one session."""
    return SessionReplay(memory_stream.open(), head_of(memory_stream), partition, name)


def trace_steps(
    memory_stream: MemoryStream, name: str = "s", partition: Partition = A0, start: int = 0
) -> list[TraceStep]:
    """All steps of a session."""
    replay = session_replay(memory_stream, name, partition)
    replay.begin_at_or_after(start)
    return list(replay.steps(replay.committed_end))


def session_after(
    memory_stream: MemoryStream, offset: int, name: str = "s", partition: Partition = A0
) -> Session:
    """The session after the message at an offset, as it would be saved."""
    replay = session_replay(memory_stream, name, partition)
    replay.begin_at(offset + 1)
    replay.fold_to(offset + 1)
    return replay.tracing_fold.session_to_save()


def session_rows(
    memory_stream: MemoryStream, name: str, partition: Partition, start: int
) -> list[dict[str, Any]]:
    """The committed records of a session from an offset on, by offset and index: their own columns."""
    topic_id = memory_stream.accounts()[partition].topic_id
    rows = [
        row
        for row in memory_stream.rows(partition)
        if (row["session"], row["topic_id"]) == (name, topic_id)
    ]
    rows = [row for row in rows if row["offset"] >= start]
    rows.sort(key=lambda row: (row["offset"], row["index"]))
    columns = ("offset", "index", *memory_stream.machine().columns)
    return [{column: row[column] for column in columns} for row in rows]


class MemoryLookup:
    """Committed records of a stream in memory, by the values of their columns."""

    def __init__(self, memory_stream: MemoryStream) -> None:
        self.memory_stream = memory_stream

    def find_records(self, column_values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Records with these values."""
        for row in self.memory_stream.rows():
            if all(row[name] == value for name, value in column_values.items()):
                yield row


def explain_row(
    memory_stream: MemoryStream, row: str, session: str | None = None
) -> list[RowExplanation]:
    """The messages that touched a row, in each session that has it."""
    tools = memory_stream.open()
    key = parse_row_key(tools.runner, row)
    rows_by_session = records_by_session(MemoryLookup(memory_stream), key, session, None)
    return [
        RowExplainer(tools, head_of(memory_stream), key).run(session_place, rows)
        for session_place, rows in rows_by_session.items()
    ]


def run_bisection(
    memory_stream: MemoryStream, name: str, invariant: str, partition: Partition = A0, **limits: Any
) -> BisectResult:
    """Find the message at which an invariant breaks."""
    replay = session_replay(memory_stream, name, partition)
    replay.begin_at_or_after(0)
    condition = parse_condition(invariant, INVARIANT_NAMES)
    return Bisection(replay, condition.is_true, uses_state="state" in condition.names).run(
        replay.next_offset, replay.committed_end, **limits
    )
