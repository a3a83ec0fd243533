"""A Kafka producer for sample data: makes the topics, sends in order, at a rate, and hears who asks
for snapshots.

Next room: demo.py makes what is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from seriatim.demo.generator import DemoMessage
from seriatim.errors import PlatformError
from seriatim.kafka.client import create_client
from seriatim.ledger.snapshot_needs import SnapshotRequest

BROKER_TIMEOUT_SECONDS = 20
PROGRESS_EVERY_SECONDS = 5
POLL_EVERY_MESSAGES = 1000
REQUESTS_MAX = 100


def send_messages(
    client_settings: Mapping[str, str],
    topics: Mapping[str, int],
    messages: Iterable[DemoMessage],
    rate: float,
    total: int | None,
    print_notice: Callable[[str], None],
) -> int:
    """Send all messages; how many arrived. Ctrl-C ends it cleanly."""
    create_topics(client_settings, topics)
    sending = _MessageSender(client_settings)
    began = said = time.monotonic()
    try:
        for message in messages:
            sending.send(message)
            now = time.monotonic()
            if rate and sending.sent_count / rate > now - began:
                time.sleep(sending.sent_count / rate - (now - began))
            if now - said > PROGRESS_EVERY_SECONDS:
                said = now
                goal = f" of {total:,}" if total else ""
                print_notice(
                    f"{sending.sent_count:,}{goal} messages, {sending.sent_count / (now - began):,.0f}/s"
                )
    except KeyboardInterrupt:
        print_notice("stopped")
    return sending.finish()


class _MessageSender:
    """Messages on their way, in order, each exactly once as far as the broker can tell."""

    def __init__(self, client_settings: Mapping[str, str]) -> None:
        tuned = {
            "linger.ms": 20,
            "compression.type": "lz4",
            "enable.idempotence": True,
            "log_level": 0,
        }
        self._producer = create_client(
            Producer, {**client_settings, **tuned, "queue.buffering.max.messages": 1_000_000}
        )
        self.sent_count = self.delivered_count = 0
        self.delivery_error = ""

    def send(self, message: DemoMessage) -> None:
        while True:
            try:
                self._producer.produce(
                    message.topic, message.value, message.key, on_delivery=self._on_delivery
                )
                break
            except BufferError:
                self._producer.poll(0.1)
        self.sent_count += 1
        if self.sent_count % POLL_EVERY_MESSAGES == 0:
            self._producer.poll(0)

    def _on_delivery(self, error: KafkaError | None, _: Message) -> None:
        if error is None:
            self.delivered_count += 1
        else:
            self.delivery_error = error.str()

    def finish(self) -> int:
        left = self._producer.flush(BROKER_TIMEOUT_SECONDS)
        if self.delivery_error or left:
            told = (
                self.delivery_error
                or f"{left} messages did not arrive in {BROKER_TIMEOUT_SECONDS} s"
            )
            raise PlatformError(
                f"sending to Kafka failed: {told}", next="check the broker, then send again"
            )
        return self.delivered_count


class SnapshotRequestListener:
    """Requests for snapshots on a topic, from now on: who starts to send begins with snapshots
    anyhow.
    """

    def __init__(self, client_settings: Mapping[str, str], topic: str) -> None:
        own = {
            "group.id": "seriatim-demo",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
        }
        self._admin = create_client(AdminClient, {**client_settings, "log_level": 0})
        self._create_consumer = create_client(Consumer, {**client_settings, **own, "log_level": 0})
        try:
            parts = (
                self._create_consumer.list_topics(topic, timeout=BROKER_TIMEOUT_SECONDS)
                .topics[topic]
                .partitions
            )
            if not parts:
                raise PlatformError(f"there is no topic {topic}", next="make it, then send again")
            self._create_consumer.assign(
                [TopicPartition(topic, number, self._log_end(topic, number)) for number in parts]
            )
        except KafkaException as error:
            raise _kafka_error(error) from None

    def _log_end(self, topic: str, number: int) -> int:
        """Where a partition ends. The leader of a topic just made may not know yet that it is."""
        until = time.monotonic() + BROKER_TIMEOUT_SECONDS
        while True:
            try:
                asked = self._admin.list_offsets(
                    {TopicPartition(topic, number): OffsetSpec.latest()}
                )
                return int(next(iter(asked.values())).result(BROKER_TIMEOUT_SECONDS).offset)
            except KafkaException:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    def __call__(self) -> list[tuple[str, str]]:
        """Topics and sessions of which a snapshot was asked since the last call."""
        return self.wait_for_requests(REQUESTS_MAX, 0)

    def wait_for_requests(self, count: int, seconds: float) -> list[tuple[str, str]]:
        """The same, after so many seconds, or as soon as there are so many."""
        until, heard = time.monotonic() + seconds, list[tuple[str, str]]()
        while True:
            try:
                found = self._create_consumer.consume(count, max(0, until - time.monotonic()))
            except KafkaException as error:
                raise _kafka_error(error) from None
            bodies = [message.value() for message in found if message.error() is None]
            heard += [
                (one.topic, one.session)
                for body in bodies
                if (one := _parse_request(body)) is not None
            ]
            if len(heard) >= count or time.monotonic() >= until:
                return heard

    def close(self) -> None:
        """Listen no more."""
        self._create_consumer.close()


def _kafka_error(error: KafkaException) -> PlatformError:
    return PlatformError(f"Kafka: {error.args[0].str()}", next="check the broker, then send again")


def _parse_request(body: bytes | None) -> SnapshotRequest | None:
    """A request; None for what is none: the topic is everybody's."""
    try:
        return msgspec.json.decode(body or b"", type=SnapshotRequest)
    except msgspec.MsgspecError:
        return None


def create_topics(client_settings: Mapping[str, str], topics: Mapping[str, int]) -> None:
    """Make the topics that are not there, and wait until every partition has a leader.

    A producer that sends before it knows all partitions spreads one session over two of them.
    """
    admin = create_client(AdminClient, {**client_settings, "log_level": 0})
    try:
        known = admin.list_topics(timeout=BROKER_TIMEOUT_SECONDS).topics
        wanted = [NewTopic(name, count, 1) for name, count in topics.items() if name not in known]
        for topic in admin.create_topics(wanted).values() if wanted else ():
            topic.result()
        _wait_for_leaders(admin, [topic.topic for topic in wanted], topics)
    except KafkaException as error:
        raise _kafka_error(error) from None


def _wait_for_leaders(admin: AdminClient, names: list[str], topics: Mapping[str, int]) -> None:
    until = time.monotonic() + BROKER_TIMEOUT_SECONDS
    for name in names:
        while True:
            parts = admin.list_topics(name, timeout=BROKER_TIMEOUT_SECONDS).topics[name].partitions
            if len(parts) == topics[name] and all(part.leader >= 0 for part in parts.values()):
                break
            if time.monotonic() > until:
                raise PlatformError(
                    f"topic {name} has no leaders yet", next="check the broker, then send again"
                )
            time.sleep(0.1)
