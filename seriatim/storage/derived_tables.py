"""The derived tables `gaps` and `quarantine`, as Delta tables below the output path of a stream.

Each commit names the entry that it reaches, is made on exactly the table that was read before, and
adds and removes files at once, so that readers see a table as of one entry. The file `derived.json`
only saves reading entries that changed nothing.

Next: operations/followers.py decides what is put; record_files.py writes the files of
quarantined messages.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import pyarrow as pa
from deltalake import DeltaTable
from msgspec.structs import asdict

from seriatim.errors import IntegrityError, PlatformError
from seriatim.ledger.gaps import Gap, QuarantineFile, quarantine_release_finder
from seriatim.ports import AppliedVersion, DerivedTableName, EntryMark, OutputStore
from seriatim.storage.delta_table import (
    STORAGE_ERRORS,
    MarkedTable,
    TableFile,
    storage_errors_as_conflict,
)
from seriatim.storage.parquet import ParquetFileWriter, open_parquet
from seriatim.storage.store import Store, digest_object

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


class DeltaDerived:
    """The derived tables of one stream. Implements `DerivedStore`."""

    def __init__(
        self,
        store: Store,
        compression: str = "zstd",
        output_store: OutputStore | None = None,
    ) -> None:
        self.store = store
        self.compression = compression
        self.output_store = output_store
        self._gaps = MarkedTable(store, "gaps", GAPS_SCHEMA)
        self._quarantine = MarkedTable(store, "quarantine", QUARANTINE_SCHEMA)

    def _table(self, name: DerivedTableName) -> MarkedTable:
        return self._gaps if name == "gaps" else self._quarantine

    def applied_version(self, table: DerivedTableName) -> AppliedVersion:
        """The entry that a table has reached: the one of its last commit of ours, or a later one if
        nothing had to be put since.
        """
        delta_table = self._table(table)
        try:
            loaded = delta_table.load()
            if loaded is None:
                return AppliedVersion()
            mark = delta_table.last_mark(loaded, EntryMark)
        except STORAGE_ERRORS as error:
            raise _unreadable_error(delta_table, error) from error
        if mark is None:
            return AppliedVersion(token=loaded)
        progress = self._read_progress_file()
        # The progress file counts only for the versions that it names: after any other commit it
        # says nothing about this table.
        is_of_this_version = progress.get(table) == loaded.version()
        if is_of_this_version and progress["sequence"] > mark.sequence >= 0:
            mark = EntryMark(progress["sequence"], progress["sha256"])
        return AppliedVersion(mark.sequence, mark.sha256, loaded)

    def gaps(self, applied: AppliedVersion) -> list[Gap]:
        """The gaps in the table as of this version, in the order in which they were opened."""
        try:
            rows = applied.token.to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
            gaps = [Gap(start=row.pop("from"), **row) for row in rows]
        except (*STORAGE_ERRORS, TypeError, KeyError) as error:
            raise _unreadable_error(self._gaps, error) from error
        return sorted(gaps, key=lambda gap: gap.opened)

    def put_gaps(
        self,
        expected: AppliedVersion,
        entry: EntryMark,
        gaps: Sequence[Gap],
    ) -> None:
        """Replace all gaps, in one commit."""
        rows = pa.RecordBatch.from_pylist([gap.to_row() for gap in gaps], schema=GAPS_SCHEMA)
        with storage_errors_as_conflict():
            new_files = self._write_table_file(self._gaps, entry, [rows])
            self._commit(self._gaps, expected, entry, new_files, [], replaces_all=True)

    def put_quarantine(
        self,
        expected: AppliedVersion,
        entry: EntryMark,
        quarantine_files: Sequence[QuarantineFile],
        released_gaps: Sequence[Gap],
    ) -> None:
        """Add the messages of quarantine files, and write those files of the table again whose
        messages were released since. All in one commit.
        """
        find_release = quarantine_release_finder(released_gaps)
        is_new = expected.sequence < 0
        with storage_errors_as_conflict():
            new_files: list[TableFile] = []
            for quarantine_file in quarantine_files:
                batches = self._quarantine_batches(quarantine_file, find_release)
                new_files += self._write_table_file(self._quarantine, entry, batches)
            replaced: list[str] = []
            if not is_new:
                replaced = self._files_with_new_releases(
                    expected.token, released_gaps, find_release
                )
            for key in replaced:
                batches = self._batches_with_releases(key, find_release)
                new_files += self._write_table_file(self._quarantine, entry, batches)
            self._commit(
                self._quarantine, expected, entry, new_files, replaced, replaces_all=is_new
            )

    def note_up_to_date(self, entry: EntryMark) -> None:
        """Note that both tables show this entry, and at which versions that is true."""
        progress = asdict(entry)
        with storage_errors_as_conflict():
            for table in get_args(DerivedTableName):
                loaded = self._table(table).load()
                if loaded is not None:
                    progress[table] = loaded.version()
            self.store.replace(PROGRESS_FILE, json.dumps(progress).encode())

    def _read_progress_file(self) -> dict[str, Any]:
        """What was noted; empty if it cannot be read. Then some entries are read again, nothing
        else is lost.
        """
        try:
            progress = json.loads(self.store.read(PROGRESS_FILE))
            progress["sequence"] = int(progress["sequence"])
            progress["sha256"] = str(progress["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return dict(progress)

    def _write_table_file(
        self,
        table: MarkedTable,
        entry: EntryMark,
        batches: Iterable[pa.RecordBatch],
    ) -> list[TableFile]:
        """Write a file of a table; none if there are no rows."""
        key = f"{table.key}/{entry.sequence}-{uuid.uuid4().hex[:12]}.parquet"
        writer = ParquetFileWriter(self.store, key, table.schema, self.compression)
        bounds = _ColumnBounds()
        for batch in batches:
            if batch.num_rows:
                writer.add(batch)
                bounds.add(batch)
        file = writer.finish()
        if file is None:
            return []
        table_file = TableFile(
            key=key,
            size_bytes=file.size_bytes,
            rows=file.rows,
            lowest=bounds.lowest,
            highest=bounds.highest,
            null_counts=bounds.null_counts,
        )
        return [table_file]

    def _quarantine_batches(
        self,
        quarantine_file: QuarantineFile,
        find_release: FindRelease,
    ) -> Iterator[pa.RecordBatch]:
        """The messages of a quarantine file as rows of the table. The file is proved by its digest
        first.
        """
        file = quarantine_file.file
        try:
            digest = digest_object(self.store, file.path)
        except FileNotFoundError:
            digest = "missing"
        if digest != file.digest:
            raise IntegrityError(
                f"{file.path}: its digest is {digest}, the ledger says {file.digest}",
                cause="the file was changed or lost after it was committed",
                next="restore this file from a backup: it has the messages that were set aside",
            )
        for batch in self._batches(file.path):
            message_columns = [batch.column(name) for name in QUARANTINE_FILE_COLUMNS]
            kept_by = pa.repeat(pa.scalar(quarantine_file.sequence, pa.int64()), batch.num_rows)
            not_released = [pa.nulls(batch.num_rows, field.type) for field in RELEASE_FIELDS]
            columns = [*message_columns, kept_by, *not_released]
            rows = pa.RecordBatch.from_arrays(columns, schema=QUARANTINE_SCHEMA)
            yield _with_releases(rows, find_release)

    def _batches_with_releases(
        self,
        key: str,
        find_release: FindRelease,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a file of the table, with what is known now about releases."""
        for batch in self._batches(key):
            rows = batch.select(QUARANTINE_SCHEMA.names).cast(QUARANTINE_SCHEMA)
            yield _with_releases(rows, find_release)

    def _files_with_new_releases(
        self,
        loaded: DeltaTable,
        released_gaps: Sequence[Gap],
        find_release: FindRelease,
    ) -> list[str]:
        """The keys of files with messages that were released since."""
        keys: list[str] = []
        if not released_gaps:
            return keys
        for file in self._quarantine.files(loaded).values():
            # The statistics rule out most files without opening them.
            may_match = any(_may_contain_messages_of(file, gap) for gap in released_gaps)
            if may_match and self._has_new_release(file.key, find_release):
                keys.append(file.key)
        return keys

    def _has_new_release(self, key: str, find_release: FindRelease) -> bool:
        columns = ["topic_id", "partition", "session", "offset", "released_by"]
        for batch in self._batches(key, columns):
            for row in batch.to_pylist():
                if row["released_by"] is None and find_release(row) is not None:
                    return True
        return False

    def _batches(self, key: str, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        with open_parquet(self.store, key) as parquet:
            yield from parquet.iter_batches(columns=columns)

    def _commit(
        self,
        table: MarkedTable,
        expected: AppliedVersion,
        entry: EntryMark,
        new_files: list[TableFile],
        replaced: list[str],
        *,
        replaces_all: bool,
    ) -> None:
        # A table of an older version of this code may lack columns; a replaced one gets them all.
        version = table.commit(
            expected.token, asdict(entry), new_files, replaced, replaces_all=replaces_all
        )
        if version and version % VACUUM_EVERY == 0:
            table.vacuum(READERS_HOURS)


class _ColumnBounds:
    """The lowest and highest values of a file, so that readers need not open it."""

    def __init__(self) -> None:
        self.lowest: dict[str, Any] = {}
        self.highest: dict[str, Any] = {}
        self.null_counts: dict[str, int] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch. Gaps have no statistics."""
        if "offset" not in batch.schema.names:
            return
        for name in ("topic_id", "partition", "offset"):
            values = batch.column(name).to_pylist()
            if name in self.lowest:
                values += [self.lowest[name], self.highest[name]]
            self.lowest[name] = min(values)
            self.highest[name] = max(values)
        unreleased = self.null_counts.get("released_by", 0)
        unreleased += batch.column("released_by").null_count
        self.null_counts["released_by"] = unreleased


def _may_contain_messages_of(file: TableFile, gap: Gap) -> bool:
    """Whether a file may have messages of a quarantine, by its statistics. A file without
    statistics may.
    """
    if file.null_counts.get("released_by") == 0:
        return False
    for name, value in (("topic_id", gap.topic_id), ("partition", gap.partition)):
        low = file.lowest.get(name)
        high = file.highest.get(name)
        if low is not None and high is not None and not low <= value <= high:
            return False
    lowest_offset = file.lowest.get("offset")
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


def _unreadable_error(table: MarkedTable, error: Exception) -> PlatformError:
    return table.unreadable_error(
        error,
        f"move {table.url} out of the way: it is made of the ledger, and the next run makes it again",
    )
