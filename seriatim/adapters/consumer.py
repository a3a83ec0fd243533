"""The consumer: messages of the past read again from Kafka, plainly. No Spark, no group, no commit.

Next room: spark.py reads for the fold; kafka.py asks for topics and bounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from seriatim.client import made
from seriatim.core.errors import KafkaSilentError
from seriatim.core.message import Stretch
from seriatim.core.offsets import OffsetRange, Partition

MESSAGES_MAX = 5_000
MORE_SECONDS = 0.05


class KafkaReread:
    """Ranges of partitions, as a consumer of this isolation sees them."""

    def __init__(
        self,
        client: Mapping[str, str],
        isolation: str = "read_committed",
        timeout_seconds: float = 30,
        *,
        headers: bool = False,
    ) -> None:
        self.servers, self.timeout_seconds, self.headers = client["bootstrap.servers"], timeout_seconds, headers
        quiet = {**client, "log_level": 0}
        self._admin = made(AdminClient, quiet)
        self._consumer: Consumer | None = None
        self._settings: dict[str, Any] = {
            **quiet,
            "group.id": "seriatim-verify",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": isolation,
            "check.crcs": True,
            # what is read is there: a fetch that waits at the log's end would only keep the next range waiting
            "fetch.wait.max.ms": 10,
        }

    def read(self, partition: Partition, whole: OffsetRange) -> Iterator[Stretch]:
        """The messages of a range that are there, in stretches without a hole."""
        if not len(whole):
            return
        if self._consumer is None:
            self._consumer = made(Consumer, self._settings)
        self._consumer.assign([TopicPartition(partition.topic, partition.number, whole.start)])
        more = True
        while more:
            found, more = self._some(self._consumer, whole)
            yield from _stretches(found, headers=self.headers)

    def close(self) -> None:
        """Leave Kafka."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def compacts(self, topic: str) -> bool:
        """Whether a topic may lose messages in the middle."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        try:
            answer = self._admin.describe_configs([resource], request_timeout=self.timeout_seconds)[resource].result()
        except KafkaException as error:
            raise self._unreachable(error.args[0]) from None
        return "compact" in str(answer["cleanup.policy"].value)

    def _some(self, consumer: Consumer, whole: OffsetRange) -> tuple[list[Any], bool]:
        """The next messages, and whether the range goes on after them."""
        until = time.monotonic() + self.timeout_seconds
        while time.monotonic() < until:
            found: list[Any] = []
            for message in _next(consumer):
                error = message.error()
                if error is not None and error.code() == KafkaError._PARTITION_EOF:
                    return found, False
                if error is not None:
                    raise self._unreachable(error)
                if message.offset() >= whole.end:
                    return found, False
                found.append(message)
            if found:
                return found, found[-1].offset() + 1 < whole.end
        raise KafkaSilentError(
            f"Kafka at {self.servers} sends no messages of {whole}",
            next="check the broker, then try again: nothing was changed",
        )

    def _unreachable(self, error: Any) -> KafkaSilentError:
        return KafkaSilentError(
            f"Kafka at {self.servers} does not answer: {error.str()}",
            next="check SERIATIM_KAFKA_BOOTSTRAP_SERVERS and the broker, then try again",
        )


def _next(consumer: Consumer) -> list[Any]:
    """What is there as soon as anything is: a call for many waits until it has them, or its time is over."""
    first = consumer.consume(1, timeout=1.0)
    return first + consumer.consume(MESSAGES_MAX, timeout=MORE_SECONDS) if first else first


def _stretches(messages: list[Any], *, headers: bool = False) -> Iterator[Stretch]:
    """Messages in order, cut wherever an offset is missing."""
    begin = 0
    for end in range(1, len(messages) + 1):
        if end == len(messages) or messages[end].offset() != messages[end - 1].offset() + 1:
            part = messages[begin:end]
            yield Stretch(
                part[0].offset(),
                [message.timestamp()[1] for message in part],
                [message.key() for message in part],
                [message.value() for message in part],
                [message.headers() or [] for message in part] if headers else None,
            )
            begin = end
