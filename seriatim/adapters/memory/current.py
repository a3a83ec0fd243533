"""The table `current` in memory.

Next room: steps/publish.py brings it to an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from seriatim.core.crash import crash_point
from seriatim.core.current import Catch, Keyed, Lives, Standing, Written, is_gone
from seriatim.core.ledger import File, Ledger
from seriatim.core.offsets import Partition
from seriatim.ports import Conflict

OWN = ("topic", "topic_id", "partition", "session", "offset", "sequence", "timestamp")
Rows = dict[tuple[Any, ...], dict[str, Any]]
"""By session and key."""


class MemoryVersion(Struct, frozen=True):
    """The table as of one commit."""

    version: int
    sequence: int
    sha256: str
    lives: Lives
    rows: dict[Partition, Rows]


class MemoryCurrent:
    """Implements `CurrentStore`."""

    def __init__(self, keyed: Keyed, read: Callable[[File], list[dict[str, Any]]]) -> None:
        self.keyed, self.read = keyed, read
        """The rows of a record file."""
        self.table: MemoryVersion | None = None
        self.refusals = 0
        """So many puts fail, with nobody else there."""

    def rows(self) -> list[dict[str, Any]]:
        """What a reader sees, in order."""
        parts = self.table.rows if self.table else {}
        return [parts[place][key] for place in sorted(parts) for key in sorted(parts[place], key=repr)]

    def reached(self) -> Standing:
        """How far the table is."""
        found = self.table
        return Standing(found.sequence, found.sha256, found.lives, found.version) if found else Standing()

    def put(
        self, at: Standing, to: Ledger, lives: Lives, catches: Sequence[Catch], progress: Callable[[int], None]
    ) -> Written:
        """Bring these partitions up, all at once."""
        found = self.table
        parts = dict(found.rows) if found and at.sequence >= 0 else {}
        for catch in catches:
            parts[catch.partition] = self._caught_up(parts.get(catch.partition, {}), catch)
            crash_point("current-half")
        crash_point("current-written")
        if self.refusals:
            self.refusals -= 1
            raise Conflict("the store did not answer")
        if at.token != (found.version if found else None):
            raise Conflict("somebody else committed meanwhile")
        self.table = MemoryVersion(found.version + 1 if found else 0, to.sequence, to.sha256, lives, parts)
        progress(sum(catch.reads() for catch in catches))
        touched = [parts[catch.partition] for catch in catches]
        return Written(rows=sum(map(len, touched)), files=sum(map(bool, touched)))

    def _caught_up(self, before: Rows, catch: Catch) -> Rows:
        rows: Rows = {} if catch.whole else dict(before)
        for record in sorted(self._records(catch), key=lambda row: _turn(row, catch.lives)):
            name = (record["session"], *(record[column] for column in self.keyed.key))
            rows.pop(name, None)
            if not is_gone(self.keyed, record):
                rows[name] = {column: record[column] for column in (*OWN, *self.keyed.columns)}
        return rows

    def _records(self, catch: Catch) -> Iterator[dict[str, Any]]:
        for file in catch.files:
            for row in self.read(file):
                mine = Partition(row["topic"], row["partition"]) == catch.partition
                if mine and row["topic_id"] in catch.lives and row["offset"] >= catch.since:
                    yield row


def _turn(row: dict[str, Any], lives: tuple[str, ...]) -> tuple[int, int, int]:
    return lives.index(row["topic_id"]), row["offset"], row["index"]
