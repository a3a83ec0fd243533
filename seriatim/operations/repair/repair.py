"""Repair: find the damage, say what would be done about it, and do it by one commit.

`plan_repair` changes nothing. `RepairRun.apply` reserves the partitions with a hold and plans again
under it, so that a plan that was approved ten slices ago is still right.

Next: operations/repair/damage.py finds the damage; operations/repair/planner.py chooses the
actions; operations/repair/refold.py rewinds, folds and commits.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.errors import (
    ConfigError,
    FencedError,
    IntegrityError,
    SeriatimError,
    raise_broken_promise,
)
from seriatim.ledger.commit import require_head
from seriatim.ledger.entries import HoldEntry
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import Account, Change, Ledger, refuse_changed_machine, unmoved_change
from seriatim.operations.followers import read_gaps
from seriatim.operations.repair.damage import DamageSearch
from seriatim.operations.repair.join_records import DamagedInputError
from seriatim.operations.repair.plan import (
    ForwardAction,
    Hold,
    LiftHaltAction,
    RebuildStateAction,
    RefoldAction,
    RepairAction,
    RepairPlan,
    RepairRequest,
    compute_approval,
)
from seriatim.operations.repair.planner import RepairPlanner
from seriatim.operations.repair.rebuild_state import StateRebuild
from seriatim.operations.repair.refold import (
    ProgressCallback,
    RefoldResult,
    RefoldRun,
    held_partitions,
    release_hold,
)
from seriatim.operations.repair.rewind import RewindChooser, histories_as_of
from seriatim.ports import LedgerStore, OpenStream


def plan_repair(
    open_stream: OpenStream,
    request: RepairRequest,
    head: LedgerHead | None = None,
    suspects: frozenset[str] = frozenset(),
) -> RepairPlan:
    """What a repair would do, as of now. It changes nothing.

    1. Look for holds. If a repair died, a request that names nothing takes over its request.
    2. Find the damage and choose the actions.
    3. Put the plan together.

    With `head`, the plan is made under a hold, and step 1 is left out. `suspects` are files that an
    earlier attempt at this repair found to be damaged.
    """
    stream_name = open_stream.stream.name
    store = open_stream.ledger
    # 1. The holds.
    holds: list[Hold] = []
    if head is None:
        head = require_head(store, stream_name)
        holds = _holds_of_request(store, head.ledger, request)
    unfinished_hold = None
    if request.is_unrestricted:
        unfinished_hold = next((hold for hold in holds if hold.request != request), None)
    if unfinished_hold is not None:
        request = unfinished_hold.request
    if request.unchanged:
        refuse_changed_machine(head.ledger, open_stream.runner.state_version)
    # 2. The damage, and what to do about it.
    search = _damage_search(open_stream, head, suspects)
    chooser = RewindChooser(head, search.bounds, search.histories, open_stream.joiner)
    planner = RepairPlanner(search, chooser, open_stream.past_reader)
    try:
        actions, notes = planner.plan_actions(request)
    except SeriatimError as error:
        if unfinished_hold is not None:
            error.next += _give_up_advice(stream_name, unfinished_hold)
        raise
    # 3. The plan.
    deleted_files: list[str] = []
    if request == RepairRequest():
        deleted_files = search.unneeded_damaged_files()
    plan = RepairPlan(
        stream=stream_name,
        request=request,
        sequence=head.ledger.sequence,
        approval=compute_approval(
            head.ledger, request, sorted({action.partition for action in actions})
        ),
        actions=tuple(actions),
        notes=tuple(notes),
        deleted_files=tuple(deleted_files),
        holds=tuple(holds),
    )
    for hold in holds:
        if hold.request == request:
            return replace(plan, resumed_hold=hold.id, held_partitions=hold.partitions)
    return plan


def _give_up_advice(stream: str, hold: Hold) -> str:
    give_up = hold.describe(stream)["give up"]
    return f"\nor give up repair {hold.id}, which asked for this: {give_up}"


def _damage_search(
    open_stream: OpenStream, head: LedgerHead, suspects: frozenset[str]
) -> DamageSearch:
    bounds = open_stream.log.bounds(open_stream.stream.topics)
    partitions = head.ledger.known_partitions()
    histories = histories_as_of(open_stream.ledger, head, partitions)
    return DamageSearch(open_stream, head, bounds, histories, suspects)


def _holds_of_request(store: LedgerStore, ledger: Ledger, request: RepairRequest) -> list[Hold]:
    """The holds on partitions that a request may change, oldest first."""
    partitions_by_hold = _partitions_by_hold(ledger)
    if not partitions_by_hold:
        return []
    # The entry that placed a hold tells what its repair was asked to do.
    requests_by_hold: dict[str, RepairRequest] = {}
    for manifest in store.entries(ledger.stream, -1):
        entry = manifest.entry
        if isinstance(entry, HoldEntry) and entry.hold in partitions_by_hold:
            requests_by_hold[entry.hold] = RepairRequest.from_json(entry.request)
    holds: list[Hold] = []
    for hold_id, hold_request in requests_by_hold.items():
        partitions = partitions_by_hold[hold_id]
        concerns_partition = not request.partition or request.partition in map(str, partitions)
        if concerns_partition or hold_request == request:
            holds.append(Hold(hold_id, tuple(partitions), hold_request))
    return holds


def _partitions_by_hold(ledger: Ledger) -> dict[str, list[Partition]]:
    partitions_by_hold: dict[str, list[Partition]] = {}
    for partition in ledger.known_partitions():
        hold_id = ledger.partitions[str(partition)].hold
        if hold_id is not None:
            partitions_by_hold.setdefault(hold_id, []).append(partition)
    return partitions_by_hold


def request_of_hold(open_stream: OpenStream, hold: str) -> RepairRequest:
    """What the repair of this id was asked to do. An id that holds nothing is refused."""
    stream_name = open_stream.stream.name
    store = open_stream.ledger
    head = require_head(store, stream_name)
    hold_ids = {account.hold for account in head.ledger.partitions.values() if account.hold}
    if hold not in hold_ids:
        raise ConfigError(
            f"{stream_name}: no partition is held by {hold!r}: it is done, given up, or was taken"
            " over",
            held=", ".join(sorted(hold_ids)) or "nobody holds anything",
            next=f"`seriatim status {stream_name}` shows holds",
        )
    for candidate in _holds_of_request(store, head.ledger, RepairRequest()):
        if candidate.id == hold:
            return candidate.request
    return raise_broken_promise("a hold has an entry")


def abandon_repair(open_stream: OpenStream, hold: str) -> list[Partition]:
    """Give up the repair of this id: its partitions are read again as they are."""
    request_of_hold(open_stream, hold)
    head = require_head(open_stream.ledger, open_stream.stream.name)
    partitions = held_partitions(head.ledger, hold)
    release_hold(open_stream, head, hold, reason="given up")
    return partitions


class RepairRun:
    """One repair that is applied."""

    def __init__(
        self, open_stream: OpenStream, *, run_id: str = "", progress: ProgressCallback | None = None
    ) -> None:
        self.open_stream = open_stream
        self.run_id = run_id
        self.progress = progress
        self.refold_run = self._new_refold_run()
        self.suspects: frozenset[str] = frozenset()
        """Files that an attempt of this repair found to be damaged."""

    def _new_refold_run(self, *, unchanged: bool = False) -> RefoldRun:
        refold_run = RefoldRun(
            self.open_stream,
            run_id=self.run_id,
            progress=self.progress,
        )
        refold_run.must_be_unchanged = unchanged
        return refold_run

    def _require_head(self) -> LedgerHead:
        return require_head(self.open_stream.ledger, self.open_stream.stream.name)

    def apply(self, repair_plan: RepairPlan, messages_max: int, approval: str = "") -> RefoldResult:
        """Apply a plan.

        1. Refuse a plan that is stale, or that another repair stands in the way of.
        2. Delete damaged files that nothing needs.
        3. Hold the partitions.
        4. Plan again, fold, and commit.

        If step 4 fails, the hold is released and nothing is changed.
        """
        # 1. Refusals.
        self._refuse_stale(repair_plan, approval)
        _refuse_other_holds(repair_plan)
        # 2. Files that nothing needs.
        self.open_stream.records.delete(repair_plan.deleted_files)
        if not repair_plan.actions:
            self._release_unneeded_hold(repair_plan)
            return self.refold_run.result
        # 3. The hold.
        self.refold_run.must_be_unchanged = repair_plan.request.unchanged
        head = self._place_hold(repair_plan)
        # 4. The work.
        try:
            return self._refold_until_undamaged(head, repair_plan, messages_max)
        except (Exception, KeyboardInterrupt) as error:
            is_committed = self.refold_run.result.sequence >= 0
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
            self.refold_run.release_hold()
            raise

    def _release_unneeded_hold(self, repair_plan: RepairPlan) -> None:
        """Release the hold of an earlier attempt, because nothing is damaged any more."""
        hold = repair_plan.resumed_hold
        if hold is None:
            return
        head = self._require_head()
        reason = "nothing is damaged any more"
        release_hold(self.open_stream, head, hold, reason=reason)

    def _place_hold(self, repair_plan: RepairPlan) -> LedgerHead:
        """Hold the partitions of a plan. Raises `FencedError` if another repair was faster."""
        head = self._require_head()
        hold_ids = {account.hold for account in head.ledger.partitions.values()}
        resumed_hold = repair_plan.resumed_hold
        if resumed_hold is not None and resumed_hold not in hold_ids:
            raise _overtaken_error(repair_plan.stream, f"hold {resumed_hold} is gone")
        request = repair_plan.request.to_json()
        try:
            return self.refold_run.place_hold(head, repair_plan.partitions, request, resumed_hold)
        except FencedError as fenced:
            raise _overtaken_error(repair_plan.stream, fenced.message) from None

    def _refold_until_undamaged(
        self, head: LedgerHead, repair_plan: RepairPlan, messages_max: int
    ) -> RefoldResult:
        """Fold again until all files that are read are as committed.

        A damaged file becomes a suspect, which widens the range of the next attempt. Each attempt
        has a hold of its own. A file that is still damaged as a suspect is an `IntegrityError`.
        """
        while True:
            try:
                return self._apply_under_hold(head, repair_plan, messages_max)
            except DamagedInputError as damaged_input:
                if self.suspects.issuperset(damaged_input.damaged_files):
                    raise damaged_input.error(repair_plan.stream) from None
                self.suspects |= frozenset(damaged_input.damaged_files)
            refold_run = self._new_refold_run(unchanged=repair_plan.request.unchanged)
            head = refold_run.place_hold(
                self._require_head(),
                repair_plan.partitions,
                repair_plan.request.to_json(),
                self.refold_run.result.hold,
            )
            # Only now, when the new run has its hold: if placing it fails, `apply` must still
            # find the previous run here, to release the previous hold.
            self.refold_run = refold_run

    def _nothing_left_error(self, repair_plan: RepairPlan) -> SeriatimError:
        """Why the plan that was made under the hold has no actions.

        Either another repair did the work, or what the refold needs is gone by now.
        """
        if not repair_plan.notes:
            return _overtaken_error(repair_plan.stream, "nothing is damaged any more")
        return IntegrityError(
            f"{repair_plan.stream}: what was planned cannot be done any more",
            cause="\n".join(repair_plan.notes)[:1500],
            next="nothing was changed; look at the plan again:"
            f" seriatim repair {repair_plan.stream}",
        )

    def _is_overtaken(self, partitions: Sequence[Partition]) -> bool:
        """Whether another repair has taken over the hold."""
        accounts = self._require_head().ledger.partitions
        hold = self.refold_run.result.hold
        return any(accounts[str(partition)].hold != hold for partition in partitions)

    def _refuse_stale(self, repair_plan: RepairPlan, approval: str) -> None:
        if approval and approval != repair_plan.approval:
            raise IntegrityError(
                f"{repair_plan.stream}: the plan that was approved is not the one of now",
                cause="an epoch or a halt of its partitions changed since: another repair, a new"
                " finding, a decision",
                next="look at the plan again and approve that one:"
                f" seriatim repair {repair_plan.stream}",
            )

    def _apply_under_hold(
        self, head: LedgerHead, repair_plan: RepairPlan, messages_max: int
    ) -> RefoldResult:
        """Plan again and do it, now that no other run can move the partitions.

        1. Make the plan again.
        2. Fold what is to be folded again.
        3. Apply the other actions on top of that.
        4. Commit.
        5. Delete the damaged files that were replaced.
        """
        # 1. The plan of now, of the partitions that are held.
        new_plan = plan_repair(self.open_stream, repair_plan.request, head, self.suspects)
        partitions = repair_plan.partitions
        actions = [action for action in new_plan.actions if action.partition in partitions]
        if not actions:
            raise self._nothing_left_error(new_plan)
        # 2. The refolds.
        changes, removed_paths = self._refold_changes(head, actions, messages_max)
        # 3. The other actions.
        for action in actions:
            changes[action.partition] = self._change_by_action(
                action, head, changes.get(action.partition)
            )
        for partition in partitions:
            if partition not in changes:
                # Nothing is wrong here any more. The commit releases the hold of this one too.
                account = head.ledger.partitions[str(partition)]
                unmoved = _unmoved_change_with_quarantine(partition, account)
                changes[partition] = replace(unmoved, halt=account.halt)
        # 4. The commit.
        reason = "; ".join(_describe_action(action) for action in actions)
        sorted_changes = [changes[partition] for partition in sorted(changes)]
        result = self.refold_run.commit(head, sorted_changes, removed_paths, reason)
        # 5. The damaged files.
        self._delete_damaged_files(head, new_plan.partitions, changes, set(removed_paths))
        return result

    def _refold_changes(
        self, head: LedgerHead, actions: Sequence[RepairAction], messages_max: int
    ) -> tuple[dict[Partition, Change], list[str]]:
        """Fold again what the actions say: the changes, and the paths that leave the table."""
        changes: dict[Partition, Change] = {}
        removed_paths: list[str] = []
        rewinds = [action.rewind for action in actions if isinstance(action, RefoldAction)]
        if not rewinds:
            return changes, removed_paths
        partitions = [rewind.partition for rewind in rewinds]
        histories = histories_as_of(self.open_stream.ledger, head, partitions)
        refolds = self.refold_run.refold_partitions(head, rewinds, histories, messages_max)
        for change, paths in refolds:
            changes[change.partition] = change
            removed_paths += paths
        return changes, removed_paths

    def _change_by_action(
        self, action: RepairAction, head: LedgerHead, refold_change: Change | None
    ) -> Change:
        """What an action does to its partition, on top of its refold where there is one."""
        account = head.ledger.partitions[str(action.partition)]
        change = refold_change or _unmoved_change_with_quarantine(action.partition, account)
        if isinstance(action, RebuildStateAction):
            return self._rebuilt_state_change(action, head, replace(change, halt=account.halt))
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

    def _rebuilt_state_change(
        self, action: RebuildStateAction, head: LedgerHead, change: Change
    ) -> Change:
        """A change with state that is rebuilt from records, where Kafka cannot give it back."""
        open_stream = self.open_stream
        partition = action.partition
        account = head.ledger.partitions[str(partition)]
        history = histories_as_of(open_stream.ledger, head, [partition])[partition]
        record_files: list[File] = []
        for path in open_stream.ledger.active_paths(head):
            origin = history.record_files.get(path)
            if origin is not None and origin.topic_id == account.topic_id:
                record_files.append(origin.file)
        gaps = read_gaps(open_stream.ledger, open_stream.derived, head.ledger)
        rebuild = StateRebuild(open_stream, partition, account)
        hold = self.refold_run.result.hold
        return rebuild.build_change(change, record_files, gaps, hold, action.reason)

    def _delete_damaged_files(
        self,
        head: LedgerHead,
        partitions: Sequence[Partition],
        changes: dict[Partition, Change],
        removed_paths: set[str],
    ) -> None:
        """Delete the files that were replaced because they are damaged.

        Other files that were replaced stay for a while, for looking back. Damaged ones are of no
        use for that.
        """
        open_stream = self.open_stream
        replaced_files: list[File] = []
        for history in histories_as_of(open_stream.ledger, head, partitions).values():
            for path, origin in history.all_record_files.items():
                if path in removed_paths:
                    replaced_files.append(origin.file)
        for partition, change in changes.items():
            if change.state is None:
                continue
            new_paths = {file.path for file in change.state}
            old_files = head.ledger.partitions[str(partition)].state
            replaced_files += [file for file in old_files if file.path not in new_paths]
        damaged_files = open_stream.joiner.find_damaged_files(replaced_files)
        open_stream.records.delete(damaged_files)


def _refuse_other_holds(repair_plan: RepairPlan) -> None:
    """Refuse a plan for partitions that another repair holds: a person must decide first."""
    if not repair_plan.blocking_holds:
        return
    hold = repair_plan.blocking_holds[0]
    facts = hold.describe(repair_plan.stream)
    raise ConfigError(
        f"{repair_plan.stream}: {facts['held']} is held by repair {hold.id}, which was asked for"
        " something else",
        asked=facts["asked"],
        next=f"go on with it first: {facts['go on']}\nor give it up: {facts['give up']}",
    )


def _overtaken_error(stream: str, observation: str) -> FencedError:
    return FencedError(
        f"{stream}: another repair was faster",
        found=observation,
        next=f"`seriatim status {stream}` shows who holds what; then repair again if something is"
        " left",
    )


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
