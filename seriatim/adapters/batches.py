"""Raw record batches: what the log itself says about offsets that no reader gets to see. Implements `Explain`.

Kafka has no request for headers alone, so a hole is explained by fetching its region once more, as bytes, of
which only the batch headers are looked at. A transactional topic has a hole every few messages: each look goes
further ahead than the one before, and what it saw is kept, so that many holes cost few fetches.

It lives where the fold lives, in a Spark worker: plain settings go in, connections are opened for one look and
closed after it, and there is no thread.

Next room: core/holes.py decides what the batches mean.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import kafka.errors as kafka_errors
import pyarrow as pa
from kafka.net import KafkaConnectionManager, NetworkSelector
from kafka.protocol.admin import DescribeConfigsRequest
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest
from kafka.protocol.metadata import MetadataRequest
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.memory_records import MemoryRecords
from kafka.record.util import decode_varint

from seriatim import client
from seriatim.core.errors import PlatformError
from seriatim.core.holes import FINDINGS, Batch, LogView, Piece, explain, judged
from seriatim.core.offsets import OffsetRange, Partition

FETCH_BYTES = 4 << 20
AHEAD_BYTES = 1 << 20
AHEAD_BYTES_MAX = 32 << 20
"""How far a look goes beyond its hole: a lone hole is cheap, and many cost a fetch per 32 MiB of log."""
PATIENCE_SECONDS = 20.0
WAIT_SECONDS = 0.25
EARLIEST, LATEST = -2, -1
TOPIC = 2
HEADER = DefaultRecordBatch.HEADER_STRUCT
LENGTH_END = DefaultRecordBatch.AFTER_LEN_OFFSET
ABORT = b"\x00\x00\x00\x00"
"""A control record's key begins with its version and its type, two bytes each; type 0 is an abort."""
CODECS = {1: "gzip", 3: "lz4", 4: "zstd"}
SNAPPY, SNAPPY_FRAMED, SNAPPY_FRAME_HEADER = 2, b"\x82SNAPPY\x00", 16


class KafkaBatches:
    """Explains holes from the log's own batches."""

    def __init__(
        self,
        settings: Mapping[str, str],
        isolation: str = "read_committed",
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.servers, self.isolation = settings["bootstrap.servers"], isolation
        self.patience_seconds = patience_seconds
        self._settings = client.for_python(settings)
        self._ahead = AHEAD_BYTES
        self._seen: tuple[Partition, LogView] | None = None
        self.looks = 0
        """How often the log was looked at: far fewer times than there are holes."""

    def __call__(self, partition: Partition, hole: OffsetRange) -> list[Piece]:
        """Every offset of the hole with its cause."""
        if self._seen is not None and self._seen[0] == partition:
            view = self._seen[1]
            if view.start <= hole.start and hole.end <= view.end:
                pieces = explain(hole, view, self.isolation)
                # What was there when we looked may have been compacted before the reader came by.
                if not (view.compacted and any(cause in FINDINGS for _, cause in pieces)):
                    return pieces
        view = self._look(partition, hole)
        self._seen = partition, view
        self._ahead = min(self._ahead * 4, AHEAD_BYTES_MAX)
        return explain(hole, view, self.isolation)

    def _look(self, partition: Partition, hole: OffsetRange) -> LogView:
        """The log from the hole on; leaders move, so a few times."""
        self.looks += 1
        until = time.monotonic() + self.patience_seconds
        while True:
            try:
                with _connected(self._settings, self.patience_seconds) as manager:
                    return _Look(manager, partition, self.isolation).view(hole, self._ahead)
            except (kafka_errors.KafkaError, OSError) as error:
                if time.monotonic() > until or not _may_pass(error):
                    raise self._unreachable(partition, error) from None
            time.sleep(WAIT_SECONDS)

    def _unreachable(self, partition: Partition, error: Exception) -> PlatformError:
        told = str(error).splitlines()[0] if str(error) else ""
        return PlatformError(
            f"{partition}: offsets are missing, and Kafka at {self.servers} cannot be asked why: "
            f"{type(error).__name__} {told}".rstrip(),
            next="check the broker and that this user may read the topic, then run again: nothing is lost",
        )


def _may_pass(error: Exception) -> bool:
    """Whether another try may help. Messages can expire between two requests."""
    return isinstance(error, OSError | kafka_errors.OffsetOutOfRangeError) or bool(getattr(error, "retriable", False))


@contextmanager
def _connected(settings: Mapping[str, Any], patience_seconds: float) -> Iterator[KafkaConnectionManager]:
    """Connections to the cluster, driven by this thread alone."""
    logging.getLogger("kafka").setLevel(logging.CRITICAL)  # what matters comes back as an error
    net = NetworkSelector()
    manager = KafkaConnectionManager(net, **settings, receive_message_max_bytes=2**31 - 1)
    try:
        manager.bootstrap(patience_seconds * 1000)
        yield manager
    finally:
        manager.close()
        net.close()


class _Look:
    """One look at one partition's log."""

    def __init__(self, manager: KafkaConnectionManager, partition: Partition, isolation: str) -> None:
        self.manager, self.partition = manager, partition
        self.isolation = int(isolation == "read_committed")
        self.leader = self._leader()

    def view(self, hole: OffsetRange, ahead_bytes: int) -> LogView:
        """Every batch from the hole on, to its end and then `ahead_bytes` further."""
        log_start, stable = self._bound(EARLIEST), self._bound(LATEST)
        batches: list[Batch] = []
        start = at = max(hole.start, log_start)
        read = 0
        while at < stable and (at < hole.end or read < ahead_bytes):
            answer = self._fetch(at)
            found = _batches(memoryview(answer.records or b""))
            listed = [(one.producer_id, one.first_offset) for one in answer.aborted_transactions or ()]
            batches += judged(found, listed)
            read += len(answer.records or b"")
            at = found[-1].last + 1 if found else stable
        compacted = self._is_compacted(batches, start, at)
        return LogView(start, min(at, stable), log_start, stable, compacted, tuple(batches))

    def _asked(self, request: Any) -> Any:
        return self.manager.run(self.manager.send, request, self.leader)

    def _leader(self) -> int:
        wanted = MetadataRequest.MetadataRequestTopic(name=self.partition.topic)
        request = MetadataRequest(topics=[wanted], allow_auto_topic_creation=False, max_version=9)
        (topic,) = self.manager.run(self.manager.send, request).topics
        _refuse(topic.error_code)
        for part in topic.partitions:
            if part.partition_index == self.partition.number:
                _refuse(part.error_code)
                return int(part.leader_id)
        raise kafka_errors.UnknownTopicOrPartitionError(str(self.partition))

    def _bound(self, which: int) -> int:
        topic = ListOffsetsRequest.ListOffsetsTopic
        part = topic.ListOffsetsPartition(partition_index=self.partition.number, timestamp=which)
        request = ListOffsetsRequest(
            replica_id=-1,
            isolation_level=self.isolation,
            topics=[topic(name=self.partition.topic, partitions=[part])],
            min_version=2,
            max_version=6,
        )
        answer = self._asked(request).topics[0].partitions[0]
        _refuse(answer.error_code)
        return int(answer.offset)

    def _fetch(self, offset: int) -> Any:
        """Raw bytes from an offset on. Isolation makes Kafka name the aborted transactions beside them."""
        topic = FetchRequest.FetchTopic
        part = topic.FetchPartition(
            partition=self.partition.number, fetch_offset=offset, partition_max_bytes=FETCH_BYTES
        )
        request = FetchRequest(
            max_wait_ms=500,
            min_bytes=1,
            max_bytes=FETCH_BYTES,
            isolation_level=self.isolation,
            topics=[topic(topic=self.partition.topic, partitions=[part])],
            min_version=5,
            max_version=12,  # the last that takes topics by name
        )
        answer = self._asked(request)
        _refuse(answer.error_code)
        if not answer.responses:  # a throttled client is sent away with nothing
            raise kafka_errors.ThrottlingQuotaExceededError
        found = answer.responses[0].partitions[0]
        _refuse(found.error_code)
        return found

    def _is_compacted(self, batches: list[Batch], start: int, end: int) -> bool:
        """Whether the topic is compacted. Asking may be forbidden, which matters only where something is absent."""
        resource = DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=TOPIC, resource_name=self.partition.topic, configuration_keys=["cleanup.policy"]
        )
        answer = self._asked(DescribeConfigsRequest(resources=[resource])).results[0]
        if _forbidden(answer.error_code):
            if not _has_absences(batches, start, end):
                return False
            raise PlatformError(
                f"{self.partition}: offsets are not in the log, and this user may not ask whether it is compacted",
                next=f"allow DescribeConfigs on topic {self.partition.topic}, then run again: nothing is lost",
            )
        _refuse(answer.error_code)
        return any("compact" in (setting.value or "") for setting in answer.configs)


def _refuse(code: int) -> None:
    if code:
        raise kafka_errors.for_code(code)


def _forbidden(code: int) -> bool:
    error = kafka_errors.for_code(code)
    return error in (kafka_errors.TopicAuthorizationFailedError, kafka_errors.ClusterAuthorizationFailedError)


def _has_absences(batches: list[Batch], start: int, end: int) -> bool:
    """Whether the log lacks offsets between two batches, within one, or before and after all."""
    if not batches:
        return start < end
    apart = any(a.last + 1 != b.base for a, b in pairwise(batches))
    inside = any(batch.records is not None and not batch.control for batch in batches)
    return apart or inside or batches[0].base > start or batches[-1].last + 1 < end


def _batches(content: memoryview) -> list[Batch]:
    """The headers of a fetch's batches; the last one may be cut off, and does not count then."""
    found, at = [], 0
    while len(content) - at >= HEADER.size:
        base, length, _, magic, _, attributes, delta, _, _, producer, _, _, count = HEADER.unpack_from(content, at)
        end = at + LENGTH_END + length
        if end > len(content):
            break
        if magic < 2:
            found += _old_batch(content[at:end])
        else:
            control = bool(attributes & DefaultRecordBatch.CONTROL_MASK)
            body = content[at + HEADER.size : end]
            whole = control or count == delta + 1
            found.append(
                Batch(
                    base,
                    base + delta,
                    control=control,
                    abort=control and count > 0 and _is_abort(body),
                    producer=producer,
                    transactional=bool(attributes & DefaultRecordBatch.TRANSACTIONAL_MASK),
                    records=None if whole else _offsets(body, attributes, base, count),
                )
            )
        at = end
    return found


def _old_batch(content: memoryview) -> list[Batch]:
    """A message set from before Kafka 0.11: it has no span of its own, only its records."""
    offsets = tuple(record.offset for batch in MemoryRecords(content) for record in batch)
    return [Batch(offsets[0], offsets[-1], records=offsets)] if offsets else []


def _is_abort(body: memoryview) -> bool:
    """Whether a control record, never compressed, ends an aborted transaction."""
    _, at = decode_varint(body, 0)
    _, at = decode_varint(body, at + 1)
    _, at = decode_varint(body, at)
    _, at = decode_varint(body, at)
    return bytes(body[at : at + len(ABORT)]) == ABORT


def _offsets(body: memoryview, attributes: int, base: int, count: int) -> tuple[int, ...]:
    """The offsets of the records that compaction left in a batch."""
    content = _inflated(body, attributes & DefaultRecordBatch.CODEC_MASK)
    found, at = [], 0
    for _ in range(count):
        length, at = decode_varint(content, at)
        _, delta_at = decode_varint(content, at + 1)  # past the attributes, one byte, and the timestamp
        found.append(base + decode_varint(content, delta_at)[0])
        at += length
    return tuple(found)


def _inflated(body: memoryview, codec: int) -> memoryview:
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
