"""The refold: a range rewound and folded again, each session up to the first point where it is as committed.

One mechanism for repair and backfill. A partition's refold begins at a saved state (`base`), makes all output again
from there to the first border at or after `until`, and goes on with those sessions alone whose state then differs
from the committed one, to a border where they agree, or to the frontier. Pure.

Next room: history.py has the borders; steps/refold.py reads, folds and commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct, field
from msgspec.structs import asdict

from seriatim.core.errors import ensure
from seriatim.core.gaps import Gap
from seriatim.core.integrity import Mark
from seriatim.core.ledger import Account, File
from seriatim.core.machine import Runner
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.repair_forward import CLOSED as FORWARD
from seriatim.core.scope import Replaced, Scope
from seriatim.core.session import Session

COMPARED = (
    *("sequence", "anchor", "fingerprint", "missing", "waiting", "damaged", "finding", "finding_offset"),
    *("since_snapshot", "snapshot_timestamp", "reach_ms", "last_offset", "snapshot_offset", "timestamp"),
)
"""What must be the same of a session, besides its state, for all that comes later to be the same."""


class Wanted(Struct, frozen=True, kw_only=True):
    """What somebody wants to be folded again in one partition."""

    partition: Partition
    start: int
    until: int
    """Output is made again at least from `start` up to here."""
    sessions: tuple[str, ...] | None = None
    """None: all."""
    why: str = ""


class Rewind(Struct, frozen=True, kw_only=True):
    """One partition's refold, as planned."""

    wanted: Wanted
    account: Account
    base: Account
    """As the partition was where the refold begins: its state, and its frontier."""
    sequence: int
    """The entry that left it so."""
    frontier: int
    """Where the partition goes on afterwards: the frontier of now, or the log end where the log was cut."""
    borders: tuple[int, ...] = ()
    """Offsets at and after `until` where committed state can be met; the frontier is the last."""
    released: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Sessions that a person released, and at which frontier: they are released there again."""
    rebuild: bool = False
    """The committed state of now is not to be relied on: all of it is made again."""
    passed: tuple[OffsetRange, ...] = ()
    """What forwards passed over since the base: it is passed over again, and sessions are in doubt behind it."""

    @property
    def partition(self) -> Partition:
        """Where it is."""
        return self.wanted.partition

    @property
    def reads(self) -> OffsetRange:
        """What is read again, at most."""
        return OffsetRange(self.base.frontier, self.frontier)

    @property
    def start(self) -> int:
        """Where output begins to be made again: records and state of before it agree, whatever code made them."""
        return self.base.frontier

    def headless_since(self, offset: int) -> int:
        """Where the partition went on behind the last loss before an offset; -1: nothing was lost."""
        return max([self.base.headless_since, *(whole.end for whole in self.passed if whole.end <= offset)])

    def reached(self, at: int) -> Iterator[int]:
        """The offset where a stage ends, and those right behind losses that begin there: nothing is folded between."""
        yield at
        for lost in self.passed:
            if lost.start == at < lost.end:
                at = lost.end
                yield at

    def cut(self, at: int, end: int) -> int:
        """The end of a piece that begins at `at`: no release by hand is inside."""
        return min([end, *(offset for offset in self.released if at < offset < end)])

    @property
    def first_border(self) -> int:
        """The first place at which sessions may be as committed."""
        return self.frontier if self.rebuild or not self.borders else self.borders[0]


class Stage(Struct, frozen=True):
    """A bounded piece of a partition's refold."""

    whole: OffsetRange
    border: bool
    """Whether committed state can be met at its end."""


def stages(rewind: Rewind, messages_max: int) -> Iterator[Stage]:
    """The pieces of a refold, in order, without what was passed over. State is the same on both sides of that."""
    for stage in _through(rewind, messages_max):
        at, end = stage.whole.start, stage.whole.end
        for lost in rewind.passed:
            if at < lost.end and lost.start < end:
                if at < lost.start:
                    yield Stage(OffsetRange(at, lost.start), border=stage.border and lost.end >= end)
                at = lost.end
        if at < end:
            yield Stage(OffsetRange(at, end), border=stage.border)


def _through(rewind: Rewind, messages_max: int) -> Iterator[Stage]:
    """What was wanted, then on and on, ever larger, to the frontier."""
    ensure(messages_max > 0, "a stage holds at least one message", messages_max=messages_max)
    at, first = rewind.start, rewind.first_border
    while at < first:
        end = rewind.cut(at, min(first, at + messages_max))
        yield Stage(OffsetRange(at, end), border=end == first and not rewind.rebuild)
        at = end
    size = max(1, first - rewind.start)
    while at < rewind.frontier:
        reach = at + min(messages_max, size)
        near = [border for border in rewind.borders if at < border <= reach]
        far = [border for border in rewind.borders if border > at]
        end = rewind.cut(at, near[-1] if near else min([reach, *far[:1]]))
        yield Stage(OffsetRange(at, end), border=end in rewind.borders)
        at, size = end, size * 2


class Progress(Struct, kw_only=True):
    """How far a partition's refold is, and what it has made."""

    rewind: Rewind
    open: tuple[str, ...] | None
    """Sessions that are folded on; None: all."""
    state: tuple[File, ...]
    at: int
    met: set[str] = field(default_factory=set)
    """Sessions that had a message."""
    ends: dict[str, int] = field(default_factory=dict)
    """Sessions whose refold is over, and the offset from which on they are as committed."""

    @classmethod
    def begin(cls, rewind: Rewind) -> Progress:
        """Before the first stage."""
        base, only = rewind.base, rewind.wanted.sessions
        return cls(rewind=rewind, open=only, state=base.state, at=base.frontier)

    def scope(self) -> Scope:
        """Who is folded in the next stage."""
        return Scope(sessions=self.open, over=tuple(self.ends))

    def take(self, stage: Stage, met: Iterable[str]) -> None:
        """After a stage: who was met in it."""
        self.at = stage.whole.end
        self.met.update(met)

    def doubtful(self) -> list[str]:
        """Sessions that may or may not be as committed, at a border."""
        return sorted((self.met if self.open is None else self.met & set(self.open)) - set(self.ends))

    def settle(self, as_committed: Iterable[str]) -> None:
        """At a border: those of the doubtful that are as committed. The others are folded on, and nobody else."""
        ended = set(as_committed)
        self.open = tuple(name for name in self.doubtful() if name not in ended)
        self.ends |= dict.fromkeys(ended, self.at)

    @property
    def is_over(self) -> bool:
        """Whether nobody is left to be folded on."""
        return self.at >= self.rewind.frontier or self.open == ()

    def widened(self) -> OffsetRange:
        """What was made again: from where it was wanted to where the last session was as committed."""
        start, end = self.rewind.start, self.rewind.first_border
        if self.open != ():
            end = self.rewind.frontier
        return OffsetRange(start, max([start, end, *self.ends.values()]))

    def replaced(self) -> Replaced:
        """Which committed records are replaced by what was made."""
        rewind, only = self.rewind, self.rewind.wanted.sessions
        return Replaced(
            start=rewind.start,
            end=rewind.account.frontier if self.open is None else rewind.first_border,
            sessions=None if only is None else frozenset(only),
            ends=self.ends | dict.fromkeys(self.open or (), rewind.account.frontier),
        )


def same(one: Session | None, other: Session | None, runner: Runner) -> bool:
    """Whether two sessions are alike in all that counts for what comes later, after upgrade."""
    if is_nobody(one) or is_nobody(other):
        return is_nobody(one) and is_nobody(other)
    assert one is not None
    assert other is not None
    mine, yours = asdict(one), asdict(other)
    return all(mine[name] == yours[name] for name in COMPARED) and _state(one, runner) == _state(other, runner)


def is_nobody(session: Session | None) -> bool:
    """Whether nothing is known of a session."""
    return session is None or (session.saved is None and session.finding is None and not session.waiting)


def _state(session: Session, runner: Runner) -> bytes | None:
    """The state as this machine would save it."""
    if session.saved is None or session.version == runner.state_version:
        return session.saved
    try:
        return runner.dump(runner.load(session.saved, session.version))
    except Exception:  # noqa: BLE001  # the user's own upgrade: whoever cannot be upgraded is like nobody
        return None


class Region(Struct, frozen=True):
    """A stretch of offsets whose records are put together anew as one file."""

    within: OffsetRange
    olds: tuple[File, ...]
    """Committed files that leave the table."""


END = 1 << 62
"""After every offset."""


def regions(active: Iterable[File], is_hurt: Callable[[File], bool], rows_max: int) -> list[Region]:
    """Where record files are made anew: around those that are hurt, never across one that is not.

    So a file that stays has its offsets for itself, and nothing is read that need not be. Regions end after
    `rows_max` rows.
    """
    made: list[Region] = []
    olds: list[File] = []
    edge = 0

    def close(end: int, then: int) -> None:
        nonlocal edge
        if edge < end:
            made.append(Region(OffsetRange(edge, end), tuple(olds)))
        olds.clear()
        edge = then

    for file in sorted(active, key=lambda file: file.first):
        if not is_hurt(file):
            close(file.first, file.last + 1)
            continue
        olds.append(file)
        if sum(old.rows for old in olds) >= rows_max:
            close(file.last + 1, file.last + 1)
    close(END, END)
    return made


def mended(
    gaps: Iterable[Gap], partition: Partition, topic_id: str, progress: Progress, marks: Iterable[Mark]
) -> tuple[list[Mark], list[Mark], bool]:
    """Marks that take back gaps whose output was made again, and the refold's own, but those of gaps that are so still.

    And whether every message that it set aside was set aside before: then it is kept already.
    """
    replaced = progress.replaced()
    mine = [gap for gap in gaps if gap.place == partition and gap.topic_id == topic_id]
    known = {(gap.session, gap.start, gap.finding) for gap in mine if gap.mended is None}
    found = [mark for mark in marks if not mark.closed]
    again = {(mark.session, mark.offset, mark.finding) for mark in found} & known

    def is_mended(gap: Gap) -> bool:
        if progress.rewind.frontier <= gap.start < progress.rewind.account.frontier:
            return gap.mended is None  # the log was cut: its messages never were, and others take their offsets
        if (gap.session, gap.start, gap.finding) in again or gap.closed_how == FORWARD or gap.mended is not None:
            return False
        if gap.session is None:
            return replaced.sessions is None and replaced.start <= gap.start < replaced.end
        closed = gap.start if gap.until is None else gap.until - 1
        return replaced.has(gap.session, gap.start) and replaced.has(gap.session, closed)

    closed = [
        Mark(finding=gap.finding, offset=gap.start, session=gap.session, closed="repair")
        for gap in mine
        if is_mended(gap)
    ]
    opened = [mark for mark in marks if mark.closed or (mark.session, mark.offset, mark.finding) not in again]
    return closed, opened, not any(mark.quarantined for mark in opened)
