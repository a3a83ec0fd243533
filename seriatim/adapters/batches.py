"""Raw record batches: what the log itself says about offsets that no reader gets to see. Implements `Explain`.

Kafka has no request for headers alone, so a hole is explained by fetching its region once more, as bytes, of
which only the batch headers are looked at. A transactional topic has a hole every few messages: each look goes
further ahead than the one before, and what it saw is kept, so that many holes cost few fetches.

It lives where the fold lives, in a Spark worker: plain settings go in, connections are opened for one look and
closed after it, and there is no thread.

Next room: core/holes.py decides what the batches mean.
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

from seriatim import client
from seriatim.core.errors import PlatformError
from seriatim.core.holes import FINDINGS, Batch, LogView, Piece, explain, judged
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.wire import EARLIEST, LATEST, MAGIC, Leader, RawBatch, connected, raw_batches, refuse

FETCH_BYTES = 4 << 20
AHEAD_BYTES = 1 << 20
AHEAD_BYTES_MAX = 32 << 20
"""How far a look goes beyond its hole: a lone hole is cheap, and many cost a fetch per 32 MiB of log."""
PATIENCE_SECONDS = 20.0
WAIT_SECONDS = 0.25
TOPIC = 2


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
                with connected(self._settings, self.patience_seconds) as manager:
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


class _Look:
    """One look at one partition's log."""

    def __init__(self, manager: KafkaConnectionManager, partition: Partition, isolation: str) -> None:
        self.partition, self.leader = partition, Leader(manager, partition, isolation)

    def view(self, hole: OffsetRange, ahead_bytes: int) -> LogView:
        """Every batch from the hole on, to its end and then `ahead_bytes` further."""
        log_start, stable = self.leader.bound(EARLIEST), self.leader.bound(LATEST)
        batches: list[Batch] = []
        start = at = max(hole.start, log_start)
        read = 0
        while at < stable and (at < hole.end or read < ahead_bytes):
            answer = self.leader.fetch(at, FETCH_BYTES)
            found = [batch for raw in raw_batches(memoryview(answer.records or b"")) for batch in _batch(raw)]
            listed = [(one.producer_id, one.first_offset) for one in answer.aborted_transactions or ()]
            batches += judged(found, listed)
            read += len(answer.records or b"")
            at = found[-1].last + 1 if found else stable
        compacted = self._is_compacted(batches, start, at)
        return LogView(start, min(at, stable), log_start, stable, compacted, tuple(batches))

    def _is_compacted(self, batches: list[Batch], start: int, end: int) -> bool:
        """Whether the topic is compacted. Asking may be forbidden, which matters only where something is absent."""
        resource = DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=TOPIC, resource_name=self.partition.topic, configuration_keys=["cleanup.policy"]
        )
        answer = self.leader.asked(DescribeConfigsRequest(resources=[resource])).results[0]
        if _forbidden(answer.error_code):
            if not _has_absences(batches, start, end):
                return False
            raise PlatformError(
                f"{self.partition}: offsets are not in the log, and this user may not ask whether it is compacted",
                next=f"allow DescribeConfigs on topic {self.partition.topic}, then run again: nothing is lost",
            )
        refuse(answer.error_code)
        return any("compact" in (setting.value or "") for setting in answer.configs)


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


def _batch(raw: RawBatch) -> list[Batch]:
    """A batch as its header has it; a message set from before Kafka 0.11 has no span of its own, only its records."""
    if raw.magic < MAGIC:
        offsets = tuple(record.offset for batch in MemoryRecords(raw.whole) for record in batch)
        return [Batch(offsets[0], offsets[-1], records=offsets)] if offsets else []
    whole = raw.is_control or raw.count == raw.last - raw.base + 1
    return [
        Batch(
            raw.base,
            raw.last,
            control=raw.is_control,
            abort=raw.is_abort,
            producer=raw.producer,
            transactional=raw.is_transactional,
            records=None if whole else _offsets(raw),
        )
    ]


def _offsets(raw: RawBatch) -> tuple[int, ...]:
    """The offsets of the records that compaction left in a batch."""
    content = raw.records()
    found, at = [], 0
    for _ in range(raw.count):
        length, at = decode_varint(content, at)
        _, delta_at = decode_varint(content, at + 1)  # past the attributes, one byte, and the timestamp
        found.append(raw.base + decode_varint(content, delta_at)[0])
        at += length
    return tuple(found)
