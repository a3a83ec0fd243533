"""The contract of `Log`: what discovery sees of Kafka, the same in memory and on a real broker."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from seriatim.adapters.kafka import KafkaLog
from seriatim.adapters.memory import MemoryKafka
from seriatim.core.errors import PlatformError
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.slice import Bounds

WAIT_SECONDS = 30


class MemorySide:
    """The fake, and ways to change what it shows."""

    def __init__(self) -> None:
        self.log = MemoryKafka()

    def create(self, topic: str, partitions: int = 1) -> None:
        self.log.create(topic, partitions)

    def delete(self, topic: str) -> None:
        self.log.delete(topic)

    def add_partitions(self, topic: str, count: int) -> None:
        self.log.add_partitions(topic, count)

    def send(self, topic: str, partition: int, count: int) -> None:
        for _ in range(count):
            self.log.produce(topic, b"k", b"v", partition=partition)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        self.log.delete_records(Partition(topic, partition), before)


class RealSide:
    """A broker, and the same ways to change what it shows; each returns when the broker shows it."""

    def __init__(self, servers: str) -> None:
        self.log = KafkaLog({"bootstrap.servers": servers})
        self.admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        self.producer = Producer({"bootstrap.servers": servers, "linger.ms": 0, "log_level": 0})

    def create(self, topic: str, partitions: int = 1) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                self.admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(WAIT_SECONDS)
                break
            except Exception:  # just deleted: the broker may still be at it
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        self._until(topic, partitions)

    def delete(self, topic: str) -> None:
        self.admin.delete_topics([topic])[topic].result(WAIT_SECONDS)
        self._until(topic, 0)

    def add_partitions(self, topic: str, count: int) -> None:
        total = len(self.log.bounds(re.escape(topic))) + count
        self.admin.create_partitions([NewPartitions(topic, total)])[topic].result(WAIT_SECONDS)
        self._until(topic, total)

    def send(self, topic: str, partition: int, count: int) -> None:
        for _ in range(count):
            self.producer.produce(topic, b"v", b"k", partition)
        assert self.producer.flush(WAIT_SECONDS) == 0

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        for answer in self.admin.delete_records([TopicPartition(topic, partition, before)]).values():
            answer.result(WAIT_SECONDS)

    def _until(self, topic: str, partitions: int) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while len(self.log.bounds(re.escape(topic))) != partitions and time.monotonic() < until:
            time.sleep(0.05)


Side = MemorySide | RealSide


@pytest.fixture(params=["memory", "real"])
def side(request: pytest.FixtureRequest) -> Side:
    """A log of either kind."""
    if request.param == "memory":
        return MemorySide()
    return RealSide(request.getfixturevalue("broker").bootstrap_servers)


@pytest.fixture
def name(topic_name: Callable[[], str]) -> str:
    """A name that no other topic begins with."""
    return topic_name()


def offsets(bounds: dict[Partition, Bounds]) -> dict[int, tuple[int, int]]:
    """Log start and log end by partition number."""
    return {partition.number: (seen.log_start, seen.log_end) for partition, seen in bounds.items()}


def only_id(bounds: dict[Partition, Bounds]) -> str:
    """The one topic id that all partitions have."""
    (found,) = {seen.topic_id for seen in bounds.values()}
    return found


def test_a_topic_is_meant_by_its_whole_name(side: Side, name: str) -> None:
    """A pattern that matches the beginning or a part of a name does not mean that topic."""
    for topic in (f"{name}-a", f"{name}-ab", f"x{name}-a"):
        side.create(topic)
    assert set(side.log.bounds(f"{name}-a")) == {Partition(f"{name}-a", 0)}
    both = side.log.bounds(f"{name}-[ab]+")
    assert set(both) == {Partition(f"{name}-a", 0), Partition(f"{name}-ab", 0)}
    assert len({seen.topic_id for seen in both.values()}) == 2


def test_nothing_matches_is_no_error(side: Side, name: str) -> None:
    """No topics, no partitions: an empty answer."""
    assert side.log.bounds(f"{name}.*") == {}


def test_a_log_begins_at_0_and_ends_after_its_last_message(side: Side, name: str) -> None:
    """Every partition is there, also those without a message, all under one topic id."""
    side.create(name, 2)
    assert offsets(side.log.bounds(name)) == {0: (0, 0), 1: (0, 0)}
    side.send(name, 1, 3)
    found = side.log.bounds(name)
    assert offsets(found) == {0: (0, 0), 1: (0, 3)}
    assert only_id(found)


def test_deleted_messages_move_the_log_start_alone(side: Side, name: str) -> None:
    """The log end stays, even when nothing is left."""
    side.create(name)
    side.send(name, 0, 5)
    side.delete_records(name, 0, 2)
    assert offsets(side.log.bounds(name)) == {0: (2, 5)}
    side.delete_records(name, 0, 5)
    assert offsets(side.log.bounds(name)) == {0: (5, 5)}
    side.send(name, 0, 1)
    assert offsets(side.log.bounds(name)) == {0: (5, 6)}


def test_added_partitions_belong_to_the_same_topic(side: Side, name: str) -> None:
    """They begin at 0 under the id that the topic had before."""
    side.create(name)
    side.send(name, 0, 2)
    before = only_id(side.log.bounds(name))
    side.add_partitions(name, 2)
    found = side.log.bounds(name)
    assert offsets(found) == {0: (0, 2), 1: (0, 0), 2: (0, 0)}
    assert only_id(found) == before


def test_a_topic_made_again_has_another_id(side: Side, name: str) -> None:
    """Deleted it is gone; made again it begins at 0 and is told apart by its id alone."""
    side.create(name)
    side.send(name, 0, 2)
    before = only_id(side.log.bounds(name))
    side.delete(name)
    assert side.log.bounds(name) == {}
    side.create(name)
    side.send(name, 0, 2)
    found = side.log.bounds(name)
    assert offsets(found) == {0: (0, 2)}
    assert only_id(found) != before


def test_a_broker_that_does_not_answer_is_platform_trouble() -> None:
    """The servers are named, and what to check."""
    log = KafkaLog({"bootstrap.servers": "127.0.0.1:1"}, timeout_seconds=0.3)
    with pytest.raises(PlatformError, match=r"127\.0\.0\.1:1") as caught:
        log.bounds(".*")
    assert "SERIATIM_KAFKA_BOOTSTRAP_SERVERS" in caught.value.next


def test_how_large_messages_are(side: Side, name: str) -> None:
    """A few of the first ones show it; an empty partition says nothing."""
    topic = f"{name}-sizes"
    side.create(topic, 2)
    side.send(topic, 0, 30)
    ranges = {Partition(topic, 0): OffsetRange(0, 30), Partition(topic, 1): OffsetRange(0, 0)}
    found = side.log.message_bytes(ranges)
    assert set(found) == {Partition(topic, 0)}
    assert 1 < found[Partition(topic, 0)] < 50
