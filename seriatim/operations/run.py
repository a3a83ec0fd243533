"""Run: fold a stream slice by slice, one commit per slice, until it is caught up.

The steps of a slice, and what a crash after each of them leaves behind:

1. read the ledger and the witness; refuse code that would misread the state,
   and an open circuit where the stream says so                                nothing
2. discover topics; compare ids, log start and log end with the ledger         nothing
3. start reading from the frontier                                             a scratch directory
4. per partition, in a task: check the order, decode, fold, write files        orphans
5. check that every planned range is covered; look at the topics again         orphans
6. write the manifest                                                          an orphan
7. commit by compare-and-set                                                   the slice is done
8. move the witness; sweep orphans; update the tables gaps and quarantine      they catch up next time

`FoldRun.run` is the main loop. Next: engine/task.py is step 4, ledger/commit.py is steps 6 to 8.
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
from seriatim.ledger.model import Account, Change, Entry, Halt, Ledger
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
    drop_empty_ranges,
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
"""Messages up to this average size are small: a batch of them needs no bound in bytes."""
StopOffsets = Mapping[Partition, int]
"""Up to which offset to fold, exclusively, by partition."""
ProgressCallback = Callable[[int, int], None]
"""Called after every slice with the messages folded so far, and with the expected total."""


class FoldContext(Struct, frozen=True, kw_only=True):
    """The outside world of a fold: every port that it uses."""

    log: Log
    reader: Reader
    explain: Explain
    ledger: LedgerStore
    records: RecordStore
    open_state: Callable[[], StateStore]
    """Opens the state store. Called for every lookup, because a store keeps its files open."""
    derived: DerivedStore
    joiner: Joiner
    clock: Clock
    make_task: Callable[[dict[Partition, PartitionWork]], Task]
    """Makes the task that folds these works. It runs where the messages are."""
    new_attempt: Callable[[], str]
    snapshot_requester: SnapshotRequester | None = None
    """Asks producers for snapshots; None if the stream does not want that."""


class RunOutcome(Struct, kw_only=True):
    """What a run did."""

    messages: int = 0
    records: int = 0
    slices: int = 0
    headless: int = 0
    sequence: int = -1
    findings: list[Finding] = field(default_factory=list)
    """Findings that are new in this run."""
    earlier_halts: list[tuple[Partition, Halt]] = field(default_factory=list)
    """Partitions that were halted before this run. An earlier run reported them."""
    quarantined: int = 0
    """Sessions in quarantine at the end of the run."""
    foreign_sequence: int = -1
    """The entry that reported data of other writers in the records table, while that is open."""
    matched_partitions: int = 0
    """Partitions of the ledger that Kafka has."""
    missing_partitions: list[Partition] = field(default_factory=list)
    """Partitions of the ledger that Kafka no longer has, or that `topics` no longer matches."""
    peak_memory_bytes: int = 0
    derived_error: str = ""
    """Why the derived tables are behind the ledger, as a text for people; empty if they are not."""
    snapshot_request_error: str = ""
    """Why producers were not asked for the snapshots that sessions need, as a text for people.
    Empty if they were asked, or if no snapshot is needed.
    """


def _ignore_progress(_messages: int, _total: int) -> None:
    """The progress callback of a run that nobody watches."""


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
        self.stream = stream
        self.runner = runner
        self.context = context
        self.run_id = run_id
        self.progress = progress or _ignore_progress
        self.read_options_estimator = ReadOptionsEstimator(context.log)
        self.outcome = RunOutcome()
        self.head = LedgerHead(Ledger(stream=stream.name))
        self.messages_total = 0
        """Messages that this run has folded and will fold, as far as is known."""
        self.messages_max = 0
        """The most messages that one slice may hold."""
        self.must_restart_reading = False
        """A partition halted or changed during the run: reading begins again without it."""

    def run(self, messages_max: int, until: StopOffsets | None = None) -> RunOutcome:
        """Fold up to the log ends that discovery finds, or up to the offsets of `until`.

        The steps are those of the module's docstring. Steps 2 to 8 repeat when a partition halts,
        when a topic changes, or when another run or a repair moves the ledger.
        """
        self.messages_max = messages_max
        # Step 1.
        self._open_ledger()
        # Step 2.
        plan = self._discover()
        self._note_earlier_halts(plan)
        while True:
            ranges = ranges_to_read(plan, until, self.stream.name)
            if not ranges:
                break
            # Steps 3 to 8, for one slice after the other.
            new_plan = self._read_and_fold(ranges, has_stop_offsets=until is not None)
            if new_plan is None:
                break
            plan = new_plan
        # The rest of step 8: what may lag behind the ledger catches up.
        self._catch_up_after_slices()
        self._summarize(plan)
        return self.outcome

    def _open_ledger(self) -> None:
        """Step 1. A stream without a ledger gets one: entry 0 names the partitions that exist."""
        head = read_head(self.context.ledger, self.stream.name)
        crash_point("ledger-read")
        if head is None:
            head = self._start_ledger()
            crash_point("table-created")
        runner = self.runner
        refuse_incompatible_machine(
            head.ledger, runner.name, runner.state_version, runner.can_upgrade, runner.shape
        )
        refuse_open_circuit(head.ledger, self.stream.on_check_failure)
        self.head = head
        catch_up_witness(self.context.ledger, head)

    def _start_ledger(self) -> LedgerHead:
        empty_ledger = Ledger(stream=self.stream.name)
        plan = discover_topics(self.stream, self.context.log, empty_ledger)
        births = []
        for partition, account in plan.new_accounts.items():
            births.append(birth_change(partition, account, plan))
        return start_ledger(
            self.context.ledger,
            self.context.clock,
            self.stream.name,
            self.context.new_attempt(),
            tuple(births),
        )

    def _discover(self) -> SlicePlan:
        """Step 2. What discovery finds is committed as an entry of its own, so that it is reported
        exactly once.
        """
        for _ in range(TRIES_MAX):
            plan = discover_topics(self.stream, self.context.log, self.head.ledger)
            changes = tuple(discovery_changes(plan, self.head.ledger))
            try:
                if changes or self.head.foreign_findings:
                    self._commit_changes(changes, plan.findings)
            except FencedError:
                self.head = self._read_head()
                continue
            crash_point("plan-made")
            return plan
        raise PlatformError(
            f"{self.stream.name}: other runs keep moving the ledger", next="run again"
        )

    def _note_earlier_halts(self, plan: SlicePlan) -> None:
        for partition in plan.waiting_partitions:
            account = self.head.ledger.account(partition)
            if account is not None and account.halt is not None:
                self.outcome.earlier_halts.append((partition, account.halt))

    def _read_and_fold(self, ranges: Ranges, *, has_stop_offsets: bool) -> SlicePlan | None:
        """Steps 3 to 8, until all slices are committed or reading stops early.

        Returns a new plan if reading has to begin again, and None if this run has nothing left to
        do. Work that another run left unfinished is refused.
        """
        messages_to_read = sum(len(offset_range) for offset_range in ranges.values())
        self.messages_total = self.outcome.messages + messages_to_read
        try:
            self._read_slices(ranges, has_stop_offsets=has_stop_offsets)
        except SourceFailedError as failure:
            return self._discover_after_failure(failure)
        except FencedError:
            if self._has_repair_intervened(ranges):
                return self._discover()
            self._refuse_if_work_remains(ranges)
            return None
        if self.must_restart_reading:
            return self._discover()
        return None

    def _read_slices(self, ranges: Ranges, *, has_stop_offsets: bool) -> None:
        """Step 3. Without stop offsets the reader cuts the slices (AvailableNow, from the
        frontier on). With stop offsets we cut exact ranges ourselves.
        """
        self.must_restart_reading = False
        if has_stop_offsets:
            self._fold_exact_ranges(ranges)
            return
        starts = {partition: offset_range.start for partition, offset_range in ranges.items()}
        options = self._read_options(ranges)
        self.context.reader.read_slices(starts, self.messages_max, self._fold_slice, options)

    def _fold_exact_ranges(self, ranges: Ranges) -> None:
        """Fold these ranges and nothing else, slice by slice. Stops early if reading must restart."""
        for slice_ranges in cut_into_slices(ranges, self.messages_max):
            options = self._read_options(slice_ranges)
            source = self.context.reader.read_ranges(slice_ranges, options)
            if not self._fold_slice(slice_ranges, source):
                return

    def _read_options(self, ranges: Ranges) -> ReadOptions:
        return self.read_options_estimator.read_options(self.head.ledger, ranges, may_sample=True)

    def _fold_slice(self, ranges: Ranges, source: Source) -> bool:
        """Steps 4 to 8 for one slice. Returns whether reading may go on."""
        nonempty_ranges = drop_empty_ranges(ranges)
        if not nonempty_ranges:
            return True
        try:
            self._fold_and_commit(nonempty_ranges, source)
        except (PlatformError, BrokenPromiseError, IntegrityError) as error:
            # A run that committed the same slice before us has swept our files away. The error
            # is then only a consequence of that, and says nothing about the data.
            if self._is_overtaken(nonempty_ranges):
                raise FencedError(error.message) from error
            raise
        return not self.must_restart_reading

    def _fold_and_commit(self, ranges: Ranges, source: Source) -> None:
        """Steps 4 to 8 for one slice, without the translation of errors."""
        attempt = self.context.new_attempt()
        start_seconds = self.context.clock.now_seconds()
        # Step 4.
        results = self._run_tasks(ranges, source, attempt)
        crash_point("slice-folded")
        # Step 5.
        entry, findings = self._build_entry(ranges, results, attempt)
        if not entry.changes:
            return
        # Steps 6 and 7, and the witness of step 8.
        duration_seconds = max(0.0, self.context.clock.now_seconds() - start_seconds)
        committed = self._commit(replace(entry, took_seconds=duration_seconds), findings)
        # Step 8.
        self._sweep(committed)
        if self.runner.other_columns:
            # The further tables of a long run follow it slice by slice, not only at its end.
            catch_up_after_run(self.context.ledger, self.context.derived, self.head.ledger)
        self._count_entry(committed)
        if len(committed.changes) < len(entry.changes):
            # A repair took a hold on some partitions meanwhile, so the commit left them out.
            self.must_restart_reading = True

    def _run_tasks(
        self, ranges: Ranges, source: Source, attempt: str
    ) -> dict[Partition, TaskResult]:
        """Step 4. Fold every range in a task, again where that is needed."""
        works = {}
        for partition, offset_range in ranges.items():
            works[partition] = self._partition_work(partition, offset_range, attempt)
        options = self.read_options_estimator.read_options(self.head.ledger, ranges)
        has_small_messages = 0 < options.average_message_bytes <= SMALL_MESSAGE_BYTES
        return fold_until_stable(
            self.stream.name,
            works,
            source,
            self.context.reader,
            self.context.make_task,
            self._find_moved_sessions,
            has_small_messages=has_small_messages,
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

    def _find_moved_sessions(
        self, works: dict[Partition, PartitionWork], results: dict[Partition, TaskResult]
    ) -> MovedSessions:
        return find_moved_sessions(
            self.head.ledger,
            works,
            results,
            self.context.open_state(),
            has_snapshots=self.runner.has_snapshots,
        )

    def _build_entry(
        self, ranges: Ranges, results: dict[Partition, TaskResult], attempt: str
    ) -> tuple[Entry, list[Finding]]:
        """Step 5. Check that every range is accounted for, and look at the topics again.

        Returns the entry to commit and the findings to report. A partition whose topic changed
        while it was folded is left out, and reading begins again.
        """
        bounds_by_partition = self.context.log.bounds(self.stream.topics)
        changes = []
        findings: list[Finding] = []
        peak_memory_bytes = 0
        for partition, offset_range in sorted(ranges.items()):
            account = self._account(partition)
            bounds = bounds_by_partition.get(partition)
            if bounds is None or bounds.topic_id != account.topic_id:
                self.must_restart_reading = True
                continue
            result = results.get(partition)
            if result is None:
                # No message of the range arrived, so no task ran for this partition.
                result = result_of_hole(
                    partition, account, offset_range, self.context.explain, self.stream.tier
                )
            ensure(
                covers_range(result, offset_range),
                "a task accounts for its range",
                partition=str(partition),
            )
            changes.append(change_from_result(partition, account, result, bounds.log_end))
            findings += result.findings
            peak_memory_bytes = max(peak_memory_bytes, result.peak_memory_bytes)
            if result.halt is not None:
                self.must_restart_reading = True
        entry = Entry(
            kind="slice",
            attempt=attempt,
            changes=tuple(changes),
            peak_memory_bytes=peak_memory_bytes,
        )
        return entry, findings

    def _commit_changes(self, changes: tuple[Change, ...], findings: list[Finding]) -> Entry:
        """Commit changes that no task made: what discovery or an unreadable message led to."""
        entry = Entry(kind="slice", attempt=self.context.new_attempt(), changes=changes)
        return self._commit(entry, findings)

    def _commit(self, entry: Entry, findings: list[Finding]) -> Entry:
        """Steps 6 and 7, and the witness of step 8. Returns the entry as it was committed.

        The entry carries its findings: once it is committed, they count as reported.
        """
        complete_entry = replace(
            entry,
            run=self.run_id,
            product_version=__version__,
            machine=self.runner.name,
            shape=self.runner.shape,
            state_version=self.runner.state_version,
            findings=tuple(findings),
        )
        self.head, committed = commit(
            self.context.ledger, self.context.clock, self.head, complete_entry
        )
        self.outcome.findings += committed.findings
        return committed

    def _sweep(self, entry: Entry) -> None:
        """Step 8. Delete what other attempts wrote for the same partition, epoch and start: the
        commit decided that nobody will name those files.
        """
        for change in entry.changes:
            if change.until <= change.frontier:
                continue
            committed_paths = {file.path for file in change.files()}
            stem = stem_prefix(change.epoch, change.frontier)
            self.context.records.sweep(change.partition, stem, committed_paths)
        crash_point("swept")

    def _count_entry(self, entry: Entry) -> None:
        outcome = self.outcome
        for change in entry.changes:
            if change.certificate is not None:
                counts = change.certificate.counts
                outcome.messages += counts.messages
                outcome.records += counts.records
                outcome.headless += counts.headless
        outcome.slices += 1
        outcome.peak_memory_bytes = max(outcome.peak_memory_bytes, entry.peak_memory_bytes)
        self.progress(outcome.messages, max(self.messages_total, outcome.messages))

    def _catch_up_after_slices(self) -> None:
        """The rest of step 8: sweep orphans, bring the derived tables up to the ledger, and ask
        producers for snapshots. Trouble with the last two is noted and fails nothing.
        """
        context = self.context
        ledger = self.head.ledger
        if self.outcome.slices:
            sweep_dead(context.ledger, context.records, self.head)
        self.outcome.derived_error = catch_up_after_run(context.ledger, context.derived, ledger)
        self.outcome.snapshot_request_error = request_snapshots_after_run(
            context.ledger, context.snapshot_requester, ledger
        )

    def _summarize(self, plan: SlicePlan) -> None:
        """Note in the outcome how the ledger stands at the end of the run."""
        ledger = self.head.ledger
        accounts = ledger.partitions.values()
        outcome = self.outcome
        outcome.sequence = ledger.sequence
        outcome.missing_partitions = plan.missing_partitions
        outcome.matched_partitions = len(accounts) - len(plan.missing_partitions)
        outcome.foreign_sequence = ledger.foreign_sequence
        outcome.quarantined = sum(account.quarantined for account in accounts)

    def _discover_after_failure(self, failure: SourceFailedError) -> SlicePlan:
        """Find out why reading failed, and return a new plan.

        A cause that discovery can confirm halts its partition. Messages that cannot be read halt
        theirs, or are passed over. Any other failure is raised as a PlatformError.
        """
        accounts_before = self.head.ledger.partitions
        self.head = self._read_head()
        plan = self._discover()
        has_moved = self.head.ledger.partitions != accounts_before
        if plan.findings or plan.skipped_ranges or has_moved:
            return plan
        try:
            if isinstance(failure, UnreadableMessageError) and self._fold_up_to_unreadable(plan):
                return self._discover()
        except SourceFailedError as second_failure:
            failure = second_failure
        raise PlatformError(
            f"{self.stream.name}: reading from Kafka broke",
            cause=str(failure)[:600],
            next="check the broker and Spark, then run again: it goes on from the last commit",
        )

    def _fold_up_to_unreadable(self, plan: SlicePlan) -> bool:
        """Fold up to the messages that cannot be read, then halt there, or pass over them.
        Returns whether there are any.
        """
        next_ranges = next_slice_ranges(plan.ranges, self.messages_max)
        unreadable_messages = self.context.log.first_unreadable_messages(next_ranges)
        readable_ranges = {}
        for partition, (offset, _) in unreadable_messages.items():
            readable_ranges[partition] = next_ranges[partition].until(offset)
        self._fold_exact_ranges(readable_ranges)
        changes, findings = unreadable_message_changes(
            unreadable_messages, self.head.ledger, self.stream.on_poison
        )
        if changes:
            self._commit_changes(changes, findings)
        return bool(unreadable_messages)

    def _has_repair_intervened(self, ranges: Ranges) -> bool:
        """Whether a repair changed partitions of this slice meanwhile: it holds them, or finished
        and raised their epoch. The other partitions can go on. Reads the ledger anew.
        """
        before = [self._epoch_and_hold(partition) for partition in ranges]
        self.head = self._read_head()
        after = [self._epoch_and_hold(partition) for partition in ranges]
        return before != after

    def _epoch_and_hold(self, partition: Partition) -> tuple[int, str | None]:
        account = self._account(partition)
        return account.epoch, account.hold

    def _is_overtaken(self, ranges: Ranges) -> bool:
        """Whether another run moved the frontier of a partition of this slice, or a repair raised
        its epoch. After either, a sweep may delete files that this run has not committed yet.
        """
        ledger = self._read_head().ledger
        for partition, offset_range in ranges.items():
            account = ledger.account(partition)
            if account is None:
                continue
            if account.frontier > offset_range.start:
                return True
            if account.epoch > self._account(partition).epoch:
                return True
        return False

    def _refuse_if_work_remains(self, ranges: Ranges) -> None:
        """Another run committed first. Nothing is wrong if it left no work; otherwise this run is
        refused.
        """
        self.head = self._read_head()
        for partition, offset_range in ranges.items():
            account = self._account(partition)
            remaining = offset_range.end - account.frontier
            if account.halt is None and not account.retired and remaining > 0:
                raise FencedError(
                    f"{self.stream.name}: another run moved the frontier while this one was folding",
                    found=f"{partition} is at offset {account.frontier}, {remaining} are left",
                    next="nothing of this slice was written; run again to go on from where the other one is",
                )

    def _read_head(self) -> LedgerHead:
        head = read_head(self.context.ledger, self.stream.name)
        return head or raise_broken_promise("the ledger vanished in mid-run")

    def _account(self, partition: Partition) -> Account:
        account = self.head.ledger.account(partition)
        return account or raise_broken_promise("a partition has an account before it is read")
