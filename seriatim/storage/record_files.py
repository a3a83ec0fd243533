"""Parquet: the record and quarantine files of a stream, written inside the task, where the messages
are.

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

from seriatim.engine.machine import fits_column_type
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Partition
from seriatim.engine.record_kinds import MAIN_TABLE, OTHER_TABLE_PREFIX
from seriatim.engine.record_kinds import table_directory as room_of
from seriatim.engine.session import (
    ColumnarRecords,
    FoldOutput,
    QuarantinedMessage,
    SessionEndRecords,
)
from seriatim.engine.table import DECIMAL_TYPE
from seriatim.ledger.model import File
from seriatim.ports import UnfitRecordsError
from seriatim.storage.files import ParquetFileWriter, SweepNotes, file_names

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
ACCEPTED_PYTHON_TYPES: dict[str, set[type]] = {
    "string": {str, NoneType},
    "int64": {int, NoneType},
    "float64": {float, int, NoneType},
    "bool": {bool, NoneType},
    "timestamp": {datetime, NoneType},
    "date": {date, NoneType},
    "binary": {bytes, NoneType},
}
"""Python types that a column takes as they are; of others each value is looked at."""
TIMESTAMP_BOUNDS = tuple(
    pa.scalar(f"{edge}+00:00").cast(UTC_MICROSECONDS).value
    for edge in ("0001-01-01 00:00:00", "9999-12-31 23:59:59.999999")
)
RECORD_FIELDS = [
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
CONVERSION_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""What a value raises that does not fit its column."""
QUARANTINE_FILE_SCHEMA = pa.schema(
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
    if match := DECIMAL_TYPE.fullmatch(name):
        return pa.decimal128(int(match[1]), int(match[2]))
    return ARROW_TYPES[name]


def record_schema(columns: Mapping[str, str]) -> pa.Schema:
    """The schema of a records table: what every record has, then the machine's own columns."""
    return pa.schema(
        [*RECORD_FIELDS, *(pa.field(name, arrow_type(kind)) for name, kind in columns.items())]
    )


class ParquetRecords(SweepNotes):
    """Record and quarantine files of one stream, below its output path."""

    def __init__(
        self,
        root: Path,
        columns: Mapping[str, str],
        compression: str,
        omitted_columns: Sequence[str],
        *,
        values_are_checked: bool = False,
        other_tables: Mapping[str, Mapping[str, str]] | None = None,
        folder: str = "records",
    ) -> None:
        self.root, self.compression, self.column_types, self.folder = (
            root,
            compression,
            list(columns.values()),
            folder,
        )
        self.other_stores = {
            table: ParquetRecords(
                root,
                theirs,
                compression,
                omitted_columns,
                values_are_checked=values_are_checked,
                folder=room_of(table),
            )
            for table, theirs in (other_tables or {}).items()
        }
        """Those of the machine's other tables."""
        self.build_column = _unchecked_column if values_are_checked else _checked_column
        """Values that were checked when they were decoded are not checked again: it costs 0.5 µs a
        record.
        """
        whole = record_schema(columns)
        self.schema = pa.schema([column for column in whole if column.name not in omitted_columns])
        self.record_column_names = [
            column.name for column in RECORD_FIELDS if column.name not in omitted_columns
        ]

    def record_writer(
        self, partition: Partition, topic_id: str, stem: str, table: str = MAIN_TABLE
    ) -> _RecordFileWriter:
        """A record file of one partition and slice."""
        if table != MAIN_TABLE:
            return self.other_stores[table].record_writer(partition, topic_id, stem)
        path = f"{self.folder}/{partition}/{stem}.parquet"
        return _RecordFileWriter(
            self,
            partition,
            topic_id,
            ParquetFileWriter(self.root, path, self.schema, self.compression),
        )

    def quarantine_writer(
        self, partition: Partition, topic_id: str, stem: str
    ) -> _QuarantineFileWriter:
        """A file of messages set aside."""
        path = f"kept/{partition}/{stem}.parquet"
        return _QuarantineFileWriter(
            partition,
            topic_id,
            ParquetFileWriter(self.root, path, QUARANTINE_FILE_SCHEMA, self.compression),
        )

    def sweep(self, partition: Partition, stem_prefix: str, keep: set[str]) -> list[str]:
        """Delete files of other attempts at what is committed now."""
        paths = [
            path
            for path in self.paths(partition)
            if path.rpartition("/")[2].startswith(stem_prefix)
        ]
        return self.delete(set(paths) - keep)

    def paths(self, partition: Partition) -> list[str]:
        """All files of a partition: records, state and messages set aside."""
        others = [name for name in file_names(self.root) if name.startswith(OTHER_TABLE_PREFIX)]
        rooms = [f"{room}/{partition}" for room in ("records", "state", "kept", *others)]
        return [f"{room}/{name}" for room in rooms for name in file_names(self.root / room)]

    def machine_columns(self, rows: Sequence[tuple[Any, ...]]) -> list[pa.Array]:
        """The machine's own columns of these records."""
        if not rows:
            return [pa.array([], arrow_type(kind)) for kind in self.column_types]
        try:
            return list(map(self.build_column, zip(*rows, strict=True), self.column_types))
        except CONVERSION_ERRORS:
            if unfit := _unfit_rows(rows, self.column_types):
                raise UnfitRecordsError(unfit) from None
            raise

    def delete(self, paths: Iterable[str]) -> list[str]:
        """Delete files; those that are gone already are no error."""
        deleted = sorted(paths)
        for path in deleted:
            (self.root / path).unlink(missing_ok=True)
        return deleted


class _RecordFileWriter:
    """A record file: what every record has comes from the message, the rest from the machine."""

    def __init__(
        self, store: ParquetRecords, partition: Partition, topic_id: str, file: ParquetFileWriter
    ) -> None:
        self.store, self.partition, self.topic_id, self.file = store, partition, topic_id, file
        self.first_offset = self.last_offset = -1

    def write(self, batch: MessageBatch, output: FoldOutput) -> None:
        """Add the records of a stretch."""
        parts, positions = [], [np.asarray(output.positions, np.int64)]
        if output.rows:
            columns = self.store.machine_columns(output.rows)
            parts.append(self._record_batch(self._columns_of_rows(batch, output), columns))
        if (gathered := output.columnar_records) is not None:
            own = self._columns_of_columnar_records(batch, gathered)
            parts.append(self._record_batch(own, gathered.columns))
            positions.append(gathered.positions)
        if not parts:
            return
        places = np.concatenate(positions)
        self.file.add(
            parts[0]
            if len(parts) == 1
            else pa.concat_batches(parts).take(np.argsort(places, kind="stable"))
        )
        self.first_offset = (
            batch.start + int(places.min()) if self.first_offset < 0 else self.first_offset
        )
        self.last_offset = batch.start + int(places.max())

    def _record_batch(
        self, record_columns: Sequence[pa.Array], columns: Sequence[pa.Array]
    ) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([*record_columns, *columns], schema=self.store.schema)

    def write_end_records(self, offset: int, end_records: SessionEndRecords) -> None:
        """Add records that end sessions, all at one offset."""
        count = len(end_records.rows)
        offsets = pa.repeat(pa.scalar(offset, pa.int64()), count)
        made = {
            "topic": pa.repeat(self.partition.topic, count),
            "topic_id": pa.repeat(self.topic_id, count),
            "partition": pa.repeat(pa.scalar(self.partition.number, pa.int32()), count),
            "offset": offsets,
            "index": pa.array(end_records.indexes, pa.int32()),
            "source_offset": offsets,
            "timestamp": pa.array(
                np.asarray(end_records.timestamps, np.int64) * 1000, UTC_MICROSECONDS
            ),
            "session": pa.array(end_records.sessions, pa.string()),
            "sequence": pa.array(end_records.sequences, pa.int64()),
        }
        own = [made[name] for name in self.store.record_column_names]
        self.file.add(self._record_batch(own, self.store.machine_columns(end_records.rows)))
        self.first_offset = self.last_offset = offset

    def _columns_of_rows(self, stretch: MessageBatch, folded: FoldOutput) -> list[pa.Array]:
        positions = np.asarray(folded.positions, dtype=np.int64)
        times = _message_times_us(stretch)[positions]
        sources = positions + stretch.start
        for row, source in folded.source_messages.items():
            sources[row], times[row] = source.offset, source.timestamp * 1000
        indexes, sequences = (
            pa.array(folded.indexes, pa.int32()),
            pa.array(folded.sequences, pa.int64()),
        )
        sessions = pa.array(folded.sessions, pa.string())
        return self._build_record_columns(
            positions + stretch.start, indexes, sources, times, sessions, sequences
        )

    def _columns_of_columnar_records(
        self, stretch: MessageBatch, columnar_records: ColumnarRecords
    ) -> list[pa.Array]:
        offsets, times = (
            columnar_records.positions + stretch.start,
            _message_times_us(stretch)[columnar_records.positions],
        )
        indexes = (
            pa.array(np.zeros(len(offsets), np.int32))
            if columnar_records.indexes is None
            else columnar_records.indexes
        )
        return self._build_record_columns(
            offsets, indexes, offsets, times, columnar_records.sessions, columnar_records.sequences
        )

    def _build_record_columns(
        self,
        offsets: Any,
        indexes: pa.Array,
        sources: Any,
        times: Any,
        sessions: pa.Array,
        sequences: pa.Array,
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
        return [made[name]() for name in self.store.record_column_names]

    def close(self) -> File | None:
        """Finish the file."""
        file = self.file.finish()
        return (
            None
            if file is None
            else replace(file, first_offset=self.first_offset, last_offset=self.last_offset)
        )


def _message_times_us(stretch: MessageBatch) -> Any:
    times = getattr(stretch, "microseconds", None)
    return np.asarray(stretch.timestamps, dtype=np.int64) * 1000 if times is None else times


def _checked_column(values: Sequence[Any], kind: str) -> pa.Array:
    """Values as a column, none of them bent: pyarrow by itself writes 1.5 into int64 as 1."""
    if not _has_accepted_types(values, kind):
        raise TypeError(f"a value does not fit {kind}")
    column = pa.array(values, arrow_type(kind))
    if kind.endswith(("timestamp", "timestamp>")) and not _is_within_calendar(column):
        raise OverflowError("a time in UTC is before year 1 or after 9999")
    return column


def _unchecked_column(values: Sequence[Any], kind: str) -> pa.Array:
    return pa.array(values, arrow_type(kind))


def _has_accepted_types(values: Iterable[Any], kind: str) -> bool:
    """Whether each value is of its column's kind."""
    if kind.startswith("list<"):
        inside = list(chain.from_iterable(value for value in values if isinstance(value, list)))
        return set(map(type, values)) <= {list, NoneType} and _has_accepted_types(
            inside, kind[5:-1]
        )
    if kind not in ACCEPTED_PYTHON_TYPES:  # a decimal: pyarrow takes none that does not fit
        return True
    return set(map(type, values)) <= ACCEPTED_PYTHON_TYPES[kind] or all(
        fits_column_type(value, kind) for value in values
    )


def _is_within_calendar(column: pa.Array) -> bool:
    while pa.types.is_list(column.type):
        column = column.flatten()
    ends = pc.min_max(column)
    first, last = ends["min"].value, ends["max"].value
    return first is None or (TIMESTAMP_BOUNDS[0] <= first and last <= TIMESTAMP_BOUNDS[1])


def _unfit_rows(rows: Sequence[tuple[Any, ...]], kinds: Sequence[str]) -> list[int]:
    unfit = []
    for number, row in enumerate(rows):
        try:
            for value, kind in zip(row, kinds, strict=True):
                _checked_column([value], kind)
        except CONVERSION_ERRORS:
            unfit.append(number)
    return unfit


class _QuarantineFileWriter:
    """A file of messages set aside, whole, so that they outlive Kafka's retention."""

    def __init__(self, partition: Partition, topic_id: str, file: ParquetFileWriter) -> None:
        self.partition, self.topic_id, self.file = partition, topic_id, file

    def write(self, batch: MessageBatch, messages: list[QuarantinedMessage]) -> None:
        """Add messages of a stretch."""
        own = {
            "topic": self.partition.topic,
            "topic_id": self.topic_id,
            "partition": self.partition.number,
        }
        rows = [
            own | row | _to_parquet_values(row)
            for row in (message.to_row(batch) for message in messages)
        ]
        self.file.add(pa.RecordBatch.from_pylist(rows, schema=QUARANTINE_FILE_SCHEMA))

    def close(self) -> File | None:
        """Finish the file."""
        return self.file.finish()


def _to_parquet_values(row: dict[str, Any]) -> dict[str, Any]:
    headers = row["headers"]
    told = None if headers is None else [{"key": key, "value": value} for key, value in headers]
    return {"timestamp": row["timestamp"] * 1000, "headers": told}
