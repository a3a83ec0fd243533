"""Gaps: which stretches of output not to trust, and how each ended. A fold over the ledger's entries, nothing else.

A mark opens or closes a session's gap; missing offsets are a gap that is closed as soon as it is known; a halted
partition has an open one for all its sessions. Entries one by one, or all from the first: the same gaps.

Next room: steps/derive.py brings the tables `gaps` and `quarantine` up to the ledger with this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from seriatim.core.integrity import Mark
from seriatim.core.ledger import Account, Change, Entry, File, Manifest
from seriatim.core.offsets import Partition


class Gap(Struct, frozen=True, kw_only=True):
    """A stretch of one session's output, or of all sessions of a partition, that is not to be trusted."""

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
    """By snapshot, repair, forward, accept, skip, end or hand; None: nothing had to, as for missing offsets."""
    quarantined: bool = False
    """Whether the session's messages were set aside meanwhile."""
    mended: int | None = None
    """The repair that made this output again: nothing of it is wrong any more."""

    @property
    def place(self) -> Partition:
        """Where it is."""
        return Partition(self.topic, self.partition)

    def row(self) -> dict[str, Any]:
        """As the table has it."""
        return {"from" if name == "start" else name: value for name, value in asdict(self).items()}

    def release(self) -> dict[str, Any]:
        """As the messages that were set aside have it, once it is closed."""
        return {"released_by": self.closed, "released_how": self.closed_how, "released_offset": self.until}


class Aside(Struct, frozen=True):
    """A file of messages set aside, and the entry that kept them."""

    file: File
    sequence: int


def gaps_after(gaps: Iterable[Gap], manifest: Manifest) -> list[Gap]:
    """The gaps after one more entry."""
    walk = GapsFold(gaps)
    walk.take(manifest)
    return walk.gaps


def asides(entry: Entry) -> list[Aside]:
    """The files of messages that an entry set aside."""
    return [Aside(file, entry.sequence) for change in entry.changes for file in change.kept]


def released(gaps: Iterable[Gap], after: int) -> list[Gap]:
    """Stays in quarantine that ended later than entry `after`."""
    return [gap for gap in gaps if gap.quarantined and gap.closed is not None and gap.closed > after]


def release_of(gaps: Iterable[Gap]) -> Callable[[Mapping[str, Any]], Gap | None]:
    """Finds the stay in quarantine, of these, that a message set aside belongs to: the first to end after it."""
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
        self._open: dict[Partition, dict[int, None]] = {}
        for number, gap in enumerate(self.gaps):
            if gap.closed is None:
                self._open.setdefault(gap.place, {})[number] = None

    def take(self, manifest: Manifest) -> None:
        """One more entry: what it ends, what it marks, what halts."""
        entry = manifest.entry
        for change in entry.changes:
            self._end_of_life(entry, change)
            for mark in (*change.marks, *_expired(change)):
                self._mark(entry, change, mark)
            self._halts(entry, change, manifest.ledger.account(change.partition))

    def _end_of_life(self, entry: Entry, change: Change) -> None:
        """A topic's old life is over: so are its sessions, and what was wrong with them."""
        for number, gap in self._opened(change.partition):
            if gap.topic_id != change.topic_id:
                self._close(number, entry, max(gap.start, change.frontier), entry.kind)

    def _mark(self, entry: Entry, change: Change, mark: Mark) -> None:
        if mark.until >= 0:
            how = mark.closed or ("snapshot" if mark.session is not None else None)
            made, halted = _gap(entry, change, mark), self._halted(change.partition, mark)
            if halted is None:
                self.gaps.append(replace(made, until=mark.until, closed=entry.sequence, closed_how=how))
            else:
                self._close(halted, entry, mark.until, mark.closed)
        elif mark.closed == "repair":
            self._mend(entry, change, mark)
        elif mark.closed:
            for number, gap in self._opened(change.partition):
                late = entry.kind == "repair" and gap.start >= mark.offset  # a refold tells of the past
                if mark.session in (None, gap.session) and not late:
                    self._close(number, entry, max(gap.start, mark.offset), mark.closed)
        elif not self._covers(change.partition, mark):
            self._append(_gap(entry, change, mark))

    def _halted(self, partition: Partition, mark: Mark) -> int | None:
        """The gap of the halt whose loss a mark passes over: it is that one which ends."""
        wanted = (None, mark.finding, mark.offset)
        opened = self._opened(partition) if mark.closed else ()
        return next((number for number, gap in opened if (gap.session, gap.finding, gap.start) == wanted), None)

    def _mend(self, entry: Entry, change: Change, mark: Mark) -> None:
        """Output was made again where a gap began: whether it was open or closed, it is right now."""
        for number, gap in enumerate(self.gaps):
            is_it = (gap.place, gap.topic_id) == (change.partition, change.topic_id)
            if is_it and (gap.session, gap.start) == (mark.session, mark.offset):
                if gap.closed is None:
                    self._close(number, entry, change.until, "repair")
                self.gaps[number] = replace(self.gaps[number], mended=entry.sequence)

    def _covers(self, partition: Partition, mark: Mark) -> bool:
        """Whether the session's output is known not to be right, and its messages are where they would be."""
        gaps = [gap for _, gap in self._opened(partition) if gap.session == mark.session]
        return any(gap.quarantined or not mark.quarantined for gap in gaps)

    def _halts(self, entry: Entry, change: Change, account: Account | None) -> None:
        """A halted partition has an open gap for all sessions, until it goes on."""
        halt = account.halt if account else None
        known = False
        for number, gap in self._opened(change.partition):
            if gap.session is not None:
                continue
            if halt is not None and (gap.finding, gap.start) == (halt.finding, halt.offset):
                known = True
            elif entry.kind == "slice" and change.until > gap.start:  # the stream file says to pass over the message
                self._close(number, entry, gap.start + 1, "skip")
            elif halt is None:
                self._close(number, entry, max(gap.start, change.frontier), entry.kind)
        if halt is not None and not known:
            self._append(_gap(entry, change, Mark(finding=halt.finding, offset=halt.offset, cause=halt.cause)))

    def _opened(self, partition: Partition) -> Iterator[tuple[int, Gap]]:
        for number in list(self._open.get(partition, ())):
            yield number, self.gaps[number]

    def _append(self, gap: Gap) -> None:
        self._open.setdefault(gap.place, {})[len(self.gaps)] = None
        self.gaps.append(gap)

    def _close(self, number: int, entry: Entry, until: int, how: str) -> None:
        gap = self.gaps[number]
        self.gaps[number] = replace(gap, until=until, closed=entry.sequence, closed_how=how)
        del self._open[gap.place][number]


def _gap(entry: Entry, change: Change, mark: Mark) -> Gap:
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


def _expired(change: Change) -> list[Mark]:
    """Offsets that were gone before they were read, where a certificate alone tells of them."""
    certificate = change.certificate
    if certificate is None or certificate.counts.messages or set(certificate.holes) != {"expired"}:
        return []
    if any(mark.finding == "expired" and mark.session is None for mark in change.marks):
        return []
    cause = f"{certificate.holes['expired']} messages were deleted before they were read"
    return [Mark(finding="expired", offset=certificate.start, until=certificate.until, cause=cause)]
