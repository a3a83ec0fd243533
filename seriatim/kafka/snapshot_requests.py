"""Snapshot requests on a Kafka topic.

Next: ledger/gaps.py has what is sent; demo/producer.py is a producer that answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from seriatim.errors import PlatformError
from seriatim.kafka.client import ClientSettings, create_client
from seriatim.ledger.gaps import SnapshotRequest

SEND_TIMEOUT_SECONDS = 20


class KafkaSnapshotRequester:
    """Sends the snapshot requests of one stream."""

    def __init__(
        self,
        client_settings: ClientSettings,
        topic: str,
        timeout_seconds: float = SEND_TIMEOUT_SECONDS,
    ) -> None:
        self.client_settings = client_settings
        self.topic = topic
        self.timeout_seconds = timeout_seconds
        self._delivery_error = ""

    def send(self, requests: Sequence[SnapshotRequest]) -> None:
        """Send all requests, and wait until Kafka has confirmed them. Raises `PlatformError` if one
        did not arrive.
        """
        self._delivery_error = ""
        deadline = time.monotonic() + self.timeout_seconds
        producer_settings = {
            **self.client_settings,
            "message.timeout.ms": int(1000 * self.timeout_seconds),
            "linger.ms": 5,
            "log_level": 0,
        }
        producer = create_client(Producer, producer_settings)
        try:
            self._require_topic(producer)
            for request in requests:
                # The producer's queue may be full. Polling delivers what is in it.
                while not self._try_produce(producer, request) and time.monotonic() < deadline:
                    producer.poll(0.1)
        except KafkaException as error:
            raise self._send_error(error.args[0].str()) from None
        unsent_count = producer.flush(self.timeout_seconds)
        if self._delivery_error:
            raise self._send_error(self._delivery_error)
        if unsent_count:
            raise self._send_error(f"{unsent_count} of {len(requests)} did not arrive")

    def _require_topic(self, producer: Producer) -> None:
        """Refuse a topic that does not exist, instead of waiting for it."""
        metadata = producer.list_topics(self.topic, timeout=self.timeout_seconds)
        topic_error = metadata.topics[self.topic].error
        if topic_error is not None:
            raise self._send_error(topic_error.str())

    def _try_produce(self, producer: Producer, request: SnapshotRequest) -> bool:
        """Put a request into the producer's queue; False if the queue is full."""
        try:
            producer.produce(
                self.topic, request.to_json(), request.key, on_delivery=self._on_delivery
            )
        except BufferError:
            return False
        return True

    def _on_delivery(self, error: KafkaError | None, _: Message) -> None:
        if error is not None:
            self._delivery_error = error.str()

    def _send_error(self, reason: str) -> PlatformError:
        return PlatformError(
            f"producers could not be asked for snapshots on topic {self.topic}: {reason}",
            next=f"check that topic {self.topic} is there and may be written to; the next run asks again",
        )
