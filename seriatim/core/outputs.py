"""Outputs: a machine may give records of several kinds, each for a table of its own. Pure.

`Machine[State, Message, Level | Trade]`: the first kind goes to `records/`, each other one to `records-NAME/`, with the
Struct's name in lower case. Until they are written, records of all kinds walk together, in order: those of the others
are tuples that know their table. `index` counts through all records of a message, so it tells their order too.

Next room: machine.py makes them; steps/task.py hands each to its writer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from seriatim.core.errors import ConfigError
from seriatim.core.session import Ended, Folded

ROOM = "records-"
"""How the folder of another table begins."""
NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
MAIN = ""
"""The table `records` itself."""


class Beside(tuple[Any, ...]):
    """A record of another table than `records`."""

    __slots__ = ()
    table: ClassVar[str] = MAIN


def table_of(row: tuple[Any, ...]) -> str:
    """The table of a record."""
    return row.table if isinstance(row, Beside) else MAIN


def room(table: str) -> str:
    """The folder of a table below the output path."""
    return f"{ROOM}{table}" if table else "records"


def table_in(path: str) -> str:
    """The table of a record file, by its path; of other files, that of `records`."""
    return path.partition("/")[0].removeprefix(ROOM) if path.startswith(ROOM) else MAIN


def beside(machine: str, kinds: Sequence[type]) -> dict[type, type[Beside]]:
    """Tuples for the kinds of records after the first, each knowing its table."""
    made: dict[type, type[Beside]] = {}
    for kind in kinds[1:]:
        name = kind.__name__.lower()
        if not NAME.fullmatch(name) or name in {one.table for one in made.values()}:
            raise ConfigError(
                f"machine {machine}: records of {kind.__name__} cannot go to {room(name)!r}: it is no name of its own",
                next="give the Struct another name: letters, digits and _, each once whatever its case",
            )
        made[kind] = type(kind.__name__, (Beside,), {"table": name, "__slots__": ()})
    return made


def split(rows: Iterable[tuple[Any, ...]]) -> dict[str, list[int]]:
    """Which rows are of which table."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(table_of(row), []).append(number)
    return found


def some_folded(folded: Folded, rows: Sequence[int]) -> Folded:
    """Only these records of a stretch."""
    return Folded(
        positions=[folded.positions[row] for row in rows],
        indexes=[folded.indexes[row] for row in rows],
        sequences=[folded.sequences[row] for row in rows],
        sessions=[folded.sessions[row] for row in rows],
        rows=[folded.rows[row] for row in rows],
        sources={number: folded.sources[row] for number, row in enumerate(rows) if row in folded.sources},
        consumed=folded.consumed,
    )


def some_ended(ended: Ended, rows: Sequence[int]) -> Ended:
    """Only these records of sessions that end."""
    return Ended(
        indexes=[ended.indexes[row] for row in rows],
        timestamps=[ended.timestamps[row] for row in rows],
        sessions=[ended.sessions[row] for row in rows],
        sequences=[ended.sequences[row] for row in rows],
        rows=[ended.rows[row] for row in rows],
    )


def count_by_table(found: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """How many records each other table gets."""
    return {table: len(rows) for table, rows in sorted(found.items()) if table != MAIN}
