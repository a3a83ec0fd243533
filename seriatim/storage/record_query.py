"""Records of a Delta table, found by the values of their columns or read range by range in order.

The table is read as of when it was opened, and nothing is changed. Files that the Delta log or
their own statistics rule out are not read.

Next: operations/inspect/explain.py and operations/inspect/diff.py ask; ledger/delta_store.py
commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from operator import and_
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.records import (
    MAIN_TABLE,
    ORDER_COLUMNS,
    OTHER_TABLE_PREFIX,
    owner_values,
    table_directory,
)
from seriatim.errors import ConfigError, DamagedFileError
from seriatim.storage.delta_table import STORAGE_ERRORS, MarkedTable, TableFile
from seriatim.storage.parquet import first_line, with_added_columns
from seriatim.storage.store import Store


class RecordQuery:
    """A table of records: `records/` below an output path, or below a folder that a replay wrote.

    `stream` is the stream whose output it is; None if a replay wrote it.
    """

    def __init__(
        self,
        store: Store,
        stream: str | None,
        version: int | None = None,
    ) -> None:
        self.store = store
        self.stream = stream
        self._marked_table = MarkedTable(store, table_directory(MAIN_TABLE))
        try:
            loaded = self._marked_table.load(version)
            table = None if loaded is None else loaded.delta
            trouble = "it has no Delta log"
        except STORAGE_ERRORS as error:
            loaded = table = None
            trouble = first_line(error)[:200]
        if loaded is None or table is None:
            raise ConfigError(
                f"{store.url}: there is no table of records in it: {trouble}",
                next="give the name of a stream that was run, "
                "or a folder that `seriatim replay … --to` wrote",
            )
        self._loaded = loaded
        self.table = table

    @property
    def version(self) -> int:
        """The version of the table that is read."""
        return self.table.version()

    @cached_property
    def columns(self) -> list[str]:
        """The names of all columns."""
        return [field.name for field in self.table.schema().fields]

    @property
    def other_tables(self) -> list[str]:
        """The names of the machine's other tables, beside this one."""
        names = self.store.folders("")
        return [name for name in names if name.startswith(OTHER_TABLE_PREFIX)]

    def find_records(self, column_values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The records that have these values."""
        for file in self._files:
            yield from self._read_file(file, column_values, None, None).to_pylist()

    def read(
        self,
        partition_and_topic_id: tuple[Partition, str],
        offset_range: OffsetRange,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """The records of a range, sorted by offset and index."""
        partition, topic_id = partition_and_topic_id
        owner = owner_values(partition, topic_id)
        near_files = [file for file in self._files if _may_have_offsets(file, offset_range)]
        tables = [self._empty_table(columns)]
        tables += [self._read_file(file, owner, offset_range, columns) for file in near_files]
        order = [(name, "ascending") for name in ORDER_COLUMNS]
        return pa.concat_tables(tables).sort_by(order).combine_chunks()

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of the table with the types that Parquet files have, without views."""
        table_schema = pa.schema(self.table.schema().to_arrow())
        return pa.schema([(field.name, _parquet_type(field.type)) for field in table_schema])

    def _empty_table(self, columns: Sequence[str] | None) -> pa.Table:
        table = self.schema.empty_table()
        if columns is None:
            return table
        return table.select(list(columns))

    @cached_property
    def _files(self) -> list[TableFile]:
        """The files of the table, by folder and offset.

        The dataset of delta-rs is of no use here: with a filter it drops every row of a file whose
        statistics do not name each column, and ours name the offset alone.
        """
        files = self._marked_table.files(self._loaded).values()
        return sorted(files, key=lambda file: (file.key.rpartition("/")[0], file.lowest["offset"]))

    def _read_file(
        self,
        file: TableFile,
        column_values: Mapping[str, Any],
        offset_range: OffsetRange | None,
        columns: Sequence[str] | None,
    ) -> pa.Table:
        """The rows of one file with these values in this range.

        Columns by which the table is partitioned are not in the file, but in its partition values.
        """
        empty = self._empty_table(columns)
        conditions = []
        for name, value in column_values.items():
            if name not in file.partition_values:
                conditions.append(_equals_or_null(name, value))
            elif str(file.partition_values[name]) != str(value):
                return empty
        if offset_range is not None:
            conditions.append(pc.field("offset") >= offset_range.start)
            conditions.append(pc.field("offset") < offset_range.end)
        table = self._read_filtered(file, conditions)
        for name, value in file.partition_values.items():
            texts = pa.array([value] * table.num_rows, pa.string())
            table = table.append_column(name, texts.cast(self.schema.field(name).type))
        table = with_added_columns(table, empty.schema)
        return table.select(empty.column_names).cast(empty.schema)

    def _read_filtered(self, file: TableFile, conditions: list[pc.Expression]) -> pa.Table:
        condition = reduce(and_, conditions) if conditions else None
        try:
            with self.store.open(file.key) as file_content:
                return pq.read_table(
                    file_content, filters=condition, use_threads=False, partitioning=None
                )
        except (pa.ArrowException, OSError) as error:
            raise DamagedFileError(
                f"{self.store.url}/{file.key}: it cannot be read: {first_line(error)[:200]}",
                path=file.key,
                next=self._advice,
            ) from None

    @property
    def _advice(self) -> str:
        """What to do about a file that cannot be read."""
        if self.stream is None:
            return "fold the replay again into another folder"
        return f"seriatim verify {self.stream} tells what is damaged"


def _may_have_offsets(file: TableFile, offset_range: OffsetRange) -> bool:
    """Whether a file may have records in a range, by its statistics."""
    return file.lowest["offset"] < offset_range.end and offset_range.start <= file.highest["offset"]


def _equals_or_null(name: str, value: Any) -> pc.Expression:
    column = pc.field(name)
    if value is None:
        return column.is_null()
    return column == value


def _parquet_type(data_type: Any) -> pa.DataType:
    """A type as Parquet files have it: no views and no large types."""
    # Through a field: delta-rs has types of its own, which pyarrow converts only there.
    arrow_type = pa.field("x", data_type).type
    if pa.types.is_list(arrow_type):
        return pa.list_(_parquet_type(arrow_type.value_type))
    replacements = {
        pa.string_view(): pa.string(),
        pa.large_string(): pa.string(),
        pa.binary_view(): pa.binary(),
    }
    return replacements.get(arrow_type, arrow_type)
