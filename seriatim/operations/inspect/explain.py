"""Explain: one row of the output, back to the messages that made it. Reads, and changes nothing.

The records of the row say which messages changed it. For the stock machine the session's messages
are read again as well, so that those are told that named the row and left no record: set aside,
dropped, headless, or contradicted.

Next room: operations/inspect/session_replay.py folds; storage/record_query.py finds records;
cli/explain.py shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct, field
from msgspec.structs import astuple

from seriatim.engine.machine import Runner
from seriatim.engine.messages import Poison, plain_values
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session
from seriatim.engine.table import (
    TableMachine,
    column_type,
    describe_misfit,
    normalize_values,
    rfc3339,
)
from seriatim.errors import ConfigError
from seriatim.operations.inspect.session_replay import ReplayContext, SessionReplay
from seriatim.operations.inspect.trace_step import TraceStep
from seriatim.operations.inspect.tracing import SessionMessage
from seriatim.operations.inspect.views import view_of_message
from seriatim.ports import LedgerHead


class RecordQueryPort(Protocol):
    """Committed records, by what is in their columns."""

    def find_records(self, column_values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Records with these values, in any order."""
        ...


class RowTouch(Struct, kw_only=True):
    """A message that touched a row, or tried to."""

    offset: int
    timestamp: int | None = None
    sequence: int | None = None
    outcome: str = ""
    message: Any = None
    """None: Kafka has it no longer."""
    records: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, str]] = field(default_factory=list)


class RowExplanation(Struct, kw_only=True):
    """A row of one session."""

    session: str
    partition: Partition
    topic_id: str
    touches: list[RowTouch] = field(default_factory=list)
    value: dict[str, Any] | None = None
    """The row as it is; None: it is not there."""
    notes: list[str] = field(default_factory=list)


def parse_row_key(runner: Runner, text: str) -> dict[str, Any]:
    """A row's key as a person types it: one value, or several, with commas between or as a list in
    JSON.
    """
    if runner.row_key_spec is None:
        raise ConfigError(
            f"the records of machine {runner.name} name no row",
            next="give the record's Struct a row_key, as STREAMS.md says",
        )
    names = runner.row_key_spec.key
    parts = [text] if len(names) == 1 else _split_key(text)
    if len(parts) != len(names):
        raise ConfigError(
            f"--row {text!r}: a row is named by {', '.join(names)}",
            next="give them with commas between, or as a list in JSON, like '[\"a,b\", 2]'",
        )

    return {
        name: _parse_key_value(name, runner.columns[name], part)
        for name, part in zip(names, parts, strict=True)
    }


def _split_key(text: str) -> list[str]:
    try:
        listed = msgspec.json.decode(text, type=list[str | int | float | bool])
    except msgspec.MsgspecError:
        return text.split(",")
    return [one if isinstance(one, str) else msgspec.json.encode(one).decode() for one in listed]


def _parse_key_value(name: str, kind: str, text: str) -> Any:
    try:
        written = rfc3339(text) or text if kind == "timestamp" else text
        value = (
            text if kind == "string" else msgspec.convert(written, column_type(kind), strict=False)
        )
        text.encode()  # what no UTF-8 is in a terminal comes as half a character
        wrong = describe_misfit(kind, value)
    except (msgspec.ValidationError, ValueError) as error:
        wrong = str(error)
    if wrong:
        raise ConfigError(
            f"--row: {name} is {kind}, {text!r} is not: {wrong}", next=f"give {name} as {kind}"
        ) from None
    return normalize_values({name: kind}, {name: value})[name]


def records_by_session(
    query: RecordQueryPort, key: Mapping[str, Any], session: str | None, topic: str | None
) -> dict[Any, list[Any]]:
    """The row's records by topic, partition, life of the topic and session, in order."""
    match = {
        **key,
        **({"session": session} if session is not None else {}),
        **({"topic": topic} if topic else {}),
    }
    found: dict[Any, list[Any]] = {}
    for row in query.find_records(match):
        place = row["topic"], row["partition"], row["topic_id"], row["session"]
        found.setdefault(place, []).append(row)
    return {
        place: sorted(rows, key=lambda r: (r["offset"], r["index"]))
        for place, rows in sorted(found.items())
    }


class RowExplainer:
    """One row, in one session."""

    def __init__(self, context: ReplayContext, head: LedgerHead, key: Mapping[str, Any]) -> None:
        self.context, self.head, self.key = context, head, dict(key)

    def run(
        self, location: tuple[str, int, str, str], rows: Sequence[Mapping[str, Any]]
    ) -> RowExplanation:
        """All that touched it, oldest first."""
        topic, number, topic_id, session = location
        partition = Partition(topic, number)
        done = RowExplanation(
            session=session, partition=partition, topic_id=topic_id, value=self._last_value(rows)
        )
        records = _by_offset(rows)
        account = self.head.ledger.account(partition)
        if account is None or account.topic_id != topic_id:
            done.notes.append(f"{topic} was made again since: its messages of then are gone")
            done.touches = [_touch_without_message(at, records[at]) for at in sorted(records)]
            return done
        try:
            done.touches = self._find_touches(
                SessionReplay(self.context, self.head, partition, session), records, done
            )
        except ConfigError as error:
            done.notes.append(f"messages are not shown: {error.message}")
            done.touches = [_touch_without_message(at, records[at]) for at in sorted(records)]
        return done

    def _last_value(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The row as its last record leaves it."""
        keyed = self.context.runner.row_key_spec
        if not rows or keyed is None:
            return None
        last = rows[-1]
        gone = bool(keyed.deleted_when) and all(
            last[name] == value for name, value in keyed.deleted_when.items()
        )
        return None if gone else {name: last[name] for name in keyed.columns}

    def _find_touches(
        self,
        replay: SessionReplay,
        records: dict[int, list[dict[str, Any]]],
        explanation: RowExplanation,
    ) -> list[RowTouch]:
        """Fold the session again; at each message that names the row, or gave a record of it, look."""
        first = min(records, default=replay.committed_end)
        held = (
            self.context.state.load(replay.account.state, [replay.session_name]).get(
                replay.session_name
            )
            or Session()
        )
        start = min(first, replay.first_message_offset(held.first_offset))
        replay.begin_at_or_after(start)
        touches = [
            _touch_without_message(at, records[at])
            for at in sorted(records)
            if at < replay.next_offset
        ]
        if replay.next_offset > start:
            explanation.notes.append(
                f"Kafka has messages that can be folded again from offset {replay.next_offset} on"
            )

        def wanted(one: SessionMessage) -> bool:
            return one.offset in records or self._names_row(
                replay.tracing_fold.decode_message(one.as_batch)
            )

        touches += [
            self._touch_from_step(step, records.get(step.offset, []))
            for step in replay.chosen_steps(replay.committed_end, wanted)
        ]
        return touches

    def _names_row(self, message: Any) -> bool:
        """Whether a message of the stock machine names the row."""
        table = self.context.runner
        if not isinstance(table, TableMachine) or message.__class__ is Poison:
            return False
        wanted = [self.key[table.column_names[i]] for i in table.key_positions]
        rows = message.rows if message.__class__ is table.snapshot_struct else (message,)
        return any([astuple(row)[i] for i in table.key_positions] == wanted for row in rows)

    def _touch_from_step(self, step: TraceStep, records: list[dict[str, Any]]) -> RowTouch:
        return RowTouch(
            offset=step.offset,
            timestamp=step.timestamp,
            sequence=step.sequence,
            outcome=step.outcome,
            message=plain_values(view_of_message(self.context.runner, step.message, step.raw)),
            records=records,
            findings=[
                {"finding": one.finding, "level": one.level, "cause": one.cause}
                for one in step.findings
            ],
        )


def _by_offset(rows: Sequence[Mapping[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["offset"], []).append(dict(row))
    return found


def _touch_without_message(offset: int, records: list[dict[str, Any]]) -> RowTouch:
    return RowTouch(
        offset=offset, outcome="applied", records=records, sequence=records[0].get("sequence")
    )
