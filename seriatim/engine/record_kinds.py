"""Outputs: a machine may give records of several kinds, each for a table of its own. Pure.

`Machine[State, Message, Level | Trade]`: the first kind goes to `records/`, each other one to
`records-NAME/`, with the Struct's name in lower case. Until they are written, records of all kinds
walk together, in order: those of the others are tuples that know their table. `index` counts
through all records of a message, so it tells their order too.

Next room: machine.py makes them; engine/task.py hands each to its writer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from seriatim.engine.session import FoldOutput, SessionEndRecords
from seriatim.errors import ConfigError

OTHER_TABLE_PREFIX = "records-"
"""How the folder of another table begins."""
TABLE_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
MAIN_TABLE = ""
"""The table `records` itself."""


class OtherTableRecord(tuple[Any, ...]):
    """A record of another table than `records`."""

    __slots__ = ()
    table: ClassVar[str] = MAIN_TABLE


def table_of_record(row: tuple[Any, ...]) -> str:
    """The table of a record."""
    return row.table if isinstance(row, OtherTableRecord) else MAIN_TABLE


def table_directory(table: str) -> str:
    """The folder of a table below the output path."""
    return f"{OTHER_TABLE_PREFIX}{table}" if table else "records"


def table_of_path(path: str) -> str:
    """The table of a record file, by its path; of other files, that of `records`."""
    return (
        path.partition("/")[0].removeprefix(OTHER_TABLE_PREFIX)
        if path.startswith(OTHER_TABLE_PREFIX)
        else MAIN_TABLE
    )


def make_other_record_types(
    machine: str, record_types: Sequence[type]
) -> dict[type, type[OtherTableRecord]]:
    """Tuples for the kinds of records after the first, each knowing its table."""
    made: dict[type, type[OtherTableRecord]] = {}
    for kind in record_types[1:]:
        name = kind.__name__.lower()
        if not TABLE_NAME.fullmatch(name) or name in {one.table for one in made.values()}:
            raise ConfigError(
                f"machine {machine}: records of {kind.__name__} cannot go to {table_directory(name)!r}: it is no name of its own",
                next="give the Struct another name: letters, digits and _, each once whatever its case",
            )
        made[kind] = type(kind.__name__, (OtherTableRecord,), {"table": name, "__slots__": ()})
    return made


def rows_by_table(rows: Iterable[tuple[Any, ...]]) -> dict[str, list[int]]:
    """Which rows are of which table."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault(table_of_record(row), []).append(number)
    return found


def select_records(output: FoldOutput, rows: Sequence[int]) -> FoldOutput:
    """Only these records of a stretch."""
    return FoldOutput(
        positions=[output.positions[row] for row in rows],
        indexes=[output.indexes[row] for row in rows],
        sequences=[output.sequences[row] for row in rows],
        sessions=[output.sessions[row] for row in rows],
        rows=[output.rows[row] for row in rows],
        source_messages={
            number: output.source_messages[row]
            for number, row in enumerate(rows)
            if row in output.source_messages
        },
        consumed_messages=output.consumed_messages,
    )


def select_end_records(end_records: SessionEndRecords, rows: Sequence[int]) -> SessionEndRecords:
    """Only these records of sessions that end."""
    return SessionEndRecords(
        indexes=[end_records.indexes[row] for row in rows],
        timestamps=[end_records.timestamps[row] for row in rows],
        sessions=[end_records.sessions[row] for row in rows],
        sequences=[end_records.sequences[row] for row in rows],
        rows=[end_records.rows[row] for row in rows],
    )


def count_by_table(rows_by_table: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """How many records each other table gets."""
    return {
        table: len(rows) for table, rows in sorted(rows_by_table.items()) if table != MAIN_TABLE
    }
