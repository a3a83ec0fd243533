"""Messages of the past: read from Kafka again, or from a file that somebody captured.

From Kafka they are read with a plain consumer: no Spark, no consumer group, no commit. A capture is a
file of JSON lines, one per message, with the fields topic, partition, offset, key, value (text or
null) and timestamp. Bytes that are not text come as `key_base64` and `value_base64`. The output of
`kcat -J` (payload, ts) is accepted as well.

Next: operations/prove/verify_at.py checks them; kafka/spark_reader.py reads for the fold.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from seriatim.engine.messages import CapturedMessage, MessageBatch
from seriatim.engine.offsets import TOPIC_NAME, OffsetByPartition, OffsetRange, Partition
from seriatim.errors import ConfigError, KafkaSilentError
from seriatim.kafka.client import ClientSettings, create_client

MESSAGES_PER_POLL_MAX = 5_000
FOLLOW_UP_TIMEOUT_SECONDS = 0.05
CONSUMER_SETTINGS = {
    # The library needs a group name. No group is joined, and nothing is committed.
    "group.id": "seriatim",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "log_level": 0,
}
"""Settings of every consumer of ours: it reads from the offset that it is told."""


def assign(consumer: Consumer, offsets: OffsetByPartition) -> None:
    """Let a consumer read these partitions, each from this offset on."""
    consumer.assign(
        [
            TopicPartition(partition.topic, partition.number, offset)
            for partition, offset in offsets.items()
        ]
    )


class KafkaPastMessageReader:
    """Reads ranges of partitions with this isolation."""

    def __init__(
        self,
        client_settings: ClientSettings,
        isolation: str = "read_committed",
        timeout_seconds: float = 30,
        *,
        with_headers: bool = False,
        end_errors: Collection[int] = (KafkaError._PARTITION_EOF,),
    ) -> None:
        self.servers = client_settings["bootstrap.servers"]
        self.timeout_seconds = timeout_seconds
        self.with_headers = with_headers
        self.end_errors = end_errors
        """Errors that end a range like the end of the log."""
        self._admin = create_client(AdminClient, {**client_settings, "log_level": 0})
        self._consumer: Consumer | None = None
        self._settings: dict[str, Any] = {
            **client_settings,
            **CONSUMER_SETTINGS,
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
        assign(self._consumer, {partition: offset_range.start})
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
                if error is not None and error.code() in self.end_errors:
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


def read_capture(path: Path) -> list[CapturedMessage]:
    """All messages of a capture, in the order of the file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"--capture {path}: {error.strerror}", next="give a file of JSON lines"
        ) from None
    messages = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            messages.append(_parse_line(path, number, line))
    return messages


def _parse_line(path: Path, number: int, line: bytes) -> CapturedMessage:
    try:
        fields = json.loads(line)
        topic = fields["topic"]
        partition = int(fields["partition"])
        offset = int(fields["offset"])
        if not TOPIC_NAME.fullmatch(topic) or partition < 0 or offset < 0:
            raise ValueError("topic, partition or offset is none")
        timestamp = fields.get("timestamp", fields.get("ts"))
        value_name = "payload" if "payload" in fields else "value"
        return CapturedMessage(
            partition=Partition(topic, partition),
            offset=offset,
            key=_decode_bytes(fields, "key"),
            value=_decode_bytes(fields, value_name),
            timestamp=timestamp if isinstance(timestamp, int) else 0,
        )
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise ConfigError(
            f"{path.name}:{number}: not a captured message: {type(error).__name__}: {error}",
            allowed='{"topic": "a", "partition": 0, "offset": 7, "key": "s", "value": "…", "timestamp": 0}',
            next="bytes that are no text go into key_base64 and value_base64",
        ) from None


def _decode_bytes(fields: dict[str, Any], name: str) -> bytes | None:
    """The bytes of a key or value: from base64, from text, or None for null."""
    if f"{name}_base64" in fields:
        return base64.b64decode(fields[f"{name}_base64"], validate=True)
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be text or null")
    return None if value is None else value.encode()
