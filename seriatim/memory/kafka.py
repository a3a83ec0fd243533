"""A broker and its reader in memory: topics that come, grow, expire and vanish.

Next room: files.py is where the fold's files go; ledger.py is where its commits go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from seriatim.engine.holes import ExplainedRange, KafkaRecordBatch, LogView, explain_hole
from seriatim.engine.messages import SPARK_TIMESTAMP_RANGE_MS, Header, MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import PlatformError, ensure
from seriatim.kafka.retention import RetainedLog, RetentionRules
from seriatim.operations.slicing import Bounds, Ranges, cut_into_slices
from seriatim.ports import (
    DEFAULT_READ_OPTIONS,
    OnSlice,
    ReadOptions,
    SourceFailedError,
    Task,
    UnreadableMessageError,
)


class MemoryMessage(Struct, frozen=True):
    """One message of the log."""

    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()
    fate: Literal["", "marker", "aborted", "compacted"] = ""
    """Why a reader may not see it."""

    def is_visible(self, isolation: str) -> bool:
        """Whether a reader gets it."""
        return not self.fate or (self.fate == "aborted" and isolation == "read_uncommitted")


class MemoryTopic(Struct):
    """A topic's life. Made again under the same name it has another id."""

    id: str
    messages: list[list[MemoryMessage]]
    """Per partition, from offset 0 on, also those that are gone."""
    log_starts: list[int]
    compacted: bool = False
    rules: RetentionRules = RetentionRules()
    """How long it keeps; `expire` does it."""


class MemoryKafka:
    """A broker: topics with ids, partitions, messages, retention. Implements `Log`."""

    def __init__(self) -> None:
        self.topics: dict[str, MemoryTopic] = {}
        self._ids = 0

    def create(
        self,
        topic: str,
        partitions: int = 1,
        rules: RetentionRules | None = None,
        *,
        compacted: bool = False,
    ) -> str:
        """Make a topic, under an id nobody had before."""
        ensure(topic not in self.topics, "the topic is there already", topic=topic)
        self._ids += 1
        self.topics[topic] = MemoryTopic(
            f"id-{self._ids}", [], [], compacted, rules or RetentionRules()
        )
        self.add_partitions(topic, partitions)
        return self.topics[topic].id

    def delete(self, topic: str) -> None:
        """Delete a topic and all it holds."""
        del self.topics[topic]

    def add_partitions(self, topic: str, count: int) -> None:
        """Give a topic more partitions. Keys may now live elsewhere, as in Kafka."""
        made = self.topics[topic]
        made.messages += [[] for _ in range(count)]
        made.log_starts += [0] * count

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
        """Append a message; its partition and offset."""
        made = self.topics[topic]
        name = key.encode() if isinstance(key, str) else key
        number = (
            xxh3_64_intdigest(name or b"") % len(made.messages) if partition is None else partition
        )
        log = made.messages[number]
        log.append(
            MemoryMessage(len(log) if timestamp is None else timestamp, name, value, headers)
        )
        return Partition(topic, number), len(log) - 1

    def end_transaction(
        self, partition: Partition, offsets: Iterable[int], *, abort: bool = False
    ) -> int:
        """Append the marker that ends the transaction of these messages; an abort voids them. Its
        offset.
        """
        log = self.topics[partition.topic].messages[partition.number]
        for offset in offsets if abort else ():
            log[offset] = replace(log[offset], fate="aborted")
        log.append(MemoryMessage(len(log), None, None, fate="marker"))
        return len(log) - 1

    def compact(self, partition: Partition, before: int) -> None:
        """Keep the newest message of every key; what is aborted goes; nothing from `before` on is
        touched.
        """
        topic = self.topics[partition.topic]
        ensure(topic.compacted, "only a compacted topic is compacted", topic=partition.topic)
        log = topic.messages[partition.number]
        newest = {message.key: offset for offset, message in enumerate(log) if not message.fate}
        for offset, message in enumerate(log[:before]):
            if message.fate == "aborted" or (not message.fate and newest[message.key] != offset):
                log[offset] = replace(message, fate="compacted")

    def delete_records(self, partition: Partition, before: int) -> None:
        """Let everything before an offset expire."""
        made = self.topics[partition.topic]
        ensure(before <= len(made.messages[partition.number]), "beyond the log end", before=before)
        made.log_starts[partition.number] = max(made.log_starts[partition.number], before)

    def expire(self, now_seconds: float, segment_messages: int = 1) -> None:
        """Do what Kafka's retention does: drop the oldest segments that are too old, or too much."""
        for name, topic in self.topics.items():
            for number, log in enumerate(topic.messages):
                place, rules = Partition(name, number), topic.rules
                while segment := log[topic.log_starts[number] :][:segment_messages]:
                    size, kept = _size_bytes(log[topic.log_starts[number] :]), _size_bytes(segment)
                    old = (
                        now_seconds * 1000 - max(message.timestamp for message in segment)
                        > rules.retention_ms
                    )
                    much = size - kept >= rules.retention_bytes
                    if not (rules.has_time_limit and old) and not (rules.has_size_limit and much):
                        break
                    self.delete_records(place, topic.log_starts[number] + len(segment))

    def truncate(self, partition: Partition, end: int) -> None:
        """Lose the end of a log, as an unclean election does."""
        made = self.topics[partition.topic]
        del made.messages[partition.number][end:]
        made.log_starts[partition.number] = min(made.log_starts[partition.number], end)

    def bounds(self, pattern: str) -> dict[Partition, Bounds]:
        """Every partition of every topic whose whole name matches."""
        return {
            Partition(name, number): Bounds(topic.id, topic.log_starts[number], len(log))
            for name, topic in self.topics.items()
            if re.fullmatch(pattern, name)
            for number, log in enumerate(topic.messages)
        }

    def offsets_for_time(self, partitions: list[Partition], timestamp: int) -> dict[Partition, int]:
        """The first offset at or after a time; -1 where there is none."""
        found = {}
        for partition in partitions:
            seen = self.bounds(partition.topic)[partition]
            there = self.read(partition, OffsetRange(seen.log_start, seen.log_end))
            late = (
                offset
                for offset, one in enumerate(there, seen.log_start)
                if one.timestamp >= timestamp
            )
            found[partition] = next(late, -1)
        return found

    def first_unreadable_messages(self, ranges: Ranges) -> dict[Partition, tuple[int, str]]:
        """The first message of each range whose timestamp Spark could not read, by offset, and why."""
        found: dict[Partition, tuple[int, str]] = {}
        for partition, whole in ranges.items():
            stamps = [message.timestamp for message in self.read(partition, whole)]
            bad = [
                i
                for i, stamp in enumerate(stamps)
                if not SPARK_TIMESTAMP_RANGE_MS[0] <= stamp <= SPARK_TIMESTAMP_RANGE_MS[1]
            ]
            if bad:
                found[partition] = (
                    whole.start + bad[0],
                    f"its timestamp is {stamps[bad[0]]} ms since 1970",
                )
        return found

    def sample_message_bytes(self, ranges: Ranges) -> dict[Partition, int]:
        """How large the first messages of each range are, on average."""
        found: dict[Partition, int] = {}
        for partition, whole in ranges.items():
            sizes = [
                len(m.key or b"") + len(m.value or b"") for m in self.read(partition, whole)[:20]
            ]
            if sizes:
                found[partition] = sum(sizes) // len(sizes) + 1
        return found

    def read_retention(
        self, bounds: Mapping[Partition, Bounds], frontiers: Mapping[Partition, int]
    ) -> dict[Partition, RetainedLog]:
        """What the topics hold, seen from these frontiers, and for how long."""
        return {
            partition: self._partition_retention(partition, seen, frontiers[partition])
            for partition, seen in bounds.items()
            if partition.topic in self.topics
        }

    def _partition_retention(
        self, partition: Partition, bounds: Bounds, frontier: int
    ) -> RetainedLog:
        topic = self.topics[partition.topic]
        log = topic.messages[partition.number]
        held, waiting = (
            log[bounds.log_start : bounds.log_end],
            log[max(frontier, bounds.log_start) : bounds.log_end],
        )
        return RetainedLog(
            rules=topic.rules,
            frontier=frontier,
            log_start=bounds.log_start,
            log_end=bounds.log_end,
            oldest_ms=held[0].timestamp if held else None,
            frontier_ms=waiting[0].timestamp if waiting else None,
            newest_ms=max((message.timestamp for message in held), default=None),
            log_bytes=_size_bytes(held) if topic.rules.has_size_limit else None,
        )

    def read(self, partition: Partition, offset_range: OffsetRange) -> list[MemoryMessage]:
        """The messages of a range; a range that is no longer all there cannot be read."""
        topic = self.topics.get(partition.topic)
        if topic is None:
            raise SourceFailedError(f"{partition}: the topic is gone")
        start, end = topic.log_starts[partition.number], len(topic.messages[partition.number])
        if not start <= offset_range.start <= offset_range.end <= end:
            raise SourceFailedError(
                f"{partition}: {offset_range} is asked for, there is [{start}, {end})"
            )
        return topic.messages[partition.number][offset_range.start : offset_range.end]


class MemoryBatches:
    """What the log in memory says about missing offsets: each message is a batch of its own."""

    def __init__(self, kafka: MemoryKafka, isolation: str = "read_committed") -> None:
        self.kafka, self.isolation = kafka, isolation

    def __call__(self, partition: Partition, hole: OffsetRange) -> list[ExplainedRange]:
        """Every offset of the hole with its cause."""
        topic = self.kafka.topics.get(partition.topic)
        if topic is None:
            raise PlatformError(f"{partition}: the topic is gone", next="run again")
        log_start, log = topic.log_starts[partition.number], topic.messages[partition.number]
        there = [
            KafkaRecordBatch(
                offset,
                offset,
                is_control=message.fate == "marker",
                is_aborted=message.fate == "aborted",
            )
            for offset, message in enumerate(log[hole.start : hole.end], hole.start)
            if offset >= log_start and message.fate != "compacted"
        ]
        view = LogView(hole.start, hole.end, log_start, len(log), topic.compacted, tuple(there))
        return explain_hole(hole, view, self.isolation)


def _size_bytes(messages: Iterable[MemoryMessage]) -> int:
    return sum(len(message.key or b"") + len(message.value or b"") for message in messages)


def one_batch(_: int) -> list[int]:
    """No cuts: all messages of a task come in one stretch."""
    return []


def in_order(ranges: Ranges) -> list[Partition]:
    """Tasks one after the other, as sorted."""
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
        self.kafka, self.isolation = kafka, isolation
        self.slicing, self.cuts, self.tasks = slicing, cuts, tasks
        self.lost_offsets: set[tuple[Partition, int]] = set()
        """Offsets that get lost between log and reader: holes."""
        self.failures: list[str] = []
        """Each makes one reading of a slice fail."""

    def read_slices(
        self,
        starts: Mapping[Partition, int],
        messages_max: int,
        on_slice: OnSlice,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        """From `starts` to the log ends of now, in slices."""
        bounds = self.kafka.bounds(".*")
        if missing := [partition for partition in starts if partition not in bounds]:
            raise SourceFailedError(f"{missing[0]}: the topic is gone")
        if back := [p for p, start in starts.items() if bounds[p].log_end < start]:
            raise SourceFailedError(f"{back[0]}: the log ends before the start")
        ranges = {p: OffsetRange(start, bounds[p].log_end) for p, start in starts.items()}
        for piece in self.slicing(ranges, messages_max):
            if not on_slice(piece, self.read_ranges(piece, options)):
                return

    def read_ranges(
        self, ranges: Ranges, options: ReadOptions = DEFAULT_READ_OPTIONS
    ) -> MemorySource:
        """These ranges and no others."""
        return MemorySource(self, ranges, options)

    def batches(
        self, partition: Partition, offset_range: OffsetRange, *, with_headers: bool
    ) -> list[MessageBatch]:
        """The messages of a range, cut at holes and wherever `cuts` says."""
        there = [
            (offset, message)
            for offset, message in enumerate(
                self.kafka.read(partition, offset_range), offset_range.start
            )
            if message.is_visible(self.isolation) and (partition, offset) not in self.lost_offsets
        ]
        holes = [i for i in range(1, len(there)) if there[i][0] != there[i - 1][0] + 1]
        edges = sorted({0, len(there), *holes, *self.cuts(len(there))})
        return [_batch_of(there[a:b], with_headers=with_headers) for a, b in pairwise(edges)]


class MemorySource:
    """The messages of one slice."""

    def __init__(self, reader: MemoryReader, ranges: Ranges, options: ReadOptions) -> None:
        self.reader, self.ranges, self.options = reader, ranges, options

    def map(self, task: Task, *, has_small_messages: bool = False) -> list[bytes]:
        """Run the task for each partition of which a message comes."""
        if self.reader.failures:
            raise SourceFailedError(self.reader.failures.pop(0))
        if self.reader.kafka.first_unreadable_messages(self.ranges):
            raise UnreadableMessageError("long overflow")
        return [
            task(partition, iter(stretches))
            for partition in self.reader.tasks(self.ranges)
            if (
                stretches := self.reader.batches(
                    partition, self.ranges[partition], with_headers=self.options.with_headers
                )
            )
        ]


def _batch_of(
    messages_by_offset: list[tuple[int, MemoryMessage]], *, with_headers: bool
) -> MessageBatch:
    messages = [message for _, message in messages_by_offset]
    return MessageBatch(
        messages_by_offset[0][0],
        [message.timestamp for message in messages],
        [message.key for message in messages],
        [message.value for message in messages],
        [message.headers for message in messages] if with_headers else None,
    )
