"""The derived tables as Delta tables below a stream's output path: `gaps` and `quarantine`.

Each commit names the entry that it reaches, is made on exactly the table that was looked at, and
adds and removes files at once: readers see a table as of one entry. `derived.json` only spares
walking entries that changed nothing.

Next room: operations/derived_tables.py decides what is put; parquet.py wrote the files of messages
set aside.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from msgspec import Struct

from seriatim.errors import IntegrityError, PlatformError
from seriatim.ledger.gaps import Gap, QuarantineFile, quarantine_release_finder
from seriatim.ledger.model import File, Ledger
from seriatim.ports import AppliedVersion, CommitConflictError, DerivedTableName, OutputStore
from seriatim.storage.files import ParquetFileWriter, file_digest, sync_log, write_file

COMMIT_METADATA_KEY = "seriatim"
PROGRESS_FILE = "derived.json"
VACUUM_EVERY = 100
"""Versions of a table between two looks for files that no reader needs."""
READERS_HOURS = 7 * 24
"""A reader that began earlier may find its files gone."""
STORAGE_ERRORS = (DeltaError, OSError, pa.ArrowException)
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
SCHEMAS: dict[DerivedTableName, pa.Schema] = {"gaps": GAPS_SCHEMA, "quarantine": QUARANTINE_SCHEMA}
FindRelease = Callable[[Mapping[str, Any]], Gap | None]


class _NewTableFile(Struct):
    """A file for a table, and what its commit says of it."""

    file: File
    statistics: dict[str, Any]


class DeltaDerived:
    """The derived tables of one stream. Implements `DerivedStore`."""

    def __init__(
        self, root: Path, compression: str = "zstd", output_store: OutputStore | None = None
    ) -> None:
        self.root, self.compression, self.output_store = root, compression, output_store

    def applied_version(self, table: DerivedTableName) -> AppliedVersion:
        """How far a table is: as its last commit of ours says, or further, if nothing had to be put
        since.
        """
        path = self.root / table
        try:
            if not DeltaTable.is_deltatable(str(path)):
                return AppliedVersion()
            found = DeltaTable(path)
            mark = next(
                (
                    commit[COMMIT_METADATA_KEY]
                    for commit in _commit_history(found)
                    if COMMIT_METADATA_KEY in commit
                ),
                None,
            )
        except STORAGE_ERRORS as error:
            raise _unreadable_error(path, error) from error
        sequence, sha256 = (
            (-1, "") if mark is None else (int(mark["sequence"]), str(mark["sha256"]))
        )
        noted = self._read_progress_file()
        if sequence >= 0 and noted.get(table) == found.version() and noted["sequence"] > sequence:
            return AppliedVersion(noted["sequence"], noted["sha256"], found)
        return AppliedVersion(sequence, sha256, found)

    def gaps(self, applied: AppliedVersion) -> list[Gap]:
        """The gaps as of `at`."""
        try:
            rows = applied.token.to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
            gaps = [Gap(start=row.pop("from"), **row) for row in rows]
        except (*STORAGE_ERRORS, TypeError, KeyError) as error:
            raise _unreadable_error(self.root / "gaps", error) from error
        return sorted(gaps, key=lambda gap: gap.opened)

    def put_gaps(self, expected: AppliedVersion, ledger: Ledger, gaps: Sequence[Gap]) -> None:
        """Replace all gaps, in one commit."""
        with _storage_errors_as_conflict():
            rows = pa.RecordBatch.from_pylist([gap.to_row() for gap in gaps], schema=GAPS_SCHEMA)
            part = self._write_table_file("gaps", ledger, [rows])
            self._commit(
                "gaps", AppliedVersion(token=expected.token), ledger, [part] if part else [], []
            )

    def put_quarantine(
        self,
        expected: AppliedVersion,
        ledger: Ledger,
        quarantine_files: Sequence[QuarantineFile],
        released_gaps: Sequence[Gap],
    ) -> None:
        """Add a file for each file of messages set aside; write those anew whose messages were
        released since.
        """
        with _storage_errors_as_conflict():
            find = quarantine_release_finder(released_gaps)
            added = [
                self._write_table_file("quarantine", ledger, self._quarantine_batches(aside, find))
                for aside in quarantine_files
            ]
            stale = (
                self._files_with_new_releases(expected.token, released_gaps, find)
                if expected.sequence >= 0
                else []
            )
            anew = [
                self._write_table_file(
                    "quarantine", ledger, self._batches_with_releases(path, find)
                )
                for path, _ in stale
            ]
            self._commit(
                "quarantine", expected, ledger, [part for part in (*added, *anew) if part], stale
            )

    def note_up_to_date(self, ledger: Ledger) -> None:
        """Remember the entry, and the versions of which it is true."""
        with _storage_errors_as_conflict():
            versions = {
                table: DeltaTable(self.root / table).version()
                for table in get_args(DerivedTableName)
            }
            noted = {"sequence": ledger.sequence, "sha256": ledger.sha256, **versions}
            write_file(self.root / PROGRESS_FILE, json.dumps(noted).encode())

    def _read_progress_file(self) -> dict[str, Any]:
        """What was remembered. Losing it means walking some entries again, and nothing else."""
        try:
            noted = json.loads((self.root / PROGRESS_FILE).read_bytes())
            return {**noted, "sequence": int(noted["sequence"]), "sha256": str(noted["sha256"])}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _write_table_file(
        self, table: DerivedTableName, ledger: Ledger, batches: Iterable[pa.RecordBatch]
    ) -> _NewTableFile | None:
        """A file of a table; None if there are no rows."""
        path = f"{table}/{ledger.sequence}-{uuid.uuid4().hex[:12]}.parquet"
        writer = ParquetFileWriter(self.root, path, SCHEMAS[table], self.compression)
        seen = _ColumnStatistics()
        for batch in batches:
            if batch.num_rows:
                writer.add(batch)
                seen.add(batch)
        file = writer.finish()
        return (
            None
            if file is None
            else _NewTableFile(file, {"numRecords": file.rows, **seen.delta_statistics()})
        )

    def _quarantine_batches(
        self, quarantine_file: QuarantineFile, find_release: FindRelease
    ) -> Iterator[pa.RecordBatch]:
        """Messages set aside, proved by their file's digest, with the entry that kept them."""
        full = self.root / quarantine_file.file.path
        found = file_digest(full) if full.is_file() else "missing"
        if found != quarantine_file.file.digest:
            raise IntegrityError(
                f"{quarantine_file.file.path}: its digest is {found}, the ledger says {quarantine_file.file.digest}",
                cause="the file was changed or lost after it was committed",
                next="restore this file from a backup: it has the messages that were set aside",
            )
        for batch in pq.ParquetFile(full, page_checksum_verification=True).iter_batches():
            kept_by = pa.repeat(pa.scalar(quarantine_file.sequence, pa.int64()), batch.num_rows)
            nobody = [pa.nulls(batch.num_rows, field.type) for field in RELEASE_FIELDS]
            columns = [batch.column(name) for name in QUARANTINE_SCHEMA.names[:-4]]
            whole = pa.RecordBatch.from_arrays(
                [*columns, kept_by, *nobody], schema=QUARANTINE_SCHEMA
            )
            yield _with_releases(whole, find_release)

    def _batches_with_releases(
        self, path: str, find_release: FindRelease
    ) -> Iterator[pa.RecordBatch]:
        """A file of the table, with what is known now of its messages' release."""
        for batch in pq.ParquetFile(self.root / "quarantine" / path).iter_batches():
            yield _with_releases(
                batch.select(QUARANTINE_SCHEMA.names).cast(QUARANTINE_SCHEMA), find_release
            )

    def _files_with_new_releases(
        self, table: DeltaTable, released_gaps: Sequence[Gap], find_release: FindRelease
    ) -> list[tuple[str, int]]:
        """Files with messages that were released since: path and size."""
        files = pa.table(table.get_add_actions(flatten=True)).to_pylist() if released_gaps else []
        maybe = [
            file
            for file in files
            if any(_may_contain_messages_of(file, gap) for gap in released_gaps)
        ]
        return [
            (file["path"], file["size_bytes"])
            for file in maybe
            if self._has_new_release(file["path"], find_release)
        ]

    def _has_new_release(self, path: str, find_release: FindRelease) -> bool:
        columns = ["topic_id", "partition", "session", "offset", "released_by"]
        parquet = pq.ParquetFile(self.root / "quarantine" / path)
        rows = (row for batch in parquet.iter_batches(columns=columns) for row in batch.to_pylist())
        return any(row["released_by"] is None and find_release(row) is not None for row in rows)

    def _commit(
        self,
        table: DerivedTableName,
        expected: AppliedVersion,
        ledger: Ledger,
        new_files: list[_NewTableFile],
        replaced_files: list[tuple[str, int]],
    ) -> None:
        """One commit on exactly the table that was looked at; as a whole where it has reached
        nothing.
        """
        now = int(time.time() * 1000)
        adds = [_add_action(table, part, now) for part in new_files]
        removes = [
            RemoveAction(
                path=path, data_change=True, deletion_timestamp=now, partition_values={}, size=size
            )
            for path, size in replaced_files
        ]
        properties = CommitProperties(
            custom_metadata={
                COMMIT_METADATA_KEY: {"sequence": ledger.sequence, "sha256": ledger.sha256}
            },
            max_commit_retries=0,
            app_transactions=[Transaction(COMMIT_METADATA_KEY, ledger.sequence)],
        )
        path = self.root / table
        if expected.token is None:
            path.mkdir(parents=True, exist_ok=True)
            schema = Schema.from_arrow(SCHEMAS[table])
            create_table_with_add_actions(
                str(path), schema, adds, mode="error", commit_properties=properties
            )
            sync_log(path, 0)
            return
        version = expected.token.version() + 1
        mode = "append" if expected.sequence >= 0 else "overwrite"
        schema = (
            expected.token.schema() if mode == "append" else Schema.from_arrow(SCHEMAS[table])
        )  # columns came since
        expected.token.create_write_transaction(
            [*adds, *removes], mode, schema, commit_properties=properties
        )
        sync_log(path, version)
        if version % VACUUM_EVERY == 0:
            DeltaTable(path).vacuum(READERS_HOURS, dry_run=False, enforce_retention_duration=False)


class _ColumnStatistics:
    """The ends of what a file holds, so that others need not open it."""

    def __init__(self) -> None:
        self.bounds: dict[str, tuple[Any, Any]] = {}
        self.unreleased_count: int | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Look at some rows."""
        if "offset" not in batch.schema.names:
            return
        for name in ("topic_id", "partition", "offset"):
            values = batch.column(name).to_pylist()
            low, high = min(values), max(values)
            before = self.bounds.get(name, (low, high))
            self.bounds[name] = (min(low, before[0]), max(high, before[1]))
        self.unreleased_count = (self.unreleased_count or 0) + batch.column(
            "released_by"
        ).null_count

    def delta_statistics(self) -> dict[str, Any]:
        """As Delta has them."""
        if not self.bounds:
            return {}
        return {
            "minValues": {name: low for name, (low, _) in self.bounds.items()},
            "maxValues": {name: high for name, (_, high) in self.bounds.items()},
            "nullCount": {"released_by": self.unreleased_count},
        }


def _may_contain_messages_of(file: Mapping[str, Any], gap: Gap) -> bool:
    """Whether a file may have messages of a stay in quarantine; one without figures may."""
    if file.get("null_count.released_by") == 0:
        return False
    for name, wanted in (("topic_id", gap.topic_id), ("partition", gap.partition)):
        low, high = file.get(f"min.{name}"), file.get(f"max.{name}")
        if low is not None and high is not None and not low <= wanted <= high:
            return False
    first = file.get("min.offset")
    return first is None or first < (gap.until or 0)


def _with_releases(batch: pa.RecordBatch, find_release: FindRelease) -> pa.RecordBatch:
    """Rows, with how their messages were released, where that is new."""
    names = [field.name for field in RELEASE_FIELDS]
    keys = ["topic_id", "partition", "session", "offset", *names]
    rows = [_with_release_values(row, find_release) for row in batch.select(keys).to_pylist()]
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in RELEASE_FIELDS]
    return pa.RecordBatch.from_arrays(
        [*batch.columns[: -len(names)], *columns], schema=QUARANTINE_SCHEMA
    )


def _with_release_values(row: dict[str, Any], find_release: FindRelease) -> dict[str, Any]:
    gap = find_release(row) if row["released_by"] is None else None
    return row if gap is None else gap.release_columns()


def _add_action(table: DerivedTableName, new_file: _NewTableFile, now_ms: int) -> AddAction:
    return AddAction(
        path=new_file.file.path.removeprefix(f"{table}/"),
        size=new_file.file.size_bytes,
        partition_values={},
        modification_time=now_ms,
        data_change=True,
        stats=json.dumps(new_file.statistics),
    )


def _commit_history(table: DeltaTable) -> Iterator[dict[str, Any]]:
    """Commits, newest first: a few, then all."""
    first = table.history(8)
    yield from first
    if len(first) == 8:
        yield from table.history()[8:]


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
        next=f"move {path} out of the way: it is made of the ledger, and the next run makes it again",
    )
