"""Replay: a range folded again into files of its own, by any machine. Never commits: the stream does not know of it.

1. choose where each partition begins: the nearest saved state before, or no state at all (another machine)
2. fold stage by stage in this process, with what a forward passed over left out, and whom a person released released
3. hand back what was made, for whoever writes it down

As with a refold, records are made from the saved state on, so that records and state agree.

Next room: steps/refold.py is the same with a commit; cli/scratch.py says where the files go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.core.errors import ConfigError, IntegrityError, broken
from seriatim.core.history import Past
from seriatim.core.ledger import Account, File
from seriatim.core.message import Stretch
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.refold import Rewind, Wanted, stages
from seriatim.core.slice import Bounds, Ranges
from seriatim.ports import NO_WISH, Head, StateStore, Task, Wish
from seriatim.steps.changes import nothing_came
from seriatim.steps.losses import Losses
from seriatim.steps.release import free, is_released
from seriatim.steps.retrace import Looking
from seriatim.steps.rewind import pasts
from seriatim.steps.task import Kit, Result, Work, run_task
from seriatim.steps.tries import Works, fold_works

Progress = Callable[[int, int], None]
Read = Callable[[OffsetRange], Iterator[Stretch]]


class Made(Struct, kw_only=True):
    """What a replay made of one partition."""

    partition: Partition
    topic_id: str
    asked: int
    start: int
    """Where records begin: at the saved state before what was asked for."""
    until: int
    base: int
    """The ledger entry whose state it began with; -1: with no state."""
    messages: int = 0
    headless: int = 0
    findings: dict[str, int] = field(default_factory=dict)
    records: list[File] = field(default_factory=list)
    others: dict[str, list[File]] = field(default_factory=dict)
    state: tuple[File, ...] = ()
    halted: str = ""
    """Why it went no further."""
    missing: int = 0
    """Messages that were folded when it was committed, and that Kafka has no longer."""


class Plain:
    """Kafka read plainly, in this process: what `fold_works` needs of a reader."""

    def __init__(self, read: Read, ranges: Ranges) -> None:
        self.read, self.ranges = read, ranges

    def follow(self, *_: Any) -> None:
        """A replay never follows: it has its ranges."""
        broken("a replay has ranges")

    def exactly(self, ranges: Ranges, wish: Wish = NO_WISH) -> Plain:  # noqa: ARG002  # headers are always there
        """These ranges and no others."""
        return Plain(self.read, ranges)

    def map(self, task: Task, *, small: bool = False) -> list[bytes]:  # noqa: ARG002  # stretches are bounded anyway
        """The task's answer for each partition of which a message comes."""
        done = []
        for partition, whole in sorted(self.ranges.items()):
            stretches = self.read(whole)
            first = next(stretches, None)
            if first is not None:
                done.append(task(partition, chain([first], stretches)))
        return done


class Replaying:
    """One replay, of one stream."""

    def __init__(
        self,
        looking: Looking,
        head: Head,
        kit: Callable[[tuple[File, ...]], Kit],
        *,
        fresh: bool,
        messages_max: int = 200_000,
        progress: Progress | None = None,
    ) -> None:
        self.looking, self.head, self.kit, self.fresh = looking, head, kit, fresh
        self.messages_max, self.told = messages_max, progress or (lambda _done, _total: None)
        self.bounds = looking.log.bounds(looking.stream.topics)
        self.done = self.total = 0

    def earliest(self, partition: Partition) -> int:
        """Where a replay of all that can be folded again begins."""
        account = self.head.ledger.account(partition) or broken("a replay is of known partitions")
        seen = self.bounds.get(partition)
        start = account.born if seen is None else max(account.born, seen.log_start)
        if self.fresh:
            return start
        past = pasts(self.looking.ledger, self.head, [partition])[partition]
        reach = (point.account for point in past.borders(start, account.frontier))
        return next((one.frontier for one in reach if self._loads(one)), start)

    def run(self, wanted: dict[Partition, OffsetRange]) -> Iterator[Made]:
        """Each partition's range, one after the other."""
        known = pasts(self.looking.ledger, self.head, wanted)
        begun = [self._begin(partition, whole, known[partition]) for partition, whole in sorted(wanted.items())]
        self.total = sum(len(rewind.reads) for rewind, _ in begun)
        for rewind, made in begun:
            self._fold(rewind, made, known[rewind.partition])
            yield made

    def _begin(self, partition: Partition, whole: OffsetRange, past: Past) -> tuple[Rewind, Made]:
        account = self.head.ledger.account(partition) or broken("a replay is of known partitions")
        seen = self._seen(partition, account, whole)
        sequence, base = (-1, _nothing(account, whole)) if self.fresh else self._base(partition, whole, past, seen)
        rewind = Rewind(
            wanted=Wanted(partition=partition, start=whole.start, until=whole.end),
            account=account,
            base=base,
            sequence=sequence,
            frontier=whole.end,
            borders=(whole.end,),
            released={} if self.fresh else past.released(),
            passed=tuple(lost for lost in past.passed() if base.frontier < lost.end <= whole.end),
        )
        made = Made(
            partition=partition,
            topic_id=account.topic_id,
            asked=whole.start,
            start=base.frontier,
            until=base.frontier,
            base=sequence,
        )
        return rewind, made

    def _seen(self, partition: Partition, account: Account, whole: OffsetRange) -> Bounds:
        seen, stream = self.bounds.get(partition), self.looking.stream.name
        if seen is None or seen.topic_id != account.topic_id:
            raise ConfigError(
                f"{stream}: {partition}: the messages that were folded are not in Kafka any more",
                next="name other partitions with --partition or --topic",
            )
        if whole.start < seen.log_start or whole.end > seen.log_end:
            raise ConfigError(
                f"{stream}: {partition}: Kafka has [{seen.log_start}, {seen.log_end}), not {whole}",
                next="choose --from and --until within it",
            )
        return seen

    def _base(self, partition: Partition, whole: OffsetRange, past: Past, seen: Bounds) -> tuple[int, Account]:
        for point in past.usable(whole.start):
            if point.account.frontier < seen.log_start:
                break
            if self._loads(point.account):  # else it is swept or damaged: an earlier one will do
                return point.sequence, point.account
        later = (
            point.account for point in past.borders(whole.start, self.head.ledger.partitions[str(partition)].frontier)
        )
        at = next((one.frontier for one in later if self._loads(one)), None)
        raise ConfigError(
            f"{self.looking.stream.name}: {partition}: no saved state at or before offset {whole.start} can be folded"
            f" on: Kafka has nothing before offset {seen.log_start}",
            next=f"{'' if at is None else f'begin later with --from {at}, or '}without any state with --fresh: sessions"
            " then begin by their snapshots",
        )

    def _loads(self, account: Account) -> bool:
        try:
            self.looking.state.load(account.state, [""])
        except IntegrityError:
            return False
        return True

    def _fold(self, rewind: Rewind, made: Made, past: Past) -> None:
        kit, time = self.kit(rewind.base.state), rewind.base.time
        moved = {session: "another partition" for finding, _, session in past.told if finding == "moved session"}
        losses, gone = Losses(made.partition, past.proofs(), self.looking.reread), dict[OffsetRange, int]()

        def read(whole: OffsetRange) -> Iterator[Stretch]:
            return losses.read(whole, lambda loss: gone.update({loss.whole: loss.missing}))

        self._release(made, rewind, kit.state)
        for number, stage in enumerate(stages(rewind, self.messages_max)):
            work = Work(
                partition=made.partition,
                start=stage.whole.start,
                end=stage.whole.end,
                epoch=rewind.account.epoch,
                topic_id=made.topic_id,
                state=made.state,
                attempt=f"replay{number}",
                moved={name: home for name, home in moved.items() if name is not None},
                time=time,
                headless_since=rewind.headless_since(stage.whole.start),
            )
            result = self._result(work, kit, rewind.account, read)
            self._take(made, result, stage.whole)
            made.missing = sum(gone.values())
            time = max(time, result.certificate.time if result.certificate else -1)
            if made.halted:
                return
            self._release(made, rewind, kit.state)

    def _result(self, work: Work, kit: Kit, account: Account, read: Read) -> Result:
        ranges = {work.partition: OffsetRange(work.start, work.end)}

        def task(works: Works) -> Task:
            return lambda partition, stretches: run_task(works[partition], stretches, kit)

        reader = Plain(read, ranges)
        results = fold_works(self.looking.stream.name, {work.partition: work}, reader, reader, task, lambda *_: {})
        whole = ranges[work.partition]
        tier = self.looking.stream.tier
        return results.get(work.partition) or nothing_came(work.partition, account, whole, kit.explain, tier)

    def _take(self, made: Made, result: Result, whole: OffsetRange) -> None:
        certificate = result.certificate or broken("a result without a certificate")
        made.until = certificate.until
        made.messages += certificate.counts.messages
        made.headless += certificate.counts.headless
        made.records += result.records
        for table, files in result.others.items():
            made.others.setdefault(table, []).extend(files)
        made.state = made.state if result.state is None else result.state
        for kind, number in certificate.counts.findings.items():
            made.findings[kind] = made.findings.get(kind, 0) + number
        if result.halt is not None:
            made.halted = f"{result.halt.finding} at offset {result.halt.offset}: {result.halt.cause}"
        self.done += len(whole)
        self.told(self.done, self.total)

    def _release(self, made: Made, rewind: Rewind, state: StateStore) -> None:
        """Whom a person released here is released here again."""
        for at in rewind.reached(made.until):
            names = rewind.released.get(at, ()) if at > rewind.start else ()
            account = replace(rewind.account, headless_since=rewind.headless_since(at))
            held = {name: one for name, one in state.load(made.state, names).items() if is_released(one, account)}
            if held:
                freed = {name: free(one, account, self.looking.stream.tier) for name, one in held.items()}
                stem = f"{rewind.account.epoch}-{at}-released"
                made.state = (*made.state, state.save(made.partition, stem, freed, ()))


def _nothing(account: Account, whole: OffsetRange) -> Account:
    """A partition before its first message, as another machine finds it."""
    return Account(topic_id=account.topic_id, frontier=whole.start, born=whole.start)
