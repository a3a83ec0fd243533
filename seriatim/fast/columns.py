"""Columns in and out: Arrow's buffers for the parser, and Arrow arrays of the records that a bulk
fold made.

Next room: storage/record_files.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seriatim.engine.session import ColumnarRecords
from seriatim.engine.table import MESSAGE_KINDS
from seriatim.fast.column_kinds import BOOL, FLOAT, TEXT
from seriatim.fast.compiled import MISSING, Array, compiled
from seriatim.fast.parse import UNSURE, FieldLayout, ParsedMessages, parse_messages
from seriatim.fast.rows import BulkRecords

if TYPE_CHECKING:
    from seriatim.fast.fold import BulkSessionNames
    from seriatim.fast.table import BulkTable

OPERATION_NAMES = pa.array(MESSAGE_KINDS, pa.string())


def parse_values(values: pa.Array, layout: FieldLayout) -> tuple[Array, Array, ParsedMessages]:
    """A column of values: its bytes, where each begins and ends, and the messages parsed from it."""
    count, width = len(values), len(layout.column_kinds)
    wide = pa.types.is_large_binary(values.type)
    _, starts, content = values.buffers()
    edges = np.frombuffer(starts, np.int64 if wide else np.int32)[
        values.offset : values.offset + count + 1
    ]
    data = as_read_only(np.frombuffer(content if content is not None else b"", np.uint8))
    cells = np.zeros((width, count), np.int64)
    parsed = ParsedMessages(
        kinds=np.empty(count, np.int8),
        sequences=np.zeros(count, np.int64),
        cells=cells,
        floats=cells.view(np.float64),
        sizes=np.full((width, count), MISSING, np.int32),
        long_floats=np.empty((count * width, 4), np.int64),
    )
    edges = edges.astype(np.int64)
    hard = parse_messages(data, edges, layout, parsed)
    _parse_long_floats(data, parsed, hard)
    for i in _non_text_positions(values, data, edges):
        parsed.kinds[i] = UNSURE
    return data, edges, parsed


def _parse_long_floats(data: Array, parsed: ParsedMessages, count: int) -> None:
    """Floats of many digits, read by Arrow, which rounds as msgspec does."""
    if count == 0:
        return
    r, c, start, size = (np.ascontiguousarray(parsed.long_floats[:count, i]) for i in range(4))
    parsed.floats[c, r] = (
        text_column(data, start, size.astype(np.int32)).cast(pa.float64()).to_numpy()
    )


def _non_text_positions(values: pa.Array, data: Array, edges: Array) -> list[int]:
    """Positions of values that are null or not UTF-8."""
    unsure = (
        np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)).tolist()
        if values.null_count
        else []
    )
    if np.max(data[edges[0] : edges[-1]], initial=0) < 128:
        return unsure
    try:
        values.cast(pa.large_string() if pa.types.is_large_binary(values.type) else pa.string())
    except pa.ArrowInvalid:
        unsure += [
            i
            for i, value in enumerate(values.to_pylist())
            if value is not None and not _is_text(value)
        ]
    return unsure


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def to_columnar_records(
    runner: BulkTable,
    names: BulkSessionNames,
    parsed: ParsedMessages,
    bulk_records: BulkRecords,
    count: int,
) -> ColumnarRecords:
    """Records in columns, as the plain fold would give them in rows."""
    positions = bulk_records.positions[:count]
    kinds = np.concatenate(
        [runner.field_layout.column_kinds] * (2 if runner.has_before_image else 1)
    )
    columns = [pc.take(OPERATION_NAMES, pa.array(bulk_records.operations[:count]))]
    for c, kind in enumerate(kinds.tolist()):
        columns.append(
            arrow_column(
                kind,
                runner.arena.heap,
                bulk_records.cells[c, :count],
                bulk_records.sizes[c, :count],
            )
        )
    sequences = (
        pa.array(parsed.sequences[positions])
        if runner.field_layout.has_sequence
        else pa.nulls(count, pa.int64())
    )
    sessions = pa.array(names.distinct, pa.string()).take(pa.array(names.codes[positions]))
    return ColumnarRecords(
        positions=positions, sessions=sessions, sequences=sequences, columns=columns
    )


def arrow_column(kind: int, heap: Array, cells: Array, sizes: Array) -> pa.Array:
    """One column of records. A negative size is a null."""
    valid = sizes >= 0
    validity = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    if kind == TEXT:
        return text_column(heap, cells, sizes, validity)
    if kind == BOOL:
        return pa.Array.from_buffers(
            pa.bool_(),
            len(cells),
            [validity, pa.py_buffer(np.packbits(cells == 1, bitorder="little"))],
        )
    return pa.Array.from_buffers(
        pa.float64() if kind == FLOAT else pa.int64(),
        len(cells),
        [validity, pa.py_buffer(np.ascontiguousarray(cells))],
    )


def text_column(data: Array, starts: Array, sizes: Array, validity: Any = None) -> pa.Array:
    """Texts that lie anywhere in some bytes, as one column."""
    edges = np.empty(len(sizes) + 1, np.int32)
    edges[0] = 0
    np.cumsum(np.maximum(sizes, 0), out=edges[1:])
    out = np.empty(int(edges[-1]), np.uint8)
    copy_texts(as_read_only(data), starts, edges, out)
    return pa.StringArray.from_buffers(len(sizes), pa.py_buffer(edges), pa.py_buffer(out), validity)


def as_read_only(data: Array) -> Array:
    """The same bytes, not to be written to: whoever made them, they are one kind of array, compiled
    once.
    """
    data = data.view()
    data.flags.writeable = False
    return data


@compiled
def copy_texts(data: Array, starts: Array, edges: Array, out: Array) -> None:
    """Bring texts together, one after the other."""
    for i in range(len(starts)):
        start, top = starts[i], edges[i]
        for j in range(edges[i + 1] - top):
            out[top + j] = data[start + j]
