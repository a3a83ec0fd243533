"""Sends messages to Kafka, and creates topics for them. The fold itself sends nothing: these are
messages of people and of the demo.

Next: cli/produce.py sends files; demo/producer.py sends demo data.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from seriatim.errors import ConfigError, PlatformError, SeriatimError
from seriatim.kafka.client import ClientSettings, create_client

BROKER_TIMEOUT_SECONDS = 20
POLL_EVERY_MESSAGES = 1000
SEND_AGAIN = "check the broker, then type the command again: it sends everything again, also what was acknowledged"


class MessageSender:
    """Sends messages in order, each exactly once as far as the broker can ensure that."""

    def __init__(self, client_settings: ClientSettings) -> None:
        settings = {
            **client_settings,
            "linger.ms": 20,
            "compression.type": "lz4",
            "enable.idempotence": True,
            "log_level": 0,
            "queue.buffering.max.messages": 1_000_000,
        }
        self._producer = create_client(Producer, settings)
        self.sent_count = 0
        self.acknowledged_count = 0
        """Messages of which the broker has said that it has them."""
        self._failures: list[tuple[int, str, KafkaError]] = []
        """Messages that did not arrive: number, where they come from, and the reason."""

    def send(self, topic: str, key: str | None, value: bytes, source: str = "") -> None:
        """Send one message. `source` says where it comes from, for errors: `line 7`.

        After a message that did not arrive no other one is sent, because it would take its place.
        """
        self.sent_count += 1
        on_delivery = partial(self._on_delivery, self.sent_count, source)
        while not self._failures:
            try:
                self._producer.produce(topic, value, key, on_delivery=on_delivery)
                break
            except BufferError:
                # The queue of the client is full: wait until some messages are delivered.
                self._producer.poll(0.1)
            except KafkaException as error:  # for example a message that is too large
                self._failures.append((self.sent_count, source, error.args[0]))
        if self.sent_count % POLL_EVERY_MESSAGES == 0:
            self._producer.poll(0)
        if self._failures:
            self.finish()

    def _on_delivery(
        self, number: int, source: str, error: KafkaError | None, _message: Message
    ) -> None:
        if error is None:
            self.acknowledged_count += 1
        else:
            self._failures.append((number, source, error))

    def finish(self) -> int:
        """Wait until all messages are acknowledged. Returns how many were; raises an error if one did
        not arrive.
        """
        unacknowledged_count = self._producer.flush(BROKER_TIMEOUT_SECONDS)
        if not unacknowledged_count and not self._failures:
            return self.acknowledged_count
        if self._failures:
            raise self._first_failure()
        raise PlatformError(
            f"sending to Kafka failed: {unacknowledged_count} of {self.sent_count} did not arrive in"
            f" {BROKER_TIMEOUT_SECONDS} s",
            acknowledged=self.acknowledged_count,
            next=SEND_AGAIN,
        )

    def _first_failure(self) -> SeriatimError:
        """The error of the first message that did not arrive: those after it fail because of it."""
        _, source, error = min(self._failures, key=lambda failure: failure[0])
        place = f" at {source}" if source else ""
        message = f"sending to Kafka failed{place}: {error.str()}"
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return ConfigError(
                message,
                acknowledged=self.acknowledged_count,
                next="make it shorter, or raise max.message.bytes of the topic",
            )
        return PlatformError(message, acknowledged=self.acknowledged_count, next=SEND_AGAIN)


def create_topics(client_settings: ClientSettings, topics: Mapping[str, int]) -> None:
    """Create the topics that do not exist, and wait until every partition has a leader.

    A producer that sends before it knows all partitions spreads one session over two of them.
    """
    admin = create_client(AdminClient, {**client_settings, "log_level": 0})
    try:
        existing = admin.list_topics(timeout=BROKER_TIMEOUT_SECONDS).topics
        missing = {name: count for name, count in topics.items() if name not in existing}
        if missing:
            new_topics = [NewTopic(name, count, 1) for name, count in missing.items()]
            for future in admin.create_topics(new_topics).values():
                future.result()
        for name, count in missing.items():
            _wait_for_leaders(admin, name, count)
    except KafkaException as error:
        raise kafka_error(error) from None


def kafka_error(error: KafkaException) -> PlatformError:
    """What Kafka's client raised while we wanted to send, as an error for people."""
    return PlatformError(f"Kafka: {error.args[0].str()}", next="check the broker, then send again")


def _wait_for_leaders(admin: AdminClient, topic: str, partition_count: int) -> None:
    deadline = time.monotonic() + BROKER_TIMEOUT_SECONDS
    while True:
        metadata = admin.list_topics(topic, timeout=BROKER_TIMEOUT_SECONDS)
        partitions = metadata.topics[topic].partitions.values()
        leaders = [partition for partition in partitions if partition.leader >= 0]
        if len(partitions) == len(leaders) == partition_count:
            return
        if time.monotonic() > deadline:
            raise PlatformError(
                f"topic {topic} has no leaders yet", next="check the broker, then send again"
            )
        time.sleep(0.1)
