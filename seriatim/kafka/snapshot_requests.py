"""Requests on a Kafka topic, and the note of how far they go: asked.json beside the ledger.

Next room: ledger/snapshot_needs.py has what is sent; demo/producer.py is a producer that answers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from seriatim.errors import PlatformError
from seriatim.kafka.client import create_client
from seriatim.ledger.snapshot_needs import SnapshotRequest
from seriatim.storage.files import write_file

SEND_TIMEOUT_SECONDS = 20


class KafkaSnapshotRequester:
    """Snapshot requests of one stream."""

    def __init__(
        self,
        client_settings: Mapping[str, str],
        topic: str,
        root: Path,
        timeout_seconds: float = SEND_TIMEOUT_SECONDS,
    ) -> None:
        self.client_settings, self.topic, self.root, self.timeout_seconds = (
            client_settings,
            topic,
            root,
            timeout_seconds,
        )
        self._delivery_error = ""

    def last_requested_entry(self) -> tuple[int, str]:
        """The entry up to which producers were asked. Losing the file means asking again, never
        silence.
        """
        try:
            seen = json.loads((self.root / "asked.json").read_bytes())
            return int(seen["sequence"]), str(seen["sha256"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return -1, ""

    def put_last_requested_entry(self, sequence: int, sha256: str) -> None:
        """Note that producers were asked up to this entry."""
        write_file(
            self.root / "asked.json", json.dumps({"sequence": sequence, "sha256": sha256}).encode()
        )

    def send(self, requests: Sequence[SnapshotRequest]) -> None:
        """Send them all, and know that they arrived."""
        self._delivery_error, until = "", time.monotonic() + self.timeout_seconds
        timeout_ms = int(1000 * self.timeout_seconds)
        producer = create_client(
            Producer,
            {
                **self.client_settings,
                "message.timeout.ms": timeout_ms,
                "linger.ms": 5,
                "log_level": 0,
            },
        )
        try:
            self._require_topic(producer)
            for request in requests:
                while not self._try_produce(producer, request) and time.monotonic() < until:
                    producer.poll(0.1)
        except KafkaException as error:
            raise self._send_error(error.args[0].str()) from None
        left = producer.flush(self.timeout_seconds)
        if self._delivery_error or left:
            raise self._send_error(
                self._delivery_error or f"{left} of {len(requests)} did not arrive"
            )

    def _require_topic(self, producer: Producer) -> None:
        """The topic is there: nobody waits for one that is not."""
        found = producer.list_topics(self.topic, timeout=self.timeout_seconds).topics[self.topic]
        if found.error is not None:
            raise self._send_error(found.error.str())

    def _try_produce(self, producer: Producer, request: SnapshotRequest) -> bool:
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
