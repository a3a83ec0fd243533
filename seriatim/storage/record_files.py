"""Record and quarantine files in Parquet: written inside the task, where the messages are, listed for
sweeps, and rewritten by compactions.

Next: ledger/delta_store.py commits what was written here; state_files.py has the sessions' state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from itertools import chain
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from seriatim.engine.files import File, UnfitRecordsError
from seriatim.engine.machine import Runner
from seriatim.engine.messages import Header, MessageBatch
from seriatim.engine.offsets import Partition
from seriatim.engine.records import (
    MAIN_TABLE,
    OTHER_TABLE_PREFIX,
    RECORD_COLUMNS,
    RecordSource,
    fits_column_type,
    table_directory,
)
from seriatim.engine.session import (
    ColumnarRecords,
    FoldOutput,
    QuarantinedMessage,
    Row,
    SessionEndRecords,
)
from seriatim.engine.table import DECIMAL_TYPE
from seriatim.errors import ensure, raise_broken_promise
from seriatim.ledger.replaced_files import Intent
from seriatim.storage.parquet import (
    DEFAULT_FILE_BYTES,
    ParquetFileWriter,
    damaged_record_file,
    describe_damage,
    first_line,
    open_parquet,
    part_path,
    with_added_columns,
)
from seriatim.storage.record_rows import RecordOrderScan, read_row_groups
from seriatim.storage.store import Store

UTC_MICROSECONDS = pa.timestamp("us", "UTC")
ARROW_TYPES = {
    "string": pa.string(),
    "int32": pa.int32(),
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
"""Python types that a column takes as they are. Values of other types are checked one by one."""
# 0001-01-01 and the last microsecond of 9999, as numbers: the first Arrow scalar of a process would
# import pandas, and commands that look back at a session must not wait for that.
FIRST_TIMESTAMP = -62_135_596_800_000_000
LAST_TIMESTAMP = 253_402_300_799_999_999
RECORD_FIELDS = [pa.field(column.name, ARROW_TYPES[column.type_name]) for column in RECORD_COLUMNS]
CONVERSION_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""What is raised for a value that does not fit its column."""
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
    """The Arrow type for the name of a column type."""
    if name.startswith("list<"):
        return pa.list_(arrow_type(name[5:-1]))
    decimal = DECIMAL_TYPE.fullmatch(name)
    if decimal:
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    return ARROW_TYPES[name]


def record_schema(columns: Mapping[str, str]) -> pa.Schema:
    """The schema of a records table: the columns of every record, then the machine's own."""
    machine_fields = [pa.field(name, arrow_type(kind)) for name, kind in columns.items()]
    return pa.schema([*RECORD_FIELDS, *machine_fields])


def older_schema(runner: Runner, shape: str) -> pa.Schema | None:
    """The schema of the records of a machine of this shape, if this machine is the same with more
    columns; None if it is not.
    """
    older_columns = runner.older_columns(shape)
    return None if older_columns is None else record_schema(older_columns)


class ParquetRecords:
    """The record and quarantine files of one stream, and the intents of its compactions."""

    def __init__(
        self,
        store: Store,
        columns: Mapping[str, str],
        compression: str,
        omitted_columns: Sequence[str],
        *,
        values_are_checked: bool = False,
        other_tables: Mapping[str, Mapping[str, str]] | None = None,
        folder: str = "records",
        file_bytes: int = DEFAULT_FILE_BYTES,
    ) -> None:
        self.store = store
        self.lists_cheaply = not store.is_remote
        self.compression = compression
        self.column_types = list(columns.values())
        self.folder = folder
        self.file_bytes = file_bytes
        """A record file that has grown so large is finished."""
        self.other_stores: dict[str, ParquetRecords] = {}
        """The stores of the machine's other tables."""
        for table, other_columns in (other_tables or {}).items():
            self.other_stores[table] = ParquetRecords(
                self.store,
                other_columns,
                compression,
                omitted_columns,
                values_are_checked=values_are_checked,
                folder=table_directory(table),
                file_bytes=file_bytes,
            )
        self.build_column = _unchecked_column if values_are_checked else _checked_column
        """Values that were checked when they were decoded are not checked again: it costs 0.5 µs a
        record.
        """
        fields = [field for field in record_schema(columns) if field.name not in omitted_columns]
        self.schema = pa.schema(fields)
        self.record_columns = [
            column for column in RECORD_COLUMNS if column.name not in omitted_columns
        ]

    def record_writer(
        self,
        partition: Partition,
        topic_id: str,
        stem: str,
        table: str = MAIN_TABLE,
    ) -> _RecordFileWriter:
        """A writer for the record file of one partition and slice."""
        if table != MAIN_TABLE:
            return self.other_stores[table].record_writer(partition, topic_id, stem)
        path = f"{self.folder}/{partition}/{stem}.parquet"
        return _RecordFileWriter(self, partition, topic_id, path)

    def quarantine_writer(
        self,
        partition: Partition,
        topic_id: str,
        stem: str,
    ) -> _QuarantineFileWriter:
        """A writer for a file of quarantined messages."""
        path = f"kept/{partition}/{stem}.parquet"
        return _QuarantineFileWriter(self, partition, topic_id, path)

    def paths(self, partition: Partition) -> list[str]:
        """The paths of all files of a partition: records, state and quarantined messages. Those that
        a killed process did not finish are among them.
        """
        folders = ["records", "state", "kept"]
        folders += [name for name in self.store.folders("") if name.startswith(OTHER_TABLE_PREFIX)]
        paths = []
        for folder in folders:
            prefix = f"{folder}/{partition}/"
            present = {path for path, _ in self.store.keys(prefix)}
            present.update(self.store.unfinished_keys(prefix))
            paths += sorted(present)
        return paths

    def has_files(self, paths: Iterable[str]) -> bool:
        """Whether all of these files are there."""
        return None not in self.store.sizes(list(paths))

    def machine_columns(self, rows: Sequence[Row]) -> list[pa.Array]:
        """The machine's own columns of these records. `UnfitRecordsError` names the records that do
        not fit.
        """
        if not rows:
            return [pa.array([], arrow_type(kind)) for kind in self.column_types]
        columns = zip(*rows, strict=True)
        try:
            return list(map(self.build_column, columns, self.column_types))
        except CONVERSION_ERRORS:
            # Only now is it worth looking at each value: nearly all batches fit.
            unfit = _unfit_rows(rows, self.column_types)
            if unfit:
                raise UnfitRecordsError(unfit) from None
            raise

    def delete(self, paths: Iterable[str]) -> list[str]:
        """Delete files. One that is gone already is no error."""
        deleted = sorted(paths)
        self.store.delete(deleted)
        return deleted

    def intents(self, partition: Partition) -> list[Intent]:
        """The intents of a partition. One that cannot be read may stand for anything, and so it
        protects all files of the partition.
        """
        intents = []
        for key, _ in self.store.keys(f"intents/{partition}/"):
            if key.endswith(".json"):
                intents.append(self._read_intent(partition, key))
        return intents

    def _read_intent(self, partition: Partition, key: str) -> Intent:
        try:
            return msgspec.json.decode(self.store.read(key), type=Intent)
        except (OSError, ValueError):
            # The errors of msgspec are ValueErrors.
            file_name = key.rpartition("/")[2]
            return Intent(partition=partition, attempt=file_name.removesuffix(".json"))

    def put_intent(self, intent: Intent) -> None:
        """Write an intent, before anything is written under it."""
        self.store.replace(_intent_key(intent), msgspec.json.encode(intent))

    def drop_intent(self, intent: Intent) -> None:
        """Delete an intent, and intents of the partition that were not finished."""
        self.store.delete([_intent_key(intent)])
        self.store.delete_unfinished(f"intents/{intent.partition}/")


def _intent_key(intent: Intent) -> str:
    return f"intents/{intent.partition}/{intent.attempt}.json"


class _RecordFileWriter:
    """Writes record files: the columns of every record come from the message, the others from the
    machine. A file that is large enough is finished, and the next one is begun.
    """

    def __init__(
        self,
        records: ParquetRecords,
        partition: Partition,
        topic_id: str,
        path: str,
    ) -> None:
        self.records = records
        self.partition = partition
        self.topic_id = topic_id
        self.path = path
        self.full_files: list[File] = []
        self._begin_file()

    def _begin_file(self) -> None:
        path = part_path(self.path, len(self.full_files))
        records = self.records
        self.file = ParquetFileWriter(records.store, path, records.schema, records.compression)
        self.first_offset = -1
        self.last_offset = -1

    def write(self, batch: MessageBatch, output: FoldOutput) -> None:
        """Add the records of a message batch: those of the plain fold, those of the compiled fold,
        or both.
        """
        record_batches = []
        positions = []
        if output.rows:
            record_columns = self._columns_of_rows(batch, output)
            machine_columns = self.records.machine_columns(output.rows)
            record_batches.append(self._record_batch(record_columns, machine_columns))
            positions.append(np.asarray(output.positions, np.int64))
        columnar = output.columnar_records
        if columnar is not None:
            record_columns = self._columns_of_columnar_records(batch, columnar)
            record_batches.append(self._record_batch(record_columns, columnar.columns))
            positions.append(columnar.positions)
        if not record_batches:
            return
        # The plain and the compiled fold take turns within a batch: only both lists together say
        # where the records of the batch begin and end.
        all_positions = np.concatenate(positions)
        if len(record_batches) == 1:
            records = record_batches[0]
        else:
            # A stable sort keeps the order of several records of one message.
            order = np.argsort(all_positions, kind="stable")
            records = pa.concat_batches(record_batches).take(order)
        self.file.add(records)
        if self.first_offset < 0:
            self.first_offset = batch.start + int(all_positions.min())
        self.last_offset = batch.start + int(all_positions.max())
        if self.file.written_bytes >= self.records.file_bytes:
            # Between two batches: the offsets of two files never overlap.
            full_file = self.close()
            if full_file is not None:
                self.full_files.append(full_file)
                self._begin_file()

    def _record_batch(
        self,
        record_columns: Sequence[pa.Array],
        columns: Sequence[pa.Array],
    ) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([*record_columns, *columns], schema=self.records.schema)

    def write_end_records(self, offset: int, end_records: SessionEndRecords) -> None:
        """Add the records that end sessions, all at one offset."""
        offsets = np.full(len(end_records.rows), offset, np.int64)
        source = RecordSource(
            partition=self.partition,
            topic_id=self.topic_id,
            offsets=offsets,
            indexes=end_records.indexes,
            source_offsets=offsets,
            timestamps=np.asarray(end_records.timestamps, np.int64) * 1000,
            sessions=end_records.sessions,
            sequences=end_records.sequences,
        )
        record_columns = self._build_record_columns(source)
        machine_columns = self.records.machine_columns(end_records.rows)
        self.file.add(self._record_batch(record_columns, machine_columns))
        self.first_offset = offset
        self.last_offset = offset

    def _columns_of_rows(self, batch: MessageBatch, output: FoldOutput) -> list[pa.Array]:
        positions = np.asarray(output.positions, dtype=np.int64)
        offsets = positions + batch.start
        source_offsets = offsets.copy()
        times_us = _message_times_us(batch)[positions]
        # A message that waited for its turn was read earlier than the message that released it.
        for row, message in output.source_messages.items():
            source_offsets[row] = message.offset
            times_us[row] = message.timestamp * 1000
        source = RecordSource(
            partition=self.partition,
            topic_id=self.topic_id,
            offsets=offsets,
            indexes=output.indexes,
            source_offsets=source_offsets,
            timestamps=times_us,
            sessions=output.sessions,
            sequences=output.sequences,
        )
        return self._build_record_columns(source)

    def _columns_of_columnar_records(
        self,
        batch: MessageBatch,
        columnar: ColumnarRecords,
    ) -> list[pa.Array]:
        offsets = columnar.positions + batch.start
        indexes = columnar.indexes
        if indexes is None:
            indexes = np.zeros(len(offsets), np.int32)
        source = RecordSource(
            partition=self.partition,
            topic_id=self.topic_id,
            offsets=offsets,
            indexes=indexes,
            source_offsets=offsets,
            timestamps=_message_times_us(batch)[columnar.positions],
            sessions=columnar.sessions,
            sequences=columnar.sequences,
        )
        return self._build_record_columns(source)

    def _build_record_columns(self, source: RecordSource) -> list[pa.Array]:
        """The columns of every record, without those that the table leaves out."""
        arrays = []
        for column in self.records.record_columns:
            values = column.read_from(source)
            arrow_column_type = ARROW_TYPES[column.type_name]
            if column.is_constant:
                values = pa.repeat(pa.scalar(values, arrow_column_type), len(source.offsets))
            elif not isinstance(values, pa.Array):
                values = pa.array(values, arrow_column_type)
            arrays.append(values)
        return arrays

    def close(self) -> File | None:
        """Finish the file. Returns its description; None if there were no records."""
        file = self.file.finish()
        if file is None:
            return None
        return replace(file, first_offset=self.first_offset, last_offset=self.last_offset)


def _message_times_us(batch: MessageBatch) -> Any:
    """The timestamps of messages in microseconds. Those from Spark are that fine; others are not."""
    times_us = getattr(batch, "microseconds", None)
    if times_us is None:
        return np.asarray(batch.timestamps, dtype=np.int64) * 1000
    return times_us


def _checked_column(values: Sequence[Any], kind: str) -> pa.Array:
    """Values as a column. A value that does not fit is refused: pyarrow by itself would write 1.5
    into int64 as 1.
    """
    if not _has_accepted_types(values, kind):
        raise TypeError(f"a value does not fit {kind}")
    column = pa.array(values, arrow_type(kind))
    if kind.endswith(("timestamp", "timestamp>")) and not _is_within_calendar(column):
        raise OverflowError("a time in UTC is before year 1 or after 9999")
    return column


def _unchecked_column(values: Sequence[Any], kind: str) -> pa.Array:
    return pa.array(values, arrow_type(kind))


def _has_accepted_types(values: Iterable[Any], kind: str) -> bool:
    """Whether each value has a type that fits the column."""
    python_types = set(map(type, values))
    if kind.startswith("list<"):
        if not python_types <= {list, NoneType}:
            return False
        lists = (value for value in values if isinstance(value, list))
        return _has_accepted_types(list(chain.from_iterable(lists)), kind[5:-1])
    if kind not in ACCEPTED_PYTHON_TYPES:
        # A decimal: pyarrow itself refuses one that does not fit.
        return True
    if python_types <= ACCEPTED_PYTHON_TYPES[kind]:
        return True
    return all(fits_column_type(value, kind) for value in values)


def _is_within_calendar(column: pa.Array) -> bool:
    while pa.types.is_list(column.type):
        column = column.flatten()
    bounds = pc.min_max(column)
    lowest = bounds["min"].value
    highest = bounds["max"].value
    if lowest is None:
        return True
    return bool(lowest >= FIRST_TIMESTAMP and highest <= LAST_TIMESTAMP)


def _unfit_rows(rows: Sequence[Row], kinds: Sequence[str]) -> list[int]:
    """The numbers of the rows that do not fit, found value by value."""
    unfit = []
    for number, row in enumerate(rows):
        try:
            for value, kind in zip(row, kinds, strict=True):
                _checked_column([value], kind)
        except CONVERSION_ERRORS:
            unfit.append(number)
    return unfit


class _QuarantineFileWriter:
    """Writes files of quarantined messages. They are stored whole, so that they outlive Kafka's
    retention. A file that is large enough is finished, and the next one is begun.
    """

    def __init__(
        self,
        records: ParquetRecords,
        partition: Partition,
        topic_id: str,
        path: str,
    ) -> None:
        self.records = records
        self.partition = partition
        self.topic_id = topic_id
        self.path = path
        self.full_files: list[File] = []
        self._begin_file()

    def _begin_file(self) -> None:
        path = part_path(self.path, len(self.full_files))
        records = self.records
        self.file = ParquetFileWriter(
            records.store, path, QUARANTINE_FILE_SCHEMA, records.compression
        )

    def write(self, batch: MessageBatch, messages: list[QuarantinedMessage]) -> None:
        """Add quarantined messages of a message batch."""
        rows = []
        for message in messages:
            row = message.to_row(batch)
            row["topic"] = self.partition.topic
            row["topic_id"] = self.topic_id
            row["partition"] = self.partition.number
            row["timestamp"] *= 1000
            row["headers"] = _header_structs(row["headers"])
            rows.append(row)
        self.file.add(pa.RecordBatch.from_pylist(rows, schema=QUARANTINE_FILE_SCHEMA))
        if self.file.written_bytes >= self.records.file_bytes:
            full_file = self.file.finish()
            if full_file is not None:
                self.full_files.append(full_file)
                self._begin_file()

    def close(self) -> File | None:
        """Finish the file. Returns its description; None if there were no messages."""
        return self.file.finish()


def _header_structs(headers: Iterable[Header] | None) -> list[dict[str, Any]] | None:
    if headers is None:
        return None
    return [{"key": key, "value": value} for key, value in headers]


class ParquetRewriter:
    """Rewrites several committed record files as one, row group by row group. The records stay as
    they are.

    A file is used only after its digest agrees with the ledger, and its pages with their checksums:
    damage is never copied into a file that would then be proved by a digest of its own.
    """

    def __init__(
        self,
        store: Store,
        stream: str,
        compression: str = "zstd",
    ) -> None:
        self.store = store
        self.stream = stream
        self.compression = compression

    def concatenate(
        self,
        partition: Partition,
        topic_id: str,
        stem: str,
        files: Sequence[File],
    ) -> File:
        """Write one file of several that follow each other by offset, and return it."""
        # A later file may have more columns: they were added to the table meanwhile.
        schema = pa.unify_schemas([self._read_schema(file) for file in files])
        path = f"records/{partition}/{stem}.parquet"
        writer = ParquetFileWriter(self.store, path, schema, self.compression)
        order_scan = RecordOrderScan()
        for file in files:
            rows = 0
            for batch in self._read_batches(file, schema):
                _check_records(file, topic_id, batch, order_scan)
                writer.add(batch)
                rows += batch.num_rows
            ensure(
                rows == file.rows,
                "a proved file has the rows that its entry says",
                file=file.path,
                rows=rows,
            )
        merged_file = writer.finish()
        if merged_file is None:
            raise_broken_promise("files without records are never committed", file=files[0].path)
        return replace(
            merged_file,
            first_offset=files[0].first_offset,
            last_offset=files[-1].last_offset,
        )

    def _read_schema(self, file: File) -> pa.Schema:
        """The columns of a file, without the metadata that Parquet adds to them."""
        with self._reading(file), open_parquet(self.store, file.path) as parquet:
            columns = parquet.schema_arrow
            fields = [pa.field(column.name, column.type, column.nullable) for column in columns]
            return pa.schema(fields)

    def _read_batches(self, file: File, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows of a file, which is proved by its digest first."""
        damage = describe_damage(self.store, file)
        if damage:
            raise damaged_record_file(self.stream, file, damage)
        with self._reading(file):
            for table in read_row_groups(self.store, file.path):
                whole_table = with_added_columns(table, schema).select(schema.names)
                for batch in whole_table.to_batches():
                    if batch.num_rows:
                        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    @contextmanager
    def _reading(self, file: File) -> Iterator[None]:
        """Whatever is wrong with a file is said of the file by its name."""
        try:
            yield
        except FileNotFoundError:
            raise damaged_record_file(self.stream, file, "it is missing") from None
        except (OSError, pa.ArrowException) as error:
            raise damaged_record_file(self.stream, file, first_line(error)) from None


def _check_records(
    file: File,
    topic_id: str,
    batch: pa.RecordBatch,
    order_scan: RecordOrderScan,
) -> None:
    """Prove that a batch goes on after the batch before it, under the same topic id."""
    ensure(
        len(order_scan.scan(batch).disordered_rows) == 0,
        "records follow each other by offset and index",
        file=file.path,
    )
    topic_ids = batch.column("topic_id").unique().to_pylist()
    ensure(
        topic_ids == [topic_id],
        "a record file has one topic id",
        file=file.path,
        found=str(topic_ids),
    )
