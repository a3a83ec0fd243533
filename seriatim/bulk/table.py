"""The table machine over rows in an arena. Same results as core/table.py, which it asks about all that is unusual.

Next room: fold.py walks over stretches with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import astuple

from seriatim.bulk import packed
from seriatim.bulk.kinds import KINDS
from seriatim.bulk.parse import COLUMNS, Wanted
from seriatim.bulk.rows import HEAP_USED, Arena, arena, clear, reserve, reserve_session, take_out, text_bytes, tidy
from seriatim.core.errors import ensure
from seriatim.core.session import Folded, Session
from seriatim.core.table import Row, TableMachine

HEAP_TIDY_BYTES = 8 << 20
"""A heap below this is not worth tidying."""
SIZE_MAX = 2**31 - 1


class Slot:
    """A session's rows: a place in the arena."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class BulkTable(TableMachine):
    """The table machine, folding usual messages in bulk. A session's state is a `Slot`, or rows as the plain one has.

    Rows are plain where they cannot be in the arena: bytes of state that the plain machine alone can read.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        kinds = np.array([KINDS[kind] for kind in settings["columns"].values()], np.int64)
        self.arena: Arena = arena(kinds, np.array(self.key_positions, np.int64))
        self.wanted = _wanted(self, settings)
        self.slots = 0
        self.in_arena = True
        """Whether new rows go into the arena."""
        self._cells = np.zeros((self._width, 1), np.int64)
        self._sizes = np.zeros((self._width, 1), np.int32)
        rows: Any = self._saved.type
        self._saved_row: msgspec.msgpack.Decoder[Row] = msgspec.msgpack.Decoder(rows.__args__[0])

    def start(self, session: str) -> Any:
        """No rows yet."""
        return self._new_slot() if self.in_arena else {}

    def _new_slot(self) -> Slot:
        self.arena = reserve_session(self.arena, self.slots)
        self.slots += 1
        return Slot(self.slots - 1)

    def load(self, saved: bytes, version: int) -> Any:
        """Rows from bytes; into the arena, if that can take them."""
        slot = self._new_slot() if self.in_arena else None
        return slot if slot is not None and self._take_in(slot, saved) else super().load(saved, version)

    def into_arena(self, rows: dict[Any, Row]) -> Any:
        """Rows that were plain; as they are, if the arena cannot take them."""
        slot = self._new_slot()
        return slot if self._take_in(slot, super().dump(rows)) else rows

    def plain(self, rows: Any) -> dict[Any, Row]:
        """Rows that were in the arena, as the plain machine has them."""
        if rows.__class__ is not Slot:
            return rows
        table = super().load(self.dump(rows), self.state_version)
        clear(self.arena, rows.number)
        return table

    def dump(self, rows: Any) -> bytes:
        """Rows as bytes, in the order in which they came."""
        if rows.__class__ is not Slot:
            return super().dump(rows)
        count, size = packed.packed_bytes(self.arena, rows.number)
        out = np.empty(size, np.uint8)
        return out[: packed.give_out(self.arena, rows.number, count, out)].tobytes()

    def show(self, rows: Any) -> Any:
        """Rows as plain values for people and JSON."""
        return super().show(self._copy(rows))

    def end(self, rows: Any) -> Sequence[Row]:
        """A delete for every row."""
        return super().end(self._copy(rows))

    def _copy(self, rows: Any) -> dict[Any, Row]:
        return super().load(self.dump(rows), self.state_version) if rows.__class__ is Slot else rows

    def apply(self, rows: Any, message: Any) -> Sequence[Row]:
        """One message the plain way: its row is taken out of the arena, and put back as the plain machine left it."""
        if rows.__class__ is not Slot:
            return super().apply(rows, message)
        if message.__class__ is self.snapshot:
            return self._begin_again(rows, message)
        key = astuple(message)
        there = self._find(rows, key)
        few = {} if there < 0 else {self._key(old := self._row(there)): old}
        records = super().apply(few, message)
        if not few:
            take_out(self.arena, there) if there >= 0 else None
        else:
            ensure(self._take_in(rows, msgspec.msgpack.encode(list(few.values()))), "a row of the table can be kept")
        return records

    def _begin_again(self, rows: Slot, message: Any) -> Sequence[Row]:
        table = super().load(self.dump(rows), self.state_version)
        records = super().apply(table, message)
        clear(self.arena, rows.number)
        ensure(self._take_in(rows, super().dump(table)), "the rows of a snapshot can be kept")
        return records

    def _take_in(self, rows: Slot, saved: bytes) -> bool:
        data = np.frombuffer(saved, np.uint8)
        count = packed.count_rows(data)
        if count < 0 or len(saved) > SIZE_MAX:
            return False
        self.arena = reserve(self.arena, count, len(saved))
        taken = packed.take_in(self.arena, rows.number, data, self._cells, self._sizes)
        if not taken:
            clear(self.arena, rows.number)
        return taken

    def _find(self, rows: Slot, given: Row) -> int:
        """Where the row with this key is; -1: nowhere."""
        line = [given[i] if i in self.key_positions else None for i in range(self._width)]
        data = np.frombuffer(msgspec.msgpack.encode(line), np.uint8)
        found = packed.find(self.arena, rows.number, data, self._cells, self._sizes)
        ensure(found >= -1, "a key can be looked up", key=str(line)[:200])
        return found

    def _row(self, number: int) -> Row:
        size = sum(packed.CELL_BYTES_MAX + max(0, int(size)) for size in self.arena.sizes[number])
        out = np.empty(5 + size, np.uint8)
        return self._saved_row.decode(out[: packed.give_row(self.arena, number, out)].tobytes())

    def make_room(self, messages: int, text: int) -> None:
        """Room for what these messages may add."""
        self.arena = reserve(self.arena, messages, text)

    def tidy(self, *, always: bool = False) -> None:
        """Drop text that no row has any more. Only between stretches: records point into the heap."""
        used = int(self.arena.used[HEAP_USED])
        if always or (used > HEAP_TIDY_BYTES and used > 2 * text_bytes(self.arena)):
            live = text_bytes(self.arena)
            heap = np.empty(max(live, 1024), np.uint8)
            tidy(self.arena, heap)
            self.arena = self.arena._replace(heap=heap)

    def unusual(
        self,
        sessions: Mapping[str, Session],
        names: Sequence[str | None],
        sequences: Sequence[int | None],
        messages: Any,
        out: Folded,
    ) -> Iterable[int]:
        """Positions that the bulk fold did not take; of other messages, all."""
        in_bulk = getattr(messages, "unusual", None)
        return super().unusual(sessions, names, sequences, messages, out) if in_bulk is None else in_bulk(sessions)

    def sequences(self, messages: Any) -> Sequence[int | None]:
        """The producer's own counter of each message, if the stream names one."""
        counters = getattr(messages, "sequences", None)
        return super().sequences(messages) if counters is None else counters


def _wanted(machine: TableMachine, settings: Mapping[str, Any]) -> Wanted:
    fields = [
        settings.get("type_field", "type"),
        settings.get("sequence") or "",
        settings.get("rows_field", "rows"),
        *settings["columns"],
    ]
    if not settings.get("sequence"):
        fields[1] = "\0"  # a name that no field of plain text has
    names = [name.encode() for name in fields]
    required = np.zeros(len(fields) - COLUMNS, np.bool_)
    required[machine.key_positions] = True
    return Wanted(
        names=np.frombuffer(b"".join(names), np.uint8),
        edges=np.cumsum([0, *map(len, names)]).astype(np.int64),
        kinds=np.array([KINDS[kind] for kind in settings["columns"].values()], np.int64),
        required=required,
        sequenced=bool(settings.get("sequence")),
    )
