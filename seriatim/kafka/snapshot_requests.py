"""Snapshot requests on a Kafka topic: as a producer reads them, or as signals to Debezium's connector.

Next: ledger/gaps.py has what is sent; demo/producer.py is a producer that answers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from seriatim.errors import ConfigError, PlatformError
from seriatim.kafka.client import ClientSettings, create_client
from seriatim.ledger.gaps import SnapshotRequest

SEND_TIMEOUT_SECONDS = 20
SIGNALLED_ROWS_MAX = 100
"""For more rows of a table than this, the connector is asked to read all of it."""
PLAIN_COLUMN = re.compile(r"[a-z_][a-z0-9_]*", re.ASCII)
PLAIN_TEXT = re.compile(r"[A-Za-z0-9_.:@+/ -]*", re.ASCII)
"""What may be in the condition of a signal. The connector makes SQL of it, for one of many databases:
nothing may stand there that any of them could read as the end of a text.
"""
KeyAndValue = tuple[bytes, bytes]
Encode = Callable[[Sequence[SnapshotRequest]], list[KeyAndValue]]


def encode_requests(requests: Sequence[SnapshotRequest]) -> list[KeyAndValue]:
    """The messages of these requests for producers: one each."""
    return [(request.key, request.to_json()) for request in requests]


def encode_signals(requests: Sequence[SnapshotRequest]) -> list[KeyAndValue]:
    """The messages of these requests for Debezium's connector: for each table one signal to read those
    rows again by an incremental snapshot, or the whole table if they cannot all be named.

    The name of a topic is `PREFIX.SCHEMA.TABLE`, and the connector listens to signals under the key
    PREFIX.
    """
    by_topic: dict[str, list[SnapshotRequest]] = {}
    for request in requests:
        by_topic.setdefault(request.topic, []).append(request)
    signals = []
    for topic, topic_requests in by_topic.items():
        prefix, _, table = topic.rpartition(".")
        prefix, _, schema = prefix.rpartition(".")
        if not prefix or not schema or not table:
            raise ConfigError(
                f"topic {topic} is not called PREFIX.SCHEMA.TABLE, so no signal can name its table",
                next="take snapshot_requests out of the stream file, and signal the connector by hand",
            )
        collection = f"{schema}.{table}"
        data: dict[str, Any] = {"data-collections": [collection], "type": "incremental"}
        conditions = [_row_condition(request.session) for request in topic_requests]
        if all(conditions) and len(conditions) <= SIGNALLED_ROWS_MAX:
            condition = {
                "data-collection": collection,
                "filter": f"({' or '.join(dict.fromkeys(conditions))})",
            }
            data["additional-conditions"] = [condition]
        last = topic_requests[-1]
        signal = {
            "id": f"seriatim-{last.stream}-{last.partition}-{last.offset}",
            "type": "execute-snapshot",
            "data": data,
        }
        signals.append((prefix.encode(), msgspec.json.encode(signal)))
    return signals


def _row_condition(session: str) -> str:
    """The condition in SQL that names the row of a session, whose name is the key of its messages in
    JSON; empty if it cannot be written safely.
    """
    try:
        key = msgspec.json.decode(session)
    except msgspec.DecodeError:
        return ""
    if isinstance(key, dict) and key.keys() == {"schema", "payload"}:
        key = key["payload"]
    if not isinstance(key, dict) or not key:
        return ""
    parts = []
    for column, value in key.items():
        if not PLAIN_COLUMN.fullmatch(column):
            return ""
        if isinstance(value, str) and PLAIN_TEXT.fullmatch(value):
            parts.append(f"{column} = '{value}'")
        elif isinstance(value, int) and not isinstance(value, bool):
            parts.append(f"{column} = {value}")
        else:
            return ""
    return f"({' and '.join(parts)})" if len(parts) > 1 else parts[0]


class KafkaSnapshotRequester:
    """Sends the snapshot requests of one stream."""

    def __init__(
        self,
        client_settings: ClientSettings,
        topic: str,
        timeout_seconds: float = SEND_TIMEOUT_SECONDS,
        encode: Encode = encode_requests,
    ) -> None:
        self.client_settings = client_settings
        self.encode = encode
        self.topic = topic
        self.timeout_seconds = timeout_seconds
        self._delivery_error = ""

    def send(self, requests: Sequence[SnapshotRequest]) -> None:
        """Send all requests, and wait until Kafka has confirmed them. Raises `PlatformError` if one
        did not arrive.
        """
        self._delivery_error = ""
        messages = self.encode(requests)
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
            for message in messages:
                # The producer's queue may be full. Polling delivers what is in it.
                while not self._try_produce(producer, message) and time.monotonic() < deadline:
                    producer.poll(0.1)
        except KafkaException as error:
            raise self._send_error(error.args[0].str()) from None
        unsent_count = producer.flush(self.timeout_seconds)
        if self._delivery_error:
            raise self._send_error(self._delivery_error)
        if unsent_count:
            raise self._send_error(f"{unsent_count} of {len(messages)} did not arrive")

    def _require_topic(self, producer: Producer) -> None:
        """Refuse a topic that does not exist, instead of waiting for it."""
        metadata = producer.list_topics(self.topic, timeout=self.timeout_seconds)
        topic_error = metadata.topics[self.topic].error
        if topic_error is not None:
            raise self._send_error(topic_error.str())

    def _try_produce(self, producer: Producer, message: KeyAndValue) -> bool:
        """Put a message into the producer's queue; False if the queue is full."""
        key, value = message
        try:
            producer.produce(self.topic, value, key, on_delivery=self._on_delivery)
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
