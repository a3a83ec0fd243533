"""The contract of `Log.retained`: what Kafka holds and for how long, the same in memory and on a
real broker.
"""

from __future__ import annotations

import re

import pytest

from seriatim.engine.offsets import Bounds, Partition
from seriatim.engine.retention import RetainedLog, RetentionRules
from seriatim.errors import PlatformError
from seriatim.kafka.log import KafkaLog, _largest_replicas
from tests.contracts.brokers import NOW_MS, Broker


def seen(kafka: Broker, name: str, *frontiers: int) -> list[RetainedLog]:
    """What is held of each partition, seen from these frontiers."""
    bounds = kafka.log.bounds(re.escape(name))
    found = kafka.log.read_retention(
        bounds, {Partition(name, number): at for number, at in enumerate(frontiers)}
    )
    return [found[Partition(name, number)] for number in range(len(frontiers))]


def test_timestamps_are_those_of_the_log_start_the_frontier_and_the_newest(
    kafka: Broker, name: str
) -> None:
    """In the middle, at the log start, at the log end, and in a partition without messages."""
    kafka.create(name, 4, RetentionRules(retention_ms=86_400_000))
    for number in range(3):
        kafka.send(name, number, [5000, 4000, 3000, 2000], bytes(100))
    found = seen(kafka, name, 2, 0, 4, 0)
    ages = [
        [None if at is None else NOW_MS - at for at in (h.oldest_ms, h.frontier_ms, h.newest_ms)]
        for h in found
    ]
    assert ages == [[5000, 3000, 2000], [5000, 5000, 2000], [5000, None, 2000], [None, None, None]]
    assert [(held.log_start, held.frontier, held.log_end) for held in found] == [
        (0, 2, 4),
        (0, 0, 4),
        (0, 4, 4),
        (0, 0, 0),
    ]
    assert {held.rules for held in found} == {RetentionRules(retention_ms=86_400_000)}
    assert {held.log_bytes for held in found} == {None}


def test_the_newest_is_the_highest_timestamp(kafka: Broker, name: str) -> None:
    """Producers' clocks differ: the last message need not be the youngest."""
    kafka.create(name, 1, RetentionRules())
    kafka.send(name, 0, [5000, 1000, 3000], bytes(100))
    (held,) = seen(kafka, name, 1)
    assert (held.newest_ms, held.frontier_ms) == (NOW_MS - 1000, NOW_MS - 1000)


def test_a_frontier_that_is_gone_is_seen_from_the_log_start(kafka: Broker, name: str) -> None:
    """What comes next is the oldest message that is left."""
    kafka.create(name, 1, RetentionRules(retention_ms=86_400_000))
    kafka.send(name, 0, [5000, 4000, 3000], bytes(100))
    kafka.delete_records(name, 0, 2)
    (held,) = seen(kafka, name, 1)
    assert (held.log_start, held.frontier_ms, held.lag) == (2, NOW_MS - 3000, 1)


def test_sizes_are_told_where_bytes_are_limited(kafka: Broker, name: str) -> None:
    """As stored, with what the log adds to each message."""
    kafka.create(name, 2, RetentionRules(retention_bytes=10_000_000))
    kafka.send(name, 0, [1000] * 100, value=bytes(10_000))
    first, second = seen(kafka, name, 0, 0)
    assert first.log_bytes == pytest.approx(1_000_000, rel=0.02)
    assert second.log_bytes == 0


@pytest.mark.parametrize(
    "rules",
    [
        RetentionRules(),
        RetentionRules(retention_ms=1000, has_delete_policy=False),
        RetentionRules(retention_bytes=5),
    ],
)
def test_settings_are_read_as_they_are(kafka: Broker, name: str, rules: RetentionRules) -> None:
    """-1 is no limit; a topic that is only compacted deletes nothing."""
    kafka.create(name, 1, rules)
    assert seen(kafka, name, 0)[0].rules == rules


def test_a_topic_that_vanished_is_left_out(kafka: Broker, name: str) -> None:
    """Between asking for bounds and for what is held: no error, no answer."""
    place = Partition(f"{name}-gone", 0)
    assert kafka.log.read_retention({place: Bounds("id", 0, 5)}, {place: 2}) == {}
    assert kafka.log.read_retention({}, {}) == {}


def test_of_several_replicas_the_largest_counts() -> None:
    """One that is behind, or moves to another disk, is smaller than the log."""
    replicas = [{"partition_index": 0, "partition_size": size} for size in (5, 9)]
    answers = [
        {"log_dirs": [{"topics": [{"name": "a", "partitions": [replica]}]}]} for replica in replicas
    ]
    assert _largest_replicas(answers) == {Partition("a", 0): 9}


def test_a_broker_that_does_not_answer_is_platform_trouble() -> None:
    """Never an empty answer, which would say that nothing is in danger."""
    log = KafkaLog({"bootstrap.servers": "127.0.0.1:1"}, timeout_seconds=0.3)
    with pytest.raises(PlatformError, match=r"127\.0\.0\.1:1"):
        log.read_retention({Partition("a", 0): Bounds("id", 0, 5)}, {Partition("a", 0): 2})
    with pytest.raises(PlatformError, match=r"no message of a/0 within 0.3 s"):
        log._timestamps_at({Partition("a", 0): 2})
