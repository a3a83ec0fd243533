"""Current: the table as of a published entry, one row for each key that a session has now. Pure.

The last record of a row says what it is, or that it is gone: last by the topic's life, then offset,
then index. So what changed between two entries is what lies between their frontiers, in whichever
files it is now: compaction needs no care. Where a repair made records again, or a topic began a new
life, the partition's rows are made anew.

Next room: operations/publish.py asks what is to be read; storage/current_table.py reads it and has
the table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.offsets import Partition
from seriatim.ledger.model import Account, Change, Entry, File, Ledger, Manifest

Lives = dict[str, tuple[str, ...]]
"""By partition: the topic ids it had, oldest first; of partitions that had several."""


class RowKeySpec(Struct, frozen=True, kw_only=True):
    """How records are rows: what names a row, what it holds, and how a record says that it is gone."""

    key: tuple[str, ...]
    columns: tuple[str, ...]
    """Of the row, keys included."""
    deleted_when: dict[str, Any] = {}
    """A record with these values takes its row away; none: rows never go."""


class SessionTable(Struct, frozen=True):
    """What its records make of one session."""

    session: str
    rows: list[tuple[Any, ...]]
    """Those that are not gone."""
    offset: int
    """Of the last record, whatever row it is of; so are the next two."""
    timestamp: int
    sequence: int | None


class PartitionCatchUp(Struct, frozen=True, kw_only=True):
    """What is read of one partition to bring its rows up."""

    partition: Partition
    files: tuple[File, ...]
    lives: tuple[str, ...]
    """Topic ids, oldest first."""
    first_new_offset: int = -1
    """Only records from this offset on, over the rows that are there; -1: all records, and the rows
    are made anew.
    """
    until: int = 0
    """The frontier that they reach."""
    epoch: int = 0
    """Of the partition, as of there."""

    @property
    def is_full_rebuild(self) -> bool:
        """Whether the partition's rows are made anew."""
        return self.first_new_offset < 0

    def record_count(self) -> int:
        """How many records its files have."""
        return sum(file.rows for file in self.files)


def must_read_entries(before: Ledger | None, after: Ledger) -> bool:
    """Whether the entries between must be looked at: only where an epoch was raised something else
    than slices was.
    """
    known = before.partitions if before else {}
    return any(
        account.epoch != _epoch(known.get(place)) for place, account in after.partitions.items()
    )


def _epoch(account: Account | None) -> int:
    return account.epoch if account else 0


def find_replaced_partitions(
    previous_ledger: Ledger | None, manifests: Iterable[Manifest], lives: Lives
) -> tuple[set[str], Lives]:
    """Partitions whose records were made again by these entries, and the lives of those that have
    several by now.
    """
    known = previous_ledger.partitions if previous_ledger else {}
    ids = {place: list(lives.get(place, (account.topic_id,))) for place, account in known.items()}
    replaced: set[str] = set()
    for manifest in manifests:
        for change in manifest.entry.changes:
            place = str(change.partition)
            life, seen = manifest.ledger.partitions[place].topic_id, ids.setdefault(place, [])
            if life not in seen:
                seen.append(life)
            if _replaces_records(manifest.entry, change):
                replaced.add(place)
    return replaced, {place: tuple(seen) for place, seen in ids.items() if len(seen) > 1}


def _replaces_records(entry: Entry, change: Change) -> bool:
    """Whether an entry made a partition's records again; moving its frontier forward alone does
    not.
    """
    return entry.kind == "repair" and bool(
        change.records or change.removed_rows or change.replaced_from >= 0
    )


def plan_catch_ups(
    before: Ledger | None,
    after: Ledger,
    replaced_partitions: Collection[str],
    lives: Lives,
    files: Iterable[File],
) -> list[PartitionCatchUp]:
    """What is to be read to come from one entry (None: from nothing) to another, with the table's
    files of then.
    """
    by_place, strange = _files_by_partition(files, after.partitions)
    found = []
    for place, account in after.partitions.items():
        was, mine = before.partitions.get(place) if before else None, by_place.get(place, [])
        since, ids = -1, lives.get(place, (account.topic_id,))
        if (
            was is not None
            and was.topic_id == account.topic_id
            and place not in replaced_partitions
        ):
            since, ids = was.frontier, (account.topic_id,)
            mine = [file for file in mine if file.last_offset >= since]
        touched = was is None or since < 0 or account.frontier > since
        wanted = (*mine, *strange) if touched else ()
        if wanted or (since < 0 and was is not None):
            catch = PartitionCatchUp(
                partition=Partition.parse(place), files=wanted, lives=ids, first_new_offset=since
            )
            found.append(replace(catch, until=account.frontier, epoch=account.epoch))
    return found


def _files_by_partition(
    files: Iterable[File], partition_names: Collection[str]
) -> tuple[dict[str, list[File]], list[File]]:
    """Record files by the partition in their path, in order; and files that somebody else wrote
    (OPTIMIZE).
    """
    ours: dict[str, list[File]] = {}
    strange: list[File] = []
    for file in files:
        place = file.path.partition("/")[2].rpartition("/")[0]
        (ours.setdefault(place, []) if place in partition_names else strange).append(file)
    return {
        place: sorted(mine, key=lambda file: file.first_offset) for place, mine in ours.items()
    }, strange


class PublishedVersion(Struct, frozen=True):
    """The entry as of which the table `current` is, and what the store needs to compare-and-set on
    exactly that.
    """

    sequence: int = -1
    sha256: str = ""
    lives: Lives = {}
    token: Any = None


class CurrentWriteResult(Struct, frozen=True):
    """What bringing the table up wrote."""

    written_rows: int = 0
    written_files: int = 0
    removed_files: int = 0
    """Files that were replaced."""


class HashBucket(Struct, frozen=True, order=True):
    """A part of a partition's rows: the sessions whose hash ends in these bits."""

    depth: int = 0
    value: int = 0

    def split(self) -> tuple[HashBucket, HashBucket]:
        """The two parts that it falls into."""
        return HashBucket(self.depth + 1, self.value), HashBucket(
            self.depth + 1, self.value + (1 << self.depth)
        )

    def contains(self, bucket: HashBucket) -> bool:
        """Whether the other lies in it."""
        return bucket.depth >= self.depth and bucket.value % (1 << self.depth) == self.value


def covering_buckets(
    buckets: Collection[HashBucket], root: HashBucket = HashBucket()
) -> list[HashBucket]:  # frozen
    """Parts that hold every session once: those that are there, and the largest that fit between
    them.
    """
    if root in buckets or not any(root.contains(part) for part in buckets):
        return [root]
    return [tile for half in root.split() for tile in covering_buckets(buckets, half)]


def is_row_deleted(row_key_spec: RowKeySpec, record: Mapping[str, Any]) -> bool:
    """Whether a record takes its row away."""
    return bool(row_key_spec.deleted_when) and all(
        record[column] == value for column, value in row_key_spec.deleted_when.items()
    )
