"""Fold: slices from Kafka, through the machine, into one commit each, until caught up.

One slice, step by step, and what a crash after each leaves:

1. read the ledger and the witness; refuse code that would misread the state,
   and an open circuit where the stream says so                                nothing
2. discover topics; compare ids, log start and log end with the ledger         nothing
3. start reading from the frontier                                             a scratch directory
4. per partition, in a task: order proven, decoded, folded, files written      orphans
5. every planned range covered exactly; topics looked at again                 orphans
6. write the manifest                                                          an orphan
7. commit, compare-and-set                                                     the slice is done
8. witness; orphans swept; the tables gaps and quarantine                      they catch up next time

Next room: engine/task.py is step 4; ledger/commit.py is 6 to 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim import __version__
from seriatim.engine.crash_points import crash_point
from seriatim.engine.findings import Finding
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.task import PartitionWork, TaskResult, stem_prefix
from seriatim.errors import (
    BrokenPromiseError,
    FencedError,
    IntegrityError,
    PlatformError,
    ensure,
    raise_broken_promise,
)
from seriatim.ledger.commit import TRIES_MAX, catch_up_witness, commit, read_head, start_ledger
from seriatim.ledger.machine_version import refuse_incompatible_machine
from seriatim.ledger.model import Account, Entry, Halt, Ledger
from seriatim.ledger.verdicts import refuse_open_circuit
from seriatim.operations.ask_for_snapshots import request_snapshots_after_run
from seriatim.operations.changes import (
    birth_change,
    change_from_result,
    covers_range,
    discovery_changes,
    result_of_hole,
    unreadable_message_changes,
)
from seriatim.operations.derived_tables import catch_up_after_run
from seriatim.operations.moved_sessions import MovedSessions, find_moved_sessions
from seriatim.operations.plan import discover_topics
from seriatim.operations.read_options import ReadOptionsEstimator
from seriatim.operations.retry import fold_until_stable
from seriatim.operations.slicing import (
    Ranges,
    SlicePlan,
    cut_into_slices,
    next_slice_ranges,
    ranges_to_read,
)
from seriatim.operations.sweep import sweep_dead
from seriatim.ports import (
    Clock,
    DerivedStore,
    Explain,
    Joiner,
    LedgerHead,
    LedgerStore,
    Log,
    Reader,
    ReadOptions,
    RecordStore,
    SnapshotRequester,
    Source,
    SourceFailedError,
    StateStore,
    Task,
    UnreadableMessageError,
)
from seriatim.stream import Stream

SMALL_MESSAGE_BYTES = 2048
StopOffsets = Mapping[Partition, int]
ProgressCallback = Callable[[int, int], None]


class FoldContext(Struct, frozen=True, kw_only=True):
    """Everything outside that a fold touches."""

    log: Log
    reader: Reader
    explain: Explain
    ledger: LedgerStore
    records: RecordStore
    open_state: Callable[[], StateStore]
    """Made anew for each look: it keeps files open."""
    derived: DerivedStore
    joiner: Joiner
    clock: Clock
    make_task: Callable[[dict[Partition, PartitionWork]], Task]
    """A task for these works, to be run where the messages are."""
    new_attempt: Callable[[], str]
    snapshot_requester: SnapshotRequester | None = None
    """Where producers are asked for snapshots, if the stream wants that."""


class RunOutcome(Struct, kw_only=True):
    """What a run did."""

    messages: int = 0
    records: int = 0
    slices: int = 0
    headless: int = 0
    sequence: int = -1
    findings: list[Finding] = field(default_factory=list)
    """New in this run."""
    earlier_halts: list[tuple[Partition, Halt]] = field(default_factory=list)
    """Halted since earlier, told then."""
    quarantined: int = 0
    """Sessions in quarantine at the end."""
    foreign_sequence: int = -1
    """The entry that told of data others wrote to the records table, if that is not settled."""
    matched_partitions: int = 0
    """Known partitions that are there."""
    missing_partitions: list[Partition] = field(default_factory=list)
    """Known partitions that Kafka no longer has, or that match no more."""
    peak_memory_bytes: int = 0
    derived_error: str = ""
    """Why the derived tables are behind the ledger, for a person; empty: they are not."""
    snapshot_request_error: str = ""
    """Why producers were not asked for the snapshots that sessions need; empty: they were, or need
    not be.
    """


def _ignore_progress(_done: int, _total: int) -> None:
    """Nobody watches."""


class FoldRun:
    """One run over one stream."""

    def __init__(
        self,
        stream: Stream,
        runner: Runner,
        context: FoldContext,
        *,
        run_id: str = "",
        progress: ProgressCallback | None = None,
    ) -> None:
        self.stream, self.runner, self.context, self.run_id = stream, runner, context, run_id
        self.progress = progress or _ignore_progress
        self.read_options_estimator = ReadOptionsEstimator(context.log)
        self.outcome = RunOutcome()
        self.head = LedgerHead(Ledger(stream=stream.name))
        self.messages_total = self.messages_max = 0
        self.must_restart_reading = False
        """A partition halted or changed in mid-run: reading begins again without it."""

    def run(self, messages_max: int, until: StopOffsets | None = None) -> RunOutcome:
        """Fold until caught up with the log ends of now, or up to `until`."""
        self.messages_max = messages_max
        self._open_ledger()
        plan = self._discover()
        self._note_earlier_halts(plan)
        while ranges := ranges_to_read(plan, until, self.stream.name):
            self.messages_total = self.outcome.messages + sum(map(len, ranges.values()))
            try:
                self._read_slices(ranges, messages_max, has_stop_offsets=until is not None)
            except SourceFailedError as failure:
                plan = self._discover_after_failure(failure)
                continue
            except FencedError:
                if self._has_repair_intervened(ranges):
                    plan = self._discover()
                    continue
                self._refuse_if_work_remains(ranges)
                break
            if not self.must_restart_reading:
                break
            plan = self._discover()
        if self.outcome.slices:
            sweep_dead(self.context.ledger, self.context.records, self.head)
        self.outcome.derived_error = catch_up_after_run(
            self.context.ledger, self.context.derived, self.head.ledger
        )
        self.outcome.snapshot_request_error = request_snapshots_after_run(
            self.context.ledger, self.context.snapshot_requester, self.head.ledger
        )
        self.outcome.sequence = self.head.ledger.sequence
        self.outcome.missing_partitions = plan.missing_partitions
        self.outcome.matched_partitions = len(self.head.ledger.partitions) - len(
            plan.missing_partitions
        )
        self.outcome.foreign_sequence = self.head.ledger.foreign_sequence
        self.outcome.quarantined = sum(
            account.quarantined for account in self.head.ledger.partitions.values()
        )
        return self.outcome

    def _open_ledger(self) -> None:
        """Step 1. A stream without a ledger gets one: entry 0 names the partitions found."""
        stream, ledger = self.stream.name, self.context.ledger
        head = read_head(ledger, stream)
        crash_point("ledger-read")
        if head is None:
            plan = discover_topics(self.stream, self.context.log, Ledger(stream=stream))
            births = tuple(
                birth_change(partition, account, plan)
                for partition, account in plan.new_accounts.items()
            )
            head = start_ledger(
                ledger, self.context.clock, stream, self.context.new_attempt(), births
            )
            crash_point("table-created")
        runner = self.runner
        refuse_incompatible_machine(
            head.ledger, runner.name, runner.state_version, runner.can_upgrade, runner.shape
        )
        refuse_open_circuit(head.ledger, self.stream.on_check_failure)
        self.head = head
        catch_up_witness(ledger, head)

    def _discover(self) -> SlicePlan:
        """Step 2. What discovery finds is an entry of its own, so that it is found and told once."""
        for _ in range(TRIES_MAX):
            plan = discover_topics(self.stream, self.context.log, self.head.ledger)
            changes = tuple(discovery_changes(plan, self.head.ledger))
            try:
                if changes or self.head.foreign_findings:
                    self._commit(
                        Entry(kind="slice", attempt=self.context.new_attempt(), changes=changes),
                        plan.findings,
                    )
            except FencedError:
                self.head = self._read_head()
                continue
            crash_point("plan-made")
            return plan
        raise PlatformError(
            f"{self.stream.name}: other runs keep moving the ledger", next="run again"
        )

    def _discover_after_failure(self, failure: SourceFailedError) -> SlicePlan:
        """Reading broke. What discovery can confirm halts its partition; otherwise it is platform
        trouble.
        """
        before, self.head = self.head.ledger.partitions, self._read_head()
        plan = self._discover()
        if plan.findings or plan.skipped_ranges or self.head.ledger.partitions != before:
            return plan
        try:
            if isinstance(failure, UnreadableMessageError) and self._fold_up_to_unreadable(plan):
                return self._discover()
        except SourceFailedError as again:
            failure = again
        raise PlatformError(
            f"{self.stream.name}: reading from Kafka broke",
            cause=str(failure)[:600],
            next="check the broker and Spark, then run again: it goes on from the last commit",
        )

    def _fold_up_to_unreadable(self, plan: SlicePlan) -> bool:
        """Fold up to messages that cannot be read, then halt there, or pass over them. Whether
        there are any.
        """
        ranges = next_slice_ranges(plan.ranges, self.messages_max)
        stops = self.context.log.first_unreadable_messages(ranges)
        for piece in cut_into_slices(
            {p: ranges[p].until(offset) for p, (offset, _) in stops.items()}, self.messages_max
        ):
            if not self._fold_slice(
                piece, self.context.reader.read_ranges(piece, self._read_options(piece))
            ):
                break
        changes, findings = unreadable_message_changes(
            stops, self.head.ledger, self.stream.on_poison
        )
        if changes:
            self._commit(
                Entry(kind="slice", attempt=self.context.new_attempt(), changes=changes), findings
            )
        return bool(stops)

    def _read_head(self) -> LedgerHead:
        return read_head(self.context.ledger, self.stream.name) or raise_broken_promise(
            "the ledger vanished in mid-run"
        )

    def _note_earlier_halts(self, plan: SlicePlan) -> None:
        for partition in plan.waiting_partitions:
            account = self.head.ledger.account(partition)
            if account is not None and account.halt is not None:
                self.outcome.earlier_halts.append((partition, account.halt))

    def _read_slices(self, ranges: Ranges, messages_max: int, *, has_stop_offsets: bool) -> None:
        """Step 3: AvailableNow from the frontier; exact ranges, cut by us, where an end is given."""
        self.must_restart_reading = False
        reader = self.context.reader
        if not has_stop_offsets:
            starts = {partition: whole.start for partition, whole in ranges.items()}
            return reader.read_slices(
                starts, messages_max, self._fold_slice, self._read_options(ranges)
            )
        for piece in cut_into_slices(ranges, messages_max):
            if not self._fold_slice(piece, reader.read_ranges(piece, self._read_options(piece))):
                return None
        return None

    def _read_options(self, ranges: Ranges) -> ReadOptions:
        return self.read_options_estimator.read_options(self.head.ledger, ranges, may_sample=True)

    def _fold_slice(self, ranges: Ranges, source: Source) -> bool:
        """Steps 4 to 8 for one slice. Whether reading may go on."""
        ranges = {partition: whole for partition, whole in ranges.items() if len(whole)}
        if not ranges:
            return True
        try:
            self._fold_and_commit(ranges, source)
        except (PlatformError, BrokenPromiseError, IntegrityError) as error:
            if self._is_overtaken(
                ranges
            ):  # whoever was first has swept our files: that is all it was
                raise FencedError(error.message) from error
            raise
        return not self.must_restart_reading

    def _fold_and_commit(self, ranges: Ranges, source: Source) -> None:
        attempt, began = self.context.new_attempt(), self.context.clock.now_seconds()
        results = self._run_tasks(ranges, source, attempt)
        crash_point("slice-folded")
        entry, findings = self._build_entry(ranges, results, attempt)
        if entry.changes:
            took = max(0.0, self.context.clock.now_seconds() - began)
            done = self._commit(replace(entry, took_seconds=took), findings)
            self._sweep(done)
            if self.runner.other_columns:  # a long run's further tables follow it slice by slice
                catch_up_after_run(self.context.ledger, self.context.derived, self.head.ledger)
            self._count_entry(done)
            self.must_restart_reading |= len(done.changes) < len(
                entry.changes
            )  # a repair holds some of them by now

    def _has_repair_intervened(self, ranges: Ranges) -> bool:
        """Whether a repair has come between: its partitions wait, or went on in a new epoch; the
        others go on.
        """
        before, self.head = [self._account(p) for p in ranges], self._read_head()
        now = [self._account(p) for p in ranges]
        return [(one.epoch, one.hold) for one in before] != [(one.epoch, one.hold) for one in now]

    def _is_overtaken(self, ranges: Ranges) -> bool:
        """Whether another run moved the frontier of a partition of this slice."""
        ledger = self._read_head().ledger
        accounts = {partition: ledger.account(partition) for partition in ranges}
        return any(
            account and account.frontier > ranges[p].start for p, account in accounts.items()
        )

    def _run_tasks(
        self, ranges: Ranges, source: Source, attempt: str
    ) -> dict[Partition, TaskResult]:
        """Step 4."""
        works = {
            partition: self._partition_work(partition, whole, attempt)
            for partition, whole in ranges.items()
        }
        small = (
            0
            < self.read_options_estimator.read_options(
                self.head.ledger, ranges
            ).average_message_bytes
            <= SMALL_MESSAGE_BYTES
        )
        world = self.context
        return fold_until_stable(
            self.stream.name,
            works,
            source,
            world.reader,
            world.make_task,
            self._find_moved_sessions,
            has_small_messages=small,
        )

    def _find_moved_sessions(
        self, works: dict[Partition, PartitionWork], results: dict[Partition, TaskResult]
    ) -> MovedSessions:
        state, has_snapshots = self.context.open_state(), self.runner.has_snapshots
        return find_moved_sessions(
            self.head.ledger, works, results, state, has_snapshots=has_snapshots
        )

    def _partition_work(
        self, partition: Partition, offset_range: OffsetRange, attempt: str
    ) -> PartitionWork:
        account = self._account(partition)
        if account.frontier != offset_range.start:
            raise FencedError(
                f"{self.stream.name}: another run moved the frontier while this one was folding",
                found=f"{partition} is at offset {account.frontier}, not {offset_range.start}",
                next="run again to go on from where the other one is",
            )
        return PartitionWork(
            partition=partition,
            start=offset_range.start,
            end=offset_range.end,
            epoch=account.epoch,
            topic_id=account.topic_id,
            state=account.state,
            message_time_ms=account.message_time_ms,
            headless_since=account.headless_since,
            attempt=attempt,
        )

    def _account(self, partition: Partition) -> Account:
        return self.head.ledger.account(partition) or raise_broken_promise(
            "a partition has an account before it is read"
        )

    def _build_entry(
        self, ranges: Ranges, results: dict[Partition, TaskResult], attempt: str
    ) -> tuple[Entry, list[Finding]]:
        """Step 5: all ranges accounted for, topics looked at again. A changed topic is not
        committed.
        """
        bounds = self.context.log.bounds(self.stream.topics)
        changes, findings, peak = [], [], 0
        for partition, whole in sorted(ranges.items()):
            account, seen = self._account(partition), bounds.get(partition)
            if seen is None or seen.topic_id != account.topic_id:
                self.must_restart_reading = True
                continue
            result = results.get(partition) or result_of_hole(
                partition, account, whole, self.context.explain, self.stream.tier
            )
            ensure(
                covers_range(result, whole),
                "a task accounts for its range",
                partition=str(partition),
            )
            changes.append(change_from_result(partition, account, result, seen.log_end))
            findings += result.findings
            peak = max(peak, result.peak_memory_bytes)
            self.must_restart_reading |= result.halt is not None
        return Entry(
            kind="slice", attempt=attempt, changes=tuple(changes), peak_memory_bytes=peak
        ), findings

    def _commit(self, entry: Entry, findings: list[Finding]) -> Entry:
        """Steps 6 to 8. Findings count as told with the entry that carries them. Returns it as
        committed.
        """
        entry = replace(
            entry,
            run=self.run_id,
            product_version=__version__,
            machine=self.runner.name,
            shape=self.runner.shape,
            state_version=self.runner.state_version,
            findings=tuple(findings),
        )
        self.head, done = commit(self.context.ledger, self.context.clock, self.head, entry)
        self.outcome.findings += done.findings
        return done

    def _sweep(self, entry: Entry) -> None:
        """Step 8: files of the same partition, epoch and start by other attempts are dead now."""
        for change in entry.changes:
            if change.until > change.frontier:
                named = {file.path for file in change.files()}
                self.context.records.sweep(
                    change.partition, stem_prefix(change.epoch, change.frontier), named
                )
        crash_point("swept")

    def _count_entry(self, entry: Entry) -> None:
        outcome = self.outcome
        for change in entry.changes:
            if change.certificate is not None:
                outcome.messages += change.certificate.counts.messages
                outcome.records += change.certificate.counts.records
                outcome.headless += change.certificate.counts.headless
        outcome.slices += 1
        outcome.peak_memory_bytes = max(outcome.peak_memory_bytes, entry.peak_memory_bytes)
        self.progress(outcome.messages, max(self.messages_total, outcome.messages))

    def _refuse_if_work_remains(self, ranges: Ranges) -> None:
        """Another run got there first. Fine, if it left nothing to do; else this run is refused."""
        self.head = self._read_head()
        for partition, wanted in ranges.items():
            account = self._account(partition)
            if account.halt is None and not account.retired and account.frontier < wanted.end:
                raise FencedError(
                    f"{self.stream.name}: another run moved the frontier while this one was folding",
                    found=f"{partition} is at offset {account.frontier}, {wanted.end - account.frontier} are left",
                    next="nothing of this slice was written; run again to go on from where the other one is",
                )
