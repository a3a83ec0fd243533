"""Refold: ranges rewound and folded again into one commit. What repair and backfill have in common.

1. read the ledger and its history; choose for each partition where to begin            nothing
2. hold: the partitions are reserved, so that slices of others go on and theirs wait    a hold
3. stage by stage, in tasks: fold what the scope says, compare with what is committed   orphans
4. put record files together: what was made, and what stays of files that leave         orphans
5. commit: records, state and frontier replaced at once, epochs raised, hold released   done
6. sweep; the tables gaps and quarantine                                                they catch up next time

The last column is what a crash after the step leaves. Whoever goes on writes a hold of their own in
place of the dead one's and begins with 3: nothing that was not committed counts.

Next room: operations/repair/refold_rules.py has the rules; operations/repair/repair.py and
operations/repair/backfill.py say what is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim import __version__
from seriatim.engine.crash_points import crash_point
from seriatim.engine.findings import Finding, GapMark
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.session import Session
from seriatim.engine.state_merging import merge_count
from seriatim.engine.task import PartitionWork, TaskResult, stem_prefix
from seriatim.errors import IntegrityError, PlatformError, ensure, raise_broken_promise
from seriatim.ledger.commit import commit
from seriatim.ledger.gaps import Gap
from seriatim.ledger.history import PartitionHistory
from seriatim.ledger.machine_version import refuse_incompatible_machine
from seriatim.ledger.model import Account, Change, Entry, File
from seriatim.operations.changes import result_of_hole
from seriatim.operations.derived_tables import catch_up_after_run, read_gaps
from seriatim.operations.moved_sessions import MovedSessions, find_moved_sessions
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
from seriatim.operations.retry import ResultByPartition, WorkByPartition, fold_until_stable
from seriatim.operations.run import FoldContext
from seriatim.operations.sweep import sweep_dead
from seriatim.ports import LedgerHead, ReadOptions, SourceFailedError
from seriatim.stream import Stream

ProgressCallback = Callable[[int, int], None]


class RefoldResult(Struct, kw_only=True):
    """What a refold did."""

    sequence: int = -1
    hold: str = ""
    messages: int = 0
    """Read and folded again."""
    records: int = 0
    """Made again."""
    removed_files: int = 0
    """Record files that left the table."""
    ranges: dict[Partition, OffsetRange] = field(default_factory=dict)
    """What was made again, widened to where the last session was as committed."""
    new_findings: list[Finding] = field(default_factory=list)
    """New: what the first fold did not find."""
    repeated_findings: list[Finding] = field(default_factory=list)
    """What the first fold found as well."""
    derived_error: str = ""


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
    """Messages since the last border."""
    counted_from: int = 0

    def advance_stage(self) -> bool:
        """Go on to the next stage. Whether there is one."""
        self.stage = None if self.progress.is_over else next(self.stages, None)
        return self.stage is not None


class RefoldRun:
    """One refold, of one stream."""

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
        self.on_progress = progress or (lambda _done, _total: None)
        self.result = RefoldResult()
        self.must_be_unchanged = False
        """Whether what is made again must be what is there."""

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
        hold = self.context.new_attempt()
        entry = Entry(
            kind="hold",
            attempt=hold,
            run=self.run_id,
            product_version=__version__,
            hold=hold,
            resumed_hold=resumes,
            request=request,
            changes=tuple(
                _unmoved_change(partition, head.ledger.partitions[str(partition)])
                for partition in partitions
            ),
        )
        self.result.hold = hold
        head = commit(self.context.ledger, self.context.clock, head, entry)[0]
        crash_point("held")
        return head

    def release_hold(self) -> None:
        """Give the hold back, where it is still ours: nothing was changed."""
        head = self.context.ledger.head(self.stream.name) or raise_broken_promise(
            "the ledger vanished"
        )
        release_hold(self.context, head, self.result.hold, run_id=self.run_id)

    def refold_partitions(
        self,
        head: LedgerHead,
        rewinds: Sequence[Rewind],
        histories: dict[Partition, PartitionHistory],
        messages_max: int,
    ) -> Iterator[tuple[Change, list[str]]]:
        """Steps 3 and 4: changes, and the record files that leave the table."""
        makings = {
            rewind.partition: PartitionRefold(
                progress=RefoldProgress.begin(rewind),
                stages=plan_stages(rewind, max(1, messages_max // len(rewinds))),
                past=histories[rewind.partition],
                message_time_ms=rewind.base.message_time_ms,
                counted_from=rewind.base.frontier,
            )
            for rewind in rewinds
        }
        for making in makings.values():
            self._repeat_releases(making.progress)
        total, number = sum(len(rewind.read_range) for rewind in rewinds), 0
        while active := {p: making for p, making in makings.items() if making.advance_stage()}:
            self._fold_stage(head, active, number)
            number += 1
            self.on_progress(self.result.messages, max(total, self.result.messages))
            crash_point("stage-folded")
        gaps = read_gaps(self.context.ledger, self.context.derived, head.ledger)
        files = self.context.ledger.active_files(head)
        for making in makings.values():
            yield self._build_change(making, gaps, files)
        crash_point("refolded")

    def commit(
        self, head: LedgerHead, changes: Sequence[Change], removed: Sequence[str], reason: str
    ) -> RefoldResult:
        """Steps 5 and 6."""
        runner = self.runner
        entry = Entry(
            kind="repair",
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
            reason=reason,
        )
        head, done = commit(self.context.ledger, self.context.clock, head, entry)
        self.result.sequence = done.sequence
        sweep_dead(self.context.ledger, self.context.records, head)
        crash_point("swept")
        self.result.derived_error = catch_up_after_run(
            self.context.ledger, self.context.derived, head.ledger
        )
        return self.result

    def _fold_stage(
        self, head: LedgerHead, refolds: dict[Partition, PartitionRefold], number: int
    ) -> None:
        """One stage of each partition that is not over, in one reading."""
        works = {
            partition: self._partition_work(making, number) for partition, making in refolds.items()
        }
        ranges = {partition: OffsetRange(work.start, work.end) for partition, work in works.items()}
        source = self.context.reader.read_ranges(ranges, ReadOptions(with_headers=True))

        def siblings(works: WorkByPartition, results: ResultByPartition) -> MovedSessions:
            state, has_snapshots = self.context.open_state(), self.runner.has_snapshots
            told = {
                p: self._only_sessions_moved_then(refolds[p].past, result)
                for p, result in results.items()
            }
            return find_moved_sessions(head.ledger, works, told, state, has_snapshots=has_snapshots)

        world = self.context
        try:
            results = fold_until_stable(
                self.stream.name, works, source, world.reader, world.make_task, siblings
            )
        except SourceFailedError as failure:
            raise PlatformError(
                f"{self.stream.name}: reading from Kafka broke",
                cause=str(failure)[:600],
                next="check the broker and Spark, then give the same command again; nothing was changed",
            ) from failure
        for partition, making in refolds.items():
            rewind, whole = making.progress.rewind, ranges[partition]
            result = results.get(partition) or result_of_hole(
                partition, rewind.account, whole, world.explain, self.stream.tier
            )
            self._take_result(making, result)

    def _only_sessions_moved_then(self, past: PartitionHistory, result: TaskResult) -> TaskResult:
        """Who lives elsewhere by now may have been at home then: only whom the first fold found
        counts as moved.
        """
        known = {
            session for finding, _, session in past.reported_findings if finding == "moved session"
        }
        return replace(
            result,
            sessions_without_state={
                name: at for name, at in result.sessions_without_state.items() if name in known
            },
        )

    def _partition_work(self, refold: PartitionRefold, number: int) -> PartitionWork:
        progress, stage = (
            refold.progress,
            refold.stage or raise_broken_promise("a work has a stage"),
        )
        account = progress.rewind.account
        return PartitionWork(
            partition=progress.rewind.partition,
            start=stage.offset_range.start,
            end=stage.offset_range.end,
            epoch=account.epoch,
            topic_id=account.topic_id,
            state=progress.state,
            attempt=f"{self.result.hold}s{number}",
            message_time_ms=refold.message_time_ms,
            headless_since=progress.rewind.headless_since(stage.offset_range.start),
            scope=progress.scope(),
            file_name_offset=account.frontier,
        )

    def _take_result(self, refold: PartitionRefold, result: TaskResult) -> None:
        """A stage's result: files, who ended, and at a border who is as committed."""
        progress, stage = (
            refold.progress,
            refold.stage or raise_broken_promise("a result has a stage"),
        )
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
        progress.state = progress.state if result.state is None else result.state
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
            self._settle_unchanged_sessions(refold)

    def _sort_findings(self, past: PartitionHistory, findings: Iterable[Finding]) -> None:
        """Findings are told once: those of the first fold that come again are only said to be still
        so.
        """
        for finding in findings:
            known = (finding.finding, finding.offset, finding.session) in past.reported_findings
            (self.result.repeated_findings if known else self.result.new_findings).append(finding)

    def _settle_unchanged_sessions(self, refold: PartitionRefold) -> None:
        """Who is as committed at this border is left alone from here on."""
        progress = refold.progress
        committed = next(
            (
                point.account
                for point in refold.past.commit_points(progress.offset, progress.offset)
            ),
            None,
        )
        if committed is None or self.context.joiner.find_damaged_files(committed.state):
            return
        names, state = progress.undecided_sessions(), self.context.open_state()
        was, now = state.load(committed.state, names), state.load(progress.state, names)
        alike = [name for name in names if same_session(was.get(name), now.get(name), self.runner)]
        if self.must_be_unchanged and len(alike) < len(names):
            other = sorted(set(names) - set(alike))
            what = f"another state of {len(other)} sessions by offset {progress.offset}: {', '.join(other[:5])}"
            raise machine_changed_error(self.stream.name, progress.rewind.partition, what)
        progress.close_sessions(alike)

    def _repeat_releases(self, progress: RefoldProgress) -> None:
        """Whom a person released where the refold is now. At its very beginning that is in the
        saved state.
        """
        for at in progress.rewind.stage_end_offsets(progress.offset):
            if at > progress.rewind.start and (names := progress.rewind.releases_by_hand.get(at)):
                self._release_sessions(progress, names, at)

    def _release_sessions(
        self, progress: RefoldProgress, names: Iterable[str], offset: int
    ) -> None:
        """A person released these here: what they said holds for the refold, too."""
        rewind, state = progress.rewind, self.context.open_state()
        account = replace(rewind.account, headless_since=rewind.headless_since(offset))
        found = {
            name: one
            for name, one in state.load(progress.state, names).items()
            if can_be_released(one, account)
        }
        if found:
            freed = {
                name: clear_finding(one, account, self.stream.tier) for name, one in found.items()
            }
            stem = f"{stem_prefix(rewind.account.epoch, rewind.account.frontier)}{self.result.hold}f{offset}"
            progress.state = (*progress.state, state.save(rewind.partition, stem, freed, ()))

    def _refuse_lost_messages(self, refold: PartitionRefold, offset: int) -> None:
        """Kafka must still have what it had: a range that lost messages since would be folded to
        something else.
        """
        expected = refold.past.count_messages(refold.counted_from, offset)
        if expected is None:
            return
        if refold.messages_counted < expected:
            rewind = refold.progress.rewind
            raise lost_messages_error(
                self.stream.name,
                rewind.partition,
                f"{expected - refold.messages_counted} of the {expected} messages of [{refold.counted_from}, {offset}) are gone"
                " (compacted away, or deleted)",
            )
        refold.messages_counted, refold.counted_from = 0, offset

    def _build_change(
        self, refold: PartitionRefold, gaps: Iterable[Gap], active: Iterable[File]
    ) -> tuple[Change, list[str]]:
        progress, rewind = refold.progress, refold.progress.rewind
        account, partition = rewind.account, rewind.partition
        files = [
            refold.past.record_files[file.path].file
            for file in active
            if file.path in refold.past.record_files
            and refold.past.record_files[file.path].topic_id == account.topic_id
        ]
        joining = RecordFileJoin(
            self.context.joiner,
            progress,
            self.result.hold,
            self.stream.name if self.must_be_unchanged else "",
        )
        joined, olds = joining.join_table(files, refold.records)
        others, removed = joining.join_other_tables(
            refold.past.other_record_files.values(), refold.other_record_files
        )
        state = self._final_state_files(progress)
        final = account.state if state is None else state
        closed, opened, again = repaired_marks(
            gaps, partition, account.topic_id, progress, refold.marks
        )
        self.result.ranges[partition] = progress.refolded_range()
        self.result.removed_files += len(olds)
        return (
            replace(
                _unmoved_change(partition, account),
                until=rewind.frontier,
                state=state,
                records=tuple(joined),
                other_records=others,
                quarantine_files=() if again else tuple(refold.quarantine_files),
                halt=None if rewind.frontier < account.frontier else account.halt,
                marks=(*closed, *opened),
                replaced_from=rewind.start,
                replaced_until=progress.refolded_range().end + bool(progress.open_sessions != ()),
                message_time_ms=refold.message_time_ms,
                removed_rows=sum(old.rows for old in olds),
                quarantined=len(self.context.open_state().quarantined_sessions(final)),
            ),
            [old.path for old in olds] + removed,
        )

    def _final_state_files(self, progress: RefoldProgress) -> tuple[File, ...] | None:
        """The state files afterwards: those of the refold, or those of now under the sessions that
        differ.
        """
        rewind = progress.rewind
        if progress.open_sessions is None:
            return progress.state
        if not progress.open_sessions:
            return None
        state, files = self.context.open_state(), rewind.account.state
        made = state.load(progress.state, progress.open_sessions)
        sessions = {name: made.get(name) or Session() for name in progress.open_sessions}
        merged = merge_count([file.rows for file in files], len(sessions))
        stem = f"{stem_prefix(rewind.account.epoch, rewind.account.frontier)}{self.result.hold}"
        kept, merge = files[: len(files) - merged], files[len(files) - merged :]
        return (*kept, state.save(rewind.partition, stem, sessions, merge))


def release_hold(
    context: FoldContext, head: LedgerHead, hold: str, *, run_id: str = "", reason: str = ""
) -> None:
    """Give a hold back. Partitions that it does not hold any more are left alone.

    `reason`: why the repair is not needed any more; none where it failed, and may be tried again.
    """
    held = [
        p for p in head.ledger.known_partitions() if head.ledger.partitions[str(p)].hold == hold
    ]
    if not held:
        return
    changes = tuple(
        _unmoved_change(partition, head.ledger.partitions[str(partition)]) for partition in held
    )
    entry = Entry(
        kind="release",
        attempt=context.new_attempt(),
        hold=hold,
        run=run_id,
        product_version=__version__,
        changes=changes,
        reason=reason,
    )
    commit(context.ledger, context.clock, head, entry)


def lost_messages_error(
    stream: str, partition: Partition, loss: str, *, is_halted: bool = False
) -> IntegrityError:
    """Kafka no longer has what a refold needs."""
    forward = (
        f"\nTo go on without them: seriatim repair {stream} --partition {partition} --forward"
        if is_halted
        else ""
    )
    return IntegrityError(
        f"{stream}: {partition} cannot be folded again: {loss}",
        next="nothing was changed. Restore the messages to Kafka if you have them, or what is damaged from a backup;"
        " or choose a later --from." + forward,
    )


def _halted_error(stream: str, halt: Finding) -> IntegrityError:
    return IntegrityError(
        f"{stream}: folding {halt.partition_name} again stops at offset {halt.offset}: {halt.finding}",
        cause=halt.cause,
        next="nothing was changed. Fix what the cause names, or go on without these messages:\n"
        f"seriatim repair {stream} --partition {halt.partition_name} --forward",
    )


def _unmoved_change(partition: Partition, account: Account) -> Change:
    return Change(
        partition=partition,
        epoch=account.epoch,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        initial_frontier=account.initial_frontier,
    )
