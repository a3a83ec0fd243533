"""A Kafka producer for demo data: it creates the topics, sends messages in order and at a rate, and
listens for snapshot requests.

Next: demo/generator.py makes what is sent; kafka/sending.py sends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from seriatim.demo.generator import DemoMessage
from seriatim.errors import PlatformError
from seriatim.kafka.client import create_client
from seriatim.kafka.sending import (
    BROKER_TIMEOUT_SECONDS,
    MessageSender,
    create_topics,
    kafka_error,
)
from seriatim.ledger.gaps import SnapshotRequest

PROGRESS_EVERY_SECONDS = 5
REQUESTS_MAX = 100


def send_messages(
    client_settings: Mapping[str, str],
    topics: Mapping[str, int],
    messages: Iterable[DemoMessage],
    rate: float,
    total: int | None,
    print_notice: Callable[[str], None],
) -> int:
    """Send all messages, `rate` of them a second (0: as fast as possible). Returns how many arrived.
    Ctrl-C ends it cleanly.
    """
    create_topics(client_settings, topics)
    sender = MessageSender(client_settings)
    of_total = f" of {total:,} messages" if total else " messages"
    start_seconds = time.monotonic()
    notice_seconds = start_seconds
    try:
        for message in messages:
            sender.send(message.topic, message.key, message.value)
            now_seconds = time.monotonic()
            elapsed_seconds = now_seconds - start_seconds
            if rate:
                ahead_seconds = sender.sent_count / rate - elapsed_seconds
                time.sleep(max(0.0, ahead_seconds))
            if now_seconds - notice_seconds > PROGRESS_EVERY_SECONDS:
                notice_seconds = now_seconds
                actual_rate = sender.sent_count / elapsed_seconds
                print_notice(f"{sender.sent_count:,}{of_total}, {actual_rate:,.0f}/s")
    except KeyboardInterrupt:
        print_notice("stopped")
    return sender.finish()


class SnapshotRequestListener:
    """Listens for snapshot requests on a topic, from now on. Earlier requests do not matter, because
    a demo producer begins with snapshots anyway.
    """

    def __init__(self, client_settings: Mapping[str, str], topic: str) -> None:
        quiet_settings = {**client_settings, "log_level": 0}
        consumer_settings = {
            **quiet_settings,
            "group.id": "seriatim-demo",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
        }
        self._admin = create_client(AdminClient, quiet_settings)
        self._consumer = create_client(Consumer, consumer_settings)
        try:
            metadata = self._consumer.list_topics(topic, timeout=BROKER_TIMEOUT_SECONDS)
            partitions = metadata.topics[topic].partitions
            if not partitions:
                raise PlatformError(f"there is no topic {topic}", next="make it, then send again")
            starts = [
                TopicPartition(topic, number, self._log_end(topic, number)) for number in partitions
            ]
            self._consumer.assign(starts)
        except KafkaException as error:
            raise kafka_error(error) from None

    def _log_end(self, topic: str, number: int) -> int:
        """The log end of a partition. Tries again for a while, because the leader of a topic that
        was just created may not know yet that it leads.
        """
        partition = TopicPartition(topic, number)
        deadline = time.monotonic() + BROKER_TIMEOUT_SECONDS
        while True:
            try:
                futures = self._admin.list_offsets({partition: OffsetSpec.latest()})
                result = futures[partition].result(BROKER_TIMEOUT_SECONDS)
                return int(result.offset)
            except KafkaException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def __call__(self) -> list[tuple[str, str]]:
        """The topics and sessions for which a snapshot was requested since the previous call."""
        return self.wait_for_requests(REQUESTS_MAX, 0)

    def wait_for_requests(self, count: int, seconds: float) -> list[tuple[str, str]]:
        """The same, after so many seconds, or as soon as there are `count` requests."""
        deadline = time.monotonic() + seconds
        requests: list[tuple[str, str]] = []
        while True:
            seconds_left = max(0, deadline - time.monotonic())
            try:
                messages = self._consumer.consume(count, seconds_left)
            except KafkaException as error:
                raise kafka_error(error) from None
            for message in messages:
                if message.error() is not None:
                    continue
                request = _parse_request(message.value())
                if request is not None:
                    requests.append((request.topic, request.session))
            if len(requests) >= count or time.monotonic() >= deadline:
                return requests

    def close(self) -> None:
        """End listening."""
        self._consumer.close()


def _parse_request(body: bytes | None) -> SnapshotRequest | None:
    """The request in a message; None for anything else, because others may write to the topic, too."""
    try:
        return msgspec.json.decode(body or b"", type=SnapshotRequest)
    except msgspec.MsgspecError:
        return None
