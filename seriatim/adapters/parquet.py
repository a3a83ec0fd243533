"""Parquet: record, state and quarantine files, and Arrow batches as stretches of messages.

Works inside a task, where the messages are. Pages carry checksums, whole files a digest; files are on
disk (fsync) before anybody is told their names. A state file is checked against its digest before use.

Next room: delta.py commits what was written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from msgspec.structs import replace

from seriatim.core.crash import crash_point
from seriatim.core.errors import IntegrityError, ensure
from seriatim.core.fold import Folded, Kept, Session
from seriatim.core.ledger import File
from seriatim.core.message import Header, Stretch, session_name
from seriatim.core.offsets import Partition
from seriatim.core.table import DECIMAL
from seriatim.disk import file_digest, file_names, sync
from seriatim.ports import UnfitRecords

ROWS_PER_GROUP = 131_072
STATE_ROWS_PER_GROUP = 4_096
UTC_MICROSECONDS = pa.timestamp("us", "UTC")
ARROW_TYPES = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "timestamp": UTC_MICROSECONDS,
    "date": pa.date32(),
    "binary": pa.binary(),
}
OWN_FIELDS = [
    pa.field("topic", pa.string()),
    pa.field("topic_id", pa.string()),
    pa.field("partition", pa.int32()),
    pa.field("offset", pa.int64()),
    pa.field("index", pa.int32()),
    pa.field("source_offset", pa.int64()),
    pa.field("timestamp", UTC_MICROSECONDS),
    pa.field("session", pa.string()),
    pa.field("sequence", pa.int64()),
]
STATE_SCHEMA = pa.schema(
    [
        pa.field("session", pa.string()),
        pa.field("state", pa.binary()),
        pa.field("state_version", pa.int32()),
        pa.field("sequence", pa.int64()),
        pa.field("anchor", pa.int64()),
        pa.field("buffer", pa.binary()),
        pa.field("first_offset", pa.int64()),
        pa.field("last_offset", pa.int64()),
        pa.field("snapshot_offset", pa.int64()),
        pa.field("timestamp", pa.int64()),
        pa.field("status", pa.string()),
        pa.field("finding", pa.string()),
        pa.field("finding_offset", pa.int64()),
    ]
)
KEPT_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("topic_id", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", UTC_MICROSECONDS),
        pa.field("session", pa.string()),
        pa.field("finding", pa.string()),
        pa.field("cause", pa.string()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)


def arrow_type(name: str) -> pa.DataType:
    """The Arrow type behind a column type's name."""
    if name.startswith("list<"):
        return pa.list_(arrow_type(name[5:-1]))
    if match := DECIMAL.fullmatch(name):
        return pa.decimal128(int(match[1]), int(match[2]))
    return ARROW_TYPES[name]


def record_schema(columns: Mapping[str, str]) -> pa.Schema:
    """The schema of a records table: what every record has, then the machine's own columns."""
    return pa.schema([*OWN_FIELDS, *(pa.field(name, arrow_type(kind)) for name, kind in columns.items())])


class ArrowStretch(Stretch):
    """Messages as they came from Spark, columns taken out when they are needed."""

    def __init__(self, batch: pa.RecordBatch, start: int) -> None:
        self.batch, self.start = batch, start

    def __len__(self) -> int:
        return self.batch.num_rows

    def until(self, count: int) -> ArrowStretch:
        """The first `count` messages."""
        return ArrowStretch(self.batch.slice(0, count), self.start)

    def names(self) -> list[str | None]:
        """Sessions by Kafka key, each name made once."""
        keys = self.batch.column("key").dictionary_encode()
        known = [session_name(key) for key in keys.dictionary.to_pylist()]
        if keys.null_count == 0:
            return [known[i] for i in keys.indices.to_numpy().tolist()]
        return [None if i is None else known[i] for i in keys.indices.to_pylist()]

    @cached_property
    def timestamps(self) -> Sequence[int]:  # type: ignore[override]
        """Milliseconds since 1970."""
        return self.microseconds // 1000  # type: ignore[return-value]

    @cached_property
    def microseconds(self) -> Any:
        """As Spark gives them."""
        return self.batch.column("timestamp").cast(pa.int64()).to_numpy(zero_copy_only=False)

    @cached_property
    def keys(self) -> Sequence[bytes | None]:  # type: ignore[override]
        """Kafka's keys."""
        return self.batch.column("key").to_pylist()

    @cached_property
    def values(self) -> Sequence[bytes | None]:  # type: ignore[override]
        """Kafka's values."""
        return self.batch.column("value").to_pylist()

    @cached_property
    def headers(self) -> Sequence[Sequence[Header]] | None:  # type: ignore[override]
        """Kafka's headers, if they were asked for."""
        if "headers" not in self.batch.schema.names:
            return None
        rows = self.batch.column("headers").to_pylist()
        return [[(header["key"], header["value"]) for header in row or ()] for row in rows]


def stretches(batches: Iterable[pa.RecordBatch]) -> Iterator[Stretch]:
    """Batches of one partition in order, cut wherever an offset is missing."""
    for batch in batches:
        offsets = batch.column("offset").to_numpy(zero_copy_only=False)
        if len(offsets) == 0:
            continue
        steps = np.diff(offsets)
        ensure(bool((steps > 0).all()), "offsets rise", first=int(offsets[0]), last=int(offsets[-1]))
        edges = [0, *(np.flatnonzero(steps != 1) + 1).tolist(), len(offsets)]
        for begin, end in zip(edges, edges[1:], strict=False):
            yield ArrowStretch(batch.slice(begin, end - begin), int(offsets[begin]))


class ArrowDigests:
    """Digests over whole Arrow buffers, so that they do not depend on how batches were cut."""

    def __init__(self) -> None:
        self._offsets = xxhash.xxh3_128()
        self._columns = {name: (xxhash.xxh3_128(), xxhash.xxh3_128()) for name in ("key", "value")}

    def update(self, stretch: Stretch) -> None:
        """Take in the messages of a stretch."""
        ensure(isinstance(stretch, ArrowStretch), "an Arrow digest is made of Arrow stretches")
        assert isinstance(stretch, ArrowStretch)
        offsets = np.arange(stretch.start, stretch.start + len(stretch), dtype="<i8")
        self._offsets.update(offsets)
        for name, (content, lengths) in self._columns.items():
            data, sizes = _buffers(stretch.batch.column(name))
            content.update(data)
            lengths.update(sizes)

    def finish(self) -> dict[str, str]:
        """The digests as hexadecimal text."""
        both = {
            f"{name}s": xxhash.xxh3_128_hexdigest(content.digest() + lengths.digest())
            for name, (content, lengths) in self._columns.items()
        }
        return {"offsets": self._offsets.hexdigest(), **both}


def _buffers(column: pa.Array) -> tuple[Any, Any]:
    """A binary column's bytes and its lengths, -1 for null."""
    count = len(column)
    if count == 0:
        return b"", b""
    wide = pa.types.is_large_binary(column.type)
    _, starts, data = column.buffers()
    edges = np.frombuffer(starts, dtype="<i8" if wide else "<i4")[column.offset : column.offset + count + 1]
    sizes = np.diff(edges).astype("<i4")
    if column.null_count:
        sizes[column.is_null().to_numpy(zero_copy_only=False)] = -1
    content = memoryview(data)[int(edges[0]) : int(edges[-1])] if data is not None else b""
    return content, sizes


class _FileWriter:
    """A Parquet file being written: opened with the first rows, row groups gathered to a good size."""

    def __init__(self, root: Path, path: str, schema: pa.Schema, compression: str) -> None:
        self.root, self.path, self.schema = root, path, schema
        self.compression = "NONE" if compression == "none" else compression
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._writer: pq.ParquetWriter | None = None
        self.rows = 0

    def add(self, batch: pa.RecordBatch, rows_per_group: int = ROWS_PER_GROUP) -> None:
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        self.rows += batch.num_rows
        if self._waiting_rows >= rows_per_group:
            self._flush()

    def _flush(self) -> None:
        if self._writer is None:
            full = self.root / self.path
            full.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(
                full, self.schema, compression=self.compression, write_page_checksum=True
            )
            crash_point("record-file-open")
        self._writer.write_table(pa.Table.from_batches(self._waiting, self.schema))
        crash_point("record-file-half")
        self._waiting, self._waiting_rows = [], 0

    def finish(self) -> File | None:
        if self._waiting_rows:
            self._flush()
        if self._writer is None:
            return None
        self._writer.close()
        full = self.root / self.path
        sync(full)
        return File(path=self.path, bytes=full.stat().st_size, rows=self.rows, digest=file_digest(full))


class ParquetRecords:
    """Record and quarantine files of one stream, below its output path."""

    def __init__(
        self, root: Path, columns: Mapping[str, str], compression: str, leave_out: Sequence[str]
    ) -> None:
        self.root, self.compression = root, compression
        whole = record_schema(columns)
        self.schema = pa.schema([column for column in whole if column.name not in leave_out])
        self.own = [column.name for column in OWN_FIELDS if column.name not in leave_out]

    def records(self, partition: Partition, topic_id: str, stem: str) -> _Records:
        """A record file of one partition and slice."""
        path = f"records/{partition}/{stem}.parquet"
        return _Records(
            self, partition, topic_id, _FileWriter(self.root, path, self.schema, self.compression)
        )

    def kept(self, partition: Partition, topic_id: str, stem: str) -> _KeptMessages:
        """A file of messages set aside."""
        path = f"quarantine/{partition}/{stem}.parquet"
        return _KeptMessages(partition, topic_id, _FileWriter(self.root, path, KEPT_SCHEMA, self.compression))

    def sweep(self, partition: Partition, stem_prefix: str, keep: set[str]) -> list[str]:
        """Delete files of other attempts at what is committed now."""
        swept = []
        for room in ("records", "state", "quarantine"):
            folder = self.root / room / str(partition)
            names = [name for name in file_names(folder) if name.startswith(stem_prefix)]
            for path in sorted({f"{room}/{partition}/{name}" for name in names} - keep):
                (self.root / path).unlink(missing_ok=True)
                swept.append(path)
        return swept


class _Records:
    """A record file: what every record has comes from the message, the rest from the machine."""

    def __init__(self, store: ParquetRecords, partition: Partition, topic_id: str, file: _FileWriter) -> None:
        self.store, self.partition, self.topic_id, self.file = store, partition, topic_id, file
        self.first = self.last = -1

    def write(self, stretch: Stretch, folded: Folded) -> None:
        """Add the records of a stretch."""
        if not folded.rows:
            return
        own = self._own_columns(stretch, folded)
        kinds = [column.type for column in self.store.schema][len(own) :]
        try:
            columns = [
                pa.array(values, kind)
                for values, kind in zip(zip(*folded.rows, strict=True), kinds, strict=True)
            ]
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            if rows := _unfit_rows(folded.rows, kinds):
                raise UnfitRecords(rows) from None
            raise
        self.file.add(pa.RecordBatch.from_arrays([*own, *columns], schema=self.store.schema))
        self.first = stretch.start + folded.positions[0] if self.first < 0 else self.first
        self.last = stretch.start + folded.positions[-1]

    def _own_columns(self, stretch: Stretch, folded: Folded) -> list[pa.Array]:
        positions = np.asarray(folded.positions, dtype=np.int64)
        offsets = pa.array(positions + stretch.start)
        count = len(positions)
        times = getattr(stretch, "microseconds", None)
        times = np.asarray(stretch.timestamps, dtype=np.int64) * 1000 if times is None else times
        made = {
            "topic": lambda: pa.repeat(self.partition.topic, count),
            "topic_id": lambda: pa.repeat(self.topic_id, count),
            "partition": lambda: pa.repeat(pa.scalar(self.partition.number, pa.int32()), count),
            "offset": lambda: offsets,
            "index": lambda: pa.array(folded.indexes, pa.int32()),
            "source_offset": lambda: offsets,
            "timestamp": lambda: pa.array(times[positions], UTC_MICROSECONDS),
            "session": lambda: pa.array(folded.sessions, pa.string()),
            "sequence": lambda: pa.array(folded.sequences, pa.int64()),
        }
        return [made[name]() for name in self.store.own]

    def close(self) -> File | None:
        """Finish the file."""
        file = self.file.finish()
        return None if file is None else replace(file, first=self.first, last=self.last)


def _unfit_rows(rows: Sequence[tuple[Any, ...]], kinds: Sequence[pa.DataType]) -> list[int]:
    unfit = []
    for number, row in enumerate(rows):
        try:
            for value, kind in zip(row, kinds, strict=True):
                pa.array([value], kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            unfit.append(number)
    return unfit


class _KeptMessages:
    """A file of messages set aside, whole, so that they outlive Kafka's retention."""

    def __init__(self, partition: Partition, topic_id: str, file: _FileWriter) -> None:
        self.partition, self.topic_id, self.file = partition, topic_id, file

    def write(self, stretch: Stretch, kept: list[Kept]) -> None:
        """Add messages of a stretch."""
        rows = [
            {
                "topic": self.partition.topic,
                "topic_id": self.topic_id,
                "partition": self.partition.number,
                "offset": stretch.start + message.position,
                "timestamp": int(stretch.timestamps[message.position]) * 1000,
                "session": message.session,
                "finding": message.finding,
                "cause": message.cause,
                "key": stretch.keys[message.position],
                "value": stretch.values[message.position],
                "headers": _headers(stretch, message.position),
            }
            for message in kept
        ]
        self.file.add(pa.RecordBatch.from_pylist(rows, schema=KEPT_SCHEMA))

    def close(self) -> File | None:
        """Finish the file."""
        return self.file.finish()


def _headers(stretch: Stretch, position: int) -> list[dict[str, Any]] | None:
    if stretch.headers is None:
        return None
    return [{"key": key, "value": value} for key, value in stretch.headers[position]]


class ParquetState:
    """State files: one row per session, newest file last, opened when first needed."""

    def __init__(self, root: Path, compression: str = "zstd") -> None:
        self.root, self.compression = root, compression
        self._open: dict[str, _StateFile] = {}

    def load(self, files: Iterable[File], names: Iterable[str]) -> dict[str, Session]:
        """The sessions of these names, each from the newest file that has it."""
        wanted, found = set(names), {}
        for file in reversed(tuple(files)):
            if not wanted:
                break
            for name, session in self._file(file).sessions(wanted).items():
                found[name] = session
                wanted.discard(name)
        return found

    def save(
        self, partition: Partition, stem: str, sessions: Mapping[str, Session], merge: Iterable[File]
    ) -> File:
        """Write sessions, over those of the files to be merged, row group by row group."""
        path = f"state/{partition}/{stem}.parquet"
        writer = _FileWriter(self.root, path, STATE_SCHEMA, self.compression)
        rows = [_state_row(name, session) for name, session in sessions.items()]
        for begin in range(0, len(rows), STATE_ROWS_PER_GROUP):
            part = rows[begin : begin + STATE_ROWS_PER_GROUP]
            writer.add(pa.RecordBatch.from_pylist(part, schema=STATE_SCHEMA), STATE_ROWS_PER_GROUP)
        for batch in self._unseen(tuple(merge), set(sessions)):
            writer.add(batch, STATE_ROWS_PER_GROUP)
        file = writer.finish()
        ensure(file is not None, "state is saved only where there is some", path=path)
        assert file is not None
        return file

    def _unseen(self, files: Sequence[File], seen: set[str]) -> Iterator[pa.RecordBatch]:
        """Rows of files, newest first, without sessions that came before."""
        for file in reversed(files):
            met: set[str] = set()
            for batch in self._file(file).batches():
                names = batch.column("session").to_pylist()
                met.update(names)
                yield batch.filter(pa.array([name not in seen for name in names], pa.bool_()))
            seen |= met

    def quarantined(self, files: Iterable[File]) -> dict[str, Session]:
        """Sessions in quarantine."""
        return {name: session for name, session in self.everything(files) if session.finding is not None}

    def everything(self, files: Iterable[File]) -> Iterator[tuple[str, Session]]:
        """Every session, each once."""
        for batch in self._unseen(tuple(files), set()):
            for row in batch.to_pylist():
                yield row["session"], _session(row)

    def _file(self, file: File) -> _StateFile:
        if file.path not in self._open:
            self._open[file.path] = _StateFile(self.root, file)
        return self._open[file.path]


class _StateFile:
    """One state file, proved by its digest when opened."""

    def __init__(self, root: Path, file: File) -> None:
        full = root / file.path
        try:
            found = file_digest(full)
        except FileNotFoundError:
            raise _damaged(file, "it is missing") from None
        if found != file.digest:
            raise _damaged(file, f"its digest is {found}, the ledger says {file.digest}")
        self._parquet = pq.ParquetFile(full, memory_map=True, page_checksum_verification=True)
        self._names = self._parquet.read(columns=["session"]).column("session").combine_chunks()
        groups = [self._parquet.metadata.row_group(i).num_rows for i in range(self._parquet.num_row_groups)]
        self._edges = np.cumsum([0, *groups])

    def sessions(self, wanted: set[str]) -> dict[str, Session]:
        """The wanted sessions that are in this file."""
        rows = np.flatnonzero(
            pc.is_in(self._names, value_set=pa.array(list(wanted), pa.string())).to_numpy(False)
        )
        found = {}
        groups = np.searchsorted(self._edges, rows, side="right") - 1
        for group in np.unique(groups).tolist():
            inside = rows[groups == group] - self._edges[group]
            for row in self._parquet.read_row_group(group).take(pa.array(inside)).to_pylist():
                found[row["session"]] = _session(row)
        return found

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, a row group at a time."""
        for group in range(self._parquet.num_row_groups):
            yield from self._parquet.read_row_group(group).to_batches()


def _damaged(file: File, what: str) -> IntegrityError:
    return IntegrityError(
        f"state file {file.path}: {what}",
        cause="the file was changed or lost after it was committed",
        next="restore this file from a backup; nothing was folded on top of it",
    )


def _state_row(name: str, session: Session) -> dict[str, Any]:
    return {
        "session": name,
        "state": session.saved,
        "state_version": session.version,
        "sequence": session.sequence,
        "anchor": session.anchor,
        "buffer": session.buffer,
        "first_offset": session.first_offset,
        "last_offset": session.last_offset,
        "snapshot_offset": session.snapshot_offset,
        "timestamp": session.timestamp,
        "status": "live" if session.finding is None else "quarantined",
        "finding": session.finding,
        "finding_offset": session.finding_offset,
    }


def _session(row: dict[str, Any]) -> Session:
    return Session(
        saved=row["state"],
        version=row["state_version"],
        sequence=row["sequence"],
        anchor=row["anchor"],
        buffer=row["buffer"],
        first_offset=row["first_offset"],
        last_offset=row["last_offset"],
        snapshot_offset=row["snapshot_offset"],
        timestamp=row["timestamp"],
        finding=row["finding"],
        finding_offset=row["finding_offset"],
    )
