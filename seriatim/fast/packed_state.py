"""Rows as msgpack: the same state bytes that the plain machine writes and reads.

The tags are those of the msgpack specification; msgspec writes the shortest form of every value,
and so does this module.

Next: table.py, which loads and saves sessions with these functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from seriatim.fast.column_kinds import BOOL, FLOAT, TEXT
from seriatim.fast.compiled import NULL, Array, compiled, compiled_inner, int64, uint8, uint64
from seriatim.fast.parse import SNAPSHOT, ParsedMessages
from seriatim.fast.rows import (
    FNV_PRIME,
    FNV_START,
    NONE,
    Arena,
    append_row,
    find_row,
    has_heap_text,
    remove_row,
    write_cell,
)

CELL_BYTES_MAX = 9
"""Bytes of a cell, without its text."""
LIST_HEADER_BYTES_MAX = 5
TAG_NULL, TAG_FALSE, TAG_TRUE, TAG_FLOAT = 0xC0, 0xC2, 0xC3, 0xCB
TAG_LIST, TAG_LIST_16, TAG_LIST_32 = 0x90, 0xDC, 0xDD
TAG_TEXT, TAG_TEXT_8, TAG_TEXT_16, TAG_TEXT_32 = 0xA0, 0xD9, 0xDA, 0xDB
TAG_UNSIGNED, TAG_SIGNED = 0xCC, 0xD0
"""The first of four tags, for numbers of 1, 2, 4 and 8 bytes."""


@compiled_inner
def read_big_endian(data: Array, position: int, count: int) -> int:
    """A number of this many bytes, the highest first. One of eight bytes is taken as signed."""
    value = int64(0)
    for j in range(position, position + count):
        value = (value << 8) | int64(data[j])
    return value


@compiled_inner
def write_big_endian(out: Array, position: int, value: int, count: int) -> int:
    """Write a number in this many bytes; the position after it."""
    for j in range(count):
        shift = 8 * (count - 1 - j)
        out[position + j] = uint8((value >> shift) & 255)
    return position + count


@compiled_inner
def read_list_header(data: Array, position: int) -> tuple[int, int]:
    """(Position after a list's header, its length); the length is -1 if it is no list."""
    if position >= len(data):
        return position, -1
    tag = data[position]
    if tag & 0xF0 == TAG_LIST:
        return position + 1, int64(tag & 15)
    if tag == TAG_LIST_16 and position + 3 <= len(data):
        return position + 3, read_big_endian(data, position + 1, 2)
    if tag == TAG_LIST_32 and position + 5 <= len(data):
        return position + 5, read_big_endian(data, position + 1, 4)
    return position, -1


@compiled_inner
def read_text_header(data: Array, position: int) -> tuple[int, int]:
    """(Position of a text's first byte, its size); the size is -1 if it is no text."""
    tag = data[position]
    if tag & 0xE0 == TAG_TEXT:
        return position + 1, int64(tag & 31)
    if tag == TAG_TEXT_8 and position + 2 <= len(data):
        return position + 2, read_big_endian(data, position + 1, 1)
    if tag == TAG_TEXT_16 and position + 3 <= len(data):
        return position + 3, read_big_endian(data, position + 1, 2)
    if tag == TAG_TEXT_32 and position + 5 <= len(data):
        return position + 5, read_big_endian(data, position + 1, 4)
    return position, -1


@compiled_inner
def read_integer(data: Array, position: int) -> tuple[int, int]:
    """(Position after an integer, or -1 if it is none or too large; the integer)."""
    tag = int64(data[position])
    if tag < 0x80:
        return position + 1, tag
    if tag >= 0xE0:
        return position + 1, tag - 256
    is_unsigned = TAG_UNSIGNED <= tag < TAG_UNSIGNED + 4
    is_signed = TAG_SIGNED <= tag < TAG_SIGNED + 4
    if not is_unsigned and not is_signed:
        return -1, 0
    # The lowest two bits of the tag say how many bytes follow: 1, 2, 4 or 8.
    count = 1 << (tag & 3)
    begin = position + 1
    if begin + count > len(data):
        return -1, 0
    value = read_big_endian(data, begin, count)
    if is_signed and count < 8:
        sign_bit = value >> (8 * count - 1)
        if sign_bit == 1:
            value -= int64(1) << (8 * count)
    if is_unsigned and count == 8 and value < 0:
        return -1, 0
    return begin + count, value


@compiled_inner
def read_cell(
    data: Array, position: int, kind: int, column: int, cells: Array, sizes: Array
) -> int:
    """Read one cell; the position after it, or -1 if it is not of its column's kind."""
    if position >= len(data):
        return -1
    tag = data[position]
    cells[column, 0] = 0
    sizes[column, 0] = 0
    if tag == TAG_NULL:
        sizes[column, 0] = NULL
        return position + 1
    if kind == TEXT:
        begin, size = read_text_header(data, position)
        cells[column, 0] = begin
        sizes[column, 0] = size
        if size < 0 or begin + size > len(data):
            return -1
        return begin + size
    if kind == BOOL:
        if tag == TAG_TRUE:
            cells[column, 0] = 1
        elif tag != TAG_FALSE:
            return -1
        return position + 1
    if kind == FLOAT:
        if tag != TAG_FLOAT or position + 9 > len(data):
            return -1
        cells[column, 0] = read_big_endian(data, position + 1, 8)
        return position + 9
    position, value = read_integer(data, position)
    cells[column, 0] = value
    return position


@compiled_inner
def read_row(data: Array, position: int, arena: Arena, cells: Array, sizes: Array) -> int:
    """Read one row into `cells` and `sizes`; the position after it, or -1 if it cannot be read."""
    position, width = read_list_header(data, position)
    if width != len(arena.kinds):
        return -1
    for column in range(width):
        position = read_cell(data, position, arena.kinds[column], column, cells, sizes)
        if position < 0:
            return -1
    for k in range(len(arena.key)):
        key_column = arena.key[k]
        if sizes[key_column, 0] < 0:
            return -1
    return position


@compiled
def count_rows(data: Array) -> int:
    """The number of packed rows; -1 if it is no list."""
    _, count = read_list_header(data, 0)
    return count


@compiled_inner
def load_rows_at(
    arena: Arena,
    slot: int,
    data: Array,
    position: int,
    numbers: Array,
    cells: Array,
    sizes: Array,
) -> int:
    """Put packed rows into a session: over the row with the same key, or at the end. `numbers` has the
    number of each row that has one. The position after the rows; -1, with some of them in the session,
    if the bytes cannot be read.
    """
    position, count = read_list_header(data, position)
    if count < 0:
        return -1
    for i in range(count):
        position = read_row(data, position, arena, cells, sizes)
        if position < 0:
            return -1
        row, key_hash = find_row(arena, slot, data, cells, sizes, 0)
        if row == NONE:
            row = append_row(arena, slot, key_hash)
        if i < len(numbers):
            arena.numbers[row] = numbers[i]
        for column in range(len(arena.kinds)):
            write_cell(arena, row, column, data, cells[column, 0], sizes[column, 0])
    return position


@compiled
def load_rows(
    arena: Arena,
    slot: int,
    data: Array,
    numbers: Array,
    cells: Array,
    sizes: Array,
) -> bool:
    """Put packed rows into a session. Gives False, with some of the rows in the session, if the bytes
    cannot be read.
    """
    return load_rows_at(arena, slot, data, 0, numbers, cells, sizes) == len(data)


@compiled
def count_rows_of_sessions(data: Array, edges: Array) -> int:
    """The most rows that the packed rows of many sessions can be, which lie between the edges."""
    total = 0
    for i in range(len(edges) - 1):
        _, count = read_list_header(data, edges[i])
        # A row takes more than a byte, so that damaged bytes reserve no memory.
        total += max(0, min(count, edges[i + 1] - edges[i]))
    return total


@compiled
def load_sessions(
    arena: Arena,
    slots: Array,
    data: Array,
    edges: Array,
    numbers: Array,
    cells: Array,
    sizes: Array,
) -> None:
    """Put the packed rows between each two edges into an empty session. Where they cannot be read,
    the session is empty, and its slot becomes -1. `numbers` is empty: no row has a number.
    """
    for i in range(len(slots)):
        slot = slots[i]
        end = load_rows_at(arena, slot, data, edges[i], numbers, cells, sizes)
        if end != edges[i + 1]:
            while arena.head[slot] != NONE:
                remove_row(arena, int64(arena.head[slot]))
            slots[i] = NONE


@compiled
def find_packed_row(arena: Arena, slot: int, data: Array, cells: Array, sizes: Array) -> int:
    """The session's row with the key of one packed row; -1: none, -2: it cannot be read."""
    if read_row(data, 0, arena, cells, sizes) != len(data):
        return -2
    row, _ = find_row(arena, slot, data, cells, sizes, 0)
    return row


@compiled_inner
def size_bound_of_session(arena: Arena, slot: int) -> tuple[int, int]:
    """(Rows of a session, the most bytes that they can take when packed)."""
    count = 0
    total = LIST_HEADER_BYTES_MAX
    row = arena.head[slot]
    while row != NONE:
        count += 1
        total += LIST_HEADER_BYTES_MAX
        for column in range(len(arena.kinds)):
            total += CELL_BYTES_MAX
            if has_heap_text(arena, row, column):
                total += arena.sizes[row, column]
        row = arena.after[row]
    return count, total


@compiled
def packed_size_bound(arena: Arena, slot: int) -> tuple[int, int]:
    """`size_bound_of_session` for Python, which cannot call an inner function."""
    return size_bound_of_session(arena, slot)


@compiled
def packed_size_bounds(arena: Arena, slots: Array, row_counts: Array, size_bounds: Array) -> None:
    """Note `size_bound_of_session` of many sessions."""
    for i in range(len(slots)):
        row_counts[i], size_bounds[i] = size_bound_of_session(arena, slots[i])


@compiled_inner
def write_list_header(out: Array, position: int, count: int) -> int:
    """Write a list's header; the position after it."""
    if count < 16:
        out[position] = uint8(TAG_LIST | count)
        return position + 1
    if count < 1 << 16:
        out[position] = TAG_LIST_16
        return write_big_endian(out, position + 1, count, 2)
    out[position] = TAG_LIST_32
    return write_big_endian(out, position + 1, count, 4)


@compiled_inner
def write_text_header(out: Array, position: int, size: int) -> int:
    """Write a text's header; the position after it."""
    if size < 32:
        out[position] = uint8(TAG_TEXT | size)
        return position + 1
    if size < 1 << 8:
        out[position] = TAG_TEXT_8
        return write_big_endian(out, position + 1, size, 1)
    if size < 1 << 16:
        out[position] = TAG_TEXT_16
        return write_big_endian(out, position + 1, size, 2)
    out[position] = TAG_TEXT_32
    return write_big_endian(out, position + 1, size, 4)


@compiled_inner
def write_text(out: Array, position: int, heap: Array, start: int, size: int) -> int:
    """Write a text; the position after it."""
    position = write_text_header(out, position, size)
    for j in range(size):
        out[position + j] = heap[start + j]
    return position + size


@compiled_inner
def integer_width_power(value: int) -> int:
    """0, 1, 2 or 3: an integer needs 1, 2, 4 or 8 bytes."""
    if value < 0:
        for power in range(3):
            if value >= -(int64(1) << ((8 << power) - 1)):
                return power
        return 3
    for power in range(3):
        if value < int64(1) << (8 << power):
            return power
    return 3


@compiled_inner
def write_integer(out: Array, position: int, value: int) -> int:
    """Write an integer in as few bytes as msgpack can; the position after it."""
    if -32 <= value < 128:
        out[position] = uint8(value & 255)
        return position + 1
    power = integer_width_power(value)
    tag = TAG_SIGNED if value < 0 else TAG_UNSIGNED
    out[position] = uint8(tag + power)
    return write_big_endian(out, position + 1, value, 1 << power)


@compiled
def pack_row(arena: Arena, row: int, out: Array) -> int:
    """Write one row alone; the number of bytes written."""
    return write_row(arena, row, out, 0)


@compiled_inner
def write_row(arena: Arena, row: int, out: Array, position: int) -> int:
    """Write one row; the position after it."""
    position = write_list_header(out, position, len(arena.kinds))
    for column in range(len(arena.kinds)):
        cell = arena.cells[row, column]
        size = int64(arena.sizes[row, column])
        position = write_packed_cell(out, position, arena.heap, arena.kinds[column], cell, size)
    return position


@compiled_inner
def write_packed_cell(
    out: Array,
    position: int,
    heap: Array,
    kind: int,
    cell: int,
    size: int,
) -> int:
    """Write one cell; the position after it."""
    if size < 0:
        out[position] = TAG_NULL
        return position + 1
    if kind == TEXT:
        return write_text(out, position, heap, cell, size)
    if kind == BOOL:
        out[position] = TAG_TRUE if cell == 1 else TAG_FALSE
        return position + 1
    if kind == FLOAT:
        out[position] = TAG_FLOAT
        return write_big_endian(out, position + 1, cell, 8)
    return write_integer(out, position, cell)


@compiled_inner
def write_rows(arena: Arena, slot: int, count: int, out: Array, position: int) -> int:
    """Write all rows of a session; the position after them."""
    position = write_list_header(out, position, count)
    row = arena.head[slot]
    while row != NONE:
        position = write_row(arena, row, out, position)
        row = arena.after[row]
    return position


@compiled
def pack_rows(arena: Arena, slot: int, count: int, out: Array) -> int:
    """Write all rows of a session; the number of bytes written."""
    return write_rows(arena, slot, count, out, 0)


@compiled
def pack_sessions(arena: Arena, slots: Array, row_counts: Array, out: Array, edges: Array) -> None:
    """Write all rows of many sessions behind each other, and where each session ends."""
    position = 0
    for i in range(len(slots)):
        position = write_rows(arena, slots[i], row_counts[i], out, position)
        edges[i + 1] = position


@compiled_inner
def hash_packed_key(out: Array, begin: int, end: int) -> Any:
    """The hash by which a row with this packed key is stored: `hash_key` of engine/row_parts.py."""
    key_hash = FNV_START
    for j in range(begin, end):
        key_hash = (key_hash ^ uint64(out[j])) * FNV_PRIME
    return key_hash


@compiled
def pack_rows_apart(
    arena: Arena,
    slot: int,
    out: Array,
    edges: Array,
    numbers: Array,
    key_hashes: Array,
) -> None:
    """Write all rows of a session, each as bytes of its own: row i is `out[edges[i]:edges[i + 1]]`. Behind
    the last row `out` has room for a key.
    """
    position = int64(0)
    i = 0
    row = arena.head[slot]
    edges[0] = 0
    while row != NONE:
        position = write_row(arena, row, out, position)
        numbers[i] = arena.numbers[row]
        end = write_list_header(out, position, len(arena.key))
        for k in range(len(arena.key)):
            column = arena.key[k]
            cell = arena.cells[row, column]
            size = int64(arena.sizes[row, column])
            end = write_packed_cell(out, end, arena.heap, arena.kinds[column], cell, size)
        key_hashes[i] = hash_packed_key(out, position, end)
        i += 1
        edges[i] = position
        row = arena.after[row]


@compiled
def find_unread_keys(
    arena: Arena,
    data: Array,
    parsed: ParsedMessages,
    session_numbers: Array,
    slots: Array,
    is_stored: Array,
    scratch: Array,
    found_numbers: Array,
    key_hashes: Array,
) -> int:
    """Of messages whose session is stored row by row and whose row is not in the arena: the number of the
    session and the hash of the key. Gives how many there are. `slots` and `is_stored` are columns of
    all sessions of the task; `scratch` has room for any key.
    """
    count = 0
    for message in range(len(parsed.kinds)):
        number = session_numbers[message]
        if number < 0 or not is_stored[number] or parsed.kinds[message] <= SNAPSHOT:
            continue
        slot = slots[number]
        if slot >= 0:
            row, _ = find_row(arena, slot, data, parsed.cells, parsed.sizes, message)
            if row != NONE:
                continue
        end = write_list_header(scratch, 0, len(arena.key))
        for k in range(len(arena.key)):
            column = arena.key[k]
            cell = parsed.cells[column, message]
            size = int64(parsed.sizes[column, message])
            end = write_packed_cell(scratch, end, data, arena.kinds[column], cell, size)
        found_numbers[count] = number
        key_hashes[count] = hash_packed_key(scratch, 0, end)
        count += 1
    return count


def packed_key_bound(arena: Arena, parsed: ParsedMessages) -> int:
    """The most bytes that the packed key of one of these messages can take."""
    text_bytes = parsed.sizes[arena.key].clip(min=0).sum(axis=0, dtype=np.int64)
    longest = int(text_bytes.max(initial=0))
    return LIST_HEADER_BYTES_MAX + CELL_BYTES_MAX * len(arena.key) + longest
