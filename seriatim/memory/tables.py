"""The tables that follow the ledger, in memory: gaps, quarantine, further kinds of records, current.

Next: operations/followers.py brings them up to the ledger; operations/publish.py has `current`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import File, file_paths
from seriatim.engine.offsets import Partition
from seriatim.engine.records import LAST_RECORD_COLUMNS, Record, RowKeySpec
from seriatim.engine.session import Row
from seriatim.ledger.current_rows import (
    CurrentWriteResult,
    PartitionCatchUp,
    TopicIdsByPartition,
)
from seriatim.ledger.gaps import Gap, QuarantineFile, quarantine_release_finder
from seriatim.ledger.model import EntryMark
from seriatim.ports import (
    AppliedVersion,
    CommitConflictError,
    DerivedTableName,
    OutputStore,
    PartitionFiles,
    PublishedVersion,
)

CurrentRowsByKey = dict[Row, Record]
"""The rows by session and key."""


class MemoryTableVersion(Struct, frozen=True):
    """A table after one commit."""

    version: int
    entry: EntryMark
    rows: Any
    """The rows, or the files."""


class MemoryTables:
    """Tables by name. A commit is made on exactly the version that was read before."""

    def __init__(self) -> None:
        self.versions: dict[str, list[MemoryTableVersion]] = {}
        """The versions of each table, oldest first."""
        self.refusals = 0
        """How many of the next commits fail, although nobody else committed."""

    @property
    def commits(self) -> int:
        """How many commits were made so far."""
        return sum(len(versions) for versions in self.versions.values())

    def newest(self, table: str) -> MemoryTableVersion | None:
        """The table as it is; None if there is no such table."""
        if table not in self.versions:
            return None
        return self.versions[table][-1]

    def _commit(self, table: str, expected: AppliedVersion, entry: EntryMark, rows: Any) -> None:
        if self.refusals:
            self.refusals -= 1
            raise CommitConflictError("the store did not answer")
        newest = self.newest(table)
        version = None if newest is None else newest.version
        if expected.token != version:
            raise CommitConflictError("somebody else committed meanwhile")
        versions = self.versions.setdefault(table, [])
        versions.append(MemoryTableVersion(len(versions), entry, rows))


class MemoryDerived(MemoryTables):
    """The tables `gaps` and `quarantine`. Implements `DerivedStore`."""

    def __init__(
        self,
        read: Callable[[File], list[Record]],
        outputs: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.read = read
        """Gives the rows of a file of quarantined messages."""
        self.outputs = MemoryOutputs(outputs)
        self.output_store: OutputStore | None = self.outputs if outputs else None
        self.up_to_date_note: tuple[EntryMark, dict[str, int]] = (EntryMark(), {})
        self.open_gaps = 0

    def rows(self, table: DerivedTableName) -> list[Record]:
        """What a reader of a table sees."""
        newest = self.newest(table)
        if newest is None:
            return []
        if table == "gaps":
            return [gap.to_row() for gap in newest.rows]
        return [dict(row) for row in newest.rows]

    def applied_version(self, table: DerivedTableName) -> AppliedVersion:
        """The entry that a table has reached: the one of its last commit, or a later one if nothing
        had to be put since.
        """
        newest = self.newest(table)
        if newest is None:
            return AppliedVersion()
        entry = newest.entry
        noted_entry, noted_versions = self.up_to_date_note
        is_of_this_version = noted_versions.get(table) == newest.version
        if is_of_this_version and noted_entry.sequence > entry.sequence:
            entry = noted_entry
        return AppliedVersion(entry.sequence, entry.sha256, newest.version)

    def gaps(self, _: AppliedVersion) -> list[Gap]:
        """The gaps as they are."""
        return list(self.versions["gaps"][-1].rows)

    def put_gaps(
        self,
        expected: AppliedVersion,
        entry: EntryMark,
        gaps: Sequence[Gap],
    ) -> None:
        """Replace all gaps."""
        self._commit("gaps", expected, entry, list(gaps))

    def put_quarantine(
        self,
        expected: AppliedVersion,
        entry: EntryMark,
        quarantine_files: Sequence[QuarantineFile],
        released_gaps: Sequence[Gap],
    ) -> None:
        """Add messages, and how messages were released."""
        find_release = quarantine_release_finder(released_gaps)
        rows = self.rows("quarantine") if expected.sequence >= 0 else []
        not_released = {"released_by": None, "released_how": None, "released_offset": None}
        for quarantine_file in quarantine_files:
            for message in self.read(quarantine_file.file):
                rows.append({**message, "kept_by": quarantine_file.sequence, **not_released})
        for row in rows:
            gap = find_release(row) if row["released_by"] is None else None
            if gap is not None:
                row.update(gap.release_columns())
        self._commit("quarantine", expected, entry, rows)

    def noted_open_gaps(self, applied: AppliedVersion) -> int | None:
        """How many gaps were open when this version was noted; None: not known."""
        is_noted = self.up_to_date_note[1].get("gaps") == applied.token
        return self.open_gaps if is_noted else None

    def note_up_to_date(self, entry: EntryMark, open_gaps: int) -> None:
        """Note that both tables show this entry, and at which versions that is true."""
        self.open_gaps = open_gaps
        noted_versions = {}
        for table, versions in self.versions.items():
            noted_versions[table] = versions[-1].version
        self.up_to_date_note = (entry, noted_versions)


class MemoryOutputs(MemoryTables):
    """The tables of further kinds of records. Implements `OutputStore`. Their rows are files."""

    def __init__(self, tables: Sequence[str]) -> None:
        super().__init__()
        self.tables = tables

    def files(self, table: str) -> list[File]:
        """The files that a reader of a table sees."""
        newest = self.newest(table)
        return list(newest.rows) if newest else []

    def applied_version(self, table: str) -> AppliedVersion:
        """The entry that a table has reached."""
        newest = self.newest(table)
        if newest is None:
            return AppliedVersion()
        return AppliedVersion(newest.entry.sequence, newest.entry.sha256, newest.version)

    def put_files(
        self,
        table: str,
        expected: AppliedVersion,
        entry: EntryMark,
        added: PartitionFiles,
        removed: Sequence[str],
    ) -> None:
        """Add and remove files. A table that has reached no entry gets the added files alone."""
        files = self.files(table) if expected.sequence >= 0 else []
        not_active = set(removed).difference(file_paths(files))
        if not_active:
            raise CommitConflictError(f"{min(not_active)} is not in the table")
        files_after = [file for file in files if file.path not in removed]
        files_after += [file for _, file in added]
        self._commit(table, expected, entry, files_after)


class MemoryCurrent(MemoryTables):
    """Implements `CurrentStore`. `read` gives the rows of a record file."""

    def __init__(
        self,
        row_key_spec: RowKeySpec,
        read: Callable[[File], list[Record]],
    ) -> None:
        super().__init__()
        self.row_key_spec = row_key_spec
        self.read = read
        self.topic_ids: TopicIdsByPartition = {}

    @property
    def table(self) -> MemoryTableVersion | None:
        """The table as it is. Its rows are by partition."""
        return self.newest("current")

    def rows(self) -> list[Record]:
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

    def _ordered_records(self, catch_up: PartitionCatchUp) -> list[Record]:
        """The new records of a partition by topic id, offset and index."""
        records = []
        for file in catch_up.files:
            records += [record for record in self.read(file) if _is_new(record, catch_up)]

        def order(record: Record) -> tuple[int, int, int]:
            id_number = catch_up.topic_ids.index(record["topic_id"])
            return id_number, record["offset"], record["index"]

        return sorted(records, key=order)


def _is_new(record: Record, catch_up: PartitionCatchUp) -> bool:
    """Whether a record belongs to this partition and is not in the rows yet."""
    if Partition(record["topic"], record["partition"]) != catch_up.partition:
        return False
    if record["topic_id"] not in catch_up.topic_ids:
        return False
    return bool(record["offset"] >= catch_up.first_new_offset)
