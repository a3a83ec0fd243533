"""What is hurt: found by looking, and turned into the parts of a plan.

Files that are not as committed, sessions in quarantine, partitions that wait, partitions whose check failed; or
what a person names. What is wrong in one partition is mended together; where that cannot be, each by itself. What
cannot be mended is a note that says what to do instead, not an error, unless a person asked for exactly that.

Next room: core/repair.py has the parts; steps/repair.py applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from seriatim.core.errors import ConfigError, IntegrityError, SeriatimError
from seriatim.core.history import Past
from seriatim.core.holes import FINDINGS as LOSSES
from seriatim.core.ledger import Account, File, Halt
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.refold import END, Rewind, Wanted
from seriatim.core.repair import Forward, Hurt, Lift, Part, Refold, Renew, Request, together
from seriatim.core.repair_forward import forward
from seriatim.core.slice import Bounds
from seriatim.core.stream import Stream
from seriatim.ports import Head, Reread
from seriatim.steps.fold import World
from seriatim.steps.losses import Loss, Losses
from seriatim.steps.refold import lost
from seriatim.steps.rewind import Chooser

SESSIONS_NAMED_MAX = 5
RETRIED = {"poison": "the message is read again"}


class Search:
    """Looks for what is hurt in one stream."""

    def __init__(
        self,
        stream: Stream,
        head: Head,
        bounds: Mapping[Partition, Bounds],
        pasts: Mapping[Partition, Past],
        world: World,
        reread: Reread,
        suspects: frozenset[str] = frozenset(),
    ) -> None:
        self.stream, self.head, self.bounds, self.pasts = stream, head, bounds, pasts
        self.ledger, self.world, self.reread, self.suspects = head.ledger, world, reread, suspects
        self.notes: list[str] = []

    def parts(self, request: Request, chooser: Chooser) -> tuple[list[Part], list[str]]:
        """What is to be done, and what cannot be."""
        found = request.start is None and request.session is None and not request.ranges
        parts: list[Part] = []
        self.notes = self._elsewhere() if found and not request.partition else []
        over: set[Partition] = set()
        for hurts in filter(None, self._hurts(request)):
            if not found:
                parts.append(self._refold(hurts, chooser))
            elif (life := chooser.is_over(hurts[0].wanted.partition)) is not None:
                self.notes.append(life.render())
                over.add(hurts[0].wanted.partition)
            else:
                parts += self._mendable(hurts, chooser, forward=request.forward)
        refolded = {part.partition for part in parts}
        for partition in [] if request.ranges else self._chosen(request):
            halt = self.ledger.partitions[str(partition)].halt
            if halt is None or request.session is not None or partition in over:
                continue
            try:
                if (part := self._waiting(partition, halt, request, refolded=partition in refolded)) is not None:
                    parts.append(part)
            except SeriatimError as error:
                if request.forward and request.partition:
                    raise
                self.notes.append(error.render())
        return parts, self.notes

    def _mendable(self, hurts: Sequence[Hurt], chooser: Chooser, *, forward: bool) -> list[Part]:
        """All of it by one refold; or those that can be mended, with a note of each that cannot."""
        try:
            return [self._refold(hurts, chooser, back=True)]
        except IntegrityError as error:
            refused = error
        if len(hurts) == 1 and forward and self._is_renewed(hurts[0]):
            wanted = hurts[0].wanted
            return [Renew(wanted.partition, wanted.until, wanted.why)]
        able = [one for one in hurts if self._mendable([one], chooser, forward=forward)] if len(hurts) > 1 else hurts
        if len(able) < len(hurts):
            return self._mendable(able, chooser, forward=forward) if able else []
        facts = {"hurt": together(hurts).wanted.why, **refused.fields}
        self.notes.append(IntegrityError(refused.message, next=refused.next, **facts).render())
        return []

    def _is_renewed(self, hurt: Hurt) -> bool:
        """Whether state that cannot be folded again is made of what there is: its topic lives, its log was not cut."""
        partition = hurt.wanted.partition
        account = self.ledger.partitions[str(partition)]
        if not hurt.rebuild or partition not in self.bounds or self._is_cut(partition, account):
            return False
        return not self.world.joiner.any_within(self._strange(), OffsetRange(0, END), (partition, account.topic_id))

    def _refold(self, hurts: Sequence[Hurt], chooser: Chooser, *, back: bool = False) -> Part:
        one = together(hurts)
        rewind = chooser.rewind(one.wanted, rebuild=one.rebuild, back=back)
        self._refuse_strange(rewind)
        if one.rebuild:
            self._refuse_compacted(rewind)
        return Refold(rewind)

    def _refuse_compacted(self, rewind: Rewind) -> None:
        """Refuse to fold state again from messages that compaction took out of the middle of the log.

        The log start does not tell, so the range is read. Only topics that compact can lose messages like this.
        """
        partition, losses = rewind.partition, list[Loss]()
        if not self.reread.compacts(partition.topic):
            return
        reading = Losses(partition, self.pasts[partition].proofs(), self.reread).read(rewind.reads, losses.append)
        for _ in reading:
            if losses:
                break
        if losses:
            raise lost(self.stream.name, partition, str(losses[0]), waits=True)

    def _elsewhere(self) -> list[str]:
        """Damaged files that Kafka cannot give back: of a topic's earlier life, or of a partition that is retired."""
        notes = []
        for partition, past in self.pasts.items():
            account = self.ledger.partitions[str(partition)]
            gone = [past.files[path] for path in self._active() if path in past.files]
            gone = [one for one in gone if account.retired or one.topic_id != account.topic_id]
            for path, why in self.world.joiner.damaged([one.file for one in gone], thorough=False).items():
                what = f"{self.stream.name}: record file {path}: {why}"
                life = "its partition is retired" if account.retired else "it is of an earlier life of its topic"
                notes.append(IntegrityError(what, cause=life, next="restore this file from a backup").render())
        return notes

    def _refuse_strange(self, rewind: Rewind) -> None:
        """Files that somebody else rewrote hold records of several partitions: none of them can be replaced."""
        strange = self._strange()
        whose = (rewind.partition, rewind.account.topic_id)
        if strange and self.world.joiner.any_within(strange, OffsetRange(rewind.start, END), whose):
            raise rewritten(self.stream.name, rewind.partition, strange)

    def _strange(self) -> list[File]:
        known = {path for past in self.pasts.values() for path in past.files}
        return [file for file in self.world.ledger.active_files(self.head) if file.path not in known]

    def _chosen(self, request: Request) -> list[Partition]:
        """The partitions that a request is about."""
        if not request.partition:
            return [p for p in self.ledger.known() if not self.ledger.partitions[str(p)].retired]
        partition = Partition.parse(request.partition)
        if self.ledger.account(partition) is None:
            known = ", ".join(map(str, self.ledger.known()[:20]))
            raise ConfigError(
                f"{self.stream.name}: {partition} was never read", known=known, next="name one of these partitions"
            )
        return [partition]

    def _hurts(self, request: Request) -> Iterable[list[Hurt]]:
        """What is folded again, partition by partition. What a person named is widened by what is damaged in it."""
        asked: list[Wanted] = []
        for place, (start, until) in sorted(request.ranges.items()):
            asked.append(Wanted(partition=Partition.parse(place), start=start, until=until, why="backfill"))
        if request.start is not None or request.session is not None:
            asked.append(self._named(request))
        for wanted in asked:
            yield [Hurt(wanted=wanted), *self._damaged_records(wanted.partition, self.suspects)]
        for partition in [] if asked else self._chosen(request):
            yield self._hurt(partition, thorough=bool(request.partition))

    def _named(self, request: Request) -> Wanted:
        """What a person named: a session, or a partition from an offset on."""
        partition = self._home(request)
        account = self.ledger.partitions[str(partition)]
        start, sessions = request.start, None
        if request.session is not None:
            sessions = (request.session,)
            found = self.world.state().load(account.state, sessions).get(request.session)
            if found is None:
                raise ConfigError(
                    f"{self.stream.name}: there is no session {request.session!r} in {partition}",
                    next=f"`seriatim state {self.stream.name} SESSION` looks for sessions",
                )
            if start is None and found is not None:
                start = found.finding_offset if found.finding is not None else found.damaged
                start = None if start < 0 else start
        if start is None:
            raise ConfigError(
                f"{self.stream.name}: nothing is known to be wrong with session {request.session!r}",
                next="say from which offset on it is to be folded again: --from OFFSET",
            )
        if not account.born <= start < account.frontier:
            raise ConfigError(
                f"{self.stream.name}: --from {start} is not within what was folded of {partition}",
                allowed=f"{account.born} to {account.frontier - 1}",
                next="choose an offset that was folded; `seriatim run` folds what comes after",
            )
        why = f"from offset {start} on, as asked"
        return Wanted(partition=partition, start=start, until=account.frontier, sessions=sessions, why=why)

    def _home(self, request: Request) -> Partition:
        """Where the named session lives, or the named partition."""
        if request.partition:
            return self._chosen(request)[0]
        if request.session is None:
            raise ConfigError(
                f"{self.stream.name}: --from needs to know where",
                next="add --partition TOPIC/NUMBER, or --session NAME",
            )
        state = self.world.state()
        homes = [
            partition
            for partition in self.ledger.known()
            if state.holds(self.ledger.partitions[str(partition)].state, [request.session])
        ]
        if len(homes) != 1:
            listed = ", ".join(map(str, homes)) or "none"
            raise ConfigError(
                f"{self.stream.name}: session {request.session!r} lives in {len(homes)} partitions: {listed}",
                next="say which with --partition TOPIC/NUMBER; `seriatim state` looks at sessions",
            )
        return homes[0]

    def _hurt(self, partition: Partition, *, thorough: bool) -> list[Hurt]:
        """What is wrong with a partition's files, checks and sessions."""
        account = self.ledger.partitions[str(partition)]
        damaged = self.world.joiner.damaged(account.state)
        hurts = [*self._damaged_records(partition, self._suspects(), everything=True, thorough=thorough)]
        hurts += self._failed_check(partition, account)
        if self._is_cut(partition, account):
            cut = account.halt.log_end if account.halt is not None else -1
            end = min(self.bounds[partition].log_end, cut if cut >= 0 else account.frontier)
            hurts.append(_hurt(partition, end, account.frontier, f"the log was cut at offset {end}"))
        if damaged:
            path, why = next(iter(damaged.items()))
            at = account.frontier
            hurts.append(_hurt(partition, at, at, f"state file {path}: {why}", rebuild=True))
        elif account.quarantined:
            hurts += self._set_aside(partition, account)
        return hurts

    def _set_aside(self, partition: Partition, account: Account) -> Iterable[Hurt]:
        """Sessions in quarantine: they alone are folded again."""
        hurt = self.world.state().quarantined(account.state)
        if hurt:
            names = ", ".join(sorted(hurt)[:SESSIONS_NAMED_MAX]) + (", …" if len(hurt) > SESSIONS_NAMED_MAX else "")
            offsets = [session.finding_offset for session in hurt.values()]
            wanted = Wanted(
                partition=partition,
                start=min(offsets),
                until=account.frontier,
                sessions=tuple(sorted(hurt)),
                why=f"{len(hurt)} sessions in quarantine: {names}",
            )
            yield Hurt(wanted=wanted, reaches=max(offsets) + 1)

    def _damaged_records(
        self, partition: Partition, suspects: Iterable[str], *, everything: bool = False, thorough: bool = False
    ) -> Iterable[Hurt]:
        """Record files in the table that are not as committed: the ranges that they were made of.

        Suspects are proved by their digest; so is everything else if that is asked for, or by its size.
        """
        past, account, joiner = self.pasts[partition], self.ledger.partitions[str(partition)], self.world.joiner
        made = [*(past.files[path] for path in self._active() if path in past.files), *past.others.values()]
        mine = {one.file.path: one for one in made if one.topic_id == account.topic_id}
        damaged = joiner.damaged([mine[path].file for path in suspects if path in mine])
        if everything:
            damaged |= joiner.damaged([one.file for one in mine.values()], thorough=thorough)
        for path, why in sorted(damaged.items()):
            yield _hurt(partition, mine[path].start, mine[path].until, f"record file {path}: {why}")

    def _active(self) -> set[str]:
        return self.world.ledger.active_paths(self.head)

    def drops(self) -> list[str]:
        """Files that verify found to be damaged, that nothing needs any more, and that are still there."""
        needed = self._active() | {file.path for account in self.ledger.partitions.values() for file in account.state}
        known = {path: made.file for past in self.pasts.values() for path, made in past.made.items()}
        known |= {f.path: f for past in self.pasts.values() for p in past.points for f in p.change.state or ()}
        unneeded = [path for path in self._suspects() if path in known and path not in needed]
        # A file that is gone also counts as damaged, but there is nothing left of it to delete.
        there = (
            {path for partition in self.pasts for path in self.world.records.paths(partition)} if unneeded else set()
        )
        return sorted(self.world.joiner.damaged([known[path] for path in unneeded if path in there]))

    def _suspects(self) -> set[str]:
        """Files that verify found to differ, or that a refold could not read."""
        return {*self.world.ledger.differs(), *self.suspects}

    def _failed_check(self, partition: Partition, account: Account) -> Iterable[Hurt]:
        """Stretches whose check found them bad, and that were not repaired yet."""
        for one in self.ledger.failed:
            if one.partition == str(partition) and one.replaced < 0 and one.start < account.frontier:
                why = f"its check failed, told by the verdict up to entry {one.judged}"
                yield _hurt(partition, one.start, one.until, why)

    def _is_cut(self, partition: Partition, account: Account) -> bool:
        """Whether the log ends before what was folded, or did when the partition halted."""
        seen, halt = self.bounds.get(partition), account.halt
        if halt is not None and halt.finding == "truncated" and seen is not None:
            return seen.topic_id == account.topic_id
        return seen is not None and seen.topic_id == account.topic_id and seen.log_end < account.frontier

    def _waiting(self, partition: Partition, halt: Halt, request: Request, *, refolded: bool) -> Part | None:
        """What becomes of a partition that waits."""
        account, seen = self.ledger.partitions[str(partition)], self.bounds.get(partition)
        if halt.finding == "truncated" and refolded:
            return None  # its refold ends where the log does, and lifts the halt
        there = self._there(partition, account, seen)
        if request.forward:
            change = forward(self.stream.name, partition, account, seen, there)
            return Forward(halt, change)
        if halt.finding in RETRIED and seen is not None:
            return Lift(partition, halt, RETRIED[halt.finding])
        if halt.finding in ("gap", "expired") and seen is not None and there == account.frontier:
            return Lift(partition, halt, f"offset {there} can be read now")
        change = forward(self.stream.name, partition, account, seen, there)
        lost = OffsetRange(change.frontier, change.until)
        raise IntegrityError(
            f"{self.stream.name}: {partition} waits at offset {account.frontier}: {halt.finding}",
            cause=halt.cause,
            lost=f"{len(lost)} offsets {lost} are gone from Kafka" if len(lost) else "",
            next="restore them if you have them elsewhere; or go on without them, with the gap published:\n"
            f"seriatim repair {self.stream.name} --partition {partition} --forward",
        )

    def _there(self, partition: Partition, account: Account, seen: Bounds | None) -> int | None:
        """The first offset from the frontier on that can be read, or that is missing for a good reason."""
        if seen is None or seen.topic_id != account.topic_id or seen.log_end <= account.frontier:
            return None
        start = max(account.frontier, seen.log_start)
        whole = OffsetRange(start, seen.log_end)
        first = next((stretch.start for stretch in self.reread.read(partition, whole)), seen.log_end)
        if first == start:
            return start
        pieces = self.world.explain(partition, OffsetRange(start, first))
        gone = [piece.end for piece, cause in pieces if cause in LOSSES]
        return max(gone, default=start)


def rewritten(stream: str, partition: Partition, files: Sequence[File]) -> IntegrityError:
    """Records that somebody else put together with those of other partitions cannot be replaced."""
    return IntegrityError(
        f"{stream}: {partition} cannot be folded again from there: {len(files)} record files were rewritten by somebody"
        f" else, like {files[0].path}, and hold records of it beside those of others",
        cause="an OPTIMIZE, say; `seriatim compact` is what joins small files here",
        next="nothing was changed. What came after these files can be folded again: choose a later --from.\n"
        "What is in them: put the whole output folder back from a backup of before that, and runs fold again what\n"
        "came since; or give the stream a new output path, and it is folded anew from what Kafka has",
    )


def _hurt(partition: Partition, start: int, until: int, why: str, *, rebuild: bool = False) -> Hurt:
    return Hurt(wanted=Wanted(partition=partition, start=start, until=until, why=why), rebuild=rebuild)
