"""Kafka as discovery sees it: topics by whole-name regex, their ids, log start and log end, how long they keep.

Next room: spark.py reads the messages.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec

from seriatim.client import for_python, made
from seriatim.core.errors import KafkaSilentError
from seriatim.core.message import READABLE_MS
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.retention import Retained, Rules
from seriatim.core.slice import Bounds, Ranges

T = TypeVar("T")
GONE = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
MOVING = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE)
"""A partition just made, or just given to another broker: it answers in a moment."""
FORBIDDEN = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
NOTHING_THERE = (*GONE, KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
"""No message at an offset: the log ends there, or has just lost it."""
LOOK_PARTITIONS, LOOK_MESSAGES, LOOK_SECONDS = 8, 100, 3.0
"""How much is looked at to know how large messages are."""
OWN_TOPICS = ("__consumer_offsets", "__transaction_state", "__share_group_state")
"""Kafka's own: a stream never means these."""


class KafkaLog:
    """A Kafka cluster, asked through its admin interface."""

    def __init__(
        self, client: Mapping[str, str], isolation: str = "read_committed", timeout_seconds: float = 20
    ) -> None:
        self.servers = client["bootstrap.servers"]
        self.timeout_seconds = timeout_seconds
        self._client = dict(client)
        self._admin = made(AdminClient, {**client, "log_level": 0, "logger": _QUIET})
        committed = isolation == "read_committed"
        self._isolation_level = isolation
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

    def unreadable(self, ranges: Ranges) -> dict[Partition, tuple[int, str]]:
        """The first message of each range whose timestamp Spark cannot read, by offset, and why."""
        found: dict[Partition, tuple[int, str]] = {}
        consumer = self._consumer({**SCAN, "isolation.level": self._isolation_level})
        try:
            for partition, whole in ranges.items():
                consumer.assign([TopicPartition(partition.topic, partition.number, whole.start)])
                for message in self._scanned(consumer, partition, whole):
                    if not READABLE_MS[0] <= (stamp := message.timestamp()[1]) <= READABLE_MS[1]:
                        found[partition] = message.offset() or 0, f"its timestamp is {stamp} ms since 1970"
                        break
        except KafkaException as error:
            raise self._unreachable(error) from None
        finally:
            consumer.close()
        return found

    def message_bytes(self, ranges: Ranges) -> dict[Partition, int]:
        """How large the first messages of a few of these ranges are, on average. None that come in time: not known."""
        sizes: dict[Partition, list[int]] = {partition: [] for partition in list(ranges)[:LOOK_PARTITIONS]}
        ended, until = set(), time.monotonic() + LOOK_SECONDS
        consumer = self._consumer({**SCAN, "isolation.level": self._isolation_level})
        try:
            consumer.assign([TopicPartition(p.topic, p.number, ranges[p].start) for p in sizes])
            while time.monotonic() < until and any(not sizes[p] and p not in ended for p in sizes):
                for message in consumer.consume(LOOK_MESSAGES, timeout=0.2):
                    partition = Partition(message.topic() or "", message.partition() or 0)
                    if message.error() is None:
                        sizes[partition].append(len(message.key() or b"") + len(message.value() or b""))
                    else:
                        ended.add(partition)
        except KafkaException as error:
            raise self._unreachable(error) from None
        finally:
            consumer.close()
        return {partition: sum(those) // len(those) + 1 for partition, those in sizes.items() if those}

    def _consumer(self, own: Mapping[str, str]) -> Consumer:
        return made(Consumer, {**self._client, **own, "logger": _QUIET})

    def _scanned(self, consumer: Consumer, partition: Partition, whole: OffsetRange) -> Iterator[Message]:
        """The messages of a range, until its end or the log's."""
        heard = time.monotonic()
        while True:
            for message in consumer.consume(1000, timeout=1):
                heard, error = time.monotonic(), message.error()
                if error is not None and error.code() not in NOTHING_THERE:
                    raise KafkaException(error)
                if error is not None or (message.offset() or 0) >= whole.end:
                    return
                yield message
            if time.monotonic() - heard > self.timeout_seconds:
                raise self._silent(partition)

    def retained(
        self, bounds: Mapping[Partition, Bounds], frontiers: Mapping[Partition, int]
    ) -> dict[Partition, Retained]:
        """What Kafka holds of partitions with these bounds, seen from these frontiers, and for how long."""
        rules = self._rules({partition.topic for partition in bounds})
        there = {partition: seen for partition, seen in bounds.items() if partition.topic in rules}
        oldest = self._timestamps(there, OffsetSpec.for_timestamp(0))
        newest = self._timestamps(there, OffsetSpec.max_timestamp())
        inside = {p: frontiers[p] for p, seen in there.items() if seen.log_start < frontiers[p] < seen.log_end}
        waiting = {p: oldest[p] for p, seen in there.items() if p in oldest and frontiers[p] <= seen.log_start}
        waiting |= self._timestamps_at(inside)
        sizes = self._sizes([partition for partition in there if rules[partition.topic].by_bytes])
        return {
            p: Retained(
                rules=rules[p.topic],
                frontier=frontiers[p],
                log_start=seen.log_start,
                log_end=seen.log_end,
                oldest_ms=oldest.get(p),
                frontier_ms=waiting.get(p),
                newest_ms=newest.get(p),
                bytes=sizes.get(p),
            )
            for p, seen in there.items()
        }

    def _rules(self, topics: Iterable[str]) -> dict[str, Rules]:
        """Topics' retention settings, broker defaults included. Topics that vanished are left out."""
        asked = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in sorted(topics)]
        if not asked:
            return {}
        answers = self._asked(lambda: self._admin.describe_configs(asked, request_timeout=self.timeout_seconds))
        found: dict[str, Rules] = {}
        for resource, answer in answers.items():
            if _is_error(answer, FORBIDDEN):
                found[resource.name] = Rules(known=False)
            elif (entries := self._unless_gone(answer)) is not None:
                found[resource.name] = Rules(
                    retention_ms=int(entries["retention.ms"].value),
                    retention_bytes=int(entries["retention.bytes"].value),
                    deletes="delete" in entries["cleanup.policy"].value,
                )
        return found

    def _timestamps(self, partitions: Iterable[Partition], which: OffsetSpec) -> dict[Partition, int]:
        """The timestamps of the messages that a question finds; partitions without one are left out."""
        answers = {p: self._unless_gone(a) for p, a in self._ask_offsets(partitions, which).items()}
        return {p: answer.timestamp for p, answer in answers.items() if answer is not None and answer.timestamp >= 0}

    def _timestamps_at(self, offsets: Mapping[Partition, int]) -> dict[Partition, int]:
        """The timestamp of the first message at or after each offset, by reading it."""
        if not offsets:
            return {}
        consumer = self._consumer(ONE_MESSAGE)
        found: dict[Partition, int] = {}
        until = time.monotonic() + self.timeout_seconds
        try:
            consumer.assign([TopicPartition(p.topic, p.number, offset) for p, offset in offsets.items()])
            while missing := [place for place in offsets if place not in found]:
                message = self._asked(lambda: consumer.poll(0.5))
                if message is not None and message.topic() is not None:
                    place = Partition(message.topic(), message.partition())
                    found.setdefault(place, self._timestamp_of(message))
                    consumer.incremental_unassign([TopicPartition(place.topic, place.number)])
                elif time.monotonic() > until:
                    raise self._silent(missing[0])
        finally:
            consumer.close()
        return {place: timestamp for place, timestamp in found.items() if timestamp >= 0}

    def _timestamp_of(self, message: Message) -> int:
        """A message's timestamp; -1 if it has none, or none is there."""
        error = message.error()
        if error is None:
            return int(message.timestamp()[1])
        if error.code() in NOTHING_THERE:
            return -1
        raise self._unreachable(KafkaException(error))

    def _sizes(self, partitions: list[Partition]) -> dict[Partition, int]:
        """The size of each partition's log. Empty where the broker will not tell: what was folded serves then."""
        if not partitions:
            return {}
        from kafka.admin import KafkaAdminClient
        from kafka.errors import KafkaError as PythonKafkaError

        logging.getLogger("kafka").setLevel(logging.CRITICAL)  # what matters comes back as an error
        topics = {
            partition.topic: [p.number for p in partitions if p.topic == partition.topic] for partition in partitions
        }
        try:
            admin = KafkaAdminClient(**for_python(self._client), bootstrap_timeout_ms=self.timeout_seconds * 1000)
            try:
                return _largest(admin.describe_log_dirs(topics))
            finally:
                admin.close()
        except PythonKafkaError:
            return {}

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

    def _silent(self, partition: Partition) -> KafkaSilentError:
        return KafkaSilentError(
            f"Kafka at {self.servers} gave no message of {partition} within {self.timeout_seconds:g} s",
            next="check the broker and the right to read the topic, then look again",
        )

    def _unreachable(self, error: KafkaException) -> KafkaSilentError:
        return KafkaSilentError(
            f"Kafka at {self.servers} does not answer: {error.args[0].str()}",
            next="check SERIATIM_KAFKA_BOOTSTRAP_SERVERS and the broker\n"
            "(`seriatim kafka status` for the embedded one), then run again",
        )


def _is_moving(answer: Any) -> bool:
    return _is_error(answer, MOVING)


def _is_error(answer: Any, codes: tuple[int, ...]) -> bool:
    error = answer.exception()
    return isinstance(error, KafkaException) and error.args[0].code() in codes


def _largest(answers: Iterable[Mapping[str, Any]]) -> dict[Partition, int]:
    """Of each partition's replicas the largest: those that are behind, or move to another disk, are smaller."""
    found: dict[Partition, int] = {}
    topics = (topic for answer in answers for folder in answer["log_dirs"] for topic in folder["topics"])
    for topic in topics:
        for replica in topic["partitions"]:
            place = Partition(topic["name"], replica["partition_index"])
            found[place] = max(found.get(place, 0), replica["partition_size"])
    return found


class _Quiet:
    """Takes the client library's own log lines, which would end up in a person's face."""

    def log(self, *_: Any, **__: Any) -> None:
        """Say nothing: what matters comes back as an error."""


_QUIET = _Quiet()
SCAN = {
    "group.id": "seriatim-scan",  # the library wants a name; no group is joined, nothing is committed
    "enable.auto.commit": "false",
    "enable.partition.eof": "true",
    "auto.offset.reset": "error",
    "log_level": "0",
}
ONE_MESSAGE = {
    "group.id": "seriatim-clock",  # the library wants a name; no group is joined, nothing is committed
    "enable.auto.commit": "false",
    "enable.partition.eof": "true",
    "auto.offset.reset": "error",
    "fetch.message.max.bytes": "65536",
    "queued.min.messages": "1",
    "log_level": "0",
}
"""Settings of a client that wants one message of each partition and no more."""
