"""Explains missing offsets from raw record batches: the log itself says why a reader does not get
them. Implements `Explain`.

Kafka has no request for headers alone. So a hole is explained by fetching its region once more as
bytes, of which only the batch headers are read. A transactional topic has a hole every few
messages: each fetch reads further ahead than the one before and its result is kept, so that many
holes cost few fetches.

This runs inside Spark workers, as the fold does: it takes plain settings, opens connections for one
explanation and closes them again, and starts no thread.

Next: engine/holes.py decides what the batches mean.
"""

from __future__ import annotations

import time
from itertools import pairwise

import kafka.errors as kafka_errors
from kafka.net import KafkaConnectionManager
from kafka.protocol.admin import DescribeConfigsRequest
from kafka.record.memory_records import MemoryRecords
from kafka.record.util import decode_varint

from seriatim.engine.holes import (
    LOSS_FINDINGS,
    ExplainedRange,
    KafkaRecordBatch,
    LogView,
    explain_hole,
    mark_aborted_batches,
)
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import PlatformError
from seriatim.kafka import client
from seriatim.kafka.client import ClientSettings
from seriatim.kafka.wire import (
    EARLIEST,
    LATEST,
    MAGIC_V2,
    PartitionLeader,
    RawBatch,
    open_connections,
    raise_for_code,
)

FETCH_BYTES = 4 << 20
READ_AHEAD_BYTES = 1 << 20
READ_AHEAD_BYTES_MAX = 32 << 20
"""How far a read goes beyond its hole, at first and at most. A single hole stays cheap, and many
holes cost one read per 32 MiB of log.
"""
RETRY_SECONDS_MAX = 20.0
RETRY_WAIT_SECONDS = 0.25
TOPIC_RESOURCE_TYPE = 2


class KafkaHoleExplainer:
    """Explains holes from the record batches of the log."""

    def __init__(
        self,
        settings: ClientSettings,
        isolation: str = "read_committed",
        retry_seconds_max: float = RETRY_SECONDS_MAX,
    ) -> None:
        self.servers = settings["bootstrap.servers"]
        self.isolation = isolation
        self.retry_seconds_max = retry_seconds_max
        self._settings = client.python_settings(settings)
        self._read_ahead_bytes = READ_AHEAD_BYTES
        self._cached_view: tuple[Partition, LogView] | None = None
        self.log_reads = 0
        """How often the log was read. This is far less often than there are holes."""

    def __call__(self, partition: Partition, hole: OffsetRange) -> list[ExplainedRange]:
        """Ranges that cover the hole, each with its cause."""
        pieces = self._explain_from_cache(partition, hole)
        if pieces is not None:
            return pieces
        view = self._read_log(partition, hole)
        self._cached_view = partition, view
        self._read_ahead_bytes = min(self._read_ahead_bytes * 4, READ_AHEAD_BYTES_MAX)
        return explain_hole(hole, view, self.isolation)

    def _explain_from_cache(
        self, partition: Partition, hole: OffsetRange
    ) -> list[ExplainedRange] | None:
        """The explanation from the last read; None if that read does not answer."""
        if self._cached_view is None:
            return None
        cached_partition, view = self._cached_view
        if cached_partition != partition or hole.start < view.start or hole.end > view.end:
            return None
        pieces = explain_hole(hole, view, self.isolation)
        if view.is_compacted and any(cause in LOSS_FINDINGS for _, cause in pieces):
            # Messages may have been compacted away between that read and the reader's fetch.
            return None
        return pieces

    def _read_log(self, partition: Partition, hole: OffsetRange) -> LogView:
        """The log from the hole on. Leaders move, so it is tried again for a while."""
        self.log_reads += 1
        deadline = time.monotonic() + self.retry_seconds_max
        while True:
            try:
                with open_connections(self._settings, self.retry_seconds_max) as manager:
                    log_reader = _PartitionLogReader(manager, partition, self.isolation)
                    return log_reader.read_view(hole, self._read_ahead_bytes)
            except (kafka_errors.KafkaError, OSError) as error:
                if time.monotonic() > deadline or not _is_retriable(error):
                    raise self._unreachable_error(partition, error) from None
            time.sleep(RETRY_WAIT_SECONDS)

    def _unreachable_error(self, partition: Partition, error: Exception) -> PlatformError:
        lines = str(error).splitlines()
        reason = lines[0] if lines else ""
        return PlatformError(
            f"{partition}: offsets are missing, and Kafka at {self.servers} cannot be asked why: "
            f"{type(error).__name__} {reason}".rstrip(),
            next="check the broker and that this user may read the topic, then run again: nothing is lost",
        )


def _is_retriable(error: Exception) -> bool:
    """Whether another try may help."""
    # The log start may move between two requests, so OffsetOutOfRange is worth another try.
    if isinstance(error, OSError | kafka_errors.OffsetOutOfRangeError):
        return True
    return bool(getattr(error, "retriable", False))


class _PartitionLogReader:
    """Reads the batch headers of one partition."""

    def __init__(
        self, manager: KafkaConnectionManager, partition: Partition, isolation: str
    ) -> None:
        self.partition = partition
        self.leader = PartitionLeader(manager, partition, isolation)

    def read_view(self, hole: OffsetRange, ahead_bytes: int) -> LogView:
        """Every batch from the start of the hole to its end, and `ahead_bytes` further."""
        # Asked first: if the log start moves on meanwhile, the fetch is refused, and all is read again.
        log_start = self.leader.list_offset(EARLIEST)
        stable_end = self.leader.list_offset(LATEST)
        start = max(hole.start, log_start)
        offset = start
        bytes_read = 0
        batches: list[KafkaRecordBatch] = []
        while offset < stable_end and (offset < hole.end or bytes_read < ahead_bytes):
            fetched = self.leader.fetch(offset, FETCH_BYTES)
            headers: list[KafkaRecordBatch] = []
            for raw in fetched.raw_batches:
                headers += _batches_from_raw(raw)
            batches += mark_aborted_batches(headers, fetched.aborted_transactions)
            bytes_read += fetched.size_bytes
            # An empty answer before the stable end: the rest of the log has no batches any more.
            offset = headers[-1].last_offset + 1 if headers else stable_end
        is_compacted = self._is_compacted(batches, start, offset)
        end = min(offset, stable_end)
        return LogView(start, end, log_start, stable_end, is_compacted, tuple(batches))

    def _is_compacted(self, batches: list[KafkaRecordBatch], start: int, end: int) -> bool:
        """Whether the topic is compacted. If this user may not ask, that is an error only where
        offsets are missing.
        """
        resource = DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=TOPIC_RESOURCE_TYPE,
            resource_name=self.partition.topic,
            configuration_keys=["cleanup.policy"],
        )
        answer = self.leader.send_request(DescribeConfigsRequest(resources=[resource])).results[0]
        if _is_forbidden(answer.error_code):
            if not _has_missing_offsets(batches, start, end):
                return False
            raise PlatformError(
                f"{self.partition}: offsets are not in the log, and this user may not ask whether it is compacted",
                next=f"allow DescribeConfigs on topic {self.partition.topic}, then run again: nothing is lost",
            )
        raise_for_code(answer.error_code)
        return any("compact" in (setting.value or "") for setting in answer.configs)


def _is_forbidden(code: int) -> bool:
    error = kafka_errors.for_code(code)
    return error in (
        kafka_errors.TopicAuthorizationFailedError,
        kafka_errors.ClusterAuthorizationFailedError,
    )


def _has_missing_offsets(batches: list[KafkaRecordBatch], start: int, end: int) -> bool:
    """Whether the log lacks offsets of a range: between batches, inside one, or at the ends."""
    if not batches:
        return start < end
    if batches[0].first_offset > start or batches[-1].last_offset + 1 < end:
        return True
    for batch, following in pairwise(batches):
        if batch.last_offset + 1 != following.first_offset:
            return True
    return any(batch.record_offsets is not None and not batch.is_control for batch in batches)


def _batches_from_raw(raw: RawBatch) -> list[KafkaRecordBatch]:
    """A batch as its header describes it. A message set of before Kafka 0.11 has no such header:
    its offsets are those of its records.
    """
    if raw.magic < MAGIC_V2:
        offsets = tuple(record.offset for batch in MemoryRecords(raw.content) for record in batch)
        if not offsets:
            return []
        return [KafkaRecordBatch(offsets[0], offsets[-1], record_offsets=offsets)]
    is_complete = raw.record_count == raw.last_offset - raw.base_offset + 1
    record_offsets = None
    if not raw.is_control and not is_complete:
        record_offsets = _offsets_in_batch(raw)
    return [raw.header(record_offsets)]


def _offsets_in_batch(raw: RawBatch) -> tuple[int, ...]:
    """The offsets of the records that compaction has left in a batch."""
    content = raw.decompressed_records()
    offsets = []
    position = 0
    for _ in range(raw.record_count):
        length, position = decode_varint(content, position)
        # One byte of attributes and the timestamp come before the offset.
        _, delta_position = decode_varint(content, position + 1)
        offset_delta, _ = decode_varint(content, delta_position)
        offsets.append(raw.base_offset + offset_delta)
        position += length
    return tuple(offsets)
