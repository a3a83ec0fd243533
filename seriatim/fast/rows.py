"""The sessions' rows while they are folded in bulk: found by key through one hash table, in the
order they came.

A row is a line of `cells` and `sizes`. Text lies in `heap`, which only grows while a stretch is
folded, so that records may point into it; what nobody needs any more is dropped between stretches.

Next room: packed.py brings rows in and out as state bytes; table.py uses both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from seriatim.fast.column_kinds import TEXT
from seriatim.fast.compiled import MISSING, NULL, Array, compiled, compiled_inner, int64, uint64
from seriatim.fast.parse import INSERT, SNAPSHOT, UPDATE, ParsedMessages

HEAP_USED, ROWS_USED, FREE, LIVE = 0, 1, 2, 3
"""Places in `Arena.used`: bytes of the heap, rows ever used, first free row, rows in use."""
NONE = -1


class Arena(NamedTuple):
    """All rows of all sessions of one task."""

    kinds: Array
    key: Array
    """Positions of the key's columns."""
    cells: Array
    sizes: Array
    hashes: Array
    chain: Array
    """The next row of the same bucket."""
    before: Array
    after: Array
    """The rows before and after in the same session."""
    owner: Array
    """The row's session; -1: the row is free."""
    head: Array
    tail: Array
    """A session's first and last row."""
    buckets: Array
    heap: Array
    counters: Array


class BulkRecords(NamedTuple):
    """Records, in columns: the row's cells, then those it had before."""

    positions: Array
    operations: Array
    cells: Array
    sizes: Array


class BulkSessions(NamedTuple):
    """The sessions of a stretch."""

    session_codes: Array
    """Of each message; -1: it has none."""
    slots: Array
    """Of each session, its place in the arena; -1: not to be folded in bulk."""
    sequences: Array
    has_sequence: Array


def empty_arena(kinds: Array, key: Array) -> Arena:
    """No rows yet."""
    width = len(kinds)
    return Arena(
        kinds=kinds,
        key=key,
        cells=np.zeros((16, width), np.int64),
        sizes=np.zeros((16, width), np.int32),
        hashes=np.zeros(16, np.uint64),
        chain=np.zeros(16, np.int32),
        before=np.zeros(16, np.int32),
        after=np.zeros(16, np.int32),
        owner=np.full(16, NONE, np.int32),
        head=np.full(16, NONE, np.int32),
        tail=np.full(16, NONE, np.int32),
        buckets=np.full(16, NONE, np.int32),
        heap=np.zeros(1024, np.uint8),
        counters=np.array([0, 0, NONE, 0], np.int64),
    )


def with_row_capacity(a: Arena, rows: int, heap_bytes: int) -> Arena:
    """The same arena with room for this many more rows and bytes of text."""
    need, heap_need = int(a.counters[ROWS_USED]) + rows, int(a.counters[HEAP_USED]) + heap_bytes
    if len(a.heap) < heap_need:
        a = a._replace(heap=_grow_array(a.heap, heap_need))
    if len(a.owner) >= need:
        return a
    names = ("cells", "sizes", "hashes", "chain", "before", "after")
    grown = {name: _grow_array(getattr(a, name), need) for name in names}
    a = a._replace(**grown, owner=_grow_array(a.owner, need, NONE))
    if len(a.buckets) < need:
        a = a._replace(buckets=np.full(1 << (2 * need).bit_length(), NONE, np.int32))
        rebuild_buckets(a)
    return a


def with_session_capacity(a: Arena, slot: int) -> Arena:
    """The same arena with room for this session."""
    if slot < len(a.head):
        return a
    return a._replace(
        head=_grow_array(a.head, slot + 1, NONE), tail=_grow_array(a.tail, slot + 1, NONE)
    )


def _grow_array(array: Array, need: int, fill: int = 0) -> Array:
    grown = np.full((max(need, 2 * len(array)), *array.shape[1:]), fill, array.dtype)
    grown[: len(array)] = array
    return grown


@compiled
def rebuild_buckets(a: Arena) -> None:
    """Put every row into its bucket."""
    mask = uint64(len(a.buckets) - 1)
    for r in range(a.counters[ROWS_USED]):
        if a.owner[r] != NONE:
            bucket = int64(a.hashes[r] & mask)
            a.chain[r] = a.buckets[bucket]
            a.buckets[bucket] = r


@compiled
def repack_heap(a: Arena, heap: Array) -> None:
    """Move the text of all rows into a new heap, without what nobody needs."""
    top = 0
    for r in range(a.counters[ROWS_USED]):
        if a.owner[r] == NONE:
            continue
        for c in range(len(a.kinds)):
            if a.kinds[c] == TEXT and a.sizes[r, c] > 0:
                start, size = a.cells[r, c], a.sizes[r, c]
                for j in range(size):
                    heap[top + j] = a.heap[start + j]
                a.cells[r, c] = top
                top += size
    a.counters[HEAP_USED] = top


@compiled
def heap_bytes_in_use(a: Arena) -> int:
    """How many bytes of the heap are in use."""
    total = 0
    for r in range(a.counters[ROWS_USED]):
        if a.owner[r] != NONE:
            for c in range(len(a.kinds)):
                if a.kinds[c] == TEXT and a.sizes[r, c] > 0:
                    total += a.sizes[r, c]
    return total


@compiled_inner
def hash_cell(h: Any, d: Array, kind: int, cell: int, size: int) -> Any:
    """Take one cell of a key into its hash."""
    prime = uint64(1099511628211)
    if kind == TEXT:
        for j in range(cell, cell + size):
            h = (h ^ uint64(d[j])) * prime
        return (h ^ uint64(size)) * prime
    return (h ^ uint64(cell)) * prime


@compiled_inner
def mix_hash(h: Any) -> Any:
    """Let every bit of a hash count in its lowest ones."""
    h ^= h >> uint64(32)
    h *= uint64(0x9E3779B97F4A7C15)
    return h ^ (h >> uint64(29))


@compiled_inner
def is_same_cell(a: Arena, r: int, c: int, d: Array, cell: int, size: int) -> bool:
    """Whether a row has this value in a column. Text is compared byte by byte."""
    if a.sizes[r, c] != size:
        return False
    if a.kinds[c] != TEXT:
        return size < 0 or a.cells[r, c] == cell
    start = a.cells[r, c]
    for j in range(size):
        if a.heap[start + j] != d[cell + j]:
            return False
    return True


@compiled_inner
def find_row(a: Arena, slot: int, d: Array, cells: Array, sizes: Array, m: int) -> tuple[int, Any]:
    """The session's row with the key of message `m`, or -1; and the key's hash."""
    h = uint64(14695981039346656037) ^ uint64(slot)
    for k in range(len(a.key)):
        c = a.key[k]
        h = hash_cell(h, d, a.kinds[c], cells[c, m], sizes[c, m])
    h = mix_hash(h)
    r = a.buckets[int64(h & uint64(len(a.buckets) - 1))]
    while r != NONE:
        if a.hashes[r] == h and a.owner[r] == slot:
            found = True
            for k in range(len(a.key)):
                c = a.key[k]
                if not is_same_cell(a, r, c, d, cells[c, m], sizes[c, m]):
                    found = False
                    break
            if found:
                return int64(r), h
        r = a.chain[r]
    return int64(NONE), h


@compiled_inner
def write_cell(a: Arena, r: int, c: int, d: Array, cell: int, size: int) -> None:
    """Write one cell. Text that is new goes to the end of the heap."""
    if a.kinds[c] == TEXT and size > 0:
        top = a.counters[HEAP_USED]
        for j in range(size):
            a.heap[top + j] = d[cell + j]
        a.counters[HEAP_USED] = top + size
        cell = top
    a.cells[r, c] = cell if size >= 0 else 0
    a.sizes[r, c] = size


@compiled_inner
def append_row(a: Arena, slot: int, h: Any) -> int:
    """A new row at the end of a session."""
    r = int64(a.counters[FREE])
    if r != NONE:
        a.counters[FREE] = a.chain[r]
    else:
        r = int64(a.counters[ROWS_USED])
        a.counters[ROWS_USED] += 1
    bucket = int64(h & uint64(len(a.buckets) - 1))
    a.hashes[r], a.chain[r], a.owner[r] = h, a.buckets[bucket], slot
    a.buckets[bucket] = r
    last = a.tail[slot]
    a.before[r], a.after[r], a.tail[slot] = last, NONE, r
    if last == NONE:
        a.head[slot] = r
    else:
        a.after[last] = r
    a.counters[LIVE] += 1
    return r


@compiled_inner
def remove_row(a: Arena, r: int) -> None:
    """Take a row out of its session. Its text stays where it is until the heap is tidied."""
    slot, bucket = a.owner[r], int64(a.hashes[r] & uint64(len(a.buckets) - 1))
    if a.buckets[bucket] == r:
        a.buckets[bucket] = a.chain[r]
    else:
        other = a.buckets[bucket]
        while a.chain[other] != r:
            other = a.chain[other]
        a.chain[other] = a.chain[r]
    before, after = a.before[r], a.after[r]
    if before == NONE:
        a.head[slot] = after
    else:
        a.after[before] = after
    if after == NONE:
        a.tail[slot] = before
    else:
        a.before[after] = before
    a.owner[r], a.chain[r], a.counters[FREE] = NONE, a.counters[FREE], r
    a.counters[LIVE] -= 1


@compiled
def clear_session(a: Arena, slot: int) -> None:
    """Take all rows out of a session."""
    while a.head[slot] != NONE:
        remove_row(a, int64(a.head[slot]))


@compiled
def remove_row_compiled(a: Arena, r: int) -> None:
    """Take one row out of its session."""
    remove_row(a, r)


@compiled_inner
def copy_row_to_record(a: Arena, r: int, records: BulkRecords, n: int, first: int) -> None:
    """A row's cells as part of a record."""
    for c in range(len(a.kinds)):
        records.cells[first + c, n] = a.cells[r, c]
        records.sizes[first + c, n] = a.sizes[r, c]


@compiled_inner
def write_nulls_to_record(a: Arena, records: BulkRecords, n: int, first: int) -> None:
    """Nulls as part of a record."""
    for c in range(len(a.kinds)):
        records.cells[first + c, n] = 0
        records.sizes[first + c, n] = NULL


@compiled_inner
def insert_row(
    a: Arena, slot: int, h: Any, d: Array, p: ParsedMessages, m: int, records: BulkRecords, n: int
) -> None:
    """A new row; columns that the message does not name are null."""
    r = append_row(a, slot, h)
    for c in range(len(a.kinds)):
        size = p.sizes[c, m]
        write_cell(a, r, c, d, p.cells[c, m], NULL if size == MISSING else size)
    copy_row_to_record(a, r, records, n, 0)
    if len(records.cells) > len(a.kinds):
        write_nulls_to_record(a, records, n, len(a.kinds))


@compiled_inner
def update_row(
    a: Arena, r: int, d: Array, p: ParsedMessages, m: int, records: BulkRecords, n: int
) -> None:
    """The columns that the message names."""
    if len(records.cells) > len(a.kinds):
        copy_row_to_record(a, r, records, n, len(a.kinds))
    for c in range(len(a.kinds)):
        size, cell = p.sizes[c, m], p.cells[c, m]
        if size != MISSING and not (a.kinds[c] == TEXT and is_same_cell(a, r, c, d, cell, size)):
            write_cell(a, r, c, d, cell, size)
    copy_row_to_record(a, r, records, n, 0)


@compiled_inner
def delete_row(a: Arena, r: int, records: BulkRecords, n: int) -> None:
    """The row goes; its record has the key, and the row before."""
    if len(records.cells) > len(a.kinds):
        copy_row_to_record(a, r, records, n, len(a.kinds))
    write_nulls_to_record(a, records, n, 0)
    for k in range(len(a.key)):
        c = a.key[k]
        records.cells[c, n], records.sizes[c, n] = a.cells[r, c], a.sizes[r, c]
    remove_row(a, r)


@compiled
def fold_usual_messages(
    a: Arena,
    d: Array,
    p: ParsedMessages,
    sessions: BulkSessions,
    has_sequence: bool,
    begin: int,
    records: BulkRecords,
    n: int,
) -> tuple[int, int]:
    """Fold usual messages from `begin` on: (the first that is not usual, or the end; how many
    records there are).
    """
    for m in range(begin, len(p.kinds)):
        code, kind = sessions.session_codes[m], p.kinds[m]
        if code < 0 or kind <= SNAPSHOT or sessions.slots[code] < 0:
            return m, n
        slot, sequence = sessions.slots[code], p.sequences[m]
        if has_sequence and (
            not sessions.has_sequence[code] or sessions.sequences[code] != sequence - 1
        ):
            return m, n
        r, h = find_row(a, slot, d, p.cells, p.sizes, m)
        if (r == NONE) != (kind == INSERT):
            return m, n
        if kind == INSERT:
            insert_row(a, slot, h, d, p, m, records, n)
        elif kind == UPDATE:
            update_row(a, r, d, p, m, records, n)
        else:
            delete_row(a, r, records, n)
        records.positions[n], records.operations[n] = m, kind
        sessions.sequences[code] = sequence
        n += 1
    return len(p.kinds), n
