"""Rows that records make, beside the rows in the saved state of their sessions. Pure.

`check` folds new records over the state as it was before them; `verify` folds all records, or those
since its sign-off. Both compare what comes out with the present state.

Next: storage/record_rows.py makes row images of records; operations/prove/evidence.py and
operations/prove/rules.py say what a difference means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec import Struct

from seriatim.engine.machine import Runner, UserMachine
from seriatim.engine.records import (
    MAIN_TABLE,
    RowImage,
    RowKeySpec,
    normalize_row,
    same_rows,
    table_of_record,
)
from seriatim.engine.session import Row
from seriatim.engine.table import TableMachine

RowsByKey = Mapping[Any, Row]
TopicSession = tuple[str, str]
"""The topic id and the name of a session."""


class StateRowReader(Struct, frozen=True):
    """Reads the rows in the saved state of a session. The records of the machine become the same
    rows, by its `row_key_spec`.
    """

    runner: Runner
    row_key_spec: RowKeySpec
    is_exact: bool
    """Whether the state has exactly the rows that are read. A machine of the user says only by its
    `end` which rows it takes back, and those may be more than there are.
    """

    def load(self, state_bytes: bytes, version: int) -> RowsByKey:
        """The rows of a saved state by key."""
        state = self.runner.load(state_bytes, version)
        if self.is_exact:
            rows_of_state: RowsByKey = state
            return rows_of_state
        rows: dict[Any, Row] = {}
        for record in self.runner.end(state):
            if table_of_record(record) == MAIN_TABLE:
                row = normalize_row(record)
                values = dict(zip(self.runner.columns, row, strict=True))
                rows[self.row_key_spec.key_of(values)] = row
        return rows


def state_row_reader(runner: Runner) -> StateRowReader | None:
    """Reads rows out of the state of a machine; None if the machine does not say how.

    All rows in the state of the table machine are known. What the state of a user's machine holds
    is known only by `end`, which takes every row back: so its record class must have a `row_key`
    and a `row_gone`.
    """
    row_key_spec = runner.row_key_spec
    if row_key_spec is None:
        return None
    if isinstance(runner, TableMachine):
        return StateRowReader(runner, row_key_spec, is_exact=True)
    if not isinstance(runner, UserMachine) or not runner.has_end or not row_key_spec.deleted_when:
        return None
    return StateRowReader(runner, row_key_spec, is_exact=False)


def exact_row_reader(runner: Runner) -> StateRowReader | None:
    """The same, but None also for machines whose rows are not known exactly."""
    row_reader = state_row_reader(runner)
    if row_reader is None or not row_reader.is_exact:
        return None
    return row_reader


class RowDifference(NamedTuple):
    """A row that is not the same in records and state."""

    key: Any
    row: Row | None
    """The row as records make it; None: they make none."""
    offset: int
    """The offset of its last record; -1: no record that was folded is of this row."""
    state_row: Row | None
    """The row in the state; None: there is none."""


class FoldedRows:
    """The rows of sessions, as records leave them."""

    def __init__(self, row_key_spec: RowKeySpec, *, separate_topic_ids: bool) -> None:
        """Without `separate_topic_ids`, a session goes on when its topic is created again."""
        self.row_key_spec = row_key_spec
        self.separate_topic_ids = separate_topic_ids
        self.tables: dict[TopicSession, dict[Any, tuple[Row, int]]] = {}
        """By session, then by key: the row, and the offset of its last record."""

    def put_session(self, session: TopicSession, rows: RowsByKey) -> None:
        """Set the rows that a session has before its records are folded."""
        self.tables[session] = {key: (row, -1) for key, row in rows.items()}

    def fold_images(self, images: Iterable[RowImage]) -> None:
        """Fold the last records of rows over what is there."""
        for image in images:
            topic_id = image.topic_id if self.separate_topic_ids else ""
            table = self.tables.setdefault((topic_id, image.session), {})
            if image.row is None:
                table.pop(image.key, None)
            else:
                table[image.key] = (image.row, image.offset)

    def differences(self, session: TopicSession, state_rows: RowsByKey) -> Iterator[RowDifference]:
        """The rows of a session that are not the same in its state."""
        table = self.tables.get(session, {})
        for key in sorted({*table, *state_rows}, key=repr):
            row, offset = table.get(key, (None, -1))
            state_row = state_rows.get(key)
            if not same_rows(row, state_row):
                yield RowDifference(key, row, offset, state_row)

    def describe_row(self, row: Row | None, characters_max: int) -> str:
        """A row for people."""
        if row is None:
            return "no such row"
        named_values = zip(self.row_key_spec.columns, row, strict=True)
        return ", ".join(f"{name}={value!r}" for name, value in named_values)[:characters_max]
