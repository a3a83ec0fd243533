"""Kafka as discovery sees it: topics by whole-name regex, their ids, where each log starts and ends.

Next room: spark.py reads the messages.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from seriatim.core.errors import PlatformError
from seriatim.core.offsets import Partition
from seriatim.core.slice import Bounds

T = TypeVar("T")
GONE = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
MOVING = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE)
"""A partition just made, or just given to another broker: it answers in a moment."""
OWN_TOPICS = ("__consumer_offsets", "__transaction_state", "__share_group_state")
"""Kafka's own: a stream never means these."""


class KafkaLog:
    """A Kafka cluster, asked through its admin interface."""

    def __init__(
        self, client: Mapping[str, str], isolation: str = "read_committed", timeout_seconds: float = 20
    ) -> None:
        self.servers = client["bootstrap.servers"]
        self.timeout_seconds = timeout_seconds
        self._admin = AdminClient({**client, "log_level": 0, "logger": _QUIET})
        committed = isolation == "read_committed"
        self._isolation = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED

    def bounds(self, pattern: str) -> dict[Partition, Bounds]:
        """Every partition of every topic whose whole name matches."""
        partitions = self._partitions(pattern)
        starts = self._offsets(partitions, OffsetSpec.earliest())
        ends = self._offsets(partitions, OffsetSpec.latest())
        return {
            partition: Bounds(topic_id, starts[partition], max(ends[partition], starts[partition]))
            for partition, topic_id in partitions.items()
            if partition in starts and partition in ends
        }

    def offsets_for_time(self, partitions: list[Partition], timestamp: int) -> dict[Partition, int]:
        """The first offset at or after a time (milliseconds since 1970); -1 where there is none."""
        return self._offsets(dict.fromkeys(partitions, ""), OffsetSpec.for_timestamp(timestamp))

    def _partitions(self, pattern: str) -> dict[Partition, str]:
        """Matching partitions and their topics' ids."""
        wanted = re.compile(pattern)
        known = self._asked(lambda: self._admin.list_topics(timeout=self.timeout_seconds).topics)
        names = sorted(name for name in known if wanted.fullmatch(name) and name not in OWN_TOPICS)
        if not names:
            return {}
        answers = self._asked(
            lambda: self._admin.describe_topics(TopicCollection(names), request_timeout=self.timeout_seconds)
        )
        found: dict[Partition, str] = {}
        for name, answer in answers.items():
            topic = self._unless_gone(answer)
            if topic is not None:
                found |= {Partition(name, part.id): str(topic.topic_id) for part in topic.partitions}
        return found

    def _offsets(self, partitions: Mapping[Partition, str], which: OffsetSpec) -> dict[Partition, int]:
        found: dict[Partition, int] = {}
        left, until = set(partitions), time.monotonic() + self.timeout_seconds
        while left:
            for partition, answer in self._ask_offsets(left, which).items():
                if not (_is_moving(answer) and time.monotonic() < until):
                    left.discard(partition)
                    offset = self._unless_gone(answer)
                    found |= {} if offset is None else {partition: offset.offset}
            time.sleep(0.1 if left else 0)
        return found

    def _ask_offsets(self, partitions: Iterable[Partition], which: OffsetSpec) -> dict[Partition, Any]:
        asked = {TopicPartition(p.topic, p.number): which for p in partitions}
        answers = self._asked(
            lambda: self._admin.list_offsets(
                asked, isolation_level=self._isolation, request_timeout=self.timeout_seconds
            )
        )
        return {Partition(place.topic, place.partition): answer for place, answer in answers.items()}

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except KafkaException as error:
            raise self._unreachable(error) from None

    def _unless_gone(self, answer: Any) -> Any:
        """An answer, or None if the topic vanished while we asked."""
        try:
            return answer.result()
        except KafkaException as error:
            if error.args[0].code() in GONE:
                return None
            raise self._unreachable(error) from None

    def _unreachable(self, error: KafkaException) -> PlatformError:
        return PlatformError(
            f"Kafka at {self.servers} does not answer: {error.args[0].str()}",
            next="check SERIATIM_KAFKA_BOOTSTRAP_SERVERS and the broker\n"
            "(`seriatim kafka status` for the embedded one), then run again",
        )


def _is_moving(answer: Any) -> bool:
    error = answer.exception()
    return isinstance(error, KafkaException) and error.args[0].code() in MOVING


class _Quiet:
    """Takes the client library's own log lines, which would end up in a person's face."""

    def log(self, *_: Any, **__: Any) -> None:
        """Say nothing: what matters comes back as an error."""


_QUIET = _Quiet()
