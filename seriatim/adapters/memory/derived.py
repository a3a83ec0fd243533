"""The derived tables in memory.

Next room: steps/derive.py brings them up to the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from seriatim.core.gaps import Aside, Gap, release_of
from seriatim.core.ledger import File, Ledger
from seriatim.ports import Conflict, Derived, Reached


class MemoryTable(Struct, frozen=True):
    """A table as of one commit."""

    version: int
    sequence: int
    sha256: str
    rows: list[Any]


class MemoryDerived:
    """The tables `gaps` and `quarantine`. Implements `DerivedStore`."""

    def __init__(self, read: Callable[[File], list[dict[str, Any]]]) -> None:
        self.read = read
        """The rows of a file of messages set aside."""
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


def _release(row: dict[str, Any], ended: Callable[[dict[str, Any]], Gap | None]) -> dict[str, Any]:
    gap = ended(row) if row["released_by"] is None else None
    return {} if gap is None else gap.release()
