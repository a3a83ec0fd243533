"""A whole stream in memory: produce messages, run, and look at the result.

`MemoryStream` is what outlives a process: the log, the files, the tables. `OpenMemoryStream` is what
one process works with.

Next: ports.py has `OpenStream`, which operations take; operations/run.py runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from itertools import count
from typing import Any

from seriatim.engine.files import Explain, StateStore
from seriatim.engine.machine import Runner
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.records import Record
from seriatim.engine.session import SessionsByName
from seriatim.engine.task import PartitionWork, TaskContext, find_work, run_task
from seriatim.ledger.model import Account
from seriatim.memory.files import MemoryDigests, MemoryFiles
from seriatim.memory.kafka import MemoryBatches, MemoryKafka, MemoryPastReader, MemoryReader
from seriatim.memory.ledger import MemoryClock, MemoryLedger
from seriatim.memory.outgoing import MemoryRequests
from seriatim.memory.tables import MemoryDerived
from seriatim.operations.run import FoldRun, RunOutcome, StopOffsets
from seriatim.ports import (
    Clock,
    DerivedStore,
    Joiner,
    LedgerStore,
    Log,
    PastMessageReader,
    Reader,
    RecordStore,
    Rewriter,
    SnapshotRequester,
    Task,
)
from seriatim.stream import Stream


class OpenMemoryStream:
    """What one process of a stream in memory works with. Implements `OpenStream`."""

    def __init__(self, memory_stream: MemoryStream, runner: Runner) -> None:
        self.stream: Stream = memory_stream.stream
        self.runner = runner
        self.log: Log = memory_stream.kafka
        self.reader: Reader = memory_stream.reader
        self.past_reader: PastMessageReader = MemoryPastReader(memory_stream.reader)
        self.explain: Explain = memory_stream.explain
        self.ledger: LedgerStore = memory_stream.ledger
        self.records: RecordStore = memory_stream.files
        self.state: StateStore = memory_stream.files
        self.joiner: Joiner = memory_stream.files
        self.rewriter: Rewriter = memory_stream.files
        self.derived: DerivedStore = memory_stream.derived
        self.clock: Clock = memory_stream.clock
        self.snapshot_requester: SnapshotRequester | None = None
        if self.stream.snapshot_requests:
            self.snapshot_requester = memory_stream.requests
        self._attempts = memory_stream.attempts

    def with_ports(self, **ports: Any) -> OpenMemoryStream:
        """The same with other ports, by name, in place of some of these."""
        other = copy(self)
        for name, port in ports.items():
            setattr(other, name, port)
        return other

    def open_state(self) -> StateStore:
        """The state files."""
        return self.state

    def make_task(self, works: dict[Partition, PartitionWork]) -> Task:
        """The task that folds these works, in this process."""
        context = TaskContext(
            runner=self.runner,
            tier=self.stream.tier,
            on_poison=self.stream.on_poison,
            limits=self.stream.limits,
            has_session_field=self.stream.session_field is not None,
            records=self.records,
            state=self.state,
            explain=self.explain,
            digests=MemoryDigests,
            peak_memory_bytes=self.peak_memory_bytes,
        )

        def task(
            partition: Partition, offset_range: OffsetRange, batches: Iterable[MessageBatch]
        ) -> bytes:
            return run_task(find_work(works, partition, offset_range), batches, context)

        return task

    def new_attempt(self) -> str:
        """The next name of an attempt."""
        return f"a{next(self._attempts)}"

    def peak_memory_bytes(self) -> int:
        """Nothing: memory is not measured in tests."""
        return 0


class MemoryStream:
    """A stream with everything outside it in memory. `machine` makes its machine."""

    def __init__(self, stream: Stream, machine: Callable[[], Runner]) -> None:
        self.stream = stream
        self.machine = machine
        self.kafka = MemoryKafka()
        self.reader = MemoryReader(self.kafka, stream.isolation)
        self.explain = MemoryBatches(self.kafka, stream.isolation)
        other_columns = machine().other_columns
        self.files = MemoryFiles(machine().columns, other_columns)
        self.ledger = MemoryLedger(self.files.read)
        self.derived = MemoryDerived(lambda file: self.files.read(file).rows, list(other_columns))
        self.clock = MemoryClock()
        self.requests = MemoryRequests()
        self.attempts = count()

    def open(self, runner: Runner | None = None) -> OpenMemoryStream:
        """Open the stream as a process of its own does, with its own machine."""
        return OpenMemoryStream(self, runner or self.machine())

    def folding(self, runner: Runner | None = None) -> FoldRun:
        """A run as in a process of its own."""
        return FoldRun(self.open(runner))

    def run(self, messages_max: int = 1_000_000, until: StopOffsets | None = None) -> RunOutcome:
        """Fold everything that waits."""
        return self.folding().run(messages_max, until)

    def rows(self, partition: Partition | None = None) -> list[Record]:
        """The committed records, in the order in which they were committed."""
        rows: list[Record] = []
        for file in self.ledger.files_now():
            rows += self.files.read(file).rows
        if partition is None:
            return rows
        return [row for row in rows if partition == Partition(row["topic"], row["partition"])]

    def other_rows(self, table: str) -> list[Record]:
        """The committed records of one of the machine's other tables, by entry."""
        rows = []
        for file in self.derived.outputs.files(table):
            rows += self.files.read(file).rows
        return rows

    def accounts(self) -> dict[Partition, Account]:
        """The ledger's account of each partition."""
        head = self.ledger.head(self.stream.name)
        if head is None:
            return {}
        accounts = head.ledger.partitions.items()
        return {Partition.parse(name): account for name, account in accounts}

    def sessions(self, partition: Partition) -> SessionsByName:
        """The committed sessions of a partition, their state still as bytes."""
        return self.files.load_all(self.accounts()[partition].state)
