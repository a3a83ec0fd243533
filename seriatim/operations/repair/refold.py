"""Refold: ranges are rewound and folded again, and their output is replaced in one commit. A repair and
a backfill are applied by this.

The steps, and what a crash after each step leaves:

1. Refuse a plan that is stale. Delete damaged files that nothing needs.        Nothing.
2. Hold: the partitions are reserved. Slices of other partitions go on.         A hold.
3. Plan again, under the hold: a plan that was approved ten slices ago is
   brought up to date. Only entries that came since are read.                   A hold.
4. Fold stage by stage, in tasks; look at the topics again after each stage;
   compare with the committed state.                                            Orphans.
5. Join record files: what was made, and what stays of replaced files.          Orphans.
6. Commit: records, state and frontiers are replaced at once, epochs are
   raised, the hold is released.                                                All is done.
7. Sweep; update the tables gaps and quarantine.                                They catch up later.

The next attempt replaces the hold of the dead one by its own and begins with step 3: what was not
committed does not count.

The refold of a partition begins at a saved state. It makes all output again from there to the first
committed offset at or after the end of the damage. From there on it goes on only with the sessions
whose state differs from the committed one, up to an offset where they agree, or to the frontier.

Next: operations/rewind.py knows where to begin and what is repeated on the way;
operations/repair/damage.py makes the plan; storage/join.py writes the joined files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim import __version__
from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import File, Files, FilesByTable, SourceFailedError, save_state
from seriatim.engine.findings import Finding, GapMark
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import OffsetRange, Partition, Ranges
from seriatim.engine.records import MAIN_TABLE, table_of_path
from seriatim.engine.session import RefoldScope, ReplacedRecords, Session, SwappedRanges
from seriatim.engine.task import PartitionWork, TaskResult, stem_prefix
from seriatim.errors import (
    ConfigError,
    FencedError,
    IntegrityError,
    PlatformError,
    SeriatimError,
    ensure,
    raise_broken_promise,
)
from seriatim.ledger.commit import commit, require_head
from seriatim.ledger.entries import HoldEntry, ReleaseEntry, RepairEntry
from seriatim.ledger.gaps import Gap
from seriatim.ledger.manifests import LedgerHead, Manifest
from seriatim.ledger.model import (
    Account,
    Change,
    Ledger,
    refuse_incompatible_machine,
    unmoved_change,
)
from seriatim.ledger.replaced_files import Intent
from seriatim.operations.followers import catch_up_after_run
from seriatim.operations.prove.partition_rules import state_row_reader
from seriatim.operations.repair.damage import (
    ForwardAction,
    LiftHaltAction,
    RebuildStateAction,
    RefoldAction,
    RepairAction,
    RepairPlan,
    held_partitions,
    plan_repair,
    request_of_hold,
)
from seriatim.operations.repair.forward import CLOSED_BY_FORWARD
from seriatim.operations.repair.rebuild_state import (
    RebuiltState,
    StateRebuilder,
    StateToRebuild,
    change_with_rebuilt_state,
    open_gaps_of,
)
from seriatim.operations.repair_text import held_by_repair
from seriatim.operations.rewind import (
    END_OFFSET,
    LedgerHistory,
    PartitionHistory,
    RefoldStage,
    Rewind,
    lost_messages_error,
    plan_stages,
    repeat_releases,
    require_same_topic,
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
from seriatim.operations.sweep import sweep_attempts, sweep_dead
from seriatim.ports import Joiner, OpenStream, ProgressCallback, ReadOptions
from seriatim.workers import ChooseWorkers, map_or_raise, this_process

REGION_ROWS_MAX = 1_000_000
FILES_SHOWN_MAX = 10


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
    ranges: Ranges = field(default_factory=dict)
    """What was made again, up to where the last session was as committed."""
    new_findings: list[Finding] = field(default_factory=list)
    """Findings that the first fold did not have."""
    repeated_findings: list[Finding] = field(default_factory=list)
    """Findings that the first fold had as well."""
    derived_error: str = ""
    """Why the derived tables could not be updated; empty: they were."""


class DamagedInputError(Exception):
    """Record files of which a part must stay, and that are not as committed.

    The caller catches this and folds again the ranges that these files were made of, so a person
    sees it only as `error()`, where that did not help.
    """

    def __init__(self, damaged_files: Mapping[str, str]) -> None:
        super().__init__(damaged_files)
        self.damaged_files = dict(damaged_files)
        """By path, what is wrong with each."""

    def error(self, stream: str) -> IntegrityError:
        """The error for people, where folding these files again does not help either."""
        file_lines: list[str] = []
        for path, defect in self.damaged_files.items():
            file_lines.append(f"{path}: {defect}")
        return IntegrityError(
            f"{stream}: {len(self.damaged_files)} record files that hold what is to stay are"
            " damaged",
            files="\n".join(file_lines[:FILES_SHOWN_MAX]),
            cause="they were changed or lost after they were committed, and cannot be made again"
            " from Kafka",
            next="nothing was changed. Restore these files from a backup, then repair again",
        )


class PartitionRefold(Struct, kw_only=True):
    """One partition while it is folded again: how far it is, and what it has made."""

    rewind: Rewind
    history: PartitionHistory
    stages: Iterator[RefoldStage]
    stage: RefoldStage | None = None
    """The stage that is folded now."""
    open_sessions: tuple[str, ...] | None
    """Sessions that are still folded; None: all."""
    met_sessions: set[str] = field(default_factory=set)
    """Sessions that had a message."""
    session_ends: dict[str, int] = field(default_factory=dict)
    """Sessions whose refold is over, and the offset from which on they are as committed."""
    offset: int
    state: Files
    records: list[File] = field(default_factory=list)
    other_record_files: dict[str, list[File]] = field(default_factory=dict)
    quarantine_files: list[File] = field(default_factory=list)
    marks: list[GapMark] = field(default_factory=list)
    message_time_ms: int
    messages_counted: int = 0
    """Messages that were read from `counted_from` on."""
    counted_from: int
    """The last offset up to which the number of messages was checked."""

    @classmethod
    def begin(cls, rewind: Rewind, history: PartitionHistory, messages_max: int) -> PartitionRefold:
        """A partition before its first stage."""
        return cls(
            rewind=rewind,
            history=history,
            stages=plan_stages(rewind, messages_max),
            open_sessions=rewind.request.sessions,
            state=rewind.base.state,
            offset=rewind.start,
            message_time_ms=rewind.base.message_time_ms,
            counted_from=rewind.start,
        )

    @property
    def account(self) -> Account:
        """The partition as it is committed now."""
        return self.rewind.account

    def advance_stage(self) -> bool:
        """Go on to the next stage. Returns whether there is one."""
        is_over = self.offset >= self.rewind.frontier or self.open_sessions == ()
        self.stage = None if is_over else next(self.stages, None)
        return self.stage is not None

    def current_stage(self) -> RefoldStage:
        """The stage that is folded now."""
        return self.stage or raise_broken_promise("a partition that is folded has a stage")

    def scope(self) -> RefoldScope:
        """The sessions that are folded in the next stage."""
        return RefoldScope(
            sessions=self.open_sessions,
            finished_sessions=tuple(self.session_ends),
            swapped_ranges=self.rewind.swapped_ranges,
        )

    def add_result(self, result: TaskResult) -> None:
        """Add what a stage made: its files, the sessions that had a message, and its marks."""
        if result.state is not None:
            self.state = result.state
        self.met_sessions.update(result.met_sessions)
        self.records += result.records
        for table, files in result.other_record_files.items():
            self.other_record_files.setdefault(table, []).extend(files)
        self.quarantine_files += result.quarantine_files
        self.marks += result.marks

    def undecided_sessions(self) -> list[str]:
        """Sessions that may differ from the committed ones, and have to be compared."""
        names = self.met_sessions
        if self.open_sessions is not None:
            names = names.intersection(self.open_sessions)
        return sorted(names.difference(self.session_ends))

    def close_sessions(self, committed_sessions: Iterable[str]) -> None:
        """End the refold of sessions that are as committed at this offset.

        From here on only the other undecided sessions are folded.
        """
        closed = set(committed_sessions)
        undecided = self.undecided_sessions()
        self.open_sessions = tuple(name for name in undecided if name not in closed)
        self.session_ends |= dict.fromkeys(closed, self.offset)

    def refolded_range(self) -> OffsetRange:
        """The range that was made again, up to where the last session was as committed."""
        start = self.rewind.start
        end = self.rewind.first_commit_offset
        if self.open_sessions != ():
            end = self.rewind.frontier
        return OffsetRange(start, max([start, end, *self.session_ends.values()]))

    def replaced_records(self) -> ReplacedRecords:
        """Which committed records are replaced by those that were made."""
        frontier = self.account.frontier
        end = self.rewind.first_commit_offset
        session_ends = dict(self.session_ends)
        if self.open_sessions is None:
            end = frontier
        else:
            session_ends |= dict.fromkeys(self.open_sessions, frontier)
        sessions = None
        if self.rewind.request.sessions is not None:
            sessions = frozenset(self.rewind.request.sessions)
        return ReplacedRecords(
            start=self.rewind.start, end=end, sessions=sessions, session_ends=session_ends
        )


class RepairRun:
    """One repair that is applied.

    Its methods come in the order of the steps: applying a plan; holds; the actions of a plan;
    folding; joining; committing.
    """

    def __init__(
        self,
        open_stream: OpenStream,
        *,
        run_id: str = "",
        progress: ProgressCallback | None = None,
        choose_workers: ChooseWorkers = this_process,
        load_runner: Callable[[], Runner] | None = None,
    ) -> None:
        """`choose_workers` chooses where record files are joined and state is rebuilt. `load_runner`
        loads the machine where that is another process.
        """
        self.open_stream = open_stream
        self.stream_name = open_stream.stream.name
        self.runner = open_stream.runner
        self.run_id = run_id
        self.choose_workers = choose_workers
        self.load_runner = load_runner
        self.on_progress = progress or (lambda _messages, _total: None)
        self.history = LedgerHistory(open_stream.ledger, self.stream_name)
        self.suspects: frozenset[str] = frozenset()
        """Files that an attempt of this repair found to be damaged."""
        self.must_be_unchanged = False
        """Whether it is refused to make other records and state than those that are committed."""
        self.result = RefoldResult()
        """Of the present attempt. Each attempt has a hold of its own."""

    def apply(self, repair_plan: RepairPlan, messages_max: int, approval: str = "") -> RefoldResult:
        """Apply a plan: all steps of the module's docstring.

        If steps 3 to 5 fail, the hold is released and nothing is changed.
        """
        # 1. Refusals, and files that nothing needs.
        self._refuse_stale(repair_plan, approval)
        _refuse_other_holds(repair_plan)
        self.open_stream.records.delete(repair_plan.deleted_files)
        if not repair_plan.actions:
            self._release_unneeded_hold(repair_plan)
            return self.result
        # 2. The hold.
        self.must_be_unchanged = repair_plan.request.unchanged
        if repair_plan.history is not None:
            self.history = repair_plan.history
        head = self._hold_partitions_of_plan(repair_plan)
        # 3 to 7. The work.
        try:
            return self._refold_until_undamaged(head, repair_plan, messages_max)
        except (Exception, KeyboardInterrupt) as error:
            is_committed = self.result.sequence >= 0
            if is_committed:
                raise  # What failed came after the commit, and the next run catches up with it.
            if self._is_overtaken(repair_plan.partitions):
                # The other repair has swept our files: the error says no more than that.
                raise FencedError(
                    f"{repair_plan.stream}: another repair took over",
                    found=str(error)[:400],
                    next="nothing was changed by this one;"
                    f" `seriatim status {repair_plan.stream}` shows how it is",
                ) from error
            release_hold(self.open_stream, self._head(), self.result.hold, run_id=self.run_id)
            raise

    def _head(self) -> LedgerHead:
        return require_head(self.open_stream.ledger, self.stream_name)

    def _refuse_stale(self, repair_plan: RepairPlan, approval: str) -> None:
        if approval and approval != repair_plan.approval:
            raise IntegrityError(
                f"{repair_plan.stream}: the plan that was approved is not the one of now",
                cause="an epoch or a halt of its partitions changed since: another repair, a new"
                " finding, a decision",
                next="look at the plan again and approve that one:"
                f" seriatim repair {repair_plan.stream}",
            )

    def _refold_until_undamaged(
        self, head: LedgerHead, repair_plan: RepairPlan, messages_max: int
    ) -> RefoldResult:
        """Fold again until all files that are read are as committed.

        A damaged file becomes a suspect, which widens the range of the next attempt. A file that is
        still damaged as a suspect is an `IntegrityError`.
        """
        while True:
            try:
                return self._apply_under_hold(head, repair_plan, messages_max)
            except DamagedInputError as damaged_input:
                if self.suspects.issuperset(damaged_input.damaged_files):
                    raise damaged_input.error(repair_plan.stream) from None
                self.suspects |= frozenset(damaged_input.damaged_files)
            request = repair_plan.request.to_json()
            head = self.place_hold(self._head(), repair_plan.partitions, request, self.result.hold)

    # Holds

    def _hold_partitions_of_plan(self, repair_plan: RepairPlan) -> LedgerHead:
        """Hold the partitions of a plan. Raises `FencedError` if another repair was faster."""
        head = self._head()
        hold_ids = {account.hold for account in head.ledger.partitions.values()}
        resumed_hold = repair_plan.resumed_hold
        if resumed_hold is not None and resumed_hold not in hold_ids:
            raise _overtaken_error(repair_plan.stream, f"hold {resumed_hold} is gone")
        request = repair_plan.request.to_json()
        try:
            return self.place_hold(head, repair_plan.partitions, request, resumed_hold)
        except FencedError as fenced:
            raise _overtaken_error(repair_plan.stream, fenced.message) from None

    def place_hold(
        self,
        head: LedgerHead,
        partitions: Iterable[Partition],
        request: str,
        resumed_hold: str | None = None,
    ) -> LedgerHead:
        """Reserve partitions for a new attempt, or take over the hold of a refold that died."""
        runner = self.runner
        refuse_incompatible_machine(head.ledger, runner)
        hold = self.open_stream.new_attempt()
        entry = HoldEntry(
            attempt=hold,
            run=self.run_id,
            product_version=__version__,
            hold=hold,
            resumed_hold=resumed_hold,
            request=request,
            changes=_unmoved_changes(head.ledger, partitions),
        )
        # Before the commit: whoever stops the command while it commits is told this id.
        previous_result = self.result
        self.result = RefoldResult(hold=hold)
        try:
            head, committed = commit(self.open_stream.ledger, self.open_stream.clock, head, entry)
        except BaseException:
            # `apply` must still find the hold of the attempt before.
            self.result = previous_result
            raise
        if committed.sequence == self.history.sequence + 1 == head.ledger.sequence:
            self.history.add_entry(Manifest(entry=committed, ledger=head.ledger))
        crash_point("held")
        return head

    def _release_unneeded_hold(self, repair_plan: RepairPlan) -> None:
        """Release the hold of an earlier attempt, because nothing is damaged any more."""
        if repair_plan.resumed_hold is not None:
            reason = "nothing is damaged any more"
            release_hold(self.open_stream, self._head(), repair_plan.resumed_hold, reason=reason)

    def _is_overtaken(self, partitions: Sequence[Partition]) -> bool:
        """Whether another repair has taken over the hold."""
        accounts = self._head().ledger.partitions
        for partition in partitions:
            if accounts[str(partition)].hold != self.result.hold:
                return True
        return False

    # The actions of a plan

    def _apply_under_hold(
        self, head: LedgerHead, repair_plan: RepairPlan, messages_max: int
    ) -> RefoldResult:
        """Steps 3 to 7, now that no other run can move the partitions."""
        # 3. The plan of now, of the partitions that are held.
        request = repair_plan.request
        new_plan = plan_repair(self.open_stream, request, head, self.suspects, self.history)
        partitions = repair_plan.partitions
        actions = [action for action in new_plan.actions if action.partition in partitions]
        if not actions:
            raise _nothing_left_error(new_plan)
        # 4 and 5. The refolds, and the other actions on top of them.
        changes, removed_files = self._refold_changes(head, actions, messages_max)
        rebuilt_states = self._rebuild_states(actions, head)
        for action in actions:
            changes[action.partition] = self._change_by_action(
                action, head, changes.get(action.partition), rebuilt_states
            )
        for partition in partitions:
            if partition not in changes:
                # Nothing is wrong here any more. The commit releases the hold of this one too.
                account = head.ledger.partitions[str(partition)]
                unmoved = _unmoved_change_with_quarantine(partition, account)
                changes[partition] = replace(unmoved, halt=account.halt)
        # 6. The commit.
        reason = "; ".join(_describe_action(action) for action in actions)
        sorted_changes = [changes[partition] for partition in sorted(changes)]
        committed_head = self._commit(head, sorted_changes, removed_files, reason)
        # 7. What follows from it.
        self._settle_files(committed_head, sorted_changes, removed_files)
        sweep_dead(self.open_stream.ledger, self.open_stream.records, committed_head)
        crash_point("swept")
        self.result.derived_error = catch_up_after_run(
            self.open_stream.ledger, self.open_stream.derived, committed_head.ledger
        )
        self._delete_damaged_files(head, changes, removed_files)
        return self.result

    def _change_by_action(
        self,
        action: RepairAction,
        head: LedgerHead,
        refold_change: Change | None,
        rebuilt_states: Mapping[Partition, RebuiltState],
    ) -> Change:
        """What an action does to its partition, on top of its refold where there is one."""
        account = head.ledger.partitions[str(action.partition)]
        change = refold_change or _unmoved_change_with_quarantine(action.partition, account)
        if isinstance(action, RebuildStateAction):
            return change_with_rebuilt_state(
                replace(change, halt=account.halt),
                account,
                rebuilt_states[action.partition],
                action.reason,
            )
        if isinstance(action, LiftHaltAction):
            return replace(change, halt=None)
        if isinstance(action, ForwardAction):
            forward = action.change
            return replace(
                change,
                halt=None,
                marks=(*change.marks, *forward.marks),
                until=forward.until,
                headless_since=forward.headless_since,
                log_end=forward.log_end,
            )
        return change

    def _rebuild_states(
        self, actions: Iterable[RepairAction], head: LedgerHead
    ) -> dict[Partition, RebuiltState]:
        """The state of partitions that is rebuilt from records, where Kafka cannot give it back."""
        works = []
        for action in actions:
            if isinstance(action, RebuildStateAction):
                works.append(self._state_to_rebuild(action.partition, head))
        if not works:
            return {}
        row_reader = None
        if self.open_stream.stream.machine == "table":
            row_reader = state_row_reader(self.runner, self.load_runner)
        rebuilder = StateRebuilder(
            self.open_stream.joiner,
            self.open_stream.open_state(),
            self.open_stream.stream.tier,
            row_reader,
        )
        records = sum(file.rows for work in works for file in work.records)
        answers = map_or_raise(self.choose_workers(records), rebuilder, works)
        return {work.partition: rebuilt for work, rebuilt in zip(works, answers, strict=True)}

    def _state_to_rebuild(self, partition: Partition, head: LedgerHead) -> StateToRebuild:
        account = head.ledger.partitions[str(partition)]
        active_paths = self.open_stream.ledger.active_paths(head)
        history = self.history.of_partition(partition)
        return StateToRebuild(
            partition=partition,
            account=account,
            records=tuple(history.files_of_topic(account.topic_id, active_paths)),
            open_gaps=open_gaps_of(partition, account.topic_id, self.history.gaps),
            stem=f"{stem_prefix(account.epoch, account.frontier)}{self.result.hold}n",
        )

    def _refold_changes(
        self, head: LedgerHead, actions: Sequence[RepairAction], messages_max: int
    ) -> tuple[dict[Partition, Change], list[File]]:
        """Steps 4 and 5: the changes of the refolds, and the files that leave the tables."""
        rewinds = [action.rewind for action in actions if isinstance(action, RefoldAction)]
        changes: dict[Partition, Change] = {}
        removed_files: list[File] = []
        if not rewinds:
            return changes, removed_files
        refolds = self._begin_refolds(rewinds, messages_max)
        # 4. Fold stage by stage: all partitions that are not over, in one reading.
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
        # 5. Join the record files.
        active_paths = self.open_stream.ledger.active_paths(head)
        tables = {
            partition: self._tables_to_join(refold, active_paths)
            for partition, refold in refolds.items()
        }
        works = [table for own_tables in tables.values() for table in own_tables]
        workers = self.choose_workers(sum(work.rows for work in works))
        answers = map_or_raise(workers, TableJoiner(self.open_stream.joiner), works)
        for partition, refold in refolds.items():
            joined_tables = list(islice(answers, len(tables[partition])))
            self._refuse_joined(partition, joined_tables)
            changes[partition], replaced_files = self._build_change(refold, joined_tables)
            removed_files += replaced_files
        crash_point("refolded")
        return changes, removed_files

    # Folding

    def _begin_refolds(
        self, rewinds: Sequence[Rewind], messages_max: int
    ) -> dict[Partition, PartitionRefold]:
        messages_per_partition = max(1, messages_max // len(rewinds))
        refolds: dict[Partition, PartitionRefold] = {}
        for rewind in rewinds:
            history = self.history.of_partition(rewind.partition)
            refold = PartitionRefold.begin(rewind, history, messages_per_partition)
            self._repeat_releases(refold)
            refolds[rewind.partition] = refold
        return refolds

    def _fold_stage(
        self, head: LedgerHead, refolds: dict[Partition, PartitionRefold], number: int
    ) -> None:
        """Fold one stage of each partition that is not over, in one reading."""
        open_stream = self.open_stream
        works: dict[Partition, PartitionWork] = {}
        ranges: Ranges = {}
        for partition, refold in refolds.items():
            works[partition] = self._partition_work(refold, number)
            ranges[partition] = refold.current_stage().offset_range
        source = open_stream.reader.read_ranges(ranges, ReadOptions(with_headers=True))
        if not self.result.messages:
            # Rate and remaining time are those of folding, without the start of Spark.
            self.on_progress(0, sum(len(offset_range) for offset_range in ranges.values()))

        def find_moved(works: WorkByPartition, results: ResultByPartition) -> MovedSessions:
            return self._find_moved_sessions(head.ledger, refolds, works, results)

        try:
            results = fold_until_stable(
                self.stream_name,
                works,
                source,
                open_stream.reader,
                open_stream.make_task,
                find_moved,
            )
        except SourceFailedError as failure:
            raise PlatformError(
                f"{self.stream_name}: reading from Kafka broke",
                cause=str(failure)[:600],
                next="check the broker and Spark, then give the same command again; nothing was"
                " changed",
            ) from failure
        for partition, refold in refolds.items():
            if partition not in results:
                # No message was read in this range: all of it is a hole.
                tier = open_stream.stream.tier
                results[partition] = result_of_hole(
                    partition, refold.account, ranges[partition], open_stream.explain, tier
                )
        self._refuse_other_topics(refolds)
        for partition, refold in refolds.items():
            self._take_result(refold, results[partition])

    def _refuse_other_topics(self, refolds: Mapping[Partition, PartitionRefold]) -> None:
        """Look at the topics again, after a stage was read and before it counts.

        A topic may have been created again while it was read. At the same offsets it has other
        messages then.
        """
        bounds = self.open_stream.log.bounds(self.open_stream.stream.topics)
        for partition, refold in refolds.items():
            require_same_topic(self.stream_name, partition, refold.account, bounds.get(partition))

    def _find_moved_sessions(
        self,
        ledger: Ledger,
        refolds: Mapping[Partition, PartitionRefold],
        works: WorkByPartition,
        results: ResultByPartition,
    ) -> MovedSessions:
        """The sessions that the first fold found to be moved, and that lack a state here again.

        No other session can be moved: one that lives in another partition now may have lived in
        this one then.
        """
        moved_at_first_fold: dict[Partition, TaskResult] = {}
        for partition, result in results.items():
            moved_then = refolds[partition].history.moved_sessions()
            sessions_without_state = {
                name: offset
                for name, offset in result.sessions_without_state.items()
                if name in moved_then
            }
            moved_at_first_fold[partition] = replace(
                result, sessions_without_state=sessions_without_state
            )
        return find_moved_sessions(
            ledger,
            works,
            moved_at_first_fold,
            self.open_stream.open_state(),
            has_snapshots=self.runner.has_snapshots,
        )

    def _partition_work(self, refold: PartitionRefold, number: int) -> PartitionWork:
        account = refold.account
        stage_range = refold.current_stage().offset_range
        return PartitionWork(
            partition=refold.rewind.partition,
            start=stage_range.start,
            end=stage_range.end,
            epoch=account.epoch,
            topic_id=account.topic_id,
            state=refold.state,
            attempt=f"{self.result.hold}s{number}",
            message_time_ms=refold.message_time_ms,
            headless_since=refold.rewind.headless_since(stage_range.start),
            scope=refold.scope(),
            file_name_offset=account.frontier,
        )

    def _take_result(self, refold: PartitionRefold, result: TaskResult) -> None:
        """Take the result of a stage: its files, findings and counts.

        At a committed offset the sessions are compared with the committed ones. A partition that
        halts, or that has lost messages, ends the refold with an error.
        """
        stage = refold.current_stage()
        certificate = result.certificate or raise_broken_promise("a result without a certificate")
        if result.halt is not None:
            raise _halted_error(self.stream_name, result.halt)
        ensure(
            certificate.until == stage.offset_range.end,
            "a stage accounts for its range",
            offset=certificate.until,
        )
        refold.message_time_ms = max(refold.message_time_ms, certificate.message_time_ms)
        refold.messages_counted += certificate.counts.messages
        self._refuse_lost_messages(refold, stage.offset_range.end)
        refold.add_result(result)
        refold.offset = stage.offset_range.end
        for finding in result.findings:
            key = (finding.finding, finding.offset, finding.session)
            if key in refold.history.reported_findings:
                self.result.repeated_findings.append(finding)
            else:
                self.result.new_findings.append(finding)
        self.result.records += certificate.counts.records
        self.result.messages += certificate.counts.messages
        self._repeat_releases(refold)
        if stage.ends_at_commit:
            self._close_unchanged_sessions(refold)

    def _repeat_releases(self, refold: PartitionRefold) -> None:
        """Release again the sessions that a person released at the offset of the refold."""
        refold.state = repeat_releases(
            refold.rewind,
            refold.offset,
            self.open_stream.stream.tier,
            self.open_stream.open_state(),
            refold.state,
            self._file_stem(refold),
        )

    def _file_stem(self, refold: PartitionRefold) -> str:
        """How the names of this refold's files begin."""
        prefix = stem_prefix(refold.account.epoch, refold.account.frontier)
        return f"{prefix}{self.result.hold}"

    def _refuse_lost_messages(self, refold: PartitionRefold, offset: int) -> None:
        """Refuse to go on if Kafka lost messages since the first fold.

        Without them the range would be folded to something else. The number of messages is known
        only where slices began and ended, so it is checked there.
        """
        expected = refold.history.count_messages(refold.counted_from, offset)
        if expected is None:
            return
        missing = expected - refold.messages_counted
        if missing > 0:
            raise lost_messages_error(
                self.stream_name,
                refold.rewind.partition,
                f"{missing} of the {expected} messages of [{refold.counted_from}, {offset})"
                " are gone (compacted away, or deleted)",
            )
        refold.messages_counted = 0
        refold.counted_from = offset

    def _close_unchanged_sessions(self, refold: PartitionRefold) -> None:
        """End the refold of all sessions that are as committed at this offset."""
        points = refold.history.commit_points(refold.offset, refold.offset)
        if not points:
            return
        committed_files = points[0].account.state
        if self.open_stream.joiner.find_damaged_files(committed_files):
            return
        names = refold.undecided_sessions()
        state = self.open_stream.open_state()
        committed_sessions = state.open_sessions(committed_files, names)
        new_sessions = state.open_sessions(refold.state, names)
        unchanged = [
            name
            for name in names
            if same_session(committed_sessions.get(name), new_sessions.get(name), self.runner)
        ]
        if self.must_be_unchanged and len(unchanged) < len(names):
            changed = sorted(set(names).difference(unchanged))
            difference = (
                f"another state of {len(changed)} sessions by offset {refold.offset}:"
                f" {', '.join(changed[:5])}"
            )
            raise _machine_changed_error(self.stream_name, refold.rewind.partition, difference)
        refold.close_sessions(unchanged)

    # Joining

    def _tables_to_join(self, refold: PartitionRefold, active_paths: set[str]) -> list[TableToJoin]:
        """The tables of one partition: that of its records, then the further ones."""
        topic_id = refold.account.topic_id
        old_files = refold.history.files_of_topic(topic_id, active_paths)
        tables = [self._table_to_join(refold, MAIN_TABLE, old_files, refold.records)]
        old_files_by_table: dict[str, list[File]] = {
            table: [] for table in refold.other_record_files
        }
        for origin in refold.history.other_record_files.values():
            if origin.topic_id == topic_id:
                table = table_of_path(origin.file.path)
                old_files_by_table.setdefault(table, []).append(origin.file)
        for table, table_files in sorted(old_files_by_table.items()):
            new_files = refold.other_record_files.get(table, [])
            tables.append(self._table_to_join(refold, table, table_files, new_files))
        return tables

    def _table_to_join(
        self,
        refold: PartitionRefold,
        table: str,
        old_files: Sequence[File],
        new_files: Sequence[File],
    ) -> TableToJoin:
        replaced = refold.replaced_records()
        range_end = max(replaced.end_offset, 1)
        files_in_range = [
            file
            for file in old_files
            if file.last_offset >= replaced.start and file.first_offset < range_end
        ]
        return TableToJoin(
            partition=refold.rewind.partition,
            table=table,
            stem=self._file_stem(refold),
            old_files=tuple(files_in_range),
            new_files=tuple(new_files),
            replaced=replaced,
            must_be_unchanged=self.must_be_unchanged,
        )

    def _refuse_joined(self, partition: Partition, joined_tables: Sequence[JoinedTable]) -> None:
        """Raise what forbids to commit the tables of one partition."""
        for joined in joined_tables:
            if joined.damaged_files:
                raise DamagedInputError(joined.damaged_files)
            if joined.changed_offset is not None:
                difference = f"other records at offset {joined.changed_offset}"
                raise _machine_changed_error(self.stream_name, partition, difference)

    def _build_change(
        self, refold: PartitionRefold, joined_tables: Sequence[JoinedTable]
    ) -> tuple[Change, list[File]]:
        """The change of one partition, and the files that leave its tables."""
        rewind = refold.rewind
        account = refold.account
        records, *other_tables = joined_tables
        replaced_files = list(records.replaced_files)
        other_records: FilesByTable = {}
        other_replaced_files: list[File] = []
        for joined in other_tables:
            if joined.joined_files:
                other_records[joined.table] = joined.joined_files
            other_replaced_files += joined.replaced_files
        new_state = self._final_state_files(refold)
        final_state = account.state if new_state is None else new_state
        closing_marks, new_marks, is_quarantined_already = repaired_marks(self.history.gaps, refold)
        quarantine_files = () if is_quarantined_already else tuple(refold.quarantine_files)
        refolded = refold.refolded_range()
        self.result.ranges[rewind.partition] = refolded
        self.result.removed_files += len(replaced_files)
        replaced_until = refolded.end
        if refold.open_sessions != ():
            replaced_until += 1  # The state at the end itself differs from the committed one too.
        change = replace(
            unmoved_change(rewind.partition, account),
            until=rewind.frontier,
            state=new_state,
            records=records.joined_files,
            other_records=other_records,
            quarantine_files=quarantine_files,
            halt=None if rewind.frontier < account.frontier else account.halt,
            marks=(*closing_marks, *new_marks),
            replaced_from=rewind.start,
            replaced_until=replaced_until,
            message_time_ms=refold.message_time_ms,
            removed_rows=sum(file.rows for file in replaced_files),
            quarantined=len(self.open_stream.open_state().quarantined_sessions(final_state)),
        )
        return change, replaced_files + other_replaced_files

    def _final_state_files(self, refold: PartitionRefold) -> Files | None:
        """The state files after the refold; None if they stay as they are.

        They are those of the refold, if all sessions were folded to the frontier. Otherwise they
        are the present ones with the sessions that differ on top.
        """
        open_sessions = refold.open_sessions
        if open_sessions is None:
            return refold.state
        if not open_sessions:
            return None
        state = self.open_stream.open_state()
        loaded_sessions = state.load(refold.state, open_sessions)
        sessions = {name: loaded_sessions.get(name) or Session() for name in open_sessions}
        return save_state(
            state,
            refold.rewind.partition,
            self._file_stem(refold),
            sessions,
            refold.account.state,
        )

    # Committing

    def _commit(
        self,
        head: LedgerHead,
        changes: Sequence[Change],
        removed_files: Sequence[File],
        reason: str,
    ) -> LedgerHead:
        """Step 6."""
        runner = self.runner
        entry = RepairEntry(
            attempt=self.result.hold,
            hold=self.result.hold,
            run=self.run_id,
            product_version=__version__,
            machine=runner.name,
            shape=runner.shape,
            state_version=runner.state_version,
            changes=tuple(changes),
            removed_paths=tuple(sorted(file.path for file in removed_files)),
            findings=tuple(self.result.new_findings),
            refolded_messages=self.result.messages,
            reason=reason,
        )
        head, committed_entry = commit(self.open_stream.ledger, self.open_stream.clock, head, entry)
        self.result.sequence = committed_entry.sequence
        return head

    def _settle_files(
        self, head: LedgerHead, changes: Sequence[Change], removed_files: Sequence[File]
    ) -> None:
        """Delete what the refold wrote and did not commit, and note which files it replaced.

        The sweep would come to the same, but it would have to look up in old manifests who named
        these files.
        """
        records = self.open_stream.records
        removed_paths = {file.path for file in removed_files}
        for change in changes:
            partition = change.partition
            stem = f"{stem_prefix(change.epoch, change.frontier)}{self.result.hold}"
            sweep_attempts(records, partition, stem, {file.path for file in change.files()})
            replaced_paths = sorted(removed_paths.intersection(records.paths(partition)))
            if replaced_paths:
                sequence = head.ledger.sequence
                note = Intent(
                    partition=partition,
                    # Not the name of the sweep's own notes: its note of the same entry would
                    # replace this one.
                    attempt=f"replaced-{self.result.hold}",
                    sequence=sequence,
                    records=tuple(replaced_paths),
                )
                records.put_intent(note)

    def _delete_damaged_files(
        self,
        head: LedgerHead,
        changes: Mapping[Partition, Change],
        removed_files: Sequence[File],
    ) -> None:
        """Delete the files that were replaced because they are damaged.

        Other files that were replaced stay for a while, for looking back. Damaged ones are of no
        use for that.
        """
        replaced_files = list(removed_files)
        for partition, change in changes.items():
            if change.state is None:
                continue
            new_paths = {file.path for file in change.state}
            old_files = head.ledger.partitions[str(partition)].state
            replaced_files += [file for file in old_files if file.path not in new_paths]
        damaged_files = self.open_stream.joiner.find_damaged_files(replaced_files)
        self.open_stream.records.delete(damaged_files)


def abandon_repair(open_stream: OpenStream, hold: str) -> list[Partition]:
    """Give up the repair of this id: its partitions are read again as they are."""
    request_of_hold(open_stream, hold)
    head = require_head(open_stream.ledger, open_stream.stream.name)
    partitions = held_partitions(head.ledger, hold)
    release_hold(open_stream, head, hold, reason="given up")
    return partitions


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


def _unmoved_changes(ledger: Ledger, partitions: Iterable[Partition]) -> tuple[Change, ...]:
    changes = []
    for partition in partitions:
        account = ledger.partitions[str(partition)]
        changes.append(unmoved_change(partition, account))
    return tuple(changes)


def _unmoved_change_with_quarantine(partition: Partition, account: Account) -> Change:
    """A change that leaves a partition where it is, with as many sessions in quarantine."""
    return replace(unmoved_change(partition, account), quarantined=account.quarantined)


def _describe_action(action: RepairAction) -> str:
    if isinstance(action, RefoldAction):
        return f"{action.partition}: {action.rewind.request.reason}"
    if isinstance(action, LiftHaltAction):
        return f"{action.partition}: goes on, {action.reason}"
    if isinstance(action, RebuildStateAction):
        return f"{action.partition}: state made of its records, {action.reason}"
    return f"{action.partition}: goes on after {action.passed_range}"


# Files that are written anew


class TableToJoin(Struct, frozen=True, kw_only=True):
    """A piece of work: one table of a partition, of which a part was made again."""

    partition: Partition
    table: str
    stem: str
    """How the names of the new files begin."""
    old_files: Files
    """The committed files that may have records that are replaced."""
    new_files: Files
    """The files with what was made again."""
    replaced: ReplacedRecords
    must_be_unchanged: bool
    """Whether the records that were made must be those that they replace."""

    def __str__(self) -> str:
        return f"{self.partition} {self.table}".rstrip()

    @property
    def rows(self) -> int:
        """How many records there are to read, at most."""
        return sum(file.rows for file in (*self.old_files, *self.new_files))


class JoinedTable(Struct, frozen=True, kw_only=True):
    """The answer to a `TableToJoin`."""

    table: str
    joined_files: Files = ()
    replaced_files: Files = ()
    """Committed files that leave the table."""
    damaged_files: dict[str, str] = field(default_factory=dict)
    """Files of which a part must stay, and that are not as committed, and what is wrong with each. Then
    nothing was written: damage is never copied, nor left beside the new files.
    """
    changed_offset: int | None = None
    """The first offset with other records than before, where they must be the same."""


class TableJoiner(Struct, frozen=True):
    """Joins what was made again with what stays, one table of a partition after the other. It can be
    sent to other processes; whoever joins the same files a second time writes the same bytes.

    1. Check that the files that are to be read are as committed.
    2. Divide the offsets into regions around the files that change.
    3. Write one new file for each region.
    """

    joiner: Joiner

    def __call__(self, work: TableToJoin) -> JoinedTable:
        """The new files, and those that leave the table."""
        replaced = work.replaced
        # 1. The files of which a part stays are intact.
        damaged = self.joiner.find_damaged_files(_partly_replaced(work.old_files, replaced))
        if damaged:
            return JoinedTable(table=work.table, damaged_files=damaged)

        # 2. The regions.
        def is_affected(file: File) -> bool:
            if replaced.covers(file.first_offset, file.last_offset):
                return True
            file_range = OffsetRange(file.first_offset, file.last_offset + 1)
            if self.joiner.has_records_in(work.new_files, file_range):
                return True
            return self.joiner.has_replaced_records(file, replaced)

        regions = _plan_regions(work.old_files, is_affected, REGION_ROWS_MAX)
        # 3. The new files.
        joined_files: list[File] = []
        replaced_files: list[File] = []
        for number, region in enumerate(regions):
            changed_offset = self._changed_offset(work, region)
            if changed_offset is not None:
                return JoinedTable(table=work.table, changed_offset=changed_offset)
            joined_file = self.joiner.join_files(
                work.partition,
                f"{work.stem}j{number}",
                _partly_replaced(region.replaced_files, replaced),
                replaced,
                work.new_files,
                region.offset_range,
            )
            if joined_file is not None:
                joined_files.append(joined_file)
            replaced_files += region.replaced_files
        return JoinedTable(
            table=work.table,
            joined_files=tuple(joined_files),
            replaced_files=tuple(replaced_files),
        )

    def _changed_offset(self, work: TableToJoin, region: RewriteRegion) -> int | None:
        """The first offset at which records differ from those that they replace, if they must be the
        same.
        """
        if not work.must_be_unchanged:
            return None
        if self.joiner.find_damaged_files(region.replaced_files):
            return None  # There is nothing to compare with. This is what the refold repairs.
        return self.joiner.first_difference_offset(
            region.replaced_files, work.replaced, work.new_files, region.offset_range
        )


class RewriteRegion(Struct, frozen=True):
    """A range of offsets whose records are written anew as one file."""

    offset_range: OffsetRange
    replaced_files: Files
    """Committed files that leave the table."""


def _plan_regions(
    active_files: Iterable[File], is_affected: Callable[[File], bool], rows_max: int
) -> list[RewriteRegion]:
    """Where record files are written anew: around the affected files, never across another file.

    So a file that stays has its offsets for itself, and no file is read without need. A region
    ends after `rows_max` rows.
    """
    regions: list[RewriteRegion] = []
    region_files: list[File] = []
    region_start = 0

    def close_region(end: int) -> None:
        if region_start < end:
            regions.append(RewriteRegion(OffsetRange(region_start, end), tuple(region_files)))
        region_files.clear()

    for file in sorted(active_files, key=lambda file: file.first_offset):
        file_end = file.last_offset + 1
        if not is_affected(file):
            close_region(file.first_offset)
            region_start = file_end
            continue
        region_files.append(file)
        if sum(region_file.rows for region_file in region_files) >= rows_max:
            close_region(file_end)
            region_start = file_end
    close_region(END_OFFSET)
    return regions


def _partly_replaced(files: Iterable[File], replaced: ReplacedRecords) -> list[File]:
    """Files that may hold records that stay, and so have to be read."""
    return [file for file in files if not replaced.covers(file.first_offset, file.last_offset)]


# Gaps that a refold closes

GapKey = tuple[str | None, int, str]
"""What identifies a gap in its partition: the session, the offset and the finding."""


def repaired_marks(
    gaps: Iterable[Gap], refold: PartitionRefold
) -> tuple[list[GapMark], list[GapMark], bool]:
    """What a refold does to the gaps of its partition. Three things come back.

    1. Marks that close the gaps whose output was made again.
    2. The marks of the refold itself, without those of gaps that are open still.
    3. Whether every message that the refold set aside was set aside before. Then it is in a file
       of quarantined messages already.
    """
    unrepaired_gaps: list[Gap] = []
    for gap in gaps:
        is_of_partition = gap.topic_partition == refold.rewind.partition
        if is_of_partition and gap.topic_id == refold.account.topic_id and gap.mended is None:
            unrepaired_gaps.append(gap)
    opening_keys = {_key_of_mark(mark) for mark in refold.marks if not mark.closed_by}
    repeated_keys = opening_keys.intersection(map(_key_of_gap, unrepaired_gaps))
    # 1. Gaps that are closed.
    replaced = refold.replaced_records()
    closing_marks: list[GapMark] = []
    for gap in unrepaired_gaps:
        if _is_repaired(gap, refold.rewind, replaced, repeated_keys):
            mark = GapMark(
                finding=gap.finding,
                offset=gap.start,
                session=gap.session,
                closed_by="repair",
                sorted_until=_sorted_until(gap, refold.rewind.request.swapped_ranges),
            )
            closing_marks.append(mark)
    # 2. Marks of the refold.
    new_marks = [
        mark for mark in refold.marks if mark.closed_by or _key_of_mark(mark) not in repeated_keys
    ]
    # 3. Messages that were set aside.
    is_quarantined_already = not any(mark.quarantined for mark in new_marks)
    return closing_marks, new_marks, is_quarantined_already


def _sorted_until(gap: Gap, swapped_ranges: SwappedRanges) -> int:
    """Up to where the messages of a gap were put into order; -1: they were not swapped."""
    for start, end in swapped_ranges.get(gap.session or "", ()):
        if start == gap.start:
            return end
    return -1


def _key_of_gap(gap: Gap) -> GapKey:
    return gap.session, gap.start, gap.finding


def _key_of_mark(mark: GapMark) -> GapKey:
    return mark.session, mark.offset, mark.finding


def _is_repaired(
    gap: Gap, rewind: Rewind, replaced: ReplacedRecords, repeated_keys: set[GapKey]
) -> bool:
    """Whether a refold takes a gap back."""
    if rewind.frontier <= gap.start < rewind.account.frontier:
        # The log was cut before this gap. Its messages do not exist, and its offsets will be
        # used again by other messages.
        return True
    if _key_of_gap(gap) in repeated_keys or gap.closed_how == CLOSED_BY_FORWARD:
        return False
    if gap.session is None:
        return replaced.sessions is None and replaced.start <= gap.start < replaced.end
    last_offset = gap.start if gap.until is None else gap.until - 1
    is_start_replaced = replaced.includes(gap.session, gap.start)
    return is_start_replaced and replaced.includes(gap.session, last_offset)


# Refusals


def _refuse_other_holds(repair_plan: RepairPlan) -> None:
    """Refuse a plan for partitions that another repair holds: a person must decide first."""
    if not repair_plan.blocking_holds:
        return
    hold = repair_plan.blocking_holds[0]
    facts = hold.describe(repair_plan.stream)
    raise ConfigError(
        f"{repair_plan.stream}: {facts['held']} is {held_by_repair(hold.id)}, which was asked for"
        " something else",
        asked=facts["asked"],
        next=f"go on with it first: {facts['go on']}\nor give it up: {facts['give up']}",
    )


def _nothing_left_error(repair_plan: RepairPlan) -> SeriatimError:
    """Why the plan that was made under the hold has no actions.

    Either another repair did the work, or what the refold needs is gone by now.
    """
    if not repair_plan.notes:
        return _overtaken_error(repair_plan.stream, "nothing is damaged any more")
    return IntegrityError(
        f"{repair_plan.stream}: what was planned cannot be done any more",
        cause="\n".join(repair_plan.notes)[:1500],
        next=f"nothing was changed; look at the plan again: seriatim repair {repair_plan.stream}",
    )


def _overtaken_error(stream: str, observation: str) -> FencedError:
    return FencedError(
        f"{stream}: another repair was faster",
        found=observation,
        next=f"`seriatim status {stream}` shows who holds what; then repair again if something is"
        " left",
    )


def _machine_changed_error(stream: str, partition: Partition, difference: str) -> IntegrityError:
    """The machine must be the one that folded a partition, and it makes something else."""
    return IntegrityError(
        f"{stream}: the machine that is deployed is not the one that folded {partition}: it makes"
        f" {difference}",
        next="nothing was changed. Without --machine unchanged history is folded again with what is"
        " deployed;\n"
        f"`seriatim replay {stream} --to DIR` and `seriatim diff` show what that would change",
    )


def _halted_error(stream: str, halt: Finding) -> IntegrityError:
    return IntegrityError(
        f"{stream}: folding {halt.partition_name} again stops at offset {halt.offset}:"
        f" {halt.finding}",
        cause=halt.cause,
        next="nothing was changed. Fix what the cause names, or go on without these messages:\n"
        f"seriatim repair {stream} --partition {halt.partition_name} --forward",
    )
