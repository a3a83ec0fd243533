"""Gaps: which ranges of output are not to be trusted, and how each of them ended; and which sessions
need a new snapshot. Both are folds over the entries of the ledger and need nothing else.

A mark opens or closes the gap of a session. Missing offsets are a gap that is closed as soon as it
is known. A halted partition has an open gap for all its sessions. Folding entries one by one, or
all of them from the first, gives the same gaps.

A session that is quarantined, or headless since messages were lost, is right again after its next
snapshot. The producer that captures its table can send one at once. There is one request per
session and incident, and none for a session that is right again meanwhile.

Next: operations/followers.py brings the tables `gaps` and `quarantine` up to the ledger;
operations/ask_for_snapshots.py sends requests after a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from seriatim.engine.files import File
from seriatim.engine.findings import GapMark
from seriatim.engine.holes import describe_expired
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.ledger.entries import Entry, RepairEntry, SliceEntry
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Account, Change


class Gap(Struct, frozen=True, kw_only=True):
    """A range of output that is not to be trusted, of one session or of all sessions of a
    partition.
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
    """By snapshot, repair, forward, accept, skip, end or hand. None for missing offsets, which
    nothing has to close.
    """
    quarantined: bool = False
    """Whether the messages of the session were quarantined while the gap was open."""
    mended: int | None = None
    """The entry of the repair that wrote this output again: nothing in it is wrong any more."""

    @property
    def topic_partition(self) -> Partition:
        """The partition in which the gap is."""
        return Partition(self.topic, self.partition)

    def to_row(self) -> dict[str, Any]:
        """The gap as a row of the table `gaps`."""
        row = {}
        for name, value in asdict(self).items():
            column = "from" if name == "start" else name
            row[column] = value
        return row

    def release_columns(self) -> dict[str, Any]:
        """The columns of the table `quarantine` that say how its messages were released."""
        return {
            "released_by": self.closed,
            "released_how": self.closed_how,
            "released_offset": self.until,
        }


class QuarantineFile(Struct, frozen=True):
    """A file of quarantined messages, and the entry that wrote it."""

    file: File
    sequence: int


def quarantine_files(entry: Entry) -> list[QuarantineFile]:
    """The files of messages that an entry quarantined."""
    return [
        QuarantineFile(file, entry.sequence)
        for change in entry.changes
        for file in change.quarantine_files
    ]


def ended_quarantines(gaps: Iterable[Gap], after_sequence: int) -> list[Gap]:
    """The quarantines of these gaps that ended later than entry `after_sequence`."""
    return [
        gap
        for gap in gaps
        if gap.quarantined and gap.closed is not None and gap.closed > after_sequence
    ]


def quarantine_release_finder(gaps: Iterable[Gap]) -> Callable[[Mapping[str, Any]], Gap | None]:
    """A function that finds the quarantine, among these, to which a quarantined message belongs. It
    is the first of its session that ended after the message; None if there is none.
    """
    quarantines: dict[tuple[str, int, str | None], list[Gap]] = {}
    for gap in sorted(gaps, key=lambda gap: gap.until or 0):
        session_key = (gap.topic_id, gap.partition, gap.session)
        quarantines.setdefault(session_key, []).append(gap)

    def find(row: Mapping[str, Any]) -> Gap | None:
        session_key = (row["topic_id"], row["partition"], row["session"])
        for gap in quarantines.get(session_key, ()):
            if row["offset"] < (gap.until or 0):
                return gap
        return None

    return find


def may_change_gaps(manifest: Manifest) -> bool:
    """Whether an entry may change gaps while none is open. Most entries have nothing for them."""
    for change in manifest.entry.changes:
        if change.marks or _expired_marks(change):
            return True
        account = manifest.ledger.account(change.partition)
        if account is not None and account.halt is not None:
            return True
    return False


class GapsFold:
    """The gaps in the order in which they were opened, while entries are added one by one."""

    def __init__(self, gaps: Iterable[Gap] = ()) -> None:
        self.gaps = list(gaps)
        # Gap numbers as dict keys: an ordered set, from which a number can be deleted quickly.
        self._open_gap_numbers: dict[Partition, dict[int, None]] = {}
        for number, gap in enumerate(self.gaps):
            if gap.closed is None:
                self._open_gap_numbers.setdefault(gap.topic_partition, {})[number] = None

    def add_entry(self, manifest: Manifest) -> None:
        """Add one more entry: the gaps that it closes, its marks, and its halts."""
        entry = manifest.entry
        for change in entry.changes:
            self._close_gaps_of_old_topic(entry, change)
            for mark in (*change.marks, *_expired_marks(change)):
                self._apply_mark(entry, change, mark)
            self._apply_halt(entry, change, manifest.ledger.account(change.partition))

    def _close_gaps_of_old_topic(self, entry: Entry, change: Change) -> None:
        """Close the gaps of a topic that was created again: its old sessions are over."""
        for number, gap in self._open_gaps(change.partition):
            if gap.topic_id != change.topic_id:
                self._close_gap(number, entry, max(gap.start, change.frontier), entry.kind)

    def _apply_mark(
        self,
        entry: Entry,
        change: Change,
        mark: GapMark,
    ) -> None:
        if mark.until >= 0:
            self._apply_closed_mark(entry, change, mark)
        elif mark.closed_by == "repair":
            self._mark_repaired(entry, change, mark)
        elif mark.closed_by:
            self._apply_closing_mark(entry, change, mark)
        elif not self._is_covered(change.partition, mark):
            self._open_gap(_new_gap(entry, change, mark))

    def _apply_closed_mark(
        self,
        entry: Entry,
        change: Change,
        mark: GapMark,
    ) -> None:
        """Apply a mark that has a start and an end: a gap that is closed as soon as it is known."""
        halt_number = self._halt_gap_of_mark(change.partition, mark)
        if halt_number is not None:
            self._close_gap(halt_number, entry, mark.until, mark.closed_by)
            return
        closed_how: str | None = mark.closed_by or None
        if closed_how is None and mark.session is not None:
            closed_how = "snapshot"
        gap = replace(
            _new_gap(entry, change, mark),
            until=mark.until,
            closed=entry.sequence,
            closed_how=closed_how,
        )
        self.gaps.append(gap)

    def _apply_closing_mark(
        self,
        entry: Entry,
        change: Change,
        mark: GapMark,
    ) -> None:
        """Close the open gaps of the session of this mark, or of all sessions if it names none."""
        for number, gap in self._open_gaps(change.partition):
            if mark.session is not None and mark.session != gap.session:
                continue
            # A refold writes marks about the past. They do not close a gap that opened later.
            opened_later = isinstance(entry, RepairEntry) and gap.start >= mark.offset
            if not opened_later:
                self._close_gap(number, entry, max(gap.start, mark.offset), mark.closed_by)

    def _halt_gap_of_mark(self, partition: Partition, mark: GapMark) -> int | None:
        """The number of the open gap of a halt, if this mark passes over the loss that caused it."""
        if not mark.closed_by:
            return None
        for number, gap in self._open_gaps(partition):
            is_halt_of_mark = gap.finding == mark.finding and gap.start == mark.offset
            if gap.session is None and is_halt_of_mark:
                return number
        return None

    def _mark_repaired(
        self,
        entry: Entry,
        change: Change,
        mark: GapMark,
    ) -> None:
        """Output was written again where a gap began: open or closed, the gap is repaired."""
        for number, gap in enumerate(self.gaps):
            if gap.topic_partition != change.partition or gap.topic_id != change.topic_id:
                continue
            if gap.session != mark.session or gap.start != mark.offset:
                continue
            if gap.closed is None:
                self._close_gap(number, entry, change.until, "repair")
            self.gaps[number] = replace(self.gaps[number], mended=entry.sequence)

    def _is_covered(self, partition: Partition, mark: GapMark) -> bool:
        """Whether an open gap of the same session says what this mark would say.

        A gap without quarantine does not cover a mark with quarantine.
        """
        for _, gap in self._open_gaps(partition):
            if gap.session == mark.session and (gap.quarantined or not mark.quarantined):
                return True
        return False

    def _apply_halt(
        self,
        entry: Entry,
        change: Change,
        account: Account | None,
    ) -> None:
        """Keep one open gap for all sessions of a halted partition, until the partition goes on."""
        halt = account.halt if account else None
        halt_is_open = False
        for number, gap in self._open_gaps(change.partition):
            if gap.session is not None:
                continue
            if halt is not None and (gap.finding, gap.start) == (halt.finding, halt.offset):
                halt_is_open = True
            elif isinstance(entry, SliceEntry) and change.until > gap.start:
                # The stream file says to pass over the message at which the partition halted.
                self._close_gap(number, entry, gap.start + 1, "skip")
            elif halt is None:
                self._close_gap(number, entry, max(gap.start, change.frontier), entry.kind)
        # The same halt is told by many entries, but it is one gap.
        if halt is not None and not halt_is_open:
            mark = GapMark(
                finding=halt.finding,
                offset=halt.offset,
                cause=halt.cause,
            )
            self._open_gap(_new_gap(entry, change, mark))

    def _open_gaps(self, partition: Partition) -> Iterator[tuple[int, Gap]]:
        # A copy of the numbers, because callers close gaps while they iterate.
        for number in list(self._open_gap_numbers.get(partition, ())):
            yield number, self.gaps[number]

    def _open_gap(self, gap: Gap) -> None:
        self._open_gap_numbers.setdefault(gap.topic_partition, {})[len(self.gaps)] = None
        self.gaps.append(gap)

    def _close_gap(
        self,
        number: int,
        entry: Entry,
        until: int,
        closed_how: str,
    ) -> None:
        gap = self.gaps[number]
        self.gaps[number] = replace(
            gap,
            until=until,
            closed=entry.sequence,
            closed_how=closed_how,
        )
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
    """The mark for offsets that were deleted before they were read, where the certificate alone
    reports them.
    """
    certificate = change.certificate
    if certificate is None or certificate.counts.messages:
        return []
    if set(certificate.holes) != {"expired"}:
        return []
    if any(mark.finding == "expired" and mark.session is None for mark in change.marks):
        return []
    mark = GapMark(
        finding="expired",
        offset=certificate.start,
        until=certificate.until,
        cause=describe_expired(OffsetRange(certificate.start, certificate.until)),
    )
    return [mark]


class SnapshotRequest(Struct, frozen=True, kw_only=True):
    """A request to a producer for a snapshot. Its field names are fixed: producers read them."""

    stream: str
    topic: str
    partition: int
    session: str
    reason: str
    """The finding. It is `gap` if messages were lost that may have been the session's."""
    offset: int
    """The offset since which the session waits. It identifies the incident."""

    @property
    def key(self) -> bytes:
        """The key of the request is the session, so that requests are spread as its messages."""
        return self.session.encode()

    def to_json(self) -> bytes:
        """The request as it is sent."""
        return msgspec.json.encode(self)


class SnapshotRequestCollector:
    """Collects the sessions that need a snapshot, while entries are added one by one."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self._open_requests: dict[Partition, dict[str, SnapshotRequest]] = {}
        self._topic_ids: dict[Partition, str] = {}

    def add_entry(self, entry: Entry) -> None:
        """Add one more entry: which sessions began to wait, and which are right again."""
        for change in entry.changes:
            if self._topic_ids.get(change.partition) != change.topic_id:
                # A topic that was created again has none of the old sessions.
                self._topic_ids[change.partition] = change.topic_id
                self._open_requests[change.partition] = {}
            for mark in change.marks:
                self._apply_mark(entry, change, mark)

    def _apply_mark(
        self,
        entry: Entry,
        change: Change,
        mark: GapMark,
    ) -> None:
        if mark.session is None or mark.until >= 0:
            return
        open_requests = self._open_requests[change.partition]
        if mark.closed_by:
            open_requests.pop(mark.session, None)
        elif isinstance(entry, SliceEntry) and (mark.quarantined or mark.finding == "gap"):
            # A second mark of an open incident asks for nothing new: the first offset stays.
            request = self._request(change.partition, mark, mark.session)
            open_requests.setdefault(mark.session, request)

    def _request(
        self,
        partition: Partition,
        mark: GapMark,
        session: str,
    ) -> SnapshotRequest:
        return SnapshotRequest(
            stream=self.stream,
            topic=partition.topic,
            partition=partition.number,
            session=session,
            reason=mark.finding,
            offset=mark.offset,
        )

    def requests(self) -> list[SnapshotRequest]:
        """The requests for all sessions that need a snapshot now."""
        requests: list[SnapshotRequest] = []
        for open_requests in self._open_requests.values():
            requests.extend(open_requests.values())
        return requests


def collect_snapshot_requests(stream: str, entries: Iterable[Entry]) -> list[SnapshotRequest]:
    """The requests that these entries call for."""
    collector = SnapshotRequestCollector(stream)
    for entry in entries:
        collector.add_entry(entry)
    return collector.requests()
