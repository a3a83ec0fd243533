"""Raw record batches: what the log itself says about offsets that no reader gets to see. Implements
`Explain`.

Kafka has no request for headers alone, so a hole is explained by fetching its region once more, as
bytes, of which only the batch headers are looked at. A transactional topic has a hole every few
messages: each look goes further ahead than the one before, and what it saw is kept, so that many
holes cost few fetches.

It lives where the fold lives, in a Spark worker: plain settings go in, connections are opened for
one look and closed after it, and there is no thread.

Next room: engine/holes.py decides what the batches mean.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
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
from seriatim.kafka.wire import (
    EARLIEST,
    LATEST,
    MAGIC_V2,
    PartitionLeader,
    RawBatch,
    open_connections,
    parse_raw_batches,
    raise_for_code,
)

FETCH_BYTES = 4 << 20
READ_AHEAD_BYTES = 1 << 20
READ_AHEAD_BYTES_MAX = 32 << 20
"""How far a look goes beyond its hole: a lone hole is cheap, and many cost a fetch per 32 MiB of
log.
"""
RETRY_SECONDS_MAX = 20.0
RETRY_WAIT_SECONDS = 0.25
TOPIC_RESOURCE_TYPE = 2


class KafkaHoleExplainer:
    """Explains holes from the log's own batches."""

    def __init__(
        self,
        settings: Mapping[str, str],
        isolation: str = "read_committed",
        retry_seconds_max: float = RETRY_SECONDS_MAX,
    ) -> None:
        self.servers, self.isolation = settings["bootstrap.servers"], isolation
        self.retry_seconds_max = retry_seconds_max
        self._settings = client.python_settings(settings)
        self._read_ahead_bytes = READ_AHEAD_BYTES
        self._cached_view: tuple[Partition, LogView] | None = None
        self.log_reads = 0
        """How often the log was looked at: far fewer times than there are holes."""

    def __call__(self, partition: Partition, hole: OffsetRange) -> list[ExplainedRange]:
        """Every offset of the hole with its cause."""
        if self._cached_view is not None and self._cached_view[0] == partition:
            view = self._cached_view[1]
            if view.start <= hole.start and hole.end <= view.end:
                pieces = explain_hole(hole, view, self.isolation)
                # What was there when we looked may have been compacted before the reader came by.
                if not (view.is_compacted and any(cause in LOSS_FINDINGS for _, cause in pieces)):
                    return pieces
        view = self._read_log(partition, hole)
        self._cached_view = partition, view
        self._read_ahead_bytes = min(self._read_ahead_bytes * 4, READ_AHEAD_BYTES_MAX)
        return explain_hole(hole, view, self.isolation)

    def _read_log(self, partition: Partition, hole: OffsetRange) -> LogView:
        """The log from the hole on; leaders move, so a few times."""
        self.log_reads += 1
        until = time.monotonic() + self.retry_seconds_max
        while True:
            try:
                with open_connections(self._settings, self.retry_seconds_max) as manager:
                    return _PartitionLogReader(manager, partition, self.isolation).read_view(
                        hole, self._read_ahead_bytes
                    )
            except (kafka_errors.KafkaError, OSError) as error:
                if time.monotonic() > until or not _is_retriable(error):
                    raise self._unreachable_error(partition, error) from None
            time.sleep(RETRY_WAIT_SECONDS)

    def _unreachable_error(self, partition: Partition, error: Exception) -> PlatformError:
        told = str(error).splitlines()[0] if str(error) else ""
        return PlatformError(
            f"{partition}: offsets are missing, and Kafka at {self.servers} cannot be asked why: "
            f"{type(error).__name__} {told}".rstrip(),
            next="check the broker and that this user may read the topic, then run again: nothing is lost",
        )


def _is_retriable(error: Exception) -> bool:
    """Whether another try may help. Messages can expire between two requests."""
    return isinstance(error, OSError | kafka_errors.OffsetOutOfRangeError) or bool(
        getattr(error, "retriable", False)
    )


class _PartitionLogReader:
    """One look at one partition's log."""

    def __init__(
        self, manager: KafkaConnectionManager, partition: Partition, isolation: str
    ) -> None:
        self.partition, self.leader = partition, PartitionLeader(manager, partition, isolation)

    def read_view(self, hole: OffsetRange, ahead_bytes: int) -> LogView:
        """Every batch from the hole on, to its end and then `ahead_bytes` further."""
        log_start, stable = self.leader.list_offset(EARLIEST), self.leader.list_offset(LATEST)
        batches: list[KafkaRecordBatch] = []
        start = at = max(hole.start, log_start)
        read = 0
        while at < stable and (at < hole.end or read < ahead_bytes):
            answer = self.leader.fetch(at, FETCH_BYTES)
            found = [
                batch
                for raw in parse_raw_batches(memoryview(answer.records or b""))
                for batch in _batches_from_raw(raw)
            ]
            listed = [
                (one.producer_id, one.first_offset) for one in answer.aborted_transactions or ()
            ]
            batches += mark_aborted_batches(found, listed)
            read += len(answer.records or b"")
            at = found[-1].last_offset + 1 if found else stable
        compacted = self._is_compacted(batches, start, at)
        return LogView(start, min(at, stable), log_start, stable, compacted, tuple(batches))

    def _is_compacted(self, batches: list[KafkaRecordBatch], start: int, end: int) -> bool:
        """Whether the topic is compacted. Asking may be forbidden, which matters only where
        something is absent.
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
    """Whether the log lacks offsets between two batches, within one, or before and after all."""
    if not batches:
        return start < end
    apart = any(a.last_offset + 1 != b.first_offset for a, b in pairwise(batches))
    inside = any(batch.record_offsets is not None and not batch.is_control for batch in batches)
    return apart or inside or batches[0].first_offset > start or batches[-1].last_offset + 1 < end


def _batches_from_raw(raw: RawBatch) -> list[KafkaRecordBatch]:
    """A batch as its header has it; a message set from before Kafka 0.11 has no span of its own,
    only its records.
    """
    if raw.magic < MAGIC_V2:
        offsets = tuple(record.offset for batch in MemoryRecords(raw.content) for record in batch)
        return (
            [KafkaRecordBatch(offsets[0], offsets[-1], record_offsets=offsets)] if offsets else []
        )
    whole = raw.is_control or raw.record_count == raw.last_offset - raw.base_offset + 1
    return [
        KafkaRecordBatch(
            raw.base_offset,
            raw.last_offset,
            is_control=raw.is_control,
            is_abort_marker=raw.is_abort,
            producer_id=raw.producer_id,
            is_transactional=raw.is_transactional,
            record_offsets=None if whole else _offsets_in_batch(raw),
        )
    ]


def _offsets_in_batch(raw: RawBatch) -> tuple[int, ...]:
    """The offsets of the records that compaction left in a batch."""
    content = raw.decompressed_records()
    found, at = [], 0
    for _ in range(raw.record_count):
        length, at = decode_varint(content, at)
        _, delta_at = decode_varint(
            content, at + 1
        )  # past the attributes, one byte, and the timestamp
        found.append(raw.base_offset + decode_varint(content, delta_at)[0])
        at += length
    return tuple(found)
