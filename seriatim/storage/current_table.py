"""The table `current` as a Delta table below a stream's output path: one row for each key that a
session has now.

A data file holds one part of one topic-partition, sorted by session and key, under a name that says
so: only parts with a changed row are written anew. Each commit names the entry that it reaches and
is made on exactly the table that was looked at. Nothing depends on the table: it is made of the
record files alone.

Next room: operations/publish.py decides what is read; storage/current_rows.py has the rules;
seriatim/storage/rows.py reads records.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from msgspec import Struct

from seriatim.engine.crash_points import crash_point
from seriatim.engine.offsets import Partition
from seriatim.errors import PlatformError, ensure
from seriatim.ledger.model import File, Ledger
from seriatim.ports import CommitConflictError
from seriatim.storage.current_rows import (
    CurrentWriteResult,
    HashBucket,
    Lives,
    PartitionCatchUp,
    PublishedVersion,
    RowKeySpec,
    covering_buckets,
)
from seriatim.storage.files import ROWS_PER_GROUP, ParquetFileWriter, sync_log
from seriatim.storage.rows import RowMerger, session_hashes

COMMIT_METADATA_KEY = "seriatim"
FORMAT_VERSION = 1
PART_ROWS_MAX = 500_000
"""A part with more rows falls into two: what one update rewrites stays bounded."""
DEPTH_MAX = 16
"""One session with very many rows does not fall apart."""
KEEP_HOURS_MAX = 24
"""Old files are whole copies of parts: a publish every quarter of an hour would keep 2,880 of them
in a month.
"""
VACUUM_EVERY = 20
"""Commits between two looks for files that no reader needs."""
PART_FILE_NAME = re.compile(
    r"(?P<place>[^/]+/\d+)/\d+-(?P<depth>\d+)-(?P<value>\d+)-[0-9a-f]{12}\.parquet"
)
SESSION_NAME_CHARACTERS_MAX = 128
"""Characters of a session's name in the statistics."""
TABLE_SETTINGS: Mapping[str, str | None] = {
    "delta.dataSkippingStatsColumns": "topic,partition,offset,session"
}
"""delta-rs drops rows under a filter where statistics lack a column that it expects."""
MAINTENANCE_OPERATIONS = ("VACUUM START", "VACUUM END")
STORAGE_ERRORS = (DeltaError, OSError, pa.ArrowException)


class PublishedMark(Struct, frozen=True, kw_only=True):
    """What a commit says of the table that it makes."""

    sequence: int
    sha256: str
    key: tuple[str, ...]
    lives: Lives = {}
    format: int = FORMAT_VERSION


class CurrentTableFile(Struct, frozen=True):
    """A file of the table."""

    path: str
    bytes: int


class PendingTableCommit(Struct):
    """Files that come and go, until the commit."""

    add_actions: list[AddAction] = []
    replaced_files: list[CurrentTableFile] = []
    rows_written: int = 0


FilesByPartition = dict[str, dict[HashBucket, CurrentTableFile]]
"""The table's files by partition and part."""


class DeltaCurrent:
    """The table `current` of one stream. Implements `CurrentStore`."""

    part_rows_max = PART_ROWS_MAX

    def __init__(
        self,
        root: Path,
        stream: str,
        schema: pa.Schema,
        keyed: RowKeySpec,
        compression: str = "zstd",
        keep_days: int = 1,
    ) -> None:
        self.root, self.keyed, self.compression = root, keyed, compression
        self.keep_hours = max(1, min(24 * keep_days, KEEP_HOURS_MAX))
        self.row_merger = RowMerger(root, stream, schema, keyed)
        self.path = root / "current"

    def published_version(self) -> PublishedVersion:
        """As the last commit says; not to be relied on if somebody else changed it, or it has
        another key.
        """
        try:
            if not DeltaTable.is_deltatable(str(self.path)):
                return PublishedVersion()
            table = DeltaTable(self.path)
            mark = _read_mark(table)
        except (*STORAGE_ERRORS, msgspec.MsgspecError) as error:
            raise _unreadable_error(self.path, error) from error
        if (
            mark is None
            or (mark.key, mark.format) != (self.keyed.key, FORMAT_VERSION)
            or self._has_other_columns(table)
        ):
            return PublishedVersion(token=table)
        return PublishedVersion(mark.sequence, mark.sha256, mark.lives, table)

    def put_rows(
        self,
        expected: PublishedVersion,
        ledger: Ledger,
        lives: Lives,
        catch_ups: Sequence[PartitionCatchUp],
        progress: Callable[[int], None],
    ) -> CurrentWriteResult:
        """Write the touched parts anew, then commit. Trouble with writing is an answer: the step
        tries again.
        """
        with _storage_errors_as_conflict():
            parts, strange = (
                _files_by_partition(expected.token) if expected.token is not None else ({}, [])
            )
        if expected.sequence < 0:
            strange += [stored for mine in parts.values() for stored in mine.values()]
            parts = {}
        ensure(expected.sequence < 0 or not strange, "the files of current have names of ours")
        done, read = PendingTableCommit(replaced_files=strange), 0
        for catch in catch_ups:
            rows = self.row_merger.read_changes(catch)
            with _storage_errors_as_conflict():
                self._write_partition(
                    ledger, catch, parts.get(str(catch.partition), {}), rows, done
                )
            crash_point("current-half")
            progress(read := read + catch.record_count())
        crash_point("current-written")
        with _storage_errors_as_conflict():
            self._commit(
                expected,
                PublishedMark(
                    sequence=ledger.sequence, sha256=ledger.sha256, key=self.keyed.key, lives=lives
                ),
                done,
            )
        return CurrentWriteResult(
            written_rows=done.rows_written,
            written_files=len(done.add_actions),
            removed_files=len(done.replaced_files),
        )

    def _write_partition(
        self,
        ledger: Ledger,
        catch_up_derived: PartitionCatchUp,
        existing_files: Mapping[HashBucket, CurrentTableFile],
        changes: pa.Table,
        pending: PendingTableCommit,
    ) -> None:
        """Bring one partition up: the parts that have a changed row, or all of them where it is
        made anew.
        """
        if catch_up_derived.is_full_rebuild:
            pending.replaced_files += existing_files.values()
            existing_files = {}
        for part, mine in _split_by_part(changes, covering_buckets(set(existing_files))):
            if not mine.num_rows:
                continue
            stored = existing_files.get(part)
            before = self._read_file(stored) if stored else None
            if stored:
                pending.replaced_files.append(stored)
            self._write_part(
                ledger,
                catch_up_derived.partition,
                part,
                self.row_merger.merge(before, mine, catch_up_derived.partition),
                pending,
            )

    def _read_file(self, file: CurrentTableFile) -> pa.Table:
        try:
            return pq.ParquetFile(self.path / file.path, page_checksum_verification=True).read()
        except STORAGE_ERRORS as error:
            raise _unreadable_error(self.path, error) from error

    def _write_part(
        self,
        ledger: Ledger,
        partition: Partition,
        part: HashBucket,
        rows: pa.Table,
        pending: PendingTableCommit,
    ) -> None:
        """A part as a file, or as two parts where it has grown too large. Without rows there is no
        file.
        """
        if rows.num_rows > self.part_rows_max and part.depth < DEPTH_MAX:
            for half, mine in _split_by_part(rows, part.split()):
                self._write_part(ledger, partition, half, mine, pending)
            return
        name = f"{ledger.sequence}-{part.depth}-{part.value}-{uuid.uuid4().hex[:12]}.parquet"
        path = f"current/{partition}/{name}"
        writer = ParquetFileWriter(self.root, path, self.row_merger.schema, self.compression)
        for batch in rows.combine_chunks().to_batches(max_chunksize=ROWS_PER_GROUP):
            writer.add(batch)
        file = writer.finish()
        if file is not None:
            pending.add_actions.append(_add_action(file, partition, rows))
            pending.rows_written += file.rows

    def _commit(
        self, expected: PublishedVersion, mark: PublishedMark, pending: PendingTableCommit
    ) -> None:
        """One commit on exactly the table that was looked at."""
        now = int(time.time() * 1000)
        removes = [
            RemoveAction(
                path=one.path,
                data_change=True,
                deletion_timestamp=now,
                partition_values={},
                size=one.bytes,
            )
            for one in pending.replaced_files
        ]
        properties = CommitProperties(
            custom_metadata={COMMIT_METADATA_KEY: msgspec.to_builtins(mark)},
            max_commit_retries=0,
            app_transactions=[Transaction(COMMIT_METADATA_KEY, mark.sequence)],
        )
        if expected.token is None:
            self.path.mkdir(parents=True, exist_ok=True)
            schema = Schema.from_arrow(self.row_merger.schema)
            create_table_with_add_actions(
                str(self.path),
                schema,
                pending.add_actions,
                mode="error",
                configuration=TABLE_SETTINGS,
                commit_properties=properties,
            )
            sync_log(self.path, 0)
            return
        version = expected.token.version() + 1
        self._refuse_other_columns(expected.token)
        expected.token.create_write_transaction(
            [*pending.add_actions, *removes],
            "append",
            expected.token.schema(),
            commit_properties=properties,
        )
        sync_log(self.path, version)
        if version % VACUUM_EVERY == 0:
            self.vacuum()

    def vacuum(self) -> list[str]:
        """Delete files that left the table, or that no commit ever named, longer ago than readers
        may take.
        """
        return DeltaTable(self.path).vacuum(
            self.keep_hours, dry_run=False, enforce_retention_duration=False, full=True
        )

    def _has_other_columns(self, table: DeltaTable) -> bool:
        found = {
            column.name: _normalized_type(column.type)
            for column in pa.schema(table.schema().to_arrow())
        }
        return found != {
            column.name: _normalized_type(column.type) for column in self.row_merger.schema
        }

    def _refuse_other_columns(self, table: DeltaTable) -> None:
        if self._has_other_columns(table):
            raise PlatformError(
                f"the table {self.path} has other columns than the machine's records",
                next=f"move {self.path} out of the way and publish again: it is made of the records",
            )


def published_sequence(root: Path) -> int | None:
    """The entry as of which the table is; None: it is not there, or not to be relied on."""
    path = root / "current"
    try:
        mark = _read_mark(DeltaTable(path)) if DeltaTable.is_deltatable(str(path)) else None
    except (*STORAGE_ERRORS, msgspec.MsgspecError) as error:
        raise _unreadable_error(path, error) from error
    return mark.sequence if mark else None


def _read_mark(table: DeltaTable) -> PublishedMark | None:
    """What our last commit says; None if somebody else's came after it."""
    for commit in _commit_history(table):
        if COMMIT_METADATA_KEY in commit:
            return msgspec.convert(commit[COMMIT_METADATA_KEY], PublishedMark)
        if commit.get("operation") not in MAINTENANCE_OPERATIONS:
            return None
    return None


def _commit_history(table: DeltaTable) -> Iterator[dict[str, Any]]:
    """Commits, newest first: a few, then all."""
    first = table.history(8)
    yield from first
    if len(first) == 8:
        yield from table.history()[8:]


def _files_by_partition(table: DeltaTable) -> tuple[FilesByPartition, list[CurrentTableFile]]:
    """The table's files by partition and part, and those whose names are not ours."""
    found: FilesByPartition = {}
    strange: list[CurrentTableFile] = []
    for add in pa.table(table.get_add_actions()).to_pylist():
        stored = CurrentTableFile(add["path"], add["size_bytes"])
        if match := PART_FILE_NAME.fullmatch(stored.path):
            found.setdefault(match["place"], {})[
                HashBucket(int(match["depth"]), int(match["value"]))
            ] = stored
        else:
            strange.append(stored)
    return found, strange


def _split_by_part(
    rows: pa.Table, parts: Sequence[HashBucket]
) -> Iterator[tuple[HashBucket, pa.Table]]:
    """Rows by the part that has their session."""
    if len(parts) == 1:
        yield parts[0], rows
        return
    numbers = session_hashes(rows.column("session"))
    for part in parts:
        yield part, rows.filter(pa.array(numbers & ((1 << part.depth) - 1) == part.value))


def _add_action(file: File, partition: Partition, rows: pa.Table) -> AddAction:
    offsets, sessions = (pc.min_max(rows.column(name)).as_py() for name in ("offset", "session"))
    ends = {
        end: {
            "topic": partition.topic,
            "partition": partition.number,
            "offset": offsets[end],
            "session": sessions[end],
        }
        for end in ("min", "max")
    }
    ends["min"]["session"] = sessions["min"][:SESSION_NAME_CHARACTERS_MAX]
    if len(sessions["max"]) > SESSION_NAME_CHARACTERS_MAX:
        ends["max"]["session"] = sessions["max"][:SESSION_NAME_CHARACTERS_MAX] + "\U0010ffff"
    stats = {"numRecords": file.rows, "minValues": ends["min"], "maxValues": ends["max"]}
    return AddAction(
        path=file.path.removeprefix("current/"),
        size=file.size_bytes,
        partition_values={},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=json.dumps(stats),
    )


def _normalized_type(kind: pa.DataType) -> str:
    return str(kind).replace("large_", "").replace("_view", "").replace("element", "item")


@contextmanager
def _storage_errors_as_conflict() -> Iterator[None]:
    """Trouble while writing, as an answer: the step decides whether to try again."""
    try:
        yield
    except STORAGE_ERRORS as error:
        raise CommitConflictError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _unreadable_error(path: Path, error: Exception) -> PlatformError:
    return PlatformError(
        f"the table {path.name} cannot be read",
        cause=_first_line(error)[:400],
        next=f"move {path} out of the way and publish again: it is made of the records",
    )
