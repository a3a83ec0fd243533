"""The table `current` as a Delta table below the output path of a stream: one row for each key that a
session has now.

A data file holds one part of one partition, sorted by session and key, under a name that says so.
Only parts with a changed row are written again. Each commit names the entry that it reaches and is
made on exactly the table that was read before. Nothing depends on this table: it is built from the
record files alone.

Next: operations/publish.py decides what is read; ledger/current_rows.py has the rules;
storage/record_rows.py reads the records.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from msgspec import Struct, field

from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import RowKeySpec
from seriatim.errors import PlatformError, ensure
from seriatim.ledger.current_rows import CurrentWriteResult, PartitionCatchUp, TopicIdsByPartition
from seriatim.ledger.model import EntryMark
from seriatim.ports import CommitConflictError, PublishedVersion
from seriatim.storage.delta_table import (
    MarkedTable,
    TableFile,
    TableVersion,
    storage_errors_as_conflict,
)
from seriatim.storage.parquet import ROWS_PER_GROUP, ParquetFileWriter, open_parquet
from seriatim.storage.record_rows import RowMerger, distinct_values_and_codes
from seriatim.storage.store import Store
from seriatim.workers import ChooseWorkers, map_or_raise, this_process

FORMAT_VERSION = 1
TABLE_KEY = "current"
PART_ROWS_MAX = 500_000
"""A part with more rows is split in two, so that what one update rewrites stays bounded."""
DEPTH_MAX = 16
"""A part is not split beyond this depth: one session with very many rows cannot be split."""
KEEP_HOURS_MAX = 24
"""Old files are whole copies of parts: a publish every quarter of an hour would keep 2,880 of them
in a month.
"""
VACUUM_EVERY = 20
"""Commits between two deletions of files that no reader needs."""
PART_FILE_NAME = re.compile(
    r"current/(?P<partition>[^/]+/\d+)/\d+-(?P<depth>\d+)-(?P<value>\d+)-[0-9a-f]{12}\.parquet"
)
SESSION_NAME_CHARACTERS_MAX = 128
"""Characters of a session's name in the statistics of a file."""
TABLE_SETTINGS: Mapping[str, str | None] = {
    "delta.dataSkippingStatsColumns": "topic,partition,offset,session"
}
"""delta-rs drops rows under a filter where the statistics of a file lack a column that it expects."""
MAINTENANCE_OPERATIONS = ("VACUUM START", "VACUUM END")


class HashBucket(Struct, frozen=True, order=True):
    """A part of a partition's rows: the sessions whose hash ends in these bits."""

    depth: int = 0
    """How many bits are compared; 0: all sessions."""
    value: int = 0

    def split(self) -> tuple[HashBucket, HashBucket]:
        """The two halves of the bucket, by one more bit."""
        depth = self.depth + 1
        lower = HashBucket(depth, self.value)
        upper = HashBucket(depth, self.value + (1 << self.depth))
        return lower, upper

    def contains(self, bucket: HashBucket) -> bool:
        """Whether the other bucket is this one or a part of it."""
        if bucket.depth < self.depth:
            return False
        # The bits that this bucket compares.
        lowest_bits = bucket.value % (1 << self.depth)
        return lowest_bits == self.value


ALL_SESSIONS = HashBucket()


def covering_buckets(
    buckets: Collection[HashBucket],
    root: HashBucket = ALL_SESSIONS,
) -> list[HashBucket]:
    """Buckets that hold every session exactly once: the given ones, and the largest that fit
    between them.
    """
    if root in buckets or not any(root.contains(bucket) for bucket in buckets):
        return [root]
    lower, upper = root.split()
    return covering_buckets(buckets, lower) + covering_buckets(buckets, upper)


class PublishedMark(Struct, frozen=True, kw_only=True, rename={"topic_ids": "lives"}):
    """What a commit says about the table that it makes."""

    sequence: int
    sha256: str
    key: tuple[str, ...]
    topic_ids: TopicIdsByPartition = {}
    format: int = FORMAT_VERSION


KeysByPartition = dict[str, dict[HashBucket, str]]
"""The keys of the table's files by partition and part."""


class PartitionToPublish(Struct, frozen=True, kw_only=True):
    """A piece of work: the changed parts of one partition are written again."""

    sequence: int
    """The entry that the table is brought up to."""
    catch_up: PartitionCatchUp
    existing_keys: dict[HashBucket, str]
    """The files of the table that the changes are merged with, by part."""

    def __str__(self) -> str:
        return str(self.catch_up.partition)


class PublishedParts(Struct, kw_only=True):
    """The files that a commit adds, and the keys of those that it removes."""

    new_files: list[TableFile] = field(default_factory=list)
    replaced_keys: list[str] = field(default_factory=list)
    rows_written: int = 0
    conflict: str = ""
    """Why the storage failed. Then nothing can be committed, and the caller may try again."""

    def add(self, other: PublishedParts) -> None:
        """Add the parts of one more partition."""
        self.new_files += other.new_files
        self.replaced_keys += other.replaced_keys
        self.rows_written += other.rows_written


class PartWriter(Struct, frozen=True):
    """Writes the changed parts of one partition after the other. It can be sent to other processes."""

    row_merger: RowMerger
    compression: str
    part_rows_max: int

    def __call__(self, work: PartitionToPublish) -> PublishedParts:
        """Write the parts that have a changed row, or all of them if the rows are built anew."""
        changes = self.row_merger.read_changes(work.catch_up)
        parts = PublishedParts()
        try:
            with storage_errors_as_conflict():
                self._write_parts(work, changes, parts)
        except CommitConflictError as conflict:
            return PublishedParts(conflict=str(conflict))
        return parts

    def _write_parts(
        self, work: PartitionToPublish, changes: pa.Table, parts: PublishedParts
    ) -> None:
        existing_keys: Mapping[HashBucket, str] = work.existing_keys
        if work.catch_up.is_full_rebuild:
            # Without the old parts nothing is merged, and rows that no record names are gone.
            parts.replaced_keys += existing_keys.values()
            existing_keys = {}
        buckets = covering_buckets(set(existing_keys))
        for bucket, part_changes in _split_by_part(changes, buckets):
            if not part_changes.num_rows:
                continue
            previous_rows = None
            existing_key = existing_keys.get(bucket)
            if existing_key is not None:
                previous_rows = self._read_file(existing_key)
                parts.replaced_keys.append(existing_key)
            rows = self.row_merger.merge(previous_rows, part_changes, work.catch_up.partition)
            self._write_part(work, bucket, rows, parts)

    def _read_file(self, key: str) -> pa.Table:
        store = self.row_merger.store
        with _open_table(store).reading(), open_parquet(store, key) as parquet:
            return parquet.read()

    def _write_part(
        self, work: PartitionToPublish, bucket: HashBucket, rows: pa.Table, parts: PublishedParts
    ) -> None:
        """Write a part as one file, or as two parts if it has grown too large. A part without rows
        has no file.
        """
        if rows.num_rows > self.part_rows_max and bucket.depth < DEPTH_MAX:
            for half, half_rows in _split_by_part(rows, bucket.split()):
                self._write_part(work, half, half_rows, parts)
            return
        # Two updates to the same entry may run at once, and another process may do this work a second
        # time: the last part keeps their files apart.
        unique = uuid.uuid4().hex[:12]
        partition = work.catch_up.partition
        name = f"{work.sequence}-{bucket.depth}-{bucket.value}-{unique}.parquet"
        key = f"{TABLE_KEY}/{partition}/{name}"
        merger = self.row_merger
        writer = ParquetFileWriter(merger.store, key, merger.schema, self.compression)
        for batch in rows.combine_chunks().to_batches(max_chunksize=ROWS_PER_GROUP):
            writer.add(batch)
        file = writer.finish()
        if file is not None:
            parts.new_files.append(_table_file(file, partition, rows))
            parts.rows_written += file.rows


class DeltaCurrent:
    """The table `current` of one stream. Implements `CurrentStore`."""

    part_rows_max = PART_ROWS_MAX

    def __init__(
        self,
        store: Store,
        stream: str,
        schema: pa.Schema,
        row_key_spec: RowKeySpec,
        compression: str = "zstd",
        keep_days: int = 1,
        choose_workers: ChooseWorkers = this_process,
    ) -> None:
        """`choose_workers` chooses where records are read and parts are written."""
        self.store = store
        self.row_key_spec = row_key_spec
        self.compression = compression
        self.choose_workers = choose_workers
        self.keep_hours = max(1, min(24 * keep_days, KEEP_HOURS_MAX))
        self.row_merger = RowMerger(store, stream, schema, row_key_spec)
        self.table = _open_table(store, self.row_merger.schema)

    def published_version(self) -> PublishedVersion:
        """The entry that the table shows, as its last commit says.

        The sequence is -1 if the table cannot be relied on: somebody else changed it, or it has
        another key, format or columns.
        """
        loaded, mark = _load_with_mark(self.table)
        if loaded is None or mark is None:
            return PublishedVersion(token=loaded)
        if mark.format != FORMAT_VERSION or mark.key != self.row_key_spec.key:
            return PublishedVersion(token=loaded)
        if self.table.column_difference(loaded) is not None:
            return PublishedVersion(token=loaded)
        return PublishedVersion(mark.sequence, mark.sha256, loaded, mark.topic_ids)

    def put_rows(
        self,
        expected: PublishedVersion,
        entry: EntryMark,
        topic_ids: TopicIdsByPartition,
        catch_ups: Sequence[PartitionCatchUp],
        progress: Callable[[int], None],
    ) -> CurrentWriteResult:
        """Bring the table to an entry, in one commit on exactly the expected version.

        1. Read which files the table has. All of them are replaced if it cannot be relied on.
        2. Write the parts that have a changed row, partition by partition.
        3. Commit.

        Storage errors become a `CommitConflictError`: the caller decides whether to try again.
        """
        # 1. The files of the table.
        keys: Iterable[str] = ()
        if expected.token is not None:
            with storage_errors_as_conflict():
                keys = self.table.files(expected.token)
        pending = PublishedParts()
        keys_by_partition: KeysByPartition = {}
        if expected.sequence < 0:
            pending.replaced_keys += keys
        else:
            keys_by_partition = _keys_by_partition(keys)
        # 2. The changed parts.
        works = [
            PartitionToPublish(
                sequence=entry.sequence,
                catch_up=catch_up,
                existing_keys=keys_by_partition.get(str(catch_up.partition), {}),
            )
            for catch_up in catch_ups
        ]
        part_writer = PartWriter(self.row_merger, self.compression, self.part_rows_max)
        workers = self.choose_workers(sum(catch_up.record_count() for catch_up in catch_ups))
        answers = map_or_raise(workers, part_writer, works)
        records_read = 0
        for work, parts in zip(works, answers, strict=True):
            if parts.conflict:
                raise CommitConflictError(parts.conflict)
            pending.add(parts)
            crash_point("current-half")
            records_read += work.catch_up.record_count()
            progress(records_read)
        crash_point("current-written")
        # 3. The commit.
        mark = PublishedMark(
            sequence=entry.sequence,
            sha256=entry.sha256,
            key=self.row_key_spec.key,
            topic_ids=topic_ids,
        )
        self._commit(expected, mark, pending)
        return CurrentWriteResult(
            written_rows=pending.rows_written,
            written_files=len(pending.new_files),
            removed_files=len(pending.replaced_keys),
        )

    def _commit(
        self,
        expected: PublishedVersion,
        mark: PublishedMark,
        pending: PublishedParts,
    ) -> None:
        """Make one commit on exactly the table that was read before."""
        has_other_columns = expected.token is not None and bool(
            self.table.column_difference(expected.token)
        )
        gets_columns = has_other_columns and self.table.lacks_only_columns(expected.token)
        if has_other_columns and not gets_columns:
            raise PlatformError(
                f"the table {self.table.url} has other columns than the machine's records",
                next=self.table.advice,
            )
        version = self.table.commit(
            expected.token,
            msgspec.to_builtins(mark),
            pending.new_files,
            # A commit that changes the columns replaces all files by itself.
            () if gets_columns else pending.replaced_keys,
            replaces_all=gets_columns,
        )
        if version and version % VACUUM_EVERY == 0:
            with storage_errors_as_conflict():
                self.vacuum()

    def vacuum(self) -> list[str]:
        """Delete files that left the table, or that no commit ever named, longer ago than a reader
        may take. Returns their paths.
        """
        return self.table.vacuum(self.keep_hours, full=True)


def published_sequence(store: Store) -> int | None:
    """The entry that the table shows; None if there is no table, or it cannot be relied on."""
    _, mark = _load_with_mark(_open_table(store))
    return mark.sequence if mark else None


def _load_with_mark(table: MarkedTable) -> tuple[TableVersion | None, PublishedMark | None]:
    """The table, and what our last commit says. No mark: somebody else committed after it."""
    with table.reading():
        loaded = table.load()
        if loaded is None:
            return None, None
        for commit in table.commits(loaded):
            if commit.mark is not None:
                return loaded, msgspec.convert(commit.mark, PublishedMark)
            if commit.operation not in MAINTENANCE_OPERATIONS:
                break
        return loaded, None


def _open_table(store: Store, schema: pa.Schema | None = None) -> MarkedTable:
    url = f"{store.url}/{TABLE_KEY}"
    advice = f"move {url} out of the way and publish again: it is made of the records"
    return MarkedTable(store, TABLE_KEY, schema, settings=TABLE_SETTINGS, advice=advice)


def _keys_by_partition(keys: Iterable[str]) -> KeysByPartition:
    """The keys of a table's files by partition and part."""
    keys_by_partition: KeysByPartition = {}
    for key in keys:
        match = PART_FILE_NAME.fullmatch(key)
        ensure(match is not None, "the files of current have names of ours", key=key)
        assert match is not None
        bucket = HashBucket(int(match["depth"]), int(match["value"]))
        keys_by_partition.setdefault(match["partition"], {})[bucket] = key
    return keys_by_partition


def session_hashes(sessions: pa.ChunkedArray) -> Any:
    """The hash of each session, as a number of 32 bits. It is part of file layouts and must never
    change.
    """
    names, codes = distinct_values_and_codes(sessions)
    hashes = [xxhash.xxh3_64_intdigest(name.encode()) & 0xFFFFFFFF for name in names]
    return np.array(hashes, np.int64)[codes]


def _split_by_part(
    rows: pa.Table,
    buckets: Sequence[HashBucket],
) -> Iterator[tuple[HashBucket, pa.Table]]:
    """The rows of each part, by the hash of their session."""
    if len(buckets) == 1:
        yield buckets[0], rows
        return
    hashes = session_hashes(rows.column("session"))
    for bucket in buckets:
        low_bits = hashes & ((1 << bucket.depth) - 1)
        yield bucket, rows.filter(pa.array(low_bits == bucket.value))


def _table_file(file: File, partition: Partition, rows: pa.Table) -> TableFile:
    offsets = pc.min_max(rows.column("offset")).as_py()
    sessions = pc.min_max(rows.column("session")).as_py()
    lowest_session = sessions["min"][:SESSION_NAME_CHARACTERS_MAX]
    highest_session = sessions["max"]
    if len(highest_session) > SESSION_NAME_CHARACTERS_MAX:
        # A name that is cut sorts before the whole name, so an upper bound needs the highest
        # character behind it.
        highest_session = highest_session[:SESSION_NAME_CHARACTERS_MAX] + "\U0010ffff"
    own = {"topic": partition.topic, "partition": partition.number}
    return TableFile(
        key=file.path,
        size_bytes=file.size_bytes,
        rows=file.rows,
        lowest={**own, "offset": offsets["min"], "session": lowest_session},
        highest={**own, "offset": offsets["max"], "session": highest_session},
    )
