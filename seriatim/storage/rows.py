"""Rows: what record files say last of each row, and how that is laid over the rows of before.
Arrow, no Delta.

Files of ours are read row group by row group, only those that may have something new, and reduced
at once: memory holds the rows that changed, not the records.

Next room: storage/current_table.py keeps the rows.
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
from seriatim.errors import DamagedFileError, ensure
from seriatim.ledger.model import File
from seriatim.storage.current_rows import PartitionCatchUp, RowKeySpec

RECORD_COLUMNS = ("topic", "topic_id", "partition", "session", "offset", "sequence", "timestamp")
"""What each row has beside the machine's columns: the record that last touched it."""
BUFFERED_ROWS_MAX = 2_000_000
"""Rows that wait to be reduced together."""
READ_ERRORS = (OSError, pa.ArrowException, KeyError)


class RowMerger:
    """Reads the records of one stream, and knows which of two is the later word about a row."""

    def __init__(
        self, root: Path, stream: str, records: pa.Schema, row_key_spec: RowKeySpec
    ) -> None:
        self.root, self.stream, self.row_key_spec = root, stream, row_key_spec
        self.schema = pa.schema(
            [records.field(name) for name in (*RECORD_COLUMNS, *row_key_spec.columns)]
        )
        self.column_names = [
            "topic_id",
            "session",
            "offset",
            "index",
            "sequence",
            "timestamp",
            *row_key_spec.columns,
        ]
        self.change_schema = pa.schema(
            [*(records.field(name) for name in self.column_names), pa.field("_gone", pa.bool_())]
        )

    def read_changes(self, catch_up_derived: PartitionCatchUp) -> pa.Table:
        """The last word of a partition's records about each row, also that it is gone."""
        gathered, rows = [self.change_schema.empty_table()], 0
        for file in catch_up_derived.files:
            for table in self._read_file(file, catch_up_derived):
                gathered.append(table)
                rows += table.num_rows
                if rows > BUFFERED_ROWS_MAX:
                    gathered = [self._last_in_order(gathered, catch_up_derived)]
                    rows = gathered[0].num_rows // 2
        return self._last_in_order(gathered, catch_up_derived)

    def merge(
        self, previous_rows: pa.Table | None, changes: pa.Table, partition: Partition
    ) -> pa.Table:
        """Changed rows over those of before, as the table has them: sorted by session and key."""
        count = changes.num_rows
        own = {
            "topic": pa.repeat(partition.topic, count),
            "partition": pa.repeat(pa.scalar(partition.number, pa.int32()), count),
        }
        columns = [
            own.get(name, changes.column(name) if name in changes.column_names else None)
            for name in RECORD_COLUMNS
        ]
        columns += [changes.column(name) for name in self.row_key_spec.columns]
        new = pa.Table.from_arrays(columns, schema=self.schema)
        gone = changes.column("_gone").combine_chunks()
        if previous_rows is not None:
            old = previous_rows.select(self.schema.names).cast(self.schema)
            both = pa.concat_tables([old, new]).append_column(
                "_gone", pa.concat_tables([_not_deleted_table(old), _deleted_table(gone)])["_gone"]
            )
            last = self._last_by_key(both)
            new, gone = last.select(self.schema.names), last.column("_gone").combine_chunks()
        kept = new.filter(pc.invert(gone))
        return kept.sort_by([(name, "ascending") for name in ("session", *self.row_key_spec.key)])

    def _last_in_order(
        self, tables: list[pa.Table], catch_up_derived: PartitionCatchUp
    ) -> pa.Table:
        """The last word, whatever the order of the files: by life of the topic, offset and index."""
        whole = pa.concat_tables(tables)
        if len(catch_up_derived.topic_ids) == 1 and all(
            _is_only_of(file, catch_up_derived.partition) for file in catch_up_derived.files
        ):
            return self._last_by_key(
                whole
            )  # files of ours come by offset, and so do their row groups
        life = pc.index_in(whole.column("topic_id"), pa.array(catch_up_derived.topic_ids))
        order = [("_life", "ascending"), ("offset", "ascending"), ("index", "ascending")]
        return self._last_by_key(
            whole.append_column("_life", life).sort_by(order).drop_columns("_life")
        )

    def _last_by_key(self, table: pa.Table) -> pa.Table:
        """The last of each row, by position."""
        names = ["session", *self.row_key_spec.key]
        numbered = pa.table({name: _normalize_zero(table.column(name)) for name in names})
        numbered = numbered.append_column("_row", pa.array(np.arange(table.num_rows)))
        last = numbered.group_by(names, use_threads=False).aggregate([("_row", "max")])
        return table.take(last.column("_row_max"))

    def _read_file(self, file: File, catch_up_derived: PartitionCatchUp) -> Iterator[pa.Table]:
        """A file's last words, row group by row group."""
        ours = _is_only_of(file, catch_up_derived.partition)
        wanted = [
            *self.column_names,
            *(name for name in self.row_key_spec.deleted_when if name not in self.column_names),
        ]
        try:
            with pq.ParquetFile(self.root / file.path, page_checksum_verification=True) as parquet:
                for group in range(parquet.num_row_groups):
                    if _highest_offset(parquet, group) < catch_up_derived.first_new_offset:
                        continue
                    table = parquet.read_row_group(
                        group, wanted if ours else [*wanted, "topic", "partition"]
                    )
                    yield self._reduce(table, catch_up_derived, file, is_own_file=ours)
        except READ_ERRORS as error:
            raise _unreadable_error(self.stream, file, error) from error

    def _reduce(
        self, table: pa.Table, catch_up_derived: PartitionCatchUp, file: File, *, is_own_file: bool
    ) -> pa.Table:
        mine = pc.is_in(table.column("topic_id"), pa.array(catch_up_derived.topic_ids))
        if catch_up_derived.is_full_rebuild:
            all_known = pc.all(mine).as_py() or not is_own_file or not table.num_rows
            ensure(
                all_known,
                "every life of a topic is in the ledger",
                file=file.path,
                lives=list(catch_up_derived.topic_ids),
            )
        else:
            mine = pc.and_(
                mine, pc.greater_equal(table.column("offset"), catch_up_derived.first_new_offset)
            )
        if not is_own_file:
            place = pc.equal(table.column("topic"), catch_up_derived.partition.topic)
            mine = pc.and_(
                mine,
                pc.and_(
                    place, pc.equal(table.column("partition"), catch_up_derived.partition.number)
                ),
            )
        table = table.filter(mine)
        gone = self._deleted_mask(table)
        table = (
            table.select(self.column_names).append_column("_gone", gone).cast(self.change_schema)
        )
        return self._last_by_key(table) if is_own_file else table

    def _deleted_mask(self, table: pa.Table) -> Any:
        """Which records take their row away."""
        if not self.row_key_spec.deleted_when:
            return pa.repeat(False, table.num_rows)
        gone = pa.repeat(True, table.num_rows)
        for name, value in self.row_key_spec.deleted_when.items():
            column = table.column(name)
            same = (
                pc.is_null(column)
                if value is None
                else pc.equal(column, pa.scalar(value, column.type))
            )
            gone = pc.and_(gone, pc.fill_null(same, False))
        return gone


def session_hashes(sessions: pa.ChunkedArray) -> Any:
    """A number for each session, always the same."""
    coded = sessions.combine_chunks().dictionary_encode()
    names = coded.dictionary.to_pylist()
    known = np.array(
        [xxhash.xxh3_64_intdigest(name.encode()) & 0xFFFFFFFF for name in names], np.int64
    )
    return known[coded.indices.to_numpy(zero_copy_only=False)]


def _normalize_zero(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values by which rows are told apart: to a machine -0.0 is 0.0, to Arrow it is another key."""
    return pc.add(column, 0.0) if pa.types.is_floating(column.type) else column


def _is_only_of(file: File, partition: Partition) -> bool:
    """Whether a file is of this partition alone, as all of ours are."""
    return file.path.startswith(f"records/{partition}/")


def _not_deleted_table(table: pa.Table) -> pa.Table:
    return pa.table({"_gone": pa.repeat(False, table.num_rows)})


def _deleted_table(is_deleted: pa.Array) -> pa.Table:
    return pa.table({"_gone": is_deleted})


def _highest_offset(parquet: pq.ParquetFile, group: int) -> int:
    """The highest offset of a row group; a file that does not say may have any."""
    columns = parquet.metadata.row_group(group)
    for number in range(columns.num_columns):
        column = columns.column(number)
        if (
            column.path_in_schema == "offset"
            and column.statistics is not None
            and column.statistics.has_min_max
        ):
            return int(column.statistics.max)
    return 2**63


def _unreadable_error(stream: str, file: File, error: Exception) -> DamagedFileError:
    missing = isinstance(error, FileNotFoundError)
    return DamagedFileError(
        f"{file.path} {'is missing' if missing else 'cannot be read'}",
        path=file.path,
        cause="" if missing else (str(error).strip() or type(error).__name__).splitlines()[0][:300],
        next=f"`seriatim verify {stream}` says what is damaged. The files of an old entry may be deleted by now:\n"
        "then publish a later one",
    )
