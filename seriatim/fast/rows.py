"""The sessions' rows while compiled code folds them: one hash table by key, in the order they came.

A row is a line of `cells` and `sizes`. Text lies in `heap`, which only grows while a batch of
messages is folded, so that records may point into it; text that no row needs is dropped between
batches.

Next: packed_state.py reads and writes rows as state bytes; table.py uses both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from seriatim.fast.column_kinds import TEXT
from seriatim.fast.compiled import MISSING, NULL, Array, compiled, compiled_inner, int64, uint64
from seriatim.fast.parse import INSERT, SNAPSHOT, UPDATE, ParsedMessages, SnapshotRows

HEAP_USED, ROWS_USED, FREE, LIVE = 0, 1, 2, 3
"""Positions in `Arena.counters`: bytes of the heap, rows ever used, first free row, rows in use."""
NONE = -1
"""No row."""
FNV_START, FNV_PRIME = uint64(14695981039346656037), uint64(1099511628211)
"""The constants of the hash function FNV-1a."""
GOLDEN_RATIO = uint64(0x9E3779B97F4A7C15)


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
    numbers: Array
    """A row's number where it is stored by itself; -1: it has none. See engine/row_parts.py."""
    owner: Array
    """The row's session; -1: the row is free."""
    head: Array
    tail: Array
    """A session's first and last row."""
    buckets: Array
    heap: Array
    counters: Array


class RecordBuffers(NamedTuple):
    """Records, in columns: the row's cells, then the cells that it had before."""

    positions: Array
    indexes: Array
    """The number of each record within its message."""
    operations: Array
    cells: Array
    sizes: Array


class SessionColumns(NamedTuple):
    """All sessions of one task, a line for each."""

    slots: Array
    """The session's slot in the arena; -1: its messages are folded one by one."""
    free_slots: Array
    """An empty slot for a session that was never met before: a snapshot may begin it. Else -1."""
    begin_positions: Array
    """The position of the message of this batch with which compiled code began the session, until its
    object knows it; else -1.
    """
    sequences: Array
    has_sequence: Array
    is_active: Array
    distances: Array
    """(Messages since the snapshot, longest time since, the snapshot's time or -1)."""
    last_offsets: Array
    timestamps: Array
    is_touched: Array


def empty_arena(kinds: Array, key: Array) -> Arena:
    """An arena with no rows."""
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
        numbers=np.full(16, NONE, np.int64),
        owner=np.full(16, NONE, np.int32),
        head=np.full(16, NONE, np.int32),
        tail=np.full(16, NONE, np.int32),
        buckets=np.full(16, NONE, np.int32),
        heap=np.zeros(1024, np.uint8),
        counters=np.array([0, 0, NONE, 0], np.int64),
    )


def with_row_capacity(arena: Arena, rows: int, heap_bytes: int) -> Arena:
    """The same arena with capacity for this many more rows and bytes of text."""
    heap_capacity = int(arena.counters[HEAP_USED]) + heap_bytes
    if len(arena.heap) < heap_capacity:
        arena = arena._replace(heap=_grow_array(arena.heap, heap_capacity))
    row_capacity = int(arena.counters[ROWS_USED]) + rows
    if len(arena.owner) >= row_capacity:
        return arena
    grown = {"owner": _grow_array(arena.owner, row_capacity, NONE)}
    for name in ("cells", "sizes", "hashes", "chain", "before", "after", "numbers"):
        grown[name] = _grow_array(getattr(arena, name), row_capacity)
    arena = arena._replace(**grown)
    if len(arena.buckets) < row_capacity:
        # The number of buckets is a power of two: a mask picks the bucket of a hash.
        bucket_count = 1 << (2 * row_capacity).bit_length()
        arena = arena._replace(buckets=np.full(bucket_count, NONE, np.int32))
        rebuild_buckets(arena)
    return arena


def with_session_capacity(arena: Arena, slot: int) -> Arena:
    """The same arena with capacity for this session."""
    if slot < len(arena.head):
        return arena
    head = _grow_array(arena.head, slot + 1, NONE)
    tail = _grow_array(arena.tail, slot + 1, NONE)
    return arena._replace(head=head, tail=tail)


def _grow_array(array: Array, capacity: int, fill: int = 0) -> Array:
    """A copy of an array for at least this many entries; it at least doubles, so that copying stays
    cheap.
    """
    new_capacity = max(capacity, 2 * len(array))
    grown = np.full((new_capacity, *array.shape[1:]), fill, array.dtype)
    grown[: len(array)] = array
    return grown


@compiled_inner
def bucket_of(arena: Arena, key_hash: Any) -> int:
    """The bucket of a hash."""
    mask = uint64(len(arena.buckets) - 1)
    return int64(key_hash & mask)


@compiled_inner
def has_heap_text(arena: Arena, row: int, column: int) -> bool:
    """Whether a cell has text in the heap."""
    return arena.kinds[column] == TEXT and arena.sizes[row, column] > 0


@compiled
def rebuild_buckets(arena: Arena) -> None:
    """Put every row into its bucket. All buckets must be empty."""
    for row in range(arena.counters[ROWS_USED]):
        if arena.owner[row] != NONE:
            bucket = bucket_of(arena, arena.hashes[row])
            arena.chain[row] = arena.buckets[bucket]
            arena.buckets[bucket] = row


@compiled
def repack_heap(arena: Arena, heap: Array) -> None:
    """Move the text of all rows into a new heap, without text that no row needs."""
    top = 0
    for row in range(arena.counters[ROWS_USED]):
        if arena.owner[row] == NONE:
            continue
        for column in range(len(arena.kinds)):
            if has_heap_text(arena, row, column):
                start = arena.cells[row, column]
                size = arena.sizes[row, column]
                for j in range(size):
                    heap[top + j] = arena.heap[start + j]
                arena.cells[row, column] = top
                top += size
    arena.counters[HEAP_USED] = top


@compiled
def heap_bytes_in_use(arena: Arena) -> int:
    """The bytes of the heap that are text of a row."""
    total = 0
    for row in range(arena.counters[ROWS_USED]):
        if arena.owner[row] == NONE:
            continue
        for column in range(len(arena.kinds)):
            if has_heap_text(arena, row, column):
                total += arena.sizes[row, column]
    return total


@compiled_inner
def hash_cell(key_hash: Any, data: Array, kind: int, cell: int, size: int) -> Any:
    """Take one cell of a key into its hash."""
    if kind == TEXT:
        for j in range(cell, cell + size):
            key_hash = (key_hash ^ uint64(data[j])) * FNV_PRIME
        return (key_hash ^ uint64(size)) * FNV_PRIME
    return (key_hash ^ uint64(cell)) * FNV_PRIME


@compiled_inner
def mix_hash(key_hash: Any) -> Any:
    """Let every bit of a hash change its lowest bits, which pick the bucket."""
    key_hash ^= key_hash >> uint64(32)
    key_hash *= GOLDEN_RATIO
    return key_hash ^ (key_hash >> uint64(29))


@compiled_inner
def is_same_cell(arena: Arena, row: int, column: int, data: Array, cell: int, size: int) -> bool:
    """Whether a row has this value in a column. Text is compared byte by byte."""
    if arena.sizes[row, column] != size:
        return False
    row_cell = arena.cells[row, column]
    if arena.kinds[column] != TEXT:
        return size < 0 or row_cell == cell
    for j in range(size):
        if arena.heap[row_cell + j] != data[cell + j]:
            return False
    return True


@compiled_inner
def has_key_of(
    arena: Arena, row: int, data: Array, cells: Array, sizes: Array, message: int
) -> bool:
    """Whether a row has the key of a message."""
    for k in range(len(arena.key)):
        column = arena.key[k]
        cell = cells[column, message]
        if not is_same_cell(arena, row, column, data, cell, sizes[column, message]):
            return False
    return True


@compiled_inner
def find_row(
    arena: Arena, slot: int, data: Array, cells: Array, sizes: Array, message: int
) -> tuple[int, Any]:
    """(The session's row with the key of a message, or -1; the hash of the key)."""
    key_hash = FNV_START ^ uint64(slot)
    for k in range(len(arena.key)):
        column = arena.key[k]
        kind = arena.kinds[column]
        key_hash = hash_cell(key_hash, data, kind, cells[column, message], sizes[column, message])
    key_hash = mix_hash(key_hash)
    row = arena.buckets[bucket_of(arena, key_hash)]
    while row != NONE:
        is_candidate = arena.hashes[row] == key_hash and arena.owner[row] == slot
        if is_candidate and has_key_of(arena, row, data, cells, sizes, message):
            return int64(row), key_hash
        row = arena.chain[row]
    return int64(NONE), key_hash


@compiled_inner
def write_cell(arena: Arena, row: int, column: int, data: Array, cell: int, size: int) -> None:
    """Write one cell. Text is copied to the end of the heap."""
    if arena.kinds[column] == TEXT and size > 0:
        top = arena.counters[HEAP_USED]
        for j in range(size):
            arena.heap[top + j] = data[cell + j]
        arena.counters[HEAP_USED] = top + size
        cell = top
    arena.cells[row, column] = cell if size >= 0 else 0
    arena.sizes[row, column] = size


@compiled_inner
def append_row(arena: Arena, slot: int, key_hash: Any) -> int:
    """A new row at the end of a session.

    1. Take a free row, or the next one that was never used.
    2. Put it into the bucket of its hash.
    3. Put it behind the session's last row.
    """
    # 1. Free rows form a list through `chain`, which a row without an owner does not need.
    row = int64(arena.counters[FREE])
    if row != NONE:
        arena.counters[FREE] = arena.chain[row]
    else:
        row = int64(arena.counters[ROWS_USED])
        arena.counters[ROWS_USED] += 1
    # 2. The bucket.
    bucket = bucket_of(arena, key_hash)
    arena.hashes[row] = key_hash
    arena.numbers[row] = NONE
    arena.chain[row] = arena.buckets[bucket]
    arena.owner[row] = slot
    arena.buckets[bucket] = row
    # 3. The session.
    tail = arena.tail[slot]
    arena.before[row] = tail
    arena.after[row] = NONE
    arena.tail[slot] = row
    if tail == NONE:
        arena.head[slot] = row
    else:
        arena.after[tail] = row
    arena.counters[LIVE] += 1
    return row


@compiled_inner
def remove_row(arena: Arena, row: int) -> None:
    """Take a row out of its session. Its text stays in the heap until that is repacked.

    1. Take it out of its bucket.
    2. Join the rows before and after it.
    3. Put it into the list of free rows.
    """
    # 1. The bucket.
    bucket = bucket_of(arena, arena.hashes[row])
    if arena.buckets[bucket] == row:
        arena.buckets[bucket] = arena.chain[row]
    else:
        previous = arena.buckets[bucket]
        while arena.chain[previous] != row:
            previous = arena.chain[previous]
        arena.chain[previous] = arena.chain[row]
    # 2. The session.
    slot = arena.owner[row]
    before = arena.before[row]
    after = arena.after[row]
    if before == NONE:
        arena.head[slot] = after
    else:
        arena.after[before] = after
    if after == NONE:
        arena.tail[slot] = before
    else:
        arena.before[after] = before
    # 3. The free rows.
    arena.owner[row] = NONE
    arena.chain[row] = arena.counters[FREE]
    arena.counters[FREE] = row
    arena.counters[LIVE] -= 1


@compiled
def clear_session(arena: Arena, slot: int) -> None:
    """Take all rows out of a session."""
    while arena.head[slot] != NONE:
        remove_row(arena, int64(arena.head[slot]))


@compiled
def remove_row_compiled(arena: Arena, row: int) -> None:
    """`remove_row` for Python, which cannot call an inner function."""
    remove_row(arena, row)


@compiled_inner
def copy_row_to_record(
    arena: Arena, row: int, records: RecordBuffers, record: int, first_column: int
) -> None:
    """Write a row's cells into a record, from a column of the record on."""
    for column in range(len(arena.kinds)):
        records.cells[first_column + column, record] = arena.cells[row, column]
        records.sizes[first_column + column, record] = arena.sizes[row, column]


@compiled_inner
def write_nulls_to_record(
    arena: Arena, records: RecordBuffers, record: int, first_column: int
) -> None:
    """Write nulls into a record, from a column of the record on."""
    for column in range(len(arena.kinds)):
        records.cells[first_column + column, record] = 0
        records.sizes[first_column + column, record] = NULL


@compiled_inner
def has_before_columns(arena: Arena, records: RecordBuffers) -> bool:
    """Whether records have the row before the change as well."""
    return len(records.cells) > len(arena.kinds)


@compiled_inner
def insert_row(
    arena: Arena,
    slot: int,
    key_hash: Any,
    data: Array,
    parsed: ParsedMessages,
    message: int,
    records: RecordBuffers,
    record: int,
) -> None:
    """Insert a row and write its record; columns that the message does not name are null."""
    row = append_row(arena, slot, key_hash)
    for column in range(len(arena.kinds)):
        size = parsed.sizes[column, message]
        if size == MISSING:
            size = NULL
        write_cell(arena, row, column, data, parsed.cells[column, message], size)
    copy_row_to_record(arena, row, records, record, 0)
    if has_before_columns(arena, records):
        write_nulls_to_record(arena, records, record, len(arena.kinds))


@compiled_inner
def update_row(
    arena: Arena,
    row: int,
    data: Array,
    parsed: ParsedMessages,
    message: int,
    records: RecordBuffers,
    record: int,
) -> None:
    """Change the columns that the message names and write the record."""
    if has_before_columns(arena, records):
        copy_row_to_record(arena, row, records, record, len(arena.kinds))
    for column in range(len(arena.kinds)):
        size = parsed.sizes[column, message]
        if size == MISSING:
            continue
        cell = parsed.cells[column, message]
        # Text that did not change is not copied: the heap would grow for nothing.
        if arena.kinds[column] == TEXT and is_same_cell(arena, row, column, data, cell, size):
            continue
        write_cell(arena, row, column, data, cell, size)
    copy_row_to_record(arena, row, records, record, 0)


@compiled_inner
def delete_row(arena: Arena, row: int, records: RecordBuffers, record: int) -> None:
    """Delete a row; its record has the key, and the row before."""
    if has_before_columns(arena, records):
        copy_row_to_record(arena, row, records, record, len(arena.kinds))
    write_nulls_to_record(arena, records, record, 0)
    for k in range(len(arena.key)):
        column = arena.key[k]
        records.cells[column, record] = arena.cells[row, column]
        records.sizes[column, record] = arena.sizes[row, column]
    remove_row(arena, row)


@compiled_inner
def insert_snapshot_rows(
    arena: Arena,
    slot: int,
    data: Array,
    snapshots: SnapshotRows,
    rows: ParsedMessages,
    message: int,
    records: RecordBuffers,
    record: int,
) -> int:
    """Insert the rows of a snapshot into an empty slot and write their records; the number of records
    so far. It is -1, and the slot is empty again, if two rows have the same key.
    """
    first_row = snapshots.first_rows[message]
    for i in range(snapshots.row_counts[message]):
        row_number = first_row + i
        row, key_hash = find_row(arena, slot, data, rows.cells, rows.sizes, row_number)
        if row != NONE:
            while arena.head[slot] != NONE:
                remove_row(arena, int64(arena.head[slot]))
            return -1
        insert_row(arena, slot, key_hash, data, rows, row_number, records, record)
        records.positions[record] = message
        records.indexes[record] = i
        records.operations[record] = SNAPSHOT
        record += 1
    return record


@compiled_inner
def begin_session(
    arena: Arena,
    data: Array,
    snapshots: SnapshotRows,
    rows: ParsedMessages,
    sessions: SessionColumns,
    number: int,
    message: int,
    records: RecordBuffers,
    record: int,
) -> int:
    """Begin a session that was never met before by a snapshot; the number of records so far. It is -1,
    and nothing has changed, if the plain machine must take the snapshot.
    """
    slot = sessions.free_slots[number]
    if slot < 0 or snapshots.row_counts[message] < 0:
        return -1
    record = insert_snapshot_rows(arena, slot, data, snapshots, rows, message, records, record)
    if record >= 0:
        sessions.free_slots[number] = NONE
        sessions.slots[number] = slot
        sessions.begin_positions[number] = message
        sessions.is_active[number] = True
    return record


@compiled
def fold_usual_messages(
    arena: Arena,
    data: Array,
    parsed: ParsedMessages,
    snapshots: SnapshotRows,
    rows: ParsedMessages,
    session_numbers: Array,
    sessions: SessionColumns,
    has_sequence: bool,
    begin: int,
    records: RecordBuffers,
    record: int,
) -> tuple[int, int]:
    """Fold usual messages from `begin` on: (the first that is not usual, or the end; the number of
    records).

    A message is left to the plain machine, before it changes anything, if it has no session in the
    arena, if it was not parsed, if its sequence does not follow, or if the rows contradict it. A
    snapshot is usual if it is the very first message of its session.
    """
    message_count = len(parsed.kinds)
    for message in range(begin, message_count):
        number = session_numbers[message]
        kind = parsed.kinds[message]
        if number < 0 or kind < SNAPSHOT:
            return message, record
        sequence = parsed.sequences[message]
        if kind == SNAPSHOT:
            record_after = begin_session(
                arena, data, snapshots, rows, sessions, number, message, records, record
            )
            if record_after < 0:
                return message, record
            record = record_after
            sessions.sequences[number] = sequence
            sessions.has_sequence[number] = has_sequence
            continue
        slot = sessions.slots[number]
        if slot < 0:
            return message, record
        if has_sequence:
            if not sessions.has_sequence[number]:
                return message, record
            if sessions.sequences[number] != sequence - 1:
                return message, record
        row, key_hash = find_row(arena, slot, data, parsed.cells, parsed.sizes, message)
        # An insert needs a new key, every other message a row that is there.
        if (row == NONE) != (kind == INSERT):
            return message, record
        if kind == INSERT:
            insert_row(arena, slot, key_hash, data, parsed, message, records, record)
        elif kind == UPDATE:
            update_row(arena, row, data, parsed, message, records, record)
        else:
            delete_row(arena, row, records, record)
        records.positions[record] = message
        records.indexes[record] = 0
        records.operations[record] = kind
        sessions.sequences[number] = sequence
        record += 1
    return message_count, record
