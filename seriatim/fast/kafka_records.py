"""Kafka's record batches, unpacked by compiled code: offsets, times, keys and values in columns.

The format is version 2 of Kafka's record batch: numbers are zigzag varints, as differences to the
batch's header. Bytes that are not such a batch give -1.

Next: kafka/task_reader.py, which calls it with what a broker sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from seriatim.fast.compiled import Array, compiled, compiled_inner, int64, load_eight_bytes, uint64

POLYNOMIAL = 0x82F63B78
"""The polynomial of CRC-32C (Castagnoli), its bits reversed."""
VARINT_BITS_MAX = 70
"""Ten bytes of seven bits: the longest varint of 64 bits."""


def _crc_tables() -> Array:
    """Eight tables of 256 entries: what each of eight bytes, taken at once, does to the checksum."""
    tables = np.zeros((8, 256), np.uint64)
    for value in range(256):
        remainder = value
        for _ in range(8):
            lowest_bit = remainder & 1
            remainder >>= 1
            if lowest_bit:
                remainder ^= POLYNOMIAL
        tables[0, value] = remainder
    for row in range(1, 8):
        previous = tables[row - 1]
        low_bytes = (previous & np.uint64(255)).astype(np.int64)
        tables[row] = tables[0][low_bytes] ^ (previous >> np.uint64(8))
    return tables


CRC_TABLES = _crc_tables()
BYTE_MASK, WORD_MASK = uint64(0xFF), uint64(0xFFFFFFFF)


@compiled
def crc32c(data: Array, position: int, end: int, tables: Array) -> Any:
    """The checksum of bytes, as Kafka has it in a batch's header. `tables`: CRC_TABLES."""
    crc = WORD_MASK
    while position + 8 <= end:
        # "Slicing by eight": one look into each table for eight bytes at once.
        x = load_eight_bytes(data, position) ^ crc
        crc = tables[0, int64(x >> uint64(56))]
        for j in range(7):
            byte = int64((x >> uint64(8 * j)) & BYTE_MASK)
            crc ^= tables[7 - j, byte]
        position += 8
    while position < end:
        byte = int64((crc ^ uint64(data[position])) & BYTE_MASK)
        crc = tables[0, byte] ^ (crc >> uint64(8))
        position += 1
    return crc ^ WORD_MASK


@intrinsic  # type: ignore[untyped-decorator]
def _copy_bytes(  # numba wants the context first
    context: Any,  # noqa: ARG001
    target: Any,
    target_position: Any,  # noqa: ARG001
    source: Any,
    source_position: Any,  # noqa: ARG001
    size: Any,  # noqa: ARG001
) -> Any:
    """Copy bytes from one array into another. The caller has proved that they fit."""

    def copy(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointers = []
        for array_argument, position_argument in ((0, 1), (2, 3)):
            make_array = context.make_array(signature.args[array_argument])
            array = make_array(context, builder, values[array_argument])
            pointers.append(builder.gep(array.data, [values[position_argument]]))
        item_size = ir.Constant(ir.IntType(64), 1)
        cgutils.raw_memcpy(builder, pointers[0], pointers[1], values[4], item_size)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), copy


@compiled_inner
def _read_varint(data: Array, read_at: Array, end: int) -> int:
    """The number at read_at[0], which moves behind it; read_at[0] becomes -1 if there is none."""
    value = uint64(0)
    shift = 0
    position = read_at[0]
    while position < end and shift < VARINT_BITS_MAX:
        byte = uint64(data[position])
        position += 1
        value |= (byte & uint64(127)) << uint64(shift)
        if byte < uint64(128):
            read_at[0] = position
            # Zigzag: the lowest bit is the sign.
            return int64(value >> uint64(1)) ^ -int64(value & uint64(1))
        shift += 7
    read_at[0] = -1
    return 0


@compiled_inner
def _read_bytes_into_column(
    data: Array, read_at: Array, end: int, sizes: Array, row: int, edges: Array, target: Array
) -> bool:
    """Read a key or a value into its column; whether there was one."""
    size = _read_varint(data, read_at, end)
    if read_at[0] < 0 or size < -1 or read_at[0] + size > end:
        return False
    sizes[row] = size
    column_end = int64(edges[row])
    if size > 0:
        _copy_bytes(target, column_end, data, read_at[0], size)
        read_at[0] += size
        column_end += size
    edges[row + 1] = column_end
    return True


@compiled
def unpack_records(
    data: Array,
    batch_header: Array,
    row: int,
    read_at: Array,
    offsets: Array,
    times: Array,
    header_positions: Array,
    key_sizes: Array,
    key_edges: Array,
    keys: Array,
    value_sizes: Array,
    value_edges: Array,
    values: Array,
) -> int:
    """Append a batch's records from `row` on; the row after the last one, -1 if it is no batch.

    `batch_header`: record count, base offset, first time, the append time and whether it counts
    instead of the records' own, first offset to read, offset to stop at. `read_at` is an array of
    one number for the position. The arrays of keys and values are as large as `data`.
    """
    count = batch_header[0]
    base_offset = batch_header[1]
    first_time_ms = batch_header[2]
    append_time_ms = batch_header[3]
    has_append_time = batch_header[4]
    first_offset = batch_header[5]
    stop_offset = batch_header[6]
    position = 0
    end = len(data)
    for _ in range(count):
        # 1. The record's length, its attributes (one byte that is not used), time and offset.
        read_at[0] = position
        length = _read_varint(data, read_at, end)
        if read_at[0] < 0 or length < 1 or read_at[0] + length > end:
            return -1
        record_end = read_at[0] + length
        read_at[0] += 1
        time_delta_ms = _read_varint(data, read_at, record_end)
        if read_at[0] < 0:
            return -1
        offset = base_offset + _read_varint(data, read_at, record_end)
        if read_at[0] < 0:
            return -1
        position = record_end
        # 2. A batch may begin before the first offset to read, and go on behind the last one.
        if offset < first_offset:
            continue
        if offset >= stop_offset:
            break
        # 3. Its columns. The headers are read later, by Python, from their position.
        offsets[row] = offset
        times[row] = append_time_ms if has_append_time else first_time_ms + time_delta_ms
        if not _read_bytes_into_column(data, read_at, record_end, key_sizes, row, key_edges, keys):
            return -1
        if not _read_bytes_into_column(
            data, read_at, record_end, value_sizes, row, value_edges, values
        ):
            return -1
        header_positions[row] = read_at[0]
        row += 1
    return row
