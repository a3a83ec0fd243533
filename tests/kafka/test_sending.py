"""Messages are sent in order; of one that does not arrive, the error says where it came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from seriatim.errors import ConfigError, PlatformError, SeriatimError
from seriatim.kafka import sending
from seriatim.kafka.sending import MessageSender

Deliver = Callable[[KafkaError | None, Any], None]


class LoopbackProducer:
    """Takes messages as Kafka's client does, and answers for all of them when it is flushed."""

    def __init__(self, _settings: dict[str, Any]) -> None:
        self.waiting: list[tuple[bytes, Deliver]] = []
        self.arrived: list[bytes] = []
        self.full_once = True

    def produce(self, topic: str, value: bytes, key: str | None, on_delivery: Deliver) -> None:  # noqa: ARG002
        """Put a message into the queue, which is full for a moment."""
        if value == b"full" and self.full_once:
            self.full_once = False
            raise BufferError
        if value == b"huge":
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
        self.waiting.append((value, on_delivery))

    def poll(self, _seconds: float) -> None:
        """Deliver what waits."""
        self.flush(0)

    def flush(self, _seconds: float) -> int:
        """Deliver what waits; how many still do."""
        lost = [item for item in self.waiting if item[0] == b"lost"]
        for value, on_delivery in self.waiting:
            if value == b"bad":
                on_delivery(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), None)
            elif value != b"lost":
                self.arrived.append(value)
                on_delivery(None, None)
        self.waiting = lost
        return len(lost)


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> MessageSender:
    """A sender without a broker."""
    monkeypatch.setattr(sending, "create_client", lambda _, settings: LoopbackProducer(settings))
    return MessageSender({})


def send_all(sender: MessageSender, *values: bytes) -> int:
    """Send messages, each with its line; how many were acknowledged."""
    for number, value in enumerate(values, 1):
        sender.send("t", None, value, f"line {number}")
    return sender.finish()


def test_all_messages_arrive_in_order(sender: MessageSender) -> None:
    """Also if the queue of the client is full in between."""
    assert send_all(sender, b"1", b"full", b"3") == 3
    assert sender._producer.arrived == [b"1", b"full", b"3"]


@pytest.mark.parametrize(("value", "error_type"), [(b"huge", ConfigError), (b"bad", PlatformError)])
def test_the_first_message_that_does_not_arrive_is_named(
    sender: MessageSender, value: bytes, error_type: type[SeriatimError]
) -> None:
    """With how many arrived. No retry helps a message that is too large."""
    with pytest.raises(error_type, match="sending to Kafka failed at line 2: ") as caught:
        send_all(sender, b"1", value)
    assert caught.value.fields["acknowledged"] == 1


def test_nothing_is_sent_after_a_message_that_was_refused(sender: MessageSender) -> None:
    """It would take the place of the one before it."""
    with pytest.raises(ConfigError, match="at line 2"):
        send_all(sender, b"1", b"huge", b"3")
    assert sender._producer.arrived == [b"1"]


def test_a_broker_that_does_not_answer_is_told(sender: MessageSender) -> None:
    """By how many messages are still on their way."""
    with pytest.raises(PlatformError, match="1 of 2 did not arrive in") as caught:
        send_all(sender, b"1", b"lost")
    assert caught.value.fields["acknowledged"] == 1
    # No command sends only the rest.
    assert "type the command again: it sends everything again" in caught.value.next
