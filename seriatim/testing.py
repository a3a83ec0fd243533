"""Test your own machines without a broker and without Spark, in milliseconds.

    from seriatim.testing import CRASH, fold

    def test_a_trade_takes_from_the_best_level() -> None:
        folded = fold(OrderBook, [Quote(price=10, size=5), CRASH, Trade(size=2)])
        assert folded.records == [Level(price=10, size=5), Level(price=10, size=3)]
        assert folded.state == Book(levels={10: 3})
        assert not folded.findings

`CRASH` in the list of messages ends the process there: the work so far is committed, the state is
written to bytes and read again, and a new machine takes over. Put it anywhere: a correct machine
gives the same records. `fold_table` does the same for the table machine. Messages are dicts, Structs
or bytes, or pairs (session, message) where a test has several sessions. With a decoder of yours
(`decoder=CommaSeparated`) they are bytes in its format; with Debezium's (`decoder="debezium"`) they
are payloads as dicts, or bytes. The real fold runs, over the fakes in
seriatim/memory.

Next: seriatim/memory has the fakes; `MemoryStream` joins them for tests of whole streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from seriatim.engine.decoding import Decoder, JsonDecoder
from seriatim.engine.findings import Finding, OnPoison, Tier
from seriatim.engine.machine import Machine, Runner, UserMachine
from seriatim.engine.offsets import Partition
from seriatim.engine.records import Record
from seriatim.engine.table import TableMachine
from seriatim.formats.avro import AvroValues
from seriatim.formats.debezium import DebeziumDecoder, debezium_decoder
from seriatim.memory import (
    MemoryBatches,
    MemoryChecker,
    MemoryClock,
    MemoryCurrent,
    MemoryDerived,
    MemoryDigests,
    MemoryFiles,
    MemoryKafka,
    MemoryLedger,
    MemoryMessage,
    MemoryPastReader,
    MemoryReader,
    MemoryRequests,
    MemorySchemas,
    MemorySight,
    MemoryStream,
    OpenMemoryStream,
)
from seriatim.stream import OutputSettings, Stream, parse_stream

__all__ = [
    "CRASH",
    "Crash",
    "Folded",
    "MemoryBatches",
    "MemoryChecker",
    "MemoryClock",
    "MemoryCurrent",
    "MemoryDerived",
    "MemoryDigests",
    "MemoryFiles",
    "MemoryKafka",
    "MemoryLedger",
    "MemoryMessage",
    "MemoryPastReader",
    "MemoryReader",
    "MemoryRequests",
    "MemorySchemas",
    "MemorySight",
    "MemoryStream",
    "OpenMemoryStream",
    "fold",
    "fold_table",
]

SESSION = "session"
TOPIC = "messages"


class Crash:
    """The type of `CRASH`."""

    def __repr__(self) -> str:
        return "CRASH"


CRASH: Final = Crash()
"""In a list of messages: the process ends here, and another one continues."""


class Folded(Struct, kw_only=True):
    """The result of folding a list of messages."""

    records: list[Any]
    """The machine's records in order: its own Structs; dicts for the table machine."""
    rows: list[Record]
    """The records as rows of the records table, with topic, offset, index, session and so on."""
    states: dict[str, Any]
    """The machine's state by session; `{"rows": [...]}` for the table machine."""
    findings: list[Finding]
    headless: int
    """How many messages came before the first snapshot of their session. They have no effect."""

    @property
    def state(self) -> Any:
        """The state of the only session; None if no session has begun."""
        if len(self.states) > 1:
            raise ValueError(f"there are several sessions, ask `states`: {', '.join(self.states)}")
        return next(iter(self.states.values()), None)


def fold(
    machine: type[Machine[Any, Any, Any]],
    messages: Iterable[Any],
    *,
    tier: Tier = "strict",
    sequence: str | None = None,
    on_poison: OnPoison = "quarantine",
    decoder: Callable[[], Decoder] = JsonDecoder,
) -> Folded:
    """Fold messages with a machine of yours. `decoder` is the class of their format."""
    stream = Stream(
        name="test",
        topics=TOPIC,
        machine=f"test:{machine.__name__}",
        tier=tier,
        sequence=sequence,
        on_poison=on_poison,
        output=OutputSettings(path="memory"),
    )

    def new_machine() -> UserMachine:
        return UserMachine(stream.machine, machine, sequence, decoder=decoder())

    runner = new_machine()
    world = MemoryStream(stream, new_machine)
    findings, headless = _produce_and_run(world, messages)
    rows = world.rows()
    typed_rows = [(row, runner.record_type) for row in rows]
    for record_type, other_kind in runner.other_record_types.items():
        typed_rows += [(row, record_type) for row in world.other_rows(other_kind.table)]
    typed_rows.sort(key=lambda typed_row: (typed_row[0]["offset"], typed_row[0]["index"]))
    return Folded(
        records=[_record_from_row(record_type, row) for row, record_type in typed_rows],
        rows=rows,
        states=_saved_states(world, runner),
        findings=findings,
        headless=headless,
    )


def _record_from_row(record_type: type[Any], row: Mapping[str, Any]) -> Any:
    """A row of a table as the Struct that it was written from."""
    fields = msgspec.structs.fields(record_type)
    return record_type(**{field.name: row[field.encode_name] for field in fields})


def fold_table(
    messages: Iterable[Any],
    *,
    key: Sequence[str],
    columns: Mapping[str, str],
    before: bool = False,
    tier: Tier = "strict",
    sequence: str | None = None,
    session: str = "key",
    on_poison: OnPoison = "quarantine",
    decoder: Callable[[], Decoder] | Literal["debezium"] = JsonDecoder,
    debezium: Mapping[str, Any] | None = None,
    schemas: MemorySchemas | None = None,
) -> Folded:
    """Fold messages with the table machine.

    `decoder` is the class of their format, or "debezium", whose settings `debezium` has. `schemas`
    are those of Debezium's messages in Avro.
    """
    toml_values: dict[str, Any] = {
        "topics": TOPIC,
        "machine": "table",
        "tier": tier,
        "session": session,
        "on_poison": on_poison,
        "table": {"key": list(key), "columns": dict(columns), "before": before},
        "debezium": dict(debezium or {}),
        "output": {"path": "memory"},
    }
    if decoder == "debezium":
        toml_values["decoder"] = decoder
    if sequence:
        toml_values["sequence"] = sequence
    stream = parse_stream("test", toml_values, "fold_table")

    def new_machine() -> TableMachine:
        if decoder != "debezium":
            return stream.table_machine(decoder=decoder())
        open_avro = None if schemas is None else (lambda: AvroValues(schemas))
        return stream.table_machine(decoder=debezium_decoder(stream, open_avro))

    runner = new_machine()
    world = MemoryStream(stream, new_machine)
    findings, headless = _produce_and_run(world, messages)
    rows = world.rows()
    states = _saved_states(world, runner)
    return Folded(
        records=[{name: row[name] for name in runner.columns} for row in rows],
        rows=rows,
        states={name: runner.to_plain(state) for name, state in states.items()},
        findings=findings,
        headless=headless,
    )


def _produce_and_run(world: MemoryStream, messages: Iterable[Any]) -> tuple[list[Finding], int]:
    """Produce the messages before each crash, and run; the findings, and how many messages were
    headless.
    """
    world.kafka.create(TOPIC)
    is_json = isinstance(world.machine().decoder, JsonDecoder | DebeziumDecoder)
    findings: list[Finding] = []
    headless = 0
    for batch in _split_at_crashes(messages):
        for message in batch:
            session = SESSION
            value = message
            if isinstance(message, tuple):
                session, value = message
            world.kafka.produce(TOPIC, session, _encode_message(value, is_json))
        outcome = world.run()
        findings += outcome.findings
        headless += outcome.headless
    return findings, headless


def _split_at_crashes(messages: Iterable[Any]) -> list[list[Any]]:
    """The messages of each process, one after the other."""
    batches: list[list[Any]] = [[]]
    for message in messages:
        if message is CRASH:
            batches.append([])
        else:
            batches[-1].append(message)
    return batches


def _encode_message(message: Any, is_json: bool) -> bytes | None:
    if message is None or isinstance(message, bytes):
        return message
    if not is_json:
        raise TypeError(f"with a decoder of your own a message is bytes, not {message!r}")
    return msgspec.json.encode(message)


def _saved_states(world: MemoryStream, runner: Runner) -> dict[str, Any]:
    """The state of each session, as a new process would read it."""
    states = {}
    for name, session in world.sessions(Partition(TOPIC, 0)).items():
        if session.state_bytes is not None:
            states[name] = runner.load(session.state_bytes, session.state_version)
    return states
