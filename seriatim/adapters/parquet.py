"""Parquet: the record and quarantine files of a stream, written inside the task, where the messages are.

Next room: delta.py commits what was written here; state.py has the sessions' state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from seriatim.core.ledger import File
from seriatim.core.machine import fits
from seriatim.core.message import Stretch
from seriatim.core.offsets import Partition
from seriatim.core.outputs import MAIN, ROOM
from seriatim.core.outputs import room as room_of
from seriatim.core.session import Ended, Folded, Gathered, Kept
from seriatim.core.table import DECIMAL
from seriatim.disk import Notes, ParquetFileWriter, file_names
from seriatim.ports import UnfitRecords

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
PLAIN: dict[str, set[type]] = {
    "string": {str, NoneType},
    "int64": {int, NoneType},
    "float64": {float, int, NoneType},
    "bool": {bool, NoneType},
    "timestamp": {datetime, NoneType},
    "date": {date, NoneType},
    "binary": {bytes, NoneType},
}
"""Python types that a column takes as they are; of others each value is looked at."""
YEARS = tuple(
    pa.scalar(f"{edge}+00:00").cast(UTC_MICROSECONDS).value
    for edge in ("0001-01-01 00:00:00", "9999-12-31 23:59:59.999999")
)
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
UNFIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""What a value raises that does not fit its column."""
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


class ParquetRecords(Notes):
    """Record and quarantine files of one stream, below its output path."""

    def __init__(
        self,
        root: Path,
        columns: Mapping[str, str],
        compression: str,
        leave_out: Sequence[str],
        *,
        checked: bool = False,
        others: Mapping[str, Mapping[str, str]] | None = None,
        room: str = "records",
    ) -> None:
        self.root, self.compression, self.kinds, self.room = root, compression, list(columns.values()), room
        self.beside = {
            table: ParquetRecords(root, theirs, compression, leave_out, checked=checked, room=room_of(table))
            for table, theirs in (others or {}).items()
        }
        """Those of the machine's other tables."""
        self.column = _column_as_is if checked else _column
        """Values that were checked when they were decoded are not checked again: it costs 0.5 µs a record."""
        whole = record_schema(columns)
        self.schema = pa.schema([column for column in whole if column.name not in leave_out])
        self.own = [column.name for column in OWN_FIELDS if column.name not in leave_out]

    def records(self, partition: Partition, topic_id: str, stem: str, table: str = MAIN) -> _Records:
        """A record file of one partition and slice."""
        if table != MAIN:
            return self.beside[table].records(partition, topic_id, stem)
        path = f"{self.room}/{partition}/{stem}.parquet"
        return _Records(self, partition, topic_id, ParquetFileWriter(self.root, path, self.schema, self.compression))

    def kept(self, partition: Partition, topic_id: str, stem: str) -> _KeptMessages:
        """A file of messages set aside."""
        path = f"kept/{partition}/{stem}.parquet"
        return _KeptMessages(partition, topic_id, ParquetFileWriter(self.root, path, KEPT_SCHEMA, self.compression))

    def sweep(self, partition: Partition, stem_prefix: str, keep: set[str]) -> list[str]:
        """Delete files of other attempts at what is committed now."""
        paths = [path for path in self.paths(partition) if path.rpartition("/")[2].startswith(stem_prefix)]
        return self.delete(set(paths) - keep)

    def paths(self, partition: Partition) -> list[str]:
        """All files of a partition: records, state and messages set aside."""
        others = [name for name in file_names(self.root) if name.startswith(ROOM)]
        rooms = [f"{room}/{partition}" for room in ("records", "state", "kept", *others)]
        return [f"{room}/{name}" for room in rooms for name in file_names(self.root / room)]

    def machine_columns(self, rows: Sequence[tuple[Any, ...]]) -> list[pa.Array]:
        """The machine's own columns of these records."""
        if not rows:
            return [pa.array([], arrow_type(kind)) for kind in self.kinds]
        try:
            return list(map(self.column, zip(*rows, strict=True), self.kinds))
        except UNFIT:
            if unfit := _unfit_rows(rows, self.kinds):
                raise UnfitRecords(unfit) from None
            raise

    def delete(self, paths: Iterable[str]) -> list[str]:
        """Delete files; those that are gone already are no error."""
        deleted = sorted(paths)
        for path in deleted:
            (self.root / path).unlink(missing_ok=True)
        return deleted


class _Records:
    """A record file: what every record has comes from the message, the rest from the machine."""

    def __init__(self, store: ParquetRecords, partition: Partition, topic_id: str, file: ParquetFileWriter) -> None:
        self.store, self.partition, self.topic_id, self.file = store, partition, topic_id, file
        self.first = self.last = -1

    def write(self, stretch: Stretch, folded: Folded) -> None:
        """Add the records of a stretch."""
        parts, positions = [], [np.asarray(folded.positions, np.int64)]
        if folded.rows:
            columns = self.store.machine_columns(folded.rows)
            parts.append(self._batch(self._own_columns(stretch, folded), columns))
        if (gathered := folded.gathered) is not None:
            own = self._gathered_columns(stretch, gathered)
            parts.append(self._batch(own, gathered.columns))
            positions.append(gathered.positions)
        if not parts:
            return
        places = np.concatenate(positions)
        self.file.add(parts[0] if len(parts) == 1 else pa.concat_batches(parts).take(np.argsort(places, kind="stable")))
        self.first = stretch.start + int(places.min()) if self.first < 0 else self.first
        self.last = stretch.start + int(places.max())

    def _batch(self, own: Sequence[pa.Array], columns: Sequence[pa.Array]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([*own, *columns], schema=self.store.schema)

    def end(self, offset: int, ended: Ended) -> None:
        """Add records that end sessions, all at one offset."""
        count = len(ended.rows)
        offsets = pa.repeat(pa.scalar(offset, pa.int64()), count)
        made = {
            "topic": pa.repeat(self.partition.topic, count),
            "topic_id": pa.repeat(self.topic_id, count),
            "partition": pa.repeat(pa.scalar(self.partition.number, pa.int32()), count),
            "offset": offsets,
            "index": pa.array(ended.indexes, pa.int32()),
            "source_offset": offsets,
            "timestamp": pa.array(np.asarray(ended.timestamps, np.int64) * 1000, UTC_MICROSECONDS),
            "session": pa.array(ended.sessions, pa.string()),
            "sequence": pa.array(ended.sequences, pa.int64()),
        }
        own = [made[name] for name in self.store.own]
        self.file.add(self._batch(own, self.store.machine_columns(ended.rows)))
        self.first = self.last = offset

    def _own_columns(self, stretch: Stretch, folded: Folded) -> list[pa.Array]:
        positions = np.asarray(folded.positions, dtype=np.int64)
        times = _microseconds(stretch)[positions]
        sources = positions + stretch.start
        for row, source in folded.sources.items():
            sources[row], times[row] = source.offset, source.timestamp * 1000
        indexes, sequences = pa.array(folded.indexes, pa.int32()), pa.array(folded.sequences, pa.int64())
        sessions = pa.array(folded.sessions, pa.string())
        return self._made(positions + stretch.start, indexes, sources, times, sessions, sequences)

    def _gathered_columns(self, stretch: Stretch, gathered: Gathered) -> list[pa.Array]:
        offsets, times = gathered.positions + stretch.start, _microseconds(stretch)[gathered.positions]
        indexes = pa.array(np.zeros(len(offsets), np.int32)) if gathered.indexes is None else gathered.indexes
        return self._made(offsets, indexes, offsets, times, gathered.sessions, gathered.sequences)

    def _made(
        self, offsets: Any, indexes: pa.Array, sources: Any, times: Any, sessions: pa.Array, sequences: pa.Array
    ) -> list[pa.Array]:
        count = len(offsets)
        made = {
            "topic": lambda: pa.repeat(self.partition.topic, count),
            "topic_id": lambda: pa.repeat(self.topic_id, count),
            "partition": lambda: pa.repeat(pa.scalar(self.partition.number, pa.int32()), count),
            "offset": lambda: pa.array(offsets),
            "index": lambda: indexes,
            "source_offset": lambda: pa.array(sources),
            "timestamp": lambda: pa.array(times, UTC_MICROSECONDS),
            "session": lambda: sessions,
            "sequence": lambda: sequences,
        }
        return [made[name]() for name in self.store.own]

    def close(self) -> File | None:
        """Finish the file."""
        file = self.file.finish()
        return None if file is None else replace(file, first=self.first, last=self.last)


def _microseconds(stretch: Stretch) -> Any:
    times = getattr(stretch, "microseconds", None)
    return np.asarray(stretch.timestamps, dtype=np.int64) * 1000 if times is None else times


def _column(values: Sequence[Any], kind: str) -> pa.Array:
    """Values as a column, none of them bent: pyarrow by itself writes 1.5 into int64 as 1."""
    if not _is_plain(values, kind):
        raise TypeError(f"a value does not fit {kind}")
    column = pa.array(values, arrow_type(kind))
    if kind.endswith(("timestamp", "timestamp>")) and not _has_years(column):
        raise OverflowError("a time in UTC is before year 1 or after 9999")
    return column


def _column_as_is(values: Sequence[Any], kind: str) -> pa.Array:
    return pa.array(values, arrow_type(kind))


def _is_plain(values: Iterable[Any], kind: str) -> bool:
    """Whether each value is of its column's kind."""
    if kind.startswith("list<"):
        inside = list(chain.from_iterable(value for value in values if isinstance(value, list)))
        return set(map(type, values)) <= {list, NoneType} and _is_plain(inside, kind[5:-1])
    if kind not in PLAIN:  # a decimal: pyarrow takes none that does not fit
        return True
    return set(map(type, values)) <= PLAIN[kind] or all(fits(value, kind) for value in values)


def _has_years(column: pa.Array) -> bool:
    while pa.types.is_list(column.type):
        column = column.flatten()
    ends = pc.min_max(column)
    first, last = ends["min"].value, ends["max"].value
    return first is None or (YEARS[0] <= first and last <= YEARS[1])


def _unfit_rows(rows: Sequence[tuple[Any, ...]], kinds: Sequence[str]) -> list[int]:
    unfit = []
    for number, row in enumerate(rows):
        try:
            for value, kind in zip(row, kinds, strict=True):
                _column([value], kind)
        except UNFIT:
            unfit.append(number)
    return unfit


class _KeptMessages:
    """A file of messages set aside, whole, so that they outlive Kafka's retention."""

    def __init__(self, partition: Partition, topic_id: str, file: ParquetFileWriter) -> None:
        self.partition, self.topic_id, self.file = partition, topic_id, file

    def write(self, stretch: Stretch, kept: list[Kept]) -> None:
        """Add messages of a stretch."""
        own = {"topic": self.partition.topic, "topic_id": self.topic_id, "partition": self.partition.number}
        rows = [own | row | _for_parquet(row) for row in (message.row(stretch) for message in kept)]
        self.file.add(pa.RecordBatch.from_pylist(rows, schema=KEPT_SCHEMA))

    def close(self) -> File | None:
        """Finish the file."""
        return self.file.finish()


def _for_parquet(row: dict[str, Any]) -> dict[str, Any]:
    headers = row["headers"]
    told = None if headers is None else [{"key": key, "value": value} for key, value in headers]
    return {"timestamp": row["timestamp"] * 1000, "headers": told}
