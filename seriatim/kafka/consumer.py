"""The consumer: messages of the past read again from Kafka, plainly. No Spark, no group, no commit.

Next room: spark.py reads for the fold; kafka.py asks for topics and bounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import KafkaSilentError
from seriatim.kafka.client import create_client

MESSAGES_PER_POLL_MAX = 5_000
FOLLOW_UP_TIMEOUT_SECONDS = 0.05


class KafkaPastMessageReader:
    """Ranges of partitions, as a consumer of this isolation sees them."""

    def __init__(
        self,
        client_settings: Mapping[str, str],
        isolation: str = "read_committed",
        timeout_seconds: float = 30,
        *,
        with_headers: bool = False,
    ) -> None:
        self.servers, self.timeout_seconds, self.with_headers = (
            client_settings["bootstrap.servers"],
            timeout_seconds,
            with_headers,
        )
        quiet = {**client_settings, "log_level": 0}
        self._admin = create_client(AdminClient, quiet)
        self._create_consumer: Consumer | None = None
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

    def read(self, partition: Partition, offset_range: OffsetRange) -> Iterator[MessageBatch]:
        """The messages of a range that are there, in stretches without a hole."""
        if not len(offset_range):
            return
        if self._create_consumer is None:
            self._create_consumer = create_client(Consumer, self._settings)
        self._create_consumer.assign(
            [TopicPartition(partition.topic, partition.number, offset_range.start)]
        )
        more = True
        while more:
            found, more = self._poll_messages(self._create_consumer, offset_range)
            yield from _message_batches(found, with_headers=self.with_headers)

    def close(self) -> None:
        """Leave Kafka."""
        if self._create_consumer is not None:
            self._create_consumer.close()
            self._create_consumer = None

    def is_compacted(self, topic: str) -> bool:
        """Whether a topic may lose messages in the middle."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        try:
            answer = self._admin.describe_configs([resource], request_timeout=self.timeout_seconds)[
                resource
            ].result()
        except KafkaException as error:
            raise self._unreachable_error(error.args[0]) from None
        return "compact" in str(answer["cleanup.policy"].value)

    def _poll_messages(
        self, consumer: Consumer, offset_range: OffsetRange
    ) -> tuple[list[Any], bool]:
        """The next messages, and whether the range goes on after them."""
        until = time.monotonic() + self.timeout_seconds
        while time.monotonic() < until:
            found: list[Any] = []
            for message in _consume_available(consumer):
                error = message.error()
                if error is not None and error.code() == KafkaError._PARTITION_EOF:
                    return found, False
                if error is not None:
                    raise self._unreachable_error(error)
                if message.offset() >= offset_range.end:
                    return found, False
                found.append(message)
            if found:
                return found, found[-1].offset() + 1 < offset_range.end
        raise KafkaSilentError(
            f"Kafka at {self.servers} sends no messages of {offset_range}",
            next="check the broker, then try again: nothing was changed",
        )

    def _unreachable_error(self, error: Any) -> KafkaSilentError:
        return KafkaSilentError(
            f"Kafka at {self.servers} does not answer: {error.str()}",
            next="check SERIATIM_KAFKA_BOOTSTRAP_SERVERS and the broker, then try again",
        )


def _consume_available(consumer: Consumer) -> list[Any]:
    """What is there as soon as anything is: a call for many waits until it has them, or its time is
    over.
    """
    first = consumer.consume(1, timeout=1.0)
    return (
        first + consumer.consume(MESSAGES_PER_POLL_MAX, timeout=FOLLOW_UP_TIMEOUT_SECONDS)
        if first
        else first
    )


def _message_batches(messages: list[Any], *, with_headers: bool = False) -> Iterator[MessageBatch]:
    """Messages in order, cut wherever an offset is missing."""
    begin = 0
    for end in range(1, len(messages) + 1):
        if end == len(messages) or messages[end].offset() != messages[end - 1].offset() + 1:
            part = messages[begin:end]
            yield MessageBatch(
                part[0].offset(),
                [message.timestamp()[1] for message in part],
                [message.key() for message in part],
                [message.value() for message in part],
                [message.headers() or [] for message in part] if with_headers else None,
            )
            begin = end
