"""The table `current` in memory.

Next room: operations/publish.py brings it to an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from seriatim.engine.crash_points import crash_point
from seriatim.engine.offsets import Partition
from seriatim.engine.record_kinds import RowKeySpec
from seriatim.ledger.model import File, Ledger
from seriatim.ports import CommitConflictError
from seriatim.storage.current_rows import (
    CurrentWriteResult,
    PartitionCatchUp,
    PublishedVersion,
    TopicIdsByPartition,
    is_row_deleted,
)

OWN_COLUMNS = ("topic", "topic_id", "partition", "session", "offset", "sequence", "timestamp")
CurrentRowsByKey = dict[tuple[Any, ...], dict[str, Any]]
"""By session and key."""


class MemoryCurrentVersion(Struct, frozen=True):
    """The table as of one commit."""

    version: int
    sequence: int
    sha256: str
    topic_ids: TopicIdsByPartition
    rows: dict[Partition, CurrentRowsByKey]


class MemoryCurrent:
    """Implements `CurrentStore`."""

    def __init__(
        self, row_key_spec: RowKeySpec, read: Callable[[File], list[dict[str, Any]]]
    ) -> None:
        self.row_key_spec, self.read = row_key_spec, read
        """The rows of a record file."""
        self.table: MemoryCurrentVersion | None = None
        self.refusals = 0
        """So many puts fail, with nobody else there."""

    def rows(self) -> list[dict[str, Any]]:
        """What a reader sees, in order."""
        parts = self.table.rows if self.table else {}
        return [
            parts[place][key] for place in sorted(parts) for key in sorted(parts[place], key=repr)
        ]

    def published_version(self) -> PublishedVersion:
        """How far the table is."""
        found = self.table
        return (
            PublishedVersion(found.sequence, found.sha256, found.topic_ids, found.version)
            if found
            else PublishedVersion()
        )

    def put_rows(
        self,
        expected: PublishedVersion,
        ledger: Ledger,
        topic_ids: TopicIdsByPartition,
        catch_ups: Sequence[PartitionCatchUp],
        progress: Callable[[int], None],
    ) -> CurrentWriteResult:
        """Bring these partitions up, all at once."""
        found = self.table
        parts = dict(found.rows) if found and expected.sequence >= 0 else {}
        for catch in catch_ups:
            parts[catch.partition] = self._apply_records(parts.get(catch.partition, {}), catch)
            crash_point("current-half")
        crash_point("current-written")
        if self.refusals:
            self.refusals -= 1
            raise CommitConflictError("the store did not answer")
        if expected.token != (found.version if found else None):
            raise CommitConflictError("somebody else committed meanwhile")
        self.table = MemoryCurrentVersion(
            found.version + 1 if found else 0, ledger.sequence, ledger.sha256, topic_ids, parts
        )
        progress(sum(catch.record_count() for catch in catch_ups))
        touched = [parts[catch.partition] for catch in catch_ups]
        return CurrentWriteResult(
            written_rows=sum(map(len, touched)), written_files=sum(map(bool, touched))
        )

    def _apply_records(
        self, before: CurrentRowsByKey, catch_up_derived: PartitionCatchUp
    ) -> CurrentRowsByKey:
        rows: CurrentRowsByKey = {} if catch_up_derived.is_full_rebuild else dict(before)
        for record in sorted(
            self._records(catch_up_derived),
            key=lambda row: _record_order(row, catch_up_derived.topic_ids),
        ):
            name = (record["session"], *(record[column] for column in self.row_key_spec.key))
            rows.pop(name, None)
            if not is_row_deleted(self.row_key_spec, record):
                rows[name] = {
                    column: record[column] for column in (*OWN_COLUMNS, *self.row_key_spec.columns)
                }
        return rows

    def _records(self, catch_up_derived: PartitionCatchUp) -> Iterator[dict[str, Any]]:
        for file in catch_up_derived.files:
            for row in self.read(file):
                mine = Partition(row["topic"], row["partition"]) == catch_up_derived.partition
                if (
                    mine
                    and row["topic_id"] in catch_up_derived.topic_ids
                    and row["offset"] >= catch_up_derived.first_new_offset
                ):
                    yield row


def _record_order(row: dict[str, Any], lives: tuple[str, ...]) -> tuple[int, int, int]:
    return lives.index(row["topic_id"]), row["offset"], row["index"]
