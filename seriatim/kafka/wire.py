"""Kafka's wire: connections, raw fetches and the headers of record batches, through kafka-python's
protocol.

It lives where the fold lives, in a Spark worker: plain settings go in, connections are driven by
the calling thread, and there is no other. Shared by two adapters, as disk.py is.

Next room: kafka/raw_batches.py explains holes with it; kafka/task_reader.py reads ranges.
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

from seriatim.engine.offsets import Partition

EARLIEST, LATEST = -2, -1
BATCH_HEADER = DefaultRecordBatch.HEADER_STRUCT
LENGTH_END = DefaultRecordBatch.AFTER_LEN_OFFSET
ABORT_KEY = b"\x00\x00\x00\x00"
"""A control record's key begins with its version and its type, two bytes each; type 0 is an abort."""
CODECS = {1: "gzip", 3: "lz4", 4: "zstd"}
SNAPPY, SNAPPY_FRAMED, SNAPPY_FRAME_HEADER = 2, b"\x82SNAPPY\x00", 16
FETCH_WAIT_MS = 500
MAGIC_V2 = 2
"""Record batches as Kafka 0.11 and later write them."""


class RawBatch(Struct, frozen=True):
    """One record batch as it lies in the log: its header's fields, and where its bytes are."""

    content: memoryview
    """All of it, header included."""
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
        """Whether its marker, never compressed, ends an aborted transaction."""
        if not self.is_control or not self.record_count:
            return False
        body = self.content[BATCH_HEADER.size :]
        _, at = decode_varint(body, 0)
        _, at = decode_varint(body, at + 1)
        _, at = decode_varint(body, at)
        _, at = decode_varint(body, at)
        return bytes(body[at : at + len(ABORT_KEY)]) == ABORT_KEY

    @property
    def append_time_ms(self) -> int | None:
        """The time of all its records, where the broker gave it; None: each has its own."""
        return (
            self.max_timestamp_ms
            if self.attributes & DefaultRecordBatch.TIMESTAMP_TYPE_MASK
            else None
        )

    def decompressed_records(self) -> memoryview:
        """Its records, uncompressed."""
        return decompress(
            self.content[BATCH_HEADER.size :], self.attributes & DefaultRecordBatch.CODEC_MASK
        )


@contextmanager
def open_connections(
    settings: Mapping[str, Any], timeout_seconds: float
) -> Iterator[KafkaConnectionManager]:
    """Connections to the cluster, driven by this thread alone. Settings as `client.python_settings`
    gives them.
    """
    logging.getLogger("kafka").setLevel(logging.CRITICAL)  # what matters comes back as an error
    net = NetworkSelector()
    manager = KafkaConnectionManager(net, **settings, receive_message_max_bytes=2**31 - 1)
    try:
        manager.bootstrap(timeout_seconds * 1000)
        yield manager
    finally:
        manager.close()
        net.close()


class PartitionLeader:
    """The broker that has a partition, asked about it."""

    def __init__(
        self, manager: KafkaConnectionManager, partition: Partition, isolation: str
    ) -> None:
        self.manager, self.partition = manager, partition
        self.isolation_level = int(isolation == "read_committed")
        self.broker_id = self._find_broker_id()

    def send_request(self, request: Any) -> Any:
        """Its answer."""
        return self.manager.run(self.manager.send, request, self.broker_id)

    def _find_broker_id(self) -> int:
        wanted = MetadataRequest.MetadataRequestTopic(name=self.partition.topic)
        request = MetadataRequest(topics=[wanted], allow_auto_topic_creation=False, max_version=9)
        (topic,) = self.manager.run(self.manager.send, request).topics
        raise_for_code(topic.error_code)
        for part in topic.partitions:
            if part.partition_index == self.partition.number:
                raise_for_code(part.error_code)
                return int(part.leader_id)
        raise kafka_errors.UnknownTopicOrPartitionError(str(self.partition))

    def list_offset(self, timestamp: int) -> int:
        """The earliest offset, or the end that readers of this isolation get to."""
        topic = ListOffsetsRequest.ListOffsetsTopic
        part = topic.ListOffsetsPartition(
            partition_index=self.partition.number, timestamp=timestamp
        )
        request = ListOffsetsRequest(
            replica_id=-1,
            isolation_level=self.isolation_level,
            topics=[topic(name=self.partition.topic, partitions=[part])],
            min_version=2,
            max_version=6,
        )
        answer = self.send_request(request).topics[0].partitions[0]
        raise_for_code(answer.error_code)
        return int(answer.offset)

    def fetch(self, offset: int, bytes_max: int) -> Any:
        """Raw bytes from an offset on. Isolation makes Kafka name the aborted transactions beside
        them.
        """
        topic = FetchRequest.FetchTopic
        part = topic.FetchPartition(
            partition=self.partition.number, fetch_offset=offset, partition_max_bytes=bytes_max
        )
        request = FetchRequest(
            max_wait_ms=FETCH_WAIT_MS,
            min_bytes=1,
            max_bytes=bytes_max,
            isolation_level=self.isolation_level,
            topics=[topic(topic=self.partition.topic, partitions=[part])],
            min_version=5,
            max_version=12,  # the last that takes topics by name
        )
        answer = self.send_request(request)
        raise_for_code(answer.error_code)
        if not answer.responses:  # a throttled client is sent away with nothing
            raise kafka_errors.ThrottlingQuotaExceededError
        found = answer.responses[0].partitions[0]
        raise_for_code(found.error_code)
        return found


def raise_for_code(code: int) -> None:
    """Raise what an answer's code means, unless it is 0."""
    if code:
        raise kafka_errors.for_code(code)


def parse_raw_batches(content: memoryview) -> Iterator[RawBatch]:
    """A fetch's batches; the last one may be cut off, and does not count then. Older ones have no
    span of their own.
    """
    at = 0
    while len(content) - at >= BATCH_HEADER.size:
        (
            base,
            length,
            _,
            magic,
            crc,
            attributes,
            delta,
            first_ms,
            newest_ms,
            producer,
            _,
            _,
            count,
        ) = BATCH_HEADER.unpack_from(content, at)
        end = at + LENGTH_END + length
        if end > len(content):
            return
        last = base + delta if magic >= MAGIC_V2 else base
        yield RawBatch(
            content[at:end],
            base,
            last,
            magic,
            crc,
            attributes,
            count,
            first_ms,
            newest_ms,
            producer,
        )
        at = end


def decompress(body: memoryview, codec: int) -> memoryview:
    """Records uncompressed, by Arrow: it has every codec of Kafka's wherever we run."""
    if codec == 0:
        return body
    if codec == SNAPPY:
        return memoryview(b"".join(_snappy_blocks(bytes(body))))
    with pa.CompressedInputStream(pa.py_buffer(body), CODECS[codec]) as stream:
        return memoryview(stream.read())


def _snappy_blocks(body: bytes) -> Iterator[bytes]:
    """Java's producers write snappy as a chain of blocks, the others as one."""
    if not body.startswith(SNAPPY_FRAMED):
        yield _snappy(body)
        return
    at = SNAPPY_FRAME_HEADER
    while at < len(body):
        length = int.from_bytes(body[at : at + 4], "big")
        yield _snappy(body[at + 4 : at + 4 + length])
        at += 4 + length


def _snappy(block: bytes) -> bytes:
    """A block begins with its size once uncompressed, seven bits a byte."""
    size = shift = 0
    for byte in block:
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return bytes(pa.Codec("snappy").decompress(block, size))
