"""Rows as msgpack: the state bytes that the plain machine writes and reads, to the byte.

Next room: table.py.
"""

from __future__ import annotations

from seriatim.fast.column_kinds import BOOL, FLOAT, TEXT
from seriatim.fast.compiled import NULL, Array, compiled, compiled_inner, int64, uint8
from seriatim.fast.rows import NONE, Arena, append_row, find_row, write_cell

CELL_BYTES_MAX = 9
"""Of a cell, without its text."""


@compiled_inner
def read_big_endian(d: Array, i: int, count: int) -> int:
    """A number of this many bytes, the highest first, taken as signed when it has eight."""
    value = int64(0)
    for j in range(i, i + count):
        value = (value << 8) | int64(d[j])
    return value


@compiled_inner
def write_big_endian(out: Array, i: int, value: int, count: int) -> int:
    """Write a number in this many bytes; the place after it."""
    for j in range(count):
        out[i + j] = uint8((value >> (8 * (count - 1 - j))) & 255)
    return i + count


@compiled_inner
def read_list_header(d: Array, i: int) -> tuple[int, int]:
    """(place after a list's head, its length); -1: no list."""
    if i >= len(d):
        return i, -1
    tag = d[i]
    if tag & 0xF0 == 0x90:
        return i + 1, int64(tag & 15)
    if tag == 0xDC and i + 3 <= len(d):
        return i + 3, read_big_endian(d, i + 1, 2)
    if tag == 0xDD and i + 5 <= len(d):
        return i + 5, read_big_endian(d, i + 1, 4)
    return i, -1


@compiled_inner
def read_text_header(d: Array, i: int) -> tuple[int, int]:
    """(place of a text's first byte, its size); -1: no text."""
    tag = d[i]
    if tag & 0xE0 == 0xA0:
        return i + 1, int64(tag & 31)
    if tag == 0xD9 and i + 2 <= len(d):
        return i + 2, read_big_endian(d, i + 1, 1)
    if tag == 0xDA and i + 3 <= len(d):
        return i + 3, read_big_endian(d, i + 1, 2)
    if tag == 0xDB and i + 5 <= len(d):
        return i + 5, read_big_endian(d, i + 1, 4)
    return i, -1


@compiled_inner
def read_integer(d: Array, i: int) -> tuple[int, int]:
    """(place after a whole number, or -1; the number)."""
    tag = int64(d[i])
    if tag < 0x80:
        return i + 1, tag
    if tag >= 0xE0:
        return i + 1, tag - 256
    if 0xCC <= tag <= 0xCF or 0xD0 <= tag <= 0xD3:
        signed, power = tag >= 0xD0, (tag - 0xD0 if tag >= 0xD0 else tag - 0xCC)
        count = 1 << power
        if i + 1 + count > len(d):
            return -1, 0
        value = read_big_endian(d, i + 1, count)
        if signed and count < 8 and value >> (8 * count - 1) == 1:
            value -= int64(1) << (8 * count)
        if not signed and count == 8 and value < 0:
            return -1, 0
        return i + 1 + count, value
    return -1, 0


@compiled_inner
def read_cell(d: Array, i: int, kind: int, c: int, cells: Array, sizes: Array) -> int:
    """Read one cell; the place after it, or -1 if it is not of its column's kind."""
    if i >= len(d):
        return -1
    tag = d[i]
    cells[c, 0], sizes[c, 0] = 0, 0
    if tag == 0xC0:
        sizes[c, 0] = NULL
        return i + 1
    if kind == TEXT:
        i, size = read_text_header(d, i)
        cells[c, 0], sizes[c, 0] = i, size
        return i + size if size >= 0 and i + size <= len(d) else -1
    if kind == BOOL:
        cells[c, 0] = 1 if tag == 0xC3 else 0
        return i + 1 if tag == 0xC2 or tag == 0xC3 else -1
    if kind == FLOAT:
        if tag != 0xCB or i + 9 > len(d):
            return -1
        cells[c, 0] = read_big_endian(d, i + 1, 8)
        return i + 9
    i, cells[c, 0] = read_integer(d, i)
    return i


@compiled_inner
def read_row(d: Array, i: int, a: Arena, cells: Array, sizes: Array) -> int:
    """Read one row into scratch; the place after it, or -1."""
    i, width = read_list_header(d, i)
    if width != len(a.kinds):
        return -1
    for c in range(width):
        i = read_cell(d, i, a.kinds[c], c, cells, sizes)
        if i < 0:
            return -1
    for k in range(len(a.key)):
        if sizes[a.key[k], 0] < 0:
            return -1
    return i


@compiled
def count_rows(d: Array) -> int:
    """How many rows are packed; -1: it is no list."""
    _, count = read_list_header(d, 0)
    return count


@compiled
def load_rows(a: Arena, slot: int, d: Array, cells: Array, sizes: Array) -> bool:
    """Put packed rows into a session, each in the place of the row with its key, or at the end."""
    i, count = read_list_header(d, 0)
    if count < 0:
        return False
    for _ in range(count):
        i = read_row(d, i, a, cells, sizes)
        if i < 0:
            return False
        r, h = find_row(a, slot, d, cells, sizes, 0)
        if r == NONE:
            r = append_row(a, slot, h)
        for c in range(len(a.kinds)):
            write_cell(a, r, c, d, cells[c, 0], sizes[c, 0])
    return i == len(d)


@compiled
def find_packed_row(a: Arena, slot: int, d: Array, cells: Array, sizes: Array) -> int:
    """The session's row with the key of one packed row; -1: none, -2: it cannot be read."""
    if read_row(d, 0, a, cells, sizes) != len(d):
        return -2
    r, _ = find_row(a, slot, d, cells, sizes, 0)
    return r


@compiled
def packed_size_bound(a: Arena, slot: int) -> tuple[int, int]:
    """(rows of a session, most bytes that they can take when packed)."""
    count, total, r = 0, 5, a.head[slot]
    while r != NONE:
        count += 1
        total += 5
        for c in range(len(a.kinds)):
            total += CELL_BYTES_MAX
            if a.kinds[c] == TEXT and a.sizes[r, c] > 0:
                total += a.sizes[r, c]
        r = a.after[r]
    return count, total


@compiled_inner
def write_list_header(out: Array, i: int, count: int) -> int:
    """Write a list's head; the place after it."""
    if count < 16:
        out[i] = uint8(0x90 | count)
        return i + 1
    out[i] = 0xDC if count < 65536 else 0xDD
    return write_big_endian(out, i + 1, count, 2 if count < 65536 else 4)


@compiled_inner
def write_text(out: Array, i: int, heap: Array, start: int, size: int) -> int:
    """Write a text; the place after it."""
    if size < 32:
        out[i] = uint8(0xA0 | size)
        i += 1
    else:
        out[i] = 0xD9 if size < 256 else 0xDA if size < 65536 else 0xDB
        i = write_big_endian(out, i + 1, size, 1 if size < 256 else 2 if size < 65536 else 4)
    for j in range(size):
        out[i + j] = heap[start + j]
    return i + size


@compiled_inner
def write_integer(out: Array, i: int, value: int) -> int:
    """Write a whole number in as few bytes as msgpack can; the place after it."""
    if -32 <= value < 128:
        out[i] = uint8(value & 255)
        return i + 1
    power = 3
    if value >= 0:
        power = 0 if value < 1 << 8 else 1 if value < 1 << 16 else 2 if value < 1 << 32 else 3
        out[i] = uint8(0xCC + power)
    else:
        power = (
            0
            if value >= -(1 << 7)
            else 1
            if value >= -(1 << 15)
            else 2
            if value >= -(1 << 31)
            else 3
        )
        out[i] = uint8(0xD0 + power)
    return write_big_endian(out, i + 1, value, 1 << power)


@compiled
def pack_row(a: Arena, r: int, out: Array) -> int:
    """Write one row alone; how many bytes there are."""
    return write_row(a, r, out, 0)


@compiled_inner
def write_row(a: Arena, r: int, out: Array, i: int) -> int:
    """Write one row; the place after it."""
    i = write_list_header(out, i, len(a.kinds))
    for c in range(len(a.kinds)):
        kind, cell, size = a.kinds[c], a.cells[r, c], int64(a.sizes[r, c])
        if size < 0:
            out[i] = 0xC0
            i += 1
        elif kind == TEXT:
            i = write_text(out, i, a.heap, cell, size)
        elif kind == BOOL:
            out[i] = 0xC3 if cell == 1 else 0xC2
            i += 1
        elif kind == FLOAT:
            out[i] = 0xCB
            i = write_big_endian(out, i + 1, cell, 8)
        else:
            i = write_integer(out, i, cell)
    return i


@compiled
def pack_rows(a: Arena, slot: int, count: int, out: Array) -> int:
    """Write all rows of a session; how many bytes there are."""
    i, r = write_list_header(out, 0, count), a.head[slot]
    while r != NONE:
        i = write_row(a, r, out, i)
        r = a.after[r]
    return i
