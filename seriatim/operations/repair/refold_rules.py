"""The rules of a refold: a range is rewound and folded again, each session up to the first point
where it is as committed.

Repair and backfill share this. The refold of a partition begins at a saved state (`base`). It makes
all output again from there to the first committed offset at or after `until`. From there on it goes
on only with the sessions whose state differs from the committed one, up to an offset where they
agree, or to the frontier. This module is pure: it reads and writes nothing.

Next: ledger/history.py has the committed offsets; operations/repair/refold.py reads, folds and
commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct, field

from seriatim.engine.files import File
from seriatim.engine.findings import GapMark
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.session import STORED_FIELDS, RefoldScope, ReplacedRecords, Session
from seriatim.errors import ensure
from seriatim.ledger.gaps import Gap
from seriatim.ledger.model import Account
from seriatim.operations.repair.forward import CLOSED_BY_FORWARD

NOT_COMPARED_FIELDS = ("state_bytes", "state_version", "first_offset")
"""States are compared after upgrade, and no later output depends on where a session began."""
COMPARED_FIELDS = [name for name in STORED_FIELDS if name not in NOT_COMPARED_FIELDS]
"""The fields of a session, besides its state, on which everything that comes later depends."""

END_OFFSET = 1 << 62
"""An offset after every offset of a log."""


class RefoldRequest(Struct, frozen=True, kw_only=True):
    """What is to be folded again in one partition."""

    partition: Partition
    start: int
    until: int
    """Output is made again at least from `start` up to here."""
    sessions: tuple[str, ...] | None = None
    """Only these sessions; None: all."""
    reason: str = ""


class Rewind(Struct, frozen=True, kw_only=True):
    """The refold of one partition, as planned."""

    request: RefoldRequest
    account: Account
    """The partition as it is now."""
    base: Account
    """The partition as it was where the refold begins: its state and its frontier."""
    sequence: int
    """The ledger entry that left it so."""
    frontier: int
    """Where the partition goes on afterwards: its present frontier, or the log end if the log was
    cut.
    """
    commit_offsets: tuple[int, ...] = ()
    """Offsets at and after `until` for which there is committed state to compare with, in order.
    The last one is the frontier.
    """
    releases_by_hand: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Sessions that a person released, by frontier: they are released there again."""
    rebuilds_state: bool = False
    """The present state is not reliable: all of it is made again."""
    passed_ranges: tuple[OffsetRange, ...] = ()
    """Lost ranges that forwards passed over since the base. They are passed over again, and
    sessions are in doubt after them.
    """

    @property
    def partition(self) -> Partition:
        """The partition that is folded again."""
        return self.request.partition

    @property
    def read_range(self) -> OffsetRange:
        """What is read again, at most."""
        return OffsetRange(self.base.frontier, self.frontier)

    @property
    def start(self) -> int:
        """Where output begins to be made again.

        This is the offset of the base, not `request.start`: records and state before it agree with
        each other, also if another version of the machine made them.
        """
        return self.base.frontier

    def headless_since(self, offset: int) -> int:
        """Where the partition went on after the last loss before an offset; -1: nothing was lost."""
        latest = self.base.headless_since
        for passed in self.passed_ranges:
            if passed.end <= offset:
                latest = max(latest, passed.end)
        return latest

    def stage_end_offsets(self, offset: int) -> Iterator[int]:
        """The offset where a stage ends, and the ends of the losses that begin there.

        Nothing is folded between these offsets, so the state is the same at all of them.
        """
        yield offset
        for passed in self.passed_ranges:
            if passed.start == offset < passed.end:
                offset = passed.end
                yield offset

    def piece_end(self, start: int, end: int) -> int:
        """The end of a piece that begins at `start`: no release by hand lies inside of it."""
        release_offsets = [offset for offset in self.releases_by_hand if start < offset < end]
        return min([end, *release_offsets])

    @property
    def first_commit_offset(self) -> int:
        """The first offset at which sessions may be as committed."""
        if self.rebuilds_state or not self.commit_offsets:
            return self.frontier
        return self.commit_offsets[0]


class RefoldStage(Struct, frozen=True):
    """A bounded piece of the refold of a partition."""

    offset_range: OffsetRange
    ends_at_commit: bool
    """Whether there is committed state to compare with at its end."""


def plan_stages(rewind: Rewind, messages_max: int) -> Iterator[RefoldStage]:
    """The stages of a refold, in order, without the losses that were passed over.

    The state is the same before and after a loss. So a stage that is cut off by a loss may be
    compared with the committed state behind the loss.
    """
    for stage in _stages_over_losses(rewind, messages_max):
        start = stage.offset_range.start
        end = stage.offset_range.end
        for passed in rewind.passed_ranges:
            if passed.end <= start or end <= passed.start:
                continue
            if start < passed.start:
                ends_at_commit = stage.ends_at_commit and passed.end >= end
                yield RefoldStage(OffsetRange(start, passed.start), ends_at_commit)
            start = passed.end
        if start < end:
            yield RefoldStage(OffsetRange(start, end), stage.ends_at_commit)


def _stages_over_losses(rewind: Rewind, messages_max: int) -> Iterator[RefoldStage]:
    """The stages of a refold as if nothing was lost.

    First come the stages up to the first committed offset. Then come larger and larger stages up
    to the frontier: only the sessions that still differ are folded in them.
    """
    ensure(messages_max > 0, "a stage holds at least one message", messages_max=messages_max)
    start = rewind.start
    first_commit_offset = rewind.first_commit_offset
    while start < first_commit_offset:
        end = rewind.piece_end(start, min(first_commit_offset, start + messages_max))
        ends_at_commit = end == first_commit_offset and not rewind.rebuilds_state
        yield RefoldStage(OffsetRange(start, end), ends_at_commit)
        start = end
    size = max(1, first_commit_offset - rewind.start)
    while start < rewind.frontier:
        target = _next_stage_target(rewind, start, start + min(messages_max, size))
        end = rewind.piece_end(start, target)
        yield RefoldStage(OffsetRange(start, end), end in rewind.commit_offsets)
        start = end
        # Most sessions agree soon, so the first comparisons are close to each other. Those that
        # do not agree are compared less and less often.
        size *= 2


def _next_stage_target(rewind: Rewind, start: int, reach: int) -> int:
    """The last committed offset up to `reach`; if there is none, `reach` itself."""
    later_offsets = [offset for offset in rewind.commit_offsets if offset > start]
    offsets_in_reach = [offset for offset in later_offsets if offset <= reach]
    if offsets_in_reach:
        return offsets_in_reach[-1]
    return reach


class RefoldProgress(Struct, kw_only=True):
    """How far the refold of a partition is, and what it has made."""

    rewind: Rewind
    open_sessions: tuple[str, ...] | None
    """Sessions that are still folded; None: all."""
    state: tuple[File, ...]
    offset: int
    met_sessions: set[str] = field(default_factory=set)
    """Sessions that had a message."""
    session_ends: dict[str, int] = field(default_factory=dict)
    """Sessions whose refold is over, and the offset from which on they are as committed."""

    @classmethod
    def begin(cls, rewind: Rewind) -> RefoldProgress:
        """The progress before the first stage."""
        return cls(
            rewind=rewind,
            open_sessions=rewind.request.sessions,
            state=rewind.base.state,
            offset=rewind.base.frontier,
        )

    def scope(self) -> RefoldScope:
        """The sessions that are folded in the next stage."""
        return RefoldScope(sessions=self.open_sessions, finished_sessions=tuple(self.session_ends))

    def finish_stage(self, stage: RefoldStage, session_names: Iterable[str]) -> None:
        """Move to the end of a stage, and remember the sessions that had a message in it."""
        self.offset = stage.offset_range.end
        self.met_sessions.update(session_names)

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

    @property
    def is_over(self) -> bool:
        """Whether there is no session left to fold."""
        return self.offset >= self.rewind.frontier or self.open_sessions == ()

    def refolded_range(self) -> OffsetRange:
        """The range that was made again, up to where the last session was as committed."""
        start = self.rewind.start
        end = self.rewind.first_commit_offset
        if self.open_sessions != ():
            end = self.rewind.frontier
        return OffsetRange(start, max([start, end, *self.session_ends.values()]))

    def replaced_records(self) -> ReplacedRecords:
        """Which committed records are replaced by those that were made."""
        frontier = self.rewind.account.frontier
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


def same_session(left: Session | None, right: Session | None, runner: Runner) -> bool:
    """Whether two sessions agree in everything on which later output depends, after upgrade."""
    if left is None or right is None or is_empty_session(left) or is_empty_session(right):
        return is_empty_session(left) and is_empty_session(right)
    for name in COMPARED_FIELDS:
        if getattr(left, name) != getattr(right, name):
            return False
    return _current_state_bytes(left, runner) == _current_state_bytes(right, runner)


def is_empty_session(session: Session | None) -> bool:
    """Whether nothing is known of a session."""
    if session is None:
        return True
    has_state = session.state_bytes is not None
    has_finding = session.finding is not None
    return not has_state and not has_finding and not session.waiting_messages


def _current_state_bytes(session: Session, runner: Runner) -> bytes | None:
    """The state as this machine would save it; None if there is none, or if it cannot be upgraded."""
    if session.state_bytes is None or session.state_version == runner.state_version:
        return session.state_bytes
    try:
        return runner.dump(runner.load(session.state_bytes, session.state_version))
    except Exception:  # noqa: BLE001  # The upgrade is the user's code: it may raise anything.
        return None


class RewriteRegion(Struct, frozen=True):
    """A range of offsets whose records are written anew as one file."""

    offset_range: OffsetRange
    replaced_files: tuple[File, ...]
    """Committed files that leave the table."""


def plan_regions(
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


GapKey = tuple[str | None, int, str]
"""What identifies a gap in its partition: the session, the offset and the finding."""


def repaired_marks(
    gaps: Iterable[Gap],
    partition: Partition,
    topic_id: str,
    progress: RefoldProgress,
    marks: Iterable[GapMark],
) -> tuple[list[GapMark], list[GapMark], bool]:
    """What a refold does to the gaps of its partition. Three things come back.

    1. Marks that close the gaps whose output was made again.
    2. The marks of the refold itself, without those of gaps that are open still.
    3. Whether every message that the refold set aside was set aside before. Then it is in a file
       of quarantined messages already.
    """
    marks = list(marks)
    partition_gaps = [
        gap for gap in gaps if gap.topic_partition == partition and gap.topic_id == topic_id
    ]
    opening_keys = {_key_of_mark(mark) for mark in marks if not mark.closed_by}
    unrepaired_keys = {_key_of_gap(gap) for gap in partition_gaps if gap.mended is None}
    repeated_keys = opening_keys & unrepaired_keys
    # 1. Gaps that are closed.
    replaced = progress.replaced_records()
    closing_marks: list[GapMark] = []
    for gap in partition_gaps:
        if not _is_repaired(gap, progress, replaced, repeated_keys):
            continue
        closing_marks.append(
            GapMark(finding=gap.finding, offset=gap.start, session=gap.session, closed_by="repair")
        )
    # 2. Marks of the refold.
    new_marks = [
        mark for mark in marks if mark.closed_by or _key_of_mark(mark) not in repeated_keys
    ]
    # 3. Messages that were set aside.
    is_quarantined_already = not any(mark.quarantined for mark in new_marks)
    return closing_marks, new_marks, is_quarantined_already


def _key_of_gap(gap: Gap) -> GapKey:
    return gap.session, gap.start, gap.finding


def _key_of_mark(mark: GapMark) -> GapKey:
    return mark.session, mark.offset, mark.finding


def _is_repaired(
    gap: Gap, progress: RefoldProgress, replaced: ReplacedRecords, repeated_keys: set[GapKey]
) -> bool:
    """Whether a refold takes a gap back."""
    if gap.mended is not None:
        return False
    if progress.rewind.frontier <= gap.start < progress.rewind.account.frontier:
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
