"""The contract of `Log`: what discovery sees of Kafka, the same in memory and on a real broker."""

from __future__ import annotations

import pytest

from seriatim.engine.offsets import Bounds, OffsetRange, Partition
from seriatim.errors import PlatformError
from seriatim.kafka.log import KafkaLog
from tests.contracts.brokers import Broker


def offsets(bounds: dict[Partition, Bounds]) -> dict[int, tuple[int, int]]:
    """Log start and log end by partition number."""
    return {partition.number: (seen.log_start, seen.log_end) for partition, seen in bounds.items()}


def only_id(bounds: dict[Partition, Bounds]) -> str:
    """The one topic id that all partitions have."""
    (found,) = {seen.topic_id for seen in bounds.values()}
    return found


def test_a_topic_is_meant_by_its_whole_name(kafka: Broker, name: str) -> None:
    """A pattern that matches the beginning or a part of a name does not mean that topic."""
    for topic in (f"{name}-a", f"{name}-ab", f"x{name}-a"):
        kafka.create(topic)
    assert set(kafka.log.bounds(f"{name}-a")) == {Partition(f"{name}-a", 0)}
    both = kafka.log.bounds(f"{name}-[ab]+")
    assert set(both) == {Partition(f"{name}-a", 0), Partition(f"{name}-ab", 0)}
    assert len({seen.topic_id for seen in both.values()}) == 2


def test_nothing_matches_is_no_error(kafka: Broker, name: str) -> None:
    """No topics, no partitions: an empty answer."""
    assert kafka.log.bounds(f"{name}.*") == {}


def test_a_log_begins_at_0_and_ends_after_its_last_message(kafka: Broker, name: str) -> None:
    """Every partition is there, also those without a message, all under one topic id."""
    kafka.create(name, 2)
    assert offsets(kafka.log.bounds(name)) == {0: (0, 0), 1: (0, 0)}
    kafka.send(name, 1, [0] * 3)
    found = kafka.log.bounds(name)
    assert offsets(found) == {0: (0, 0), 1: (0, 3)}
    assert only_id(found)


def test_deleted_messages_move_the_log_start_alone(kafka: Broker, name: str) -> None:
    """The log end stays, even when nothing is left."""
    kafka.create(name)
    kafka.send(name, 0, [0] * 5)
    kafka.delete_records(name, 0, 2)
    assert offsets(kafka.log.bounds(name)) == {0: (2, 5)}
    kafka.delete_records(name, 0, 5)
    assert offsets(kafka.log.bounds(name)) == {0: (5, 5)}
    kafka.send(name, 0, [0])
    assert offsets(kafka.log.bounds(name)) == {0: (5, 6)}


def test_added_partitions_belong_to_the_same_topic(kafka: Broker, name: str) -> None:
    """They begin at 0 under the id that the topic had before."""
    kafka.create(name)
    kafka.send(name, 0, [0] * 2)
    before = only_id(kafka.log.bounds(name))
    kafka.add_partitions(name, 2)
    found = kafka.log.bounds(name)
    assert offsets(found) == {0: (0, 2), 1: (0, 0), 2: (0, 0)}
    assert only_id(found) == before


def test_a_topic_made_again_has_another_id(kafka: Broker, name: str) -> None:
    """Deleted it is gone; made again it begins at 0 and is told apart by its id alone."""
    kafka.create(name)
    kafka.send(name, 0, [0] * 2)
    before = only_id(kafka.log.bounds(name))
    kafka.delete(name)
    assert kafka.log.bounds(name) == {}
    kafka.create(name)
    kafka.send(name, 0, [0] * 2)
    found = kafka.log.bounds(name)
    assert offsets(found) == {0: (0, 2)}
    assert only_id(found) != before


def test_a_broker_that_does_not_answer_is_platform_trouble() -> None:
    """The servers are named, and what to check."""
    log = KafkaLog({"bootstrap.servers": "127.0.0.1:1"}, timeout_seconds=0.3)
    with pytest.raises(PlatformError, match=r"127\.0\.0\.1:1") as caught:
        log.bounds(".*")
    assert "SERIATIM_KAFKA_BOOTSTRAP_SERVERS" in caught.value.next


def test_how_large_messages_are(kafka: Broker, name: str) -> None:
    """A few of the first ones show it; an empty partition says nothing."""
    topic = f"{name}-sizes"
    kafka.create(topic, 2)
    kafka.send(topic, 0, [0] * 30)
    ranges = {Partition(topic, 0): OffsetRange(0, 30), Partition(topic, 1): OffsetRange(0, 0)}
    found = kafka.log.sample_message_bytes(ranges)
    assert set(found) == {Partition(topic, 0)}
    assert 1 < found[Partition(topic, 0)] < 50
