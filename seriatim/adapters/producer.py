"""A Kafka producer for sample data: makes the topics, sends in order, at a rate, and hears who asks for snapshots.

Next room: demo.py makes what is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from seriatim.client import made
from seriatim.core.ask import SnapshotRequest
from seriatim.core.errors import PlatformError
from seriatim.demo import Sent

READY_SECONDS = 20
SAY_EVERY_SECONDS = 5
POLL_EVERY = 1000
REQUESTS_MAX = 100


def send(
    client: Mapping[str, str],
    topics: Mapping[str, int],
    messages: Iterable[Sent],
    rate: float,
    total: int | None,
    say: Callable[[str], None],
) -> int:
    """Send all messages; how many arrived. Ctrl-C ends it cleanly."""
    make_topics(client, topics)
    sending = _Sending(client)
    began = said = time.monotonic()
    try:
        for message in messages:
            sending.send(message)
            now = time.monotonic()
            if rate and sending.sent / rate > now - began:
                time.sleep(sending.sent / rate - (now - began))
            if now - said > SAY_EVERY_SECONDS:
                said = now
                goal = f" of {total:,}" if total else ""
                say(f"{sending.sent:,}{goal} messages, {sending.sent / (now - began):,.0f}/s")
    except KeyboardInterrupt:
        say("stopped")
    return sending.finish()


class _Sending:
    """Messages on their way, in order, each exactly once as far as the broker can tell."""

    def __init__(self, client: Mapping[str, str]) -> None:
        tuned = {"linger.ms": 20, "compression.type": "lz4", "enable.idempotence": True, "log_level": 0}
        self._producer = made(Producer, {**client, **tuned, "queue.buffering.max.messages": 1_000_000})
        self.sent = self.arrived = 0
        self.trouble = ""

    def send(self, message: Sent) -> None:
        while True:
            try:
                self._producer.produce(message.topic, message.value, message.key, on_delivery=self._told)
                break
            except BufferError:
                self._producer.poll(0.1)
        self.sent += 1
        if self.sent % POLL_EVERY == 0:
            self._producer.poll(0)

    def _told(self, error: KafkaError | None, _: Message) -> None:
        if error is None:
            self.arrived += 1
        else:
            self.trouble = error.str()

    def finish(self) -> int:
        left = self._producer.flush(READY_SECONDS)
        if self.trouble or left:
            told = self.trouble or f"{left} messages did not arrive in {READY_SECONDS} s"
            raise PlatformError(f"sending to Kafka failed: {told}", next="check the broker, then send again")
        return self.arrived


class Asked:
    """Requests for snapshots on a topic, from now on: who starts to send begins with snapshots anyhow."""

    def __init__(self, client: Mapping[str, str], topic: str) -> None:
        own = {"group.id": "seriatim-demo", "enable.auto.commit": False, "enable.auto.offset.store": False}
        self._admin = made(AdminClient, {**client, "log_level": 0})
        self._consumer = made(Consumer, {**client, **own, "log_level": 0})
        try:
            parts = self._consumer.list_topics(topic, timeout=READY_SECONDS).topics[topic].partitions
            if not parts:
                raise PlatformError(f"there is no topic {topic}", next="make it, then send again")
            self._consumer.assign([TopicPartition(topic, number, self._end(topic, number)) for number in parts])
        except KafkaException as error:
            raise _failed(error) from None

    def _end(self, topic: str, number: int) -> int:
        """Where a partition ends. The leader of a topic just made may not know yet that it is."""
        until = time.monotonic() + READY_SECONDS
        while True:
            try:
                asked = self._admin.list_offsets({TopicPartition(topic, number): OffsetSpec.latest()})
                return int(next(iter(asked.values())).result(READY_SECONDS).offset)
            except KafkaException:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    def __call__(self) -> list[tuple[str, str]]:
        """Topics and sessions of which a snapshot was asked since the last call."""
        return self.wait(REQUESTS_MAX, 0)

    def wait(self, count: int, seconds: float) -> list[tuple[str, str]]:
        """The same, after so many seconds, or as soon as there are so many."""
        until, heard = time.monotonic() + seconds, list[tuple[str, str]]()
        while True:
            try:
                found = self._consumer.consume(count, max(0, until - time.monotonic()))
            except KafkaException as error:
                raise _failed(error) from None
            bodies = [message.value() for message in found if message.error() is None]
            heard += [(one.topic, one.session) for body in bodies if (one := _request(body)) is not None]
            if len(heard) >= count or time.monotonic() >= until:
                return heard

    def close(self) -> None:
        """Listen no more."""
        self._consumer.close()


def _failed(error: KafkaException) -> PlatformError:
    return PlatformError(f"Kafka: {error.args[0].str()}", next="check the broker, then send again")


def _request(body: bytes | None) -> SnapshotRequest | None:
    """A request; None for what is none: the topic is everybody's."""
    try:
        return msgspec.json.decode(body or b"", type=SnapshotRequest)
    except msgspec.MsgspecError:
        return None


def make_topics(client: Mapping[str, str], topics: Mapping[str, int]) -> None:
    """Make the topics that are not there, and wait until every partition has a leader.

    A producer that sends before it knows all partitions spreads one session over two of them.
    """
    admin = made(AdminClient, {**client, "log_level": 0})
    try:
        known = admin.list_topics(timeout=READY_SECONDS).topics
        wanted = [NewTopic(name, count, 1) for name, count in topics.items() if name not in known]
        for topic in admin.create_topics(wanted).values() if wanted else ():
            topic.result()
        _wait_for_leaders(admin, [topic.topic for topic in wanted], topics)
    except KafkaException as error:
        raise _failed(error) from None


def _wait_for_leaders(admin: AdminClient, names: list[str], topics: Mapping[str, int]) -> None:
    until = time.monotonic() + READY_SECONDS
    for name in names:
        while True:
            parts = admin.list_topics(name, timeout=READY_SECONDS).topics[name].partitions
            if len(parts) == topics[name] and all(part.leader >= 0 for part in parts.values()):
                break
            if time.monotonic() > until:
                raise PlatformError(f"topic {name} has no leaders yet", next="check the broker, then send again")
            time.sleep(0.1)
