"""The derived tables as Delta tables below a stream's output path: `gaps` and `quarantine`.

Each commit names the entry that it reaches, is made on exactly the table that was looked at, and adds and removes
files at once: readers see a table as of one entry. `derived.json` only spares walking entries that changed nothing.

Next room: steps/derive.py decides what is put; parquet.py wrote the files of messages set aside.
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

from seriatim.core.errors import IntegrityError, PlatformError
from seriatim.core.gaps import Aside, Gap, release_of
from seriatim.core.ledger import File, Ledger
from seriatim.disk import ParquetFileWriter, file_digest, sync_log, write_file
from seriatim.ports import Conflict, Derived, OutputStore, Reached

KEY = "seriatim"
NOTE = "derived.json"
VACUUM_EVERY = 100
"""Versions of a table between two looks for files that no reader needs."""
READERS_HOURS = 7 * 24
"""A reader that began earlier may find its files gone."""
TROUBLE = (DeltaError, OSError, pa.ArrowException)
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
SCHEMAS: dict[Derived, pa.Schema] = {"gaps": GAPS_SCHEMA, "quarantine": QUARANTINE_SCHEMA}
Find = Callable[[Mapping[str, Any]], Gap | None]


class _Part(Struct):
    """A file for a table, and what its commit says of it."""

    file: File
    stats: dict[str, Any]


class DeltaDerived:
    """The derived tables of one stream. Implements `DerivedStore`."""

    def __init__(self, root: Path, compression: str = "zstd", beside: OutputStore | None = None) -> None:
        self.root, self.compression, self.beside = root, compression, beside

    def reached(self, table: Derived) -> Reached:
        """How far a table is: as its last commit of ours says, or further, if nothing had to be put since."""
        path = self.root / table
        try:
            if not DeltaTable.is_deltatable(str(path)):
                return Reached()
            found = DeltaTable(path)
            mark = next((commit[KEY] for commit in _history(found) if KEY in commit), None)
        except TROUBLE as error:
            raise _unreadable(path, error) from error
        sequence, sha256 = (-1, "") if mark is None else (int(mark["sequence"]), str(mark["sha256"]))
        noted = self._noted()
        if sequence >= 0 and noted.get(table) == found.version() and noted["sequence"] > sequence:
            return Reached(noted["sequence"], noted["sha256"], found)
        return Reached(sequence, sha256, found)

    def gaps(self, at: Reached) -> list[Gap]:
        """The gaps as of `at`."""
        try:
            rows = at.token.to_pyarrow_dataset().to_table(use_threads=False).to_pylist()
            gaps = [Gap(start=row.pop("from"), **row) for row in rows]
        except (*TROUBLE, TypeError, KeyError) as error:
            raise _unreadable(self.root / "gaps", error) from error
        return sorted(gaps, key=lambda gap: gap.opened)

    def put_gaps(self, at: Reached, to: Ledger, gaps: Sequence[Gap]) -> None:
        """Replace all gaps, in one commit."""
        with _told():
            rows = pa.RecordBatch.from_pylist([gap.row() for gap in gaps], schema=GAPS_SCHEMA)
            part = self._write("gaps", to, [rows])
            self._commit("gaps", Reached(token=at.token), to, [part] if part else [], [])

    def put_quarantine(self, at: Reached, to: Ledger, asides: Sequence[Aside], released: Sequence[Gap]) -> None:
        """Add a file for each file of messages set aside; write those anew whose messages were released since."""
        with _told():
            find = release_of(released)
            added = [self._write("quarantine", to, self._kept(aside, find)) for aside in asides]
            stale = self._stale(at.token, released, find) if at.sequence >= 0 else []
            anew = [self._write("quarantine", to, self._filled(path, find)) for path, _ in stale]
            self._commit("quarantine", at, to, [part for part in (*added, *anew) if part], stale)

    def note(self, to: Ledger) -> None:
        """Remember the entry, and the versions of which it is true."""
        with _told():
            versions = {table: DeltaTable(self.root / table).version() for table in get_args(Derived)}
            noted = {"sequence": to.sequence, "sha256": to.sha256, **versions}
            write_file(self.root / NOTE, json.dumps(noted).encode())

    def _noted(self) -> dict[str, Any]:
        """What was remembered. Losing it means walking some entries again, and nothing else."""
        try:
            noted = json.loads((self.root / NOTE).read_bytes())
            return {**noted, "sequence": int(noted["sequence"]), "sha256": str(noted["sha256"])}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _write(self, table: Derived, to: Ledger, batches: Iterable[pa.RecordBatch]) -> _Part | None:
        """A file of a table; None if there are no rows."""
        path = f"{table}/{to.sequence}-{uuid.uuid4().hex[:12]}.parquet"
        writer = ParquetFileWriter(self.root, path, SCHEMAS[table], self.compression)
        seen = _Seen()
        for batch in batches:
            if batch.num_rows:
                writer.add(batch)
                seen.add(batch)
        file = writer.finish()
        return None if file is None else _Part(file, {"numRecords": file.rows, **seen.stats()})

    def _kept(self, aside: Aside, find: Find) -> Iterator[pa.RecordBatch]:
        """Messages set aside, proved by their file's digest, with the entry that kept them."""
        full = self.root / aside.file.path
        found = file_digest(full) if full.is_file() else "missing"
        if found != aside.file.digest:
            raise IntegrityError(
                f"{aside.file.path}: its digest is {found}, the ledger says {aside.file.digest}",
                cause="the file was changed or lost after it was committed",
                next="restore this file from a backup: it has the messages that were set aside",
            )
        for batch in pq.ParquetFile(full, page_checksum_verification=True).iter_batches():
            kept_by = pa.repeat(pa.scalar(aside.sequence, pa.int64()), batch.num_rows)
            nobody = [pa.nulls(batch.num_rows, field.type) for field in RELEASE_FIELDS]
            columns = [batch.column(name) for name in QUARANTINE_SCHEMA.names[:-4]]
            whole = pa.RecordBatch.from_arrays([*columns, kept_by, *nobody], schema=QUARANTINE_SCHEMA)
            yield _with_releases(whole, find)

    def _filled(self, path: str, find: Find) -> Iterator[pa.RecordBatch]:
        """A file of the table, with what is known now of its messages' release."""
        for batch in pq.ParquetFile(self.root / "quarantine" / path).iter_batches():
            yield _with_releases(batch.select(QUARANTINE_SCHEMA.names).cast(QUARANTINE_SCHEMA), find)

    def _stale(self, table: DeltaTable, released: Sequence[Gap], find: Find) -> list[tuple[str, int]]:
        """Files with messages that were released since: path and size."""
        files = pa.table(table.get_add_actions(flatten=True)).to_pylist() if released else []
        maybe = [file for file in files if any(_may_hold(file, gap) for gap in released)]
        return [(file["path"], file["size_bytes"]) for file in maybe if self._holds(file["path"], find)]

    def _holds(self, path: str, find: Find) -> bool:
        columns = ["topic_id", "partition", "session", "offset", "released_by"]
        parquet = pq.ParquetFile(self.root / "quarantine" / path)
        rows = (row for batch in parquet.iter_batches(columns=columns) for row in batch.to_pylist())
        return any(row["released_by"] is None and find(row) is not None for row in rows)

    def _commit(
        self, table: Derived, at: Reached, to: Ledger, parts: list[_Part], stale: list[tuple[str, int]]
    ) -> None:
        """One commit on exactly the table that was looked at; as a whole where it has reached nothing."""
        now = int(time.time() * 1000)
        adds = [_add(table, part, now) for part in parts]
        removes = [
            RemoveAction(path=path, data_change=True, deletion_timestamp=now, partition_values={}, size=size)
            for path, size in stale
        ]
        properties = CommitProperties(
            custom_metadata={KEY: {"sequence": to.sequence, "sha256": to.sha256}},
            max_commit_retries=0,
            app_transactions=[Transaction(KEY, to.sequence)],
        )
        path = self.root / table
        if at.token is None:
            path.mkdir(parents=True, exist_ok=True)
            schema = Schema.from_arrow(SCHEMAS[table])
            create_table_with_add_actions(str(path), schema, adds, mode="error", commit_properties=properties)
            sync_log(path, 0)
            return
        version = at.token.version() + 1
        mode = "append" if at.sequence >= 0 else "overwrite"
        schema = at.token.schema() if mode == "append" else Schema.from_arrow(SCHEMAS[table])  # columns came since
        at.token.create_write_transaction([*adds, *removes], mode, schema, commit_properties=properties)
        sync_log(path, version)
        if version % VACUUM_EVERY == 0:
            DeltaTable(path).vacuum(READERS_HOURS, dry_run=False, enforce_retention_duration=False)


class _Seen:
    """The ends of what a file holds, so that others need not open it."""

    def __init__(self) -> None:
        self.ends: dict[str, tuple[Any, Any]] = {}
        self.unreleased: int | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Look at some rows."""
        if "offset" not in batch.schema.names:
            return
        for name in ("topic_id", "partition", "offset"):
            values = batch.column(name).to_pylist()
            low, high = min(values), max(values)
            before = self.ends.get(name, (low, high))
            self.ends[name] = (min(low, before[0]), max(high, before[1]))
        self.unreleased = (self.unreleased or 0) + batch.column("released_by").null_count

    def stats(self) -> dict[str, Any]:
        """As Delta has them."""
        if not self.ends:
            return {}
        return {
            "minValues": {name: low for name, (low, _) in self.ends.items()},
            "maxValues": {name: high for name, (_, high) in self.ends.items()},
            "nullCount": {"released_by": self.unreleased},
        }


def _may_hold(file: Mapping[str, Any], gap: Gap) -> bool:
    """Whether a file may have messages of a stay in quarantine; one without figures may."""
    if file.get("null_count.released_by") == 0:
        return False
    for name, wanted in (("topic_id", gap.topic_id), ("partition", gap.partition)):
        low, high = file.get(f"min.{name}"), file.get(f"max.{name}")
        if low is not None and high is not None and not low <= wanted <= high:
            return False
    first = file.get("min.offset")
    return first is None or first < (gap.until or 0)


def _with_releases(batch: pa.RecordBatch, find: Find) -> pa.RecordBatch:
    """Rows, with how their messages were released, where that is new."""
    names = [field.name for field in RELEASE_FIELDS]
    keys = ["topic_id", "partition", "session", "offset", *names]
    rows = [_released(row, find) for row in batch.select(keys).to_pylist()]
    columns = [pa.array([row[field.name] for row in rows], field.type) for field in RELEASE_FIELDS]
    return pa.RecordBatch.from_arrays([*batch.columns[: -len(names)], *columns], schema=QUARANTINE_SCHEMA)


def _released(row: dict[str, Any], find: Find) -> dict[str, Any]:
    gap = find(row) if row["released_by"] is None else None
    return row if gap is None else gap.release()


def _add(table: Derived, part: _Part, now: int) -> AddAction:
    return AddAction(
        path=part.file.path.removeprefix(f"{table}/"),
        size=part.file.bytes,
        partition_values={},
        modification_time=now,
        data_change=True,
        stats=json.dumps(part.stats),
    )


def _history(table: DeltaTable) -> Iterator[dict[str, Any]]:
    """Commits, newest first: a few, then all."""
    first = table.history(8)
    yield from first
    if len(first) == 8:
        yield from table.history()[8:]


@contextmanager
def _told() -> Iterator[None]:
    """Trouble while writing, as an answer: the step decides whether to try again."""
    try:
        yield
    except TROUBLE as error:
        raise Conflict(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _unreadable(path: Path, error: Exception) -> PlatformError:
    return PlatformError(
        f"the table {path.name} cannot be read",
        cause=_first_line(error)[:400],
        next=f"move {path} out of the way: it is made of the ledger, and the next run makes it again",
    )
