"""The table `current` in memory.

Next: operations/publish.py brings it to an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import LAST_RECORD_COLUMNS, RowKeySpec
from seriatim.ledger.current_rows import CurrentWriteResult, PartitionCatchUp, TopicIdsByPartition
from seriatim.memory.derived_tables import MemoryTables, MemoryTableVersion
from seriatim.ports import EntryMark, PublishedVersion

CurrentRowsByKey = dict[tuple[Any, ...], dict[str, Any]]
"""The rows by session and key."""


class MemoryCurrent(MemoryTables):
    """Implements `CurrentStore`. `read` gives the rows of a record file."""

    def __init__(
        self,
        row_key_spec: RowKeySpec,
        read: Callable[[File], list[dict[str, Any]]],
    ) -> None:
        super().__init__()
        self.row_key_spec = row_key_spec
        self.read = read
        self.topic_ids: TopicIdsByPartition = {}

    @property
    def table(self) -> MemoryTableVersion | None:
        """The table as it is. Its rows are by partition."""
        return self.newest("current")

    def rows(self) -> list[dict[str, Any]]:
        """What a reader sees, in order."""
        if self.table is None:
            return []
        rows = []
        for _, rows_by_key in sorted(self.table.rows.items()):
            rows += [rows_by_key[key] for key in sorted(rows_by_key, key=repr)]
        return rows

    def published_version(self) -> PublishedVersion:
        """The entry that the table shows."""
        table = self.table
        if table is None:
            return PublishedVersion()
        entry = table.entry
        return PublishedVersion(entry.sequence, entry.sha256, table.version, self.topic_ids)

    def put_rows(
        self,
        expected: PublishedVersion,
        entry: EntryMark,
        topic_ids: TopicIdsByPartition,
        catch_ups: Sequence[PartitionCatchUp],
        progress: Callable[[int], None],
    ) -> CurrentWriteResult:
        """Bring these partitions to an entry, all at once."""
        rows: dict[Partition, CurrentRowsByKey] = {}
        if self.table is not None and expected.sequence >= 0:
            rows.update(self.table.rows)
        result = CurrentWriteResult()
        for catch_up in catch_ups:
            partition_rows = self._apply_records(rows.get(catch_up.partition, {}), catch_up)
            rows[catch_up.partition] = partition_rows
            result = CurrentWriteResult(
                written_rows=result.written_rows + len(partition_rows),
                written_files=result.written_files + bool(partition_rows),
            )
            crash_point("current-half")
        crash_point("current-written")
        self._commit("current", expected, entry, rows)
        self.topic_ids = topic_ids
        progress(sum(catch_up.record_count() for catch_up in catch_ups))
        return result

    def _apply_records(
        self,
        rows_before: CurrentRowsByKey,
        catch_up: PartitionCatchUp,
    ) -> CurrentRowsByKey:
        rows: CurrentRowsByKey = {}
        if not catch_up.is_full_rebuild:
            rows.update(rows_before)
        columns = (*LAST_RECORD_COLUMNS, *self.row_key_spec.columns)
        for record in self._ordered_records(catch_up):
            key_values = [record[column] for column in self.row_key_spec.key]
            row_key = (record["session"], *key_values)
            rows.pop(row_key, None)
            if not self.row_key_spec.deletes_row(record):
                rows[row_key] = {column: record[column] for column in columns}
        return rows

    def _ordered_records(self, catch_up: PartitionCatchUp) -> list[dict[str, Any]]:
        """The new records of a partition by topic id, offset and index."""
        records = []
        for file in catch_up.files:
            records += [record for record in self.read(file) if _is_new(record, catch_up)]

        def order(record: dict[str, Any]) -> tuple[int, int, int]:
            id_number = catch_up.topic_ids.index(record["topic_id"])
            return id_number, record["offset"], record["index"]

        return sorted(records, key=order)


def _is_new(record: dict[str, Any], catch_up: PartitionCatchUp) -> bool:
    """Whether a record belongs to this partition and is not in the rows yet."""
    if Partition(record["topic"], record["partition"]) != catch_up.partition:
        return False
    if record["topic_id"] not in catch_up.topic_ids:
        return False
    return bool(record["offset"] >= catch_up.first_new_offset)
