"""History: where a partition was after each entry, and which entry made which file. Read from the manifests.

A refold begins at a place of the past whose state is still good: not one that a later repair found to be wrong,
not one of a topic's earlier life, not one behind a place at which the log was cut since.

Next room: refold.py chooses; steps/refold.py reads the entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from seriatim.core.ledger import Account, Change, File, Kind, Manifest
from seriatim.core.offsets import OffsetRange, Partition


class Point(Struct, frozen=True):
    """A partition after one entry that changed it."""

    sequence: int
    kind: Kind
    account: Account
    change: Change

    @property
    def is_cut(self) -> bool:
        """Whether a repair followed the log back: what lay behind its end never was, and its offsets are used again."""
        return self.kind == "repair" and self.change.until < self.change.frontier


class Made(Struct, frozen=True):
    """A record file, and where it came from."""

    file: File
    topic_id: str
    start: int
    """The range of the entry that made it: where a refold of this file begins."""
    until: int


class Proof(Struct, frozen=True):
    """What a slice folded of its range: so many messages must be there whenever it is folded again."""

    start: int
    until: int
    messages: int
    headless: int = 0

    @property
    def is_dense(self) -> bool:
        """Whether no offset was missing: a hole that is there now is a loss."""
        return self.messages == self.until - self.start


class Past(Struct):
    """One partition's points, oldest first, and its record files by path."""

    points: list[Point] = field(default_factory=list)
    files: dict[str, Made] = field(default_factory=dict)
    told: set[tuple[str, int, str | None]] = field(default_factory=set)
    """Findings that entries carry of what is there now: what, at which offset, of which session."""
    others: dict[str, Made] = field(default_factory=dict)
    """Those of the machine's other tables that are in them now."""

    def take(self, manifest: Manifest, change: Change) -> None:
        """One more entry that changed this partition."""
        entry = manifest.entry
        account = manifest.ledger.partitions[str(change.partition)]
        life = self.points[-1].account.topic_id if self.points and entry.kind == "accept" else change.topic_id
        whole = entry.kind in ("slice", "start")
        for file in change.records:
            start, until = (change.frontier, change.until) if whole else (file.first, file.last + 1)
            self.files[file.path] = Made(file, life, start, until)
        self.others = {path: made for path, made in self.others.items() if path not in entry.removed}
        beside = [file for files in change.others.values() for file in files]
        self.others |= {file.path: Made(file, life, file.first, file.last + 1) for file in beside}
        point = Point(entry.sequence, entry.kind, account, change)
        if point.is_cut:
            self.told = {told for told in self.told if told[1] < change.until}
        elif self.points and self.points[-1].account.topic_id != account.topic_id:
            self.told = set()
        found = [finding for finding in entry.findings if finding.place == str(change.partition)]
        self.told |= {(finding.finding, finding.offset, finding.session) for finding in found}
        self.points.append(point)

    @property
    def made(self) -> dict[str, Made]:
        """All record files, of whichever table."""
        return self.files | self.others

    def life(self) -> list[Point]:
        """The points of the topic's present life, and of the log as it is: none from behind a cut."""
        kept: list[Point] = []
        for point in self._of_this_life():
            if point.is_cut:
                kept = [one for one in kept if one.account.frontier <= point.change.until]
            kept.append(point)
        return kept

    def _of_this_life(self) -> list[Point]:
        topic_id = self.points[-1].account.topic_id
        return [point for point in self.points if point.account.topic_id == topic_id]

    def usable(self, offset: int) -> Iterator[Point]:
        """Points at or before `offset` whose state no later repair took back, newest first."""
        remade: list[tuple[int, int]] = []
        for point in reversed(self.life()):
            at, change = point.account.frontier, point.change
            if at <= offset and not any(start < at < end for start, end in remade):
                yield point
            if change.rewound >= 0 and point.kind == "repair":
                remade.append((change.rewound, change.remade))

    def passed(self) -> list[OffsetRange]:
        """What forwards passed over, in order: lost for good."""
        changes = [point.change for point in self.life() if point.kind == "repair"]
        return [OffsetRange(change.frontier, change.until) for change in changes if change.headless_since >= 0]

    def released(self) -> dict[int, tuple[str, ...]]:
        """Sessions that a person released by hand, and at which frontier."""
        found: dict[int, tuple[str, ...]] = {}
        for change in (point.change for point in self.life() if point.kind == "accept"):
            names = [mark.session for mark in change.marks if mark.closed == "hand" and mark.session is not None]
            found[change.frontier] = (*found.get(change.frontier, ()), *names)
        return {offset: names for offset, names in found.items() if names}

    def messages(self, start: int, end: int) -> int | None:
        """How many messages were folded from `start` to `end`; None where no slices begin and end there."""
        jumps = {whole.start: whole.end for whole in self.passed() if len(whole)}
        slices = {proof.start: proof for proof in self.proofs()}
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

    def proofs(self) -> list[Proof]:
        """Slices of the topic's present life, rising. One that a log was cut in counts only if it was dense."""
        found: dict[int, Proof] = {}
        for change in (point.change for point in self._of_this_life()):
            proved, cut = change.certificate, change.until
            if proved is not None and proved.until > proved.start:
                counts = proved.counts
                found[proved.start] = Proof(proved.start, proved.until, counts.messages, counts.headless)
            elif cut < change.frontier:  # the log was cut there
                whole = {begin: one for begin, one in found.items() if one.until <= cut}
                parts = [one for one in found.values() if one.start < cut < one.until and one.is_dense]
                found = whole | {one.start: Proof(one.start, cut, cut - one.start, one.headless) for one in parts}
        return sorted(found.values(), key=lambda one: one.start)

    def borders(self, offset: int, end: int) -> list[Point]:
        """Points from `offset` to `end` whose state is as committed now: where a refold may meet it. Rising."""
        newest: dict[int, Point] = {}
        for point in self.usable(end):
            frontier = point.account.frontier
            if frontier >= offset:
                newest.setdefault(frontier, point)
        return [newest[frontier] for frontier in sorted(newest)]


def read(manifests: Iterable[Manifest], partitions: Iterable[Partition]) -> dict[Partition, Past]:
    """The pasts of partitions, from all entries in order."""
    pasts = {partition: Past() for partition in partitions}
    for manifest in manifests:
        for change in manifest.entry.changes:
            if change.partition in pasts:
                pasts[change.partition].take(manifest, change)
    return pasts
