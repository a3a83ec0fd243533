"""The rows of the table `current`: what record files say of them, merged with the rows before. Arrow
only, no Delta.

Only row groups that may have something new are read.

Next: record_rows.py folds the records; storage/current_table.py stores the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import LAST_RECORD_COLUMNS, RowKeySpec
from seriatim.errors import DamagedFileError, ensure
from seriatim.storage.current_rows import PartitionCatchUp
from seriatim.storage.delta_table import first_line
from seriatim.storage.record_rows import LastRecords, RecordGroups, deleted_mask, read_row_groups
from seriatim.storage.store import Store

OWNER_COLUMNS = ("topic", "partition")
READ_ERRORS = (OSError, pa.ArrowException, KeyError)


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
                yield table.filter(mask).select(self.change_schema.names).cast(self.change_schema)
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


def session_hashes(sessions: pa.ChunkedArray) -> Any:
    """The hash of each session, as a number of 32 bits. It is part of file layouts and must never
    change.
    """
    encoded = sessions.combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    hashes = [xxhash.xxh3_64_intdigest(name.encode()) & 0xFFFFFFFF for name in names]
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    return np.array(hashes, np.int64)[codes]


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
