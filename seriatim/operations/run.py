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

`FoldRun.run` is the main loop. Below it, in the order of the steps: read options (3), folding again
what one try could not know (4), sessions that moved (4), and what an entry says about partitions (2, 5).

Next: engine/task.py is step 4, ledger/commit.py is steps 6 to 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim import __version__
from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import (
    Certificate,
    Explain,
    Files,
    SourceFailedError,
    StateStore,
    file_paths,
)
from seriatim.engine.findings import Finding, OnPoison, Tier
from seriatim.engine.holes import HolePassage, loss_mark
from seriatim.engine.offsets import (
    OffsetByPartition,
    OffsetRange,
    Partition,
    Ranges,
    cut_into_slices,
    drop_empty_ranges,
)
from seriatim.engine.session import Counts
from seriatim.engine.task import PartitionWork, TaskResult, read_result, stem_prefix
from seriatim.errors import (
    BrokenPromiseError,
    ConfigError,
    FencedError,
    IntegrityError,
    PlatformError,
    ensure,
    raise_broken_promise,
)
from seriatim.ledger.commit import (
    TRIES_MAX,
    catch_up_witness,
    commit,
    frontier_moved_error,
    read_head,
    read_head_again,
    start_ledger,
)
from seriatim.ledger.entries import ColumnsEntry, SliceEntry
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import (
    Account,
    Change,
    Halt,
    Ledger,
    refuse_incompatible_machine,
    refuse_open_circuit,
    unmoved_change,
)
from seriatim.operations.ask_for_snapshots import request_snapshots_after_run
from seriatim.operations.followers import catch_up_after_run
from seriatim.operations.plan import SlicePlan, discover_topics, next_slice_ranges, ranges_to_read
from seriatim.operations.sweep import sweep_attempts, sweep_dead
from seriatim.ports import (
    Log,
    OpenStream,
    ProgressCallback,
    Reader,
    ReadOptions,
    Source,
    Task,
    UnreadableMessageError,
)

SMALL_MESSAGE_BYTES = 2048
"""Messages up to this average size are small: a batch of them needs no bound in bytes."""
MESSAGES_WORTH_SAMPLING = 10_000
"""With fewer messages than this, small fetches cost less than sampling the message size."""
StopOffsets = OffsetByPartition
"""Up to which offset to fold, exclusively, by partition."""
FOLD_TRIES_MAX = 7
"""A machine that raises needs three tries at most (from where it raised, from the first message,
each message by itself), and sessions that moved need one. The others are for machines that do not
behave the same each time.
"""
WorkByPartition = dict[Partition, PartitionWork]
ResultByPartition = dict[Partition, TaskResult]
MovedSessions = dict[Partition, dict[str, str]]
"""By the partition where they appeared: the session, and the partition where it lives."""


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
        open_stream: OpenStream,
        *,
        run_id: str = "",
        progress: ProgressCallback | None = None,
        head: LedgerHead | None = None,
    ) -> None:
        self.open_stream = open_stream
        self.stream = open_stream.stream
        self.runner = open_stream.runner
        self.run_id = run_id
        self.progress = progress or _ignore_progress
        self.read_options_estimator = ReadOptionsEstimator(open_stream.log)
        self.outcome = RunOutcome()
        self.first_head = head
        """The ledger, if it was just read: it need not be read again."""
        self.head = LedgerHead(Ledger(stream=self.stream.name))
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
        head = self.first_head or read_head(self.open_stream.ledger, self.stream.name)
        crash_point("ledger-read")
        if head is None:
            head = self._start_ledger()
            crash_point("table-created")
        runner = self.runner
        refuse_incompatible_machine(head.ledger, runner, may_have_more=True)
        refuse_open_circuit(head.ledger, self.stream.on_check_failure)
        self.head = self._add_columns(head)
        catch_up_witness(self.open_stream.ledger, self.head)

    def _add_columns(self, head: LedgerHead) -> LedgerHead:
        """Add columns that the stream file has and the table does not have yet, in an entry of their
        own: no file may have a column that the table lacks.
        """
        older_shape = head.ledger.shape
        older_columns = self.runner.older_columns(older_shape)
        if older_columns is None:
            return head
        added = {}
        for name, type_name in self.runner.columns.items():
            if name not in older_columns:
                added[name] = type_name
        entry = ColumnsEntry(
            attempt=self.open_stream.new_attempt(),
            run=self.run_id,
            product_version=__version__,
            added=added,
            shape=self.runner.shape,
            older_shape=older_shape,
        )
        try:
            head, _ = commit(self.open_stream.ledger, self.open_stream.clock, head, entry)
        except FencedError:
            # Another run has added them, unless its stream file is another one.
            head = self._read_head()
            refuse_incompatible_machine(head.ledger, self.runner)
        return head

    def _start_ledger(self) -> LedgerHead:
        empty_ledger = Ledger(stream=self.stream.name)
        plan = discover_topics(self.stream, self.open_stream.log, empty_ledger)
        births = []
        for partition, account in plan.new_accounts.items():
            births.append(birth_change(partition, account, plan))
        return start_ledger(
            self.open_stream.ledger,
            self.open_stream.clock,
            self.stream.name,
            self.open_stream.new_attempt(),
            tuple(births),
        )

    def _discover(self) -> SlicePlan:
        """Step 2. What discovery finds is committed as an entry of its own, so that it is reported
        exactly once.
        """
        for _ in range(TRIES_MAX):
            plan = discover_topics(self.stream, self.open_stream.log, self.head.ledger)
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
        self.open_stream.reader.read_slices(starts, self.messages_max, self._fold_slice, options)

    def _fold_exact_ranges(self, ranges: Ranges) -> None:
        """Fold these ranges and nothing else, slice by slice. Stops early if reading must restart."""
        for slice_ranges in cut_into_slices(ranges, self.messages_max):
            options = self._read_options(slice_ranges)
            source = self.open_stream.reader.read_ranges(slice_ranges, options)
            if not self._fold_slice(slice_ranges, source):
                return

    def _read_options(self, ranges: Ranges) -> ReadOptions:
        return self.read_options_estimator.read_options(self.head.ledger, ranges, may_sample=True)

    def _fold_slice(self, ranges: Ranges, source: Source) -> bool:
        """Steps 4 to 8 for one slice. Returns whether reading may go on."""
        nonempty_ranges = drop_empty_ranges(ranges)
        if not nonempty_ranges:
            return True
        if not self.outcome.messages:
            # Rate and remaining time are those of folding, without the start of Spark.
            self.progress(0, self.messages_total)
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
        attempt = self.open_stream.new_attempt()
        start_seconds = self.open_stream.clock.now_seconds()
        # Step 4.
        results = self._run_tasks(ranges, source, attempt)
        crash_point("slice-folded")
        # Step 5.
        entry, findings = self._build_entry(ranges, results, attempt)
        if not entry.changes:
            return
        # Steps 6 and 7, and the witness of step 8.
        duration_seconds = max(0.0, self.open_stream.clock.now_seconds() - start_seconds)
        committed = self._commit(replace(entry, took_seconds=duration_seconds), findings)
        # Step 8.
        self._sweep(committed)
        if self.runner.other_columns:
            # The further tables of a long run follow it slice by slice, not only at its end.
            catch_up_after_run(self.open_stream.ledger, self.open_stream.derived, self.head.ledger)
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
            self.open_stream.reader,
            self.open_stream.make_task,
            self._find_moved_sessions,
            has_small_messages=has_small_messages,
        )

    def _partition_work(
        self, partition: Partition, offset_range: OffsetRange, attempt: str
    ) -> PartitionWork:
        account = self._account(partition)
        if account.frontier != offset_range.start:
            raise frontier_moved_error(
                self.stream.name,
                f"{partition} is at offset {account.frontier}, not {offset_range.start}",
                "run again to go on from where the other one is",
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
            # Opened anew: the files that are kept open may have been merged and swept since.
            self.open_stream.open_state(),
            has_snapshots=self.runner.has_snapshots,
        )

    def _build_entry(
        self, ranges: Ranges, results: dict[Partition, TaskResult], attempt: str
    ) -> tuple[SliceEntry, list[Finding]]:
        """Step 5. Check that every range is accounted for, and look at the topics again.

        Returns the entry to commit and the findings to report. A partition whose topic changed
        while it was folded is left out, and reading begins again.
        """
        # A topic may have been created again while its messages were read. Their offsets say nothing
        # then, so that they must not be committed.
        bounds_by_partition = self.open_stream.log.bounds(self.stream.topics)
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
                    partition, account, offset_range, self.open_stream.explain, self.stream.tier
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
        entry = SliceEntry(
            attempt=attempt,
            changes=tuple(changes),
            peak_memory_bytes=peak_memory_bytes,
        )
        return entry, findings

    def _commit_changes(self, changes: tuple[Change, ...], findings: list[Finding]) -> SliceEntry:
        """Commit changes that no task made: what discovery or an unreadable message led to."""
        entry = SliceEntry(attempt=self.open_stream.new_attempt(), changes=changes)
        return self._commit(entry, findings)

    def _commit(self, entry: SliceEntry, findings: list[Finding]) -> SliceEntry:
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
            cluster_id=self.open_stream.log.cluster_id,
            findings=tuple(findings),
        )
        self.head, committed = commit(
            self.open_stream.ledger, self.open_stream.clock, self.head, complete_entry
        )
        self.outcome.findings += committed.findings
        return committed

    def _sweep(self, entry: SliceEntry) -> None:
        """Step 8. Delete what other attempts wrote for the same partition, epoch and start: the
        commit decided that nobody will name those files. In a bucket the next compaction does it.
        """
        changes = entry.changes if self.open_stream.records.lists_cheaply else ()
        for change in changes:
            if change.until <= change.frontier:
                continue
            committed_paths = set(file_paths(change.files()))
            stem = stem_prefix(change.epoch, change.frontier)
            sweep_attempts(self.open_stream.records, change.partition, stem, committed_paths)
        crash_point("swept")

    def _count_entry(self, entry: SliceEntry) -> None:
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
        open_stream = self.open_stream
        ledger = self.head.ledger
        if self.outcome.slices and open_stream.records.lists_cheaply:
            sweep_dead(open_stream.ledger, open_stream.records, self.head)
        self.outcome.derived_error = catch_up_after_run(
            open_stream.ledger, open_stream.derived, ledger
        )
        self.outcome.snapshot_request_error = request_snapshots_after_run(
            open_stream.ledger, open_stream.snapshot_requester, ledger
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
        # Another run may have committed meanwhile: then its ledger, and not the failure, is the news.
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
        unreadable_messages = self.open_stream.log.first_unreadable_messages(next_ranges)
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
                raise frontier_moved_error(
                    self.stream.name,
                    f"{partition} is at offset {account.frontier}, {remaining} are left",
                    "nothing of this slice was written; run again to go on from where the other one is",
                )

    def _read_head(self) -> LedgerHead:
        return read_head_again(self.open_stream.ledger, self.stream.name)

    def _account(self, partition: Partition) -> Account:
        account = self.head.ledger.account(partition)
        return account or raise_broken_promise("a partition has an account before it is read")


class ReadOptionsEstimator:
    """Decides what a run asks of the reader beyond the messages themselves: headers, and an estimate
    of the message size, from which the reader chooses how much it fetches at once. The estimate is
    from the ledger; Kafka is sampled where that is not enough.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self._sampled_bytes: dict[Partition, int] = {}

    def read_options(
        self, ledger: Ledger, ranges: Ranges, *, may_sample: bool = False
    ) -> ReadOptions:
        """The options for reading these ranges.

        Headers are read where a session is in quarantine. The message size is that of the partition
        with the largest messages; it is 0 while some partition's size is not known.
        """
        average_sizes = []
        unmeasured_ranges: Ranges = {}
        has_quarantine = False
        for partition, offset_range in ranges.items():
            account = ledger.account(partition)
            if account is not None and account.quarantined:
                has_quarantine = True
            if account is not None and account.messages:
                average_sizes.append(_average_message_bytes(account))
            elif len(offset_range):
                unmeasured_ranges[partition] = offset_range
        if may_sample and not self._sampled_bytes:
            self._sample_if_worthwhile(unmeasured_ranges)
        largest_average = max([*average_sizes, *self._sampled_bytes.values()], default=0)
        if unmeasured_ranges and not self._sampled_bytes:
            largest_average = 0
        return ReadOptions(has_quarantine, largest_average)

    def _sample_if_worthwhile(self, unmeasured_ranges: Ranges) -> None:
        messages = sum(len(offset_range) for offset_range in unmeasured_ranges.values())
        if messages >= MESSAGES_WORTH_SAMPLING:
            self._sampled_bytes = self.log.sample_message_bytes(unmeasured_ranges)


def _average_message_bytes(account: Account) -> int:
    return account.message_bytes // account.messages + 1


def fold_until_stable(
    stream: str,
    works: WorkByPartition,
    source: Source,
    reader: Reader,
    make_task: Callable[[WorkByPartition], Task],
    find_moved: Callable[[WorkByPartition, ResultByPartition], MovedSessions],
    *,
    has_small_messages: bool = False,
) -> ResultByPartition:
    """Fold the works, and fold some of them again until no result asks for another try.

    A work is folded again for one of three reasons:

    - Messages were quarantined. They are stored with their headers, which are only read on request.
      (A hot partition that helpers fold asks for the same, when anything but the usual happens.)
    - The machine raised. It may have left a state half changed, so that its sessions are folded
      again in a way that can be undone.
    - A session moved here from another partition. That is only known once all partitions are
      folded.

    1. Fold all works.
    2. Find the works that have to be folded again. If there are none, return the results.
    3. Fold those again, with headers and with what was learned, and go on with step 2.

    A machine whose results never become stable is refused.
    """
    # 1. Fold all works.
    works = _with_shares(works)
    first_attempts = {partition: work.attempt for partition, work in works.items()}
    contents = source.map(make_task(works), has_small_messages=has_small_messages)
    results = results_by_partition(contents)
    for try_number in range(FOLD_TRIES_MAX):
        # 2. Find the works that have to be folded again. Sessions that moved are only looked for
        # when all other results are final, because a result to be replaced could mislead.
        half_changed_sessions = {}
        for partition, result in results.items():
            if result.half_changed_sessions or result.needs_headers_and_one_process:
                half_changed_sessions[partition] = result.half_changed_sessions
        moved_sessions = {} if half_changed_sessions else find_moved(works, results)
        unstable_partitions = {**half_changed_sessions, **moved_sessions}
        if not unstable_partitions:
            return results
        # 3. Fold those again.
        retried_works = {}
        for partition in unstable_partitions:
            work = works[partition]
            retried_works[partition] = replace(
                work,
                undoable=work.undoable | half_changed_sessions.get(partition, {}),
                moved_sessions=work.moved_sessions | moved_sessions.get(partition, {}),
                attempt=f"{first_attempts[partition]}r{try_number}",
                share=0.0,
            )
        works = works | retried_works
        results |= _fold_with_headers(retried_works, reader, make_task)
    names = ", ".join(str(partition) for partition in unstable_partitions)
    raise ConfigError(
        f"{stream}: the machine raises at other messages each time ({names})",
        next="make `apply` depend on nothing but its state and message; seriatim.testing runs it in milliseconds",
    )


def _fold_with_headers(
    works: WorkByPartition, reader: Reader, make_task: Callable[[WorkByPartition], Task]
) -> ResultByPartition:
    ranges = {partition: OffsetRange(work.start, work.end) for partition, work in works.items()}
    source = reader.read_ranges(ranges, ReadOptions(with_headers=True))
    return results_by_partition(source.map(make_task(works)))


def _with_shares(works: WorkByPartition) -> WorkByPartition:
    """The works, each with its share of all messages of the slice."""
    total = sum(work.end - work.start for work in works.values()) or 1
    shared_works = {}
    for partition, work in works.items():
        shared_works[partition] = replace(work, share=(work.end - work.start) / total)
    return shared_works


def find_moved_sessions(
    ledger: Ledger,
    works: Mapping[Partition, PartitionWork],
    results: Mapping[Partition, TaskResult],
    state: StateStore,
    *,
    has_snapshots: bool,
) -> MovedSessions:
    """The sessions without state of a slice that live in another partition, except those that the
    works name already.

    Only sessions that have no state where they appeared are looked for, and only by name: the state
    of all other sessions is not read.

    Without snapshots a session may begin in two partitions in one slice. Then it lives in the first
    of them.
    """
    moved: MovedSessions = {}
    for partition, result in results.items():
        sessions = set(result.sessions_without_state) - set(works[partition].moved_sessions)
        if not sessions:
            continue
        for home in _other_partitions_of_topic(ledger, partition):
            living = _find_living_sessions(ledger, results, home, sessions, state)
            if not has_snapshots and home in results and partition < home:
                # The session begins in both partitions, and this one is the first: it stays here.
                living -= set(results[home].sessions_without_state)
            for session in living:
                moved.setdefault(partition, {})[session] = str(home)
            sessions -= living
    return moved


def _other_partitions_of_topic(ledger: Ledger, partition: Partition) -> list[Partition]:
    return [
        candidate
        for candidate in ledger.known_partitions()
        if candidate.topic == partition.topic and candidate != partition
    ]


def _find_living_sessions(
    ledger: Ledger,
    results: Mapping[Partition, TaskResult],
    partition: Partition,
    sessions: set[str],
    state: StateStore,
) -> set[str]:
    """Those of the sessions that have a state in this partition after the slice."""
    files = _state_files_after_slice(ledger, results, partition)
    names = state.find_names(files, sessions)
    living = set()
    for name, session in state.open_sessions(files, names).items():
        if session.has_state:
            living.add(name)
    return living


def _state_files_after_slice(
    ledger: Ledger, results: Mapping[Partition, TaskResult], partition: Partition
) -> Files:
    """The state files of a partition as this slice leaves them."""
    result = results.get(partition)
    if result is not None and result.state is not None:
        return result.state
    account = ledger.account(partition)
    return account.state if account is not None else ()


def birth_change(partition: Partition, account: Account, plan: SlicePlan) -> Change:
    """The change that writes a partition's account as discovery leaves it."""
    log_end = 0
    if partition in plan.ranges:
        log_end = plan.ranges[partition].end
    return replace(unmoved_change(partition, account), log_end=log_end)


def discovery_changes(plan: SlicePlan, ledger: Ledger) -> Iterable[Change]:
    """What discovery alone changes: new partitions, halts, and offsets that Kafka deleted before
    they were read.
    """
    halting_findings = {
        Partition.parse(finding.partition_name): finding for finding in plan.findings
    }
    for partition in sorted({*plan.new_accounts, *plan.skipped_ranges, *halting_findings}):
        account = plan.new_accounts.get(partition) or ledger.account(partition)
        if account is None:
            raise_broken_promise("found, but unknown")
        change = birth_change(partition, account, plan)
        finding = halting_findings.get(partition)
        if finding is not None:
            change = replace(change, halt=halt_from_finding(finding))
        skipped = plan.skipped_ranges.get(partition)
        if skipped:
            change = replace(
                change,
                until=skipped.end,
                certificate=hole_certificate(
                    partition, account, skipped, {"expired": len(skipped)}
                ),
                marks=(loss_mark(skipped, "expired"),),
            )
        yield change


def hole_certificate(
    partition: Partition, account: Account, offset_range: OffsetRange, holes: dict[str, int]
) -> Certificate:
    """The certificate of a range that is one hole."""
    return Certificate(
        partition=partition,
        epoch=account.epoch,
        start=offset_range.start,
        until=offset_range.end,
        counts=Counts(),
        holes=holes,
    )


def result_of_hole(
    partition: Partition, account: Account, offset_range: OffsetRange, explain: Explain, tier: Tier
) -> TaskResult:
    """The result for a planned range of which no message arrived. Such a range is one hole: for
    example transaction markers only, or a loss.
    """
    passage = HolePassage(partition, tier, offset_range.start)
    passage.pass_hole(offset_range, explain(partition, offset_range))
    passed_range = offset_range.until(passage.until)
    findings = [passage.halt] if passage.halt else []
    return TaskResult(
        certificate=hole_certificate(partition, account, passed_range, passage.counts),
        halt=passage.halt,
        findings=findings,
        marks=tuple(passage.marks),
    )


def unreadable_message_changes(
    unreadable_messages: Mapping[Partition, tuple[int, str]], ledger: Ledger, on_poison: OnPoison
) -> tuple[tuple[Change, ...], list[Finding]]:
    """Changes and findings for partitions that reached a message that cannot be read. They halt at
    the message, or pass over it where the stream says so.
    """
    changes = []
    findings = []
    for partition, (offset, reason) in sorted(unreadable_messages.items()):
        account = ledger.account(partition) or raise_broken_promise("stopped, but unknown")
        if account.frontier != offset:
            # The partition halted at an earlier message and did not get so far.
            continue
        finding = Finding.at(
            partition,
            "poison",
            offset,
            cause=f"it cannot be read: {reason}, which does not fit (nanoseconds?)",
        )
        change = unmoved_change(partition, account)
        if on_poison == "skip":
            change = _pass_over_unreadable(change)
            finding = replace(finding, level="warning")
        else:
            change = replace(change, halt=halt_from_finding(finding))
        changes.append(change)
        findings.append(finding)
    return tuple(changes), findings


def _pass_over_unreadable(change: Change) -> Change:
    """The change, moved past the one message at its frontier."""
    certificate = Certificate(
        partition=change.partition,
        epoch=change.epoch,
        start=change.frontier,
        until=change.frontier + 1,
        counts=Counts(findings={"poison": 1}),
        holes={"unreadable": 1},
    )
    return replace(change, until=certificate.until, certificate=certificate)


def change_from_result(
    partition: Partition, account: Account, result: TaskResult, log_end: int
) -> Change:
    """The change that the result of a task makes to its partition."""
    certificate = result.certificate or raise_broken_promise("a result without a certificate")
    halt = halt_from_finding(result.halt) if result.halt else None
    return replace(
        unmoved_change(partition, account),
        until=certificate.until,
        certificate=certificate,
        state=result.state,
        records=result.records,
        other_records=result.other_record_files,
        quarantine_files=result.quarantine_files,
        halt=halt,
        marks=result.marks,
        log_end=log_end,
    )


def halt_from_finding(finding: Finding) -> Halt:
    """The halt that the ledger remembers for a finding."""
    ensure(
        finding.finding != "truncated" or finding.log_end >= 0,
        "a truncated log says where it ends now",
    )
    return Halt(
        finding=finding.finding, offset=finding.offset, cause=finding.cause, log_end=finding.log_end
    )


def covers_range(result: TaskResult, offset_range: OffsetRange) -> bool:
    """Whether a result reaches from the start of its range to the end, or to where it halted."""
    certificate = result.certificate
    if certificate is None or certificate.start != offset_range.start:
        return False
    if certificate.until == offset_range.end:
        return True
    return result.halt is not None and certificate.until <= offset_range.end


def results_by_partition(contents: list[bytes]) -> dict[Partition, TaskResult]:
    """Decode what the tasks returned. The error of a failed task is raised here."""
    results: dict[Partition, TaskResult] = {}
    for content in contents:
        result = read_result(content)
        partition = result.partition or raise_broken_promise("a result says its partition")
        ensure(partition not in results, "one result per partition", partition=str(partition))
        results[partition] = result
    return results
