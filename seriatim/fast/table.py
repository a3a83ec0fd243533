"""The table machine over rows in an arena. It gives the same results as engine/table.py, which it
calls for every message that is not usual.

Next: fold.py, which folds batches of messages with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from seriatim.engine.messages import SequenceNumbers
from seriatim.engine.row_parts import (
    RowChanges,
    StoredRow,
    StoredRows,
    complete_rows,
    join_rows,
)
from seriatim.engine.session import FoldOutput, Row, SessionsByName
from seriatim.engine.table import StoredTable, TableMachine
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

HEAP_REPACK_BYTES = 8 << 20
"""A heap of less is not worth repacking."""
SESSIONS_PACKED_AT_ONCE = 1_024
STATE_BYTES_MAX = 2**31 - 1
"""Sizes of texts are int32 in the arena."""
NO_NUMBERS = np.empty(0, np.int64)
"""In place of the numbers of rows: they have none."""


class ArenaSlot:
    """The rows of one session, as the number of its slot in the arena. If the session is stored row by row,
    only those rows are in the arena that were read.
    """

    __slots__ = ("number", "stored_rows")

    def __init__(self, number: int, stored_rows: StoredRows | None = None) -> None:
        self.number = number
        self.stored_rows = stored_rows
        """None: all rows are in the arena."""


class CompiledTable(TableMachine):
    """The table machine that folds usual messages with compiled code.

    A session's state is an `ArenaSlot`. It is a dict of rows, as the plain machine has it, where
    rows cannot be in the arena, or the plain fold has taken them out of it.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.field_layout = _build_field_layout(self, settings)
        key_positions = np.array(self.key_positions, np.int64)
        self.arena: Arena = empty_arena(self.field_layout.column_kinds, key_positions)
        self.slot_count = 0
        self.uses_arena = True
        """Whether new rows go into the arena."""
        self._cells = np.zeros((self._width, 1), np.int64)
        self._sizes = np.zeros((self._width, 1), np.int32)
        """Memory for one row while it is read."""

    def start(self, session: str) -> Any:
        """The state of a new session: no rows."""
        return self._new_slot() if self.uses_arena else {}

    def _new_slot(self, stored_rows: StoredRows | None = None) -> ArenaSlot:
        return ArenaSlot(self.reserve_slots(1), stored_rows)

    def reserve_slots(self, count: int) -> int:
        """The first of so many new slots, which are empty."""
        first = self.slot_count
        self.slot_count += count
        self.arena = with_session_capacity(self.arena, self.slot_count - 1)
        return first

    def load_sessions(self, states: Sequence[bytes]) -> list[int]:
        """Rows of many sessions from bytes: the slot of each, or -1 where only the plain machine can
        read the bytes.
        """
        edges = np.cumsum([0, *map(len, states)]).astype(np.int64)
        data = np.frombuffer(b"".join(states), np.uint8)
        if not len(data) or np.max(np.diff(edges)) > STATE_BYTES_MAX:
            return [-1] * len(states)
        first = self.reserve_slots(len(states))
        slots = np.arange(first, first + len(states), dtype=np.int64)
        row_count = packed_state.count_rows_of_sessions(data, edges)
        self.arena = with_row_capacity(self.arena, row_count, len(data))
        packed_state.load_sessions(
            self.arena, slots, data, edges, NO_NUMBERS, self._cells, self._sizes
        )
        return slots.tolist()

    def dump_sessions(self, sessions: Sequence[ArenaSlot]) -> list[bytes | None]:
        """The rows of many sessions in the arena as bytes. None for a session that is stored row by row:
        `row_changes` gives what is to be stored of it.
        """
        # 1. Which sessions are stored as one value.
        slots = np.array([slot.number for slot in sessions], np.int64)
        row_counts = np.empty(len(slots), np.int64)
        size_bounds = np.empty(len(slots), np.int64)
        packed_state.packed_size_bounds(self.arena, slots, row_counts, size_bounds)
        chosen: list[int] = []
        for i, (slot, row_count) in enumerate(zip(sessions, row_counts.tolist(), strict=True)):
            if self._is_one_value(slot, row_count):
                chosen.append(i)
        # 2. Pack these.
        states: list[bytes | None] = [None] * len(sessions)
        for begin in range(0, len(chosen), SESSIONS_PACKED_AT_ONCE):
            at_once = chosen[begin : begin + SESSIONS_PACKED_AT_ONCE]
            packed = np.empty(int(size_bounds[at_once].sum()), np.uint8)
            edges = np.zeros(len(at_once) + 1, np.int64)
            packed_state.pack_sessions(
                self.arena, slots[at_once], row_counts[at_once], packed, edges
            )
            content = packed[: edges[-1]].tobytes()
            for i, (first, end) in zip(at_once, pairwise(edges.tolist()), strict=True):
                states[i] = content[first:end]
        return states

    def _is_one_value(self, slot: ArenaSlot, row_count: int) -> bool:
        """Whether a session in the arena is stored as one value, and not row by row."""
        return slot.stored_rows is None and row_count <= self.rows_together_max

    def load(self, state_bytes: bytes, version: int) -> Any:
        """Rows from bytes, in the arena if it can take them."""
        if not self.uses_arena:
            return super().load(state_bytes, version)
        slot = self._new_slot()
        if self._load_packed_rows(slot, state_bytes):
            return slot
        # Rows that an earlier version or a table of fewer columns saved: the plain machine makes them
        # as they are saved today.
        return self.move_into_arena(super().load(state_bytes, version))

    def move_into_arena(self, rows: dict[Any, Row]) -> Any:
        """The slot of rows that were plain; the rows as they are if the arena cannot take them."""
        slot = self._new_slot(getattr(rows, "stored_rows", None))
        # Not `dump`: that would read the rows that were not read yet.
        state_bytes = msgspec.msgpack.encode(list(rows.values()))
        numbers: list[int] = []
        if isinstance(rows, StoredTable):
            numbers = [rows.number_of(key) for key in rows]
        return slot if self._load_packed_rows(slot, state_bytes, numbers) else rows

    def load_stored_rows(self, stored_rows: StoredRows) -> Any:
        """The rows of a session that is stored row by row, in the arena if it can take them."""
        if not self.uses_arena:
            return super().load_stored_rows(stored_rows)
        slot = self._new_slot(stored_rows)
        rows = stored_rows.take_rows()
        if self._load_stored_rows(slot, rows):
            return slot
        return StoredTable(self, stored_rows, rows)

    def _load_stored_rows(self, slot: ArenaSlot, rows: Sequence[StoredRow]) -> bool:
        packed_rows = join_rows([self.fill_packed_row(row.packed) for row in rows])
        return self._load_packed_rows(slot, packed_rows, [row.number for row in rows])

    def take_read_rows(self, rows: Any) -> None:
        """Add the rows that were read meanwhile to a session that is stored row by row."""
        super().take_read_rows(rows)
        if rows.__class__ is ArenaSlot and rows.stored_rows is not None:
            new_rows = rows.stored_rows.take_rows()
            if new_rows:
                loaded = self._load_stored_rows(rows, new_rows)
                ensure(loaded, "rows that were stored one by one can be kept")

    def row_changes(self, rows: Any) -> RowChanges | None:
        """What is to be stored of a large session; None if it is stored as one value."""
        if rows.__class__ is not ArenaSlot:
            return super().row_changes(rows)
        row_count, size_bound = packed_state.packed_size_bound(self.arena, rows.number)
        if self._is_one_value(rows, row_count):
            return None
        stored_rows = self._pack_rows_apart(rows, row_count, size_bound)
        if rows.stored_rows is None:
            return complete_rows(stored_rows)
        return rows.stored_rows.changes(stored_rows)

    def _pack_rows_apart(self, slot: ArenaSlot, row_count: int, size_bound: int) -> list[StoredRow]:
        # A key is no larger than a row. So there is room for one behind the last row.
        packed = np.empty(2 * size_bound, np.uint8)
        edges = np.empty(row_count + 1, np.int64)
        numbers = np.empty(row_count, np.int64)
        key_hashes = np.empty(row_count, np.uint64)
        packed_state.pack_rows_apart(self.arena, slot.number, packed, edges, numbers, key_hashes)
        content = packed[: edges[-1]].tobytes()
        packed_rows = [content[begin:end] for begin, end in pairwise(edges.tolist())]
        return list(map(StoredRow, key_hashes.tolist(), numbers.tolist(), packed_rows))

    def to_plain_rows(self, rows: Any) -> dict[Any, Row]:
        """Take rows out of the arena, as the plain machine has them."""
        plain_rows: dict[Any, Row]
        if rows.__class__ is ArenaSlot and rows.stored_rows is not None:
            plain_rows = self._copy_to_stored_table(rows, rows.stored_rows)
        else:
            plain_rows = self._copy_to_plain_rows(rows)
        if rows.__class__ is ArenaSlot:
            clear_session(self.arena, rows.number)
        return plain_rows

    def _copy_to_stored_table(self, slot: ArenaSlot, stored_rows: StoredRows) -> StoredTable:
        row_count, size_bound = packed_state.packed_size_bound(self.arena, slot.number)
        rows = self._pack_rows_apart(slot, row_count, size_bound)
        return StoredTable(self, stored_rows, rows)

    def _read_all_rows(self, slot: ArenaSlot) -> None:
        """Read the rows that were not read yet into the arena, if the session is stored row by row."""
        if slot.stored_rows is None:
            return
        table = self._copy_to_stored_table(slot, slot.stored_rows)
        table.read_remaining()
        clear_session(self.arena, slot.number)
        slot.stored_rows = None
        loaded = self._load_packed_rows(slot, super().dump(table))
        ensure(loaded, "rows that were stored one by one can be kept")

    def dump(self, rows: Any) -> bytes:
        """Rows as bytes, in the order in which they came."""
        if rows.__class__ is not ArenaSlot:
            return super().dump(rows)
        self._read_all_rows(rows)
        row_count, size_bound = packed_state.packed_size_bound(self.arena, rows.number)
        packed = np.empty(size_bound, np.uint8)
        size = packed_state.pack_rows(self.arena, rows.number, row_count, packed)
        return packed[:size].tobytes()

    def to_plain(self, rows: Any) -> Any:
        """Rows as plain values for people and JSON."""
        return super().to_plain(self._copy_to_plain_rows(rows))

    def end(self, rows: Any) -> Sequence[Row]:
        """A delete for every row."""
        return super().end(self._copy_to_plain_rows(rows))

    def _copy_to_plain_rows(self, rows: Any) -> dict[Any, Row]:
        if rows.__class__ is not ArenaSlot:
            return rows
        return super().load(self.dump(rows), self.state_version)

    def apply(self, rows: Any, message: Any) -> Sequence[Row]:
        """Apply one message by the plain machine, to a table of the rows that it names: one, or two if
        it changes a key.

        1. Copy the rows out of the arena, as far as they are there.
        2. Let the plain machine change them, or refuse.
        3. Write the rows back as the plain machine left them, or remove them.
        """
        if rows.__class__ is not ArenaSlot:
            return super().apply(rows, message)
        if message.__class__ is self.snapshot_struct:
            return self._apply_snapshot_in_arena(rows, message)
        # 1. Copy the rows out of the arena.
        if rows.stored_rows is not None:
            rows.stored_rows.read(self.hashes_named_by(message))
            self.take_read_rows(rows)
        small_table: dict[Any, Row] = {}
        row_numbers: dict[Any, int] = {}
        for key_values in self.keys_named_by(message):
            row_number = self._find_row(rows, key_values)
            if row_number >= 0:
                old_row = self._unpack_row(row_number)
                key = self._row_key(old_row)
                small_table[key] = old_row
                row_numbers[key] = row_number
        # 2. Let the plain machine change them.
        records = super().apply(small_table, message)
        # 3. Write them back. A row that is removed and comes back under another key is the last one
        # of its session then, as it is in the dict of the plain machine.
        for key, row_number in row_numbers.items():
            if key not in small_table:
                remove_row_compiled(self.arena, row_number)
        if small_table:
            packed_rows = msgspec.msgpack.encode(list(small_table.values()))
            loaded = self._load_packed_rows(rows, packed_rows)
            ensure(loaded, "the rows of a table can be kept")
        return records

    def _apply_snapshot_in_arena(self, rows: ArenaSlot, message: Any) -> Sequence[Row]:
        table = self._copy_to_plain_rows(rows)
        records = super().apply(table, message)
        clear_session(self.arena, rows.number)
        loaded = self._load_packed_rows(rows, super().dump(table))
        ensure(loaded, "the rows of a snapshot can be kept")
        return records

    def _load_packed_rows(
        self, slot: ArenaSlot, state_bytes: bytes, numbers: Sequence[int] = ()
    ) -> bool:
        """Load rows into a slot, with the numbers of those that are stored one by one; False, and the slot
        is empty, if they cannot be read.
        """
        data = np.frombuffer(state_bytes, np.uint8)
        row_count = packed_state.count_rows(data)
        if row_count < 0 or len(state_bytes) > STATE_BYTES_MAX:
            return False
        self.arena = with_row_capacity(self.arena, row_count, len(state_bytes))
        loaded = packed_state.load_rows(
            self.arena,
            slot.number,
            data,
            np.array(numbers, np.int64),
            self._cells,
            self._sizes,
        )
        if not loaded:
            clear_session(self.arena, slot.number)
        return loaded

    def _find_row(self, slot: ArenaSlot, key_values: Row) -> int:
        """The number of the row with this key; -1 if there is none."""
        cells = [None] * self._width
        for position, key_value in zip(self.key_positions, key_values, strict=True):
            cells[position] = key_value
        data = np.frombuffer(msgspec.msgpack.encode(cells), np.uint8)
        row_number = packed_state.find_packed_row(
            self.arena, slot.number, data, self._cells, self._sizes
        )
        ensure(row_number >= -1, "a key can be looked up", key=str(cells)[:200])
        return row_number

    def _unpack_row(self, row_number: int) -> Row:
        size_bound = packed_state.LIST_HEADER_BYTES_MAX
        for cell_size in self.arena.sizes[row_number].tolist():
            size_bound += packed_state.CELL_BYTES_MAX + max(0, cell_size)
        packed = np.empty(size_bound, np.uint8)
        size = packed_state.pack_row(self.arena, row_number, packed)
        return self._row_decoder.decode(packed[:size].tobytes())

    def reserve_capacity(self, message_count: int, text_bytes: int) -> None:
        """Make the arena large enough for what these messages may add."""
        self.arena = with_row_capacity(self.arena, message_count, text_bytes)

    def repack_heap(self, *, always: bool = False) -> None:
        """Drop text that no row has any more, if it is more than half of a large heap.

        Only between batches: the records of a batch point into the heap.
        """
        used_bytes = int(self.arena.counters[HEAP_USED])
        if not always and used_bytes <= HEAP_REPACK_BYTES:
            return
        live_bytes = heap_bytes_in_use(self.arena)
        if not always and used_bytes <= 2 * live_bytes:
            return
        heap = np.empty(max(live_bytes, 1024), np.uint8)
        repack_heap(self.arena, heap)
        self.arena = self.arena._replace(heap=heap)

    def fold_usual(
        self,
        sessions: SessionsByName,
        names: Sequence[str | None],
        sequences: SequenceNumbers,
        messages: Any,
        output: FoldOutput,
    ) -> Iterable[int]:
        """Fold usual messages with compiled code; the positions of the others.

        Messages that were not parsed by compiled code are a list, and go to the plain machine.
        """
        fold_parsed = getattr(messages, "fold_usual", None)
        if fold_parsed is None:
            return super().fold_usual(sessions, names, sequences, messages, output)
        positions: Iterable[int] = fold_parsed(sessions)
        return positions

    def sequences(self, messages: Any) -> SequenceNumbers:
        """The producer's own counter of each message, if the stream names one."""
        lazy_sequences: Sequence[int | None] | None = getattr(messages, "sequences", None)
        if lazy_sequences is None:
            return super().sequences(messages)
        return lazy_sequences


def _build_field_layout(machine: TableMachine, settings: Mapping[str, Any]) -> FieldLayout:
    """What the parser must know of the table machine with these settings."""
    columns = settings["columns"]
    sequence = settings.get("sequence")
    fields = [
        settings.get("type_field", "type"),
        # No field of plain text has this name, so a stream without such a field never finds one.
        sequence or "\0",
        settings.get("rows_field", "rows"),
        settings.get("before_field", "before") or "\0",
        *columns,
    ]
    names = [name.encode() for name in fields]
    name_sizes = [len(name) for name in names]
    kinds = [COLUMN_KINDS[kind] for kind in columns.values()]
    is_required = np.zeros(len(fields) - FIRST_COLUMN_FIELD, np.bool_)
    is_required[machine.key_positions] = True
    return FieldLayout(
        name_bytes=np.frombuffer(b"".join(names), np.uint8),
        name_edges=np.cumsum([0, *name_sizes]).astype(np.int64),
        column_kinds=np.array(kinds, np.int64),
        is_required=is_required,
        has_sequence=bool(sequence),
    )
