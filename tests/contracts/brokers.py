"""Kafka of both kinds, in memory and a real broker, with the same methods to change topics.

Next: test_log.py and test_retained_messages.py hold both to the contract of `Log`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from seriatim.engine.offsets import Partition
from seriatim.engine.retention import RetentionRules
from seriatim.kafka.log import KafkaLog
from seriatim.memory import MemoryKafka

WAIT_SECONDS = 180
NOW_MS = round(time.time() * 1000)


class MemoryBroker:
    """The broker in memory."""

    def __init__(self) -> None:
        self.log = MemoryKafka()

    def create(self, topic: str, partitions: int = 1, rules: RetentionRules | None = None) -> None:
        """Create a topic."""
        self.log.create(topic, partitions, rules)

    def delete(self, topic: str) -> None:
        """Delete a topic."""
        self.log.delete(topic)

    def add_partitions(self, topic: str, count: int) -> None:
        """Give a topic more partitions."""
        self.log.add_partitions(topic, count)

    def send(self, topic: str, partition: int, ages: Sequence[int], value: bytes = b"v") -> None:
        """One message of each age in milliseconds."""
        for age in ages:
            self.log.produce(topic, b"k", value, partition=partition, timestamp=NOW_MS - age)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Delete the oldest messages."""
        self.log.delete_records(Partition(topic, partition), before)


class RealBroker:
    """A real broker; each method returns when the broker shows the change."""

    def __init__(self, servers: str) -> None:
        self.log = KafkaLog({"bootstrap.servers": servers})
        self.admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        self.producer = Producer({"bootstrap.servers": servers, "linger.ms": 0, "log_level": 0})

    def create(self, topic: str, partitions: int = 1, rules: RetentionRules | None = None) -> None:
        """Create a topic."""
        new_topic = NewTopic(topic, partitions, 1, config=_settings(rules))
        deadline = time.monotonic() + WAIT_SECONDS
        # A topic of that name may just have been deleted: while the broker is still busy with that,
        # it refuses.
        while True:
            try:
                self.admin.create_topics([new_topic])[topic].result(WAIT_SECONDS)
                break
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self._wait_for_partitions(topic, partitions)

    def delete(self, topic: str) -> None:
        """Delete a topic."""
        self.admin.delete_topics([topic])[topic].result(WAIT_SECONDS)
        self._wait_for_partitions(topic, 0)

    def add_partitions(self, topic: str, count: int) -> None:
        """Give a topic more partitions."""
        total = len(self.log.bounds(re.escape(topic))) + count
        self.admin.create_partitions([NewPartitions(topic, total)])[topic].result(WAIT_SECONDS)
        self._wait_for_partitions(topic, total)

    def send(self, topic: str, partition: int, ages: Sequence[int], value: bytes = b"v") -> None:
        """One message of each age in milliseconds."""
        for age in ages:
            self.producer.produce(topic, value, b"k", partition, timestamp=NOW_MS - age)
        assert self.producer.flush(WAIT_SECONDS) == 0

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Delete the oldest messages."""
        for answer in self.admin.delete_records(
            [TopicPartition(topic, partition, before)]
        ).values():
            answer.result(WAIT_SECONDS)

    def _wait_for_partitions(self, topic: str, partitions: int) -> None:
        """Wait until the broker shows so many partitions of a topic, 0 for a deleted one."""
        deadline = time.monotonic() + WAIT_SECONDS
        while len(self.log.bounds(re.escape(topic))) != partitions:
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)


Broker = MemoryBroker | RealBroker


def _settings(rules: RetentionRules | None) -> dict[str, str]:
    if rules is None:
        return {}
    return {
        "retention.ms": str(rules.retention_ms),
        "retention.bytes": str(rules.retention_bytes),
        "cleanup.policy": "delete" if rules.has_delete_policy else "compact",
    }
