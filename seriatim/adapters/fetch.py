"""Ranges read where they are folded: raw record batches from the partition's leader, unpacked into Arrow in bulk.

The same messages that Spark's source gives, in the same columns, without a JVM between broker and fold: each
batch's checksum is proved, transaction markers and aborted records are passed over, holes stay holes and are
explained as ever. What cannot be read raises `SourceFailed`, and discovery decides what it means.

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

from seriatim import client
from seriatim.core.errors import ensure
from seriatim.core.holes import Batch, judged
from seriatim.core.message import Header
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.ports import SourceFailed, UnreadableMessage
from seriatim.wire import MAGIC, Leader, RawBatch, connected, raw_batches

FETCH_BYTES = 8 << 20
ROWS, BATCH_BYTES = 20_000, 64 << 20
"""A batch for the fold has about so many messages, and not many more bytes than this."""
PATIENCE_SECONDS = 60.0
WAIT_SECONDS = 0.25
OLD = 'say slice.read = "spark"'
COMPILED_MIN = 5_000
"""Messages from which on compiled unpacking is worth loading it, which takes half a second once per worker."""
RECORD_BYTES_MIN = 7
"""Of a message without key, value and headers: seven numbers."""
MILLISECONDS_MAX = (2**63 - 1) // 1000
CHECKED_FROM = DefaultRecordBatch.ATTRIBUTES_OFFSET
TIME = pa.timestamp("us", tz="UTC")
Array = Any
"""A numpy array."""
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

Checksum = Callable[[memoryview], int]
Unpack = Callable[[RawBatch, Array, OffsetRange, int, "_Columns"], int]
"""Appends a batch's messages that are in a range from a row on; the row after them, -1 if the batch is damaged."""


class KafkaRanges:
    """Ranges of partitions, as a consumer of this isolation sees them. Pickled to the workers."""

    def __init__(
        self,
        settings: Mapping[str, str],
        isolation: str = "read_committed",
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.settings, self.isolation, self.patience_seconds = dict(settings), isolation, patience_seconds

    def __call__(self, partition: Partition, whole: OffsetRange, headers: bool = False) -> Iterator[pa.RecordBatch]:
        """The messages of a range in order, as batches of Spark's columns."""
        gathered = _Gathered(partition, whole, headers=headers)
        with _Fetches(self, partition) as fetches:
            at = whole.start
            while at < whole.end:
                for raw in fetches.counting(at, whole.end):
                    content = gathered.content(raw)
                    if not gathered.fits(raw.count, len(content)):
                        yield gathered.taken()
                    gathered.add(raw, content)
                at = fetches.until
        if gathered.rows:
            yield gathered.taken()


class _Fetches:
    """One partition's log, fetched piece by piece from whoever leads it now."""

    def __init__(self, reader: KafkaRanges, partition: Partition) -> None:
        self.reader, self.partition = reader, partition
        self.until = 0
        """The offset after the last batch fetched."""
        self._stack = ExitStack()
        self._leader: Leader | None = None

    def __enter__(self) -> _Fetches:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def counting(self, at: int, end: int) -> Iterator[RawBatch]:
        """The batches of the next fetch whose records count, up to `end`."""
        answer, raws = self._some(at)
        listed = [(one.producer_id, one.first_offset) for one in answer.aborted_transactions or ()]
        for raw, batch in zip(raws, judged(map(_judged, raws), listed), strict=True):
            if raw.magic < MAGIC:
                raise SourceFailed(f"{self.partition}: {raw.base} is in the format of before Kafka 0.11: {OLD}")
            aborted = batch.aborted and self.reader.isolation == "read_committed"
            if raw.base < end and not raw.is_control and not aborted:
                yield raw
        self.until = raws[-1].last + 1

    def _some(self, at: int) -> tuple[Any, list[RawBatch]]:
        """An answer with at least one whole batch. Leaders move and networks break, so with patience."""
        until = time.monotonic() + self.reader.patience_seconds
        trouble = "it sends nothing"
        while time.monotonic() < until:
            try:
                answer = self._connected().fetch(at, FETCH_BYTES)
                if raws := list(raw_batches(memoryview(answer.records or b""))):
                    return answer, raws
                self._refuse_end(answer, at)
            except kafka_errors.OffsetOutOfRangeError:
                raise SourceFailed(f"{self.partition}: offset {at} is not in the log") from None
            except (kafka_errors.KafkaError, OSError) as error:
                self._stack.close()
                self._leader = None
                trouble = f"{type(error).__name__} {error}".strip()
                if not isinstance(error, OSError) and not getattr(error, "retriable", False):
                    break
                time.sleep(WAIT_SECONDS)
        servers = self.reader.settings["bootstrap.servers"]
        raise SourceFailed(f"{self.partition}: Kafka at {servers} cannot be read from offset {at} on: {trouble}")

    def _refuse_end(self, answer: Any, at: int) -> None:
        """Nothing more to come is not the same as nothing yet."""
        committed = self.reader.isolation == "read_committed"
        end = answer.last_stable_offset if committed else answer.high_watermark
        if 0 <= end <= at:
            raise SourceFailed(f"{self.partition}: the log ends at {end}, and offset {at} was to be read")

    def _connected(self) -> Leader:
        if self._leader is None:
            settings = client.for_python(self.reader.settings)
            manager = self._stack.enter_context(connected(settings, self.reader.patience_seconds))
            self._leader = Leader(manager, self.partition, self.reader.isolation)
        return self._leader


def _judged(raw: RawBatch) -> Batch:
    """What decides whether a batch was aborted."""
    return Batch(
        raw.base,
        raw.last,
        control=raw.is_control,
        abort=raw.is_abort,
        producer=raw.producer,
        transactional=raw.is_transactional,
    )


def _array(content: memoryview) -> Array:
    """Bytes for compiled code, which is compiled for bytes that nobody changes."""
    return np.frombuffer(content.toreadonly(), np.uint8)


def _damaged(partition: Partition, raw: RawBatch, what: str) -> SourceFailed:
    return SourceFailed(f"{partition}: the batch at offsets {raw.base} to {raw.last} is damaged: {what}")


class _Column:
    """Keys or values: bytes one after the other, where each ends, and -1 as the size of null."""

    def __init__(self, rows: int, room: int) -> None:
        self.sizes, self.edges = np.empty(rows, np.int32), np.zeros(rows + 1, np.int32)
        self.content = np.empty(room, np.uint8)

    def put(self, row: int, value: bytes | None) -> None:
        """One more, in plain Python."""
        begin = int(self.edges[row])
        end = begin + len(value or b"")
        self.sizes[row], self.edges[row + 1] = -1 if value is None else len(value), end
        self.content[begin:end] = np.frombuffer(value or b"", np.uint8)

    def array(self, rows: int) -> pa.Array:
        """The first rows, as Arrow has them."""
        there = self.sizes[:rows] >= 0
        nulls = rows - int(np.count_nonzero(there))
        valid = pa.py_buffer(np.packbits(there, bitorder="little")) if nulls else None
        buffers = [valid, pa.py_buffer(self.edges[: rows + 1]), pa.py_buffer(self.content)]
        return pa.Array.from_buffers(pa.binary(), rows, buffers, nulls)


class _Columns:
    """Room for messages, in columns."""

    def __init__(self, rows: int, room: int) -> None:
        self.capacity, self.room = rows, room
        self.offsets, self.times = np.empty(rows, np.int64), np.empty(rows, np.int64)
        self.keys, self.values = _Column(rows, room), _Column(rows, room)
        self.header_at = np.empty(rows, np.int64)


class _Gathered:
    """Messages of a range on their way into one batch."""

    def __init__(self, partition: Partition, whole: OffsetRange, *, headers: bool) -> None:
        self.partition, self.whole = partition, whole
        self.rows = self.used = 0
        self.columns: _Columns | None = None
        self.headers: list[list[Header]] | None = [] if headers else None
        self.checksum: Checksum
        self.unpack: Unpack
        self.checksum, self.unpack = _compiled() if len(whole) >= COMPILED_MIN else (calc_crc32c, _plain)

    def content(self, raw: RawBatch) -> Array:
        """A batch's records, uncompressed; proved to be what the producer sent."""
        if self.checksum(raw.whole[CHECKED_FROM:]) != raw.crc:
            raise _damaged(self.partition, raw, "its checksum is wrong")
        try:
            content = _array(raw.records())
        except (OSError, ValueError, KeyError) as error:
            raise _damaged(self.partition, raw, str(error)) from None
        if raw.count * RECORD_BYTES_MIN > len(content):
            raise _damaged(self.partition, raw, f"it cannot hold {raw.count} messages")
        return content

    def fits(self, rows: int, size: int) -> bool:
        """Whether there is room for so many messages and bytes; where there is none yet, it is made to measure."""
        if self.columns is None:
            self.columns = _Columns(max(rows, ROWS), max(size, BATCH_BYTES))
        return self.rows + rows <= self.columns.capacity and self.used + size <= self.columns.room

    def add(self, raw: RawBatch, content: Array) -> None:
        """A batch's messages, as far as they are in the range."""
        fits = self.fits(raw.count, len(content))
        ensure(fits and self.columns is not None, "there is room", rows=raw.count, bytes=len(content))
        assert self.columns is not None
        before, self.rows = self.rows, self.unpack(raw, content, self.whole, self.rows, self.columns)
        if self.rows < 0:
            raise _damaged(self.partition, raw, "its records are none")
        self.used += len(content)
        if self.headers is not None:
            places = self.columns.header_at[before : self.rows].tolist()
            self.headers += [_headers(memoryview(content), at) for at in places]

    def taken(self) -> pa.RecordBatch:
        """What was gathered, as Spark's columns; the next begins empty."""
        columns, rows, headers = self.columns, self.rows, self.headers
        ensure(columns is not None and rows > 0, "an empty batch is not handed on", partition=str(self.partition))
        assert columns is not None
        self.columns, self.rows, self.used, self.headers = None, 0, 0, None if headers is None else []
        times = columns.times[:rows]
        if (np.abs(times) > MILLISECONDS_MAX).any():
            raise UnreadableMessage(f"{self.partition}: a timestamp that no calendar has")
        given = {
            "topic": pa.repeat(self.partition.topic, rows),
            "partition": pa.repeat(pa.scalar(self.partition.number, pa.int32()), rows),
            "offset": pa.array(columns.offsets[:rows]),
            "timestamp": pa.array(times * 1000).view(TIME),
            "key": columns.keys.array(rows),
            "value": columns.values.array(rows),
        }
        if headers is not None:
            given["headers"] = pa.array(
                [[{"key": key, "value": value} for key, value in one] for one in headers], HEADERS
            )
        return pa.RecordBatch.from_pydict(given)


def _compiled() -> tuple[Checksum, Unpack]:
    """Checking and unpacking in bulk."""
    from seriatim.bulk.records import TABLES, crc32c, unpack

    place = np.zeros(1, np.int64)

    def checksum(content: memoryview) -> int:
        return int(crc32c(_array(content), 0, len(content), TABLES))

    def unpacked(raw: RawBatch, content: Array, whole: OffsetRange, row: int, to: _Columns) -> int:
        stamped = raw.stamped_ms
        numbers = (raw.count, raw.base, raw.first_ms, stamped or 0, stamped is not None, whole.start, whole.end)
        columns = [part for one in (to.keys, to.values) for part in (one.sizes, one.edges, one.content)]
        return int(unpack(content, np.array(numbers), row, place, to.offsets, to.times, to.header_at, *columns))

    return checksum, unpacked


def _plain(raw: RawBatch, content: Array, whole: OffsetRange, row: int, to: _Columns) -> int:
    """Unpacking in Python: of a few messages it is done before the compiled code is loaded. -1: damaged."""
    try:
        return _records(raw, memoryview(content), whole, row, to)
    except (IndexError, ValueError):
        return -1


def _records(raw: RawBatch, data: memoryview, whole: OffsetRange, row: int, to: _Columns) -> int:
    at = 0
    for _ in range(raw.count):
        length, at = decode_varint(data, at)
        end = at + length
        delta_ms, at = decode_varint(data, at + 1)
        delta, at = decode_varint(data, at)
        if whole.start <= raw.base + delta < whole.end:
            to.offsets[row] = raw.base + delta
            to.times[row] = raw.first_ms + delta_ms if raw.stamped_ms is None else raw.stamped_ms
            for column in (to.keys, to.values):
                value, at = _bytes(data, at)
                column.put(row, value)
            to.header_at[row] = at
            row += 1
        at = end
    return row


def _bytes(data: memoryview, at: int) -> tuple[bytes | None, int]:
    size, at = decode_varint(data, at)
    return (None, at) if size < 0 else (bytes(data[at : at + size]), at + size)


def _headers(data: memoryview, at: int) -> list[Header]:
    """A message's headers: pairs of a name and bytes."""
    count, at = decode_varint(data, at)
    found: list[Header] = []
    for _ in range(count):
        name, at = _bytes(data, at)
        value, at = _bytes(data, at)
        found.append(((name or b"").decode(errors="replace"), value))
    return found
