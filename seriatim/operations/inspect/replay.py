"""Replay: a range folded again into files of its own, by any machine. Never commits: the stream
does not know of it.

1. choose where each partition begins: the nearest saved state before, or no state at all (another machine)
2. fold stage by stage in this process, with what a forward passed over left out, and whom a person released released
3. hand back what was made, for whoever writes it down

As with a refold, records are made from the saved state on, so that records and state agree.

Next room: operations/repair/refold.py is the same with a commit; cli/replay_range.py says where the
files go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.task import PartitionWork, TaskContext, TaskResult, run_task
from seriatim.errors import ConfigError, IntegrityError, raise_broken_promise
from seriatim.ledger.history import PartitionHistory
from seriatim.ledger.model import Account, File
from seriatim.operations.changes import result_of_hole
from seriatim.operations.inspect.session_replay import ReplayContext
from seriatim.operations.release import can_be_released, clear_finding
from seriatim.operations.repair.lost_messages import LossDetector
from seriatim.operations.repair.refold_rules import RefoldRequest, Rewind, plan_stages
from seriatim.operations.repair.rewind import histories_as_of
from seriatim.operations.retry import WorkByPartition, fold_until_stable
from seriatim.operations.slicing import Bounds, Ranges
from seriatim.ports import DEFAULT_READ_OPTIONS, LedgerHead, ReadOptions, StateStore, Task

ProgressCallback = Callable[[int, int], None]
ReadBatches = Callable[[OffsetRange], Iterator[MessageBatch]]


class ReplayOutput(Struct, kw_only=True):
    """What a replay made of one partition."""

    partition: Partition
    topic_id: str
    requested_start: int
    start: int
    """Where records begin: at the saved state before what was asked for."""
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
    """Why it went no further."""
    missing_messages: int = 0
    """Messages that were folded when it was committed, and that Kafka has no longer."""


class InProcessReader:
    """Kafka read plainly, in this process: what `fold_until_stable` needs of a reader."""

    def __init__(self, read: ReadBatches, ranges: Ranges) -> None:
        self.read, self.ranges = read, ranges

    def read_slices(self, *_: Any) -> None:
        """A replay never follows: it has its ranges."""
        raise_broken_promise("a replay has ranges")

    def read_ranges(
        self, ranges: Ranges, options: ReadOptions = DEFAULT_READ_OPTIONS
    ) -> InProcessReader:  # headers are always there
        """These ranges and no others."""
        return InProcessReader(self.read, ranges)

    def map(self, task: Task, *, has_small_messages: bool = False) -> list[bytes]:  # noqa: ARG002  # stretches are bounded anyway
        """The task's answer for each partition of which a message comes."""
        done = []
        for partition, whole in sorted(self.ranges.items()):
            stretches = self.read(whole)
            first = next(stretches, None)
            if first is not None:
                done.append(task(partition, chain([first], stretches)))
        return done


class ReplayRun:
    """One replay, of one stream."""

    def __init__(
        self,
        context: ReplayContext,
        head: LedgerHead,
        make_task_context: Callable[[tuple[File, ...]], TaskContext],
        *,
        without_state: bool,
        messages_max: int = 200_000,
        progress: ProgressCallback | None = None,
    ) -> None:
        self.context, self.head, self.make_task_context, self.without_state = (
            context,
            head,
            make_task_context,
            without_state,
        )
        self.messages_max, self.on_progress = messages_max, progress or (lambda _done, _total: None)
        self.bounds = context.log.bounds(context.stream.topics)
        self.offsets_done = self.offsets_total = 0

    def earliest_start(self, partition: Partition) -> int:
        """Where a replay of all that can be folded again begins."""
        account = self.head.ledger.account(partition) or raise_broken_promise(
            "a replay is of known partitions"
        )
        seen = self.bounds.get(partition)
        start = (
            account.initial_frontier
            if seen is None
            else max(account.initial_frontier, seen.log_start)
        )
        if self.without_state:
            return start
        past = histories_as_of(self.context.ledger, self.head, [partition])[partition]
        reach = (point.account for point in past.commit_points(start, account.frontier))
        return next((one.frontier for one in reach if self._can_load(one)), start)

    def run(self, ranges: dict[Partition, OffsetRange]) -> Iterator[ReplayOutput]:
        """Each partition's range, one after the other."""
        known = histories_as_of(self.context.ledger, self.head, ranges)
        begun = [
            self._begin_partition(partition, whole, known[partition])
            for partition, whole in sorted(ranges.items())
        ]
        self.offsets_total = sum(len(rewind.read_range) for rewind, _ in begun)
        for rewind, made in begun:
            self._fold_partition(rewind, made, known[rewind.partition])
            yield made

    def _begin_partition(
        self, partition: Partition, offset_range: OffsetRange, past: PartitionHistory
    ) -> tuple[Rewind, ReplayOutput]:
        account = self.head.ledger.account(partition) or raise_broken_promise(
            "a replay is of known partitions"
        )
        seen = self._checked_bounds(partition, account, offset_range)
        sequence, base = (
            (-1, _empty_account(account, offset_range))
            if self.without_state
            else self._find_base(partition, offset_range, past, seen)
        )
        rewind = Rewind(
            request=RefoldRequest(
                partition=partition, start=offset_range.start, until=offset_range.end
            ),
            account=account,
            base=base,
            sequence=sequence,
            frontier=offset_range.end,
            commit_offsets=(offset_range.end,),
            releases_by_hand={} if self.without_state else past.releases_by_hand(),
            passed_ranges=tuple(
                lost
                for lost in past.passed_ranges()
                if base.frontier < lost.end <= offset_range.end
            ),
        )
        made = ReplayOutput(
            partition=partition,
            topic_id=account.topic_id,
            requested_start=offset_range.start,
            start=base.frontier,
            until=base.frontier,
            base_sequence=sequence,
        )
        return rewind, made

    def _checked_bounds(
        self, partition: Partition, account: Account, offset_range: OffsetRange
    ) -> Bounds:
        seen, stream = self.bounds.get(partition), self.context.stream.name
        if seen is None or seen.topic_id != account.topic_id:
            raise ConfigError(
                f"{stream}: {partition}: the messages that were folded are not in Kafka any more",
                next="name other partitions with --partition or --topic",
            )
        if offset_range.start < seen.log_start or offset_range.end > seen.log_end:
            raise ConfigError(
                f"{stream}: {partition}: Kafka has [{seen.log_start}, {seen.log_end}), not {offset_range}",
                next="choose --from and --until within it",
            )
        return seen

    def _find_base(
        self,
        partition: Partition,
        offset_range: OffsetRange,
        past: PartitionHistory,
        bounds: Bounds,
    ) -> tuple[int, Account]:
        for point in past.usable_points(offset_range.start):
            if point.account.frontier < bounds.log_start:
                break
            if self._can_load(point.account):  # else it is swept or damaged: an earlier one will do
                return point.sequence, point.account
        later = (
            point.account
            for point in past.commit_points(
                offset_range.start, self.head.ledger.partitions[str(partition)].frontier
            )
        )
        at = next((one.frontier for one in later if self._can_load(one)), None)
        raise ConfigError(
            f"{self.context.stream.name}: {partition}: no saved state at or before offset {offset_range.start} can be folded"
            f" on: Kafka has nothing before offset {bounds.log_start}",
            next=f"{'' if at is None else f'begin later with --from {at}, or '}without any state with --fresh: sessions"
            " then begin by their snapshots",
        )

    def _can_load(self, account: Account) -> bool:
        try:
            self.context.state.load(account.state, [""])
        except IntegrityError:
            return False
        return True

    def _fold_partition(self, rewind: Rewind, output: ReplayOutput, past: PartitionHistory) -> None:
        kit, time = self.make_task_context(rewind.base.state), rewind.base.message_time_ms
        moved = {
            session: "another partition"
            for finding, _, session in past.reported_findings
            if finding == "moved session"
        }
        losses, gone = (
            LossDetector(output.partition, past.slice_proofs(), self.context.past_reader),
            dict[OffsetRange, int](),
        )

        def read(whole: OffsetRange) -> Iterator[MessageBatch]:
            return losses.read_and_detect(
                whole, lambda loss: gone.update({loss.offset_range: loss.missing_messages})
            )

        self._repeat_releases(output, rewind, kit.state)
        for number, stage in enumerate(plan_stages(rewind, self.messages_max)):
            work = PartitionWork(
                partition=output.partition,
                start=stage.offset_range.start,
                end=stage.offset_range.end,
                epoch=rewind.account.epoch,
                topic_id=output.topic_id,
                state=output.state,
                attempt=f"replay{number}",
                moved_sessions={name: home for name, home in moved.items() if name is not None},
                message_time_ms=time,
                headless_since=rewind.headless_since(stage.offset_range.start),
            )
            result = self._fold_stage(work, kit, rewind.account, read)
            self._take_result(output, result, stage.offset_range)
            output.missing_messages = sum(gone.values())
            time = max(time, result.certificate.message_time_ms if result.certificate else -1)
            if output.halt_reason:
                return
            self._repeat_releases(output, rewind, kit.state)

    def _fold_stage(
        self, work: PartitionWork, task_context: TaskContext, account: Account, read: ReadBatches
    ) -> TaskResult:
        ranges = {work.partition: OffsetRange(work.start, work.end)}

        def task(works: WorkByPartition) -> Task:
            return lambda partition, stretches: run_task(works[partition], stretches, task_context)

        reader = InProcessReader(read, ranges)
        results = fold_until_stable(
            self.context.stream.name, {work.partition: work}, reader, reader, task, lambda *_: {}
        )
        whole = ranges[work.partition]
        tier = self.context.stream.tier
        return results.get(work.partition) or result_of_hole(
            work.partition, account, whole, task_context.explain, tier
        )

    def _take_result(
        self, output: ReplayOutput, result: TaskResult, offset_range: OffsetRange
    ) -> None:
        certificate = result.certificate or raise_broken_promise("a result without a certificate")
        output.until = certificate.until
        output.messages += certificate.counts.messages
        output.headless += certificate.counts.headless
        output.records += result.records
        for table, files in result.other_record_files.items():
            output.other_record_files.setdefault(table, []).extend(files)
        output.state = output.state if result.state is None else result.state
        for kind, number in certificate.counts.findings.items():
            output.findings[kind] = output.findings.get(kind, 0) + number
        if result.halt is not None:
            output.halt_reason = (
                f"{result.halt.finding} at offset {result.halt.offset}: {result.halt.cause}"
            )
        self.offsets_done += len(offset_range)
        self.on_progress(self.offsets_done, self.offsets_total)

    def _repeat_releases(self, output: ReplayOutput, rewind: Rewind, state: StateStore) -> None:
        """Whom a person released here is released here again."""
        for at in rewind.stage_end_offsets(output.until):
            names = rewind.releases_by_hand.get(at, ()) if at > rewind.start else ()
            account = replace(rewind.account, headless_since=rewind.headless_since(at))
            held = {
                name: one
                for name, one in state.load(output.state, names).items()
                if can_be_released(one, account)
            }
            if held:
                freed = {
                    name: clear_finding(one, account, self.context.stream.tier)
                    for name, one in held.items()
                }
                stem = f"{rewind.account.epoch}-{at}-released"
                output.state = (*output.state, state.save(output.partition, stem, freed, ()))


def _empty_account(account: Account, offset_range: OffsetRange) -> Account:
    """A partition before its first message, as another machine finds it."""
    return Account(
        topic_id=account.topic_id, frontier=offset_range.start, initial_frontier=offset_range.start
    )
