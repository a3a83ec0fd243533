"""A broker and its reader in memory: topics that are created, grow, expire and vanish.

Next: memory/files.py has the files that the fold writes; memory/ledger.py has its commits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from seriatim.engine.files import SourceFailedError, ranges_to_log_ends
from seriatim.engine.holes import ExplainedRange, KafkaRecordBatch, LogView, explain_hole
from seriatim.engine.messages import Header, MessageBatch, first_unreadable_message
from seriatim.engine.offsets import (
    Bounds,
    BoundsByPartition,
    OffsetByPartition,
    OffsetRange,
    Partition,
    Ranges,
    cut_into_slices,
)
from seriatim.engine.retention import RetainedLog, RetentionRules
from seriatim.errors import PlatformError, ensure
from seriatim.formats.registry import RegisteredSchema, SchemaReference, UnknownSchemaError
from seriatim.ports import DEFAULT_READ_OPTIONS, OnSlice, ReadOptions, Task, UnreadableMessageError


class MemoryMessage(Struct, frozen=True):
    """One message of the log."""

    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()
    fate: Literal["", "marker", "aborted", "compacted"] = ""
    """Why a reader may not see it."""

    def is_visible(self, isolation: str) -> bool:
        """Whether a reader with this isolation level gets the message."""
        if not self.fate:
            return True
        return self.fate == "aborted" and isolation == "read_uncommitted"

    def size_bytes(self) -> int:
        """The size of key and value."""
        return len(self.key or b"") + len(self.value or b"")


class MemoryTopic(Struct):
    """A topic. One that is created again under the same name has another id."""

    id: str
    messages: list[list[MemoryMessage]]
    """The messages of each partition from offset 0 on, including those that are gone."""
    log_starts: list[int]
    compacted: bool = False
    rules: RetentionRules = RetentionRules()
    """How long messages are retained; `expire` applies it."""


class MemoryKafka:
    """A broker: topics with ids, partitions, messages, retention. Implements `Log`."""

    def __init__(self) -> None:
        self.topics: dict[str, MemoryTopic] = {}
        self.cluster_id = "memory"
        self._ids = 0

    def create(
        self,
        topic: str,
        partitions: int = 1,
        rules: RetentionRules | None = None,
        *,
        compacted: bool = False,
    ) -> str:
        """Create a topic under an id that no topic had before. Returns the id."""
        ensure(topic not in self.topics, "the topic is there already", topic=topic)
        self._ids += 1
        topic_id = f"id-{self._ids}"
        self.topics[topic] = MemoryTopic(
            id=topic_id,
            messages=[],
            log_starts=[],
            compacted=compacted,
            rules=rules or RetentionRules(),
        )
        self.add_partitions(topic, partitions)
        return topic_id

    def delete(self, topic: str) -> None:
        """Delete a topic and all its messages."""
        del self.topics[topic]

    def add_partitions(self, topic: str, count: int) -> None:
        """Give a topic more partitions. Keys may now go to other partitions, as in Kafka."""
        stored = self.topics[topic]
        for _ in range(count):
            stored.messages.append([])
            stored.log_starts.append(0)

    def produce(
        self,
        topic: str,
        key: bytes | str | None,
        value: bytes | None,
        *,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: tuple[Header, ...] = (),
    ) -> tuple[Partition, int]:
        """Append a message. Returns its partition and offset."""
        stored = self.topics[topic]
        key_bytes = key.encode() if isinstance(key, str) else key
        if partition is None:
            partition = xxh3_64_intdigest(key_bytes or b"") % len(stored.messages)
        log = stored.messages[partition]
        offset = len(log)
        if timestamp is None:
            timestamp = offset
        log.append(MemoryMessage(timestamp, key_bytes, value, headers))
        return Partition(topic, partition), offset

    def end_transaction(
        self,
        partition: Partition,
        offsets: Iterable[int],
        *,
        abort: bool = False,
    ) -> int:
        """Append the marker that ends the transaction of these messages; an abort voids them.
        Returns the offset of the marker.
        """
        log = self.topics[partition.topic].messages[partition.number]
        if abort:
            for offset in offsets:
                log[offset] = replace(log[offset], fate="aborted")
        log.append(MemoryMessage(len(log), None, None, fate="marker"))
        return len(log) - 1

    def compact(self, partition: Partition, before: int) -> None:
        """Keep only the newest message of every key, and delete aborted messages. Messages from the
        offset `before` on stay as they are.
        """
        topic = self.topics[partition.topic]
        ensure(topic.compacted, "only a compacted topic is compacted", topic=partition.topic)
        log = topic.messages[partition.number]
        newest = {message.key: offset for offset, message in enumerate(log) if not message.fate}
        for offset, message in enumerate(log[:before]):
            is_superseded = not message.fate and newest[message.key] != offset
            if message.fate == "aborted" or is_superseded:
                log[offset] = replace(message, fate="compacted")

    def delete_records(self, partition: Partition, before: int) -> None:
        """Delete everything before an offset."""
        topic = self.topics[partition.topic]
        log_end = len(topic.messages[partition.number])
        ensure(before <= log_end, "beyond the log end", before=before)
        log_start = topic.log_starts[partition.number]
        topic.log_starts[partition.number] = max(log_start, before)

    def expire(self, now_seconds: float, segment_messages: int = 1) -> None:
        """Do what Kafka's retention does: delete the oldest segments that are too old or beyond the
        size limit.
        """
        now_ms = now_seconds * 1000
        for name, topic in self.topics.items():
            for number, log in enumerate(topic.messages):
                self._expire_partition(
                    Partition(name, number),
                    topic,
                    log,
                    now_ms,
                    segment_messages,
                )

    def _expire_partition(
        self,
        partition: Partition,
        topic: MemoryTopic,
        log: list[MemoryMessage],
        now_ms: float,
        segment_messages: int,
    ) -> None:
        rules = topic.rules
        while True:
            log_start = topic.log_starts[partition.number]
            segment = log[log_start : log_start + segment_messages]
            if not segment:
                return
            newest_ms = max(message.timestamp for message in segment)
            is_too_old = rules.has_time_limit and now_ms - newest_ms > rules.retention_ms
            # Kafka deletes a segment only if what remains is still at least the limit.
            bytes_without_segment = _total_bytes(log[log_start + len(segment) :])
            is_too_much = rules.has_size_limit and bytes_without_segment >= rules.retention_bytes
            if not is_too_old and not is_too_much:
                return
            self.delete_records(partition, log_start + len(segment))

    def truncate(self, partition: Partition, end: int) -> None:
        """Lose the end of a log, as an unclean election does."""
        topic = self.topics[partition.topic]
        del topic.messages[partition.number][end:]
        log_start = topic.log_starts[partition.number]
        topic.log_starts[partition.number] = min(log_start, end)

    def bounds(self, pattern: str) -> dict[Partition, Bounds]:
        """The bounds of every partition of every topic whose whole name matches."""
        bounds = {}
        for name, topic in self.topics.items():
            if not re.fullmatch(pattern, name):
                continue
            for number, log in enumerate(topic.messages):
                log_start = topic.log_starts[number]
                bounds[Partition(name, number)] = Bounds(topic.id, log_start, len(log))
        return bounds

    def offsets_for_time(self, partitions: list[Partition], timestamp: int) -> dict[Partition, int]:
        """The first offset at or after a time; -1 if there is none."""
        offsets = {}
        for partition in partitions:
            bounds = self.bounds(partition.topic)[partition]
            log_range = OffsetRange(bounds.log_start, bounds.log_end)
            offsets[partition] = -1
            for offset, message in enumerate(self.read(partition, log_range), bounds.log_start):
                if message.timestamp >= timestamp:
                    offsets[partition] = offset
                    break
        return offsets

    def first_unreadable_messages(self, ranges: Ranges) -> dict[Partition, tuple[int, str]]:
        """The offset of the first message of each range whose timestamp Spark cannot read, and the
        reason.
        """
        unreadable = {}
        for partition, offset_range in ranges.items():
            messages = enumerate(self.read(partition, offset_range), offset_range.start)
            message = first_unreadable_message(_batches_of(list(messages)))
            if message is not None:
                unreadable[partition] = message
        return unreadable

    def sample_message_bytes(self, ranges: Ranges) -> dict[Partition, int]:
        """The average size of the first messages of each range."""
        averages: dict[Partition, int] = {}
        for partition, offset_range in ranges.items():
            sample = self.read(partition, offset_range)[:20]
            if sample:
                averages[partition] = _total_bytes(sample) // len(sample) + 1
        return averages

    def read_retention(
        self,
        bounds: BoundsByPartition,
        frontiers: OffsetByPartition,
    ) -> dict[Partition, RetainedLog]:
        """What each log holds beyond these frontiers, and how long it is retained."""
        return {
            partition: self._partition_retention(partition, partition_bounds, frontiers[partition])
            for partition, partition_bounds in bounds.items()
            if partition.topic in self.topics
        }

    def _partition_retention(
        self,
        partition: Partition,
        bounds: Bounds,
        frontier: int,
    ) -> RetainedLog:
        topic = self.topics[partition.topic]
        log = topic.messages[partition.number]
        held = log[bounds.log_start : bounds.log_end]
        unread = log[max(frontier, bounds.log_start) : bounds.log_end]
        return RetainedLog(
            rules=topic.rules,
            frontier=frontier,
            log_start=bounds.log_start,
            log_end=bounds.log_end,
            oldest_ms=held[0].timestamp if held else None,
            frontier_ms=unread[0].timestamp if unread else None,
            newest_ms=max((message.timestamp for message in held), default=None),
            log_bytes=_total_bytes(held) if topic.rules.has_size_limit else None,
        )

    def read(self, partition: Partition, offset_range: OffsetRange) -> list[MemoryMessage]:
        """The messages of a range. `SourceFailedError` if a part of the range is gone."""
        topic = self.topics.get(partition.topic)
        if topic is None or partition.number >= len(topic.messages):
            raise SourceFailedError(f"{partition}: there is no such partition")
        log = topic.messages[partition.number]
        log_start = topic.log_starts[partition.number]
        if not log_start <= offset_range.start <= offset_range.end <= len(log):
            raise SourceFailedError(
                f"{partition}: {offset_range} is asked for, there is [{log_start}, {len(log)})"
            )
        return log[offset_range.start : offset_range.end]


class MemoryBatches:
    """Explains missing offsets by the log in memory, in which each message is a batch of its own."""

    def __init__(self, kafka: MemoryKafka, isolation: str = "read_committed") -> None:
        self.kafka = kafka
        self.isolation = isolation

    def __call__(self, partition: Partition, hole: OffsetRange) -> list[ExplainedRange]:
        """Every offset of the hole with its cause."""
        topic = self.kafka.topics.get(partition.topic)
        if topic is None or partition.number >= len(topic.messages):
            raise PlatformError(f"{partition}: there is no such partition", next="run again")
        log = topic.messages[partition.number]
        log_start = topic.log_starts[partition.number]
        batches = []
        for offset, message in enumerate(log[hole.start : hole.end], hole.start):
            if offset < log_start or message.fate == "compacted":
                continue
            batch = KafkaRecordBatch(
                offset,
                offset,
                is_control=message.fate == "marker",
                is_aborted=message.fate == "aborted",
            )
            batches.append(batch)
        view = LogView(hole.start, hole.end, log_start, len(log), topic.compacted, tuple(batches))
        return explain_hole(hole, view, self.isolation)


def _total_bytes(messages: Iterable[MemoryMessage]) -> int:
    return sum(message.size_bytes() for message in messages)


def one_batch(_: int) -> list[int]:
    """No cuts: all messages of a task come in one message batch."""
    return []


def in_order(ranges: Ranges) -> list[Partition]:
    """The tasks of a slice, sorted by partition."""
    return sorted(ranges)


class MemoryReader:
    """Reads a `MemoryKafka` as Spark does: in slices, one task per partition that has any message."""

    def __init__(
        self,
        kafka: MemoryKafka,
        isolation: str = "read_committed",
        *,
        slicing: Callable[[Ranges, int], Iterable[Ranges]] = cut_into_slices,
        cuts: Callable[[int], list[int]] = one_batch,
        tasks: Callable[[Ranges], Iterable[Partition]] = in_order,
    ) -> None:
        self.kafka = kafka
        self.isolation = isolation
        self.slicing = slicing
        self.cuts = cuts
        self.tasks = tasks
        self.lost_offsets: set[tuple[Partition, int]] = set()
        """Offsets that get lost between log and reader: holes."""
        self.failures: list[str] = []
        """Each of these errors makes one reading of a slice fail."""

    def read_slices(
        self,
        starts: OffsetByPartition,
        messages_max: int,
        on_slice: OnSlice,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        """Read from `starts` to the present log ends, in slices."""
        ranges = ranges_to_log_ends(starts, self.kafka.bounds(".*"))
        for slice_ranges in self.slicing(ranges, messages_max):
            go_on = on_slice(slice_ranges, self.read_ranges(slice_ranges, options))
            if not go_on:
                return

    def read_ranges(
        self,
        ranges: Ranges,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> MemorySource:
        """The messages of exactly these ranges."""
        return MemorySource(self, ranges, options)

    def batches(
        self,
        partition: Partition,
        offset_range: OffsetRange,
        *,
        with_headers: bool,
    ) -> list[MessageBatch]:
        """The messages of a range, cut at holes and wherever `cuts` says."""
        visible: list[tuple[int, MemoryMessage]] = []
        messages = self.kafka.read(partition, offset_range)
        for offset, message in enumerate(messages, offset_range.start):
            is_lost = (partition, offset) in self.lost_offsets
            if message.is_visible(self.isolation) and not is_lost:
                visible.append((offset, message))
        return _batches_of(visible, self.cuts(len(visible)), with_headers=with_headers)


class MemorySource:
    """The messages of one slice."""

    def __init__(
        self,
        reader: MemoryReader,
        ranges: Ranges,
        options: ReadOptions,
    ) -> None:
        self.reader = reader
        self.ranges = ranges
        self.options = options

    def map(self, task: Task, *, has_small_messages: bool = False) -> list[bytes]:
        """Run the task for each partition that has any message. Returns what the tasks return."""
        if self.reader.failures:
            raise SourceFailedError(self.reader.failures.pop(0))
        if self.reader.kafka.first_unreadable_messages(self.ranges):
            raise UnreadableMessageError("long overflow")
        results = []
        for partition in self.reader.tasks(self.ranges):
            offset_range = self.ranges[partition]
            batches = self.reader.batches(
                partition,
                offset_range,
                with_headers=self.options.with_headers,
            )
            if batches:
                results.append(task(partition, offset_range, iter(batches)))
        return results


def _batches_of(
    numbered: list[tuple[int, MemoryMessage]],
    cuts: Iterable[int] = (),
    *,
    with_headers: bool = False,
) -> list[MessageBatch]:
    """Messages with their offsets as batches, cut at holes as the real reader does, and at `cuts`."""
    edges = {0, len(numbered), *cuts}
    for i in range(1, len(numbered)):
        if numbered[i][0] != numbered[i - 1][0] + 1:
            edges.add(i)
    batches = []
    for begin, end in pairwise(sorted(edges)):
        messages = [message for _, message in numbered[begin:end]]
        batch = MessageBatch(
            numbered[begin][0],
            [message.timestamp for message in messages],
            [message.key for message in messages],
            [message.value for message in messages],
            [message.headers for message in messages] if with_headers else None,
        )
        batches.append(batch)
    return batches


class MemoryPastReader:
    """Reads messages of the past again. Implements `PastMessageReader`."""

    def __init__(self, reader: MemoryReader) -> None:
        self.reader = reader

    def read(self, partition: Partition, offset_range: OffsetRange) -> Iterator[MessageBatch]:
        """The messages of a range that Kafka still has."""
        yield from self.reader.batches(partition, offset_range, with_headers=False)

    def is_compacted(self, topic: str) -> bool:
        """Whether the topic is compacted."""
        return self.reader.kafka.topics[topic].compacted


class MemorySchemas:
    """Schemas by id. Ids are given in the order of registering, from 1 on."""

    def __init__(self) -> None:
        self.schemas: dict[int, RegisteredSchema] = {}

    def register(
        self,
        schema: Any,
        *,
        kind: str = "AVRO",
        references: Sequence[tuple[str, Any]] = (),
    ) -> bytes:
        """Add a schema: a text, or what its JSON says. `references` are the names and schemas that it
        refers to. Returns the header that values written with it have.
        """
        schema_id = len(self.schemas) + 1
        referred = tuple(SchemaReference(name, _text_of(other)) for name, other in references)
        self.schemas[schema_id] = RegisteredSchema(kind, _text_of(schema), referred)
        return b"\x00" + schema_id.to_bytes(4, "big")

    def schema(self, schema_id: int) -> RegisteredSchema:
        """The schema of an id."""
        if schema_id not in self.schemas:
            raise UnknownSchemaError(schema_id)
        return self.schemas[schema_id]


def _text_of(schema: Any) -> str:
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
