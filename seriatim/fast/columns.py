"""Columns in and out: Arrow's buffers for the parser, and Arrow arrays of the compiled fold's records.

Next: storage/record_files.py, which writes the arrays as Parquet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seriatim.engine.session import ColumnarRecords
from seriatim.engine.table import MESSAGE_KINDS
from seriatim.fast.column_kinds import BOOL, FLOAT, TEXT
from seriatim.fast.compiled import MISSING, Array, compiled
from seriatim.fast.parse import (
    UNSURE,
    FieldLayout,
    ParsedMessages,
    SnapshotRows,
    count_snapshot_rows,
    parse_messages,
    parse_snapshot_rows,
)
from seriatim.fast.rows import RecordBuffers

if TYPE_CHECKING:
    from seriatim.fast.fold import BatchSessionNames
    from seriatim.fast.table import CompiledTable

OPERATION_NAMES = pa.array(MESSAGE_KINDS, pa.string())


class ParsedValues(NamedTuple):
    """A column of values, parsed."""

    data: Array
    """The bytes of all values."""
    edges: Array
    """Where each value begins and ends in them."""
    messages: ParsedMessages
    snapshots: SnapshotRows
    rows: ParsedMessages
    """The rows of all snapshots, in the order in which they come."""


def parse_values(values: pa.Array, layout: FieldLayout) -> ParsedValues:
    """Parse a column of values."""
    data, edges = _bytes_and_edges(values)
    width = len(layout.column_kinds)
    # 1. The messages.
    parsed = _empty_messages(len(values), width)
    long_float_count = parse_messages(data, edges, layout, parsed)
    _parse_long_floats(data, parsed, long_float_count)
    for i in _non_text_positions(values, data, edges):
        parsed.kinds[i] = UNSURE
    # 2. The rows of those that are snapshots.
    snapshots = SnapshotRows(*np.empty((3, len(values)), np.int64))
    row_count = count_snapshot_rows(data, edges, layout, parsed.kinds, snapshots)
    rows = _empty_messages(row_count, width)
    long_float_count = parse_snapshot_rows(data, edges, layout, snapshots, rows)
    _parse_long_floats(data, rows, long_float_count)
    return ParsedValues(data, edges, parsed, snapshots, rows)


def _bytes_and_edges(values: pa.Array) -> tuple[Array, Array]:
    """The bytes of a binary column, without a copy, and where each value begins and ends."""
    _, offsets, content = values.buffers()
    offset_type = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    all_edges = np.frombuffer(offsets, offset_type)
    # An array may be a slice: its buffers are those of the whole array.
    first_edge = values.offset
    edges = all_edges[first_edge : first_edge + len(values) + 1]
    if content is None:
        content = b""
    data = np.frombuffer(content, np.uint8)
    return as_read_only(data), edges.astype(np.int64)


def _empty_messages(count: int, width: int) -> ParsedMessages:
    """Memory for this many messages of a table of this many columns."""
    cells = np.zeros((width, count), np.int64)
    return ParsedMessages(
        kinds=np.empty(count, np.int8),
        sequences=np.zeros(count, np.int64),
        cells=cells,
        floats=cells.view(np.float64),
        sizes=np.full((width, count), MISSING, np.int32),
        long_floats=np.empty((count * width, 4), np.int64),
    )


def _parse_long_floats(data: Array, parsed: ParsedMessages, count: int) -> None:
    """Let Arrow read the floats of many digits: it rounds as msgspec does."""
    if count == 0:
        return
    long_floats = parsed.long_floats[:count]
    messages = long_floats[:, 0]
    columns = long_floats[:, 1]
    starts = np.ascontiguousarray(long_floats[:, 2])
    sizes = long_floats[:, 3].astype(np.int32)
    texts = text_column(data, starts, sizes)
    parsed.floats[columns, messages] = texts.cast(pa.float64()).to_numpy()


def _non_text_positions(values: pa.Array, data: Array, edges: Array) -> list[int]:
    """Positions of values that are null or not UTF-8."""
    positions: list[int] = []
    if values.null_count:
        is_null = values.is_null().to_numpy(zero_copy_only=False)
        positions += np.flatnonzero(is_null).tolist()
    # Bytes below 128 are ASCII, which is always UTF-8: nearly every batch ends here.
    highest_byte = np.max(data[edges[0] : edges[-1]], initial=0)
    if highest_byte < 128:
        return positions
    text_type = pa.large_string() if pa.types.is_large_binary(values.type) else pa.string()
    try:
        values.cast(text_type)
    except pa.ArrowInvalid:
        for i, value in enumerate(values.to_pylist()):
            if value is not None and not _is_text(value):
                positions.append(i)
    return positions


def _is_text(value: bytes) -> bool:
    """Whether bytes are valid UTF-8."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def to_columnar_records(
    runner: CompiledTable,
    names: BatchSessionNames,
    parsed: ParsedMessages,
    records: RecordBuffers,
    count: int,
) -> ColumnarRecords:
    """The first `count` records in columns, with the values that the plain fold gives in rows."""
    layout = runner.field_layout
    heap = runner.arena.heap
    kinds = layout.column_kinds.tolist()
    if runner.has_before_image:
        kinds = kinds + kinds
    operations = pa.array(records.operations[:count])
    columns = [pc.take(OPERATION_NAMES, operations)]
    for number, kind in enumerate(kinds):
        cells = records.cells[number, :count]
        sizes = records.sizes[number, :count]
        columns.append(arrow_column(kind, heap, cells, sizes))
    positions = records.positions[:count]
    if layout.has_sequence:
        sequences = pa.array(parsed.sequences[positions])
    else:
        sequences = pa.nulls(count, pa.int64())
    session_codes = pa.array(names.codes[positions])
    return ColumnarRecords(
        positions=positions,
        sessions=pa.array(names.distinct, pa.string()).take(session_codes),
        sequences=sequences,
        columns=columns,
        indexes=records.indexes[:count],
    )


def arrow_column(kind: int, heap: Array, cells: Array, sizes: Array) -> pa.Array:
    """One column of records as an Arrow array. A negative size is a null."""
    is_valid = sizes >= 0
    validity = None if is_valid.all() else _bit_buffer(is_valid)
    if kind == TEXT:
        return text_column(heap, cells, sizes, validity)
    if kind == BOOL:
        return pa.Array.from_buffers(pa.bool_(), len(cells), [validity, _bit_buffer(cells == 1)])
    arrow_type = pa.float64() if kind == FLOAT else pa.int64()
    content = pa.py_buffer(np.ascontiguousarray(cells))
    return pa.Array.from_buffers(arrow_type, len(cells), [validity, content])


def _bit_buffer(flags: Array) -> pa.Buffer:
    """Booleans as Arrow has them: one bit each."""
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def text_column(data: Array, starts: Array, sizes: Array, validity: Any = None) -> pa.Array:
    """Texts that lie anywhere in some bytes, as one column."""
    edges = np.empty(len(sizes) + 1, np.int32)
    edges[0] = 0
    np.cumsum(np.maximum(sizes, 0), out=edges[1:])
    content = np.empty(int(edges[-1]), np.uint8)
    copy_texts(as_read_only(data), starts, edges, content)
    return pa.StringArray.from_buffers(
        len(sizes), pa.py_buffer(edges), pa.py_buffer(content), validity
    )


def as_read_only(data: Array) -> Array:
    """The same bytes as an array that cannot be written to.

    numba compiles a function once per type of array, and read-only is part of the type: bytes of
    Arrow are read-only, so all others become so.
    """
    data = data.view()
    data.flags.writeable = False
    return data


@compiled
def copy_texts(data: Array, starts: Array, edges: Array, out: Array) -> None:
    """Copy texts behind each other: text i goes from edge i to the next edge."""
    for i in range(len(starts)):
        start = starts[i]
        edge = edges[i]
        for j in range(edges[i + 1] - edge):
            out[edge + j] = data[start + j]
