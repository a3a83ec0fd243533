"""Current: the table as of a published entry, one row for each key that a session has now. Pure.

The last record of a row says what it is, or that it is gone: last by the topic's life, then offset, then index. So what
changed between two entries is what lies between their frontiers, in whichever files it is now: compaction needs no
care. Where a repair made records again, or a topic began a new life, the partition's rows are made anew.

Next room: steps/publish.py asks what is to be read; adapters/current.py reads it and has the table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from seriatim.core.ledger import Account, Change, Entry, File, Ledger, Manifest
from seriatim.core.offsets import Partition

Lives = dict[str, tuple[str, ...]]
"""By partition: the topic ids it had, oldest first; of partitions that had several."""


class Keyed(Struct, frozen=True, kw_only=True):
    """How records are rows: what names a row, what it holds, and how a record says that it is gone."""

    key: tuple[str, ...]
    columns: tuple[str, ...]
    """Of the row, keys included."""
    gone: dict[str, Any] = {}
    """A record with these values takes its row away; none: rows never go."""


class Tabled(Struct, frozen=True):
    """What its records make of one session."""

    session: str
    rows: list[tuple[Any, ...]]
    """Those that are not gone."""
    offset: int
    """Of the last record, whatever row it is of; so are the next two."""
    timestamp: int
    sequence: int | None


class Catch(Struct, frozen=True, kw_only=True):
    """What is read of one partition to bring its rows up."""

    partition: Partition
    files: tuple[File, ...]
    lives: tuple[str, ...]
    """Topic ids, oldest first."""
    since: int = -1
    """Only records from this offset on, over the rows that are there; -1: all records, and the rows are made anew."""
    until: int = 0
    """The frontier that they reach."""
    epoch: int = 0
    """Of the partition, as of there."""

    @property
    def whole(self) -> bool:
        """Whether the partition's rows are made anew."""
        return self.since < 0

    def reads(self) -> int:
        """How many records its files have."""
        return sum(file.rows for file in self.files)


def needs_walk(before: Ledger | None, after: Ledger) -> bool:
    """Whether the entries between must be looked at: only where an epoch was raised something else than slices was."""
    known = before.partitions if before else {}
    return any(account.epoch != _epoch(known.get(place)) for place, account in after.partitions.items())


def _epoch(account: Account | None) -> int:
    return account.epoch if account else 0


def walked(before: Ledger | None, manifests: Iterable[Manifest], lives: Lives) -> tuple[set[str], Lives]:
    """Partitions whose records were made again by these entries, and the lives of those that have several by now."""
    known = before.partitions if before else {}
    ids = {place: list(lives.get(place, (account.topic_id,))) for place, account in known.items()}
    replaced: set[str] = set()
    for manifest in manifests:
        for change in manifest.entry.changes:
            place = str(change.partition)
            life, seen = manifest.ledger.partitions[place].topic_id, ids.setdefault(place, [])
            if life not in seen:
                seen.append(life)
            if _replaces(manifest.entry, change):
                replaced.add(place)
    return replaced, {place: tuple(seen) for place, seen in ids.items() if len(seen) > 1}


def _replaces(entry: Entry, change: Change) -> bool:
    """Whether an entry made a partition's records again; moving its frontier forward alone does not."""
    return entry.kind == "repair" and bool(change.records or change.removed_rows or change.rewound >= 0)


def catches(
    before: Ledger | None, after: Ledger, replaced: Collection[str], lives: Lives, files: Iterable[File]
) -> list[Catch]:
    """What is to be read to come from one entry (None: from nothing) to another, with the table's files of then."""
    by_place, strange = _by_place(files, after.partitions)
    found = []
    for place, account in after.partitions.items():
        was, mine = before.partitions.get(place) if before else None, by_place.get(place, [])
        since, ids = -1, lives.get(place, (account.topic_id,))
        if was is not None and was.topic_id == account.topic_id and place not in replaced:
            since, ids = was.frontier, (account.topic_id,)
            mine = [file for file in mine if file.last >= since]
        touched = was is None or since < 0 or account.frontier > since
        wanted = (*mine, *strange) if touched else ()
        if wanted or (since < 0 and was is not None):
            catch = Catch(partition=Partition.parse(place), files=wanted, lives=ids, since=since)
            found.append(replace(catch, until=account.frontier, epoch=account.epoch))
    return found


def _by_place(files: Iterable[File], places: Collection[str]) -> tuple[dict[str, list[File]], list[File]]:
    """Record files by the partition in their path, in order; and files that somebody else wrote (OPTIMIZE)."""
    ours: dict[str, list[File]] = {}
    strange: list[File] = []
    for file in files:
        place = file.path.partition("/")[2].rpartition("/")[0]
        (ours.setdefault(place, []) if place in places else strange).append(file)
    return {place: sorted(mine, key=lambda file: file.first) for place, mine in ours.items()}, strange


class Standing(Struct, frozen=True):
    """The entry as of which the table `current` is, and what the store needs to compare-and-set on exactly that."""

    sequence: int = -1
    sha256: str = ""
    lives: Lives = {}
    token: Any = None


class Written(Struct, frozen=True):
    """What bringing the table up wrote."""

    rows: int = 0
    files: int = 0
    removed: int = 0
    """Files that were replaced."""


class Part(Struct, frozen=True, order=True):
    """A part of a partition's rows: the sessions whose hash ends in these bits."""

    depth: int = 0
    value: int = 0

    def halves(self) -> tuple[Part, Part]:
        """The two parts that it falls into."""
        return Part(self.depth + 1, self.value), Part(self.depth + 1, self.value + (1 << self.depth))

    def contains(self, other: Part) -> bool:
        """Whether the other lies in it."""
        return other.depth >= self.depth and other.value % (1 << self.depth) == self.value


def tiles(parts: Collection[Part], within: Part = Part()) -> list[Part]:  # noqa: B008  # frozen
    """Parts that hold every session once: those that are there, and the largest that fit between them."""
    if within in parts or not any(within.contains(part) for part in parts):
        return [within]
    return [tile for half in within.halves() for tile in tiles(parts, half)]


def is_gone(keyed: Keyed, record: Mapping[str, Any]) -> bool:
    """Whether a record takes its row away."""
    return bool(keyed.gone) and all(record[column] == value for column, value in keyed.gone.items())
