"""The refold: a range rewound and folded again, each session up to the first point where it is as committed.

One mechanism for repair and backfill. A partition's refold begins at a saved state (`base`), folds silently up to
`start`, makes output again up to `until`, and goes on with those sessions alone whose state then differs from the
committed one: through their next snapshot, or to a border where they agree, or to the frontier. Pure.

Next room: history.py has the borders; steps/refold.py reads, folds and commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct, field
from msgspec.structs import asdict

from seriatim.core.errors import ensure
from seriatim.core.ledger import Account, File
from seriatim.core.machine import Runner
from seriatim.core.offsets import OffsetRange, Partition
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
    """From `start` on output is made again, at least up to here."""
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
    rebuild: bool = False
    """The committed state of now is not to be relied on: all of it is made again."""

    @property
    def partition(self) -> Partition:
        """Where it is."""
        return self.wanted.partition

    @property
    def reads(self) -> OffsetRange:
        """What is read again, at most."""
        return OffsetRange(self.base.frontier, self.frontier)

    @property
    def least(self) -> OffsetRange:
        """What is made again, at least."""
        return OffsetRange(self.wanted.start, self.first_border)

    @property
    def first_border(self) -> int:
        """The first place at which sessions may be as committed."""
        return self.frontier if self.rebuild or not self.borders else self.borders[0]


class Stage(Struct, frozen=True):
    """A bounded piece of a partition's refold."""

    whole: OffsetRange
    silent: bool
    border: bool
    """Whether committed state can be met at its end."""


def stages(rewind: Rewind, messages_max: int) -> Iterator[Stage]:
    """The pieces of a refold, in order: the lead-in, what was wanted, then on and on, ever larger, to the frontier."""
    ensure(messages_max > 0, "a stage holds at least one message", messages_max=messages_max)
    lead, first = rewind.wanted.start, rewind.first_border
    yield from _pieces(rewind.base.frontier, lead, messages_max, silent=True, border=False)
    yield from _pieces(lead, first, messages_max, silent=False, border=not rewind.rebuild)
    at, size = first, max(1, first - lead)
    while at < rewind.frontier:
        reach = at + min(messages_max, size)
        near = [border for border in rewind.borders if at < border <= reach]
        far = [border for border in rewind.borders if border > at]
        end = near[-1] if near else min([reach, *far[:1]])
        yield Stage(OffsetRange(at, end), silent=False, border=end in rewind.borders)
        at, size = end, size * 2


def _pieces(start: int, end: int, messages_max: int, *, silent: bool, border: bool) -> Iterator[Stage]:
    while start < end:
        stop = min(end, start + messages_max)
        yield Stage(OffsetRange(start, stop), silent, border and stop == end)
        start = stop


class Progress(Struct, kw_only=True):
    """How far a partition's refold is, and what it has made."""

    rewind: Rewind
    by_snapshots: bool
    """Whether a snapshot makes a session what it is, whatever was before."""
    open: tuple[str, ...] | None
    """Sessions that are folded on; None: all."""
    state: tuple[File, ...]
    at: int
    met: set[str] = field(default_factory=set)
    """Sessions that had a message since output is made again."""
    ends: dict[str, int] = field(default_factory=dict)
    """Sessions whose refold is over, and the offset from which on they are as committed."""

    @classmethod
    def begin(cls, rewind: Rewind, *, by_snapshots: bool) -> Progress:
        """Before the first stage."""
        base, only = rewind.base, rewind.wanted.sessions
        return cls(rewind=rewind, by_snapshots=by_snapshots, open=only, state=base.state, at=base.frontier)

    def scope(self, stage: Stage) -> Scope:
        """Who is folded in a stage."""
        ends = self.rewind.wanted.until if self.by_snapshots and not self.rewind.rebuild else None
        return Scope(sessions=self.open, over=tuple(self.ends), snapshots_end=ends, silent=stage.silent)

    def take(self, stage: Stage, met: Iterable[str], ended: Mapping[str, int]) -> None:
        """After a stage: who was met in it, and who ended by a snapshot."""
        self.at = stage.whole.end
        self.ends |= ended
        if not stage.silent:
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

    def replaced(self) -> Replaced:
        """Which committed records are replaced by what was made."""
        rewind, only = self.rewind, self.rewind.wanted.sessions
        return Replaced(
            start=rewind.wanted.start,
            end=max(rewind.account.frontier, rewind.frontier) if rewind.rebuild else rewind.first_border,
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
    return runner.dump(runner.load(session.saved, session.version))
