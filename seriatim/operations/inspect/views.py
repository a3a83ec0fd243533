"""Views: how states and messages are shown to people and to conditions, and what differs between
two states. Pure functions.

Next: operations/inspect/tracing.py makes the states; operations/inspect/condition.py evaluates
conditions over these views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from seriatim.engine.decoding import plain_values
from seriatim.engine.machine import Runner
from seriatim.engine.messages import Poison
from seriatim.engine.session import Row
from seriatim.engine.table import TableMachine

TableRows = Mapping[Any, Row]
"""The state of the table machine: rows by key."""


def copy_state(runner: Runner, state: Any) -> Any:
    """A copy of a state that later messages do not change."""
    if state is None:
        return None
    if isinstance(runner, TableMachine):
        # Its rows are tuples, which never change: a new dict of them is enough.
        return state.copy()
    return runner.load(runner.dump(state), runner.state_version)


class RowsView(Sequence[dict[str, Any]]):
    """The rows of a table as dicts. They are built when one is first asked for."""

    def __init__(self, names: Sequence[str], rows: TableRows) -> None:
        self._column_names = names
        self._rows = rows
        self._materialized_rows: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._materialize())

    def __getitem__(self, index: Any) -> Any:
        return self._materialize()[index]

    def _materialize(self) -> list[dict[str, Any]]:
        if self._materialized_rows is None:
            self._materialized_rows = []
            for row in self._rows.values():
                row_values = dict(zip(self._column_names, row, strict=True))
                self._materialized_rows.append(row_values)
        return self._materialized_rows


def view_of_state(runner: Runner, state: Any) -> Any:
    """A state as conditions see it: `rows` of the table machine; any other state as it is."""
    if state is None or not isinstance(runner, TableMachine):
        return state
    return {"rows": RowsView(runner.column_names, state)}


def view_of_message(runner: Runner, message: Any, raw: bytes | None = None) -> Any:
    """A message as conditions see it.

    The table machine's messages are shown as they were sent, others as their machine takes them.
    """
    if message.__class__ is Poison:
        return {"ignored" if message.has_no_effect else "poison": message.cause}
    if not isinstance(runner, TableMachine):
        return message
    if raw is None:
        return msgspec.to_builtins(message)
    try:
        return plain_values(runner.decoder.to_plain(raw), runner.decoder.decode_raw)
    except Exception:  # noqa: BLE001  # the user's decoder may raise anything
        # A field that is not a column may hold what cannot be decoded, such as 1e999 in JSON.
        return msgspec.to_builtins(message)


def plain_view_of_message(runner: Runner, message: Any, raw: bytes | None) -> Any:
    """A message as plain values, for JSON."""
    return plain_values(view_of_message(runner, message, raw), runner.decoder.decode_raw)


def state_to_plain(runner: Runner, state: Any) -> Any:
    """A state as plain values, for JSON."""
    if state is None:
        return None
    return runner.to_plain(state)


class StateChange(Struct, frozen=True):
    """A difference between two states: of a row by its key, or of a field by its path."""

    what: str
    before: Any
    after: Any


def diff_states(runner: Runner, before: Any, after: Any) -> list[StateChange]:
    """What differs between two states: rows of the table machine, fields of any other."""
    if isinstance(runner, TableMachine):
        return list(_diff_rows(runner, before or {}, after or {}))
    plain_before = state_to_plain(runner, before)
    plain_after = state_to_plain(runner, after)
    return list(diff_values("", plain_before, plain_after))


def _diff_rows(table: TableMachine, before: TableRows, after: TableRows) -> Iterator[StateChange]:
    # An unchanged row is the same object in both states, so most rows need no comparison.
    touched_keys = [key for key, row in after.items() if before.get(key) is not row]
    deleted_keys = [key for key in before if key not in after]
    for key in touched_keys + deleted_keys:
        row_before = before.get(key)
        row_after = after.get(key)
        if row_before == row_after:
            continue
        plain_before = _row_to_plain(table, row_before)
        plain_after = _row_to_plain(table, row_after)
        key_text = _key_text(table, plain_before or plain_after)
        yield StateChange(key_text, plain_before, plain_after)


def _row_to_plain(table: TableMachine, row: Row | None) -> Any:
    if row is None:
        return None
    return table.row_to_plain(row)


def _key_text(table: TableMachine, plain_row: Any) -> str:
    """The values of a row's key columns, with commas between them."""
    key_names = [table.column_names[i] for i in table.key_positions]
    key_values = [str(plain_row[name]) for name in key_names]
    return ", ".join(key_values)


def diff_values(path: str, before: Any, after: Any) -> Iterator[StateChange]:
    """The leaves of two plain values that differ, by their path."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys([*before, *after]):
            field_path = str(name)
            if path:
                field_path = f"{path}.{name}"
            yield from diff_values(field_path, before.get(name), after.get(name))
    elif _are_lists_of_one_length(before, after):
        for i, item_before in enumerate(before):
            yield from diff_values(f"{path}[{i}]", item_before, after[i])
    elif before != after:
        yield StateChange(path or "state", before, after)


def _are_lists_of_one_length(before: Any, after: Any) -> bool:
    if not isinstance(before, list) or not isinstance(after, list):
        return False
    return len(before) == len(after)
