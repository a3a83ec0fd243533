"""Record kinds: to which table a record goes, and how records become rows of a table. Pure.

A machine may give records of several kinds: with `Machine[State, Message, Level | Trade]` the first
kind goes to `records/`, and each other kind to `records-NAME/`, where NAME is the name of the
Struct in lower case. Until they are written, the records of all kinds are in one list, in order. A
record of another table is an `OtherTableRecord`, a tuple that knows its table. `index` counts
through all records of a message, so their order is known in the tables, too.

Next: engine/machine.py makes the records; engine/record_writers.py writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from msgspec import Struct

from seriatim.engine.session import FoldOutput, Row, SessionEndRecords
from seriatim.errors import ConfigError

OTHER_TABLE_PREFIX = "records-"
"""How the name of the folder of another table begins."""
TABLE_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
Value = TypeVar("Value")
MAIN_TABLE = ""
"""The name of the table `records` itself."""


class RowKeySpec(Struct, frozen=True, kw_only=True):
    """How records become rows: which columns name a row, which columns it has, and which records
    delete it.
    """

    key: tuple[str, ...]
    columns: tuple[str, ...]
    """The columns of a row, keys included."""
    deleted_when: dict[str, Any] = {}
    """A record with these values deletes its row. Empty: rows are never deleted."""


class OtherTableRecord(tuple[Any, ...]):
    """A record of another table than `records`."""

    __slots__ = ()
    table: ClassVar[str] = MAIN_TABLE


def table_of_record(row: Row) -> str:
    """The table of a record."""
    return row.table if isinstance(row, OtherTableRecord) else MAIN_TABLE


def table_directory(table: str) -> str:
    """The folder of a table below the output path."""
    return f"{OTHER_TABLE_PREFIX}{table}" if table else "records"


def table_of_path(path: str) -> str:
    """The table of a record file, by its path. Any other file counts as one of `records`."""
    if not path.startswith(OTHER_TABLE_PREFIX):
        return MAIN_TABLE
    directory = path.partition("/")[0]
    return directory.removeprefix(OTHER_TABLE_PREFIX)


def make_other_record_types(
    machine: str, record_types: Sequence[type]
) -> dict[type, type[OtherTableRecord]]:
    """A tuple class for each kind of record after the first. Each class knows its table."""
    tuple_types: dict[type, type[OtherTableRecord]] = {}
    tables: set[str] = set()
    for record_type in record_types[1:]:
        name = record_type.__name__
        table = name.lower()
        if not TABLE_NAME.fullmatch(table) or table in tables:
            raise ConfigError(
                f"machine {machine}: records of {name} cannot go to {table_directory(table)!r}:"
                " it is no name of its own",
                next="give the Struct another name: letters, digits and _, each once whatever its case",
            )
        tables.add(table)
        attributes = {"table": table, "__slots__": ()}
        tuple_types[record_type] = type(name, (OtherTableRecord,), attributes)
    return tuple_types


def rows_by_table(rows: Iterable[Row]) -> dict[str, list[int]]:
    """The positions of the rows of each table."""
    positions: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        positions.setdefault(table_of_record(row), []).append(position)
    return positions


def select_records(output: FoldOutput, rows: Sequence[int]) -> FoldOutput:
    """The output of a batch with only these rows."""
    source_messages = {}
    for new_row, row in enumerate(rows):
        if row in output.source_messages:
            source_messages[new_row] = output.source_messages[row]
    return FoldOutput(
        positions=_select(output.positions, rows),
        indexes=_select(output.indexes, rows),
        sequences=_select(output.sequences, rows),
        sessions=_select(output.sessions, rows),
        rows=_select(output.rows, rows),
        source_messages=source_messages,
        consumed_messages=output.consumed_messages,
    )


def select_end_records(end_records: SessionEndRecords, rows: Sequence[int]) -> SessionEndRecords:
    """The records of sessions that end, with only these rows."""
    return SessionEndRecords(
        indexes=_select(end_records.indexes, rows),
        timestamps=_select(end_records.timestamps, rows),
        sessions=_select(end_records.sessions, rows),
        sequences=_select(end_records.sequences, rows),
        rows=_select(end_records.rows, rows),
    )


def _select(column: list[Value], rows: Sequence[int]) -> list[Value]:
    return [column[row] for row in rows]


def count_by_table(rows_by_table: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """How many records each other table gets."""
    counts = {}
    for table in sorted(rows_by_table):
        if table != MAIN_TABLE:
            counts[table] = len(rows_by_table[table])
    return counts
