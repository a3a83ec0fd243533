"""Records as Arrow tables: their order, and the rows that they leave.

The last record of a row says what the row is, or that it is deleted. This is the only place that
folds records to rows. It serves the table `current` (current_table.py), state that is rebuilt from
records (join.py), and `verify` and `check` (record_scan.py). Records come in order, a row group at a
time: memory holds the rows that changed, not the records. No column is added to them, so a machine's
columns may have any name.

Records of one topic id rise by offset, and those of one offset by index. A topic that was created
again has a new topic id, and its offsets start over at 0.

Next: engine/records.py says which columns name a row, and which records delete it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec import Struct

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import (
    LAST_RECORD_COLUMNS,
    RISING_COLUMN_NAMES,
    RowImage,
    RowKeySpec,
)
from seriatim.engine.session import Row
from seriatim.errors import DamagedFileError, ensure
from seriatim.ledger.current_rows import PartitionCatchUp
from seriatim.storage.parquet import first_line, open_parquet, with_added_columns
from seriatim.storage.store import Store

BUFFERED_ROWS_MAX = 2_000_000
"""Rows in memory that wait to be reduced together."""
ROWS_AT_ONCE = 50_000
"""Rows that become Python values at a time."""
RowNumbers = Any
"""A numpy array of row numbers."""
INDEX_MAX = np.iinfo(np.int32).max


UNITS_PER_MS = {"ms": 1, "us": 1_000, "ns": 1_000_000}
"""How many units of a column of timestamps are a millisecond. Parquet has no seconds."""
BEFORE_FIRST_RECORD = (-1, INDEX_MAX)
"""Offset and index before every valid one. A record without an offset counts as offset -1, and is
out of order.
"""
OWNER_COLUMNS = ("topic", "partition")
READ_ERRORS = (OSError, pa.ArrowException, KeyError)
"""What reading a damaged file raises."""


def encode_column(column: pa.Array | pa.ChunkedArray) -> tuple[pa.Array, Any]:
    """The distinct values of a column, and for each row the number of its value. Null is a value."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    encoded = column.dictionary_encode(null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    return encoded.dictionary, codes.astype(np.int64)


def distinct_values_and_codes(column: pa.Array | pa.ChunkedArray) -> tuple[list[Any], Any]:
    """The same, with the distinct values as Python values."""
    values, codes = encode_column(column)
    return values.to_pylist(), codes


class BatchOrder(Struct, frozen=True):
    """What one batch of records is like, seen after the batches before it."""

    disordered_rows: Any
    """The numbers of the rows that do not come after the row before them, in rising order."""
    distinct_offsets: int
    """How many rows have another offset than the row before them."""


class RecordOrderScan:
    """Checks the order of records, batch by batch. It remembers the last record of each topic id."""

    def __init__(self) -> None:
        self._last_positions: dict[str | None, tuple[int, int]] = {}
        """By topic id: offset and index."""

    def scan(self, batch: pa.RecordBatch | pa.Table) -> BatchOrder:
        """Check the next batch. The rows of a batch without an `index` all have index 0."""
        offsets = whole_numbers(batch, "offset")
        indexes = np.zeros(len(offsets), np.int64)
        if "index" in batch.schema.names:
            indexes = whole_numbers(batch, "index")
        topic_ids, codes = distinct_values_and_codes(batch.column("topic_id"))
        disordered = []
        distinct_offsets = 0
        for code, topic_id in enumerate(topic_ids):
            # Nearly all batches have one topic id: then these are all rows.
            rows = np.flatnonzero(codes == code)
            id_offsets = offsets[rows]
            id_indexes = indexes[rows]
            last_offset, last_index = self._last_positions.get(topic_id, BEFORE_FIRST_RECORD)
            previous_offsets = np.concatenate(([last_offset], id_offsets[:-1]))
            previous_indexes = np.concatenate(([last_index], id_indexes[:-1]))
            is_same_offset = id_offsets == previous_offsets
            is_after = id_offsets > previous_offsets
            is_after |= is_same_offset & (id_indexes > previous_indexes)
            disordered.append(rows[~is_after])
            distinct_offsets += int(np.count_nonzero(~is_same_offset))
            self._last_positions[topic_id] = (int(id_offsets[-1]), int(id_indexes[-1]))
        disordered_rows = np.sort(np.concatenate(disordered)) if disordered else np.array([], int)
        return BatchOrder(disordered_rows, distinct_offsets)


def whole_numbers(batch: pa.RecordBatch | pa.Table, name: str) -> Any:
    """A column of whole numbers; null becomes -1."""
    column = pc.fill_null(batch.column(name), -1)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column.to_numpy(zero_copy_only=False).astype(np.int64)


class RecordGroups:
    """Which records of a table are of the same row, for records in order."""

    def __init__(self, records: pa.Table, row_columns: Sequence[str]) -> None:
        """`row_columns` name a row."""
        self.count = records.num_rows
        columns = [records.column(name) for name in row_columns]
        self.numbers, self._numbers_end = _group_numbers(columns)

    def last_rows(self) -> RowNumbers:
        """The number of the last record of each row, in rising order."""
        last = np.full(self._numbers_end, -1, np.int64)
        np.maximum.at(last, self.numbers, np.arange(self.count))
        return np.sort(last[last >= 0])

    def first_rows(self) -> RowNumbers:
        """The number of the first record of each row, in rising order."""
        first = np.full(self._numbers_end, self.count, np.int64)
        np.minimum.at(first, self.numbers, np.arange(self.count))
        return np.sort(first[first < self.count])

    @cached_property
    def neighbours(self) -> tuple[RowNumbers, RowNumbers]:
        """Pairs of records that follow each other in one row: the earlier ones, and the later ones."""
        order = np.argsort(self.numbers, kind="stable")
        has_next = np.diff(self.numbers[order]) == 0
        return order[:-1][has_next], order[1:][has_next]


def _group_numbers(columns: Sequence[pa.ChunkedArray]) -> tuple[Any, int]:
    """A number for each record, the same for records of the same row, and a number above all."""
    numbers = np.zeros(len(columns[0]), np.int64)
    numbers_end = 1
    for column in columns:
        values, codes = encode_column(_normalize_zero(column))
        numbers = numbers * len(values) + codes
        numbers_end *= len(values)
        if numbers_end > 4 * len(numbers):
            # Numbered anew: the product of many columns would overflow, or need too much memory.
            values, numbers = encode_column(pa.array(numbers))
            numbers_end = len(values)
    return numbers, numbers_end


def _normalize_zero(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A key column in which -0.0 is 0.0: to a machine they are the same key, to Arrow they are
    not.
    """
    if pa.types.is_floating(column.type):
        return pc.add(column, 0.0)
    return column


def last_records(records: pa.Table, row_columns: Sequence[str]) -> pa.Table:
    """The last record of each row, in the order of the table."""
    return records.take(pa.array(RecordGroups(records, row_columns).last_rows()))


class LastRecords:
    """Folds records, table by table, to the last record of each row."""

    def __init__(self, row_columns: Sequence[str], topic_ids: Sequence[str] = ()) -> None:
        """With `topic_ids`, oldest first, tables may be added in any order. Otherwise each must come
        after those before it.
        """
        self.row_columns = row_columns
        self.topic_ids = topic_ids
        self._tables: list[pa.Table] = []
        self._buffered_rows = 0

    def add(self, records: pa.Table, *, in_order: bool = True) -> None:
        """Add records. If they are not in order among themselves, they wait to be sorted."""
        if in_order:
            records = last_records(records, self.row_columns)
        self._tables.append(records)
        self._buffered_rows += records.num_rows
        if self._buffered_rows > BUFFERED_ROWS_MAX:
            reduced = self._reduce()
            self._tables = [reduced]
            # Counted half: if nearly all rows are distinct, reducing them again after each further
            # table would cost more than it frees.
            self._buffered_rows = reduced.num_rows // 2

    def finish(self) -> pa.Table | None:
        """The last record of each row; None if nothing was added."""
        return self._reduce() if self._tables else None

    def _reduce(self) -> pa.Table:
        records = pa.concat_tables(self._tables)
        if self.topic_ids:
            records = _sort_records(records, self.topic_ids)
        return last_records(records, self.row_columns)


def _sort_records(records: pa.Table, topic_ids: Sequence[str]) -> pa.Table:
    """Records by topic id, offset and index."""
    id_numbers = pc.index_in(records.column("topic_id"), pa.array(topic_ids, pa.string()))
    keys = (records.column("index"), records.column("offset"), id_numbers)
    order = np.lexsort([key.to_numpy() for key in keys])
    return records.take(pa.array(order))


def deleted_mask(records: pa.Table, row_key_spec: RowKeySpec) -> Any:
    """Which records delete their row, as `RowKeySpec.deletes_row` says for one. A numpy array."""
    if not row_key_spec.deleted_when:
        return np.zeros(records.num_rows, bool)
    mask = np.ones(records.num_rows, bool)
    for name, value in row_key_spec.deleted_when.items():
        mask &= _equals_mask(records.column(name), value)
    return mask


def _equals_mask(column: pa.ChunkedArray, value: Any) -> Any:
    if value is None:
        # Arrow cannot compare lists, but every column can be null.
        return boolean_array(pc.is_null(column))
    if pa.types.is_list(column.type):
        return np.array([item == value for item in column.to_pylist()], bool)
    return boolean_array(pc.equal(column, pa.scalar(value, column.type)))


def row_images(records: pa.Table, row_key_spec: RowKeySpec) -> Iterator[RowImage]:
    """Each record as the row that it leaves; None as the row of a record that deletes it."""
    for start in range(0, records.num_rows, ROWS_AT_ONCE):
        part = records.slice(start, ROWS_AT_ONCE)
        is_deleted = deleted_mask(part, row_key_spec).tolist()
        rows = row_tuples(part, row_key_spec.columns)
        images = [None if gone else row for row, gone in zip(rows, is_deleted, strict=True)]
        yield from images_of_rows(part, row_key_spec, images)


def images_of_rows(
    records: pa.Table, row_key_spec: RowKeySpec, rows: Iterable[Row | None]
) -> Iterator[RowImage]:
    """These rows, one for each record, with what the records say of their topic id, session, key
    and offset.
    """
    key_columns = [records.column(name).to_pylist() for name in row_key_spec.key]
    keys: Iterable[Any] = key_columns[0]
    if len(key_columns) > 1:
        keys = zip(*key_columns, strict=True)
    topic_ids = records.column("topic_id").to_pylist()
    sessions = records.column("session").to_pylist()
    offsets = records.column("offset").to_pylist()
    yield from map(RowImage._make, zip(topic_ids, sessions, keys, rows, offsets, strict=True))


def row_tuples(records: pa.Table, names: Sequence[str]) -> list[Row]:
    """These columns as one tuple for each record."""
    columns = [records.column(name).to_pylist() for name in names]
    return list(zip(*columns, strict=True))


def boolean_array(column: Any) -> Any:
    """A boolean for each row as a numpy array; null counts as false."""
    filled = pc.fill_null(column, False)
    return filled.to_numpy(zero_copy_only=False).astype(bool)


def read_row_groups(
    store: Store, path: str, columns: Sequence[str] | None = None, first_offset: int = -1
) -> Iterator[pa.Table]:
    """The row groups of a file that have rows, one after the other. Every page is proved by its
    checksum.

    Columns that the file does not have are left out, and row groups that end before `first_offset`.
    """
    with open_parquet(store, path) as parquet:
        yield from row_groups_of(parquet, columns, first_offset)


def row_groups_of(
    parquet: pq.ParquetFile, columns: Sequence[str] | None = None, first_offset: int = -1
) -> Iterator[pa.Table]:
    """The same of a file that is open."""
    read_columns = None
    if columns is not None:
        file_columns = set(parquet.schema_arrow.names)
        read_columns = [name for name in dict.fromkeys(columns) if name in file_columns]
    for group in range(parquet.num_row_groups):
        if parquet.metadata.row_group(group).num_rows == 0:
            continue
        if first_offset >= 0 and _highest_offset(parquet, group) < first_offset:
            continue
        yield parquet.read_row_group(group, read_columns)


def _highest_offset(parquet: pq.ParquetFile, group: int) -> int:
    """The highest offset of a row group. Without statistics it may be any."""
    row_group = parquet.metadata.row_group(group)
    for number in range(row_group.num_columns):
        column = row_group.column(number)
        if column.path_in_schema != "offset":
            continue
        statistics = column.statistics
        if statistics is not None and statistics.has_min_max:
            return int(statistics.max)
    return 2**63


def value_ranges(parquet: pq.ParquetFile) -> dict[str, tuple[int, int]]:
    """The least and the largest value of each rising column, as `FileOutline.value_ranges` has them.

    They are taken from the statistics of the file, so no column is read for them.
    """
    ranges: dict[str, tuple[int, int]] = {}
    # A nested column of a machine is several columns of Parquet. So their numbers are not those of
    # the Arrow schema.
    for number in range(len(parquet.schema)):
        name = parquet.schema.column(number).path
        if name not in RISING_COLUMN_NAMES:
            continue
        column_range = _column_range(parquet, number)
        if column_range is None:
            continue
        least, largest = column_range
        column_type = parquet.schema_arrow.field(name).type
        if pa.types.is_timestamp(column_type):
            units_per_ms = UNITS_PER_MS[column_type.unit]
            least //= units_per_ms
            largest //= units_per_ms
        ranges[name] = (least, largest)
    return ranges


def _column_range(parquet: pq.ParquetFile, number: int) -> tuple[int, int] | None:
    """The least and the largest number of a column; None if it has none, or a row group does not
    state its own.
    """
    least: int | None = None
    largest: int | None = None
    for group in range(parquet.num_row_groups):
        chunk = parquet.metadata.row_group(group).column(number)
        statistics = chunk.statistics
        if statistics is None:
            return None
        if statistics.has_null_count and statistics.null_count == chunk.num_values:
            continue
        if not statistics.has_min_max:
            return None
        group_least, group_largest = int(statistics.min_raw), int(statistics.max_raw)
        least = group_least if least is None else min(least, group_least)
        largest = group_largest if largest is None else max(largest, group_largest)
    if least is None or largest is None:
        return None
    return least, largest


class RowMerger:
    """Reads the records of one stream, and merges them with the rows of the table `current`."""

    def __init__(
        self,
        store: Store,
        stream: str,
        records: pa.Schema,
        row_key_spec: RowKeySpec,
    ) -> None:
        self.store = store
        self.stream = stream
        self.row_key_spec = row_key_spec
        self.row_columns = ("session", *row_key_spec.key)
        """What names a row of a partition."""
        all_columns = [*LAST_RECORD_COLUMNS, *row_key_spec.columns]
        self.schema = pa.schema([records.field(name) for name in all_columns])
        # Topic and partition are known, and may be names of folders instead of columns.
        change_columns = [name for name in LAST_RECORD_COLUMNS if name not in OWNER_COLUMNS]
        change_columns += ["index", *row_key_spec.columns, *row_key_spec.deleted_when]
        change_fields = [records.field(name) for name in dict.fromkeys(change_columns)]
        self.change_schema = pa.schema(change_fields)
        self.addable_fields = [records.field(name) for name in row_key_spec.addable_columns]

    def read_changes(self, catch_up: PartitionCatchUp) -> pa.Table:
        """The last record of each row in these files, also of rows that it deletes."""
        own_files_only = all(_is_only_of(file, catch_up.partition) for file in catch_up.files)
        # Our own files come in the order of their offsets, and so do their row groups. Those of
        # several topic ids, and those of somebody else, are sorted.
        is_ordered = len(catch_up.topic_ids) == 1 and own_files_only
        last_records = LastRecords(self.row_columns, () if is_ordered else catch_up.topic_ids)
        last_records.add(self.change_schema.empty_table())
        for file in catch_up.files:
            is_own_file = _is_only_of(file, catch_up.partition)
            for records in self._read_file(file, catch_up, is_own_file=is_own_file):
                last_records.add(records, in_order=is_own_file)
        changes = last_records.finish()
        return self.change_schema.empty_table() if changes is None else changes

    def merge(
        self,
        previous_rows: pa.Table | None,
        changes: pa.Table,
        partition: Partition,
    ) -> pa.Table:
        """The previous rows with the changes applied, sorted by session and key as in the table."""
        rows = self._rows_of_changes(changes, partition)
        is_gone = deleted_mask(changes, self.row_key_spec)
        if previous_rows is not None:
            previous = previous_rows.select(self.schema.names).cast(self.schema)
            rows = pa.concat_tables([previous, rows])
            is_gone = np.concatenate([np.zeros(previous.num_rows, bool), is_gone])
        last = RecordGroups(rows, self.row_columns).last_rows()
        remaining = rows.take(pa.array(last[~is_gone[last]]))
        return remaining.sort_by([(name, "ascending") for name in self.row_columns])

    def _rows_of_changes(self, changes: pa.Table, partition: Partition) -> pa.Table:
        """Changes with the columns of the table: topic and partition added."""
        count = changes.num_rows
        added = {
            "topic": pa.repeat(partition.topic, count),
            "partition": pa.repeat(pa.scalar(partition.number, pa.int32()), count),
        }
        columns = dict(added)
        for name in self.schema.names:
            if name not in added:
                columns[name] = changes.column(name)
        return pa.Table.from_arrays(
            [columns[name] for name in self.schema.names], schema=self.schema
        )

    def _read_file(
        self, file: File, catch_up: PartitionCatchUp, *, is_own_file: bool
    ) -> Iterator[pa.Table]:
        """The records of a file that are asked for, row group by row group."""
        columns = list(self.change_schema.names)
        if not is_own_file:
            columns += OWNER_COLUMNS
        first_offset = catch_up.first_new_offset
        try:
            for table in read_row_groups(self.store, file.path, columns, first_offset):
                mask = self._asked_for_mask(table, catch_up, file, is_own_file=is_own_file)
                records = with_added_columns(table.filter(mask), self.addable_fields)
                yield records.select(self.change_schema.names).cast(self.change_schema)
        except READ_ERRORS as error:
            raise _unreadable_error(self.stream, file, error) from error

    def _asked_for_mask(
        self,
        table: pa.Table,
        catch_up: PartitionCatchUp,
        file: File,
        *,
        is_own_file: bool,
    ) -> pa.ChunkedArray:
        """Which records of a row group are of the partition, and new."""
        mask = pc.is_in(table.column("topic_id"), pa.array(catch_up.topic_ids))
        if catch_up.is_full_rebuild:
            if is_own_file:
                ensure(
                    pc.all(mask).as_py(),
                    "every topic id of a partition is in the ledger",
                    file=file.path,
                    topic_ids=list(catch_up.topic_ids),
                )
        else:
            is_new = pc.greater_equal(table.column("offset"), catch_up.first_new_offset)
            mask = pc.and_(mask, is_new)
        if not is_own_file:
            partition = catch_up.partition
            mask = pc.and_(mask, pc.equal(table.column("topic"), partition.topic))
            mask = pc.and_(mask, pc.equal(table.column("partition"), partition.number))
        return mask


def _is_only_of(file: File, partition: Partition) -> bool:
    """Whether a file has records of this partition alone, as all our own files do."""
    return file.path.startswith(f"records/{partition}/")


def _unreadable_error(stream: str, file: File, error: Exception) -> DamagedFileError:
    if isinstance(error, FileNotFoundError):
        problem = "is missing"
        cause = ""
    else:
        problem = "cannot be read"
        cause = first_line(error)[:300]
    return DamagedFileError(
        f"{file.path} {problem}",
        path=file.path,
        cause=cause,
        next=f"`seriatim verify {stream}` says what is damaged."
        " The files of an old entry may be deleted by now:\n"
        "then publish a later one",
    )
