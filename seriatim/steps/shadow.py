"""Shadow: a few sessions traced beside a real run, where their messages are, for the table `traces`.

The fold does not know of it: messages pass by on their way to it, and a trace of its own folds those of the named
sessions from the same state. What a try gave counts only if the try does, and only up to where it stopped. Whatever
goes wrong here ends the trace, and never the run.

Next room: core/trace.py folds; wiring.py puts it between the reader and the task; adapters/traces.py keeps the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from seriatim.core.looks import changes, view_of_message
from seriatim.core.machine import Runner
from seriatim.core.message import YEARS_MS, Stretch
from seriatim.core.step import Step
from seriatim.core.stream import Stream
from seriatim.core.trace import Retrace
from seriatim.ports import StateStore
from seriatim.steps.task import Result, Work

ROWS_MAX = 10_000
"""Of one task. How many more messages there were is told by a last row."""
TEXT_MAX = 10_000
"""Of one column, in characters."""
BYTES_MAX = 32 * 1024 * 1024
"""Of one task, in all columns: nearly so many, since text is counted by characters."""


class Shadow:
    """Traces of some sessions in one task."""

    def __init__(self, stream: Stream, runner: Runner, work: Work, state: StateStore, names: Iterable[str]) -> None:
        self.stream, self.state, self.names = stream, state, tuple(names)
        self.runner, self.work, self.rows, self.left_out = runner, work, list[dict[str, Any]](), 0
        self.held, self.first_left_out = 0, -1
        self.retraces: list[Retrace] | None = None
        self.trouble = ""
        """Why the trace ended before the task did, in a sentence."""

    def through(self, stretches: Iterable[Stretch]) -> Iterator[Stretch]:
        """The same messages, looked at on their way."""
        for stretch in stretches:
            if not self.trouble:
                try:
                    self._look(stretch)
                except Exception as error:  # noqa: BLE001  # whatever it is, it is not the run's
                    self._give_up(f"from offset {stretch.start} on", error)
            yield stretch

    def leave(self, content: bytes, put: Callable[[list[dict[str, Any]]], None]) -> None:
        """Hand the rows that count to whoever keeps them."""
        try:
            put(self.finish(content))
        except Exception as error:  # noqa: BLE001  # a full disk, a row that Parquet cannot hold
            self._give_up("no row of it is kept", error)

    def finish(self, content: bytes) -> list[dict[str, Any]]:
        """The rows that count, by what the task says it did."""
        result = msgspec.msgpack.decode(content, type=Result)
        if result.certificate is None:
            return []
        until, rows = result.certificate.until, self.rows
        if 0 <= self.first_left_out < until:
            rows = [*rows, self._last()]
        return sorted((row for row in rows if row["offset"] < until), key=lambda row: row["offset"])

    def _last(self) -> dict[str, Any]:
        """The row that stands for all messages that are not told."""
        count = f"{self.left_out} messages of {', '.join(self.names)} from here to the end of the task"
        told = f"left out: {count}; seriatim trace folds them again"
        return {**dict.fromkeys(self.rows[0]), **self._place(), "offset": self.first_left_out, "outcome": told}

    def _give_up(self, what: str, error: Exception) -> None:
        self.trouble = (
            f"{self.stream.name}: {self.work.partition} [{self.work.start}, {self.work.end}) is not traced, {what}:"
            f" {type(error).__name__}: {str(error)[:200]}. The run goes on; seriatim trace folds the messages again."
        )

    def _look(self, stretch: Stretch) -> None:
        if self.retraces is None:
            self.retraces = self._begun()
        found = [(one.offset, retrace, one) for retrace in self.retraces for one in retrace.met(stretch)]
        for offset, retrace, one in sorted(found, key=lambda each: each[0]):
            if len(self.rows) < ROWS_MAX and self.held < BYTES_MAX:
                self._take(retrace.step(one))
                continue
            self.left_out += 1
            self.first_left_out = offset if self.first_left_out < 0 else self.first_left_out

    def _begun(self) -> list[Retrace]:
        work, held = self.work, self.state.load(self.work.state, self.names)
        return [
            Retrace(
                self.stream,
                self.runner,
                work.partition,
                name,
                held.get(name),
                time=work.time,
                headless_since=work.headless_since,
                moved=work.moved,
            )
            for name in self.names
        ]

    def _place(self) -> dict[str, Any]:
        work = self.work
        return {"topic": work.partition.topic, "topic_id": work.topic_id, "partition": work.partition.number}

    def _take(self, step: Step) -> None:
        runner = self.runner
        texts = {
            "message": _text(view_of_message(runner, step.message, step.raw)),
            "changes": _text([msgspec.structs.asdict(one) for one in changes(runner, step.before, step.after)]),
            "records": _text(step.records),
            "findings": _text(step.findings),
        }
        self.held += sum(map(len, texts.values()))
        self.rows.append(
            {
                **self._place(),
                "offset": step.offset,
                "timestamp": step.timestamp * 1000 if YEARS_MS[0] <= step.timestamp <= YEARS_MS[1] else None,
                "session": step.session,
                "sequence": step.sequence,
                "outcome": step.outcome,
                **texts,
            }
        )


def _text(value: Any) -> str:
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…"
