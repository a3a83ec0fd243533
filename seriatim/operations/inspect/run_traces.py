"""Shadow: a few sessions traced beside a real run, where their messages are, for the table
`traces`.

The fold does not know of it: messages pass by on their way to it, and a trace of its own folds
those of the named sessions from the same state. What a try gave counts only if the try does, and
only up to where it stopped. Whatever goes wrong here ends the trace, and never the run.

Next room: operations/inspect/tracing.py folds; wiring.py puts it between the reader and the task;
storage/traces.py keeps the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from seriatim.engine.machine import Runner
from seriatim.engine.messages import TIMESTAMP_RANGE_MS, MessageBatch
from seriatim.engine.task import PartitionWork, TaskResult
from seriatim.operations.inspect.trace_step import TraceStep
from seriatim.operations.inspect.tracing import TracingFold
from seriatim.operations.inspect.views import diff_states, view_of_message
from seriatim.ports import StateStore
from seriatim.stream import Stream

ROWS_MAX = 10_000
"""Of one task. How many more messages there were is told by a last row."""
TEXT_MAX = 10_000
"""Of one column, in characters."""
BYTES_MAX = 32 * 1024 * 1024
"""Of one task, in all columns: nearly so many, since text is counted by characters."""


class ShadowTrace:
    """Traces of some sessions in one task."""

    def __init__(
        self,
        stream: Stream,
        runner: Runner,
        work: PartitionWork,
        state: StateStore,
        names: Iterable[str],
    ) -> None:
        self.stream, self.state, self.names = stream, state, tuple(names)
        self.runner, self.work, self.rows, self.messages_left_out = (
            runner,
            work,
            list[dict[str, Any]](),
            0,
        )
        self.text_length, self.first_offset_left_out = 0, -1
        self.tracing_folds: list[TracingFold] | None = None
        self.trouble = ""
        """Why the trace ended before the task did, in a sentence."""

    def pass_through(self, batches: Iterable[MessageBatch]) -> Iterator[MessageBatch]:
        """The same messages, looked at on their way."""
        for stretch in batches:
            if not self.trouble:
                try:
                    self._trace_batch(stretch)
                except Exception as error:  # noqa: BLE001  # whatever it is, it is not the run's
                    self._give_up(f"from offset {stretch.start} on", error)
            yield stretch

    def write_counting_rows(
        self, result_content: bytes, write: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        """Hand the rows that count to whoever keeps them."""
        try:
            write(self.counting_rows(result_content))
        except Exception as error:  # noqa: BLE001  # a full disk, a row that Parquet cannot hold
            self._give_up("no row of it is kept", error)

    def counting_rows(self, result_content: bytes) -> list[dict[str, Any]]:
        """The rows that count, by what the task says it did."""
        result = msgspec.msgpack.decode(result_content, type=TaskResult)
        if result.certificate is None:
            return []
        until, rows = result.certificate.until, self.rows
        if 0 <= self.first_offset_left_out < until:
            rows = [*rows, self._row_of_left_out_messages()]
        return sorted((row for row in rows if row["offset"] < until), key=lambda row: row["offset"])

    def _row_of_left_out_messages(self) -> dict[str, Any]:
        """The row that stands for all messages that are not told."""
        count = f"{self.messages_left_out} messages of {', '.join(self.names)} from here to the end of the task"
        told = f"left out: {count}; seriatim trace folds them again"
        return {
            **dict.fromkeys(self.rows[0]),
            **self._partition_columns(),
            "offset": self.first_offset_left_out,
            "outcome": told,
        }

    def _give_up(self, scope: str, error: Exception) -> None:
        self.trouble = (
            f"{self.stream.name}: {self.work.partition} [{self.work.start}, {self.work.end}) is not traced, {scope}:"
            f" {type(error).__name__}: {str(error)[:200]}. The run goes on; seriatim trace folds the messages again."
        )

    def _trace_batch(self, batch: MessageBatch) -> None:
        if self.tracing_folds is None:
            self.tracing_folds = self._new_tracing_folds()
        found = [
            (one.offset, retrace, one)
            for retrace in self.tracing_folds
            for one in retrace.session_messages(batch)
        ]
        for offset, retrace, one in sorted(found, key=lambda each: each[0]):
            if len(self.rows) < ROWS_MAX and self.text_length < BYTES_MAX:
                self._add_row(retrace.trace_message(one))
                continue
            self.messages_left_out += 1
            self.first_offset_left_out = (
                offset if self.first_offset_left_out < 0 else self.first_offset_left_out
            )

    def _new_tracing_folds(self) -> list[TracingFold]:
        work, held = self.work, self.state.load(self.work.state, self.names)
        return [
            TracingFold(
                self.stream,
                self.runner,
                work.partition,
                name,
                held.get(name),
                message_time_ms=work.message_time_ms,
                headless_since=work.headless_since,
                moved_sessions=work.moved_sessions,
            )
            for name in self.names
        ]

    def _partition_columns(self) -> dict[str, Any]:
        work = self.work
        return {
            "topic": work.partition.topic,
            "topic_id": work.topic_id,
            "partition": work.partition.number,
        }

    def _add_row(self, step: TraceStep) -> None:
        runner = self.runner
        texts = {
            "message": _text(view_of_message(runner, step.message, step.raw)),
            "changes": _text(
                [
                    msgspec.structs.asdict(one)
                    for one in diff_states(runner, step.before, step.after)
                ]
            ),
            "records": _text(step.records),
            "findings": _text(step.findings),
        }
        self.text_length += sum(map(len, texts.values()))
        self.rows.append(
            {
                **self._partition_columns(),
                "offset": step.offset,
                "timestamp": step.timestamp * 1000
                if TIMESTAMP_RANGE_MS[0] <= step.timestamp <= TIMESTAMP_RANGE_MS[1]
                else None,
                "session": step.session,
                "sequence": step.sequence,
                "outcome": step.outcome,
                **texts,
            }
        )


def _text(value: Any) -> str:
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…"
