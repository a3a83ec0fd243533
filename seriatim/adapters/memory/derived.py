"""The derived tables in memory.

Next room: steps/derive.py brings them up to the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from seriatim.core.gaps import Aside, Gap, release_of
from seriatim.core.ledger import File, Ledger
from seriatim.ports import Conflict, Derived, OutputStore, Placed, Reached


class MemoryTable(Struct, frozen=True):
    """A table as of one commit."""

    version: int
    sequence: int
    sha256: str
    rows: list[Any]


class MemoryDerived:
    """The tables `gaps` and `quarantine`. Implements `DerivedStore`."""

    def __init__(self, read: Callable[[File], list[dict[str, Any]]], outputs: Sequence[str] = ()) -> None:
        self.read = read
        """The rows of a file of messages set aside."""
        self.outputs = MemoryOutputs(outputs)
        self.beside: OutputStore | None = self.outputs if outputs else None
        self.tables: dict[Derived, MemoryTable] = {}
        self.noted: tuple[int, str, dict[Derived, int]] = (-1, "", {})
        self.refusals = 0
        """So many puts fail, with nobody else there."""

    @property
    def commits(self) -> int:
        """How many were made so far."""
        return sum(table.version + 1 for table in self.tables.values())

    def rows(self, table: Derived) -> list[dict[str, Any]]:
        """What a reader of a table sees."""
        found = self.tables[table].rows if table in self.tables else []
        return [gap.row() if table == "gaps" else dict(gap) for gap in found]

    def reached(self, table: Derived) -> Reached:
        """How far a table is: as its last commit says, or further, if nothing had to be put since."""
        found = self.tables.get(table)
        if found is None:
            return Reached()
        sequence, sha256, versions = self.noted
        if versions.get(table) == found.version and sequence > found.sequence:
            return Reached(sequence, sha256, found.version)
        return Reached(found.sequence, found.sha256, found.version)

    def gaps(self, _: Reached) -> list[Gap]:
        """The gaps as they are."""
        return list(self.tables["gaps"].rows)

    def put_gaps(self, at: Reached, to: Ledger, gaps: Sequence[Gap]) -> None:
        """Replace all gaps."""
        self._put("gaps", at, to, list(gaps))

    def put_quarantine(self, at: Reached, to: Ledger, asides: Sequence[Aside], released: Sequence[Gap]) -> None:
        """Add messages, and how some were released."""
        ended = release_of(released)
        before = self.rows("quarantine") if at.sequence >= 0 else []
        nobody = {"released_by": None, "released_how": None, "released_offset": None}
        added = [{**row, "kept_by": aside.sequence, **nobody} for aside in asides for row in self.read(aside.file)]
        self._put("quarantine", at, to, [{**row, **_release(row, ended)} for row in (*before, *added)])

    def note(self, to: Ledger) -> None:
        """Remember how far both are."""
        self.noted = (to.sequence, to.sha256, {name: table.version for name, table in self.tables.items()})

    def _put(self, table: Derived, at: Reached, to: Ledger, rows: list[Any]) -> None:
        found = self.tables.get(table)
        if self.refusals:
            self.refusals -= 1
            raise Conflict("the store did not answer")
        if at.token != (found.version if found else None):
            raise Conflict("somebody else committed meanwhile")
        self.tables[table] = MemoryTable(found.version + 1 if found else 0, to.sequence, to.sha256, rows)


class MemoryOutputs:
    """The tables of further kinds of records. Implements `OutputStore`."""

    def __init__(self, tables: Sequence[str]) -> None:
        self.tables = tables
        self.versions: dict[str, list[MemoryTable]] = {}
        """Of each table, oldest first; their rows are files."""
        self.refusals = 0

    def files(self, table: str) -> list[File]:
        """What a reader of a table sees."""
        return list(self.versions[table][-1].rows) if table in self.versions else []

    def reached(self, table: str) -> Reached:
        """How far a table is."""
        known = self.versions.get(table)
        return Reached(known[-1].sequence, known[-1].sha256, known[-1].version) if known else Reached()

    def put(self, table: str, at: Reached, to: Ledger, added: Placed, removed: Sequence[str]) -> None:
        """Add and remove files."""
        if self.refusals:
            self.refusals -= 1
            raise Conflict("the store did not answer")
        if at.token != self.reached(table).token:
            raise Conflict("somebody else committed meanwhile")
        files = self.files(table) if at.sequence >= 0 else []
        if gone := set(removed) - {file.path for file in files}:
            raise Conflict(f"{min(gone)} is not in the table")
        rows = [*(file for file in files if file.path not in removed), *(file for _, file in added)]
        known = self.versions.setdefault(table, [])
        known.append(MemoryTable(len(known), to.sequence, to.sha256, rows))


def _release(row: dict[str, Any], ended: Callable[[dict[str, Any]], Gap | None]) -> dict[str, Any]:
    gap = ended(row) if row["released_by"] is None else None
    return {} if gap is None else gap.release()
