"""The table `current` as a Delta table below the output path of a stream: one row for each key that a
session has now.

A data file holds one part of one partition, sorted by session and key, under a name that says so.
Only parts with a changed row are written again. Each commit names the entry that it reaches and is
made on exactly the table that was read before. Nothing depends on this table: it is built from the
record files alone.

Next: operations/publish.py decides what is read; storage/current_rows.py has the rules;
storage/rows.py reads the records.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from msgspec import Struct

from seriatim.engine.crash_points import crash_point
from seriatim.engine.offsets import Partition
from seriatim.engine.record_kinds import RowKeySpec
from seriatim.errors import PlatformError, ensure
from seriatim.ledger.model import File, Ledger
from seriatim.storage.current_rows import (
    CurrentWriteResult,
    HashBucket,
    PartitionCatchUp,
    PublishedVersion,
    TopicIdsByPartition,
    covering_buckets,
)
from seriatim.storage.delta import (
    COMMIT_METADATA_KEY,
    STORAGE_ERRORS,
    add_actions_by_path,
    column_types,
    commit_history,
    commit_properties,
    first_line,
    storage_errors_as_conflict,
    table_column_types,
)
from seriatim.storage.files import ROWS_PER_GROUP, ParquetFileWriter, sync_log
from seriatim.storage.rows import RowMerger, session_hashes

FORMAT_VERSION = 1
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
    r"(?P<partition>[^/]+/\d+)/\d+-(?P<depth>\d+)-(?P<value>\d+)-[0-9a-f]{12}\.parquet"
)
SESSION_NAME_CHARACTERS_MAX = 128
"""Characters of a session's name in the statistics of a file."""
TABLE_SETTINGS: Mapping[str, str | None] = {
    "delta.dataSkippingStatsColumns": "topic,partition,offset,session"
}
"""delta-rs drops rows under a filter where the statistics of a file lack a column that it expects."""
MAINTENANCE_OPERATIONS = ("VACUUM START", "VACUUM END")


class PublishedMark(Struct, frozen=True, kw_only=True, rename={"topic_ids": "lives"}):
    """What a commit says about the table that it makes."""

    sequence: int
    sha256: str
    key: tuple[str, ...]
    topic_ids: TopicIdsByPartition = {}
    format: int = FORMAT_VERSION


class CurrentTableFile(Struct, frozen=True):
    """A file of the table."""

    path: str
    size_bytes: int


class PendingTableCommit(Struct):
    """The files that the next commit adds and removes."""

    add_actions: list[AddAction] = []
    replaced_files: list[CurrentTableFile] = []
    rows_written: int = 0


FilesByPartition = dict[str, dict[HashBucket, CurrentTableFile]]
"""The files of the table by partition and part."""


class DeltaCurrent:
    """The table `current` of one stream. Implements `CurrentStore`."""

    part_rows_max = PART_ROWS_MAX

    def __init__(
        self,
        root: Path,
        stream: str,
        schema: pa.Schema,
        row_key_spec: RowKeySpec,
        compression: str = "zstd",
        keep_days: int = 1,
    ) -> None:
        self.root = root
        self.row_key_spec = row_key_spec
        self.compression = compression
        self.keep_hours = max(1, min(24 * keep_days, KEEP_HOURS_MAX))
        self.row_merger = RowMerger(root, stream, schema, row_key_spec)
        self.path = root / "current"

    def published_version(self) -> PublishedVersion:
        """The entry that the table shows, as its last commit says.

        The sequence is -1 if the table cannot be relied on: somebody else changed it, or it has
        another key, format or columns.
        """
        try:
            if not DeltaTable.is_deltatable(str(self.path)):
                return PublishedVersion()
            table = DeltaTable(self.path)
            mark = _read_mark(table)
        except (*STORAGE_ERRORS, msgspec.MsgspecError) as error:
            raise _unreadable_error(self.path, error) from error
        unreliable = PublishedVersion(token=table)
        if mark is None or mark.format != FORMAT_VERSION:
            return unreliable
        if mark.key != self.row_key_spec.key or self._has_other_columns(table):
            return unreliable
        return PublishedVersion(mark.sequence, mark.sha256, mark.topic_ids, table)

    def put_rows(
        self,
        expected: PublishedVersion,
        ledger: Ledger,
        topic_ids: TopicIdsByPartition,
        catch_ups: Sequence[PartitionCatchUp],
        progress: Callable[[int], None],
    ) -> CurrentWriteResult:
        """Bring the table to the entry of `ledger`, in one commit on exactly the expected version.

        1. Read which files the table has. All of them are replaced if it cannot be relied on.
        2. Write the parts that have a changed row, partition by partition.
        3. Commit.

        Storage errors become a `CommitConflictError`: the caller decides whether to try again.
        """
        # 1. The files of the table.
        with storage_errors_as_conflict():
            files_by_partition, foreign_files = _table_files(expected.token)
        replaced_files = list(foreign_files)
        if expected.sequence < 0:
            for files_by_part in files_by_partition.values():
                replaced_files.extend(files_by_part.values())
            files_by_partition = {}
        else:
            ensure(not foreign_files, "the files of current have names of ours")
        # 2. The changed parts.
        pending = PendingTableCommit(replaced_files=replaced_files)
        records_read = 0
        for catch_up in catch_ups:
            changes = self.row_merger.read_changes(catch_up)
            existing_files = files_by_partition.get(str(catch_up.partition), {})
            with storage_errors_as_conflict():
                self._write_partition(ledger, catch_up, existing_files, changes, pending)
            crash_point("current-half")
            records_read += catch_up.record_count()
            progress(records_read)
        crash_point("current-written")
        # 3. The commit.
        mark = PublishedMark(
            sequence=ledger.sequence,
            sha256=ledger.sha256,
            key=self.row_key_spec.key,
            topic_ids=topic_ids,
        )
        with storage_errors_as_conflict():
            self._commit(expected, mark, pending)
        return CurrentWriteResult(
            written_rows=pending.rows_written,
            written_files=len(pending.add_actions),
            removed_files=len(pending.replaced_files),
        )

    def _write_partition(
        self,
        ledger: Ledger,
        catch_up: PartitionCatchUp,
        existing_files: Mapping[HashBucket, CurrentTableFile],
        changes: pa.Table,
        pending: PendingTableCommit,
    ) -> None:
        """Write the parts of one partition that have a changed row, or all of them if its rows are
        built anew.
        """
        if catch_up.is_full_rebuild:
            pending.replaced_files += existing_files.values()
            existing_files = {}
        buckets = covering_buckets(set(existing_files))
        for bucket, part_changes in _split_by_part(changes, buckets):
            if not part_changes.num_rows:
                continue
            previous_rows = None
            existing_file = existing_files.get(bucket)
            if existing_file is not None:
                previous_rows = self._read_file(existing_file)
                pending.replaced_files.append(existing_file)
            rows = self.row_merger.merge(previous_rows, part_changes, catch_up.partition)
            self._write_part(ledger, catch_up.partition, bucket, rows, pending)

    def _read_file(self, file: CurrentTableFile) -> pa.Table:
        try:
            return pq.ParquetFile(self.path / file.path, page_checksum_verification=True).read()
        except STORAGE_ERRORS as error:
            raise _unreadable_error(self.path, error) from error

    def _write_part(
        self,
        ledger: Ledger,
        partition: Partition,
        bucket: HashBucket,
        rows: pa.Table,
        pending: PendingTableCommit,
    ) -> None:
        """Write a part as one file, or as two parts if it has grown too large. A part without rows
        has no file.
        """
        if rows.num_rows > self.part_rows_max and bucket.depth < DEPTH_MAX:
            for half, half_rows in _split_by_part(rows, bucket.split()):
                self._write_part(ledger, partition, half, half_rows, pending)
            return
        name = f"{ledger.sequence}-{bucket.depth}-{bucket.value}-{uuid.uuid4().hex[:12]}.parquet"
        path = f"current/{partition}/{name}"
        writer = ParquetFileWriter(self.root, path, self.row_merger.schema, self.compression)
        for batch in rows.combine_chunks().to_batches(max_chunksize=ROWS_PER_GROUP):
            writer.add(batch)
        file = writer.finish()
        if file is not None:
            pending.add_actions.append(_add_action(file, partition, rows))
            pending.rows_written += file.rows

    def _commit(
        self,
        expected: PublishedVersion,
        mark: PublishedMark,
        pending: PendingTableCommit,
    ) -> None:
        """Make one commit on exactly the table that was read before."""
        properties = commit_properties(msgspec.to_builtins(mark), mark.sequence)
        table = expected.token
        if table is None:
            self.path.mkdir(parents=True, exist_ok=True)
            create_table_with_add_actions(
                str(self.path),
                Schema.from_arrow(self.row_merger.schema),
                pending.add_actions,
                mode="error",
                configuration=TABLE_SETTINGS,
                commit_properties=properties,
            )
            sync_log(self.path, 0)
            return
        self._refuse_other_columns(table)
        removes = _remove_actions(pending.replaced_files)
        version = table.version() + 1
        table.create_write_transaction(
            [*pending.add_actions, *removes],
            "append",
            table.schema(),
            commit_properties=properties,
        )
        sync_log(self.path, version)
        if version % VACUUM_EVERY == 0:
            self.vacuum()

    def vacuum(self) -> list[str]:
        """Delete files that left the table, or that no commit ever named, longer ago than a reader
        may take. Returns their paths.
        """
        return DeltaTable(self.path).vacuum(
            self.keep_hours,
            dry_run=False,
            enforce_retention_duration=False,
            full=True,
        )

    def _has_other_columns(self, table: DeltaTable) -> bool:
        return table_column_types(table) != column_types(self.row_merger.schema)

    def _refuse_other_columns(self, table: DeltaTable) -> None:
        if self._has_other_columns(table):
            raise PlatformError(
                f"the table {self.path} has other columns than the machine's records",
                next=f"move {self.path} out of the way and publish again: it is made of the records",
            )


def published_sequence(root: Path) -> int | None:
    """The entry that the table shows; None if there is no table, or it cannot be relied on."""
    path = root / "current"
    try:
        if not DeltaTable.is_deltatable(str(path)):
            return None
        mark = _read_mark(DeltaTable(path))
    except (*STORAGE_ERRORS, msgspec.MsgspecError) as error:
        raise _unreadable_error(path, error) from error
    return mark.sequence if mark else None


def _read_mark(table: DeltaTable) -> PublishedMark | None:
    """What our last commit says; None if somebody else committed after it."""
    for commit in commit_history(table):
        if COMMIT_METADATA_KEY in commit:
            return msgspec.convert(commit[COMMIT_METADATA_KEY], PublishedMark)
        if commit.get("operation") not in MAINTENANCE_OPERATIONS:
            return None
    return None


def _table_files(table: DeltaTable | None) -> tuple[FilesByPartition, list[CurrentTableFile]]:
    """The files of a table by partition and part, and those whose names are not ours."""
    files_by_partition: FilesByPartition = {}
    foreign_files: list[CurrentTableFile] = []
    if table is None:
        return files_by_partition, foreign_files
    for path, add in add_actions_by_path(table).items():
        file = CurrentTableFile(path, add["size_bytes"])
        match = PART_FILE_NAME.fullmatch(path)
        if match is None:
            foreign_files.append(file)
            continue
        bucket = HashBucket(int(match["depth"]), int(match["value"]))
        files_by_partition.setdefault(match["partition"], {})[bucket] = file
    return files_by_partition, foreign_files


def _remove_actions(files: Sequence[CurrentTableFile]) -> list[RemoveAction]:
    now_ms = int(time.time() * 1000)
    return [
        RemoveAction(
            path=file.path,
            data_change=True,
            deletion_timestamp=now_ms,
            partition_values={},
            size=file.size_bytes,
        )
        for file in files
    ]


def _split_by_part(
    rows: pa.Table, buckets: Sequence[HashBucket]
) -> Iterator[tuple[HashBucket, pa.Table]]:
    """The rows of each part, by the hash of their session."""
    if len(buckets) == 1:
        yield buckets[0], rows
        return
    hashes = session_hashes(rows.column("session"))
    for bucket in buckets:
        low_bits = hashes & ((1 << bucket.depth) - 1)
        yield bucket, rows.filter(pa.array(low_bits == bucket.value))


def _add_action(file: File, partition: Partition, rows: pa.Table) -> AddAction:
    offsets = pc.min_max(rows.column("offset")).as_py()
    sessions = pc.min_max(rows.column("session")).as_py()
    lowest_session = sessions["min"][:SESSION_NAME_CHARACTERS_MAX]
    highest_session = sessions["max"]
    if len(highest_session) > SESSION_NAME_CHARACTERS_MAX:
        # A name that is cut sorts before the whole name, so an upper bound needs the highest
        # character behind it.
        highest_session = highest_session[:SESSION_NAME_CHARACTERS_MAX] + "\U0010ffff"
    own = {"topic": partition.topic, "partition": partition.number}
    stats = {
        "numRecords": file.rows,
        "minValues": {**own, "offset": offsets["min"], "session": lowest_session},
        "maxValues": {**own, "offset": offsets["max"], "session": highest_session},
    }
    return AddAction(
        path=file.path.removeprefix("current/"),
        size=file.size_bytes,
        partition_values={},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=json.dumps(stats),
    )


def _unreadable_error(path: Path, error: Exception) -> PlatformError:
    return PlatformError(
        f"the table {path.name} cannot be read",
        cause=first_line(error)[:400],
        next=f"move {path} out of the way and publish again: it is made of the records",
    )
