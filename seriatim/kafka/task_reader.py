"""Ranges read where they are folded: raw record batches from the partition's leader, unpacked into
Arrow in bulk.

The same messages that Spark's source gives, in the same columns, without a JVM between broker and
fold: each batch's checksum is proved, transaction markers and aborted records are passed over,
holes stay holes and are explained as ever. What cannot be read raises `SourceFailedError`, and
discovery decides what it means.

Next room: spark.py runs it in a task per partition; wire.py speaks to the broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import kafka.errors as kafka_errors
import numpy as np
import pyarrow as pa
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.util import calc_crc32c, decode_varint

from seriatim.engine.holes import KafkaRecordBatch, mark_aborted_batches
from seriatim.engine.messages import Header
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ensure
from seriatim.kafka import client
from seriatim.kafka.wire import (
    MAGIC_V2,
    PartitionLeader,
    RawBatch,
    open_connections,
    parse_raw_batches,
)
from seriatim.ports import SourceFailedError, UnreadableMessageError

FETCH_BYTES = 8 << 20
ROWS_PER_BATCH, BATCH_BYTES = 20_000, 64 << 20
"""A batch for the fold has about so many messages, and not many more bytes than this."""
RETRY_SECONDS_MAX = 60.0
RETRY_WAIT_SECONDS = 0.25
OLD_FORMAT_ADVICE = 'say slice.read = "spark"'
COMPILED_MIN = 5_000
"""Messages from which on compiled unpacking is worth loading it, which takes half a second once per
worker.
"""
RECORD_BYTES_MIN = 7
"""Of a message without key, value and headers: seven numbers."""
MILLISECONDS_MAX = (2**63 - 1) // 1000
CHECKSUM_START = DefaultRecordBatch.ATTRIBUTES_OFFSET
TIMESTAMP_TYPE = pa.timestamp("us", tz="UTC")
Array = Any
"""A numpy array."""
HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

Checksum = Callable[[memoryview], int]
Unpack = Callable[[RawBatch, Array, OffsetRange, int, "_MessageColumns"], int]
"""Appends a batch's messages that are in a range from a row on; the row after them, -1 if the batch
is damaged.
"""


class KafkaRangeReader:
    """Ranges of partitions, as a consumer of this isolation sees them. Pickled to the workers."""

    def __init__(
        self,
        settings: Mapping[str, str],
        isolation: str = "read_committed",
        retry_seconds_max: float = RETRY_SECONDS_MAX,
    ) -> None:
        self.settings, self.isolation, self.retry_seconds_max = (
            dict(settings),
            isolation,
            retry_seconds_max,
        )

    def __call__(
        self, partition: Partition, offset_range: OffsetRange, with_headers: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """The messages of a range in order, as batches of Spark's columns."""
        gathered = _BatchBuilder(partition, offset_range, headers=with_headers)
        with _PartitionFetcher(self, partition) as fetches:
            at = offset_range.start
            while at < offset_range.end:
                for raw in fetches.next_batches(at, offset_range.end):
                    content = gathered.decompressed_records(raw)
                    if not gathered.has_capacity(raw.record_count, len(content)):
                        yield gathered.take_batch()
                    gathered.add_batch(raw, content)
                at = fetches.next_offset
        if gathered.row_count:
            yield gathered.take_batch()


class _PartitionFetcher:
    """One partition's log, fetched piece by piece from whoever leads it now."""

    def __init__(self, reader: KafkaRangeReader, partition: Partition) -> None:
        self.reader, self.partition = reader, partition
        self.next_offset = 0
        """The offset after the last batch fetched."""
        self._stack = ExitStack()
        self._leader: PartitionLeader | None = None

    def __enter__(self) -> _PartitionFetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def next_batches(self, offset: int, end: int) -> Iterator[RawBatch]:
        """The batches of the next fetch whose records count, up to `end`."""
        answer, raws = self._fetch_with_retry(offset)
        listed = [(one.producer_id, one.first_offset) for one in answer.aborted_transactions or ()]
        for raw, batch in zip(
            raws, mark_aborted_batches(map(_batch_header, raws), listed), strict=True
        ):
            if raw.magic < MAGIC_V2:
                raise SourceFailedError(
                    f"{self.partition}: {raw.base_offset} is in the format of before Kafka 0.11: {OLD_FORMAT_ADVICE}"
                )
            aborted = batch.is_aborted and self.reader.isolation == "read_committed"
            if raw.base_offset < end and not raw.is_control and not aborted:
                yield raw
        self.next_offset = raws[-1].last_offset + 1

    def _fetch_with_retry(self, offset: int) -> tuple[Any, list[RawBatch]]:
        """An answer with at least one whole batch. Leaders move and networks break, so with
        patience.
        """
        until = time.monotonic() + self.reader.retry_seconds_max
        trouble = "it sends nothing"
        while time.monotonic() < until:
            try:
                answer = self._connect_leader().fetch(offset, FETCH_BYTES)
                if raws := list(parse_raw_batches(memoryview(answer.records or b""))):
                    return answer, raws
                self._refuse_log_end(answer, offset)
            except kafka_errors.OffsetOutOfRangeError:
                raise SourceFailedError(
                    f"{self.partition}: offset {offset} is not in the log"
                ) from None
            except (kafka_errors.KafkaError, OSError) as error:
                self._stack.close()
                self._leader = None
                trouble = f"{type(error).__name__} {error}".strip()
                if not isinstance(error, OSError) and not getattr(error, "retriable", False):
                    break
                time.sleep(RETRY_WAIT_SECONDS)
        servers = self.reader.settings["bootstrap.servers"]
        raise SourceFailedError(
            f"{self.partition}: Kafka at {servers} cannot be read from offset {offset} on: {trouble}"
        )

    def _refuse_log_end(self, answer: Any, offset: int) -> None:
        """Nothing more to come is not the same as nothing yet."""
        committed = self.reader.isolation == "read_committed"
        end = answer.last_stable_offset if committed else answer.high_watermark
        if 0 <= end <= offset:
            raise SourceFailedError(
                f"{self.partition}: the log ends at {end}, and offset {offset} was to be read"
            )

    def _connect_leader(self) -> PartitionLeader:
        if self._leader is None:
            settings = client.python_settings(self.reader.settings)
            manager = self._stack.enter_context(
                open_connections(settings, self.reader.retry_seconds_max)
            )
            self._leader = PartitionLeader(manager, self.partition, self.reader.isolation)
        return self._leader


def _batch_header(raw: RawBatch) -> KafkaRecordBatch:
    """What decides whether a batch was aborted."""
    return KafkaRecordBatch(
        raw.base_offset,
        raw.last_offset,
        is_control=raw.is_control,
        is_abort_marker=raw.is_abort,
        producer_id=raw.producer_id,
        is_transactional=raw.is_transactional,
    )


def _as_uint8_array(content: memoryview) -> Array:
    """Bytes for compiled code, which is compiled for bytes that nobody changes."""
    return np.frombuffer(content.toreadonly(), np.uint8)


def _damaged_batch_error(partition: Partition, raw: RawBatch, reason: str) -> SourceFailedError:
    return SourceFailedError(
        f"{partition}: the batch at offsets {raw.base_offset} to {raw.last_offset} is damaged: {reason}"
    )


class _BytesColumn:
    """Keys or values: bytes one after the other, where each ends, and -1 as the size of null."""

    def __init__(self, row_capacity: int, byte_capacity: int) -> None:
        self.sizes, self.edges = (
            np.empty(row_capacity, np.int32),
            np.zeros(row_capacity + 1, np.int32),
        )
        self.content = np.empty(byte_capacity, np.uint8)

    def set_value(self, row: int, value: bytes | None) -> None:
        """One more, in plain Python."""
        begin = int(self.edges[row])
        end = begin + len(value or b"")
        self.sizes[row], self.edges[row + 1] = -1 if value is None else len(value), end
        self.content[begin:end] = np.frombuffer(value or b"", np.uint8)

    def to_arrow(self, rows: int) -> pa.Array:
        """The first rows, as Arrow has them."""
        there = self.sizes[:rows] >= 0
        nulls = rows - int(np.count_nonzero(there))
        valid = pa.py_buffer(np.packbits(there, bitorder="little")) if nulls else None
        buffers = [valid, pa.py_buffer(self.edges[: rows + 1]), pa.py_buffer(self.content)]
        return pa.Array.from_buffers(pa.binary(), rows, buffers, nulls)


class _MessageColumns:
    """Room for messages, in columns."""

    def __init__(self, row_capacity: int, byte_capacity: int) -> None:
        self.row_capacity, self.byte_capacity = row_capacity, byte_capacity
        self.offsets, self.times = (
            np.empty(row_capacity, np.int64),
            np.empty(row_capacity, np.int64),
        )
        self.keys, self.values = (
            _BytesColumn(row_capacity, byte_capacity),
            _BytesColumn(row_capacity, byte_capacity),
        )
        self.header_positions = np.empty(row_capacity, np.int64)


class _BatchBuilder:
    """Messages of a range on their way into one batch."""

    def __init__(self, partition: Partition, offset_range: OffsetRange, *, headers: bool) -> None:
        self.partition, self.offset_range = partition, offset_range
        self.row_count = self.bytes_used = 0
        self.columns: _MessageColumns | None = None
        self.headers: list[list[Header]] | None = [] if headers else None
        self.checksum: Checksum
        self.unpack: Unpack
        self.checksum, self.unpack = (
            _compiled_functions()
            if len(offset_range) >= COMPILED_MIN
            else (calc_crc32c, _unpack_in_python)
        )

    def decompressed_records(self, raw: RawBatch) -> Array:
        """A batch's records, uncompressed; proved to be what the producer sent."""
        if self.checksum(raw.content[CHECKSUM_START:]) != raw.crc:
            raise _damaged_batch_error(self.partition, raw, "its checksum is wrong")
        try:
            content = _as_uint8_array(raw.decompressed_records())
        except (OSError, ValueError, KeyError) as error:
            raise _damaged_batch_error(self.partition, raw, str(error)) from None
        if raw.record_count * RECORD_BYTES_MIN > len(content):
            raise _damaged_batch_error(
                self.partition, raw, f"it cannot hold {raw.record_count} messages"
            )
        return content

    def has_capacity(self, rows: int, size: int) -> bool:
        """Whether there is room for so many messages and bytes; where there is none yet, it is made
        to measure.
        """
        if self.columns is None:
            self.columns = _MessageColumns(max(rows, ROWS_PER_BATCH), max(size, BATCH_BYTES))
        return (
            self.row_count + rows <= self.columns.row_capacity
            and self.bytes_used + size <= self.columns.byte_capacity
        )

    def add_batch(self, raw: RawBatch, content: Array) -> None:
        """A batch's messages, as far as they are in the range."""
        fits = self.has_capacity(raw.record_count, len(content))
        ensure(
            fits and self.columns is not None,
            "there is room",
            rows=raw.record_count,
            bytes=len(content),
        )
        assert self.columns is not None
        before, self.row_count = (
            self.row_count,
            self.unpack(raw, content, self.offset_range, self.row_count, self.columns),
        )
        if self.row_count < 0:
            raise _damaged_batch_error(self.partition, raw, "its records are none")
        self.bytes_used += len(content)
        if self.headers is not None:
            places = self.columns.header_positions[before : self.row_count].tolist()
            self.headers += [_read_headers(memoryview(content), at) for at in places]

    def take_batch(self) -> pa.RecordBatch:
        """What was gathered, as Spark's columns; the next begins empty."""
        columns, rows, headers = self.columns, self.row_count, self.headers
        ensure(
            columns is not None and rows > 0,
            "an empty batch is not handed on",
            partition=str(self.partition),
        )
        assert columns is not None
        self.columns, self.row_count, self.bytes_used, self.headers = (
            None,
            0,
            0,
            None if headers is None else [],
        )
        times = columns.times[:rows]
        if (np.abs(times) > MILLISECONDS_MAX).any():
            raise UnreadableMessageError(f"{self.partition}: a timestamp that no calendar has")
        given = {
            "topic": pa.repeat(self.partition.topic, rows),
            "partition": pa.repeat(pa.scalar(self.partition.number, pa.int32()), rows),
            "offset": pa.array(columns.offsets[:rows]),
            "timestamp": pa.array(times * 1000).view(TIMESTAMP_TYPE),
            "key": columns.keys.to_arrow(rows),
            "value": columns.values.to_arrow(rows),
        }
        if headers is not None:
            given["headers"] = pa.array(
                [[{"key": key, "value": value} for key, value in one] for one in headers],
                HEADERS_TYPE,
            )
        return pa.RecordBatch.from_pydict(given)


def _compiled_functions() -> tuple[Checksum, Unpack]:
    """Checking and unpacking in bulk."""
    from seriatim.fast.kafka_records import CRC_TABLES, crc32c, unpack_records

    place = np.zeros(1, np.int64)

    def checksum(content: memoryview) -> int:
        return int(crc32c(_as_uint8_array(content), 0, len(content), CRC_TABLES))

    def unpacked(
        raw: RawBatch, content: Array, whole: OffsetRange, row: int, to: _MessageColumns
    ) -> int:
        stamped = raw.append_time_ms
        numbers = (
            raw.record_count,
            raw.base_offset,
            raw.first_timestamp_ms,
            stamped or 0,
            stamped is not None,
            whole.start,
            whole.end,
        )
        columns = [
            part for one in (to.keys, to.values) for part in (one.sizes, one.edges, one.content)
        ]
        return int(
            unpack_records(
                content,
                np.array(numbers),
                row,
                place,
                to.offsets,
                to.times,
                to.header_positions,
                *columns,
            )
        )

    return checksum, unpacked


def _unpack_in_python(
    raw: RawBatch, content: Array, offset_range: OffsetRange, row: int, columns: _MessageColumns
) -> int:
    """Unpacking in Python: of a few messages it is done before the compiled code is loaded. -1:
    damaged.
    """
    try:
        return _unpack_records(raw, memoryview(content), offset_range, row, columns)
    except (IndexError, ValueError):
        return -1


def _unpack_records(
    raw: RawBatch, data: memoryview, offset_range: OffsetRange, row: int, columns: _MessageColumns
) -> int:
    at = 0
    for _ in range(raw.record_count):
        length, at = decode_varint(data, at)
        end = at + length
        delta_ms, at = decode_varint(data, at + 1)
        delta, at = decode_varint(data, at)
        if offset_range.start <= raw.base_offset + delta < offset_range.end:
            columns.offsets[row] = raw.base_offset + delta
            columns.times[row] = (
                raw.first_timestamp_ms + delta_ms
                if raw.append_time_ms is None
                else raw.append_time_ms
            )
            for column in (columns.keys, columns.values):
                value, at = _read_bytes(data, at)
                column.set_value(row, value)
            columns.header_positions[row] = at
            row += 1
        at = end
    return row


def _read_bytes(data: memoryview, position: int) -> tuple[bytes | None, int]:
    size, position = decode_varint(data, position)
    return (
        (None, position) if size < 0 else (bytes(data[position : position + size]), position + size)
    )


def _read_headers(data: memoryview, position: int) -> list[Header]:
    """A message's headers: pairs of a name and bytes."""
    count, position = decode_varint(data, position)
    found: list[Header] = []
    for _ in range(count):
        name, position = _read_bytes(data, position)
        value, position = _read_bytes(data, position)
        found.append(((name or b"").decode(errors="replace"), value))
    return found
