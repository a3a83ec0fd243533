"""The table machine over rows in an arena. Same results as engine/table.py, which it asks about all
that is unusual.

Next room: fold.py walks over stretches with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import astuple

from seriatim.engine.session import FoldOutput, Session
from seriatim.engine.table import Row, TableMachine
from seriatim.errors import ensure
from seriatim.fast import packed_state
from seriatim.fast.column_kinds import COLUMN_KINDS
from seriatim.fast.parse import FIRST_COLUMN_FIELD, FieldLayout
from seriatim.fast.rows import (
    HEAP_USED,
    Arena,
    clear_session,
    empty_arena,
    heap_bytes_in_use,
    remove_row_compiled,
    repack_heap,
    with_row_capacity,
    with_session_capacity,
)

HEAP_TIDY_BYTES = 8 << 20
"""A heap below this is not worth tidying."""
SIZE_MAX = 2**31 - 1


class ArenaSlot:
    """A session's rows: a place in the arena."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class BulkTable(TableMachine):
    """The table machine, folding usual messages in bulk. A session's state is a `ArenaSlot`, or
    rows as the plain one has.

    Rows are plain where they cannot be in the arena: bytes of state that the plain machine alone
    can read.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        kinds = np.array([COLUMN_KINDS[kind] for kind in settings["columns"].values()], np.int64)
        self.arena: Arena = empty_arena(kinds, np.array(self.key_positions, np.int64))
        self.field_layout = _build_field_layout(self, settings)
        self.slot_count = 0
        self.uses_arena = True
        """Whether new rows go into the arena."""
        self._cells = np.zeros((self._width, 1), np.int64)
        self._log_sizes = np.zeros((self._width, 1), np.int32)
        rows: Any = self._state_decoder.type
        self._row_decoder: msgspec.msgpack.Decoder[Row] = msgspec.msgpack.Decoder(rows.__args__[0])

    def start(self, session: str) -> Any:
        """No rows yet."""
        return self._new_slot() if self.uses_arena else {}

    def _new_slot(self) -> ArenaSlot:
        self.arena = with_session_capacity(self.arena, self.slot_count)
        self.slot_count += 1
        return ArenaSlot(self.slot_count - 1)

    def load(self, state_bytes: bytes, version: int) -> Any:
        """Rows from bytes; into the arena, if that can take them."""
        slot = self._new_slot() if self.uses_arena else None
        return (
            slot
            if slot is not None and self._load_packed_rows(slot, state_bytes)
            else super().load(state_bytes, version)
        )

    def move_into_arena(self, rows: dict[Any, Row]) -> Any:
        """Rows that were plain; as they are, if the arena cannot take them."""
        slot = self._new_slot()
        return slot if self._load_packed_rows(slot, super().dump(rows)) else rows

    def to_plain_rows(self, rows: Any) -> dict[Any, Row]:
        """Rows that were in the arena, as the plain machine has them."""
        if rows.__class__ is not ArenaSlot:
            return rows
        table = super().load(self.dump(rows), self.state_version)
        clear_session(self.arena, rows.number)
        return table

    def dump(self, rows: Any) -> bytes:
        """Rows as bytes, in the order in which they came."""
        if rows.__class__ is not ArenaSlot:
            return super().dump(rows)
        count, size = packed_state.packed_size_bound(self.arena, rows.number)
        out = np.empty(size, np.uint8)
        return out[: packed_state.pack_rows(self.arena, rows.number, count, out)].tobytes()

    def to_plain(self, rows: Any) -> Any:
        """Rows as plain values for people and JSON."""
        return super().to_plain(self._copy_to_plain_rows(rows))

    def end(self, rows: Any) -> Sequence[Row]:
        """A delete for every row."""
        return super().end(self._copy_to_plain_rows(rows))

    def _copy_to_plain_rows(self, rows: Any) -> dict[Any, Row]:
        return (
            super().load(self.dump(rows), self.state_version)
            if rows.__class__ is ArenaSlot
            else rows
        )

    def apply(self, rows: Any, message: Any) -> Sequence[Row]:
        """One message the plain way: its row is taken out of the arena, and put back as the plain
        machine left it.
        """
        if rows.__class__ is not ArenaSlot:
            return super().apply(rows, message)
        if message.__class__ is self.snapshot_struct:
            return self._apply_snapshot_in_arena(rows, message)
        key = astuple(message)
        there = self._find_row(rows, key)
        few = {} if there < 0 else {self._row_key(old := self._unpack_row(there)): old}
        records = super().apply(few, message)
        if not few:
            remove_row_compiled(self.arena, there) if there >= 0 else None
        else:
            ensure(
                self._load_packed_rows(rows, msgspec.msgpack.encode(list(few.values()))),
                "a row of the table can be kept",
            )
        return records

    def _apply_snapshot_in_arena(self, rows: ArenaSlot, message: Any) -> Sequence[Row]:
        table = super().load(self.dump(rows), self.state_version)
        records = super().apply(table, message)
        clear_session(self.arena, rows.number)
        ensure(
            self._load_packed_rows(rows, super().dump(table)), "the rows of a snapshot can be kept"
        )
        return records

    def _load_packed_rows(self, rows: ArenaSlot, saved: bytes) -> bool:
        data = np.frombuffer(saved, np.uint8)
        count = packed_state.count_rows(data)
        if count < 0 or len(saved) > SIZE_MAX:
            return False
        self.arena = with_row_capacity(self.arena, count, len(saved))
        taken = packed_state.load_rows(self.arena, rows.number, data, self._cells, self._log_sizes)
        if not taken:
            clear_session(self.arena, rows.number)
        return taken

    def _find_row(self, rows: ArenaSlot, key_row: Row) -> int:
        """Where the row with this key is; -1: nowhere."""
        line = [key_row[i] if i in self.key_positions else None for i in range(self._width)]
        data = np.frombuffer(msgspec.msgpack.encode(line), np.uint8)
        found = packed_state.find_packed_row(
            self.arena, rows.number, data, self._cells, self._log_sizes
        )
        ensure(found >= -1, "a key can be looked up", key=str(line)[:200])
        return found

    def _unpack_row(self, number: int) -> Row:
        size = sum(
            packed_state.CELL_BYTES_MAX + max(0, int(size)) for size in self.arena.sizes[number]
        )
        out = np.empty(5 + size, np.uint8)
        return self._row_decoder.decode(
            out[: packed_state.pack_row(self.arena, number, out)].tobytes()
        )

    def reserve_capacity(self, message_count: int, heap_bytes_in_use: int) -> None:
        """Room for what these messages may add."""
        self.arena = with_row_capacity(self.arena, message_count, heap_bytes_in_use)

    def repack_heap(self, *, always: bool = False) -> None:
        """Drop text that no row has any more. Only between stretches: records point into the heap."""
        used = int(self.arena.counters[HEAP_USED])
        if always or (used > HEAP_TIDY_BYTES and used > 2 * heap_bytes_in_use(self.arena)):
            live = heap_bytes_in_use(self.arena)
            heap = np.empty(max(live, 1024), np.uint8)
            repack_heap(self.arena, heap)
            self.arena = self.arena._replace(heap=heap)

    def fold_usual(
        self,
        sessions: Mapping[str, Session],
        names: Sequence[str | None],
        sequences: Sequence[int | None],
        messages: Any,
        output: FoldOutput,
    ) -> Iterable[int]:
        """Positions that the bulk fold did not take; of other messages, all."""
        in_bulk = getattr(messages, "fold_usual", None)
        return (
            super().fold_usual(sessions, names, sequences, messages, output)
            if in_bulk is None
            else in_bulk(sessions)
        )

    def sequences(self, messages: Any) -> Sequence[int | None]:
        """The producer's own counter of each message, if the stream names one."""
        counters = getattr(messages, "sequences", None)
        return super().sequences(messages) if counters is None else counters


def _build_field_layout(machine: TableMachine, settings: Mapping[str, Any]) -> FieldLayout:
    fields = [
        settings.get("type_field", "type"),
        settings.get("sequence") or "",
        settings.get("rows_field", "rows"),
        *settings["columns"],
    ]
    if not settings.get("sequence"):
        fields[1] = "\0"  # a name that no field of plain text has
    names = [name.encode() for name in fields]
    required = np.zeros(len(fields) - FIRST_COLUMN_FIELD, np.bool_)
    required[machine.key_positions] = True
    return FieldLayout(
        name_bytes=np.frombuffer(b"".join(names), np.uint8),
        name_edges=np.cumsum([0, *map(len, names)]).astype(np.int64),
        column_kinds=np.array(
            [COLUMN_KINDS[kind] for kind in settings["columns"].values()], np.int64
        ),
        is_required=required,
        has_sequence=bool(settings.get("sequence")),
    )
