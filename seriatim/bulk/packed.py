"""Rows as msgpack: the state bytes that the plain machine writes and reads, to the byte.

Next room: table.py.
"""

from __future__ import annotations

from seriatim.bulk.compiled import NULL, Array, compiled, inside, int64, uint8
from seriatim.bulk.kinds import BOOL, FLOAT, TEXT
from seriatim.bulk.rows import NONE, Arena, add, put_cell, seek

CELL_BYTES_MAX = 9
"""Of a cell, without its text."""


@inside
def big(d: Array, i: int, count: int) -> int:
    """A number of this many bytes, the highest first, taken as signed when it has eight."""
    value = int64(0)
    for j in range(i, i + count):
        value = (value << 8) | int64(d[j])
    return value


@inside
def put_big(out: Array, i: int, value: int, count: int) -> int:
    """Write a number in this many bytes; the place after it."""
    for j in range(count):
        out[i + j] = uint8((value >> (8 * (count - 1 - j))) & 255)
    return i + count


@inside
def list_head(d: Array, i: int) -> tuple[int, int]:
    """(place after a list's head, its length); -1: no list."""
    if i >= len(d):
        return i, -1
    tag = d[i]
    if tag & 0xF0 == 0x90:
        return i + 1, int64(tag & 15)
    if tag == 0xDC and i + 3 <= len(d):
        return i + 3, big(d, i + 1, 2)
    if tag == 0xDD and i + 5 <= len(d):
        return i + 5, big(d, i + 1, 4)
    return i, -1


@inside
def text_head(d: Array, i: int) -> tuple[int, int]:
    """(place of a text's first byte, its size); -1: no text."""
    tag = d[i]
    if tag & 0xE0 == 0xA0:
        return i + 1, int64(tag & 31)
    if tag == 0xD9 and i + 2 <= len(d):
        return i + 2, big(d, i + 1, 1)
    if tag == 0xDA and i + 3 <= len(d):
        return i + 3, big(d, i + 1, 2)
    if tag == 0xDB and i + 5 <= len(d):
        return i + 5, big(d, i + 1, 4)
    return i, -1


@inside
def whole(d: Array, i: int) -> tuple[int, int]:
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
        value = big(d, i + 1, count)
        if signed and count < 8 and value >> (8 * count - 1) == 1:
            value -= int64(1) << (8 * count)
        if not signed and count == 8 and value < 0:
            return -1, 0
        return i + 1 + count, value
    return -1, 0


@inside
def take_cell(d: Array, i: int, kind: int, c: int, cells: Array, sizes: Array) -> int:
    """Read one cell; the place after it, or -1 if it is not of its column's kind."""
    if i >= len(d):
        return -1
    tag = d[i]
    cells[c, 0], sizes[c, 0] = 0, 0
    if tag == 0xC0:
        sizes[c, 0] = NULL
        return i + 1
    if kind == TEXT:
        i, size = text_head(d, i)
        cells[c, 0], sizes[c, 0] = i, size
        return i + size if size >= 0 and i + size <= len(d) else -1
    if kind == BOOL:
        cells[c, 0] = 1 if tag == 0xC3 else 0
        return i + 1 if tag == 0xC2 or tag == 0xC3 else -1
    if kind == FLOAT:
        if tag != 0xCB or i + 9 > len(d):
            return -1
        cells[c, 0] = big(d, i + 1, 8)
        return i + 9
    i, cells[c, 0] = whole(d, i)
    return i


@inside
def take_row(d: Array, i: int, a: Arena, cells: Array, sizes: Array) -> int:
    """Read one row into scratch; the place after it, or -1."""
    i, width = list_head(d, i)
    if width != len(a.kinds):
        return -1
    for c in range(width):
        i = take_cell(d, i, a.kinds[c], c, cells, sizes)
        if i < 0:
            return -1
    for k in range(len(a.key)):
        if sizes[a.key[k], 0] < 0:
            return -1
    return i


@compiled
def count_rows(d: Array) -> int:
    """How many rows are packed; -1: it is no list."""
    _, count = list_head(d, 0)
    return count


@compiled
def take_in(a: Arena, slot: int, d: Array, cells: Array, sizes: Array) -> bool:
    """Put packed rows into a session, each in the place of the row with its key, or at the end."""
    i, count = list_head(d, 0)
    if count < 0:
        return False
    for _ in range(count):
        i = take_row(d, i, a, cells, sizes)
        if i < 0:
            return False
        r, h = seek(a, slot, d, cells, sizes, 0)
        if r == NONE:
            r = add(a, slot, h)
        for c in range(len(a.kinds)):
            put_cell(a, r, c, d, cells[c, 0], sizes[c, 0])
    return i == len(d)


@compiled
def find(a: Arena, slot: int, d: Array, cells: Array, sizes: Array) -> int:
    """The session's row with the key of one packed row; -1: none, -2: it cannot be read."""
    if take_row(d, 0, a, cells, sizes) != len(d):
        return -2
    r, _ = seek(a, slot, d, cells, sizes, 0)
    return r


@compiled
def packed_bytes(a: Arena, slot: int) -> tuple[int, int]:
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


@inside
def put_list_head(out: Array, i: int, count: int) -> int:
    """Write a list's head; the place after it."""
    if count < 16:
        out[i] = uint8(0x90 | count)
        return i + 1
    out[i] = 0xDC if count < 65536 else 0xDD
    return put_big(out, i + 1, count, 2 if count < 65536 else 4)


@inside
def put_text(out: Array, i: int, heap: Array, start: int, size: int) -> int:
    """Write a text; the place after it."""
    if size < 32:
        out[i] = uint8(0xA0 | size)
        i += 1
    else:
        out[i] = 0xD9 if size < 256 else 0xDA if size < 65536 else 0xDB
        i = put_big(out, i + 1, size, 1 if size < 256 else 2 if size < 65536 else 4)
    for j in range(size):
        out[i + j] = heap[start + j]
    return i + size


@inside
def put_whole(out: Array, i: int, value: int) -> int:
    """Write a whole number in as few bytes as msgpack can; the place after it."""
    if -32 <= value < 128:
        out[i] = uint8(value & 255)
        return i + 1
    power = 3
    if value >= 0:
        power = 0 if value < 1 << 8 else 1 if value < 1 << 16 else 2 if value < 1 << 32 else 3
        out[i] = uint8(0xCC + power)
    else:
        power = 0 if value >= -(1 << 7) else 1 if value >= -(1 << 15) else 2 if value >= -(1 << 31) else 3
        out[i] = uint8(0xD0 + power)
    return put_big(out, i + 1, value, 1 << power)


@compiled
def give_row(a: Arena, r: int, out: Array) -> int:
    """Write one row alone; how many bytes there are."""
    return put_row(a, r, out, 0)


@inside
def put_row(a: Arena, r: int, out: Array, i: int) -> int:
    """Write one row; the place after it."""
    i = put_list_head(out, i, len(a.kinds))
    for c in range(len(a.kinds)):
        kind, cell, size = a.kinds[c], a.cells[r, c], int64(a.sizes[r, c])
        if size < 0:
            out[i] = 0xC0
            i += 1
        elif kind == TEXT:
            i = put_text(out, i, a.heap, cell, size)
        elif kind == BOOL:
            out[i] = 0xC3 if cell == 1 else 0xC2
            i += 1
        elif kind == FLOAT:
            out[i] = 0xCB
            i = put_big(out, i + 1, cell, 8)
        else:
            i = put_whole(out, i, cell)
    return i


@compiled
def give_out(a: Arena, slot: int, count: int, out: Array) -> int:
    """Write all rows of a session; how many bytes there are."""
    i, r = put_list_head(out, 0, count), a.head[slot]
    while r != NONE:
        i = put_row(a, r, out, i)
        r = a.after[r]
    return i
