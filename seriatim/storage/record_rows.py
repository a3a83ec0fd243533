"""Rows out of records: the last record of a row says what the row is, or that it is deleted.

This is the only place that folds records to rows. It serves the table `current` (rows.py), state
that is rebuilt from records (join.py), and `verify` and `check` (record_scan.py). Records come
as Arrow tables, in order, a row group at a time: memory holds the rows that changed, not the records.
No column is added to them, so a machine's columns may have any name.

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

from seriatim.engine.records import RowImage, RowKeySpec
from seriatim.storage.parquet import open_parquet
from seriatim.storage.store import Store

BUFFERED_ROWS_MAX = 2_000_000
"""Rows in memory that wait to be reduced together."""
ROWS_AT_ONCE = 50_000
"""Rows that become Python values at a time."""
RowNumbers = Any
"""A numpy array of row numbers."""


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
        values = _normalize_zero(column).combine_chunks()
        encoded = values.dictionary_encode(null_encoding="encode")
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        numbers = numbers * len(encoded.dictionary) + codes
        numbers_end *= len(encoded.dictionary)
        if numbers_end > 4 * len(numbers):
            # Numbered anew: the product of many columns would overflow, or need too much memory.
            encoded = pa.array(numbers).dictionary_encode()
            numbers = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
            numbers_end = len(encoded.dictionary)
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
    records: pa.Table, row_key_spec: RowKeySpec, rows: Iterable[tuple[Any, ...] | None]
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


def row_tuples(records: pa.Table, names: Sequence[str]) -> list[tuple[Any, ...]]:
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
