"""The table `current` as a Delta table below a stream's output path: one row for each key that a session has now.

A data file holds one part of one topic-partition, sorted by session and key, under a name that says so: only parts with
a changed row are written anew. Each commit names the entry that it reaches and is made on exactly the table that was
looked at. Nothing depends on the table: it is made of the record files alone.

Next room: steps/publish.py decides what is read; core/current.py has the rules; seriatim/rows.py reads records.
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

from seriatim.core.crash import crash_point
from seriatim.core.current import Catch, Keyed, Lives, Part, Standing, Written, tiles
from seriatim.core.errors import PlatformError, ensure
from seriatim.core.ledger import File, Ledger
from seriatim.core.offsets import Partition
from seriatim.disk import ROWS_PER_GROUP, ParquetFileWriter, sync_log
from seriatim.ports import Conflict
from seriatim.rows import Merging, hashes

KEY = "seriatim"
FORMAT = 1
PART_ROWS_MAX = 500_000
"""A part with more rows falls into two: what one update rewrites stays bounded."""
DEPTH_MAX = 16
"""One session with very many rows does not fall apart."""
KEEP_HOURS_MAX = 24
"""Old files are whole copies of parts: a publish every quarter of an hour would keep 2,880 of them in a month."""
VACUUM_EVERY = 20
"""Commits between two looks for files that no reader needs."""
NAME = re.compile(r"(?P<place>[^/]+/\d+)/\d+-(?P<depth>\d+)-(?P<value>\d+)-[0-9a-f]{12}\.parquet")
NAME_MAX = 128
"""Characters of a session's name in the statistics."""
TABLE_SETTINGS: Mapping[str, str | None] = {"delta.dataSkippingStatsColumns": "topic,partition,offset,session"}
"""delta-rs drops rows under a filter where statistics lack a column that it expects."""
HARMLESS = ("VACUUM START", "VACUUM END")
TROUBLE = (DeltaError, OSError, pa.ArrowException)


class Mark(Struct, frozen=True, kw_only=True):
    """What a commit says of the table that it makes."""

    sequence: int
    sha256: str
    key: tuple[str, ...]
    lives: Lives = {}
    format: int = FORMAT


class Stored(Struct, frozen=True):
    """A file of the table."""

    path: str
    bytes: int


class Put(Struct):
    """Files that come and go, until the commit."""

    adds: list[AddAction] = []
    stale: list[Stored] = []
    rows: int = 0


Parts = dict[str, dict[Part, Stored]]
"""The table's files by partition and part."""


class DeltaCurrent:
    """The table `current` of one stream. Implements `CurrentStore`."""

    part_rows_max = PART_ROWS_MAX

    def __init__(
        self, root: Path, stream: str, schema: pa.Schema, keyed: Keyed, compression: str = "zstd", keep_days: int = 1
    ) -> None:
        self.root, self.keyed, self.compression = root, keyed, compression
        self.keep_hours = max(1, min(24 * keep_days, KEEP_HOURS_MAX))
        self.merging = Merging(root, stream, schema, keyed)
        self.path = root / "current"

    def reached(self) -> Standing:
        """As the last commit says; not to be relied on if somebody else changed it, or it has another key."""
        try:
            if not DeltaTable.is_deltatable(str(self.path)):
                return Standing()
            table = DeltaTable(self.path)
            mark = _mark(table)
        except (*TROUBLE, msgspec.MsgspecError) as error:
            raise _unreadable(self.path, error) from error
        if mark is None or (mark.key, mark.format) != (self.keyed.key, FORMAT) or self._other_columns(table):
            return Standing(token=table)
        return Standing(mark.sequence, mark.sha256, mark.lives, table)

    def put(
        self, at: Standing, to: Ledger, lives: Lives, catches: Sequence[Catch], progress: Callable[[int], None]
    ) -> Written:
        """Write the touched parts anew, then commit. Trouble with writing is an answer: the step tries again."""
        with _told():
            parts, strange = _parts(at.token) if at.token is not None else ({}, [])
        if at.sequence < 0:
            strange += [stored for mine in parts.values() for stored in mine.values()]
            parts = {}
        ensure(at.sequence < 0 or not strange, "the files of current have names of ours")
        done, read = Put(stale=strange), 0
        for catch in catches:
            rows = self.merging.changes(catch)
            with _told():
                self._partition(to, catch, parts.get(str(catch.partition), {}), rows, done)
            crash_point("current-half")
            progress(read := read + catch.reads())
        crash_point("current-written")
        with _told():
            self._commit(at, Mark(sequence=to.sequence, sha256=to.sha256, key=self.keyed.key, lives=lives), done)
        return Written(rows=done.rows, files=len(done.adds), removed=len(done.stale))

    def _partition(self, to: Ledger, catch: Catch, there: Mapping[Part, Stored], changes: pa.Table, done: Put) -> None:
        """Bring one partition up: the parts that have a changed row, or all of them where it is made anew."""
        if catch.whole:
            done.stale += there.values()
            there = {}
        for part, mine in _split(changes, tiles(set(there))):
            if not mine.num_rows:
                continue
            stored = there.get(part)
            before = self._rows(stored) if stored else None
            if stored:
                done.stale.append(stored)
            self._write(to, catch.partition, part, self.merging.merged(before, mine, catch.partition), done)

    def _rows(self, stored: Stored) -> pa.Table:
        try:
            return pq.ParquetFile(self.path / stored.path, page_checksum_verification=True).read()
        except TROUBLE as error:
            raise _unreadable(self.path, error) from error

    def _write(self, to: Ledger, partition: Partition, part: Part, rows: pa.Table, done: Put) -> None:
        """A part as a file, or as two parts where it has grown too large. Without rows there is no file."""
        if rows.num_rows > self.part_rows_max and part.depth < DEPTH_MAX:
            for half, mine in _split(rows, part.halves()):
                self._write(to, partition, half, mine, done)
            return
        name = f"{to.sequence}-{part.depth}-{part.value}-{uuid.uuid4().hex[:12]}.parquet"
        path = f"current/{partition}/{name}"
        writer = ParquetFileWriter(self.root, path, self.merging.schema, self.compression)
        for batch in rows.combine_chunks().to_batches(max_chunksize=ROWS_PER_GROUP):
            writer.add(batch)
        file = writer.finish()
        if file is not None:
            done.adds.append(_add(file, partition, rows))
            done.rows += file.rows

    def _commit(self, at: Standing, mark: Mark, done: Put) -> None:
        """One commit on exactly the table that was looked at."""
        now = int(time.time() * 1000)
        removes = [
            RemoveAction(path=one.path, data_change=True, deletion_timestamp=now, partition_values={}, size=one.bytes)
            for one in done.stale
        ]
        properties = CommitProperties(
            custom_metadata={KEY: msgspec.to_builtins(mark)},
            max_commit_retries=0,
            app_transactions=[Transaction(KEY, mark.sequence)],
        )
        if at.token is None:
            self.path.mkdir(parents=True, exist_ok=True)
            schema = Schema.from_arrow(self.merging.schema)
            create_table_with_add_actions(
                str(self.path),
                schema,
                done.adds,
                mode="error",
                configuration=TABLE_SETTINGS,
                commit_properties=properties,
            )
            sync_log(self.path, 0)
            return
        version = at.token.version() + 1
        self._refuse_other_columns(at.token)
        at.token.create_write_transaction(
            [*done.adds, *removes], "append", at.token.schema(), commit_properties=properties
        )
        sync_log(self.path, version)
        if version % VACUUM_EVERY == 0:
            self.vacuum()

    def vacuum(self) -> list[str]:
        """Delete files that left the table, or that no commit ever named, longer ago than readers may take."""
        return DeltaTable(self.path).vacuum(self.keep_hours, dry_run=False, enforce_retention_duration=False, full=True)

    def _other_columns(self, table: DeltaTable) -> bool:
        found = {column.name: _plain(column.type) for column in pa.schema(table.schema().to_arrow())}
        return found != {column.name: _plain(column.type) for column in self.merging.schema}

    def _refuse_other_columns(self, table: DeltaTable) -> None:
        if self._other_columns(table):
            raise PlatformError(
                f"the table {self.path} has other columns than the machine's records",
                next=f"move {self.path} out of the way and publish again: it is made of the records",
            )


def published(root: Path) -> int | None:
    """The entry as of which the table is; None: it is not there, or not to be relied on."""
    path = root / "current"
    try:
        mark = _mark(DeltaTable(path)) if DeltaTable.is_deltatable(str(path)) else None
    except (*TROUBLE, msgspec.MsgspecError) as error:
        raise _unreadable(path, error) from error
    return mark.sequence if mark else None


def _mark(table: DeltaTable) -> Mark | None:
    """What our last commit says; None if somebody else's came after it."""
    for commit in _history(table):
        if KEY in commit:
            return msgspec.convert(commit[KEY], Mark)
        if commit.get("operation") not in HARMLESS:
            return None
    return None


def _history(table: DeltaTable) -> Iterator[dict[str, Any]]:
    """Commits, newest first: a few, then all."""
    first = table.history(8)
    yield from first
    if len(first) == 8:
        yield from table.history()[8:]


def _parts(table: DeltaTable) -> tuple[Parts, list[Stored]]:
    """The table's files by partition and part, and those whose names are not ours."""
    found: Parts = {}
    strange: list[Stored] = []
    for add in pa.table(table.get_add_actions()).to_pylist():
        stored = Stored(add["path"], add["size_bytes"])
        if match := NAME.fullmatch(stored.path):
            found.setdefault(match["place"], {})[Part(int(match["depth"]), int(match["value"]))] = stored
        else:
            strange.append(stored)
    return found, strange


def _split(rows: pa.Table, parts: Sequence[Part]) -> Iterator[tuple[Part, pa.Table]]:
    """Rows by the part that has their session."""
    if len(parts) == 1:
        yield parts[0], rows
        return
    numbers = hashes(rows.column("session"))
    for part in parts:
        yield part, rows.filter(pa.array(numbers & ((1 << part.depth) - 1) == part.value))


def _add(file: File, partition: Partition, rows: pa.Table) -> AddAction:
    offsets, sessions = (pc.min_max(rows.column(name)).as_py() for name in ("offset", "session"))
    ends = {
        end: {"topic": partition.topic, "partition": partition.number, "offset": offsets[end], "session": sessions[end]}
        for end in ("min", "max")
    }
    ends["min"]["session"] = sessions["min"][:NAME_MAX]
    if len(sessions["max"]) > NAME_MAX:
        ends["max"]["session"] = sessions["max"][:NAME_MAX] + "\U0010ffff"
    stats = {"numRecords": file.rows, "minValues": ends["min"], "maxValues": ends["max"]}
    return AddAction(
        path=file.path.removeprefix("current/"),
        size=file.bytes,
        partition_values={},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=json.dumps(stats),
    )


def _plain(kind: pa.DataType) -> str:
    return str(kind).replace("large_", "").replace("_view", "").replace("element", "item")


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
        next=f"move {path} out of the way and publish again: it is made of the records",
    )
