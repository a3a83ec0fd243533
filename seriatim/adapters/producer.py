"""A Kafka producer for sample data: makes the topics, sends in order, at a rate.

Next room: demo.py makes what is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from seriatim.core.errors import PlatformError
from seriatim.demo import Sent

READY_SECONDS = 20
SAY_EVERY_SECONDS = 5
POLL_EVERY = 1000


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
        self._producer = Producer({**client, **tuned, "queue.buffering.max.messages": 1_000_000})
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


def make_topics(client: Mapping[str, str], topics: Mapping[str, int]) -> None:
    """Make the topics that are not there, and wait until every partition has a leader.

    A producer that sends before it knows all partitions spreads one session over two of them.
    """
    admin = AdminClient({**client, "log_level": 0})
    try:
        known = admin.list_topics(timeout=READY_SECONDS).topics
        wanted = [NewTopic(name, count, 1) for name, count in topics.items() if name not in known]
        for made in admin.create_topics(wanted).values() if wanted else ():
            made.result()
        _wait_for_leaders(admin, [topic.topic for topic in wanted], topics)
    except KafkaException as error:
        raise PlatformError(f"Kafka: {error.args[0].str()}", next="check the broker, then send again") from None


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
