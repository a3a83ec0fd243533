"""The derived tables in memory.

Next: operations/derived_tables.py brings them up to the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from seriatim.ledger.gaps import Gap, QuarantineFile, quarantine_release_finder
from seriatim.ledger.model import File, Ledger
from seriatim.ports import (
    AppliedVersion,
    CommitConflictError,
    DerivedTableName,
    OutputStore,
    PartitionFiles,
)


class MemoryTableVersion(Struct, frozen=True):
    """A table after one commit."""

    version: int
    sequence: int
    sha256: str
    rows: list[Any]


class MemoryDerived:
    """The tables `gaps` and `quarantine`. Implements `DerivedStore`."""

    def __init__(
        self,
        read: Callable[[File], list[dict[str, Any]]],
        outputs: Sequence[str] = (),
    ) -> None:
        self.read = read
        """Gives the rows of a file of quarantined messages."""
        self.outputs = MemoryOutputs(outputs)
        self.output_store: OutputStore | None = self.outputs if outputs else None
        self.tables: dict[DerivedTableName, MemoryTableVersion] = {}
        self.up_to_date_note: tuple[int, str, dict[DerivedTableName, int]] = (-1, "", {})
        self.refusals = 0
        """How many of the next puts fail, although nobody else committed."""

    @property
    def commits(self) -> int:
        """How many commits were made so far."""
        return sum(table.version + 1 for table in self.tables.values())

    def rows(self, table: DerivedTableName) -> list[dict[str, Any]]:
        """What a reader of a table sees."""
        if table not in self.tables:
            return []
        rows = self.tables[table].rows
        if table == "gaps":
            return [gap.to_row() for gap in rows]
        return [dict(row) for row in rows]

    def applied_version(self, table: DerivedTableName) -> AppliedVersion:
        """The entry that a table has reached: the one of its last commit, or a later one if nothing
        had to be put since.
        """
        stored = self.tables.get(table)
        if stored is None:
            return AppliedVersion()
        sequence, sha256, versions = self.up_to_date_note
        if versions.get(table) == stored.version and sequence > stored.sequence:
            return AppliedVersion(sequence, sha256, stored.version)
        return AppliedVersion(stored.sequence, stored.sha256, stored.version)

    def gaps(self, _: AppliedVersion) -> list[Gap]:
        """The gaps as they are."""
        return list(self.tables["gaps"].rows)

    def put_gaps(
        self,
        expected: AppliedVersion,
        ledger: Ledger,
        gaps: Sequence[Gap],
    ) -> None:
        """Replace all gaps."""
        self._put("gaps", expected, ledger, list(gaps))

    def put_quarantine(
        self,
        expected: AppliedVersion,
        ledger: Ledger,
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
        self._put("quarantine", expected, ledger, rows)

    def note_up_to_date(self, ledger: Ledger) -> None:
        """Note that both tables show this entry, and at which versions that is true."""
        versions = {name: table.version for name, table in self.tables.items()}
        self.up_to_date_note = (ledger.sequence, ledger.sha256, versions)

    def _put(
        self,
        table: DerivedTableName,
        expected: AppliedVersion,
        ledger: Ledger,
        rows: list[Any],
    ) -> None:
        stored = self.tables.get(table)
        version = None if stored is None else stored.version
        if self.refusals:
            self.refusals -= 1
            raise CommitConflictError("the store did not answer")
        if expected.token != version:
            raise CommitConflictError("somebody else committed meanwhile")
        self.tables[table] = MemoryTableVersion(
            version=0 if version is None else version + 1,
            sequence=ledger.sequence,
            sha256=ledger.sha256,
            rows=rows,
        )


class MemoryOutputs:
    """The tables of further kinds of records. Implements `OutputStore`."""

    def __init__(self, tables: Sequence[str]) -> None:
        self.tables = tables
        self.versions: dict[str, list[MemoryTableVersion]] = {}
        """The versions of each table, oldest first. Their rows are files."""
        self.refusals = 0

    def files(self, table: str) -> list[File]:
        """The files that a reader of a table sees."""
        if table not in self.versions:
            return []
        return list(self.versions[table][-1].rows)

    def applied_version(self, table: str) -> AppliedVersion:
        """The entry that a table has reached."""
        if table not in self.versions:
            return AppliedVersion()
        newest = self.versions[table][-1]
        return AppliedVersion(newest.sequence, newest.sha256, newest.version)

    def put_files(
        self,
        table: str,
        expected: AppliedVersion,
        ledger: Ledger,
        added: PartitionFiles,
        removed: Sequence[str],
    ) -> None:
        """Add and remove files. A table that has reached no entry gets the added files alone."""
        if self.refusals:
            self.refusals -= 1
            raise CommitConflictError("the store did not answer")
        if expected.token != self.applied_version(table).token:
            raise CommitConflictError("somebody else committed meanwhile")
        files = self.files(table) if expected.sequence >= 0 else []
        not_active = set(removed) - {file.path for file in files}
        if not_active:
            raise CommitConflictError(f"{min(not_active)} is not in the table")
        files_after = [file for file in files if file.path not in removed]
        files_after += [file for _, file in added]
        versions = self.versions.setdefault(table, [])
        new_version = MemoryTableVersion(
            version=len(versions),
            sequence=ledger.sequence,
            sha256=ledger.sha256,
            rows=files_after,
        )
        versions.append(new_version)
