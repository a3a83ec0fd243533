"""Replay of a range: fold it again into files of its own, by any machine. It commits nothing, and
the stream does not know of it.

1. Choose where each partition begins: at the nearest saved state before the range, or without any
   state, as another machine needs it.
2. Fold stage by stage in this process. Losses that were passed over stay left out, and sessions
   that a person released are released again.
3. Return what was made; the caller writes it down.

As with a refold, records are made from the saved state on, so that records and state agree.

Next: operations/rewind.py chooses the state; operations/repair/refold.py does the same with a
commit; cli/replay.py chooses where the files go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import Certificate, File, Files, StateStore
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition, Ranges
from seriatim.engine.session import RefoldScope
from seriatim.engine.task import PartitionWork, TaskContext, TaskResult, find_work, run_task
from seriatim.errors import ConfigError, raise_broken_promise
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import Account
from seriatim.operations.rewind import (
    LedgerHistory,
    LossDetector,
    MessageLoss,
    PartitionHistory,
    RefoldRequest,
    Rewind,
    RewindChooser,
    StateFileCheck,
    find_readable_bounds,
    plan_stages,
    repeat_releases,
)
from seriatim.operations.run import WorkByPartition, fold_until_stable, result_of_hole
from seriatim.ports import DEFAULT_READ_OPTIONS, OpenStream, ProgressCallback, ReadOptions, Task

ReadBatches = Callable[[OffsetRange], Iterator[MessageBatch]]


class ReplayOutput(Struct, kw_only=True):
    """What a replay made from one partition."""

    partition: Partition
    topic_id: str
    requested_start: int
    start: int
    """Where records begin: at the saved state before the requested start."""
    until: int
    base_sequence: int
    """The ledger entry whose state it began with; -1: with no state."""
    messages: int = 0
    headless: int = 0
    findings: dict[str, int] = field(default_factory=dict)
    records: list[File] = field(default_factory=list)
    other_record_files: dict[str, list[File]] = field(default_factory=dict)
    state: Files = ()
    halt_reason: str = ""
    """Why it stopped before the end of the range; empty: it did not."""
    missing_messages: int = 0
    """Messages that were folded when it was committed, and that Kafka has no longer."""


class InProcessReader:
    """Reads Kafka in this process. It is the reader and the source that `fold_until_stable` needs."""

    def __init__(self, read: ReadBatches, ranges: Ranges) -> None:
        self.read = read
        self.ranges = ranges

    def read_slices(self, *_: Any) -> None:
        """Never called: a replay has its ranges and does not follow the log."""
        raise_broken_promise("a replay has ranges")

    def read_ranges(
        self,
        ranges: Ranges,
        options: ReadOptions = DEFAULT_READ_OPTIONS,  # noqa: ARG002  # headers are always read
    ) -> InProcessReader:
        """A source of these ranges."""
        return InProcessReader(self.read, ranges)

    def map(self, task: Task, *, has_small_messages: bool = False) -> list[bytes]:  # noqa: ARG002  # batches are bounded anyway
        """The task's result for each partition that has a message in its range."""
        results = []
        for partition, offset_range in sorted(self.ranges.items()):
            batches = self.read(offset_range)
            # A partition without a message has no task: `_fold_stage` makes a hole of it.
            first_batch = next(batches, None)
            if first_batch is not None:
                results.append(task(partition, offset_range, chain([first_batch], batches)))
        return results


class ReplayRun:
    """One replay of one stream."""

    def __init__(
        self,
        open_stream: OpenStream,
        head: LedgerHead,
        make_task_context: Callable[[Files], TaskContext],
        *,
        without_state: bool,
        messages_max: int = 200_000,
        progress: ProgressCallback | None = None,
    ) -> None:
        self.open_stream = open_stream
        self.head = head
        self.make_task_context = make_task_context
        self.without_state = without_state
        self.messages_max = messages_max
        self.on_progress = progress or (lambda _done, _total: None)
        self.bounds = open_stream.log.bounds(open_stream.stream.topics)
        self._state_check = StateFileCheck(open_stream.joiner)
        self.history = LedgerHistory(open_stream.ledger, head.ledger.stream)
        self.offsets_done = 0
        self.offsets_total = 0

    def earliest_start(self, partition: Partition) -> int:
        """The first offset from which a replay of the partition can begin."""
        account = self._account(partition)
        start = account.initial_frontier
        bounds = self.bounds.get(partition)
        if bounds is not None:
            start = max(start, bounds.log_start)
        if self.without_state:
            return start
        base = self._chooser(partition, start).first_base_from(start)
        return start if base is None else base.account.frontier

    def run(self, ranges: Ranges) -> Iterator[ReplayOutput]:
        """Replay the range of each partition, one after the other.

        All of them are checked before the first is folded; a ConfigError says what cannot be.
        """
        # 1. Choose where each partition begins.
        rewinds = [
            self._rewind_to_base(partition, offset_range)
            for partition, offset_range in sorted(ranges.items())
        ]
        self.offsets_total = sum(len(rewind.read_range) for rewind in rewinds)
        for rewind in rewinds:
            # 2. Fold stage by stage.
            output = ReplayOutput(
                partition=rewind.partition,
                topic_id=rewind.account.topic_id,
                requested_start=rewind.request.start,
                start=rewind.start,
                until=rewind.start,
                base_sequence=rewind.sequence,
            )
            self._fold_partition(rewind, output)
            # 3. Return what was made.
            yield output

    def _account(self, partition: Partition) -> Account:
        return self.head.ledger.account(partition) or raise_broken_promise(
            "a replay is of known partitions"
        )

    def _history(self, partition: Partition) -> PartitionHistory:
        self.history.read_on(self.head.ledger.sequence)
        return self.history.of_partition(partition)

    def _chooser(self, partition: Partition, log_start: int) -> RewindChooser:
        account = self._account(partition)
        return RewindChooser(
            account, log_start, self._history(partition), self._state_check.describe_damage
        )

    def _rewind_to_base(self, partition: Partition, offset_range: OffsetRange) -> Rewind:
        """Where the replay of a partition begins, and what has to be repeated on its way."""
        account = self._account(partition)
        log_start = self._checked_log_start(partition, account, offset_range)
        chooser = self._chooser(partition, log_start)
        request = RefoldRequest(
            partition=partition, start=offset_range.start, until=offset_range.end
        )
        if self.without_state:
            # The partition as it was before its first message: another machine begins with that.
            empty = Account(
                topic_id=account.topic_id,
                frontier=offset_range.start,
                initial_frontier=offset_range.start,
            )
            rewind = chooser.rewind(request, empty, -1, offset_range.end)
            return replace(rewind, releases_by_hand={}, swapped_ranges={})
        base = chooser.find_base(offset_range.start).point
        if base is None:
            raise self._no_base_error(partition, offset_range.start, chooser)
        return chooser.rewind(request, base.account, base.sequence, offset_range.end)

    def _checked_log_start(
        self, partition: Partition, account: Account, offset_range: OffsetRange
    ) -> int:
        """Where the partition begins in Kafka; a ConfigError if Kafka has not the whole range."""
        stream_name = self.open_stream.stream.name
        bounds, problem = find_readable_bounds(self.bounds, partition, account)
        if bounds is None:
            raise ConfigError(
                f"{stream_name}: topic {partition.topic} {problem}",
                next="name other partitions with --partition or --topic",
            )
        if offset_range.start < bounds.log_start or offset_range.end > bounds.log_end:
            raise ConfigError(
                f"{stream_name}: {partition}:"
                f" Kafka has [{bounds.log_start}, {bounds.log_end}), not {offset_range}",
                next="choose --from and --until within it",
            )
        return bounds.log_start

    def _no_base_error(
        self, partition: Partition, offset: int, chooser: RewindChooser
    ) -> ConfigError:
        begin_later = ""
        later_base = chooser.first_base_from(offset)
        if later_base is not None:
            begin_later = f"begin later with --from {later_base.account.frontier}, or "
        return ConfigError(
            f"{self.open_stream.stream.name}: {partition}:"
            f" no saved state at or before offset {offset} can be folded on:"
            f" Kafka has nothing before offset {chooser.log_start}",
            next=f"{begin_later}without any state with --fresh:"
            " sessions then begin by their snapshots",
        )

    def _fold_partition(self, rewind: Rewind, output: ReplayOutput) -> None:
        """Fold a partition stage by stage, until its end or a halt."""
        history = self._history(rewind.partition)
        task_context = self.make_task_context(rewind.base.state)
        message_time_ms = rewind.base.message_time_ms
        # Where these sessions moved to is not of interest here.
        moved_sessions = dict.fromkeys(history.moved_sessions(), "another partition")
        loss_detector = LossDetector(
            output.partition, history.slice_proofs(), self.open_stream.past_reader
        )
        # By range: a stage that is folded twice reports its losses twice.
        missing_messages: dict[OffsetRange, int] = {}

        def note_loss(loss: MessageLoss) -> None:
            missing_messages[loss.offset_range] = loss.missing_messages

        def read(offset_range: OffsetRange) -> Iterator[MessageBatch]:
            return loss_detector.read_and_detect(offset_range, note_loss)

        scope = None
        if rewind.swapped_ranges:
            scope = RefoldScope(swapped_ranges=rewind.swapped_ranges)
        self._repeat_releases(rewind, output, task_context.state)
        for number, stage in enumerate(plan_stages(rewind, self.messages_max)):
            # Each stage goes on with the state that the stage before it saved.
            work = PartitionWork(
                partition=output.partition,
                start=stage.offset_range.start,
                end=stage.offset_range.end,
                epoch=rewind.account.epoch,
                topic_id=output.topic_id,
                state=output.state,
                attempt=f"replay{number}",
                moved_sessions=moved_sessions,
                message_time_ms=message_time_ms,
                headless_since=rewind.headless_since(stage.offset_range.start),
                scope=scope,
            )
            result = self._fold_stage(work, task_context, rewind.account, read)
            certificate = self._take_result(output, result, stage.offset_range)
            output.missing_messages = sum(missing_messages.values())
            message_time_ms = max(message_time_ms, certificate.message_time_ms)
            if output.halt_reason:
                return
            self._repeat_releases(rewind, output, task_context.state)

    def _repeat_releases(self, rewind: Rewind, output: ReplayOutput, state: StateStore) -> None:
        """Release the sessions again that a person released where the replay is now."""
        output.state = repeat_releases(
            rewind,
            output.until,
            self.open_stream.stream.tier,
            state,
            output.state,
            f"{rewind.account.epoch}-released-",
        )

    def _fold_stage(
        self, work: PartitionWork, task_context: TaskContext, account: Account, read: ReadBatches
    ) -> TaskResult:
        """Fold one stage; if it has no message at all, the result is that of a hole."""
        offset_range = OffsetRange(work.start, work.end)

        def make_task(works: WorkByPartition) -> Task:
            def task(
                partition: Partition, offset_range: OffsetRange, batches: Iterable[MessageBatch]
            ) -> bytes:
                return run_task(find_work(works, partition, offset_range), batches, task_context)

            return task

        reader = InProcessReader(read, {work.partition: offset_range})
        results = fold_until_stable(
            self.open_stream.stream.name,
            {work.partition: work},
            reader,
            reader,
            make_task,
            lambda *_: {},
        )
        result = results.get(work.partition)
        if result is not None:
            return result
        tier = self.open_stream.stream.tier
        return result_of_hole(work.partition, account, offset_range, task_context.explain, tier)

    def _take_result(
        self, output: ReplayOutput, result: TaskResult, offset_range: OffsetRange
    ) -> Certificate:
        """Add the result of a stage to the output, and return its certificate."""
        certificate = result.certificate or raise_broken_promise("a result without a certificate")
        output.until = certificate.until
        output.messages += certificate.counts.messages
        output.headless += certificate.counts.headless
        output.records += result.records
        for table, files in result.other_record_files.items():
            output.other_record_files.setdefault(table, []).extend(files)
        if result.state is not None:
            output.state = result.state
        for kind, count in certificate.counts.findings.items():
            output.findings[kind] = output.findings.get(kind, 0) + count
        if result.halt is not None:
            output.halt_reason = (
                f"{result.halt.finding} at offset {result.halt.offset}: {result.halt.cause}"
            )
        self.offsets_done += len(offset_range)
        self.on_progress(self.offsets_done, self.offsets_total)
        return certificate
