"""The refold: a range rewound and folded again, each session up to the first point where it is as
committed.

One mechanism for repair and backfill. A partition's refold begins at a saved state (`base`), makes
all output again from there to the first border at or after `until`, and goes on with those sessions
alone whose state then differs from the committed one, to a border where they agree, or to the
frontier. Pure.

Next room: history.py has the borders; operations/repair/refold.py reads, folds and commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct, field
from msgspec.structs import asdict

from seriatim.engine.findings import GapMark
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.session import Session
from seriatim.engine.session_filter import RefoldScope, ReplacedRecords
from seriatim.errors import ensure
from seriatim.ledger.gaps import Gap
from seriatim.ledger.model import Account, File
from seriatim.operations.repair.forward import CLOSED_BY_FORWARD as FORWARD

COMPARED_FIELDS = (
    *(
        "sequence",
        "snapshot_sequence",
        "snapshot_fingerprint",
        "missing_sequences",
        "waiting_messages",
        "damaged_since_offset",
        "finding",
        "finding_offset",
    ),
    *(
        "messages_since_snapshot",
        "snapshot_timestamp",
        "snapshot_distance_ms",
        "last_offset",
        "snapshot_offset",
        "timestamp",
    ),
)
"""What must be the same of a session, besides its state, for all that comes later to be the same."""


class RefoldRequest(Struct, frozen=True, kw_only=True):
    """What somebody wants to be folded again in one partition."""

    partition: Partition
    start: int
    until: int
    """Output is made again at least from `start` up to here."""
    sessions: tuple[str, ...] | None = None
    """None: all."""
    reason: str = ""


class Rewind(Struct, frozen=True, kw_only=True):
    """One partition's refold, as planned."""

    request: RefoldRequest
    account: Account
    base: Account
    """As the partition was where the refold begins: its state, and its frontier."""
    sequence: int
    """The entry that left it so."""
    frontier: int
    """Where the partition goes on afterwards: the frontier of now, or the log end where the log was
    cut.
    """
    commit_offsets: tuple[int, ...] = ()
    """Offsets at and after `until` where committed state can be met; the frontier is the last."""
    releases_by_hand: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Sessions that a person released, and at which frontier: they are released there again."""
    rebuilds_state: bool = False
    """The committed state of now is not to be relied on: all of it is made again."""
    passed_ranges: tuple[OffsetRange, ...] = ()
    """What forwards passed over since the base: it is passed over again, and sessions are in doubt
    behind it.
    """

    @property
    def partition(self) -> Partition:
        """Where it is."""
        return self.request.partition

    @property
    def read_range(self) -> OffsetRange:
        """What is read again, at most."""
        return OffsetRange(self.base.frontier, self.frontier)

    @property
    def start(self) -> int:
        """Where output begins to be made again: records and state of before it agree, whatever code
        made them.
        """
        return self.base.frontier

    def headless_since(self, offset: int) -> int:
        """Where the partition went on behind the last loss before an offset; -1: nothing was lost."""
        return max(
            [
                self.base.headless_since,
                *(whole.end for whole in self.passed_ranges if whole.end <= offset),
            ]
        )

    def stage_end_offsets(self, offset: int) -> Iterator[int]:
        """The offset where a stage ends, and those right behind losses that begin there: nothing is
        folded between.
        """
        yield offset
        for lost in self.passed_ranges:
            if lost.start == offset < lost.end:
                offset = lost.end
                yield offset

    def piece_end(self, start: int, end: int) -> int:
        """The end of a piece that begins at `at`: no release by hand is inside."""
        return min([end, *(offset for offset in self.releases_by_hand if start < offset < end)])

    @property
    def first_commit_offset(self) -> int:
        """The first place at which sessions may be as committed."""
        return (
            self.frontier
            if self.rebuilds_state or not self.commit_offsets
            else self.commit_offsets[0]
        )


class RefoldStage(Struct, frozen=True):
    """A bounded piece of a partition's refold."""

    offset_range: OffsetRange
    ends_at_commit: bool
    """Whether committed state can be met at its end."""


def plan_stages(rewind: Rewind, messages_max: int) -> Iterator[RefoldStage]:
    """The pieces of a refold, in order, without what was passed over. State is the same on both
    sides of that.
    """
    for stage in _stages_over_losses(rewind, messages_max):
        at, end = stage.offset_range.start, stage.offset_range.end
        for lost in rewind.passed_ranges:
            if at < lost.end and lost.start < end:
                if at < lost.start:
                    yield RefoldStage(
                        OffsetRange(at, lost.start),
                        ends_at_commit=stage.ends_at_commit and lost.end >= end,
                    )
                at = lost.end
        if at < end:
            yield RefoldStage(OffsetRange(at, end), ends_at_commit=stage.ends_at_commit)


def _stages_over_losses(rewind: Rewind, messages_max: int) -> Iterator[RefoldStage]:
    """What was wanted, then on and on, ever larger, to the frontier."""
    ensure(messages_max > 0, "a stage holds at least one message", messages_max=messages_max)
    at, first = rewind.start, rewind.first_commit_offset
    while at < first:
        end = rewind.piece_end(at, min(first, at + messages_max))
        yield RefoldStage(
            OffsetRange(at, end), ends_at_commit=end == first and not rewind.rebuilds_state
        )
        at = end
    size = max(1, first - rewind.start)
    while at < rewind.frontier:
        reach = at + min(messages_max, size)
        near = [border for border in rewind.commit_offsets if at < border <= reach]
        far = [border for border in rewind.commit_offsets if border > at]
        end = rewind.piece_end(at, near[-1] if near else min([reach, *far[:1]]))
        yield RefoldStage(OffsetRange(at, end), ends_at_commit=end in rewind.commit_offsets)
        at, size = end, size * 2


class RefoldProgress(Struct, kw_only=True):
    """How far a partition's refold is, and what it has made."""

    rewind: Rewind
    open_sessions: tuple[str, ...] | None
    """Sessions that are folded on; None: all."""
    state: tuple[File, ...]
    offset: int
    met_sessions: set[str] = field(default_factory=set)
    """Sessions that had a message."""
    session_ends: dict[str, int] = field(default_factory=dict)
    """Sessions whose refold is over, and the offset from which on they are as committed."""

    @classmethod
    def begin(cls, rewind: Rewind) -> RefoldProgress:
        """Before the first stage."""
        base, only = rewind.base, rewind.request.sessions
        return cls(rewind=rewind, open_sessions=only, state=base.state, offset=base.frontier)

    def scope(self) -> RefoldScope:
        """Who is folded in the next stage."""
        return RefoldScope(sessions=self.open_sessions, finished_sessions=tuple(self.session_ends))

    def finish_stage(self, stage: RefoldStage, session_names: Iterable[str]) -> None:
        """After a stage: who was met in it."""
        self.offset = stage.offset_range.end
        self.met_sessions.update(session_names)

    def undecided_sessions(self) -> list[str]:
        """Sessions that may or may not be as committed, at a border."""
        return sorted(
            (
                self.met_sessions
                if self.open_sessions is None
                else self.met_sessions & set(self.open_sessions)
            )
            - set(self.session_ends)
        )

    def close_sessions(self, committed_sessions: Iterable[str]) -> None:
        """At a border: those of the doubtful that are as committed. The others are folded on, and
        nobody else.
        """
        ended = set(committed_sessions)
        self.open_sessions = tuple(name for name in self.undecided_sessions() if name not in ended)
        self.session_ends |= dict.fromkeys(ended, self.offset)

    @property
    def is_over(self) -> bool:
        """Whether nobody is left to be folded on."""
        return self.offset >= self.rewind.frontier or self.open_sessions == ()

    def refolded_range(self) -> OffsetRange:
        """What was made again: from where it was wanted to where the last session was as committed."""
        start, end = self.rewind.start, self.rewind.first_commit_offset
        if self.open_sessions != ():
            end = self.rewind.frontier
        return OffsetRange(start, max([start, end, *self.session_ends.values()]))

    def replaced_records(self) -> ReplacedRecords:
        """Which committed records are replaced by what was made."""
        rewind, only = self.rewind, self.rewind.request.sessions
        return ReplacedRecords(
            start=rewind.start,
            end=rewind.account.frontier
            if self.open_sessions is None
            else rewind.first_commit_offset,
            sessions=None if only is None else frozenset(only),
            session_ends=self.session_ends
            | dict.fromkeys(self.open_sessions or (), rewind.account.frontier),
        )


def same_session(left: Session | None, right: Session | None, runner: Runner) -> bool:
    """Whether two sessions are alike in all that counts for what comes later, after upgrade."""
    if is_empty_session(left) or is_empty_session(right):
        return is_empty_session(left) and is_empty_session(right)
    assert left is not None
    assert right is not None
    mine, yours = asdict(left), asdict(right)
    return all(mine[name] == yours[name] for name in COMPARED_FIELDS) and _current_state_bytes(
        left, runner
    ) == _current_state_bytes(right, runner)


def is_empty_session(session: Session | None) -> bool:
    """Whether nothing is known of a session."""
    return session is None or (
        session.state_bytes is None and session.finding is None and not session.waiting_messages
    )


def _current_state_bytes(session: Session, runner: Runner) -> bytes | None:
    """The state as this machine would save it."""
    if session.state_bytes is None or session.state_version == runner.state_version:
        return session.state_bytes
    try:
        return runner.dump(runner.load(session.state_bytes, session.state_version))
    except Exception:  # noqa: BLE001  # the user's own upgrade: whoever cannot be upgraded is like nobody
        return None


class RewriteRegion(Struct, frozen=True):
    """A stretch of offsets whose records are put together anew as one file."""

    offset_range: OffsetRange
    replaced_files: tuple[File, ...]
    """Committed files that leave the table."""


END_OFFSET = 1 << 62
"""After every offset."""


def plan_regions(
    active_files: Iterable[File], is_affected: Callable[[File], bool], rows_max: int
) -> list[RewriteRegion]:
    """Where record files are made anew: around those that are hurt, never across one that is not.

    So a file that stays has its offsets for itself, and nothing is read that need not be. Regions
    end after `rows_max` rows.
    """
    made: list[RewriteRegion] = []
    olds: list[File] = []
    edge = 0

    def close(end: int, then: int) -> None:
        nonlocal edge
        if edge < end:
            made.append(RewriteRegion(OffsetRange(edge, end), tuple(olds)))
        olds.clear()
        edge = then

    for file in sorted(active_files, key=lambda file: file.first_offset):
        if not is_affected(file):
            close(file.first_offset, file.last_offset + 1)
            continue
        olds.append(file)
        if sum(old.rows for old in olds) >= rows_max:
            close(file.last_offset + 1, file.last_offset + 1)
    close(END_OFFSET, END_OFFSET)
    return made


def repaired_marks(
    gaps: Iterable[Gap],
    partition: Partition,
    topic_id: str,
    progress: RefoldProgress,
    marks: Iterable[GapMark],
) -> tuple[list[GapMark], list[GapMark], bool]:
    """Marks that take back gaps whose output was made again, and the refold's own, but those of
    gaps that are so still.

    And whether every message that it set aside was set aside before: then it is kept already.
    """
    replaced = progress.replaced_records()
    mine = [gap for gap in gaps if gap.topic_partition == partition and gap.topic_id == topic_id]
    known = {(gap.session, gap.start, gap.finding) for gap in mine if gap.mended is None}
    found = [mark for mark in marks if not mark.closed_by]
    again = {(mark.session, mark.offset, mark.finding) for mark in found} & known

    def is_mended(gap: Gap) -> bool:
        if progress.rewind.frontier <= gap.start < progress.rewind.account.frontier:
            return (
                gap.mended is None
            )  # the log was cut: its messages never were, and others take their offsets
        if (
            (gap.session, gap.start, gap.finding) in again
            or gap.closed_how == FORWARD
            or gap.mended is not None
        ):
            return False
        if gap.session is None:
            return replaced.sessions is None and replaced.start <= gap.start < replaced.end
        closed = gap.start if gap.until is None else gap.until - 1
        return replaced.includes(gap.session, gap.start) and replaced.includes(gap.session, closed)

    closed = [
        GapMark(finding=gap.finding, offset=gap.start, session=gap.session, closed_by="repair")
        for gap in mine
        if is_mended(gap)
    ]
    opened = [
        mark
        for mark in marks
        if mark.closed_by or (mark.session, mark.offset, mark.finding) not in again
    ]
    return closed, opened, not any(mark.quarantined for mark in opened)
