"""Kafka's records, unpacked in bulk: a batch's bytes as offsets, times, keys and values in columns.

The format is Kafka's own, version 2: numbers are varints, zigzag, as deltas to the batch's header.
Sure, or -1.

Next room: kafka/task_reader.py calls it with what a broker sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from seriatim.fast.compiled import Array, compiled, compiled_inner, int64, load_eight_bytes, uint64

POLYNOMIAL = 0x82F63B78
"""CRC-32C, by Castagnoli, its bits in reverse."""


def _crc_tables() -> Array:
    """For each of eight bytes at once, what it does to the sum."""
    tables = np.zeros((8, 256), np.uint64)
    for value in range(256):
        rest = value
        for _ in range(8):
            rest = rest >> 1 ^ (POLYNOMIAL if rest & 1 else 0)
        tables[0, value] = rest
    for row in range(1, 8):
        before = tables[row - 1]
        tables[row] = tables[0][(before & np.uint64(255)).astype(np.int64)] ^ (
            before >> np.uint64(8)
        )
    return tables


CRC_TABLES = _crc_tables()
BYTE_MASK, WORD_MASK = uint64(0xFF), uint64(0xFFFFFFFF)


@compiled
def crc32c(d: Array, at: int, end: int, t: Array) -> Any:
    """The checksum of bytes, as Kafka has it in a batch's header. `t`: CRC_TABLES."""
    crc = WORD_MASK
    while at + 8 <= end:
        x = load_eight_bytes(d, at) ^ crc
        crc = (
            t[7, int64(x & BYTE_MASK)]
            ^ t[6, int64((x >> uint64(8)) & BYTE_MASK)]
            ^ t[5, int64((x >> uint64(16)) & BYTE_MASK)]
            ^ t[4, int64((x >> uint64(24)) & BYTE_MASK)]
            ^ t[3, int64((x >> uint64(32)) & BYTE_MASK)]
            ^ t[2, int64((x >> uint64(40)) & BYTE_MASK)]
            ^ t[1, int64((x >> uint64(48)) & BYTE_MASK)]
            ^ t[0, int64(x >> uint64(56))]
        )
        at += 8
    while at < end:
        crc = t[0, int64((crc ^ uint64(d[at])) & BYTE_MASK)] ^ (crc >> uint64(8))
        at += 1
    return crc ^ WORD_MASK


@intrinsic  # type: ignore[untyped-decorator]
def _copy_bytes(context: Any, target: Any, at: Any, source: Any, start: Any, size: Any) -> Any:  # noqa: ARG001
    """Bytes from one array into another. Whoever calls it knows that there is room."""

    def copy(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointers = []
        for array, place in ((0, 1), (2, 3)):
            whole = context.make_array(signature.args[array])(context, builder, values[array])
            pointers.append(builder.gep(whole.data, [values[place]]))
        cgutils.raw_memcpy(
            builder, pointers[0], pointers[1], values[4], ir.Constant(ir.IntType(64), 1)
        )
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), copy


@compiled_inner
def _read_varint(d: Array, p: Array, end: int) -> int:
    """The number at p[0], which moves on; p[0] is -1 afterwards if there is none."""
    value, shift, at = uint64(0), 0, p[0]
    while at < end and shift < 70:
        byte = uint64(d[at])
        at += 1
        value |= (byte & uint64(127)) << uint64(shift)
        if byte < uint64(128):
            p[0] = at
            return int64(value >> uint64(1)) ^ -int64(value & uint64(1))
        shift += 7
    p[0] = -1
    return 0


@compiled_inner
def _read_bytes_into_column(
    d: Array, p: Array, end: int, sizes: Array, row: int, edges: Array, target: Array
) -> bool:
    """A key or a value into its column. Whether it was one."""
    size = _read_varint(d, p, end)
    if p[0] < 0 or size < -1 or p[0] + size > end:
        return False
    sizes[row] = size
    begin = int64(edges[row])
    if size > 0:
        _copy_bytes(target, begin, d, p[0], size)
        p[0] += size
        begin += size
    edges[row + 1] = begin
    return True


@compiled
def unpack_records(
    d: Array,
    batch_header: Array,
    row: int,
    p: Array,
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
    """Append a batch's records from `row` on; the row after the last one. -1: this is no batch.

    head: count, base offset, first time, the time of all or -1 and whether it counts, first offset
    wanted, the end. `p` is room for one number. Keys and values have room for all of `d`.
    """
    count, base, first_ms, stamped_ms, is_stamped, start, until = (
        batch_header[0],
        batch_header[1],
        batch_header[2],
        batch_header[3],
        batch_header[4],
        batch_header[5],
        batch_header[6],
    )
    at, end = 0, len(d)
    for _ in range(count):
        p[0] = at
        length = _read_varint(d, p, end)
        if p[0] < 0 or length < 1 or p[0] + length > end:
            return -1
        stop = p[0] + length
        p[0] += 1
        delta_ms = _read_varint(d, p, stop)
        if p[0] < 0:
            return -1
        offset = base + _read_varint(d, p, stop)
        if p[0] < 0:
            return -1
        at = stop
        if offset < start:
            continue
        if offset >= until:
            break
        offsets[row] = offset
        times[row] = stamped_ms if is_stamped else first_ms + delta_ms
        if not _read_bytes_into_column(d, p, stop, key_sizes, row, key_edges, keys):
            return -1
        if not _read_bytes_into_column(d, p, stop, value_sizes, row, value_edges, values):
            return -1
        header_positions[row] = p[0]
        row += 1
    return row
