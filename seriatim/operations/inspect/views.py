"""Looks: how states and messages look to people and to expressions, and what differs between two
states. Pure.

Next room: trace.py makes the states; expression.py asks questions of what is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from seriatim.engine.machine import Runner
from seriatim.engine.messages import Poison
from seriatim.engine.table import TableMachine


def copy_state(runner: Runner, state: Any) -> Any:
    """A state that later messages do not change."""
    if state is None:
        return None
    return (
        dict(state)
        if isinstance(runner, TableMachine)
        else runner.load(runner.dump(state), runner.state_version)
    )


class RowsView(Sequence[dict[str, Any]]):
    """The rows of a table, made when they are asked for."""

    def __init__(self, names: Sequence[str], rows: Mapping[Any, tuple[Any, ...]]) -> None:
        self._column_names, self._rows = names, rows
        self._materialized_rows: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._materialize())

    def __getitem__(self, index: Any) -> Any:
        return self._materialize()[index]

    def _materialize(self) -> list[dict[str, Any]]:
        if self._materialized_rows is None:
            self._materialized_rows = [
                dict(zip(self._column_names, row, strict=True)) for row in self._rows.values()
            ]
        return self._materialized_rows


def view_of_state(runner: Runner, state: Any) -> Any:
    """A state as expressions see it: the stock machine's as `rows`, another's as it is."""
    if state is None or not isinstance(runner, TableMachine):
        return state
    return {"rows": RowsView(runner.column_names, state)}


def view_of_message(runner: Runner, message: Any, raw: bytes | None = None) -> Any:
    """A message as expressions see it: the stock machine's as it was sent, another's as its machine
    takes it.
    """
    if message.__class__ is Poison:
        return {"poison": message.cause}
    if not isinstance(runner, TableMachine):
        return message
    try:
        return msgspec.to_builtins(message) if raw is None else msgspec.json.decode(raw)
    except (
        msgspec.MsgspecError,
        ValueError,
        RecursionError,
    ):  # in a field that the table has not: 1e999
        return msgspec.to_builtins(message)


def state_to_plain(runner: Runner, state: Any) -> Any:
    """A state as plain values."""
    return None if state is None else runner.to_plain(state)


class StateChange(Struct, frozen=True):
    """A part of the state that differs: a row by its key, or a field by its path."""

    what: str
    before: Any
    after: Any


def diff_states(runner: Runner, before: Any, after: Any) -> list[StateChange]:
    """What differs between two states: rows of the stock machine, fields of any other."""
    if isinstance(runner, TableMachine):
        return list(_diff_rows(runner, before or {}, after or {}))
    return list(diff_values("", state_to_plain(runner, before), state_to_plain(runner, after)))


def _diff_rows(
    table: TableMachine, before: Mapping[Any, tuple[Any, ...]], after: Mapping[Any, tuple[Any, ...]]
) -> Iterator[StateChange]:
    gone = [key for key in before if key not in after]
    for key in [*(key for key, row in after.items() if before.get(key) is not row), *gone]:
        was, now = before.get(key), after.get(key)
        if was != now:
            plain = [None if row is None else table.row_to_plain(row) for row in (was, now)]
            there: Any = plain[0] or plain[1]
            yield StateChange(
                ", ".join(str(there[table.column_names[i]]) for i in table.key_positions), *plain
            )


def diff_values(path: str, before: Any, after: Any) -> Iterator[StateChange]:
    """Leaves of two plain values that differ, by their path."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys([*before, *after]):
            yield from diff_values(
                f"{path}.{name}" if path else str(name), before.get(name), after.get(name)
            )
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (was, now) in enumerate(zip(before, after, strict=True)):
            yield from diff_values(f"{path}[{i}]", was, now)
    elif before != after:
        yield StateChange(path or "state", before, after)
