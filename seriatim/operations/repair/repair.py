"""Repair: find what is hurt, say what would be done, and do it by one commit.

Hurt is: files that are not as committed, sessions in quarantine, partitions that wait, partitions
whose check failed; or what a person names. `plan` changes nothing; `RepairRun.apply` plans again
under a hold, so that a plan approved ten slices ago is still right.

Next room: operations/repair/damage.py looks for what is hurt; operations/repair/refold.py rewinds,
folds and commits.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.machine import Runner
from seriatim.engine.offsets import Partition
from seriatim.errors import (
    ConfigError,
    FencedError,
    IntegrityError,
    SeriatimError,
    raise_broken_promise,
)
from seriatim.ledger.machine_version import refuse_changed_machine
from seriatim.ledger.model import Account, Change, Ledger
from seriatim.operations.accept import require_head
from seriatim.operations.derived_tables import read_gaps
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
from seriatim.operations.repair.rebuild_state import StateRebuild
from seriatim.operations.repair.refold import (
    ProgressCallback,
    RefoldResult,
    RefoldRun,
    release_hold,
)
from seriatim.operations.repair.rewind import RewindChooser, histories_as_of
from seriatim.operations.run import FoldContext
from seriatim.ports import LedgerHead, LedgerStore, PastMessageReader
from seriatim.stream import Stream


class RepairContext(Struct, frozen=True, kw_only=True):
    """What a repair is made with."""

    stream: Stream
    runner: Runner
    fold_context: FoldContext
    past_reader: PastMessageReader


def plan_repair(
    context: RepairContext,
    request: RepairRequest,
    head: LedgerHead | None = None,
    suspects: frozenset[str] = frozenset(),
) -> RepairPlan:
    """What a repair would do, as of now. Changes nothing.

    A repair that died is not forgotten: a plain request is first of all for what that one was
    asked. `head`: the plan is made under a hold. `suspects`: files that a try at it found to be
    damaged.
    """
    stream, world = context.stream.name, context.fold_context
    under_hold = head is not None
    head = head or require_head(world.ledger, stream)
    holds = [] if under_hold else _holds_of_request(world.ledger, head.ledger, request)
    dead = next(
        (hold for hold in holds if request.is_unrestricted and hold.request != request), None
    )
    request = request if dead is None else dead.request
    if request.unchanged:
        refuse_changed_machine(head.ledger, context.runner.state_version)
    bounds = world.log.bounds(context.stream.topics)
    past = histories_as_of(world.ledger, head, head.ledger.known_partitions())
    search = DamageSearch(context.stream, head, bounds, past, world, context.past_reader, suspects)
    chooser = RewindChooser(head, bounds, past, world.joiner)
    try:
        parts, notes = search.plan_actions(request, chooser)
    except SeriatimError as error:
        if dead is not None:
            error.next += f"\nor give up repair {dead.id}, which asked for this: {dead.describe(stream)['give up']}"
        raise
    partitions = sorted({part.partition for part in parts})
    mine = next((hold for hold in holds if hold.request == request), None)
    return RepairPlan(
        stream=stream,
        request=request,
        sequence=head.ledger.sequence,
        approval=compute_approval(head.ledger, request, partitions),
        actions=tuple(parts),
        notes=tuple(notes),
        deleted_files=() if request != RepairRequest() else tuple(search.unneeded_damaged_files()),
        resumed_hold=mine.id if mine else None,
        held_partitions=mine.partitions if mine else (),
        holds=tuple(holds),
    )


def _holds_of_request(store: LedgerStore, ledger: Ledger, request: RepairRequest) -> list[Hold]:
    """The holds on what a request may change, oldest first."""
    held: dict[str, list[Partition]] = {}
    for partition in ledger.known_partitions():
        if (hold := ledger.partitions[str(partition)].hold) is not None:
            held.setdefault(hold, []).append(partition)
    if not held:
        return []
    entries = [one.entry for one in store.entries(ledger.stream, -1) if one.entry.kind == "hold"]
    asked = {entry.hold: RepairRequest.from_json(entry.request) for entry in entries}
    holds = [
        Hold(hold, tuple(held[hold]), asked[hold])
        for hold in asked
        if hold is not None and hold in held
    ]
    one = request.partition
    return [
        hold
        for hold in holds
        if not one or one in map(str, hold.partitions) or hold.request == request
    ]


def request_of_hold(context: RepairContext, hold: str) -> RepairRequest:
    """What the repair of this id was asked to do."""
    stream, store = context.stream.name, context.fold_context.ledger
    head = require_head(store, stream)
    if not any(account.hold == hold for account in head.ledger.partitions.values()):
        held = sorted({account.hold for account in head.ledger.partitions.values() if account.hold})
        raise ConfigError(
            f"{stream}: no partition is held by {hold!r}: it is done, given up, or was taken over",
            held=", ".join(held) or "nobody holds anything",
            next=f"`seriatim status {stream}` shows holds",
        )
    found = (
        one.request
        for one in _holds_of_request(store, head.ledger, RepairRequest())
        if one.id == hold
    )
    return next(found, None) or raise_broken_promise("a hold has an entry")


def abandon_repair(context: RepairContext, hold: str) -> list[Partition]:
    """Give up the repair of this id: its partitions are read again as they are."""
    request_of_hold(context, hold)
    head = require_head(context.fold_context.ledger, context.stream.name)
    partitions = [
        p for p in head.ledger.known_partitions() if head.ledger.partitions[str(p)].hold == hold
    ]
    release_hold(context.fold_context, head, hold, reason="given up")
    return partitions


class RepairRun:
    """One repair, applied."""

    def __init__(
        self, context: RepairContext, *, run_id: str = "", progress: ProgressCallback | None = None
    ) -> None:
        self.context, self.run_id, self.progress = context, run_id, progress
        self.refold_run = self._new_refold_run()
        self.suspects: frozenset[str] = frozenset()

    def _new_refold_run(self, *, unchanged: bool = False) -> RefoldRun:
        mending = self.context
        made = RefoldRun(
            mending.stream,
            mending.runner,
            mending.fold_context,
            run_id=self.run_id,
            progress=self.progress,
        )
        made.must_be_unchanged = unchanged
        return made

    def apply(self, repair_plan: RepairPlan, messages_max: int, approval: str = "") -> RefoldResult:
        """Hold, plan again, and do it. What fails gives the hold back and changes nothing."""
        self._refuse_stale(repair_plan, approval)
        _refuse_other_holds(repair_plan)
        self.refold_run.must_be_unchanged = repair_plan.request.unchanged
        self.context.fold_context.records.delete(repair_plan.deleted_files)
        if not repair_plan.actions:
            if repair_plan.resumed_hold is not None:  # what was hurt is well: nobody needs to wait
                head = require_head(self.context.fold_context.ledger, repair_plan.stream)
                release_hold(
                    self.context.fold_context,
                    head,
                    repair_plan.resumed_hold,
                    reason="nothing is hurt any more",
                )
            return self.refold_run.result
        store, stream = self.context.fold_context.ledger, self.context.stream.name
        head = require_head(store, stream)
        holds = {account.hold for account in head.ledger.partitions.values()}
        if repair_plan.resumed_hold is not None and repair_plan.resumed_hold not in holds:
            raise _overtaken_error(stream, f"hold {repair_plan.resumed_hold} is gone")
        try:
            head = self.refold_run.place_hold(
                head,
                repair_plan.partitions,
                repair_plan.request.to_json(),
                repair_plan.resumed_hold,
            )
        except FencedError as fenced:
            raise _overtaken_error(stream, fenced.message) from None
        try:
            return self._refold_until_undamaged(head, repair_plan, messages_max)
        except (Exception, KeyboardInterrupt) as trouble:
            if (
                self.refold_run.result.sequence >= 0
            ):  # it is done: what came after it catches up with the next run
                raise
            if self._is_overtaken(
                repair_plan.partitions
            ):  # whoever took over has swept our files: that is all it was
                raise FencedError(
                    f"{stream}: another repair took over",
                    found=str(trouble)[:400],
                    next=f"nothing was changed by this one; `seriatim status {stream}` shows how it is",
                ) from trouble
            self.refold_run.release_hold()
            raise

    def _refold_until_undamaged(
        self, head: LedgerHead, repair_plan: RepairPlan, messages_max: int
    ) -> RefoldResult:
        """Fold again until all that is read is as committed: a damaged file widens the range, under
        a new hold.
        """
        while True:
            try:
                return self._apply_under_hold(head, repair_plan, messages_max)
            except DamagedInputError as unsound:
                if self.suspects.issuperset(unsound.damaged_files):
                    raise unsound.error(repair_plan.stream) from None
                self.suspects |= frozenset(unsound.damaged_files)
            fresh = self._new_refold_run(unchanged=repair_plan.request.unchanged)
            head = require_head(self.context.fold_context.ledger, repair_plan.stream)
            head = fresh.place_hold(
                head,
                repair_plan.partitions,
                repair_plan.request.to_json(),
                self.refold_run.result.hold,
            )
            self.refold_run = fresh  # not before it holds: who fails above still has the hold of before to release

    def _nothing_left_error(self, repair_plan: RepairPlan) -> SeriatimError:
        """Under the hold it shows that nothing can be done: somebody did it, or what it needs is
        gone by now.
        """
        if not repair_plan.notes:
            return _overtaken_error(repair_plan.stream, "nothing is hurt any more")
        return IntegrityError(
            f"{repair_plan.stream}: what was planned cannot be done any more",
            cause="\n".join(repair_plan.notes)[:1500],
            next=f"nothing was changed; look at the plan again: seriatim repair {repair_plan.stream}",
        )

    def _is_overtaken(self, partitions: Sequence[Partition]) -> bool:
        """Whether the hold is not ours any more."""
        ledger = require_head(self.context.fold_context.ledger, self.context.stream.name).ledger
        return any(
            ledger.partitions[str(p)].hold != self.refold_run.result.hold for p in partitions
        )

    def _refuse_stale(self, repair_plan: RepairPlan, approval: str) -> None:
        if approval and approval != repair_plan.approval:
            raise IntegrityError(
                f"{repair_plan.stream}: the plan that was approved is not the one of now",
                cause="an epoch or a halt of its partitions changed since: another repair, a new finding, a decision",
                next=f"look at the plan again and approve that one: seriatim repair {repair_plan.stream}",
            )

    def _apply_under_hold(
        self, head: LedgerHead, repair_plan: RepairPlan, messages_max: int
    ) -> RefoldResult:
        """The partitions do not move any more: the plan is made again, of what they are now."""
        again = replace(
            plan_repair(self.context, repair_plan.request, head, self.suspects), resumed_hold=None
        )
        parts = [part for part in again.actions if part.partition in set(repair_plan.partitions)]
        if not parts:
            raise self._nothing_left_error(again)
        refolds = [part.rewind for part in parts if isinstance(part, RefoldAction)]
        changes: dict[Partition, Change] = {}
        removed: list[str] = []
        if refolds:
            past = histories_as_of(
                self.context.fold_context.ledger, head, [rewind.partition for rewind in refolds]
            )
            for change, gone in self.refold_run.refold_partitions(
                head, refolds, past, messages_max
            ):
                changes[change.partition] = change
                removed += gone
        for part in parts:
            account = head.ledger.partitions[str(part.partition)]
            before = changes.get(part.partition) or _unmoved_change(part.partition, account)
            if isinstance(part, RebuildStateAction):
                changes[part.partition] = self._rebuilt_state_change(
                    part, head, replace(before, halt=account.halt)
                )
            else:
                changes[part.partition] = self._change_by_action(part, before)
        for partition in set(repair_plan.partitions) - set(
            changes
        ):  # what was hurt is well: its hold goes back with the rest
            account = head.ledger.partitions[str(partition)]
            changes[partition] = replace(_unmoved_change(partition, account), halt=account.halt)
        why = "; ".join(_describe_action(part) for part in parts)
        done = self.refold_run.commit(head, [changes[p] for p in sorted(changes)], removed, why)
        self._delete_damaged_files(head, again, changes, set(removed))
        return done

    def _delete_damaged_files(
        self,
        head: LedgerHead,
        repair_plan: RepairPlan,
        changes: dict[Partition, Change],
        removed: set[str],
    ) -> None:
        """Files that were replaced because they are damaged tell nobody anything any more."""
        world, past = (
            self.context.fold_context,
            histories_as_of(self.context.fold_context.ledger, head, repair_plan.partitions),
        )
        gone = [
            one.file
            for each in past.values()
            for path, one in each.all_record_files.items()
            if path in removed
        ]
        for partition, change in changes.items():
            stays = {file.path for file in change.state or ()}
            old = head.ledger.partitions[str(partition)].state if change.state is not None else ()
            gone += [file for file in old if file.path not in stays]
        world.records.delete(world.joiner.find_damaged_files(gone))

    def _rebuilt_state_change(
        self, action: RebuildStateAction, head: LedgerHead, before: Change
    ) -> Change:
        """State made of what there is, where Kafka cannot give it back."""
        mending, partition = self.context, action.partition
        world, account = mending.fold_context, head.ledger.partitions[str(partition)]
        past = histories_as_of(world.ledger, head, [partition])[partition]
        made = [
            past.record_files[path]
            for path in world.ledger.active_paths(head)
            if path in past.record_files
        ]
        records = [one.file for one in made if one.topic_id == account.topic_id]
        gaps = read_gaps(world.ledger, world.derived, head.ledger)
        renewing = StateRebuild(mending.stream, mending.runner, world, partition, account)
        return renewing.build_change(
            before, records, gaps, self.refold_run.result.hold, action.reason
        )

    def _change_by_action(
        self, action: RefoldAction | LiftHaltAction | ForwardAction, before: Change
    ) -> Change:
        """What a part does to its partition, on top of its refold where there is one."""
        if isinstance(action, ForwardAction):
            forward = action.change
            marks = (*before.marks, *forward.marks)
            moved = {
                "until": forward.until,
                "headless_since": forward.headless_since,
                "log_end": forward.log_end,
            }
            return replace(before, halt=None, marks=marks, **moved)
        if isinstance(action, LiftHaltAction):
            return replace(before, halt=None)
        return before


def _refuse_other_holds(repair_plan: RepairPlan) -> None:
    """Another repair's work is not replaced by this one's without a person's word."""
    for hold in repair_plan.blocking_holds[:1]:
        held, asked, on, up = hold.describe(repair_plan.stream).values()
        raise ConfigError(
            f"{repair_plan.stream}: {held} is held by repair {hold.id}, which was asked for something else",
            asked=asked,
            next=f"go on with it first: {on}\nor give it up: {up}",
        )


def _overtaken_error(stream: str, found: str) -> FencedError:
    return FencedError(
        f"{stream}: another repair was faster",
        found=found,
        next=f"`seriatim status {stream}` shows who holds what; then repair again if something is left",
    )


def _unmoved_change(partition: Partition, account: Account) -> Change:
    return Change(
        partition=partition,
        epoch=account.epoch,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        initial_frontier=account.initial_frontier,
        quarantined=account.quarantined,
    )


def _describe_action(action: RepairAction) -> str:
    if isinstance(action, RefoldAction):
        return f"{action.partition}: {action.rewind.request.reason}"
    if isinstance(action, LiftHaltAction):
        return f"{action.partition}: goes on, {action.reason}"
    if isinstance(action, RebuildStateAction):
        return f"{action.partition}: state made of its records, {action.reason}"
    return f"{action.partition}: goes on after {action.passed_range}"
