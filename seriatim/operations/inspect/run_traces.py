"""Traces of a run: a few sessions are traced beside a real run, for the table `traces`.

The run's fold does not know of it. The messages pass through `ShadowTrace` on their way to the
fold, and a fold of its own folds those of the named sessions from the same state. The rows of a
try count only if the try does, and only up to the offset where it stopped. An error here ends the
trace and never the run.

Next: operations/inspect/tracing.py folds; context.py puts it between the reader and the task;
storage/traces.py writes the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from seriatim.engine.files import StateStore
from seriatim.engine.machine import Runner
from seriatim.engine.messages import TIMESTAMP_RANGE_MS, MessageBatch
from seriatim.engine.records import Record
from seriatim.engine.task import PartitionWork, TaskResult
from seriatim.operations.inspect.tracing import SessionMessage, TraceStep, TracingFold
from seriatim.operations.inspect.views import diff_states, plain_view_of_message
from seriatim.stream import Stream

ROWS_MAX = 10_000
"""Rows of one task, at most. A last row says how many more messages there were."""
TEXT_MAX = 10_000
"""The length of one column's text, in characters, at most."""
BYTES_MAX = 32 * 1024 * 1024
"""The size of one task's rows, at most. It is not exact, since text is counted by characters."""


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
        self.stream = stream
        self.runner = runner
        self.work = work
        self.state = state
        self.names = tuple(names)
        self.rows: list[Record] = []
        self.text_length = 0
        """Characters in all rows so far."""
        self.messages_left_out = 0
        self.first_offset_left_out = -1
        self.tracing_folds: list[TracingFold] | None = None
        """One for each named session; None until the first batch comes."""
        self.trouble = ""
        """Why the trace ended before the task did, in a sentence; empty: it did not."""

    def pass_through(self, batches: Iterable[MessageBatch]) -> Iterator[MessageBatch]:
        """Trace the messages of each batch, and hand the batch on."""
        for batch in batches:
            if not self.trouble:
                try:
                    self._trace_batch(batch)
                except Exception as error:  # noqa: BLE001  # no error of a trace may end the run
                    self._give_up(f"from offset {batch.start} on", error)
            yield batch

    def write_counting_rows(
        self, result_content: bytes, write: Callable[[list[Record]], None]
    ) -> None:
        """Write the rows that count. An error ends the trace, and not the run."""
        try:
            write(self.counting_rows(result_content))
        except Exception as error:  # noqa: BLE001  # a full disk, a row that Parquet cannot hold
            self._give_up("no row of it is kept", error)

    def counting_rows(self, result_content: bytes) -> list[Record]:
        """The rows up to where the task stopped; none if the task has no certificate."""
        result = msgspec.msgpack.decode(result_content, type=TaskResult)
        if result.certificate is None:
            return []
        until = result.certificate.until
        rows = [row for row in self.rows if row["offset"] < until]
        if 0 <= self.first_offset_left_out < until:
            rows.append(self._row_of_left_out_messages())
        rows.sort(key=lambda row: row["offset"])
        return rows

    def _row_of_left_out_messages(self) -> Record:
        """The row that stands for all messages that have no row."""
        names = ", ".join(self.names)
        # All rows have the same columns; those that this one has no value for are None.
        row: Record = dict.fromkeys(self.rows[0])
        row.update(self._partition_columns())
        row["offset"] = self.first_offset_left_out
        row["outcome"] = (
            f"left out: {self.messages_left_out} messages of {names} from here to the end of the"
            " task; seriatim trace folds them again"
        )
        return row

    def _give_up(self, scope: str, error: Exception) -> None:
        work = self.work
        traced_range = f"{work.partition} [{work.start}, {work.end})"
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        self.trouble = (
            f"{self.stream.name}: {traced_range} is not traced, {scope}: {reason}."
            " The run goes on; seriatim trace folds the messages again."
        )

    def _trace_batch(self, batch: MessageBatch) -> None:
        # Not in __init__: an error in loading the state must end the trace, and not the run.
        if self.tracing_folds is None:
            self.tracing_folds = self._new_tracing_folds()
        messages: list[tuple[SessionMessage, TracingFold]] = []
        for tracing_fold in self.tracing_folds:
            session_messages = tracing_fold.session_messages(batch)
            messages += [(message, tracing_fold) for message in session_messages]
        # By offset, so that what is left out lies behind all rows.
        messages.sort(key=lambda pair: pair[0].offset)
        for message, tracing_fold in messages:
            if len(self.rows) < ROWS_MAX and self.text_length < BYTES_MAX:
                self._add_row(tracing_fold.trace_message(message))
                continue
            self.messages_left_out += 1
            if self.first_offset_left_out < 0:
                self.first_offset_left_out = message.offset

    def _new_tracing_folds(self) -> list[TracingFold]:
        work = self.work
        saved_sessions = self.state.load(work.state, self.names)
        return [
            TracingFold(
                self.stream,
                self.runner,
                work.partition,
                name,
                saved_sessions.get(name),
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
        changes = diff_states(runner, step.before, step.after)
        texts = {
            "message": _json_text(plain_view_of_message(runner, step.message, step.raw)),
            "changes": _json_text([msgspec.structs.asdict(change) for change in changes]),
            "records": _json_text(step.records),
            "findings": _json_text(step.findings),
        }
        self.text_length += sum(map(len, texts.values()))
        row = self._partition_columns()
        row["offset"] = step.offset
        row["timestamp"] = _timestamp_us(step.timestamp)
        row["session"] = step.session
        row["sequence"] = step.sequence
        row["outcome"] = step.outcome
        row.update(texts)
        self.rows.append(row)


def _timestamp_us(timestamp_ms: int) -> int | None:
    """Milliseconds as microseconds; None of a time that the column cannot hold."""
    earliest_ms, latest_ms = TIMESTAMP_RANGE_MS
    if earliest_ms <= timestamp_ms <= latest_ms:
        return timestamp_ms * 1000
    return None


def _json_text(value: Any) -> str:
    """A value as JSON, cut at TEXT_MAX characters."""
    text = msgspec.json.encode(value, enc_hook=str).decode()
    if len(text) <= TEXT_MAX:
        return text
    return f"{text[:TEXT_MAX]}…"
