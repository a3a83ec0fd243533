"""The contract of `Reader` and `Source`: which messages reach a task, in memory, through Spark's own
source, and read by the task, whose ranges a query plans or (for Spark Connect) the reader itself.

Tasks are nested functions, so that Spark sends them to its workers by value: those cannot import
tests.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from seriatim.engine.files import SourceFailedError
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition, Ranges
from seriatim.errors import BrokenPromiseError
from seriatim.kafka import client
from seriatim.kafka.log import KafkaLog
from seriatim.kafka.spark_reader import SparkReader, TaskReader
from seriatim.kafka.task_reader import KafkaRangeReader
from seriatim.memory import MemoryKafka, MemoryReader
from seriatim.ports import DEFAULT_READ_OPTIONS, OnSlice, Reader, ReadOptions, Source, Task
from seriatim.storage.arrow import message_batches

WAIT_SECONDS = 180
Seen = tuple[int, int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]
"""Offset, timestamp, key, value, headers."""
NOW = int(time.time()) * 1000
"""Older messages would be deleted by Kafka at any moment: retention goes by their own time."""
ALL = ReadOptions(with_headers=True)
MESSAGES: list[Seen] = [
    (0, NOW, b"a", b"1", []),
    (1, NOW + 1, None, b"2", [("h", b"x"), ("h", None)]),
    (2, NOW + 1, b"b", None, []),
    (3, NOW - 7, b"", b"", [("", b"")]),
    *[(offset, NOW + offset, b"k", b"%d" % offset, []) for offset in range(4, 40)],
]


class SparkSide:
    """Spark's reader, for tasks that take stretches, as those in memory do."""

    def __init__(self, reader: SparkReader | TaskReader) -> None:
        self.reader = reader

    def read_slices(
        self,
        starts: Mapping[Partition, int],
        messages_max: int,
        on_slice: OnSlice,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        self.reader.read_slices(
            starts,
            messages_max,
            lambda ranges, source: on_slice(ranges, SparkSideSource(source)),
            options,
        )

    def read_ranges(self, ranges: Ranges, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Source:
        return SparkSideSource(self.reader.read_ranges(ranges, options))


class SparkSideSource:
    """Spark's source, for tasks that take stretches."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def map(self, task: Task, *, has_small_messages: bool = False) -> list[bytes]:
        return self.source.map(
            lambda partition, whole, batches: task(partition, whole, message_batches(batches)),
            has_small_messages=has_small_messages,
        )


class World:
    """A topic of three partitions with the same 40 messages in 0 and 1 and none in 2, and its
    reader.
    """

    def __init__(
        self, topic: str, reader: Reader, delete_records: Callable[[Partition, int], None]
    ) -> None:
        self.reader, self.delete_records = reader, delete_records
        self.a, self.b, self.empty = (Partition(topic, number) for number in range(3))


def in_memory(topic: str) -> World:
    """The fake."""
    kafka = MemoryKafka()
    kafka.create(topic, 3)
    for number in (0, 1):
        for _, timestamp, key, value, headers in MESSAGES:
            kafka.produce(
                topic, key, value, partition=number, timestamp=timestamp, headers=tuple(headers)
            )
    return World(topic, MemoryReader(kafka, cuts=lambda count: [count // 3]), kafka.delete_records)


def for_real(topic: str, servers: str, spark: Any, reads: str) -> World:
    """A broker and Spark, which reads, or lets its tasks read."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5, "log_level": 0})
    for number in (0, 1):
        for _, timestamp, key, value, headers in MESSAGES:
            producer.produce(topic, value, key, number, timestamp=timestamp, headers=headers)
    assert producer.flush(WAIT_SECONDS) == 0
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})

    def delete_records(partition: Partition, before: int) -> None:
        place = TopicPartition(partition.topic, partition.number, before)
        admin.delete_records([place])[place].result(WAIT_SECONDS)

    settings = {"bootstrap.servers": servers}
    if reads != "spark":
        log = KafkaLog(settings)
        reader = TaskReader(
            spark,
            KafkaRangeReader(settings, retry_seconds_max=5),
            lambda: log.bounds(re.escape(topic)),
            has_queries=reads == "task",
        )
        return World(topic, SparkSide(reader), delete_records)
    kafka = client.java_settings({**settings, "isolation.level": "read_committed"})
    return World(topic, SparkSide(SparkReader(spark, kafka)), delete_records)


@pytest.fixture(params=["memory", "spark", "task", "task without queries"])
def world(request: pytest.FixtureRequest, topic_name: Callable[[], str]) -> World:
    """A world of either kind."""
    if request.param == "memory":
        return in_memory(topic_name())
    name = request.getfixturevalue("topic")(3)
    servers = request.getfixturevalue("broker").bootstrap_servers
    assert len(KafkaLog({"bootstrap.servers": servers}).bounds(re.escape(name))) == 3
    return for_real(name, servers, request.getfixturevalue("spark")(), request.param)


def telling() -> Task:
    """A task that tells which partition it was given, and every message of it, all in its range."""

    def task(partition: Partition, whole: OffsetRange, given: Iterable[MessageBatch]) -> bytes:
        seen = [
            (
                stretch.start + i,
                int(stretch.timestamps[i]),
                stretch.keys[i],
                stretch.values[i],
                headers,
            )
            for stretch in given
            for i, headers in enumerate(stretch.headers or [()] * len(stretch))
        ]
        outside = [message[0] for message in seen if message[0] not in whole]
        if outside:
            raise LookupError(f"{outside} are not in {whole}")
        return msgspec.msgpack.encode((partition, seen))

    return task


def told(answers: list[bytes]) -> dict[Partition, list[Seen]]:
    """What tasks told; no partition had two of them."""
    found = [
        msgspec.msgpack.decode(answer, type=tuple[Partition, list[Seen]]) for answer in answers
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_exactly_these_ranges_reach_one_task_each(world: World) -> None:
    """Offsets in order, messages whole; a range without messages has no task and no answer."""
    ranges = {
        world.a: OffsetRange(0, 40),
        world.b: OffsetRange(3, 11),
        world.empty: OffsetRange(0, 0),
    }
    found = told(world.reader.read_ranges(ranges, ALL).map(telling()))
    assert found == {world.a: MESSAGES, world.b: MESSAGES[3:11]}


def test_a_source_can_be_read_again(world: World) -> None:
    """A refold sees the very same messages, of exact ranges and of a slice alike."""
    source = world.reader.read_ranges({world.a: OffsetRange(38, 40)}, ALL)
    assert told(source.map(telling())) == told(source.map(telling())) == {world.a: MESSAGES[38:]}
    twice: list[dict[Partition, list[Seen]]] = []

    def on_slice(_: Ranges, source: Source) -> bool:
        twice.extend(told(source.map(telling())) for _ in range(2))
        return True

    world.reader.read_slices({world.a: 38}, 10, on_slice, ALL)
    assert twice == [{world.a: MESSAGES[38:]}] * 2


def test_what_a_task_raises_is_an_error_of_ours_or_of_spark(world: World) -> None:
    """It is never taken for a failure to read, which discovery would look for in the log."""

    def task(partition: Partition, _: OffsetRange, given: Iterable[MessageBatch]) -> bytes:
        list(given)
        raise BrokenPromiseError("mine", partition=str(partition))

    source = world.reader.read_ranges({world.a: OffsetRange(0, 2)})
    if isinstance(world.reader, SparkSide) and isinstance(world.reader.reader, SparkReader):
        pytest.skip("Spark passes on the text alone; run_task never raises such an error")
    with pytest.raises(BrokenPromiseError, match="mine") as caught:
        source.map(task)
    assert caught.value.fields == {"partition": str(world.a)}


class Slices:
    """Takes slices and looks into each."""

    def __init__(self, *, look: bool = True, enough: int | None = None) -> None:
        self.look, self.enough = look, enough
        self.ranges: list[Ranges] = []
        self.seen: dict[Partition, list[Seen]] = {}

    def __call__(self, ranges: Ranges, source: Source) -> bool:
        """One slice: what its tasks see is what its ranges say."""
        self.ranges.append(ranges)
        if self.look:
            found = told(source.map(telling()))
            for partition, whole in ranges.items():
                assert [one[0] for one in found.get(partition, [])] == list(
                    range(whole.start, whole.end)
                )
            for partition, seen in found.items():
                self.seen.setdefault(partition, []).extend(seen)
        return self.enough is None or len(self.ranges) < self.enough


def test_following_goes_from_the_starts_to_the_ends_in_slices(world: World) -> None:
    """No message is skipped or seen twice, and no slice is much larger than asked for."""
    slices = Slices()
    starts = {world.a: 0, world.b: 30, world.empty: 0}
    world.reader.read_slices(starts, 30, slices, ALL)
    assert slices.seen == {world.a: MESSAGES, world.b: MESSAGES[30:]}
    assert len(slices.ranges) >= 2
    for ranges in slices.ranges:
        assert set(ranges) <= set(starts)
        assert sum(map(len, ranges.values())) <= 30 + len(starts)


def test_where_nothing_is_new_no_slice_has_a_message(world: World) -> None:
    """Starts at the log ends are caught up."""
    slices = Slices(look=False)
    world.reader.read_slices({world.a: 40, world.empty: 0}, 10, slices)
    assert sum(len(whole) for ranges in slices.ranges for whole in ranges.values()) == 0


def test_a_slice_that_says_enough_is_the_last(world: World) -> None:
    """Reading ends without an error."""
    slices = Slices(look=False, enough=1)
    world.reader.read_slices({world.a: 0}, 10, slices)
    (only,) = slices.ranges
    assert only == {world.a: OffsetRange(0, 10)}


def test_what_a_slice_raises_reaches_the_caller_as_itself(world: World) -> None:
    """The very same exception, whatever is between: the commit rule speaks through it."""
    raised = LookupError("mine")

    def on_slice(_: Ranges, __: Source) -> bool:
        raise raised

    with pytest.raises(LookupError) as caught:
        world.reader.read_slices({world.a: 0}, 10, on_slice)
    assert caught.value is raised


def test_messages_that_are_gone_cannot_be_read(world: World) -> None:
    """Neither exactly nor following: Kafka's silence is never taken for an empty range."""
    world.delete_records(world.a, 20)
    with pytest.raises(SourceFailedError):
        world.reader.read_ranges({world.a: OffsetRange(10, 30)}).map(telling())
    slices = Slices()
    with pytest.raises(SourceFailedError):
        world.reader.read_slices({world.a: 10, world.b: 0}, 100, slices)
    assert slices.seen == {}
    assert told(world.reader.read_ranges({world.a: OffsetRange(20, 30)}, ALL).map(telling())) == {
        world.a: MESSAGES[20:30]
    }


def test_a_log_that_ends_before_the_start_cannot_be_followed(world: World) -> None:
    """Kafka lost its end, or the topic is another one: that is never caught up."""
    slices = Slices(look=False)
    with pytest.raises(SourceFailedError):
        world.reader.read_slices({world.a: 60, world.b: 0}, 100, slices)
    assert slices.ranges == []
