"""Replay of a range: fold it again into files of its own, by any machine. It commits nothing, and
the stream does not know of it.

1. Choose where each partition begins: at the nearest saved state before the range, or without any
   state, as another machine needs it.
2. Fold stage by stage in this process. Losses that were passed over stay left out, and sessions
   that a person released are released again.
3. Return what was made; the caller writes it down.

As with a refold, records are made from the saved state on, so that records and state agree.

Next: operations/repair/refold.py does the same with a commit; cli/replay.py chooses where the
files go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import File, StateStore
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Bounds, OffsetRange, Partition, Ranges
from seriatim.engine.task import PartitionWork, TaskContext, TaskResult, run_task
from seriatim.errors import ConfigError, IntegrityError, raise_broken_promise
from seriatim.ledger.history import PartitionHistory
from seriatim.ledger.model import Account
from seriatim.operations.release import can_be_released, clear_finding
from seriatim.operations.repair.lost_messages import LossDetector, MessageLoss
from seriatim.operations.repair.refold_rules import RefoldRequest, Rewind, plan_stages
from seriatim.operations.repair.rewind import histories_as_of
from seriatim.operations.run import WorkByPartition, fold_until_stable, result_of_hole
from seriatim.ports import DEFAULT_READ_OPTIONS, LedgerHead, OpenStream, ReadOptions, Task

ProgressCallback = Callable[[int, int], None]
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
    state: tuple[File, ...] = ()
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
                results.append(task(partition, chain([first_batch], batches)))
        return results


class ReplayRun:
    """One replay of one stream."""

    def __init__(
        self,
        open_stream: OpenStream,
        head: LedgerHead,
        make_task_context: Callable[[tuple[File, ...]], TaskContext],
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
        histories = histories_as_of(self.open_stream.ledger, self.head, [partition])
        first_loadable = self._first_loadable_offset(histories[partition], start, account.frontier)
        return start if first_loadable is None else first_loadable

    def run(self, ranges: dict[Partition, OffsetRange]) -> Iterator[ReplayOutput]:
        """Replay the range of each partition, one after the other.

        All of them are checked before the first is folded; a ConfigError says what cannot be.
        """
        histories = histories_as_of(self.open_stream.ledger, self.head, ranges)
        # 1. Choose where each partition begins.
        rewinds = [
            self._rewind_to_base(partition, offset_range, histories[partition])
            for partition, offset_range in sorted(ranges.items())
        ]
        self.offsets_total = sum(len(rewind.read_range) for rewind in rewinds)
        for rewind in rewinds:
            # 2. Fold stage by stage.
            output = self._empty_output(rewind)
            self._fold_partition(rewind, output, histories[rewind.partition])
            # 3. Return what was made.
            yield output

    def _account(self, partition: Partition) -> Account:
        return self.head.ledger.account(partition) or raise_broken_promise(
            "a replay is of known partitions"
        )

    def _first_loadable_offset(self, past: PartitionHistory, start: int, end: int) -> int | None:
        """The first offset from `start` to `end` with a saved state that can be loaded, if any."""
        for point in past.commit_points(start, end):
            if self._can_load(point.account):
                return point.account.frontier
        return None

    def _rewind_to_base(
        self, partition: Partition, offset_range: OffsetRange, past: PartitionHistory
    ) -> Rewind:
        """Where the replay of a partition begins, and what has to be repeated on its way."""
        account = self._account(partition)
        bounds = self._checked_bounds(partition, account, offset_range)
        if self.without_state:
            sequence = -1
            base = _empty_account(account, offset_range)
            releases_by_hand = {}
        else:
            sequence, base = self._find_base(partition, offset_range, past, bounds)
            releases_by_hand = past.releases_by_hand()
        passed_ranges = [
            lost_range
            for lost_range in past.passed_ranges()
            if base.frontier < lost_range.end <= offset_range.end
        ]
        return Rewind(
            request=RefoldRequest(
                partition=partition, start=offset_range.start, until=offset_range.end
            ),
            account=account,
            base=base,
            sequence=sequence,
            frontier=offset_range.end,
            commit_offsets=(offset_range.end,),
            releases_by_hand=releases_by_hand,
            passed_ranges=tuple(passed_ranges),
        )

    def _empty_output(self, rewind: Rewind) -> ReplayOutput:
        return ReplayOutput(
            partition=rewind.partition,
            topic_id=rewind.account.topic_id,
            requested_start=rewind.request.start,
            start=rewind.base.frontier,
            until=rewind.base.frontier,
            base_sequence=rewind.sequence,
        )

    def _checked_bounds(
        self, partition: Partition, account: Account, offset_range: OffsetRange
    ) -> Bounds:
        """What Kafka has of the partition; a ConfigError if that is not the whole range."""
        stream_name = self.open_stream.stream.name
        bounds = self.bounds.get(partition)
        if bounds is None or bounds.topic_id != account.topic_id:
            raise ConfigError(
                f"{stream_name}: {partition}: the messages that were folded are not in Kafka any more",
                next="name other partitions with --partition or --topic",
            )
        if offset_range.start < bounds.log_start or offset_range.end > bounds.log_end:
            raise ConfigError(
                f"{stream_name}: {partition}:"
                f" Kafka has [{bounds.log_start}, {bounds.log_end}), not {offset_range}",
                next="choose --from and --until within it",
            )
        return bounds

    def _find_base(
        self,
        partition: Partition,
        offset_range: OffsetRange,
        past: PartitionHistory,
        bounds: Bounds,
    ) -> tuple[int, Account]:
        """The nearest saved state at or before the range: its ledger sequence and its account."""
        for point in past.usable_points(offset_range.start):
            if point.account.frontier < bounds.log_start:
                break
            # A state that is deleted or damaged is no error here: an earlier one will do.
            if self._can_load(point.account):
                return point.sequence, point.account
        frontier = self._account(partition).frontier
        later_offset = self._first_loadable_offset(past, offset_range.start, frontier)
        begin_later = ""
        if later_offset is not None:
            begin_later = f"begin later with --from {later_offset}, or "
        raise ConfigError(
            f"{self.open_stream.stream.name}: {partition}:"
            f" no saved state at or before offset {offset_range.start} can be folded on:"
            f" Kafka has nothing before offset {bounds.log_start}",
            next=f"{begin_later}without any state with --fresh:"
            " sessions then begin by their snapshots",
        )

    def _can_load(self, account: Account) -> bool:
        try:
            # The name does not matter: loading checks the files, whatever is looked for in them.
            self.open_stream.state.load(account.state, [""])
        except IntegrityError:
            return False
        return True

    def _fold_partition(self, rewind: Rewind, output: ReplayOutput, past: PartitionHistory) -> None:
        """Fold a partition stage by stage, until its end or a halt."""
        task_context = self.make_task_context(rewind.base.state)
        message_time_ms = rewind.base.message_time_ms
        moved_sessions = _moved_sessions(past)
        loss_detector = LossDetector(
            output.partition, past.slice_proofs(), self.open_stream.past_reader
        )
        # By range: a stage that is folded twice reports its losses twice.
        missing_messages: dict[OffsetRange, int] = {}

        def note_loss(loss: MessageLoss) -> None:
            missing_messages[loss.offset_range] = loss.missing_messages

        def read(offset_range: OffsetRange) -> Iterator[MessageBatch]:
            return loss_detector.read_and_detect(offset_range, note_loss)

        self._repeat_releases(output, rewind, task_context.state)
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
            )
            result = self._fold_stage(work, task_context, rewind.account, read)
            self._take_result(output, result, stage.offset_range)
            output.missing_messages = sum(missing_messages.values())
            if result.certificate is not None:
                message_time_ms = max(message_time_ms, result.certificate.message_time_ms)
            if output.halt_reason:
                return
            self._repeat_releases(output, rewind, task_context.state)

    def _fold_stage(
        self, work: PartitionWork, task_context: TaskContext, account: Account, read: ReadBatches
    ) -> TaskResult:
        """Fold one stage; if it has no message at all, the result is that of a hole."""
        offset_range = OffsetRange(work.start, work.end)

        def make_task(works: WorkByPartition) -> Task:
            return lambda partition, batches: run_task(works[partition], batches, task_context)

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
    ) -> None:
        """Add the result of a stage to the output."""
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

    def _repeat_releases(self, output: ReplayOutput, rewind: Rewind, state: StateStore) -> None:
        """Release the sessions again that a person released at the offset where a stage ended."""
        for offset in rewind.stage_end_offsets(output.until):
            names: tuple[str, ...] = ()
            if offset > rewind.start:
                names = rewind.releases_by_hand.get(offset, ())
            account = replace(rewind.account, headless_since=rewind.headless_since(offset))
            released_sessions = {}
            for name, session in state.load(output.state, names).items():
                if can_be_released(session, account):
                    tier = self.open_stream.stream.tier
                    released_sessions[name] = clear_finding(session, account, tier)
            if released_sessions:
                stem = f"{rewind.account.epoch}-{offset}-released"
                file = state.save(output.partition, stem, released_sessions, ())
                output.state = (*output.state, file)


def _moved_sessions(past: PartitionHistory) -> dict[str, str]:
    """Sessions that were reported as moved. Where they moved to is not of interest here."""
    return {
        session: "another partition"
        for finding, _, session in past.reported_findings
        if finding == "moved session" and session is not None
    }


def _empty_account(account: Account, offset_range: OffsetRange) -> Account:
    """The account of a partition before its first message, with which another machine begins."""
    return Account(
        topic_id=account.topic_id, frontier=offset_range.start, initial_frontier=offset_range.start
    )
