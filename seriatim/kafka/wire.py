"""Kafka's wire protocol: connections, raw fetches and the headers of record batches, through
kafka-python.

This runs inside Spark workers, as the fold does: it takes plain settings, and the calling thread
drives the connections; there is no other thread.

Next: kafka/raw_batches.py explains holes with it; kafka/task_reader.py reads ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import kafka.errors as kafka_errors
import pyarrow as pa
from kafka.net import KafkaConnectionManager, NetworkSelector
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest
from kafka.protocol.metadata import MetadataRequest
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.util import decode_varint
from msgspec import Struct

from seriatim.engine.holes import KafkaRecordBatch
from seriatim.engine.offsets import Partition

EARLIEST = -2
LATEST = -1
"""Kafka's special timestamps that ask for the start and the end of a log."""
BATCH_HEADER = DefaultRecordBatch.HEADER_STRUCT
LENGTH_END = DefaultRecordBatch.AFTER_LEN_OFFSET
ABORT_KEY = b"\x00\x00\x00\x00"
"""A control record's key begins with its version and its type, two bytes each; type 0 is an abort."""
CODECS = {1: "gzip", 3: "lz4", 4: "zstd"}
"""Arrow's names of Kafka's compression codecs, except snappy."""
SNAPPY = 2
SNAPPY_FRAMED = b"\x82SNAPPY\x00"
SNAPPY_FRAME_HEADER = 16
"""Java's snappy format: its first bytes, and the length of its header."""
FETCH_WAIT_MS = 500
MAGIC_V2 = 2
"""The format version of record batches since Kafka 0.11."""


class RawBatch(Struct, frozen=True):
    """One record batch as it is stored in the log: the fields of its header, and its bytes."""

    content: memoryview
    """All bytes of the batch, header included."""
    base_offset: int
    last_offset: int
    magic: int
    crc: int
    attributes: int
    record_count: int
    first_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int

    @property
    def is_control(self) -> bool:
        """Whether it holds a transaction marker."""
        return self.magic >= MAGIC_V2 and bool(self.attributes & DefaultRecordBatch.CONTROL_MASK)

    @property
    def is_transactional(self) -> bool:
        """Whether a transaction wrote it."""
        return self.magic >= MAGIC_V2 and bool(
            self.attributes & DefaultRecordBatch.TRANSACTIONAL_MASK
        )

    @property
    def is_abort(self) -> bool:
        """Whether it is the marker that ends an aborted transaction. Markers are never compressed."""
        if not self.is_control or not self.record_count:
            return False
        body = self.content[BATCH_HEADER.size :]
        # Before the key of a record: its length, one byte of attributes, and three more numbers.
        _, position = decode_varint(body, 0)
        _, position = decode_varint(body, position + 1)
        _, position = decode_varint(body, position)
        _, position = decode_varint(body, position)
        return bytes(body[position : position + len(ABORT_KEY)]) == ABORT_KEY

    @property
    def append_time_ms(self) -> int | None:
        """The time that the broker gave to all its records; None: each record has its own."""
        if self.attributes & DefaultRecordBatch.TIMESTAMP_TYPE_MASK:
            return self.max_timestamp_ms
        return None

    def header(self, record_offsets: tuple[int, ...] | None = None) -> KafkaRecordBatch:
        """What its header says. `record_offsets` are the offsets that still have a record; None: all
        of them.
        """
        return KafkaRecordBatch(
            self.base_offset,
            self.last_offset,
            is_control=self.is_control,
            is_abort_marker=self.is_abort,
            producer_id=self.producer_id,
            is_transactional=self.is_transactional,
            record_offsets=record_offsets,
        )

    def decompressed_records(self) -> memoryview:
        """The bytes of its records, uncompressed."""
        codec = self.attributes & DefaultRecordBatch.CODEC_MASK
        return decompress(self.content[BATCH_HEADER.size :], codec)


class Fetched(Struct, frozen=True):
    """What one fetch gave."""

    raw_batches: list[RawBatch]
    size_bytes: int
    aborted_transactions: list[tuple[int, int]]
    """Producer and first offset of each aborted transaction that reaches into the fetch. Kafka names
    them with read_committed only.
    """
    log_end: int
    """The end of the log for readers of this isolation."""


@contextmanager
def open_connections(
    settings: Mapping[str, Any], timeout_seconds: float
) -> Iterator[KafkaConnectionManager]:
    """Connections to the cluster, driven by this thread alone. `settings` come from
    `client.python_settings`.
    """
    # Everything important comes back as an error.
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    net = NetworkSelector()
    manager = KafkaConnectionManager(net, **settings, receive_message_max_bytes=2**31 - 1)
    try:
        manager.bootstrap(timeout_seconds * 1000)
        yield manager
    finally:
        manager.close()
        net.close()


class PartitionLeader:
    """The broker that leads a partition, and the requests that we send to it."""

    def __init__(
        self, manager: KafkaConnectionManager, partition: Partition, isolation: str
    ) -> None:
        self.manager = manager
        self.partition = partition
        self.isolation_level = int(isolation == "read_committed")
        self.broker_id = self._find_broker_id()

    def send_request(self, request: Any) -> Any:
        """Send a request to the leader; its answer."""
        return self.manager.run(self.manager.send, request, self.broker_id)

    def _find_broker_id(self) -> int:
        topic_request = MetadataRequest.MetadataRequestTopic(name=self.partition.topic)
        request = MetadataRequest(
            topics=[topic_request], allow_auto_topic_creation=False, max_version=9
        )
        (topic,) = self.manager.run(self.manager.send, request).topics
        raise_for_code(topic.error_code)
        for partition in topic.partitions:
            if partition.partition_index == self.partition.number:
                raise_for_code(partition.error_code)
                return int(partition.leader_id)
        raise kafka_errors.UnknownTopicOrPartitionError(str(self.partition))

    def list_offset(self, timestamp: int) -> int:
        """The first offset of the log (`EARLIEST`), or the end that readers of this isolation
        reach (`LATEST`).
        """
        topic = ListOffsetsRequest.ListOffsetsTopic
        partition = topic.ListOffsetsPartition(
            partition_index=self.partition.number, timestamp=timestamp
        )
        request = ListOffsetsRequest(
            replica_id=-1,
            isolation_level=self.isolation_level,
            topics=[topic(name=self.partition.topic, partitions=[partition])],
            min_version=2,
            max_version=6,
        )
        answer = self.send_request(request).topics[0].partitions[0]
        raise_for_code(answer.error_code)
        return int(answer.offset)

    def fetch(self, offset: int, bytes_max: int) -> Fetched:
        """The batches from an offset on."""
        topic = FetchRequest.FetchTopic
        partition = topic.FetchPartition(
            partition=self.partition.number, fetch_offset=offset, partition_max_bytes=bytes_max
        )
        request = FetchRequest(
            max_wait_ms=FETCH_WAIT_MS,
            min_bytes=1,
            max_bytes=bytes_max,
            isolation_level=self.isolation_level,
            topics=[topic(topic=self.partition.topic, partitions=[partition])],
            min_version=5,
            max_version=12,  # later versions take topics by id only
        )
        answer = self.send_request(request)
        raise_for_code(answer.error_code)
        if not answer.responses:  # a throttled client gets an empty answer
            raise kafka_errors.ThrottlingQuotaExceededError
        partition_answer = answer.responses[0].partitions[0]
        raise_for_code(partition_answer.error_code)
        content = partition_answer.records or b""
        aborted_transactions = [
            (transaction.producer_id, transaction.first_offset)
            for transaction in partition_answer.aborted_transactions or ()
        ]
        log_end = partition_answer.high_watermark
        if self.isolation_level:
            log_end = partition_answer.last_stable_offset
        raw_batches = list(parse_raw_batches(memoryview(content)))
        return Fetched(raw_batches, len(content), aborted_transactions, log_end)


def raise_for_code(code: int) -> None:
    """Raise the error that an answer's code stands for, unless it is 0."""
    if code:
        raise kafka_errors.for_code(code)


def parse_raw_batches(content: memoryview) -> Iterator[RawBatch]:
    """The batches of a fetch. Kafka may cut off the last one; it is left out then.

    Batches in the format of before Kafka 0.11 do not say which offset is their last.
    """
    position = 0
    while len(content) - position >= BATCH_HEADER.size:
        (
            base_offset,
            length,
            _,
            magic,
            crc,
            attributes,
            last_offset_delta,
            first_timestamp_ms,
            max_timestamp_ms,
            producer_id,
            _,
            _,
            record_count,
        ) = BATCH_HEADER.unpack_from(content, position)
        end = position + LENGTH_END + length
        if end > len(content):
            return
        yield RawBatch(
            content[position:end],
            base_offset,
            base_offset + last_offset_delta if magic >= MAGIC_V2 else base_offset,
            magic,
            crc,
            attributes,
            record_count,
            first_timestamp_ms,
            max_timestamp_ms,
            producer_id,
        )
        position = end


def decompress(body: memoryview, codec: int) -> memoryview:
    """Uncompress records with Arrow, which has all codecs of Kafka wherever we run."""
    if codec == 0:
        return body
    if codec == SNAPPY:
        return memoryview(b"".join(_snappy_blocks(bytes(body))))
    with pa.CompressedInputStream(pa.py_buffer(body), CODECS[codec]) as stream:
        return memoryview(stream.read())


def _snappy_blocks(body: bytes) -> Iterator[bytes]:
    """The uncompressed blocks. Java's producers write snappy as a chain of blocks, others as one."""
    if not body.startswith(SNAPPY_FRAMED):
        yield _snappy(body)
        return
    position = SNAPPY_FRAME_HEADER
    while position < len(body):
        block_start = position + 4
        block_end = block_start + int.from_bytes(body[position:block_start], "big")
        yield _snappy(body[block_start:block_end])
        position = block_end


def _snappy(block: bytes) -> bytes:
    """Uncompress one block. It begins with its uncompressed size, seven bits per byte, lowest
    first, which Arrow needs to be told.
    """
    size = 0
    shift = 0
    for byte in block:
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return bytes(pa.Codec("snappy").decompress(block, size))
