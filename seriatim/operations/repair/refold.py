"""Refold: ranges are rewound and folded again into one commit. Repair and backfill share this.

The steps, and what a crash after each step leaves:

1. Read the ledger and its history; choose where to begin in each partition.   Nothing.
2. Hold: the partitions are reserved. Slices of other partitions go on.        A hold.
3. Fold stage by stage, in tasks; compare with the committed state.            Orphans.
4. Join record files: what was made, and what stays of replaced files.         Orphans.
5. Commit: records, state and frontiers are replaced at once, epochs are
   raised, the hold is released.                                               All is done.
6. Sweep; update the tables gaps and quarantine.                               They catch up later.

The next attempt replaces the hold of the dead one by its own and begins with step 3: what was not
committed does not count.

Next: operations/repair/refold_rules.py has the rules; operations/repair/repair.py and
operations/repair/backfill.py say what is to be folded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim import __version__
from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import File, SourceFailedError, save_state
from seriatim.engine.findings import Finding, GapMark
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.session import Session
from seriatim.engine.task import PartitionWork, TaskResult, stem_prefix
from seriatim.errors import IntegrityError, PlatformError, ensure, raise_broken_promise
from seriatim.ledger.commit import commit
from seriatim.ledger.entries import HoldEntry, ReleaseEntry, RepairEntry
from seriatim.ledger.gaps import Gap
from seriatim.ledger.history import PartitionHistory
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import Change, Ledger, refuse_incompatible_machine, unmoved_change
from seriatim.operations.followers import catch_up_after_run, read_gaps
from seriatim.operations.release import can_be_released, clear_finding
from seriatim.operations.repair.join_records import RecordFileJoin, machine_changed_error
from seriatim.operations.repair.refold_rules import (
    RefoldProgress,
    RefoldStage,
    Rewind,
    plan_stages,
    repaired_marks,
    same_session,
)
from seriatim.operations.run import (
    MovedSessions,
    ResultByPartition,
    WorkByPartition,
    find_moved_sessions,
    fold_until_stable,
    result_of_hole,
)
from seriatim.operations.sweep import sweep_dead
from seriatim.ports import OpenStream, ReadOptions

ProgressCallback = Callable[[int, int], None]


class RefoldResult(Struct, kw_only=True):
    """What a refold did."""

    sequence: int = -1
    """The ledger entry of its commit; -1: not committed."""
    hold: str = ""
    messages: int = 0
    """Messages that were read and folded again."""
    records: int = 0
    """Records that were made again."""
    removed_files: int = 0
    """Record files that left the table."""
    ranges: dict[Partition, OffsetRange] = field(default_factory=dict)
    """What was made again, up to where the last session was as committed."""
    new_findings: list[Finding] = field(default_factory=list)
    """Findings that the first fold did not have."""
    repeated_findings: list[Finding] = field(default_factory=list)
    """Findings that the first fold had as well."""
    derived_error: str = ""
    """Why the derived tables could not be updated; empty: they were."""


class PartitionRefold(Struct, kw_only=True):
    """One partition while it is folded again."""

    progress: RefoldProgress
    stages: Iterator[RefoldStage]
    past: PartitionHistory
    message_time_ms: int
    stage: RefoldStage | None = None
    records: list[File] = field(default_factory=list)
    other_record_files: dict[str, list[File]] = field(default_factory=dict)
    quarantine_files: list[File] = field(default_factory=list)
    marks: list[GapMark] = field(default_factory=list)
    messages_counted: int = 0
    """Messages that were read from `counted_from` on."""
    counted_from: int = 0
    """The last offset up to which the number of messages was checked."""

    def advance_stage(self) -> bool:
        """Go on to the next stage. Returns whether there is one."""
        self.stage = None
        if not self.progress.is_over:
            self.stage = next(self.stages, None)
        return self.stage is not None

    def current_stage(self) -> RefoldStage:
        """The stage that is folded now."""
        return self.stage or raise_broken_promise("a partition that is folded has a stage")


class RefoldRun:
    """One refold of one stream."""

    def __init__(
        self,
        open_stream: OpenStream,
        *,
        run_id: str = "",
        progress: ProgressCallback | None = None,
    ) -> None:
        self.open_stream = open_stream
        self.stream = open_stream.stream
        self.runner = open_stream.runner
        self.run_id = run_id
        self.on_progress = progress or (lambda _messages, _total: None)
        self.result = RefoldResult()
        self.must_be_unchanged = False
        """Whether it is refused to make other records and state than those that are committed."""

    def place_hold(
        self,
        head: LedgerHead,
        partitions: Iterable[Partition],
        request: str,
        resumes: str | None = None,
    ) -> LedgerHead:
        """Step 2: reserve partitions, or take over the hold of a refold that died."""
        runner = self.runner
        refuse_incompatible_machine(
            head.ledger, runner.name, runner.state_version, runner.can_upgrade, runner.shape
        )
        hold = self.open_stream.new_attempt()
        entry = HoldEntry(
            attempt=hold,
            run=self.run_id,
            product_version=__version__,
            hold=hold,
            resumed_hold=resumes,
            request=request,
            changes=_unmoved_changes(head.ledger, partitions),
        )
        self.result.hold = hold
        head = commit(self.open_stream.ledger, self.open_stream.clock, head, entry)[0]
        crash_point("held")
        return head

    def release_hold(self) -> None:
        """Release the hold if it is still ours. Nothing else is changed."""
        head = self.open_stream.ledger.head(self.stream.name)
        if head is None:
            raise_broken_promise("the ledger vanished")
        release_hold(self.open_stream, head, self.result.hold, run_id=self.run_id)

    def refold_partitions(
        self,
        head: LedgerHead,
        rewinds: Sequence[Rewind],
        histories: dict[Partition, PartitionHistory],
        messages_max: int,
    ) -> Iterator[tuple[Change, list[str]]]:
        """Steps 3 and 4: a change for each partition, and the paths that leave its tables."""
        refolds = self._begin_refolds(rewinds, histories, messages_max)
        # 3. Fold stage by stage: all partitions that are not over, in one reading.
        messages_total = sum(len(rewind.read_range) for rewind in rewinds)
        stage_number = 0
        while True:
            active_refolds = {
                partition: refold for partition, refold in refolds.items() if refold.advance_stage()
            }
            if not active_refolds:
                break
            self._fold_stage(head, active_refolds, stage_number)
            stage_number += 1
            messages = self.result.messages
            self.on_progress(messages, max(messages_total, messages))
            crash_point("stage-folded")
        # 4. Join the record files.
        gaps = read_gaps(self.open_stream.ledger, self.open_stream.derived, head.ledger)
        active_files = self.open_stream.ledger.active_files(head)
        for refold in refolds.values():
            yield self._build_change(refold, gaps, active_files)
        crash_point("refolded")

    def _begin_refolds(
        self,
        rewinds: Sequence[Rewind],
        histories: dict[Partition, PartitionHistory],
        messages_max: int,
    ) -> dict[Partition, PartitionRefold]:
        messages_per_partition = max(1, messages_max // len(rewinds))
        refolds: dict[Partition, PartitionRefold] = {}
        for rewind in rewinds:
            refold = PartitionRefold(
                progress=RefoldProgress.begin(rewind),
                stages=plan_stages(rewind, messages_per_partition),
                past=histories[rewind.partition],
                message_time_ms=rewind.base.message_time_ms,
                counted_from=rewind.base.frontier,
            )
            self._repeat_releases(refold.progress)
            refolds[rewind.partition] = refold
        return refolds

    def commit(
        self, head: LedgerHead, changes: Sequence[Change], removed: Sequence[str], reason: str
    ) -> RefoldResult:
        """Steps 5 and 6: commit the changes, sweep, and update the derived tables."""
        runner = self.runner
        # 5. The commit.
        entry = RepairEntry(
            attempt=self.result.hold,
            hold=self.result.hold,
            run=self.run_id,
            product_version=__version__,
            machine=runner.name,
            shape=runner.shape,
            state_version=runner.state_version,
            changes=tuple(changes),
            removed_paths=tuple(sorted(removed)),
            findings=tuple(self.result.new_findings),
            refolded_messages=self.result.messages,
            reason=reason,
        )
        head, committed_entry = commit(self.open_stream.ledger, self.open_stream.clock, head, entry)
        self.result.sequence = committed_entry.sequence
        # 6. What follows from it.
        sweep_dead(self.open_stream.ledger, self.open_stream.records, head)
        crash_point("swept")
        self.result.derived_error = catch_up_after_run(
            self.open_stream.ledger, self.open_stream.derived, head.ledger
        )
        return self.result

    def _fold_stage(
        self, head: LedgerHead, refolds: dict[Partition, PartitionRefold], number: int
    ) -> None:
        """Fold one stage of each partition that is not over, in one reading."""
        open_stream = self.open_stream
        works: dict[Partition, PartitionWork] = {}
        ranges: dict[Partition, OffsetRange] = {}
        for partition, refold in refolds.items():
            works[partition] = self._partition_work(refold, number)
            ranges[partition] = refold.current_stage().offset_range
        source = open_stream.reader.read_ranges(ranges, ReadOptions(with_headers=True))

        def find_moved(works: WorkByPartition, results: ResultByPartition) -> MovedSessions:
            moved_at_first_fold: dict[Partition, TaskResult] = {}
            for partition, result in results.items():
                past = refolds[partition].past
                moved_at_first_fold[partition] = self._only_sessions_moved_then(past, result)
            return find_moved_sessions(
                head.ledger,
                works,
                moved_at_first_fold,
                open_stream.open_state(),
                has_snapshots=self.runner.has_snapshots,
            )

        try:
            results = fold_until_stable(
                self.stream.name,
                works,
                source,
                open_stream.reader,
                open_stream.make_task,
                find_moved,
            )
        except SourceFailedError as failure:
            raise PlatformError(
                f"{self.stream.name}: reading from Kafka broke",
                cause=str(failure)[:600],
                next="check the broker and Spark, then give the same command again; nothing was"
                " changed",
            ) from failure
        for partition, refold in refolds.items():
            result = results.get(partition)
            if result is None:
                # No message was read in this range: all of it is a hole.
                account = refold.progress.rewind.account
                result = result_of_hole(
                    partition, account, ranges[partition], open_stream.explain, self.stream.tier
                )
            self._take_result(refold, result)

    def _only_sessions_moved_then(self, past: PartitionHistory, result: TaskResult) -> TaskResult:
        """A result in which only those sessions can be moved that the first fold found to be moved.

        A session that lives in another partition now may have lived in this one then.
        """
        moved_then: set[str | None] = set()
        for finding, _offset, session in past.reported_findings:
            if finding == "moved session":
                moved_then.add(session)
        sessions_without_state = {
            name: offset
            for name, offset in result.sessions_without_state.items()
            if name in moved_then
        }
        return replace(result, sessions_without_state=sessions_without_state)

    def _partition_work(self, refold: PartitionRefold, number: int) -> PartitionWork:
        progress = refold.progress
        rewind = progress.rewind
        stage_range = refold.current_stage().offset_range
        return PartitionWork(
            partition=rewind.partition,
            start=stage_range.start,
            end=stage_range.end,
            epoch=rewind.account.epoch,
            topic_id=rewind.account.topic_id,
            state=progress.state,
            attempt=f"{self.result.hold}s{number}",
            message_time_ms=refold.message_time_ms,
            headless_since=rewind.headless_since(stage_range.start),
            scope=progress.scope(),
            file_name_offset=rewind.account.frontier,
        )

    def _take_result(self, refold: PartitionRefold, result: TaskResult) -> None:
        """Take the result of a stage: its files, findings and counts.

        At a committed offset the sessions are compared with the committed ones. A partition that
        halts, or that has lost messages, ends the refold with an error.
        """
        progress = refold.progress
        stage = refold.current_stage()
        certificate = result.certificate or raise_broken_promise("a result without a certificate")
        if result.halt is not None:
            raise _halted_error(self.stream.name, result.halt)
        ensure(
            certificate.until == stage.offset_range.end,
            "a stage accounts for its range",
            offset=certificate.until,
        )
        refold.message_time_ms = max(refold.message_time_ms, certificate.message_time_ms)
        refold.messages_counted += certificate.counts.messages
        self._refuse_lost_messages(refold, stage.offset_range.end)
        if result.state is not None:
            progress.state = result.state
        progress.finish_stage(stage, result.met_sessions)
        refold.records += result.records
        for table, files in result.other_record_files.items():
            refold.other_record_files.setdefault(table, []).extend(files)
        refold.quarantine_files += result.quarantine_files
        refold.marks += result.marks
        self._sort_findings(refold.past, result.findings)
        self.result.records += certificate.counts.records
        self.result.messages += certificate.counts.messages
        self._repeat_releases(progress)
        if stage.ends_at_commit:
            self._close_unchanged_sessions(refold)

    def _sort_findings(self, past: PartitionHistory, findings: Iterable[Finding]) -> None:
        """Tell new findings from those that the first fold reported already."""
        for finding in findings:
            key = (finding.finding, finding.offset, finding.session)
            if key in past.reported_findings:
                self.result.repeated_findings.append(finding)
            else:
                self.result.new_findings.append(finding)

    def _close_unchanged_sessions(self, refold: PartitionRefold) -> None:
        """End the refold of all sessions that are as committed at this offset."""
        progress = refold.progress
        points = refold.past.commit_points(progress.offset, progress.offset)
        if not points:
            return
        committed_files = points[0].account.state
        if self.open_stream.joiner.find_damaged_files(committed_files):
            return
        names = progress.undecided_sessions()
        state = self.open_stream.open_state()
        committed_sessions = state.load(committed_files, names)
        new_sessions = state.load(progress.state, names)
        unchanged = [
            name
            for name in names
            if same_session(committed_sessions.get(name), new_sessions.get(name), self.runner)
        ]
        if self.must_be_unchanged and len(unchanged) < len(names):
            changed = sorted(set(names).difference(unchanged))
            raise self._changed_sessions_error(progress, changed)
        progress.close_sessions(unchanged)

    def _changed_sessions_error(
        self, progress: RefoldProgress, changed: Sequence[str]
    ) -> IntegrityError:
        difference = (
            f"another state of {len(changed)} sessions by offset {progress.offset}:"
            f" {', '.join(changed[:5])}"
        )
        return machine_changed_error(self.stream.name, progress.rewind.partition, difference)

    def _repeat_releases(self, progress: RefoldProgress) -> None:
        """Release again the sessions that a person released at the offset of the refold.

        At the start of the refold there is nothing to do: the saved state has those releases.
        """
        rewind = progress.rewind
        for offset in rewind.stage_end_offsets(progress.offset):
            names = rewind.releases_by_hand.get(offset)
            if names and offset > rewind.start:
                self._release_sessions(progress, names, offset)

    def _release_sessions(
        self, progress: RefoldProgress, names: Iterable[str], offset: int
    ) -> None:
        """Release those of the sessions that can be released, and save them."""
        rewind = progress.rewind
        state = self.open_stream.open_state()
        account = replace(rewind.account, headless_since=rewind.headless_since(offset))
        released: dict[str, Session] = {}
        for name, session in state.load(progress.state, names).items():
            if can_be_released(session, account):
                released[name] = clear_finding(session, account, self.stream.tier)
        if released:
            stem = f"{self._file_stem(rewind)}f{offset}"
            state_file = state.save(rewind.partition, stem, released, ())
            progress.state = (*progress.state, state_file)

    def _file_stem(self, rewind: Rewind) -> str:
        """How the names of this refold's files begin."""
        prefix = stem_prefix(rewind.account.epoch, rewind.account.frontier)
        return f"{prefix}{self.result.hold}"

    def _refuse_lost_messages(self, refold: PartitionRefold, offset: int) -> None:
        """Refuse to go on if Kafka lost messages since the first fold.

        Without them the range would be folded to something else. The number of messages is known
        only where slices began and ended, so it is checked there.
        """
        expected = refold.past.count_messages(refold.counted_from, offset)
        if expected is None:
            return
        missing = expected - refold.messages_counted
        if missing > 0:
            raise lost_messages_error(
                self.stream.name,
                refold.progress.rewind.partition,
                f"{missing} of the {expected} messages of [{refold.counted_from}, {offset})"
                " are gone (compacted away, or deleted)",
            )
        refold.messages_counted = 0
        refold.counted_from = offset

    def _build_change(
        self, refold: PartitionRefold, gaps: Iterable[Gap], active_files: Iterable[File]
    ) -> tuple[Change, list[str]]:
        """The change of one partition, and the paths of the files that leave its tables."""
        progress = refold.progress
        rewind = progress.rewind
        account = rewind.account
        record_join = RecordFileJoin(
            self.open_stream.joiner,
            progress,
            self.result.hold,
            self.stream.name if self.must_be_unchanged else "",
        )
        old_files = self._record_files_of_topic(refold, active_files)
        joined_files, replaced_files = record_join.join_table(old_files, refold.records)
        other_tables, other_removed_paths = record_join.join_other_tables(
            refold.past.other_record_files.values(), refold.other_record_files
        )
        new_state = self._final_state_files(progress)
        final_state = account.state if new_state is None else new_state
        closing_marks, new_marks, is_quarantined_already = repaired_marks(
            gaps, rewind.partition, account.topic_id, progress, refold.marks
        )
        quarantine_files = () if is_quarantined_already else tuple(refold.quarantine_files)
        refolded = progress.refolded_range()
        self.result.ranges[rewind.partition] = refolded
        self.result.removed_files += len(replaced_files)
        replaced_until = refolded.end
        if progress.open_sessions != ():
            replaced_until += 1  # The state at the end itself differs from the committed one too.
        change = replace(
            unmoved_change(rewind.partition, account),
            until=rewind.frontier,
            state=new_state,
            records=tuple(joined_files),
            other_records=other_tables,
            quarantine_files=quarantine_files,
            halt=None if rewind.frontier < account.frontier else account.halt,
            marks=(*closing_marks, *new_marks),
            replaced_from=rewind.start,
            replaced_until=replaced_until,
            message_time_ms=refold.message_time_ms,
            removed_rows=sum(file.rows for file in replaced_files),
            quarantined=len(self.open_stream.open_state().quarantined_sessions(final_state)),
        )
        removed_paths = [file.path for file in replaced_files]
        return change, removed_paths + other_removed_paths

    def _record_files_of_topic(
        self, refold: PartitionRefold, active_files: Iterable[File]
    ) -> list[File]:
        """The partition's files in the table of records, of the topic as it exists now."""
        topic_id = refold.progress.rewind.account.topic_id
        files: list[File] = []
        for active_file in active_files:
            origin = refold.past.record_files.get(active_file.path)
            if origin is not None and origin.topic_id == topic_id:
                files.append(origin.file)
        return files

    def _final_state_files(self, progress: RefoldProgress) -> tuple[File, ...] | None:
        """The state files after the refold; None if they stay as they are.

        They are those of the refold, if all sessions were folded to the frontier. Otherwise they
        are the present ones with the sessions that differ on top.
        """
        rewind = progress.rewind
        open_sessions = progress.open_sessions
        if open_sessions is None:
            return progress.state
        if not open_sessions:
            return None
        state = self.open_stream.open_state()
        loaded_sessions = state.load(progress.state, open_sessions)
        sessions = {name: loaded_sessions.get(name) or Session() for name in open_sessions}
        stem = self._file_stem(rewind)
        return save_state(state, rewind.partition, stem, sessions, rewind.account.state)


def held_partitions(ledger: Ledger, hold: str) -> list[Partition]:
    """The partitions that a repair holds."""
    return [
        partition
        for partition in ledger.known_partitions()
        if ledger.partitions[str(partition)].hold == hold
    ]


def release_hold(
    open_stream: OpenStream, head: LedgerHead, hold: str, *, run_id: str = "", reason: str = ""
) -> None:
    """Release a hold. Partitions that it does not hold any more are left alone.

    `reason` says why the repair is not needed any more. It is empty where the repair failed and may
    be tried again.
    """
    partitions = held_partitions(head.ledger, hold)
    if not partitions:
        return
    entry = ReleaseEntry(
        attempt=open_stream.new_attempt(),
        hold=hold,
        run=run_id,
        product_version=__version__,
        changes=_unmoved_changes(head.ledger, partitions),
        reason=reason,
    )
    commit(open_stream.ledger, open_stream.clock, head, entry)


def lost_messages_error(
    stream: str, partition: Partition, loss: str, *, is_halted: bool = False
) -> IntegrityError:
    """Kafka no longer has the messages that a refold needs."""
    advice = (
        "nothing was changed. Restore the messages to Kafka if you have them, or what is damaged"
        " from a backup; or choose a later --from."
    )
    if is_halted:
        advice += (
            f"\nTo go on without them: seriatim repair {stream} --partition {partition} --forward"
        )
    return IntegrityError(f"{stream}: {partition} cannot be folded again: {loss}", next=advice)


def _halted_error(stream: str, halt: Finding) -> IntegrityError:
    return IntegrityError(
        f"{stream}: folding {halt.partition_name} again stops at offset {halt.offset}:"
        f" {halt.finding}",
        cause=halt.cause,
        next="nothing was changed. Fix what the cause names, or go on without these messages:\n"
        f"seriatim repair {stream} --partition {halt.partition_name} --forward",
    )


def _unmoved_changes(ledger: Ledger, partitions: Iterable[Partition]) -> tuple[Change, ...]:
    changes = []
    for partition in partitions:
        account = ledger.partitions[str(partition)]
        changes.append(unmoved_change(partition, account))
    return tuple(changes)
