"""Repair: find what is hurt, say what would be done, and do it by one commit.

Hurt is: files that are not as committed, sessions in quarantine, partitions that wait, partitions whose check
failed; or what a person names. `plan` changes nothing; `Repairing.apply` plans again under a hold, so that a plan
approved ten slices ago is still right.

Next room: steps/hurt.py looks for what is hurt; steps/refold.py rewinds, folds and commits.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from seriatim.core.code import refuse_changed
from seriatim.core.errors import ConfigError, FencedError, IntegrityError, SeriatimError, broken
from seriatim.core.ledger import Account, Change, Ledger
from seriatim.core.machine import Runner
from seriatim.core.offsets import Partition
from seriatim.core.repair import Forward, Hold, Lift, Part, Plan, Refold, Renew, Request, approval
from seriatim.core.stream import Stream
from seriatim.ports import Head, LedgerStore, Reread
from seriatim.steps.accept import known_head
from seriatim.steps.derive import gaps_now
from seriatim.steps.fold import World
from seriatim.steps.hurt import Search
from seriatim.steps.joining import Unsound
from seriatim.steps.refold import Refolded, Refolding, Told, release
from seriatim.steps.renew import Renewing
from seriatim.steps.rewind import Chooser, pasts


class Mending(Struct, frozen=True, kw_only=True):
    """What a repair is made with."""

    stream: Stream
    runner: Runner
    world: World
    reread: Reread


def plan(mending: Mending, request: Request, head: Head | None = None, suspects: frozenset[str] = frozenset()) -> Plan:
    """What a repair would do, as of now. Changes nothing.

    A repair that died is not forgotten: a plain request is first of all for what that one was asked. `head`: the plan
    is made under a hold. `suspects`: files that a try at it found to be damaged.
    """
    stream, world = mending.stream.name, mending.world
    under_hold = head is not None
    head = head or known_head(world.ledger, stream)
    holds = [] if under_hold else _holds(world.ledger, head.ledger, request)
    dead = next((hold for hold in holds if request.is_plain and hold.request != request), None)
    request = request if dead is None else dead.request
    if request.unchanged:
        refuse_changed(head.ledger, mending.runner.state_version)
    bounds = world.log.bounds(mending.stream.topics)
    past = pasts(world.ledger, head, head.ledger.known())
    search = Search(mending.stream, head, bounds, past, world, mending.reread, suspects)
    chooser = Chooser(head, bounds, past, world.joiner)
    try:
        parts, notes = search.parts(request, chooser)
    except SeriatimError as error:
        if dead is not None:
            error.next += f"\nor give up repair {dead.id}, which asked for this: {dead.says(stream)['give up']}"
        raise
    partitions = sorted({part.partition for part in parts})
    mine = next((hold for hold in holds if hold.request == request), None)
    return Plan(
        stream=stream,
        request=request,
        sequence=head.ledger.sequence,
        approval=approval(head.ledger, request, partitions),
        parts=tuple(parts),
        notes=tuple(notes),
        drops=() if request != Request() else tuple(search.drops()),
        resumes=mine.id if mine else None,
        held=mine.partitions if mine else (),
        holds=tuple(holds),
    )


def _holds(store: LedgerStore, ledger: Ledger, request: Request) -> list[Hold]:
    """The holds on what a request may change, oldest first."""
    held: dict[str, list[Partition]] = {}
    for partition in ledger.known():
        if (hold := ledger.partitions[str(partition)].hold) is not None:
            held.setdefault(hold, []).append(partition)
    if not held:
        return []
    entries = [one.entry for one in store.entries(ledger.stream, -1) if one.entry.kind == "hold"]
    asked = {entry.held: Request.decoded(entry.request) for entry in entries}
    holds = [Hold(hold, tuple(held[hold]), asked[hold]) for hold in asked if hold is not None and hold in held]
    one = request.partition
    return [hold for hold in holds if not one or one in map(str, hold.partitions) or hold.request == request]


def held_request(mending: Mending, hold: str) -> Request:
    """What the repair of this id was asked to do."""
    stream, store = mending.stream.name, mending.world.ledger
    head = known_head(store, stream)
    if not any(account.hold == hold for account in head.ledger.partitions.values()):
        held = sorted({account.hold for account in head.ledger.partitions.values() if account.hold})
        raise ConfigError(
            f"{stream}: no partition is held by {hold!r}: it is done, given up, or was taken over",
            held=", ".join(held) or "nobody holds anything",
            next=f"`seriatim status {stream}` shows holds",
        )
    found = (one.request for one in _holds(store, head.ledger, Request()) if one.id == hold)
    return next(found, None) or broken("a hold has an entry")


def abandon(mending: Mending, hold: str) -> list[Partition]:
    """Give up the repair of this id: its partitions are read again as they are."""
    held_request(mending, hold)
    head = known_head(mending.world.ledger, mending.stream.name)
    partitions = [p for p in head.ledger.known() if head.ledger.partitions[str(p)].hold == hold]
    release(mending.world, head, hold, reason="given up")
    return partitions


class Repairing:
    """One repair, applied."""

    def __init__(self, mending: Mending, *, run: str = "", progress: Told | None = None) -> None:
        self.mending, self.run_id, self.progress = mending, run, progress
        self.refolding = self._begin()
        self.suspects: frozenset[str] = frozenset()

    def _begin(self, *, unchanged: bool = False) -> Refolding:
        mending = self.mending
        made = Refolding(mending.stream, mending.runner, mending.world, run=self.run_id, progress=self.progress)
        made.unchanged = unchanged
        return made

    def apply(self, made: Plan, messages_max: int, approved: str = "") -> Refolded:
        """Hold, plan again, and do it. What fails gives the hold back and changes nothing."""
        self._refuse_stale(made, approved)
        _refuse_held(made)
        self.refolding.unchanged = made.request.unchanged
        self.mending.world.records.delete(made.drops)
        if not made.parts:
            if made.resumes is not None:  # what was hurt is well: nobody needs to wait
                head = known_head(self.mending.world.ledger, made.stream)
                release(self.mending.world, head, made.resumes, reason="nothing is hurt any more")
            return self.refolding.done
        store, stream = self.mending.world.ledger, self.mending.stream.name
        head = known_head(store, stream)
        holds = {account.hold for account in head.ledger.partitions.values()}
        if made.resumes is not None and made.resumes not in holds:
            raise _faster(stream, f"hold {made.resumes} is gone")
        try:
            head = self.refolding.hold(head, made.partitions, made.request.encoded(), made.resumes)
        except FencedError as fenced:
            raise _faster(stream, fenced.message) from None
        try:
            return self._proved(head, made, messages_max)
        except (Exception, KeyboardInterrupt) as trouble:
            if self.refolding.done.sequence >= 0:  # it is done: what came after it catches up with the next run
                raise
            if self._overtaken(made.partitions):  # whoever took over has swept our files: that is all it was
                raise FencedError(
                    f"{stream}: another repair took over",
                    found=str(trouble)[:400],
                    next=f"nothing was changed by this one; `seriatim status {stream}` shows how it is",
                ) from trouble
            self.refolding.release()
            raise

    def _proved(self, head: Head, made: Plan, messages_max: int) -> Refolded:
        """Fold again until all that is read is as committed: a damaged file widens the range, under a new hold."""
        while True:
            try:
                return self._under_hold(head, made, messages_max)
            except Unsound as unsound:
                if self.suspects.issuperset(unsound.damaged):
                    raise unsound.error(made.stream) from None
                self.suspects |= frozenset(unsound.damaged)
            fresh = self._begin(unchanged=made.request.unchanged)
            head = known_head(self.mending.world.ledger, made.stream)
            head = fresh.hold(head, made.partitions, made.request.encoded(), self.refolding.done.hold)
            self.refolding = fresh  # not before it holds: who fails above still has the hold of before to release

    def _nothing_left(self, again: Plan) -> SeriatimError:
        """Under the hold it shows that nothing can be done: somebody did it, or what it needs is gone by now."""
        if not again.notes:
            return _faster(again.stream, "nothing is hurt any more")
        return IntegrityError(
            f"{again.stream}: what was planned cannot be done any more",
            cause="\n".join(again.notes)[:1500],
            next=f"nothing was changed; look at the plan again: seriatim repair {again.stream}",
        )

    def _overtaken(self, partitions: Sequence[Partition]) -> bool:
        """Whether the hold is not ours any more."""
        ledger = known_head(self.mending.world.ledger, self.mending.stream.name).ledger
        return any(ledger.partitions[str(p)].hold != self.refolding.done.hold for p in partitions)

    def _refuse_stale(self, made: Plan, approved: str) -> None:
        if approved and approved != made.approval:
            raise IntegrityError(
                f"{made.stream}: the plan that was approved is not the one of now",
                cause="an epoch or a halt of its partitions changed since: another repair, a new finding, a decision",
                next=f"look at the plan again and approve that one: seriatim repair {made.stream}",
            )

    def _under_hold(self, head: Head, made: Plan, messages_max: int) -> Refolded:
        """The partitions do not move any more: the plan is made again, of what they are now."""
        again = replace(plan(self.mending, made.request, head, self.suspects), resumes=None)
        parts = [part for part in again.parts if part.partition in set(made.partitions)]
        if not parts:
            raise self._nothing_left(again)
        refolds = [part.rewind for part in parts if isinstance(part, Refold)]
        changes: dict[Partition, Change] = {}
        removed: list[str] = []
        if refolds:
            past = pasts(self.mending.world.ledger, head, [rewind.partition for rewind in refolds])
            for change, gone in self.refolding.apply(head, refolds, past, messages_max):
                changes[change.partition] = change
                removed += gone
        for part in parts:
            account = head.ledger.partitions[str(part.partition)]
            before = changes.get(part.partition) or _as_it_is(part.partition, account)
            if isinstance(part, Renew):
                changes[part.partition] = self._renewed(part, head, replace(before, halt=account.halt))
            else:
                changes[part.partition] = self._changed(part, before)
        for partition in set(made.partitions) - set(changes):  # what was hurt is well: its hold goes back with the rest
            account = head.ledger.partitions[str(partition)]
            changes[partition] = replace(_as_it_is(partition, account), halt=account.halt)
        why = "; ".join(_why(part) for part in parts)
        done = self.refolding.commit(head, [changes[p] for p in sorted(changes)], removed, why)
        self._drop_damaged(head, again, changes, set(removed))
        return done

    def _drop_damaged(self, head: Head, made: Plan, changes: dict[Partition, Change], removed: set[str]) -> None:
        """Files that were replaced because they are damaged tell nobody anything any more."""
        world, past = self.mending.world, pasts(self.mending.world.ledger, head, made.partitions)
        gone = [one.file for each in past.values() for path, one in each.made.items() if path in removed]
        for partition, change in changes.items():
            stays = {file.path for file in change.state or ()}
            old = head.ledger.partitions[str(partition)].state if change.state is not None else ()
            gone += [file for file in old if file.path not in stays]
        world.records.delete(world.joiner.damaged(gone))

    def _renewed(self, part: Renew, head: Head, before: Change) -> Change:
        """State made of what there is, where Kafka cannot give it back."""
        mending, partition = self.mending, part.partition
        world, account = mending.world, head.ledger.partitions[str(partition)]
        past = pasts(world.ledger, head, [partition])[partition]
        made = [past.files[path] for path in world.ledger.active_paths(head) if path in past.files]
        records = [one.file for one in made if one.topic_id == account.topic_id]
        gaps = gaps_now(world.ledger, world.derived, head.ledger)
        renewing = Renewing(mending.stream, mending.runner, world, partition, account)
        return renewing.change(before, records, gaps, self.refolding.done.hold, part.why)

    def _changed(self, part: Refold | Lift | Forward, before: Change) -> Change:
        """What a part does to its partition, on top of its refold where there is one."""
        if isinstance(part, Forward):
            forward = part.change
            marks = (*before.marks, *forward.marks)
            moved = {"until": forward.until, "headless_since": forward.headless_since, "log_end": forward.log_end}
            return replace(before, halt=None, marks=marks, **moved)
        if isinstance(part, Lift):
            return replace(before, halt=None)
        return before


def _refuse_held(made: Plan) -> None:
    """Another repair's work is not replaced by this one's without a person's word."""
    for hold in made.in_the_way[:1]:
        held, asked, on, up = hold.says(made.stream).values()
        raise ConfigError(
            f"{made.stream}: {held} is held by repair {hold.id}, which was asked for something else",
            asked=asked,
            next=f"go on with it first: {on}\nor give it up: {up}",
        )


def _faster(stream: str, found: str) -> FencedError:
    return FencedError(
        f"{stream}: another repair was faster",
        found=found,
        next=f"`seriatim status {stream}` shows who holds what; then repair again if something is left",
    )


def _as_it_is(partition: Partition, account: Account) -> Change:
    return Change(
        partition=partition,
        epoch=account.epoch,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        born=account.born,
        quarantined=account.quarantined,
    )


def _why(part: Part) -> str:
    if isinstance(part, Refold):
        return f"{part.partition}: {part.rewind.wanted.why}"
    if isinstance(part, Lift):
        return f"{part.partition}: goes on, {part.why}"
    if isinstance(part, Renew):
        return f"{part.partition}: state made of its records, {part.why}"
    return f"{part.partition}: goes on after {part.passed}"
