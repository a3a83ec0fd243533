"""History: the state of a partition after each entry, and which entry wrote which file. It is read
from the manifests.

A refold begins at a point of the past whose state is still good. It is not a point that a later
repair replaced, not one of the topic before it was created again, and not one behind an offset at
which the log was cut since.

Next: operations/repair/refold.py reads the entries and chooses the point.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from seriatim.engine.files import File
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.ledger.entries import (
    AcceptEntry,
    Entry,
    RepairEntry,
    SliceEntry,
    StartEntry,
)
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Account, Change


class CommitPoint(Struct, frozen=True):
    """A partition after one entry that changed it."""

    sequence: int
    entry_type: type[Entry]
    account: Account
    change: Change

    @property
    def is_repair(self) -> bool:
        """Whether a repair made it."""
        return self.entry_type is RepairEntry

    @property
    def is_cut(self) -> bool:
        """Whether this is a repair that followed a truncated log back.

        What was folded behind its end is void, and new messages take those offsets again.
        """
        return self.is_repair and self.change.until < self.change.frontier


class FileOrigin(Struct, frozen=True):
    """A record file, and the entry range from which it came."""

    file: File
    topic_id: str
    start: int
    """Where a refold of this file begins."""
    until: int


class SliceProof(Struct, frozen=True):
    """How many messages a slice folded of its range. A refold of the range must find as many."""

    start: int
    until: int
    messages: int
    headless: int = 0

    @property
    def is_dense(self) -> bool:
        """Whether no offset was missing. A hole that is there now is then a loss."""
        return self.messages == self.until - self.start


class PartitionHistory(Struct):
    """The points of one partition, oldest first, and its record files by path."""

    points: list[CommitPoint] = field(default_factory=list)
    record_files: dict[str, FileOrigin] = field(default_factory=dict)
    reported_findings: set[tuple[str, int, str | None]] = field(default_factory=set)
    """Findings that entries reported about the present log: finding, offset and session of each."""
    other_record_files: dict[str, FileOrigin] = field(default_factory=dict)
    """Record files that are now in the machine's other tables."""

    def add_entry(self, manifest: Manifest, change: Change) -> None:
        """Add one more entry, by what it changed in this partition."""
        entry = manifest.entry
        account = manifest.ledger.partitions[str(change.partition)]
        # An accept may begin a new topic id, but the files that it writes belong to the old one.
        topic_id = change.topic_id
        if self.points and isinstance(entry, AcceptEntry):
            topic_id = self.points[-1].account.topic_id
        self._add_files(entry, change, topic_id)
        point = CommitPoint(entry.sequence, type(entry), account, change)
        self._update_findings(entry, point)
        self.points.append(point)

    def _add_files(
        self,
        entry: Entry,
        change: Change,
        topic_id: str,
    ) -> None:
        for file in change.records:
            if isinstance(entry, SliceEntry | StartEntry):
                origin = FileOrigin(file, topic_id, change.frontier, change.until)
            else:
                origin = _origin_by_own_offsets(file, topic_id)
            self.record_files[file.path] = origin
        for path in entry.removed_paths:
            self.other_record_files.pop(path, None)
        for files in change.other_records.values():
            for file in files:
                self.other_record_files[file.path] = _origin_by_own_offsets(file, topic_id)

    def _update_findings(self, entry: Entry, point: CommitPoint) -> None:
        """Drop the findings that a cut or a new topic made void, and add those of the entry."""
        if point.is_cut:
            cut_offset = point.change.until
            still_valid = {
                reported for reported in self.reported_findings if reported[1] < cut_offset
            }
            self.reported_findings = still_valid
        elif self.points and self.points[-1].account.topic_id != point.account.topic_id:
            self.reported_findings = set()
        partition_name = str(point.change.partition)
        for finding in entry.findings:
            if finding.partition_name == partition_name:
                self.reported_findings.add((finding.finding, finding.offset, finding.session))

    @property
    def all_record_files(self) -> dict[str, FileOrigin]:
        """The record files of all tables."""
        return self.record_files | self.other_record_files

    def points_of_current_log(self) -> list[CommitPoint]:
        """The points of the present topic and of its log as it is: none from behind a cut."""
        points: list[CommitPoint] = []
        for point in self._points_of_current_topic():
            if point.is_cut:
                cut_offset = point.change.until
                points = [earlier for earlier in points if earlier.account.frontier <= cut_offset]
            points.append(point)
        return points

    def _points_of_current_topic(self) -> list[CommitPoint]:
        topic_id = self.points[-1].account.topic_id
        return [point for point in self.points if point.account.topic_id == topic_id]

    def usable_points(self, offset: int) -> Iterator[CommitPoint]:
        """The points at or before `offset` whose state no later repair replaced, newest first."""
        replaced_ranges: list[tuple[int, int]] = []
        for point in reversed(self.points_of_current_log()):
            frontier = point.account.frontier
            is_replaced = any(start < frontier < end for start, end in replaced_ranges)
            if frontier <= offset and not is_replaced:
                yield point
            # The repair itself is usable, so its range counts only for the points before it.
            change = point.change
            if point.is_repair and change.replaced_from >= 0:
                replaced_ranges.append((change.replaced_from, change.replaced_until))

    def passed_ranges(self) -> list[OffsetRange]:
        """The ranges that forwards passed over, in order. Their messages are lost for good."""
        ranges = []
        for point in self.points_of_current_log():
            change = point.change
            if point.is_repair and change.headless_since >= 0:
                ranges.append(OffsetRange(change.frontier, change.until))
        return ranges

    def releases_by_hand(self) -> dict[int, tuple[str, ...]]:
        """The sessions that a person released by hand, by the frontier at which it was done."""
        releases: dict[int, tuple[str, ...]] = {}
        for point in self.points_of_current_log():
            if point.entry_type is not AcceptEntry:
                continue
            frontier = point.change.frontier
            for mark in point.change.marks:
                if mark.closed_by == "hand" and mark.session is not None:
                    releases[frontier] = (*releases.get(frontier, ()), mark.session)
        return releases

    def count_messages(self, start: int, end: int) -> int | None:
        """How many messages were folded from `start` to `end`. None if no slices begin and end
        exactly there.
        """
        passed = {range_.start: range_.end for range_ in self.passed_ranges() if len(range_)}
        proofs = {proof.start: proof for proof in self.slice_proofs()}
        offset = start
        count = 0
        while offset < end:
            if offset in passed:
                offset = passed[offset]
                continue
            proof = proofs.get(offset)
            if proof is None or proof.until == offset:
                return None
            offset = proof.until
            count += proof.messages
        return count if offset == end else None

    def slice_proofs(self) -> list[SliceProof]:
        """The slices of the present topic, in rising order.

        A slice in which the log was cut counts up to the cut, and only if it was dense.
        """
        proofs: dict[int, SliceProof] = {}
        for point in self._points_of_current_topic():
            change = point.change
            certificate = change.certificate
            if certificate is not None and certificate.until > certificate.start:
                proofs[certificate.start] = SliceProof(
                    certificate.start,
                    certificate.until,
                    certificate.counts.messages,
                    certificate.counts.headless,
                )
            elif change.until < change.frontier:
                proofs = _proofs_before_cut(proofs.values(), change.until)
        return sorted(proofs.values(), key=lambda proof: proof.start)

    def commit_points(self, offset: int, end: int) -> list[CommitPoint]:
        """The points from `offset` to `end` whose state is as committed, in rising order. A refold
        may meet the committed state there.
        """
        newest: dict[int, CommitPoint] = {}
        for point in self.usable_points(end):
            frontier = point.account.frontier
            if frontier >= offset:
                newest.setdefault(frontier, point)
        return [newest[frontier] for frontier in sorted(newest)]


def _origin_by_own_offsets(file: File, topic_id: str) -> FileOrigin:
    return FileOrigin(file, topic_id, file.first_offset, file.last_offset + 1)


def _proofs_before_cut(proofs: Iterable[SliceProof], cut_offset: int) -> dict[int, SliceProof]:
    """What remains proved after the log was cut at `cut_offset`, by start."""
    remaining: dict[int, SliceProof] = {}
    for proof in proofs:
        if proof.until <= cut_offset:
            remaining[proof.start] = proof
        elif proof.start < cut_offset and proof.is_dense:
            # Of a slice with holes nobody knows on which side of the cut they were.
            messages = cut_offset - proof.start
            remaining[proof.start] = SliceProof(proof.start, cut_offset, messages, proof.headless)
    return remaining


def read_histories(
    manifests: Iterable[Manifest], partitions: Iterable[Partition]
) -> dict[Partition, PartitionHistory]:
    """The histories of partitions, from all entries in order."""
    histories = {partition: PartitionHistory() for partition in partitions}
    for manifest in manifests:
        for change in manifest.entry.changes:
            history = histories.get(change.partition)
            if history is not None:
                history.add_entry(manifest, change)
    return histories
