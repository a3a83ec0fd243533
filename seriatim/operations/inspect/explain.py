"""Explain: the messages that made one row of the output. It reads and changes nothing.

The records of the row say which messages changed it. The session's messages are folded again as
well. For the table machine that also shows messages that named the row and left no record: they
were set aside, dropped, headless, or contradicted.

Next: operations/inspect/session_replay.py folds; storage/record_query.py finds records;
cli/explain.py shows the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct, field

from seriatim.engine.machine import Runner
from seriatim.engine.messages import Poison
from seriatim.engine.offsets import Partition
from seriatim.engine.records import Record
from seriatim.engine.session import Session
from seriatim.engine.table import (
    TableMachine,
    column_type,
    describe_misfit,
    normalize_values,
    rfc3339,
)
from seriatim.errors import ConfigError
from seriatim.ledger.manifests import LedgerHead
from seriatim.operations.inspect.session_replay import SessionReplay
from seriatim.operations.inspect.tracing import SessionMessage, TraceStep
from seriatim.operations.inspect.views import plain_view_of_message
from seriatim.ports import OpenStream, ProgressCallback

RecordsByOffset = dict[int, list[Record]]


class RecordQueryPort(Protocol):
    """A search for committed records by values in their columns."""

    def find_records(self, column_values: Mapping[str, Any]) -> Iterator[Record]:
        """Records that have these values, in any order."""
        ...


class RowTouch(Struct, kw_only=True):
    """A message that touched a row, or tried to."""

    offset: int
    timestamp: int | None = None
    sequence: int | None = None
    outcome: str = ""
    message: Any = None
    """The message as it was sent; None: Kafka has it no longer."""
    records: list[Record] = field(default_factory=list)
    findings: list[dict[str, str]] = field(default_factory=list)


class RowExplanation(Struct, kw_only=True):
    """All messages that touched a row of one session, and the row."""

    session: str
    partition: Partition
    topic_id: str
    touches: list[RowTouch] = field(default_factory=list)
    value: Record | None = None
    """The row as it is now; None: it is deleted, or never was there."""
    notes: list[str] = field(default_factory=list)


def parse_row_key(runner: Runner, text: str) -> Record:
    """Parse a row's key as a person types it.

    It is one value, or several: with commas between them, or as a list in JSON. A ConfigError is
    raised if the values do not fit the key's columns, or if the machine's records have no key.
    """
    if runner.row_key_spec is None:
        raise ConfigError(
            f"the records of machine {runner.name} name no row",
            next="give the record's Struct a row_key, as STREAMS.md says",
        )
    names = runner.row_key_spec.key
    value_texts = [text]
    if len(names) > 1:
        value_texts = _split_key(text)
    if len(value_texts) != len(names):
        raise ConfigError(
            f"--row {text!r}: a row is named by {', '.join(names)}",
            next="give them with commas between, or as a list in JSON, like '[\"a,b\", 2]'",
        )
    key = {}
    for name, value_text in zip(names, value_texts, strict=True):
        key[name] = _parse_key_value(name, runner.columns[name], value_text)
    return key


def _split_key(text: str) -> list[str]:
    try:
        values = msgspec.json.decode(text, type=list[str | int | float | bool])
    except msgspec.MsgspecError:
        return text.split(",")
    value_texts = []
    for value in values:
        if isinstance(value, str):
            value_texts.append(value)
        else:
            value_texts.append(msgspec.json.encode(value).decode())
    return value_texts


def _parse_key_value(name: str, kind: str, text: str) -> Any:
    try:
        value = _convert_key_value(kind, text)
        # Bytes from a terminal that are no UTF-8 come as lone surrogates, which cannot be encoded.
        text.encode()
        problem = describe_misfit(kind, value)
    except (msgspec.ValidationError, ValueError) as error:
        problem = str(error)
    if problem:
        raise ConfigError(
            f"--row: {name} is {kind}, {text!r} is not: {problem}", next=f"give {name} as {kind}"
        ) from None
    return normalize_values({name: kind}, {name: value})[name]


def _convert_key_value(kind: str, text: str) -> Any:
    if kind == "string":
        return text
    if kind == "timestamp":
        text = rfc3339(text) or text
    return msgspec.convert(text, column_type(kind), strict=False)


def records_by_session(
    query: RecordQueryPort, key: Mapping[str, Any], session: str | None, topic: str | None
) -> dict[Any, list[Any]]:
    """The row's records in order, by topic, partition number, topic id and session."""
    column_values = dict(key)
    if session is not None:
        column_values["session"] = session
    if topic:
        column_values["topic"] = topic
    records: dict[Any, list[Any]] = {}
    for record in query.find_records(column_values):
        location = (
            record["topic"],
            record["partition"],
            record["topic_id"],
            record["session"],
        )
        records.setdefault(location, []).append(record)
    for session_records in records.values():
        session_records.sort(key=lambda record: (record["offset"], record["index"]))
    return dict(sorted(records.items()))


class RowExplainer:
    """One row, in one session."""

    def __init__(
        self,
        open_stream: OpenStream,
        head: LedgerHead,
        key: Mapping[str, Any],
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self.open_stream = open_stream
        self.on_progress = on_progress
        self.head = head
        self.key = dict(key)

    def run(
        self, location: tuple[str, int, str, str], rows: Sequence[Mapping[str, Any]]
    ) -> RowExplanation:
        """All messages that touched the row, oldest first."""
        topic, number, topic_id, session = location
        partition = Partition(topic, number)
        explanation = RowExplanation(
            session=session, partition=partition, topic_id=topic_id, value=self._last_value(rows)
        )
        records = _by_offset(rows)
        account = self.head.ledger.account(partition)
        if account is None or account.topic_id != topic_id:
            note = f"{topic} was made again since: its messages of then are gone"
            explanation.notes.append(note)
            explanation.touches = _touches_without_messages(records)
            return explanation
        try:
            replay = SessionReplay(
                self.open_stream, self.head, partition, session, self.on_progress
            )
            explanation.touches = self._find_touches(replay, records, explanation)
        except ConfigError as error:
            explanation.notes.append(f"messages are not shown: {error.message}")
            explanation.touches = _touches_without_messages(records)
        return explanation

    def _last_value(self, rows: Sequence[Mapping[str, Any]]) -> Record | None:
        """The row as its last record leaves it; None: the record deletes it."""
        key_spec = self.open_stream.runner.row_key_spec
        if not rows or key_spec is None:
            return None
        newest = rows[-1]
        if key_spec.deletes_row(newest):
            return None
        return {name: newest[name] for name in key_spec.columns}

    def _find_touches(
        self,
        replay: SessionReplay,
        records: RecordsByOffset,
        explanation: RowExplanation,
    ) -> list[RowTouch]:
        """Fold the session again, and trace each message that names the row or gave a record of it.

        Records from before the offset at which the fold can begin come without their messages.
        """
        start = self._start_offset(replay, records)
        replay.begin_at_or_after(start)
        begin_offset = replay.next_offset
        early_records = {offset: records[offset] for offset in records if offset < begin_offset}
        touches = _touches_without_messages(early_records)
        if begin_offset > start:
            explanation.notes.append(
                f"Kafka has messages that can be folded again from offset {begin_offset} on"
            )

        def touches_row(message: SessionMessage) -> bool:
            if message.offset in records:
                return True
            return self._names_row(replay.tracing_fold.decode_message(message.as_batch))

        for step in replay.steps(replay.committed_end, touches_row):
            touch = self._touch_from_step(step, records.get(step.offset, []))
            touches.append(touch)
        return touches

    def _start_offset(self, replay: SessionReplay, records: Mapping[int, Any]) -> int:
        """The offset from which on messages may touch the row."""
        name = replay.session_name
        saved_sessions = self.open_stream.state.load(replay.account.state, [name])
        session = saved_sessions.get(name) or Session()
        first_message_offset = replay.first_message_offset(session.first_offset)
        first_record_offset = min(records, default=replay.committed_end)
        return min(first_record_offset, first_message_offset)

    def _names_row(self, message: Any) -> bool:
        """Whether a message of the table machine names the row."""
        table = self.open_stream.runner
        if not isinstance(table, TableMachine) or message.__class__ is Poison:
            return False
        key_values = tuple(self.key[table.column_names[i]] for i in table.key_positions)
        return key_values in table.keys_named_by(message)

    def _touch_from_step(self, step: TraceStep, records: list[Record]) -> RowTouch:
        findings = [
            {"finding": finding.finding, "level": finding.level, "cause": finding.cause}
            for finding in step.findings
        ]
        return RowTouch(
            offset=step.offset,
            timestamp=step.timestamp,
            sequence=step.sequence,
            outcome=step.outcome,
            message=plain_view_of_message(self.open_stream.runner, step.message, step.raw),
            records=records,
            findings=findings,
        )


def _by_offset(rows: Sequence[Mapping[str, Any]]) -> RecordsByOffset:
    records: RecordsByOffset = {}
    for row in rows:
        records.setdefault(row["offset"], []).append(dict(row))
    return records


def _touches_without_messages(records: RecordsByOffset) -> list[RowTouch]:
    """What is known of messages that Kafka has no longer: their records, by offset."""
    touches = []
    for offset in sorted(records):
        sequence = records[offset][0].get("sequence")
        touch = RowTouch(
            offset=offset, outcome="applied", records=records[offset], sequence=sequence
        )
        touches.append(touch)
    return touches
