"""The derived tables `gaps` and `quarantine`, as Delta tables below the output path of a stream.

Each commit names the entry that it reaches, is made on exactly the table that was read before, and
adds and removes files at once, so that readers see a table as of one entry. The file `derived.json`
only saves reading entries that changed nothing.

Next: operations/derived_tables.py decides what is put; record_files.py writes the files of
quarantined messages.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from msgspec import Struct

from seriatim.errors import IntegrityError, PlatformError
from seriatim.ledger.gaps import Gap, QuarantineFile, quarantine_release_finder
from seriatim.ledger.model import File, Ledger
from seriatim.ports import AppliedVersion, DerivedTableName, OutputStore
from seriatim.storage.delta import (
    STORAGE_ERRORS,
    commit_properties,
    first_line,
    last_mark,
    storage_errors_as_conflict,
)
from seriatim.storage.files import ParquetFileWriter, file_digest, sync_log, write_file

PROGRESS_FILE = "derived.json"
VACUUM_EVERY = 100
"""Versions of a table between two deletions of files that no reader needs."""
READERS_HOURS = 7 * 24
"""A reader that began earlier may find its files deleted."""
GAPS_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("topic_id", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("session", pa.string()),
        pa.field("from", pa.int64()),
        pa.field("until", pa.int64()),
        pa.field("finding", pa.string()),
        pa.field("cause", pa.string()),
        pa.field("opened", pa.int64()),
        pa.field("closed", pa.int64()),
        pa.field("closed_how", pa.string()),
        pa.field("mended", pa.int64()),
        pa.field("quarantined", pa.bool_()),
    ]
)
RELEASE_FIELDS = [
    pa.field("released_by", pa.int64()),
    pa.field("released_how", pa.string()),
    pa.field("released_offset", pa.int64()),
]
QUARANTINE_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("topic_id", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", "UTC")),
        pa.field("session", pa.string()),
        pa.field("finding", pa.string()),
        pa.field("cause", pa.string()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        pa.field("kept_by", pa.int64()),
        *RELEASE_FIELDS,
    ]
)
QUARANTINE_FILE_COLUMNS = QUARANTINE_SCHEMA.names[: -len(RELEASE_FIELDS) - 1]
"""The columns that the files of quarantined messages have: all but `kept_by` and the release."""
SCHEMAS: dict[DerivedTableName, pa.Schema] = {"gaps": GAPS_SCHEMA, "quarantine": QUARANTINE_SCHEMA}
FindRelease = Callable[[Mapping[str, Any]], Gap | None]
"""Finds the quarantine to which a message belongs, if it has ended."""


class _NewTableFile(Struct):
    """A new file of a table, and the statistics that its commit has for it."""

    file: File
    statistics: dict[str, Any]


class DeltaDerived:
    """The derived tables of one stream. Implements `DerivedStore`."""

    def __init__(
        self,
        root: Path,
        compression: str = "zstd",
        output_store: OutputStore | None = None,
    ) -> None:
        self.root = root
        self.compression = compression
        self.output_store = output_store

    def applied_version(self, table: DerivedTableName) -> AppliedVersion:
        """The entry that a table has reached: the one of its last commit of ours, or a later one if
        nothing had to be put since.
        """
        path = self.root / table
        try:
            if not DeltaTable.is_deltatable(str(path)):
                return AppliedVersion()
            delta_table = DeltaTable(path)
            mark = last_mark(delta_table)
        except STORAGE_ERRORS as error:
            raise _unreadable_error(path, error) from error
        if mark is None:
            return AppliedVersion(-1, "", delta_table)
        applied = AppliedVersion(int(mark["sequence"]), str(mark["sha256"]), delta_table)
        progress = self._read_progress_file()
        # The progress file counts only for the versions that it names: after any other commit it
        # says nothing about this table.
        if progress.get(table) != delta_table.version():
            return applied
        if applied.sequence < 0 or progress["sequence"] <= applied.sequence:
            return applied
        return AppliedVersion(progress["sequence"], progress["sha256"], delta_table)

    def gaps(self, applied: AppliedVersion) -> list[Gap]:
        """The gaps in the table as of this version, in the order in which they were opened."""
        try:
            rows = applied.token.to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
            gaps = [Gap(start=row.pop("from"), **row) for row in rows]
        except (*STORAGE_ERRORS, TypeError, KeyError) as error:
            raise _unreadable_error(self.root / "gaps", error) from error
        return sorted(gaps, key=lambda gap: gap.opened)

    def put_gaps(
        self,
        expected: AppliedVersion,
        ledger: Ledger,
        gaps: Sequence[Gap],
    ) -> None:
        """Replace all gaps, in one commit."""
        with storage_errors_as_conflict():
            rows = pa.RecordBatch.from_pylist([gap.to_row() for gap in gaps], schema=GAPS_SCHEMA)
            new_file = self._write_table_file("gaps", ledger, [rows])
            new_files = [] if new_file is None else [new_file]
            # Without a sequence the commit replaces the whole table.
            replace_all = AppliedVersion(token=expected.token)
            self._commit("gaps", replace_all, ledger, new_files, [])

    def put_quarantine(
        self,
        expected: AppliedVersion,
        ledger: Ledger,
        quarantine_files: Sequence[QuarantineFile],
        released_gaps: Sequence[Gap],
    ) -> None:
        """Add the messages of quarantine files, and write those files of the table again whose
        messages were released since. All in one commit.
        """
        find_release = quarantine_release_finder(released_gaps)
        with storage_errors_as_conflict():
            new_files: list[_NewTableFile | None] = []
            for quarantine_file in quarantine_files:
                batches = self._quarantine_batches(quarantine_file, find_release)
                new_files.append(self._write_table_file("quarantine", ledger, batches))
            replaced_files: list[tuple[str, int]] = []
            if expected.sequence >= 0:
                replaced_files = self._files_with_new_releases(
                    expected.token,
                    released_gaps,
                    find_release,
                )
            for path, _ in replaced_files:
                batches = self._batches_with_releases(path, find_release)
                new_files.append(self._write_table_file("quarantine", ledger, batches))
            files_with_rows = [file for file in new_files if file is not None]
            self._commit("quarantine", expected, ledger, files_with_rows, replaced_files)

    def note_up_to_date(self, ledger: Ledger) -> None:
        """Note that both tables show this entry, and at which versions that is true."""
        progress: dict[str, Any] = {"sequence": ledger.sequence, "sha256": ledger.sha256}
        with storage_errors_as_conflict():
            for table in get_args(DerivedTableName):
                progress[table] = DeltaTable(self.root / table).version()
            write_file(self.root / PROGRESS_FILE, json.dumps(progress).encode())

    def _read_progress_file(self) -> dict[str, Any]:
        """What was noted; empty if it cannot be read. Then some entries are read again, nothing
        else is lost.
        """
        try:
            progress = json.loads((self.root / PROGRESS_FILE).read_bytes())
            progress["sequence"] = int(progress["sequence"])
            progress["sha256"] = str(progress["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return dict(progress)

    def _write_table_file(
        self,
        table: DerivedTableName,
        ledger: Ledger,
        batches: Iterable[pa.RecordBatch],
    ) -> _NewTableFile | None:
        """Write a file of a table; None if there are no rows."""
        path = f"{table}/{ledger.sequence}-{uuid.uuid4().hex[:12]}.parquet"
        writer = ParquetFileWriter(self.root, path, SCHEMAS[table], self.compression)
        statistics = _ColumnStatistics()
        for batch in batches:
            if batch.num_rows:
                writer.add(batch)
                statistics.add(batch)
        file = writer.finish()
        if file is None:
            return None
        return _NewTableFile(file, {"numRecords": file.rows, **statistics.delta_statistics()})

    def _quarantine_batches(
        self,
        quarantine_file: QuarantineFile,
        find_release: FindRelease,
    ) -> Iterator[pa.RecordBatch]:
        """The messages of a quarantine file as rows of the table. The file is proved by its digest
        first.
        """
        file = quarantine_file.file
        full_path = self.root / file.path
        digest = file_digest(full_path) if full_path.is_file() else "missing"
        if digest != file.digest:
            raise IntegrityError(
                f"{file.path}: its digest is {digest}, the ledger says {file.digest}",
                cause="the file was changed or lost after it was committed",
                next="restore this file from a backup: it has the messages that were set aside",
            )
        for batch in pq.ParquetFile(full_path, page_checksum_verification=True).iter_batches():
            message_columns = [batch.column(name) for name in QUARANTINE_FILE_COLUMNS]
            kept_by = pa.repeat(pa.scalar(quarantine_file.sequence, pa.int64()), batch.num_rows)
            not_released = [pa.nulls(batch.num_rows, field.type) for field in RELEASE_FIELDS]
            columns = [*message_columns, kept_by, *not_released]
            rows = pa.RecordBatch.from_arrays(columns, schema=QUARANTINE_SCHEMA)
            yield _with_releases(rows, find_release)

    def _batches_with_releases(
        self,
        path: str,
        find_release: FindRelease,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a file of the table, with what is known now about releases."""
        for batch in pq.ParquetFile(self.root / "quarantine" / path).iter_batches():
            rows = batch.select(QUARANTINE_SCHEMA.names).cast(QUARANTINE_SCHEMA)
            yield _with_releases(rows, find_release)

    def _files_with_new_releases(
        self,
        table: DeltaTable,
        released_gaps: Sequence[Gap],
        find_release: FindRelease,
    ) -> list[tuple[str, int]]:
        """The files with messages that were released since, as paths and sizes."""
        if not released_gaps:
            return []
        files = []
        for add in pa.table(table.get_add_actions(flatten=True)).to_pylist():
            # The statistics rule out most files without opening them.
            may_match = any(_may_contain_messages_of(add, gap) for gap in released_gaps)
            if may_match and self._has_new_release(add["path"], find_release):
                files.append((add["path"], add["size_bytes"]))
        return files

    def _has_new_release(self, path: str, find_release: FindRelease) -> bool:
        columns = ["topic_id", "partition", "session", "offset", "released_by"]
        parquet = pq.ParquetFile(self.root / "quarantine" / path)
        for batch in parquet.iter_batches(columns=columns):
            for row in batch.to_pylist():
                if row["released_by"] is None and find_release(row) is not None:
                    return True
        return False

    def _commit(
        self,
        table: DerivedTableName,
        expected: AppliedVersion,
        ledger: Ledger,
        new_files: list[_NewTableFile],
        replaced_files: list[tuple[str, int]],
    ) -> None:
        """Make one commit on exactly the table that was read before. It replaces the whole table if
        that has reached no entry.
        """
        now_ms = int(time.time() * 1000)
        adds = [_add_action(table, new_file, now_ms) for new_file in new_files]
        mark = {"sequence": ledger.sequence, "sha256": ledger.sha256}
        properties = commit_properties(mark, ledger.sequence)
        path = self.root / table
        delta_table = expected.token
        if delta_table is None:
            path.mkdir(parents=True, exist_ok=True)
            schema = Schema.from_arrow(SCHEMAS[table])
            create_table_with_add_actions(
                str(path),
                schema,
                adds,
                mode="error",
                commit_properties=properties,
            )
            sync_log(path, 0)
            return
        version = delta_table.version() + 1
        if expected.sequence >= 0:
            mode: Literal["append", "overwrite"] = "append"
            schema = delta_table.schema()
        else:
            # A table of an older version of this code may lack columns; a new one gets them all.
            mode = "overwrite"
            schema = Schema.from_arrow(SCHEMAS[table])
        removes = [_remove_action(removed, size, now_ms) for removed, size in replaced_files]
        delta_table.create_write_transaction(
            [*adds, *removes],
            mode,
            schema,
            commit_properties=properties,
        )
        sync_log(path, version)
        if version % VACUUM_EVERY == 0:
            DeltaTable(path).vacuum(READERS_HOURS, dry_run=False, enforce_retention_duration=False)


class _ColumnStatistics:
    """The lowest and highest values of a file, so that readers need not open it."""

    def __init__(self) -> None:
        self.bounds: dict[str, tuple[Any, Any]] = {}
        self.unreleased_count = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch. Gaps have no statistics."""
        if "offset" not in batch.schema.names:
            return
        for name in ("topic_id", "partition", "offset"):
            values = batch.column(name).to_pylist()
            if name in self.bounds:
                values.extend(self.bounds[name])
            self.bounds[name] = (min(values), max(values))
        self.unreleased_count += batch.column("released_by").null_count

    def delta_statistics(self) -> dict[str, Any]:
        """The statistics as Delta has them."""
        if not self.bounds:
            return {}
        return {
            "minValues": {name: low for name, (low, _) in self.bounds.items()},
            "maxValues": {name: high for name, (_, high) in self.bounds.items()},
            "nullCount": {"released_by": self.unreleased_count},
        }


def _may_contain_messages_of(file: Mapping[str, Any], gap: Gap) -> bool:
    """Whether a file may have messages of a quarantine, by its statistics. A file without
    statistics may.
    """
    if file.get("null_count.released_by") == 0:
        return False
    for name, value in (("topic_id", gap.topic_id), ("partition", gap.partition)):
        low = file.get(f"min.{name}")
        high = file.get(f"max.{name}")
        if low is not None and high is not None and not low <= value <= high:
            return False
    lowest_offset = file.get("min.offset")
    return lowest_offset is None or lowest_offset < (gap.until or 0)


def _with_releases(batch: pa.RecordBatch, find_release: FindRelease) -> pa.RecordBatch:
    """Rows of the table, with how their messages were released where that is new."""
    release_names = [field.name for field in RELEASE_FIELDS]
    key_names = ["topic_id", "partition", "session", "offset"]
    releases = []
    for row in batch.select([*key_names, *release_names]).to_pylist():
        gap = find_release(row) if row["released_by"] is None else None
        releases.append(row if gap is None else gap.release_columns())
    release_columns = [
        pa.array([release[field.name] for release in releases], field.type)
        for field in RELEASE_FIELDS
    ]
    other_columns = batch.columns[: -len(release_names)]
    return pa.RecordBatch.from_arrays([*other_columns, *release_columns], schema=QUARANTINE_SCHEMA)


def _remove_action(path: str, size_bytes: int, now_ms: int) -> RemoveAction:
    return RemoveAction(
        path=path,
        data_change=True,
        deletion_timestamp=now_ms,
        partition_values={},
        size=size_bytes,
    )


def _add_action(table: DerivedTableName, new_file: _NewTableFile, now_ms: int) -> AddAction:
    return AddAction(
        path=new_file.file.path.removeprefix(f"{table}/"),
        size=new_file.file.size_bytes,
        partition_values={},
        modification_time=now_ms,
        data_change=True,
        stats=json.dumps(new_file.statistics),
    )


def _unreadable_error(path: Path, error: Exception) -> PlatformError:
    return PlatformError(
        f"the table {path.name} cannot be read",
        cause=first_line(error)[:400],
        next=f"move {path} out of the way: "
        "it is made of the ledger, and the next run makes it again",
    )
