"""History: where a partition was after each entry, and which entry made which file. Read from the
manifests.

A refold begins at a place of the past whose state is still good: not one that a later repair found
to be wrong, not one of a topic's earlier life, not one behind a place at which the log was cut
since.

Next room: refold.py chooses; operations/repair/refold.py reads the entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.ledger.model import Account, Change, EntryKind, File, Manifest


class CommitPoint(Struct, frozen=True):
    """A partition after one entry that changed it."""

    sequence: int
    kind: EntryKind
    account: Account
    change: Change

    @property
    def is_cut(self) -> bool:
        """Whether a repair followed the log back: what lay behind its end never was, and its
        offsets are used again.
        """
        return self.kind == "repair" and self.change.until < self.change.frontier


class FileOrigin(Struct, frozen=True):
    """A record file, and where it came from."""

    file: File
    topic_id: str
    start: int
    """The range of the entry that made it: where a refold of this file begins."""
    until: int


class SliceProof(Struct, frozen=True):
    """What a slice folded of its range: so many messages must be there whenever it is folded again."""

    start: int
    until: int
    messages: int
    headless: int = 0

    @property
    def is_dense(self) -> bool:
        """Whether no offset was missing: a hole that is there now is a loss."""
        return self.messages == self.until - self.start


class PartitionHistory(Struct):
    """One partition's points, oldest first, and its record files by path."""

    points: list[CommitPoint] = field(default_factory=list)
    record_files: dict[str, FileOrigin] = field(default_factory=dict)
    reported_findings: set[tuple[str, int, str | None]] = field(default_factory=set)
    """Findings that entries carry of what is there now: what, at which offset, of which session."""
    other_record_files: dict[str, FileOrigin] = field(default_factory=dict)
    """Those of the machine's other tables that are in them now."""

    def add_entry(self, manifest: Manifest, change: Change) -> None:
        """One more entry that changed this partition."""
        entry = manifest.entry
        account = manifest.ledger.partitions[str(change.partition)]
        life = (
            self.points[-1].account.topic_id
            if self.points and entry.kind == "accept"
            else change.topic_id
        )
        whole = entry.kind in ("slice", "start")
        for file in change.records:
            start, until = (
                (change.frontier, change.until)
                if whole
                else (file.first_offset, file.last_offset + 1)
            )
            self.record_files[file.path] = FileOrigin(file, life, start, until)
        self.other_record_files = {
            path: made
            for path, made in self.other_record_files.items()
            if path not in entry.removed_paths
        }
        beside = [file for files in change.other_records.values() for file in files]
        self.other_record_files |= {
            file.path: FileOrigin(file, life, file.first_offset, file.last_offset + 1)
            for file in beside
        }
        point = CommitPoint(entry.sequence, entry.kind, account, change)
        if point.is_cut:
            self.reported_findings = {
                told for told in self.reported_findings if told[1] < change.until
            }
        elif self.points and self.points[-1].account.topic_id != account.topic_id:
            self.reported_findings = set()
        found = [
            finding for finding in entry.findings if finding.partition_name == str(change.partition)
        ]
        self.reported_findings |= {
            (finding.finding, finding.offset, finding.session) for finding in found
        }
        self.points.append(point)

    @property
    def all_record_files(self) -> dict[str, FileOrigin]:
        """All record files, of whichever table."""
        return self.record_files | self.other_record_files

    def points_of_current_log(self) -> list[CommitPoint]:
        """The points of the topic's present life, and of the log as it is: none from behind a cut."""
        kept: list[CommitPoint] = []
        for point in self._points_of_current_life():
            if point.is_cut:
                kept = [one for one in kept if one.account.frontier <= point.change.until]
            kept.append(point)
        return kept

    def _points_of_current_life(self) -> list[CommitPoint]:
        topic_id = self.points[-1].account.topic_id
        return [point for point in self.points if point.account.topic_id == topic_id]

    def usable_points(self, offset: int) -> Iterator[CommitPoint]:
        """Points at or before `offset` whose state no later repair took back, newest first."""
        remade: list[tuple[int, int]] = []
        for point in reversed(self.points_of_current_log()):
            at, change = point.account.frontier, point.change
            if at <= offset and not any(start < at < end for start, end in remade):
                yield point
            if change.replaced_from >= 0 and point.kind == "repair":
                remade.append((change.replaced_from, change.replaced_until))

    def passed_ranges(self) -> list[OffsetRange]:
        """What forwards passed over, in order: lost for good."""
        changes = [point.change for point in self.points_of_current_log() if point.kind == "repair"]
        return [
            OffsetRange(change.frontier, change.until)
            for change in changes
            if change.headless_since >= 0
        ]

    def releases_by_hand(self) -> dict[int, tuple[str, ...]]:
        """Sessions that a person released by hand, and at which frontier."""
        found: dict[int, tuple[str, ...]] = {}
        for change in (
            point.change for point in self.points_of_current_log() if point.kind == "accept"
        ):
            names = [
                mark.session
                for mark in change.marks
                if mark.closed_by == "hand" and mark.session is not None
            ]
            found[change.frontier] = (*found.get(change.frontier, ()), *names)
        return {offset: names for offset, names in found.items() if names}

    def count_messages(self, start: int, end: int) -> int | None:
        """How many messages were folded from `start` to `end`; None where no slices begin and end
        there.
        """
        jumps = {whole.start: whole.end for whole in self.passed_ranges() if len(whole)}
        slices = {proof.start: proof for proof in self.slice_proofs()}
        at, count = start, 0
        while at < end:
            if at in jumps:
                at = jumps[at]
                continue
            one = slices.get(at)
            if one is None or one.until == at:
                return None
            at, count = one.until, count + one.messages
        return count if at == end else None

    def slice_proofs(self) -> list[SliceProof]:
        """Slices of the topic's present life, rising. One that a log was cut in counts only if it
        was dense.
        """
        found: dict[int, SliceProof] = {}
        for change in (point.change for point in self._points_of_current_life()):
            proved, cut = change.certificate, change.until
            if proved is not None and proved.until > proved.start:
                counts = proved.counts
                found[proved.start] = SliceProof(
                    proved.start, proved.until, counts.messages, counts.headless
                )
            elif cut < change.frontier:  # the log was cut there
                whole = {begin: one for begin, one in found.items() if one.until <= cut}
                parts = [
                    one for one in found.values() if one.start < cut < one.until and one.is_dense
                ]
                found = whole | {
                    one.start: SliceProof(one.start, cut, cut - one.start, one.headless)
                    for one in parts
                }
        return sorted(found.values(), key=lambda one: one.start)

    def commit_points(self, offset: int, end: int) -> list[CommitPoint]:
        """Points from `offset` to `end` whose state is as committed now: where a refold may meet
        it. Rising.
        """
        newest: dict[int, CommitPoint] = {}
        for point in self.usable_points(end):
            frontier = point.account.frontier
            if frontier >= offset:
                newest.setdefault(frontier, point)
        return [newest[frontier] for frontier in sorted(newest)]


def read_histories(
    manifests: Iterable[Manifest], partitions: Iterable[Partition]
) -> dict[Partition, PartitionHistory]:
    """The pasts of partitions, from all entries in order."""
    pasts = {partition: PartitionHistory() for partition in partitions}
    for manifest in manifests:
        for change in manifest.entry.changes:
            if change.partition in pasts:
                pasts[change.partition].add_entry(manifest, change)
    return pasts
