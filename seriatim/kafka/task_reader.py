"""Reads ranges where they are folded: raw record batches from the partition's leader, unpacked into
Arrow columns.

It returns the same messages as Spark's source, in the same columns, without a JVM between broker
and fold. The checksum of every batch is checked. Transaction markers and aborted records are
skipped. Holes stay holes, and the fold explains them as usual. If a range cannot be read,
`SourceFailedError` is raised, and discovery decides what that means.

Next: kafka/spark_reader.py runs this in one task per partition; kafka/wire.py talks to the broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import kafka.errors as kafka_errors
import numpy as np
import pyarrow as pa
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.util import calc_crc32c, decode_varint

from seriatim.engine.files import SourceFailedError
from seriatim.engine.holes import mark_aborted_batches
from seriatim.engine.messages import Header
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import raise_broken_promise
from seriatim.kafka import client
from seriatim.kafka.client import SettingsSource
from seriatim.kafka.wire import (
    MAGIC_V2,
    Fetched,
    PartitionLeader,
    RawBatch,
    open_connections,
)
from seriatim.ports import UnreadableMessageError

FETCH_BYTES = 8 << 20
ROWS_PER_BATCH = 20_000
BATCH_BYTES = 64 << 20
"""The size of a batch for the fold. Only a single larger record batch makes it larger."""
RETRY_SECONDS_MAX = 60.0
RETRY_WAIT_SECONDS = 0.25
OLD_FORMAT_ADVICE = 'say slice.read = "spark"'
COMPILED_MIN = 5_000
"""From this many messages on, the compiled code is worth loading. That takes half a second, once per
worker.
"""
RECORD_BYTES_MIN = 7
"""The size of a record without key, value and headers: seven numbers."""
MILLISECONDS_MAX = (2**63 - 1) // 1000
CHECKSUM_START = DefaultRecordBatch.ATTRIBUTES_OFFSET
TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")
Array = Any
"""A numpy array."""
HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

Checksum = Callable[[memoryview], int]
Unpack = Callable[[RawBatch, Array, OffsetRange, int, "_MessageColumns"], int]
"""Writes those messages of a batch that are in a range into columns, from a row on. Returns the row
after them, or -1 if the batch is damaged.
"""


class KafkaRangeReader:
    """Reads ranges of partitions with this isolation. It is pickled and sent to the workers."""

    def __init__(
        self,
        settings: SettingsSource,
        isolation: str = "read_committed",
        retry_seconds_max: float = RETRY_SECONDS_MAX,
    ) -> None:
        self.settings = settings
        self.isolation = isolation
        self.retry_seconds_max = retry_seconds_max

    def __call__(
        self, partition: Partition, offset_range: OffsetRange, with_headers: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """The messages of a range in order, as batches of Spark's columns."""
        builder = _BatchBuilder(partition, offset_range, headers=with_headers)
        with _PartitionFetcher(self, partition) as fetcher:
            offset = offset_range.start
            while offset < offset_range.end:
                for raw in fetcher.next_batches(offset, offset_range.end):
                    content = builder.decompressed_records(raw)
                    # Before the batch is unpacked: the columns cannot grow, because compiled code
                    # writes into them.
                    if not builder.has_capacity(raw.record_count, len(content)):
                        yield builder.take_batch()
                    builder.add_batch(raw, content)
                offset = fetcher.next_offset
        if builder.row_count:
            yield builder.take_batch()


class _PartitionFetcher:
    """Fetches the log of one partition, piece by piece, from the broker that leads it now."""

    def __init__(self, reader: KafkaRangeReader, partition: Partition) -> None:
        self.reader = reader
        self.partition = partition
        self.next_offset = 0
        """The offset after the last fetched batch."""
        self._stack = ExitStack()
        self._leader: PartitionLeader | None = None

    def __enter__(self) -> _PartitionFetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def next_batches(self, offset: int, end: int) -> Iterator[RawBatch]:
        """The batches of the next fetch with messages before `end`, without markers and aborted
        ones.
        """
        fetched = self._fetch_with_retry(offset)
        headers = [raw.header() for raw in fetched.raw_batches]
        marked_headers = mark_aborted_batches(headers, fetched.aborted_transactions)
        for raw, header in zip(fetched.raw_batches, marked_headers, strict=True):
            if raw.magic < MAGIC_V2:
                raise SourceFailedError(
                    f"{self.partition}: {raw.base_offset} is in the format of before Kafka 0.11: "
                    f"{OLD_FORMAT_ADVICE}"
                )
            is_skipped = header.is_aborted and self.reader.isolation == "read_committed"
            # A fetch begins with the whole batch that has its offset, and goes on beyond the range.
            if raw.base_offset < end and not raw.is_control and not is_skipped:
                yield raw
        self.next_offset = fetched.raw_batches[-1].last_offset + 1

    def _fetch_with_retry(self, offset: int) -> Fetched:
        """A fetch with at least one complete batch. Leaders move and networks break, so it is tried
        again for a while.
        """
        deadline = time.monotonic() + self.reader.retry_seconds_max
        trouble = "it sends nothing"
        while time.monotonic() < deadline:
            try:
                fetched = self._connect_leader().fetch(offset, FETCH_BYTES)
                if fetched.raw_batches:
                    return fetched
                # Messages may still arrive, unless the log ends here.
                if 0 <= fetched.log_end <= offset:
                    raise SourceFailedError(
                        f"{self.partition}: the log ends at {fetched.log_end},"
                        f" and offset {offset} was to be read"
                    )
            except kafka_errors.OffsetOutOfRangeError:
                reason = f"{self.partition}: offset {offset} is not in the log"
                raise SourceFailedError(reason) from None
            except (kafka_errors.KafkaError, OSError) as error:
                # The leader may have moved: connect anew, which also asks who leads.
                self._stack.close()
                self._leader = None
                trouble = f"{type(error).__name__} {error}".strip()
                if not isinstance(error, OSError) and not getattr(error, "retriable", False):
                    break
                time.sleep(RETRY_WAIT_SECONDS)
        servers = client.resolve_settings(self.reader.settings)["bootstrap.servers"]
        raise SourceFailedError(
            f"{self.partition}: Kafka at {servers} cannot be read from offset {offset} on: {trouble}"
        )

    def _connect_leader(self) -> PartitionLeader:
        if self._leader is None:
            settings = client.python_settings(client.resolve_settings(self.reader.settings))
            connections = open_connections(settings, self.reader.retry_seconds_max)
            manager = self._stack.enter_context(connections)
            self._leader = PartitionLeader(manager, self.partition, self.reader.isolation)
        return self._leader


def _as_uint8_array(content: memoryview) -> Array:
    """Bytes for the compiled code, whose signatures take read-only arrays."""
    return np.frombuffer(content.toreadonly(), np.uint8)


def _damaged_batch_error(partition: Partition, raw: RawBatch, reason: str) -> SourceFailedError:
    return SourceFailedError(
        f"{partition}: the batch at offsets {raw.base_offset} to {raw.last_offset} is damaged: {reason}"
    )


class _BytesColumn:
    """A column of keys or values: their bytes one after the other, the position where each ends, and
    their sizes, where -1 is null.
    """

    def __init__(self, row_capacity: int, byte_capacity: int) -> None:
        self.sizes = np.empty(row_capacity, np.int32)
        self.edges = np.zeros(row_capacity + 1, np.int32)
        self.content = np.empty(byte_capacity, np.uint8)

    def set_value(self, row: int, value: bytes | None) -> None:
        """Write one value, in plain Python."""
        content = value or b""
        begin = int(self.edges[row])
        end = begin + len(content)
        self.sizes[row] = -1 if value is None else len(value)
        self.edges[row + 1] = end
        self.content[begin:end] = np.frombuffer(content, np.uint8)

    def to_arrow(self, rows: int) -> pa.Array:
        """The first rows as an Arrow array, which shares the memory of this column."""
        is_valid = self.sizes[:rows] >= 0
        null_count = rows - int(np.count_nonzero(is_valid))
        validity = None
        if null_count:
            validity = pa.py_buffer(np.packbits(is_valid, bitorder="little"))
        edges = pa.py_buffer(self.edges[: rows + 1])
        content = pa.py_buffer(self.content)
        return pa.Array.from_buffers(pa.binary(), rows, [validity, edges, content], null_count)


class _MessageColumns:
    """Columns for messages, allocated for a number of rows and bytes."""

    def __init__(self, row_capacity: int, byte_capacity: int) -> None:
        self.row_capacity = row_capacity
        self.byte_capacity = byte_capacity
        self.offsets = np.empty(row_capacity, np.int64)
        self.times = np.empty(row_capacity, np.int64)
        self.keys = _BytesColumn(row_capacity, byte_capacity)
        self.values = _BytesColumn(row_capacity, byte_capacity)
        self.header_positions = np.empty(row_capacity, np.int64)


class _BatchBuilder:
    """Collects messages of a range into one batch for the fold."""

    def __init__(self, partition: Partition, offset_range: OffsetRange, *, headers: bool) -> None:
        self.partition = partition
        self.offset_range = offset_range
        self.row_count = 0
        self.bytes_used = 0
        self.columns: _MessageColumns | None = None
        self.headers: list[list[Header]] | None = [] if headers else None
        self.checksum: Checksum = calc_crc32c
        self.unpack: Unpack = _unpack_in_python
        if len(offset_range) >= COMPILED_MIN:
            self.checksum, self.unpack = _compiled_functions()

    def decompressed_records(self, raw: RawBatch) -> Array:
        """The records of a batch, uncompressed, after its checksum was checked."""
        if self.checksum(raw.content[CHECKSUM_START:]) != raw.crc:
            raise _damaged_batch_error(self.partition, raw, "its checksum is wrong")
        try:
            content = _as_uint8_array(raw.decompressed_records())
        except (OSError, ValueError, KeyError) as error:
            raise _damaged_batch_error(self.partition, raw, str(error)) from None
        # A damaged count must not make us allocate columns for two billion messages.
        if raw.record_count * RECORD_BYTES_MIN > len(content):
            reason = f"it cannot hold {raw.record_count} messages"
            raise _damaged_batch_error(self.partition, raw, reason)
        return content

    def has_capacity(self, rows: int, size: int) -> bool:
        """Whether this many messages and bytes still fit. An empty builder allocates columns that
        are large enough.
        """
        if self.columns is None:
            self.columns = _MessageColumns(max(rows, ROWS_PER_BATCH), max(size, BATCH_BYTES))
        has_rows = self.row_count + rows <= self.columns.row_capacity
        return has_rows and self.bytes_used + size <= self.columns.byte_capacity

    def add_batch(self, raw: RawBatch, content: Array) -> None:
        """Add those messages of a batch that are in the range."""
        fits = self.has_capacity(raw.record_count, len(content))
        columns = self.columns
        if not fits or columns is None:
            raise_broken_promise("there is room", rows=raw.record_count, bytes=len(content))
        row_count = self.unpack(raw, content, self.offset_range, self.row_count, columns)
        if row_count < 0:
            raise _damaged_batch_error(self.partition, raw, "its records are none")
        if self.headers is not None:
            positions = columns.header_positions[self.row_count : row_count].tolist()
            data = memoryview(content)
            self.headers += [_read_headers(data, position) for position in positions]
        self.row_count = row_count
        self.bytes_used += len(content)

    def take_batch(self) -> pa.RecordBatch:
        """The messages collected so far, in Spark's columns. The builder is empty afterwards."""
        columns = self.columns
        rows = self.row_count
        headers = self.headers
        if columns is None or not rows:
            raise_broken_promise("an empty batch is not handed on", partition=str(self.partition))
        # The Arrow arrays share memory with the columns, so the next batch gets new ones.
        self.columns = None
        self.row_count = 0
        self.bytes_used = 0
        self.headers = None if headers is None else []
        times = columns.times[:rows]
        if (np.abs(times) > MILLISECONDS_MAX).any():
            raise UnreadableMessageError(f"{self.partition}: a timestamp that no calendar has")
        arrays = {
            "topic": pa.repeat(self.partition.topic, rows),
            "partition": pa.repeat(pa.scalar(self.partition.number, pa.int32()), rows),
            "offset": pa.array(columns.offsets[:rows]),
            "timestamp": pa.array(times * 1000).view(TIMESTAMP_TYPE),
            "key": columns.keys.to_arrow(rows),
            "value": columns.values.to_arrow(rows),
        }
        if headers is not None:
            arrays["headers"] = _headers_array(headers)
        return pa.RecordBatch.from_pydict(arrays)


def _headers_array(headers: list[list[Header]]) -> pa.Array:
    """The headers of all messages as one Arrow array."""
    header_rows = [_header_structs(message_headers) for message_headers in headers]
    return pa.array(header_rows, HEADERS_TYPE)


def _header_structs(headers: list[Header]) -> list[dict[str, str | bytes | None]]:
    return [{"key": key, "value": value} for key, value in headers]


def _compiled_functions() -> tuple[Checksum, Unpack]:
    """The compiled functions that check and unpack a batch."""
    from seriatim.fast.kafka_records import CRC_TABLES, crc32c, unpack_records

    position = np.zeros(1, np.int64)

    def checksum(content: memoryview) -> int:
        return int(crc32c(_as_uint8_array(content), 0, len(content), CRC_TABLES))

    def unpack(
        raw: RawBatch, content: Array, offset_range: OffsetRange, row: int, columns: _MessageColumns
    ) -> int:
        append_time_ms = raw.append_time_ms
        batch_numbers = (
            raw.record_count,
            raw.base_offset,
            raw.first_timestamp_ms,
            append_time_ms or 0,
            append_time_ms is not None,
            offset_range.start,
            offset_range.end,
        )
        keys = columns.keys
        values = columns.values
        return int(
            unpack_records(
                content,
                np.array(batch_numbers),
                row,
                position,
                columns.offsets,
                columns.times,
                columns.header_positions,
                keys.sizes,
                keys.edges,
                keys.content,
                values.sizes,
                values.edges,
                values.content,
            )
        )

    return checksum, unpack


def _unpack_in_python(
    raw: RawBatch, content: Array, offset_range: OffsetRange, row: int, columns: _MessageColumns
) -> int:
    """Unpack a batch in Python; -1 if it is damaged. For a few messages this is faster than loading
    the compiled code.
    """
    try:
        return _unpack_records(raw, memoryview(content), offset_range, row, columns)
    except (IndexError, ValueError):
        return -1


def _unpack_records(
    raw: RawBatch, data: memoryview, offset_range: OffsetRange, row: int, columns: _MessageColumns
) -> int:
    position = 0
    append_time_ms = raw.append_time_ms
    for _ in range(raw.record_count):
        length, position = decode_varint(data, position)
        record_end = position + length
        # One byte of attributes comes before the timestamp.
        delta_ms, position = decode_varint(data, position + 1)
        offset_delta, position = decode_varint(data, position)
        offset = raw.base_offset + offset_delta
        if offset_range.start <= offset < offset_range.end:
            columns.offsets[row] = offset
            if append_time_ms is None:
                columns.times[row] = raw.first_timestamp_ms + delta_ms
            else:
                columns.times[row] = append_time_ms
            for column in (columns.keys, columns.values):
                value, position = _read_bytes(data, position)
                column.set_value(row, value)
            columns.header_positions[row] = position
            row += 1
        position = record_end
    return row


def _read_bytes(data: memoryview, position: int) -> tuple[bytes | None, int]:
    """The bytes at a position, None for null, and the position after them."""
    size, start = decode_varint(data, position)
    if size < 0:
        return None, start
    end = start + size
    return bytes(data[start:end]), end


def _read_headers(data: memoryview, position: int) -> list[Header]:
    """The headers of a message: pairs of a name and bytes."""
    count, position = decode_varint(data, position)
    headers: list[Header] = []
    for _ in range(count):
        name, position = _read_bytes(data, position)
        value, position = _read_bytes(data, position)
        headers.append(((name or b"").decode(errors="replace"), value))
    return headers
