"""The kit for tests of your own machines: no broker, no Spark, milliseconds.

    from seriatim.testing import CRASH, fold

    def test_a_trade_takes_from_the_best_level() -> None:
        done = fold(OrderBook, [Quote(price=10, size=5), CRASH, Trade(size=2)])
        assert done.records == [Level(price=10, size=5), Level(price=10, size=3)]
        assert done.state == Book(levels={10: 3})
        assert not done.findings

`CRASH` in the list ends the process there: the work so far is committed, the state goes through
bytes, and a new machine takes over. Put it anywhere; a right machine gives the same records.
`fold_table` does the same for the stock machine. Messages are dicts, Structs or bytes; (session,
message) pairs where a test has several sessions. What runs is the real fold, over the fakes in
seriatim/adapters/memory.

Next room: adapters/memory has the fakes; `MemoryStream` joins them for tests of whole streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Final

import msgspec
from msgspec import Struct

from seriatim.engine.findings import Finding, OnPoison, Tier
from seriatim.engine.machine import Machine, Runner, UserMachine
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session
from seriatim.engine.task import PartitionWork, TaskContext, run_task
from seriatim.ledger.model import Account
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
    MemoryReader,
    MemoryRequests,
    MemorySight,
)
from seriatim.operations.run import FoldContext, FoldRun, RunOutcome, StopOffsets
from seriatim.ports import Task
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
    "MemoryReader",
    "MemoryRequests",
    "MemorySight",
    "MemoryStream",
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
"""In a list of messages: the process ends here, and another one goes on."""


class Folded(Struct, kw_only=True):
    """What a machine made of its messages."""

    records: list[Any]
    """What the machine gave, in order: its own Structs; dicts for the stock machine."""
    rows: list[dict[str, Any]]
    """The same as rows of the records table, with topic, offset, index, session and so on."""
    states: dict[str, Any]
    """By session: the machine's own state; `{"rows": [...]}` for the stock machine."""
    findings: list[Finding]
    headless: int
    """Messages before their session's first snapshot: they have no effect."""

    @property
    def state(self) -> Any:
        """The state of the only session; None if nothing began it."""
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
) -> Folded:
    """Run a machine of yours over messages, in order."""
    stream = Stream(
        name="test",
        topics=TOPIC,
        machine=f"test:{machine.__name__}",
        tier=tier,
        sequence=sequence,
        on_poison=on_poison,
        output=OutputSettings(path="memory"),
    )
    runner = UserMachine(stream.machine, machine, sequence)
    world = MemoryStream(stream, lambda: UserMachine(stream.machine, machine, sequence))
    findings, headless = _produce_and_run(world, messages)
    rows = world.rows()
    every = [(row, runner.record_type) for row in rows]
    every += [
        (row, kind)
        for kind, made in runner.other_record_types.items()
        for row in world.other_rows(made.table)
    ]
    every.sort(key=lambda one: (one[0]["offset"], one[0]["index"]))
    return Folded(
        records=[_record_from_row(kind, row) for row, kind in every],
        rows=rows,
        states={name: runner.load(*saved) for name, saved in _saved_states(world).items()},
        findings=findings,
        headless=headless,
    )


def _record_from_row(kind: type[Any], row: Mapping[str, Any]) -> Any:
    """A row of a table as the Struct that it was."""
    return kind(**{one.name: row[one.encode_name] for one in msgspec.structs.fields(kind)})


def fold_table(
    messages: Iterable[Any],
    *,
    key: Sequence[str],
    columns: Mapping[str, str],
    before: bool = False,
    tier: Tier = "strict",
    sequence: str | None = None,
    on_poison: OnPoison = "quarantine",
) -> Folded:
    """Run the stock machine over messages, in order."""
    stream = parse_stream(
        "test",
        {
            "topics": TOPIC,
            "machine": "table",
            "tier": tier,
            "on_poison": on_poison,
            "table": {"key": list(key), "columns": dict(columns), "before": before},
            "output": {"path": "memory"},
            **({"sequence": sequence} if sequence else {}),
        },
        "fold_table",
    )
    world, runner = MemoryStream(stream, stream.table_machine), stream.table_machine()
    findings, headless = _produce_and_run(world, messages)
    rows = world.rows()
    return Folded(
        records=[{name: row[name] for name in runner.columns} for row in rows],
        rows=rows,
        states={
            name: runner.to_plain(runner.load(*saved))
            for name, saved in _saved_states(world).items()
        },
        findings=findings,
        headless=headless,
    )


class MemoryStream:
    """A stream whose whole outside world is in memory: produce, run, look. `machine` makes its
    machine.
    """

    def __init__(self, stream: Stream, machine: Callable[[], Runner]) -> None:
        self.stream, self.machine = stream, machine
        self.kafka = MemoryKafka()
        self.reader = MemoryReader(self.kafka, stream.isolation)
        self.explain = MemoryBatches(self.kafka, stream.isolation)
        others = machine().other_columns
        self.files = MemoryFiles(machine().columns, others)
        self.ledger = MemoryLedger(self.files.read)
        self.derived = MemoryDerived(lambda file: self.files.read(file).rows, list(others))
        self.clock = MemoryClock()
        self.requests = MemoryRequests()
        self._attempts = count()

    def folding(self, runner: Runner | None = None) -> FoldRun:
        """One run, as a process of its own would make it: with a machine of its own."""
        runner = runner or self.machine()
        world = FoldContext(
            log=self.kafka,
            reader=self.reader,
            explain=self.explain,
            ledger=self.ledger,
            records=self.files,
            open_state=lambda: self.files,
            derived=self.derived,
            joiner=self.files,
            clock=self.clock,
            make_task=lambda works: self._make_task(works, runner),
            snapshot_requester=self.requests if self.stream.snapshot_requests else None,
            new_attempt=lambda: f"a{next(self._attempts)}",
        )
        return FoldRun(self.stream, runner, world)

    def run(self, messages_max: int = 1_000_000, until: StopOffsets | None = None) -> RunOutcome:
        """Fold until caught up."""
        return self.folding().run(messages_max, until)

    def _make_task(self, works: dict[Partition, PartitionWork], runner: Runner) -> Task:
        kit = TaskContext(
            runner=runner,
            tier=self.stream.tier,
            on_poison=self.stream.on_poison,
            limits=self.stream.limits,
            has_session_field=self.stream.session_field is not None,
            records=self.files,
            state=self.files,
            explain=self.explain,
            digests=MemoryDigests,
            peak_memory_bytes=lambda: 0,
        )
        return lambda partition, stretches: run_task(works[partition], stretches, kit)

    def rows(self, partition: Partition | None = None) -> list[dict[str, Any]]:
        """The committed records, in the order in which they were committed."""
        rows = [row for file in self.ledger.files_now() for row in self.files.read(file).rows]
        place = partition and (partition.topic, partition.number)
        return [row for row in rows if place in (None, (row["topic"], row["partition"]))]

    def other_rows(self, table: str) -> list[dict[str, Any]]:
        """The committed records of one of the machine's other tables, by entry."""
        return [
            row for file in self.derived.outputs.files(table) for row in self.files.read(file).rows
        ]

    def accounts(self) -> dict[Partition, Account]:
        """What the ledger knows of each partition."""
        head = self.ledger.head(self.stream.name)
        return (
            {}
            if head is None
            else {Partition.parse(p): a for p, a in head.ledger.partitions.items()}
        )

    def sessions(self, partition: Partition) -> dict[str, Session]:
        """The committed sessions of a partition, their state still as bytes."""
        return self.files.load_all(self.accounts()[partition].state)


def _produce_and_run(world: MemoryStream, messages: Iterable[Any]) -> tuple[list[Finding], int]:
    """Produce what comes before each crash and run; the findings, and how many were headless."""
    world.kafka.create(TOPIC)
    findings: list[Finding] = []
    headless = 0
    for part in _split_at_crashes(messages):
        for message in part:
            session, value = message if isinstance(message, tuple) else (SESSION, message)
            world.kafka.produce(TOPIC, session, _encode_message(value))
        outcome = world.run()
        findings += outcome.findings
        headless += outcome.headless
    return findings, headless


def _split_at_crashes(messages: Iterable[Any]) -> list[list[Any]]:
    parts: list[list[Any]] = [[]]
    for message in messages:
        if message is CRASH:
            parts.append([])
        else:
            parts[-1].append(message)
    return parts


def _encode_message(message: Any) -> bytes | None:
    return (
        message if message is None or isinstance(message, bytes) else msgspec.json.encode(message)
    )


def _saved_states(world: MemoryStream) -> dict[str, tuple[bytes, int]]:
    return {
        name: (session.state_bytes, session.state_version)
        for name, session in world.sessions(Partition(TOPIC, 0)).items()
        if session.state_bytes is not None
    }
