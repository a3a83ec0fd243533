"""Reads messages of the past from Kafka again, with a plain consumer: no Spark, no consumer group, no
commit.

Next: kafka/spark_reader.py reads for the fold; kafka/log.py has topics and bounds.
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
    """Reads ranges of partitions with this isolation."""

    def __init__(
        self,
        client_settings: Mapping[str, str],
        isolation: str = "read_committed",
        timeout_seconds: float = 30,
        *,
        with_headers: bool = False,
    ) -> None:
        self.servers = client_settings["bootstrap.servers"]
        self.timeout_seconds = timeout_seconds
        self.with_headers = with_headers
        quiet_settings = {**client_settings, "log_level": 0}
        self._admin = create_client(AdminClient, quiet_settings)
        self._consumer: Consumer | None = None
        self._settings: dict[str, Any] = {
            **quiet_settings,
            "group.id": "seriatim-verify",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": isolation,
            "check.crcs": True,
            # All messages of a range exist already. A fetch that waits at the end of the log for
            # more would only delay the next range.
            "fetch.wait.max.ms": 10,
        }

    def read(self, partition: Partition, offset_range: OffsetRange) -> Iterator[MessageBatch]:
        """The messages of a range, in batches without a hole."""
        if not len(offset_range):
            return
        if self._consumer is None:
            self._consumer = create_client(Consumer, self._settings)
        self._consumer.assign(
            [TopicPartition(partition.topic, partition.number, offset_range.start)]
        )
        has_more = True
        while has_more:
            messages, has_more = self._poll_messages(self._consumer, offset_range)
            yield from _message_batches(messages, with_headers=self.with_headers)

    def close(self) -> None:
        """Close the connection to Kafka. It is opened again by the next read."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def is_compacted(self, topic: str) -> bool:
        """Whether a topic is compacted, so that messages may be missing in the middle."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        try:
            answers = self._admin.describe_configs([resource], request_timeout=self.timeout_seconds)
            topic_settings = answers[resource].result()
        except KafkaException as error:
            raise self._unreachable_error(error.args[0]) from None
        return "compact" in str(topic_settings["cleanup.policy"].value)

    def _poll_messages(
        self, consumer: Consumer, offset_range: OffsetRange
    ) -> tuple[list[Any], bool]:
        """The next messages, and whether the range goes on after them."""
        deadline = time.monotonic() + self.timeout_seconds
        while time.monotonic() < deadline:
            messages: list[Any] = []
            for message in _consume_available(consumer):
                error = message.error()
                if error is not None and error.code() == KafkaError._PARTITION_EOF:
                    return messages, False
                if error is not None:
                    raise self._unreachable_error(error)
                if message.offset() >= offset_range.end:
                    return messages, False
                messages.append(message)
            if messages:
                return messages, messages[-1].offset() + 1 < offset_range.end
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
    """The messages that have arrived, as soon as there is one. A single call for many messages would
    wait until it has all of them, or for its whole timeout.
    """
    messages = consumer.consume(1, timeout=1.0)
    if messages:
        messages += consumer.consume(MESSAGES_PER_POLL_MAX, timeout=FOLLOW_UP_TIMEOUT_SECONDS)
    return messages


def _message_batches(messages: list[Any], *, with_headers: bool = False) -> Iterator[MessageBatch]:
    """Messages in order, as batches; a new batch begins wherever an offset is missing."""
    begin = 0
    for end in range(1, len(messages) + 1):
        if end < len(messages) and messages[end].offset() == messages[end - 1].offset() + 1:
            continue
        run = messages[begin:end]
        headers = [message.headers() or [] for message in run] if with_headers else None
        yield MessageBatch(
            run[0].offset(),
            [message.timestamp()[1] for message in run],
            [message.key() for message in run],
            [message.value() for message in run],
            headers,
        )
        begin = end
