"""Gaps: which stretches of output not to trust, and how each ended. A fold over the ledger's
entries, nothing else.

A mark opens or closes a session's gap; missing offsets are a gap that is closed as soon as it is
known; a halted partition has an open one for all its sessions. Entries one by one, or all from the
first: the same gaps.

Next room: operations/derived_tables.py brings the tables `gaps` and `quarantine` up to the ledger
with this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from seriatim.engine.findings import GapMark
from seriatim.engine.offsets import Partition
from seriatim.ledger.model import Account, Change, Entry, File, Manifest


class Gap(Struct, frozen=True, kw_only=True):
    """A stretch of one session's output, or of all sessions of a partition, that is not to be
    trusted.
    """

    topic: str
    topic_id: str
    partition: int
    session: str | None
    """None: all sessions."""
    start: int
    """The first offset; the table's column is called `from`."""
    until: int | None = None
    """The first offset that is right again; None while it is open."""
    finding: str
    cause: str = ""
    opened: int
    """The entry that opened it."""
    closed: int | None = None
    """The entry that closed it."""
    closed_how: str | None = None
    """By snapshot, repair, forward, accept, skip, end or hand; None: nothing had to, as for missing
    offsets.
    """
    quarantined: bool = False
    """Whether the session's messages were set aside meanwhile."""
    mended: int | None = None
    """The repair that made this output again: nothing of it is wrong any more."""

    @property
    def topic_partition(self) -> Partition:
        """Where it is."""
        return Partition(self.topic, self.partition)

    def to_row(self) -> dict[str, Any]:
        """As the table has it."""
        return {"from" if name == "start" else name: value for name, value in asdict(self).items()}

    def release_columns(self) -> dict[str, Any]:
        """As the messages that were set aside have it, once it is closed."""
        return {
            "released_by": self.closed,
            "released_how": self.closed_how,
            "released_offset": self.until,
        }


class QuarantineFile(Struct, frozen=True):
    """A file of messages set aside, and the entry that kept them."""

    file: File
    sequence: int


def gaps_after(gaps: Iterable[Gap], manifest: Manifest) -> list[Gap]:
    """The gaps after one more entry."""
    walk = GapsFold(gaps)
    walk.add_entry(manifest)
    return walk.gaps


def quarantine_files(entry: Entry) -> list[QuarantineFile]:
    """The files of messages that an entry set aside."""
    return [
        QuarantineFile(file, entry.sequence)
        for change in entry.changes
        for file in change.quarantine_files
    ]


def ended_quarantines(gaps: Iterable[Gap], after_sequence: int) -> list[Gap]:
    """Stays in quarantine that ended later than entry `after`."""
    return [
        gap
        for gap in gaps
        if gap.quarantined and gap.closed is not None and gap.closed > after_sequence
    ]


def quarantine_release_finder(gaps: Iterable[Gap]) -> Callable[[Mapping[str, Any]], Gap | None]:
    """Finds the stay in quarantine, of these, that a message set aside belongs to: the first to end
    after it.
    """
    stays: dict[tuple[str, int, str | None], list[Gap]] = {}
    for gap in sorted(gaps, key=lambda gap: gap.until or 0):
        stays.setdefault((gap.topic_id, gap.partition, gap.session), []).append(gap)

    def find(row: Mapping[str, Any]) -> Gap | None:
        ended = stays.get((row["topic_id"], row["partition"], row["session"]), ())
        return next((gap for gap in ended if row["offset"] < (gap.until or 0)), None)

    return find


class GapsFold:
    """Gaps in the order in which they were opened, while entries are taken in."""

    def __init__(self, gaps: Iterable[Gap] = ()) -> None:
        self.gaps = list(gaps)
        self._open_gap_numbers: dict[Partition, dict[int, None]] = {}
        for number, gap in enumerate(self.gaps):
            if gap.closed is None:
                self._open_gap_numbers.setdefault(gap.topic_partition, {})[number] = None

    def add_entry(self, manifest: Manifest) -> None:
        """One more entry: what it ends, what it marks, what halts."""
        entry = manifest.entry
        for change in entry.changes:
            self._close_gaps_of_old_life(entry, change)
            for mark in (*change.marks, *_expired_marks(change)):
                self._apply_mark(entry, change, mark)
            self._apply_halt(entry, change, manifest.ledger.account(change.partition))

    def _close_gaps_of_old_life(self, entry: Entry, change: Change) -> None:
        """A topic's old life is over: so are its sessions, and what was wrong with them."""
        for number, gap in self._open_gaps(change.partition):
            if gap.topic_id != change.topic_id:
                self._close_gap(number, entry, max(gap.start, change.frontier), entry.kind)

    def _apply_mark(self, entry: Entry, change: Change, mark: GapMark) -> None:
        if mark.until >= 0:
            how = mark.closed_by or ("snapshot" if mark.session is not None else None)
            made, halted = (
                _new_gap(entry, change, mark),
                self._halt_gap_of_mark(change.partition, mark),
            )
            if halted is None:
                self.gaps.append(
                    replace(made, until=mark.until, closed=entry.sequence, closed_how=how)
                )
            else:
                self._close_gap(halted, entry, mark.until, mark.closed_by)
        elif mark.closed_by == "repair":
            self._mark_repaired(entry, change, mark)
        elif mark.closed_by:
            for number, gap in self._open_gaps(change.partition):
                late = (
                    entry.kind == "repair" and gap.start >= mark.offset
                )  # a refold tells of the past
                if mark.session in (None, gap.session) and not late:
                    self._close_gap(number, entry, max(gap.start, mark.offset), mark.closed_by)
        elif not self._is_covered(change.partition, mark):
            self._open_gap(_new_gap(entry, change, mark))

    def _halt_gap_of_mark(self, partition: Partition, mark: GapMark) -> int | None:
        """The gap of the halt whose loss a mark passes over: it is that one which ends."""
        wanted = (None, mark.finding, mark.offset)
        opened = self._open_gaps(partition) if mark.closed_by else ()
        return next(
            (number for number, gap in opened if (gap.session, gap.finding, gap.start) == wanted),
            None,
        )

    def _mark_repaired(self, entry: Entry, change: Change, mark: GapMark) -> None:
        """Output was made again where a gap began: whether it was open or closed, it is right now."""
        for number, gap in enumerate(self.gaps):
            is_it = (gap.topic_partition, gap.topic_id) == (change.partition, change.topic_id)
            if is_it and (gap.session, gap.start) == (mark.session, mark.offset):
                if gap.closed is None:
                    self._close_gap(number, entry, change.until, "repair")
                self.gaps[number] = replace(self.gaps[number], mended=entry.sequence)

    def _is_covered(self, partition: Partition, mark: GapMark) -> bool:
        """Whether the session's output is known not to be right, and its messages are where they
        would be.
        """
        gaps = [gap for _, gap in self._open_gaps(partition) if gap.session == mark.session]
        return any(gap.quarantined or not mark.quarantined for gap in gaps)

    def _apply_halt(self, entry: Entry, change: Change, account: Account | None) -> None:
        """A halted partition has an open gap for all sessions, until it goes on."""
        halt = account.halt if account else None
        known = False
        for number, gap in self._open_gaps(change.partition):
            if gap.session is not None:
                continue
            if halt is not None and (gap.finding, gap.start) == (halt.finding, halt.offset):
                known = True
            elif (
                entry.kind == "slice" and change.until > gap.start
            ):  # the stream file says to pass over the message
                self._close_gap(number, entry, gap.start + 1, "skip")
            elif halt is None:
                self._close_gap(number, entry, max(gap.start, change.frontier), entry.kind)
        if halt is not None and not known:
            self._open_gap(
                _new_gap(
                    entry,
                    change,
                    GapMark(finding=halt.finding, offset=halt.offset, cause=halt.cause),
                )
            )

    def _open_gaps(self, partition: Partition) -> Iterator[tuple[int, Gap]]:
        for number in list(self._open_gap_numbers.get(partition, ())):
            yield number, self.gaps[number]

    def _open_gap(self, gap: Gap) -> None:
        self._open_gap_numbers.setdefault(gap.topic_partition, {})[len(self.gaps)] = None
        self.gaps.append(gap)

    def _close_gap(self, number: int, entry: Entry, until: int, closed_how: str) -> None:
        gap = self.gaps[number]
        self.gaps[number] = replace(gap, until=until, closed=entry.sequence, closed_how=closed_how)
        del self._open_gap_numbers[gap.topic_partition][number]


def _new_gap(entry: Entry, change: Change, mark: GapMark) -> Gap:
    return Gap(
        topic=change.partition.topic,
        topic_id=mark.topic_id or change.topic_id,
        partition=change.partition.number,
        session=mark.session,
        start=mark.offset,
        finding=mark.finding,
        cause=mark.cause,
        opened=entry.sequence,
        quarantined=mark.quarantined,
    )


def _expired_marks(change: Change) -> list[GapMark]:
    """Offsets that were gone before they were read, where a certificate alone tells of them."""
    certificate = change.certificate
    if certificate is None or certificate.counts.messages or set(certificate.holes) != {"expired"}:
        return []
    if any(mark.finding == "expired" and mark.session is None for mark in change.marks):
        return []
    cause = f"{certificate.holes['expired']} messages were deleted before they were read"
    return [
        GapMark(finding="expired", offset=certificate.start, until=certificate.until, cause=cause)
    ]
