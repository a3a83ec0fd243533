"""Retrace: a session's way through its partition, from the nearest saved state on. Reads, and changes nothing.

Whoever asks for the state at an offset, a trace, a break point, the first wrong offset or what touched a row goes this
way. It begins at the last entry at or before the offset whose state no later repair took back and whose files are
there, and folds on with the messages that Kafka still has: over what a forward passed over, with whom a person released
released again. Where Kafka has them no longer, that is said, with what can be looked at instead.

Next room: core/trace.py folds; core/history.py knows the past; steps/bisect.py and the commands go this way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from seriatim.core import history
from seriatim.core.errors import ConfigError, IntegrityError, broken
from seriatim.core.history import Past, Point
from seriatim.core.integrity import typed
from seriatim.core.ledger import Account
from seriatim.core.machine import Runner
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.refold import same
from seriatim.core.session import Session
from seriatim.core.slice import Bounds
from seriatim.core.step import Step
from seriatim.core.stream import Stream
from seriatim.core.trace import Mark, Met, Retrace
from seriatim.ports import Head, LedgerStore, Log, Reread, StateStore
from seriatim.steps.losses import Loss, Losses
from seriatim.steps.release import free, is_released

ENTRIES = 64
"""How many of the last entries are read before all of them are."""


class Looking(Struct, kw_only=True):
    """What a look back is made with."""

    stream: Stream
    runner: Runner
    ledger: LedgerStore
    state: StateStore
    log: Log
    reread: Reread
    told: Callable[[int, int], None] | None = None
    """Hears how much of a range is read."""


class Place(Struct, frozen=True, kw_only=True):
    """A mark on a session's way."""

    at: int
    mark: Mark
    headless_since: int


class Way:
    """One session's way through one partition."""

    def __init__(self, looking: Looking, head: Head, partition: Partition, name: str) -> None:
        self.looking, self.head, self.partition, self.name = looking, head, partition, name
        self.account: Account = head.ledger.account(partition) or broken("a way leads through a known partition")
        self.seen = self._bounds()
        self.past, self._read_all = Past(), False
        self.point: Point | None = None
        self.at = 0
        """The next offset to be folded."""
        self.folds, self.messages = 0, 0
        """How often a fold was begun, and how many messages of the session it took in all."""
        self._cache: tuple[OffsetRange, list[Met]] | None = None
        self._retrace: Retrace | None = None
        self._headless_since = -1
        self._losses: Losses | None = None

    @property
    def retrace(self) -> Retrace:
        """The session, folded up to here."""
        return self._retrace or broken("a way is gone from its beginning on")

    @property
    def end(self) -> int:
        """Where what is committed ends."""
        return self.account.frontier

    def begin(self, offset: int) -> None:
        """Go to the nearest saved state at or before an offset."""
        hurt = ""
        for point in self._usable(offset):
            if point.account.frontier < self.seen.log_start:
                break
            trouble = self._try(point)
            if not trouble:
                return
            hurt = hurt or trouble
        raise self._gone(offset, hurt)

    def begin_early(self, offset: int) -> None:
        """The same, or later where what Kafka and the saved states still have begins later."""
        try:
            self.begin(offset)
        except ConfigError:
            self._read_past(everything=True)
            usable = [one for one in self.past.usable(self.end) if one.account.frontier >= self.seen.log_start]
            later = sorted(usable, key=lambda one: one.account.frontier)
            if all(self._try(point) for point in later if point.account.frontier > offset):
                raise

    def since(self, first: int) -> int:
        """Where a session's messages begin, by its first with an effect (-1: none): headless ones may lie before it."""
        known = first if first >= 0 else self.account.born
        if not self.account.headless:
            return known
        self._read_past(everything=True)
        return min([known, *(proof.start for proof in self.past.proofs() if proof.headless)])

    def _try(self, point: Point) -> str:
        """Set out from a saved state; why not, if its files are gone or damaged."""
        try:
            held = self.looking.state.load(point.account.state, [self.name]).get(self.name)
        except IntegrityError as error:
            return error.message
        self._set_out(point, held)
        return ""

    def saved(self) -> list[Point]:
        """Where committed state can be met, by rising offset: all of the topic's present life."""
        self._read_past(everything=True)
        return self.past.borders(0, self.end)

    def to(self, offset: int) -> None:
        """Fold on without looking, up to but without an offset."""
        self.folds += self.at < offset
        for part in self._parts(offset):
            self.messages += self.retrace.pass_over(part)

    def steps(self, until: int) -> Iterator[Step]:
        """Fold on by one message whenever the next is asked for."""
        for one in self.each(until):
            yield self.step(one)

    def chosen(self, until: int, wanted: Callable[[Met], bool]) -> Iterator[Step]:
        """Fold on, and look at those messages alone that are wanted."""
        for one in self.stops(until, wanted):
            yield self.step(one)

    def stops(self, until: int, wanted: Callable[[Met], bool]) -> Iterator[Met]:
        """Messages that are wanted, each when all before it is folded; whoever asks folds it by `step`."""
        self.folds += self.at < until
        for part in self._parts(until):
            passed: list[Met] = []
            for one in part:
                if not wanted(one):
                    passed.append(one)
                    continue
                self.messages += self.retrace.pass_over(passed)
                passed = []
                yield one
            self.messages += self.retrace.pass_over(passed)

    def each(self, until: int) -> Iterator[Met]:
        """The session's next messages, for whoever folds each by `step` before asking for the next."""
        self.folds += self.at < until
        for part in self._parts(until):
            yield from part

    def step(self, one: Met) -> Step:
        """Fold one message."""
        self.messages += 1
        self.at = one.offset + 1
        return self.retrace.step(one)

    def parted(self) -> bool:
        """Whether state was saved right here, and is another one: the machine, or the stream's file, changed since."""
        committed = next((point.account for point in self.past.borders(self.at, self.at)), None)
        if committed is None:
            return False
        try:
            held = self.looking.state.load(committed.state, [self.name]).get(self.name)
        except IntegrityError:  # swept, or damaged: there is nothing to compare with
            return False
        return not same(self.retrace.saved(), held, self.looking.runner)

    def mark(self) -> Place:
        """This place, to come back to."""
        return Place(at=self.at, mark=self.retrace.mark(), headless_since=self._headless_since)

    def back(self, place: Place) -> None:
        """Back to a place."""
        self.at, self._headless_since = place.at, place.headless_since
        self.retrace.back(place.mark)
        self.retrace.lose(place.headless_since)

    def keep(self, until: int) -> list[int]:
        """Read up to an offset once and for all; the offsets of the session's messages there. Go no further then."""
        whole = OffsetRange(self.at, until)
        held = [one for stretch in self._stretches(whole) for one in self.retrace.met(stretch)]
        self._cache = whole, held
        return [one.offset for one in held]

    def _bounds(self) -> Bounds:
        stream, topic = self.looking.stream.name, self.partition.topic
        seen = self.looking.log.bounds(self.looking.stream.topics).get(self.partition)
        if seen is None or seen.topic_id != self.account.topic_id:
            what = "is not in Kafka any more" if seen is None else "was made again: its messages of before are gone"
            raise ConfigError(
                f"{stream}: topic {topic} {what}",
                next=f"seriatim state {stream} SESSION --version N shows what was saved by entry N; last is "
                f"{self.head.ledger.sequence}",
            )
        return seen

    def _usable(self, offset: int) -> Iterator[Point]:
        """Points at or before an offset, newest first; of the past no more is read than is needed."""
        yielded = -1
        for everything in (False, True):
            self._read_past(everything=everything)
            for number, point in enumerate(self.past.usable(offset)):
                if number > yielded:
                    yielded = number
                    yield point

    def _read_past(self, *, everything: bool) -> None:
        if self._read_all or (self.past.points and not everything):
            return
        last, stream = self.head.ledger.sequence, self.head.ledger.stream
        after = -1 if everything else max(-1, last - ENTRIES)
        entries = (one for one in self.looking.ledger.entries(stream, after) if one.entry.sequence <= last)
        self.past, self._losses = history.read(entries, [self.partition])[self.partition], None
        self._read_all = after < 0
        if not self.past.points:
            self._read_past(everything=True)

    def _set_out(self, point: Point, held: Session | None) -> None:
        self.point, self.at = point, point.account.frontier
        self._headless_since = point.account.headless_since
        told = {session for finding, _, session in self.past.told if finding == "moved session"}
        self._retrace = Retrace(
            self.looking.stream,
            self.looking.runner,
            self.partition,
            self.name,
            held,
            time=point.account.time,
            headless_since=self._headless_since,
            moved={self.name: self._home()} if self.name in told else {},
        )

    def _home(self) -> str:
        """Where a session lives that came here from elsewhere."""
        for place, account in self.head.ledger.partitions.items():
            other = Partition.parse(place)
            sibling = other.topic == self.partition.topic and other != self.partition
            if sibling and self.looking.state.holds(account.state, [self.name]):
                return place
        return "another partition"

    def _parts(self, until: int) -> Iterator[list[Met]]:
        """The session's messages up to an offset, in lists; between two of them it may be released, or in doubt."""
        ahead = sorted(self._ahead(until), key=lambda turn: (turn.at, turn.release))
        whole = OffsetRange(self.at, max(self.at, until))
        for many in self._some(whole):
            left = many
            while ahead and left and left[-1].offset >= ahead[0].at:
                turn = ahead.pop(0)
                cut = bisect_left([one.offset for one in left], turn.start)
                yield left[:cut]
                self._turn(turn)
                left = left[bisect_left([one.offset for one in left], turn.at) :]
            yield left
        for turn in ahead:
            self._turn(turn)
        self.at = whole.end

    def _ahead(self, until: int) -> Iterator[Turn]:
        for at, names in self.past.released().items():
            if self.name in names and self.at < at <= until:
                yield Turn(start=at, at=at, release=True)
        for lost in self.past.passed():
            if self.at < lost.end <= until:
                yield Turn(start=lost.start, at=lost.end)

    def _turn(self, turn: Turn) -> None:
        retrace = self.retrace
        if not turn.release:
            self._headless_since = turn.at
            retrace.lose(turn.at)
            return
        account = replace(self.account, headless_since=self._headless_since)
        session = retrace.saved()
        if is_released(session, account):
            retrace.session = free(session, account, self.looking.stream.tier)

    def _some(self, whole: OffsetRange) -> Iterator[list[Met]]:
        """The session's messages of a range, as they come, or as they were kept."""
        if self._cache is not None and self._cache[0].start <= whole.start and whole.end <= self._cache[0].end:
            held = self._cache[1]
            offsets = [one.offset for one in held]
            yield held[bisect_left(offsets, whole.start) : bisect_left(offsets, whole.end)]
            return
        for stretch in self._stretches(whole):
            yield list(self.retrace.met(stretch))

    def _stretches(self, whole: OffsetRange) -> Iterator[Any]:
        """What Kafka has of a range. A slice of which messages are gone by now would be folded to something else."""
        if len(whole):
            self._refuse_cut(min(whole.end, self.end))
        whole = OffsetRange(whole.start, max(whole.start, min(whole.end, self.seen.log_end)))
        if self._losses is None:
            self._losses = Losses(self.partition, self.past.proofs(), self.looking.reread)
        for stretch in self._losses.read(whole, self._refuse_loss):
            if self.looking.told is not None:
                self.looking.told(stretch.start - whole.start, len(whole))
            yield stretch

    def _refuse_cut(self, end: int) -> None:
        if self.seen.log_end < end:
            raise ConfigError(
                f"{self.looking.stream.name}: {self.partition}: its log was cut at offset {self.seen.log_end}:"
                f" the messages from there to {end} that were folded are not in Kafka any more",
                next=self._instead(self.seen.log_end),
            )

    def _refuse_loss(self, loss: Loss) -> None:
        raise ConfigError(
            f"{self.looking.stream.name}: {self.partition}: {loss}: folding the rest would tell something else than"
            " what was",
            next=self._instead(loss.whole.end, surely=False),
        )

    def _gone(self, offset: int, hurt: str) -> ConfigError:
        stream = self.looking.stream.name
        if not hurt and offset < self.account.born:
            return ConfigError(
                f"{stream}: {self.partition} is folded from offset {self.account.born} on, {offset} is before it",
                next=f"give an offset from {self.account.born} to {self.end - 1}",
            )
        nearest = next((point.account.frontier for point in self.past.usable(offset)), None)
        what = f"the messages from {nearest} on, where the last state before it was saved, are not in Kafka any more"
        return ConfigError(
            f"{stream}: {self.partition} cannot be folded to offset {offset} again:"
            f" {hurt or (what if nearest is not None else 'no state before it is saved')}",
            kafka=self._kafka_has(),
            next=self._instead(offset),
        )

    def _kafka_has(self) -> str:
        start, end = self.seen.log_start, self.seen.log_end
        return f"it has offsets {start} to {end - 1}" if start < end else f"it has no message; the next is offset {end}"

    def _instead(self, offset: int, *, surely: bool = True) -> str:
        """What can be looked at where an offset cannot: saved states around it, and where one can go on from."""
        self._read_past(everything=True)
        points = self.past.borders(0, self.end)
        before = next((one for one in reversed(points) if one.account.frontier <= offset and self._loads(one)), None)
        least = max(offset + 1, self.seen.log_start)
        after = next((one for one in points if one.account.frontier >= least and self._loads(one)), None)
        stream = self.looking.stream.name
        said = [
            f"seriatim state {stream} {typed(self.name)} --topic {self.partition.topic} --version {point.sequence}"
            f" shows it as saved at offset {point.account.frontier}"
            for point in (before, after)
            if point is not None and self.looking.state.holds(point.account.state, [self.name])
        ]
        if after is not None:
            at = after.account.frontier
            on = f"every offset from {at} on can be looked at" if surely else f"begin at offset {at}: --from {at}"
            said.append(on)
        return "\n".join(said) or "nothing of it is left to look at"

    def _loads(self, point: Point) -> bool:
        try:
            self.looking.state.load(point.account.state, [self.name])
        except IntegrityError:
            return False
        return True


class Turn(Struct, frozen=True, kw_only=True):
    """Where a session's way turns without a message of its own: a person's release, or a loss that was passed over."""

    start: int
    at: int
    release: bool = False
