"""The rows that record files describe: the last record of each row, merged with the rows before.
Arrow only, no Delta.

Our own files are read row group by row group, and only those that may have something new. Each is
reduced at once: memory holds the rows that changed, not the records.

Next: storage/current_table.py stores the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from seriatim.engine.offsets import Partition
from seriatim.engine.record_kinds import RowKeySpec
from seriatim.errors import DamagedFileError, ensure
from seriatim.ledger.model import File
from seriatim.storage.current_rows import PartitionCatchUp
from seriatim.storage.delta import first_line

RECORD_COLUMNS = ("topic", "topic_id", "partition", "session", "offset", "sequence", "timestamp")
"""What each row has beside the machine's columns: the record that changed it last."""
BUFFERED_ROWS_MAX = 2_000_000
"""Rows in memory that wait to be reduced together."""
READ_ERRORS = (OSError, pa.ArrowException, KeyError)
ID_NUMBER = "_topic_id_number"
"""A column that exists while rows are sorted. No machine is likely to have one of this name."""


class RowMerger:
    """Reads the records of one stream, and knows which of two records of a row is the later one."""

    def __init__(
        self,
        root: Path,
        stream: str,
        records: pa.Schema,
        row_key_spec: RowKeySpec,
    ) -> None:
        self.root = root
        self.stream = stream
        self.row_key_spec = row_key_spec
        row_columns = [*RECORD_COLUMNS, *row_key_spec.columns]
        self.schema = pa.schema([records.field(name) for name in row_columns])
        self.column_names = [
            "topic_id",
            "session",
            "offset",
            "index",
            "sequence",
            "timestamp",
            *row_key_spec.columns,
        ]
        change_fields = [records.field(name) for name in self.column_names]
        self.change_schema = pa.schema([*change_fields, pa.field("_gone", pa.bool_())])

    def read_changes(self, catch_up: PartitionCatchUp) -> pa.Table:
        """The last record of each row in these files, with `_gone` if it deletes the row."""
        tables = [self.change_schema.empty_table()]
        buffered_rows = 0
        for file in catch_up.files:
            for table in self._read_file(file, catch_up):
                tables.append(table)
                buffered_rows += table.num_rows
                if buffered_rows > BUFFERED_ROWS_MAX:
                    reduced = self._last_in_order(tables, catch_up)
                    tables = [reduced]
                    # Counted half: if nearly all rows are distinct, reducing them again after each
                    # further file would cost more than it frees.
                    buffered_rows = reduced.num_rows // 2
        return self._last_in_order(tables, catch_up)

    def merge(
        self,
        previous_rows: pa.Table | None,
        changes: pa.Table,
        partition: Partition,
    ) -> pa.Table:
        """The previous rows with the changes applied, sorted by session and key as in the table."""
        rows = self._rows_of_changes(changes, partition)
        is_gone = changes.column("_gone").combine_chunks()
        if previous_rows is not None:
            previous = previous_rows.select(self.schema.names).cast(self.schema)
            previous = previous.append_column("_gone", pa.repeat(False, previous.num_rows))
            both = pa.concat_tables([previous, rows.append_column("_gone", is_gone)])
            newest = self._last_by_key(both)
            rows = newest.select(self.schema.names)
            is_gone = newest.column("_gone").combine_chunks()
        remaining = rows.filter(pc.invert(is_gone))
        order = [(name, "ascending") for name in ("session", *self.row_key_spec.key)]
        return remaining.sort_by(order)

    def _rows_of_changes(self, changes: pa.Table, partition: Partition) -> pa.Table:
        """Changes with the columns of the table: topic and partition added, `_gone` left out."""
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

    def _last_in_order(self, tables: list[pa.Table], catch_up: PartitionCatchUp) -> pa.Table:
        """The last record of each row by topic id, offset and index, whatever the order of the
        files.
        """
        table = pa.concat_tables(tables)
        own_files_only = all(_is_only_of(file, catch_up.partition) for file in catch_up.files)
        if len(catch_up.topic_ids) == 1 and own_files_only:
            # Our own files come in the order of their offsets, and so do their row groups.
            return self._last_by_key(table)
        id_number = pc.index_in(table.column("topic_id"), pa.array(catch_up.topic_ids))
        order = [(ID_NUMBER, "ascending"), ("offset", "ascending"), ("index", "ascending")]
        ordered = table.append_column(ID_NUMBER, id_number).sort_by(order)
        return self._last_by_key(ordered.drop_columns(ID_NUMBER))

    def _last_by_key(self, table: pa.Table) -> pa.Table:
        """The last record of each row, by its position in the table."""
        names = ["session", *self.row_key_spec.key]
        keys = pa.table({name: _normalize_zero(table.column(name)) for name in names})
        numbered = keys.append_column("_row", pa.array(np.arange(table.num_rows)))
        newest = numbered.group_by(names, use_threads=False).aggregate([("_row", "max")])
        return table.take(newest.column("_row_max"))

    def _read_file(self, file: File, catch_up: PartitionCatchUp) -> Iterator[pa.Table]:
        """The changes in a file, row group by row group."""
        is_own_file = _is_only_of(file, catch_up.partition)
        columns = list(self.column_names)
        columns += [name for name in self.row_key_spec.deleted_when if name not in columns]
        if not is_own_file:
            columns += ["topic", "partition"]
        try:
            with pq.ParquetFile(self.root / file.path, page_checksum_verification=True) as parquet:
                for group in range(parquet.num_row_groups):
                    if _highest_offset(parquet, group) < catch_up.first_new_offset:
                        continue
                    table = parquet.read_row_group(group, columns)
                    yield self._reduce(table, catch_up, file, is_own_file=is_own_file)
        except READ_ERRORS as error:
            raise _unreadable_error(self.stream, file, error) from error

    def _reduce(
        self,
        table: pa.Table,
        catch_up: PartitionCatchUp,
        file: File,
        *,
        is_own_file: bool,
    ) -> pa.Table:
        """The changes in a row group, without records that are not asked for."""
        mask = pc.is_in(table.column("topic_id"), pa.array(catch_up.topic_ids))
        if catch_up.is_full_rebuild:
            if is_own_file and table.num_rows:
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
        records = table.filter(mask)
        is_gone = self._deleted_mask(records)
        changes = records.select(self.column_names).append_column("_gone", is_gone)
        changes = changes.cast(self.change_schema)
        if not is_own_file:
            # A file of somebody else may have its records in any order.
            return changes
        return self._last_by_key(changes)

    def _deleted_mask(self, table: pa.Table) -> Any:
        """Which records delete their row."""
        if not self.row_key_spec.deleted_when:
            return pa.repeat(False, table.num_rows)
        mask = pa.repeat(True, table.num_rows)
        for name, value in self.row_key_spec.deleted_when.items():
            column = table.column(name)
            is_equal = pc.is_null(column)
            if value is not None:
                # Not for None: Arrow cannot compare lists, but every column can be null.
                is_equal = pc.equal(column, pa.scalar(value, column.type))
            mask = pc.and_(mask, pc.fill_null(is_equal, False))
        return mask


def session_hashes(sessions: pa.ChunkedArray) -> Any:
    """The hash of each session, as a number of 32 bits. It is part of file layouts and must never
    change.
    """
    encoded = sessions.combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    hashes = [xxhash.xxh3_64_intdigest(name.encode()) & 0xFFFFFFFF for name in names]
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    return np.array(hashes, np.int64)[codes]


def _normalize_zero(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A key column in which -0.0 is 0.0: to a machine they are the same key, to Arrow they are
    not.
    """
    if pa.types.is_floating(column.type):
        return pc.add(column, 0.0)
    return column


def _is_only_of(file: File, partition: Partition) -> bool:
    """Whether a file has records of this partition alone, as all our own files do."""
    return file.path.startswith(f"records/{partition}/")


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
