"""The tables that follow the ledger: `gaps`, `quarantine`, and `records-NAME` for each further kind of
records of a machine, as Delta tables below the output path of a stream.

Each commit names the entry that it reaches, is made on exactly the table that was read before, and
adds and removes files at once, so that readers see a table as of one entry. The file `derived.json`
only saves reading entries that changed nothing.

Next: operations/followers.py decides what is put; record_files.py writes the files of
quarantined messages.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import asdict

from seriatim.engine.records import table_directory
from seriatim.errors import ConfigError, IntegrityError, PlatformError, SeriatimError
from seriatim.ledger.gaps import Gap, QuarantineFile, quarantine_release_finder
from seriatim.ledger.model import EntryMark
from seriatim.ports import (
    AppliedVersion,
    CommitConflictError,
    DerivedTableName,
    OutputStore,
    PartitionFiles,
)
from seriatim.storage.delta_table import (
    RECORD_TABLE_SETTINGS,
    MarkedTable,
    TableFile,
    TableVersion,
    record_table_file,
    storage_errors_as_conflict,
)
from seriatim.storage.parquet import ParquetFileWriter, describe_damage, open_parquet
from seriatim.storage.record_files import QUARANTINE_FILE_SCHEMA
from seriatim.storage.store import Store

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
    [*QUARANTINE_FILE_SCHEMA, pa.field("kept_by", pa.int64()), *RELEASE_FIELDS]
)
"""What the files of quarantined messages have, the entry that wrote them, and the release."""
SCHEMAS: dict[DerivedTableName, pa.Schema] = {"gaps": GAPS_SCHEMA, "quarantine": QUARANTINE_SCHEMA}
FindRelease = Callable[[Mapping[str, Any]], Gap | None]
"""Finds the quarantine to which a message belongs, if it has ended."""


class _Progress(Struct, omit_defaults=True):
    """What the progress file says: the entry that both tables show, at these versions."""

    sequence: int = -1
    sha256: str = ""
    gaps: int | None = None
    quarantine: int | None = None
    open_gaps: int | None = None

    def version_of(self, table: DerivedTableName) -> int | None:
        """The version of a table."""
        return self.gaps if table == "gaps" else self.quarantine


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
        self._gaps = _derived_table(store, "gaps")
        self._quarantine = _derived_table(store, "quarantine")
        self._applied: dict[DerivedTableName, tuple[int, int]] = {}
        """The version of each table that was last read or made here, and the entry that it shows."""
        self._trusts_progress_file = store.is_remote
        """Whether the progress file is believed without a look at the tables. In a bucket that saves
        requests. If it is wrong, the next commit is refused, and from then on the tables are read.
        """
        self._progress: _Progress | None = None

    def _table(self, name: DerivedTableName) -> MarkedTable:
        return self._gaps if name == "gaps" else self._quarantine

    def applied_version(self, table: DerivedTableName) -> AppliedVersion:
        """The entry that a table has reached: the one of its last commit of ours, or a later one if
        nothing had to be put since.
        """
        if self._trusts_progress_file:
            progress = self._progress or self._read_progress_file()
            self._progress = progress
            version = progress.version_of(table)
            if progress.sequence >= 0 and version is not None:
                self._applied[table] = (version, progress.sequence)
                token = TableVersion(self._table(table), version)
                return AppliedVersion(progress.sequence, progress.sha256, token)
        applied = self._table(table).applied_version()
        if applied.sequence < 0:
            return applied
        self._applied[table] = (applied.token.version(), applied.sequence)
        self._progress = self._read_progress_file()
        # The progress file counts only for the versions that it names: after any other commit it
        # says nothing about this table.
        is_of_this_version = self._progress.version_of(table) == applied.token.version()
        if is_of_this_version and self._progress.sequence > applied.sequence:
            return AppliedVersion(self._progress.sequence, self._progress.sha256, applied.token)
        return applied

    def noted_open_gaps(self, applied: AppliedVersion) -> int | None:
        """How many gaps were open when this version was noted; None: not known."""
        if self._progress is None or self._progress.gaps != applied.token.version():
            return None
        return self._progress.open_gaps

    def gaps(self, applied: AppliedVersion) -> list[Gap]:
        """The gaps in the table as of this version, in the order in which they were opened."""
        with self._forgetting_progress_on_error(), self._gaps.reading():
            rows = applied.token.delta.to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
            for row in rows:
                row["start"] = row.pop("from", None)
            gaps = msgspec.convert(rows, list[Gap])
        return sorted(gaps, key=lambda gap: gap.opened)

    @contextmanager
    def _forgetting_progress_on_error(self) -> Iterator[None]:
        """Delete the progress file if it was believed and a table is not as it says: somebody has
        deleted the table. The next run then looks at the tables themselves.
        """
        try:
            yield
        except PlatformError:
            if self._trusts_progress_file:
                with suppress(OSError, SeriatimError):
                    self.store.delete([PROGRESS_FILE])
            raise

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
            self._commit("gaps", expected, entry, new_files, [], replaces_all=True)

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
                # Only these are written again. The table may be large, and releases are few.
                replaced = self._files_with_new_releases(
                    expected.token, released_gaps, find_release
                )
            for key in replaced:
                batches = self._batches_with_releases(key, find_release)
                new_files += self._write_table_file(self._quarantine, entry, batches)
            self._commit("quarantine", expected, entry, new_files, replaced, replaces_all=is_new)

    def note_up_to_date(self, entry: EntryMark, open_gaps: int) -> None:
        """Note that both tables show this entry, and at which versions that is true."""
        versions = {}
        for table, (version, sequence) in self._applied.items():
            # Another run may have brought a table further than to this entry.
            if sequence <= entry.sequence:
                versions[table] = version
        progress = _Progress(
            sequence=entry.sequence,
            sha256=entry.sha256,
            gaps=versions.get("gaps"),
            quarantine=versions.get("quarantine"),
            open_gaps=open_gaps,
        )
        with storage_errors_as_conflict():
            self.store.replace(PROGRESS_FILE, msgspec.json.encode(progress))
        self._progress = progress

    def _read_progress_file(self) -> _Progress:
        """What was noted; nothing if it cannot be read. Then some entries are read again, nothing
        else is lost.
        """
        try:
            return msgspec.json.decode(self.store.read(PROGRESS_FILE), type=_Progress)
        except (OSError, ValueError, RecursionError):
            # The errors of msgspec are ValueErrors.
            return _Progress()

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
        damage = describe_damage(self.store, file)
        if damage:
            raise IntegrityError(
                f"{file.path}: {damage}",
                cause="the file was changed or lost after it was committed",
                next="restore this file from a backup: it has the messages that were set aside",
            )
        for batch in self._batches(file.path):
            message_columns = [batch.column(name) for name in QUARANTINE_FILE_SCHEMA.names]
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
        loaded: TableVersion,
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
        name: DerivedTableName,
        expected: AppliedVersion,
        entry: EntryMark,
        new_files: list[TableFile],
        replaced: list[str],
        *,
        replaces_all: bool,
    ) -> None:
        table = self._table(name)
        # A table of an older version of this code may lack columns; a replaced one gets them all.
        try:
            version = table.commit(
                expected.token, asdict(entry), new_files, replaced, replaces_all=replaces_all
            )
        except CommitConflictError:
            self._trusts_progress_file = False
            raise
        self._applied[name] = (version, entry.sequence)
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


def _derived_table(store: Store, name: DerivedTableName) -> MarkedTable:
    advice = (
        f"move {store.url}/{name} out of the way:"
        " it is made of the ledger, and the next run makes it again"
    )
    return MarkedTable(store, name, SCHEMAS[name], advice=advice)


class DeltaOutputs:
    """The further tables of one stream. Implements `OutputStore`."""

    def __init__(
        self,
        store: Store,
        schemas: Mapping[str, pa.Schema],
        partition_by: Sequence[str] = (),
    ) -> None:
        self.tables: Sequence[str] = list(schemas)
        self._delta_tables: dict[str, MarkedTable] = {}
        for table, schema in schemas.items():
            self._delta_tables[table] = MarkedTable(
                store,
                table_directory(table),
                schema,
                partition_by=partition_by,
                settings=RECORD_TABLE_SETTINGS,
                advice=f"move {store.url}/{table_directory(table)}/_delta_log out of the way: "
                "the next run makes it again from the ledger",
            )

    def applied_version(self, table: str) -> AppliedVersion:
        """The entry that a table has reached, as its last commit of ours says."""
        delta_table = self._delta_tables[table]
        applied = delta_table.applied_version()
        if applied.token is not None and delta_table.must_compare_columns(applied.token):
            _refuse_other_columns(delta_table, applied.token)
        return applied

    def put_files(
        self,
        table: str,
        expected: AppliedVersion,
        entry: EntryMark,
        added: PartitionFiles,
        removed: Sequence[str],
    ) -> None:
        """Add and remove files in one commit on exactly the table that was read before.

        A table that has reached no entry is built as a whole: it then has the added files alone.
        """
        delta_table = self._delta_tables[table]
        adds = [record_table_file(partition, file) for partition, file in added]
        removes = set(removed)
        if expected.sequence < 0 and expected.token is not None:
            # Files that are in the table already stay as they are: record files are never written
            # twice under one name, and Delta refuses a commit that removes a path and adds it again.
            with storage_errors_as_conflict():
                active = delta_table.files(expected.token)
            removes = set(active) - {add.key for add in adds}
            adds = [add for add in adds if add.key not in active]
        delta_table.commit(expected.token, asdict(entry), adds, removes)


def _refuse_other_columns(delta_table: MarkedTable, loaded: TableVersion) -> None:
    """Refuse a machine whose columns are not those of the table."""
    difference = delta_table.column_difference(loaded)
    if difference is not None:
        raise ConfigError(
            f"column {difference.name!r} is {difference.type_in_table or 'not there'} in the table"
            f" {delta_table.key}, {difference.expected_type or 'not there'} by the machine",
            next="set the columns of the machine back to those of the table, or write a new"
            " output.path into the stream file",
        )
