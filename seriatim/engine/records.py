"""Records: the columns that every record has, what fits into a column, and to which table a record
goes. Pure.

`RECORD_COLUMNS` is the only list of the columns that every record has before those of its machine:
their names, their types, and where their values come from. The Arrow schema, the writers of record
files, the table `current`, scans, queries and checks take it from here.

A machine may give records of several kinds: with `Machine[State, Message, Level | Trade]` the first
kind goes to `records/`, and each other kind to `records-NAME/`, where NAME is the name of the
Struct in lower case. Until they are written, the records of all kinds are in one list, in order. A
record of another table is an `OtherTableRecord`, a tuple that knows its table. `index` counts
through all records of a message, so their order is known in the tables, too.

Next: engine/machine.py makes the records; engine/task.py and storage/record_files.py write them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from msgspec import Struct

from seriatim.engine.messages import INT64_MAX, INT64_MIN
from seriatim.engine.offsets import Partition
from seriatim.engine.session import FoldOutput, Row, SessionEndRecords
from seriatim.errors import ConfigError

SCALAR_TYPES: dict[Any, str] = {
    str: "string",
    int: "int64",
    float: "float64",
    bool: "bool",
    bytes: "binary",
    datetime: "timestamp",
    date: "date",
}
PYTHON_TYPES = {type_name: python_type for python_type, type_name in SCALAR_TYPES.items()}
FLOAT64_WHOLE_MAX = 2**53
"""A float64 cannot hold every whole number beyond this one."""
OTHER_TABLE_PREFIX = "records-"
"""How the name of the folder of another table begins."""
TABLE_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
Record = dict[str, Any]
"""A record as it is read again: its values by column."""
Value = TypeVar("Value")
MAIN_TABLE = ""
"""The name of the table `records` itself."""


class RecordSource(Struct, frozen=True, kw_only=True):
    """Where the records of one batch come from. Each plural has one value per record."""

    partition: Partition
    topic_id: str
    offsets: Any
    """The offset of the message that made the record."""
    indexes: Any
    """Counts the records of that message, through all tables."""
    source_offsets: Any
    """The offset at which the message itself was read. It is lower if the message had to wait in a
    window.
    """
    timestamps: Any
    """The time of the message, in the unit of whoever writes it."""
    sessions: Any
    sequences: Any


class RecordColumn(Struct, frozen=True, kw_only=True):
    """One of the columns that every record has."""

    name: str
    type_name: Literal["string", "int32", "int64", "timestamp"]
    source: str
    """The attribute of `RecordSource` that has its values."""
    is_constant: bool = False
    """Whether all records of a partition and topic id have the same value."""
    rises_slowly: bool = False
    """Whether its numbers mostly rise by small steps, so that differences are stored."""

    def read_from(self, source: RecordSource) -> Any:
        """The values of the column; one for all records if it is constant."""
        return attrgetter(self.source)(source)


RECORD_COLUMNS = (
    RecordColumn(name="topic", type_name="string", source="partition.topic", is_constant=True),
    RecordColumn(name="topic_id", type_name="string", source="topic_id", is_constant=True),
    RecordColumn(name="partition", type_name="int32", source="partition.number", is_constant=True),
    RecordColumn(name="offset", type_name="int64", source="offsets", rises_slowly=True),
    RecordColumn(name="index", type_name="int32", source="indexes"),
    RecordColumn(
        name="source_offset", type_name="int64", source="source_offsets", rises_slowly=True
    ),
    RecordColumn(name="timestamp", type_name="timestamp", source="timestamps", rises_slowly=True),
    RecordColumn(name="session", type_name="string", source="sessions"),
    RecordColumn(name="sequence", type_name="int64", source="sequences", rises_slowly=True),
)
RECORD_COLUMN_NAMES = tuple(column.name for column in RECORD_COLUMNS)
RISING_COLUMN_NAMES = tuple(column.name for column in RECORD_COLUMNS if column.rises_slowly)
ORDER_COLUMNS = ("offset", "index")
"""Records of one partition and topic id are ordered by these."""
POSITION_COLUMNS = ("topic", "topic_id", "partition", *ORDER_COLUMNS)
"""Where a record is. No two records have the same position."""
MESSAGE_COLUMNS = ("topic_id", "source_offset", "session", "sequence")
"""Of which message of a partition a record was made."""
ROW_IMAGE_COLUMNS = ("topic_id", "session", "offset")
"""What of a record says which row it left, beside the columns of the row."""
LAST_RECORD_COLUMNS = (
    "topic",
    "topic_id",
    "partition",
    "session",
    "offset",
    "sequence",
    "timestamp",
)
"""What a row of the table `current` has of the record that changed it last, in this order."""


def owner_values(partition: Partition, topic_id: str) -> Record:
    """The values that all records of a partition and topic id have."""
    source = RecordSource(
        partition=partition,
        topic_id=topic_id,
        offsets=(),
        indexes=(),
        source_offsets=(),
        timestamps=(),
        sessions=(),
        sequences=(),
    )
    return {
        column.name: column.read_from(source) for column in RECORD_COLUMNS if column.is_constant
    }


def record_values(source: RecordSource) -> list[Record]:
    """The columns of each record by name, for writers that work row by row."""
    rows: list[Record] = [{} for _ in source.offsets]
    for column in RECORD_COLUMNS:
        values: Sequence[Any] = column.read_from(source)
        if column.is_constant:
            values = [values] * len(rows)
        for row, value in zip(rows, values, strict=True):
            row[column.name] = value
    return rows


class RowKeySpec(Struct, frozen=True, kw_only=True):
    """How records become rows: which columns name a row, which columns it has, and which records
    delete it.
    """

    key: tuple[str, ...]
    columns: tuple[str, ...]
    """The columns of a row, keys included."""
    deleted_when: dict[str, Any] = {}
    """A record with these values deletes its row. Empty: rows are never deleted."""
    has_before_images: bool = False
    """Whether a record also has the row as it was before, in columns named before_…"""

    @property
    def addable_columns(self) -> tuple[str, ...]:
        """Columns that a table may get later. A file of before does not have them."""
        return tuple(name for name in self.columns if name not in self.key)

    @property
    def addable_record_columns(self) -> tuple[str, ...]:
        """The same, and what records call them in the row before, if they have it."""
        names = self.addable_columns
        if self.has_before_images:
            names += tuple(f"before_{name}" for name in self.addable_columns)
        return names

    def deletes_row(self, record: Mapping[str, Any]) -> bool:
        """Whether a record deletes its row."""
        if not self.deleted_when:
            return False
        for column, value in self.deleted_when.items():
            if not same_rows((record[column],), (value,)):
                return False
        return True

    def key_of(self, values: Mapping[str, Any]) -> Any:
        """What names the row among those of its session: one value, or a tuple of several."""
        key = tuple(values[column] for column in self.key)
        return key[0] if len(key) == 1 else key


class RowImage(NamedTuple):
    """A row as one record leaves it, or as one was before it."""

    topic_id: str
    session: str
    key: Any
    row: Row | None
    """The values of the row; None: there is no such row."""
    offset: int
    """The offset of the record."""


class SessionTable(Struct, frozen=True):
    """The table of one session, as its records leave it."""

    session: str
    rows: list[Row]
    """The rows that are not deleted."""
    offset: int
    """The offset of the session's last record."""
    timestamp: int
    """The timestamp of the session's last record."""
    sequence: int | None
    """The sequence of the session's last record."""


def normalize_row(row: Row) -> Row:
    """A row as it is compared: a time without a zone is in UTC, as the records have it."""
    return tuple([_in_utc(value) if isinstance(value, datetime) else value for value in row])


def same_rows(row: Row | None, other_row: Row | None) -> bool:
    """Whether two rows are the same."""
    if row == other_row:
        return True
    if row is None or other_row is None:
        return False
    return normalize_row(row) == normalize_row(other_row)


def _in_utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    return value


class OtherTableRecord(Row):
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


def fits_column_type(value: Any, type_name: str) -> bool:
    """Whether a value may be in a column of this type. This is never laxer than what writes the
    column.
    """
    if value is None:
        return True
    if is_list_type(type_name):
        item_type = type_name.removeprefix("list<").removesuffix(">")
        return isinstance(value, list) and all(fits_column_type(item, item_type) for item in value)
    if type_name == "int64":
        return is_int64(value)
    if type_name == "float64":
        return isinstance(value, float) or (is_int64(value) and abs(value) <= FLOAT64_WHOLE_MAX)
    if type_name == "date" and isinstance(value, datetime):
        return False  # in Python a datetime is a date
    return isinstance(value, PYTHON_TYPES[type_name]) and _is_writable(value, type_name)


def is_list_type(type_name: str) -> bool:
    """Whether a column of this type holds lists."""
    return type_name.startswith("list<")


def _is_writable(value: Any, type_name: str) -> bool:
    """Whether a text can be UTF-8, and a time can be in UTC."""
    try:
        if type_name == "string":
            value.encode()
        elif type_name == "timestamp":
            value.utctimetuple()
    except (UnicodeEncodeError, OverflowError):
        return False
    return True


def is_int64(value: Any) -> bool:
    """Whether a value is a whole number that an int64 holds."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return INT64_MIN <= value <= INT64_MAX
