"""The derived tables in memory.

Next room: operations/derived_tables.py brings them up to the ledger.
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
    """A table as of one commit."""

    version: int
    sequence: int
    sha256: str
    rows: list[Any]


class MemoryDerived:
    """The tables `gaps` and `quarantine`. Implements `DerivedStore`."""

    def __init__(
        self, read: Callable[[File], list[dict[str, Any]]], outputs: Sequence[str] = ()
    ) -> None:
        self.read = read
        """The rows of a file of messages set aside."""
        self.outputs = MemoryOutputs(outputs)
        self.output_store: OutputStore | None = self.outputs if outputs else None
        self.tables: dict[DerivedTableName, MemoryTableVersion] = {}
        self.up_to_date_note: tuple[int, str, dict[DerivedTableName, int]] = (-1, "", {})
        self.refusals = 0
        """So many puts fail, with nobody else there."""

    @property
    def commits(self) -> int:
        """How many were made so far."""
        return sum(table.version + 1 for table in self.tables.values())

    def rows(self, table: DerivedTableName) -> list[dict[str, Any]]:
        """What a reader of a table sees."""
        found = self.tables[table].rows if table in self.tables else []
        return [gap.to_row() if table == "gaps" else dict(gap) for gap in found]

    def applied_version(self, table: DerivedTableName) -> AppliedVersion:
        """How far a table is: as its last commit says, or further, if nothing had to be put since."""
        found = self.tables.get(table)
        if found is None:
            return AppliedVersion()
        sequence, sha256, versions = self.up_to_date_note
        if versions.get(table) == found.version and sequence > found.sequence:
            return AppliedVersion(sequence, sha256, found.version)
        return AppliedVersion(found.sequence, found.sha256, found.version)

    def gaps(self, _: AppliedVersion) -> list[Gap]:
        """The gaps as they are."""
        return list(self.tables["gaps"].rows)

    def put_gaps(self, expected: AppliedVersion, ledger: Ledger, gaps: Sequence[Gap]) -> None:
        """Replace all gaps."""
        self._put("gaps", expected, ledger, list(gaps))

    def put_quarantine(
        self,
        expected: AppliedVersion,
        ledger: Ledger,
        quarantine_files: Sequence[QuarantineFile],
        released_gaps: Sequence[Gap],
    ) -> None:
        """Add messages, and how some were released."""
        ended = quarantine_release_finder(released_gaps)
        before = self.rows("quarantine") if expected.sequence >= 0 else []
        nobody = {"released_by": None, "released_how": None, "released_offset": None}
        added = [
            {**row, "kept_by": aside.sequence, **nobody}
            for aside in quarantine_files
            for row in self.read(aside.file)
        ]
        self._put(
            "quarantine",
            expected,
            ledger,
            [{**row, **_release_columns(row, ended)} for row in (*before, *added)],
        )

    def note_up_to_date(self, ledger: Ledger) -> None:
        """Remember how far both are."""
        self.up_to_date_note = (
            ledger.sequence,
            ledger.sha256,
            {name: table.version for name, table in self.tables.items()},
        )

    def _put(
        self, table: DerivedTableName, expected: AppliedVersion, ledger: Ledger, rows: list[Any]
    ) -> None:
        found = self.tables.get(table)
        if self.refusals:
            self.refusals -= 1
            raise CommitConflictError("the store did not answer")
        if expected.token != (found.version if found else None):
            raise CommitConflictError("somebody else committed meanwhile")
        self.tables[table] = MemoryTableVersion(
            found.version + 1 if found else 0, ledger.sequence, ledger.sha256, rows
        )


class MemoryOutputs:
    """The tables of further kinds of records. Implements `OutputStore`."""

    def __init__(self, tables: Sequence[str]) -> None:
        self.tables = tables
        self.versions: dict[str, list[MemoryTableVersion]] = {}
        """Of each table, oldest first; their rows are files."""
        self.refusals = 0

    def files(self, table: str) -> list[File]:
        """What a reader of a table sees."""
        return list(self.versions[table][-1].rows) if table in self.versions else []

    def applied_version(self, table: str) -> AppliedVersion:
        """How far a table is."""
        known = self.versions.get(table)
        return (
            AppliedVersion(known[-1].sequence, known[-1].sha256, known[-1].version)
            if known
            else AppliedVersion()
        )

    def put_files(
        self,
        table: str,
        expected: AppliedVersion,
        ledger: Ledger,
        added: PartitionFiles,
        removed: Sequence[str],
    ) -> None:
        """Add and remove files."""
        if self.refusals:
            self.refusals -= 1
            raise CommitConflictError("the store did not answer")
        if expected.token != self.applied_version(table).token:
            raise CommitConflictError("somebody else committed meanwhile")
        files = self.files(table) if expected.sequence >= 0 else []
        if gone := set(removed) - {file.path for file in files}:
            raise CommitConflictError(f"{min(gone)} is not in the table")
        rows = [*(file for file in files if file.path not in removed), *(file for _, file in added)]
        known = self.versions.setdefault(table, [])
        known.append(MemoryTableVersion(len(known), ledger.sequence, ledger.sha256, rows))


def _release_columns(
    row: dict[str, Any], find_release: Callable[[dict[str, Any]], Gap | None]
) -> dict[str, Any]:
    gap = find_release(row) if row["released_by"] is None else None
    return {} if gap is None else gap.release_columns()
