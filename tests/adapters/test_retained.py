"""The contract of `Log.retained`: what Kafka holds and for how long, the same in memory and on a real broker."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from seriatim.adapters.kafka import KafkaLog, _largest
from seriatim.adapters.memory import MemoryKafka
from seriatim.core.errors import PlatformError
from seriatim.core.offsets import Partition
from seriatim.core.retention import Retained, Rules
from seriatim.core.slice import Bounds

NOW_MS = round(time.time() * 1000)
WAIT_SECONDS = 30


class MemorySide:
    """The fake."""

    def __init__(self) -> None:
        self.log = MemoryKafka()

    def create(self, topic: str, partitions: int, rules: Rules) -> None:
        self.log.create(topic, partitions, rules)

    def send(self, topic: str, partition: int, ages: list[int], size: int = 100) -> None:
        for age in ages:
            self.log.produce(topic, b"k", bytes(size), partition=partition, timestamp=NOW_MS - age)

    def delete_records(self, topic: str, before: int) -> None:
        self.log.delete_records(Partition(topic, 0), before)


class RealSide:
    """A broker."""

    def __init__(self, servers: str) -> None:
        self.log = KafkaLog({"bootstrap.servers": servers})
        self.admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        self.producer = Producer({"bootstrap.servers": servers, "linger.ms": 0, "log_level": 0})

    def create(self, topic: str, partitions: int, rules: Rules) -> None:
        settings = {
            "retention.ms": str(rules.retention_ms),
            "retention.bytes": str(rules.retention_bytes),
            "cleanup.policy": "delete" if rules.deletes else "compact",
        }
        self.admin.create_topics([NewTopic(topic, partitions, 1, config=settings)])[topic].result(WAIT_SECONDS)
        until = time.monotonic() + WAIT_SECONDS
        while len(self.log.bounds(re.escape(topic))) != partitions and time.monotonic() < until:
            time.sleep(0.05)

    def send(self, topic: str, partition: int, ages: list[int], size: int = 100) -> None:
        for age in ages:
            self.producer.produce(topic, bytes(size), b"k", partition, timestamp=NOW_MS - age)
        assert self.producer.flush(WAIT_SECONDS) == 0

    def delete_records(self, topic: str, before: int) -> None:
        for answer in self.admin.delete_records([TopicPartition(topic, 0, before)]).values():
            answer.result(WAIT_SECONDS)


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


def seen(side: Side, name: str, *frontiers: int) -> list[Retained]:
    """What is held of each partition, seen from these frontiers."""
    bounds = side.log.bounds(re.escape(name))
    found = side.log.retained(bounds, {Partition(name, number): at for number, at in enumerate(frontiers)})
    return [found[Partition(name, number)] for number in range(len(frontiers))]


def test_timestamps_are_those_of_the_log_start_the_frontier_and_the_newest(side: Side, name: str) -> None:
    """In the middle, at the log start, at the log end, and in a partition without messages."""
    side.create(name, 4, Rules(retention_ms=86_400_000))
    for number in range(3):
        side.send(name, number, [5000, 4000, 3000, 2000])
    found = seen(side, name, 2, 0, 4, 0)
    ages = [[None if at is None else NOW_MS - at for at in (h.oldest_ms, h.frontier_ms, h.newest_ms)] for h in found]
    assert ages == [[5000, 3000, 2000], [5000, 5000, 2000], [5000, None, 2000], [None, None, None]]
    assert [(held.log_start, held.frontier, held.log_end) for held in found] == [
        (0, 2, 4),
        (0, 0, 4),
        (0, 4, 4),
        (0, 0, 0),
    ]
    assert {held.rules for held in found} == {Rules(retention_ms=86_400_000)}
    assert {held.bytes for held in found} == {None}


def test_the_newest_is_the_highest_timestamp(side: Side, name: str) -> None:
    """Producers' clocks differ: the last message need not be the youngest."""
    side.create(name, 1, Rules())
    side.send(name, 0, [5000, 1000, 3000])
    (held,) = seen(side, name, 1)
    assert (held.newest_ms, held.frontier_ms) == (NOW_MS - 1000, NOW_MS - 1000)


def test_a_frontier_that_is_gone_is_seen_from_the_log_start(side: Side, name: str) -> None:
    """What comes next is the oldest message that is left."""
    side.create(name, 1, Rules(retention_ms=86_400_000))
    side.send(name, 0, [5000, 4000, 3000])
    side.delete_records(name, 2)
    (held,) = seen(side, name, 1)
    assert (held.log_start, held.frontier_ms, held.lag) == (2, NOW_MS - 3000, 1)


def test_sizes_are_told_where_bytes_are_limited(side: Side, name: str) -> None:
    """As stored, with what the log adds to each message."""
    side.create(name, 2, Rules(retention_bytes=10_000_000))
    side.send(name, 0, [1000] * 100, size=10_000)
    first, second = seen(side, name, 0, 0)
    assert first.bytes == pytest.approx(1_000_000, rel=0.02)
    assert second.bytes == 0


@pytest.mark.parametrize("rules", [Rules(), Rules(retention_ms=1000, deletes=False), Rules(retention_bytes=5)])
def test_settings_are_read_as_they_are(side: Side, name: str, rules: Rules) -> None:
    """-1 is no limit; a topic that is only compacted deletes nothing."""
    side.create(name, 1, rules)
    assert seen(side, name, 0)[0].rules == rules


def test_a_topic_that_vanished_is_left_out(side: Side, name: str) -> None:
    """Between asking for bounds and for what is held: no error, no answer."""
    place = Partition(f"{name}-gone", 0)
    assert side.log.retained({place: Bounds("id", 0, 5)}, {place: 2}) == {}
    assert side.log.retained({}, {}) == {}


def test_of_several_replicas_the_largest_counts() -> None:
    """One that is behind, or moves to another disk, is smaller than the log."""
    replicas = [{"partition_index": 0, "partition_size": size} for size in (5, 9)]
    answers = [{"log_dirs": [{"topics": [{"name": "a", "partitions": [replica]}]}]} for replica in replicas]
    assert _largest(answers) == {Partition("a", 0): 9}


def test_a_broker_that_does_not_answer_is_platform_trouble() -> None:
    """Never an empty answer, which would say that nothing is in danger."""
    log = KafkaLog({"bootstrap.servers": "127.0.0.1:1"}, timeout_seconds=0.3)
    with pytest.raises(PlatformError, match=r"127\.0\.0\.1:1"):
        log.retained({Partition("a", 0): Bounds("id", 0, 5)}, {Partition("a", 0): 2})
    with pytest.raises(PlatformError, match=r"no message of a/0 within 0.3 s"):
        log._timestamps_at({Partition("a", 0): 2})
