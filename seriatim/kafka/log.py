"""Kafka as discovery sees it: topics by whole-name regex, their ids, log start and log end, how
long they keep.

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

from seriatim.engine.messages import SPARK_TIMESTAMP_RANGE_MS
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import KafkaSilentError
from seriatim.kafka.client import create_client, python_settings
from seriatim.kafka.retention import RetainedLog, RetentionRules
from seriatim.operations.slicing import Bounds, Ranges

T = TypeVar("T")
TOPIC_GONE_ERRORS = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
)
LEADER_CHANGE_ERRORS = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE)
"""A partition just made, or just given to another broker: it answers in a moment."""
AUTHORIZATION_ERRORS = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)
NO_MESSAGE_ERRORS = (
    *TOPIC_GONE_ERRORS,
    KafkaError._PARTITION_EOF,
    KafkaError._AUTO_OFFSET_RESET,
    KafkaError.OFFSET_OUT_OF_RANGE,
)
"""No message at an offset: the log ends there, or has just lost it."""
SAMPLE_PARTITIONS, SAMPLE_MESSAGES, SAMPLE_SECONDS = 8, 100, 3.0
"""How much is looked at to know how large messages are."""
INTERNAL_TOPICS = ("__consumer_offsets", "__transaction_state", "__share_group_state")
"""Kafka's own: a stream never means these."""


class KafkaLog:
    """A Kafka cluster, asked through its admin interface."""

    def __init__(
        self,
        client_settings: Mapping[str, str],
        isolation: str = "read_committed",
        timeout_seconds: float = 20,
    ) -> None:
        self.servers = client_settings["bootstrap.servers"]
        self.timeout_seconds = timeout_seconds
        self._client_settings = dict(client_settings)
        self._admin = create_client(
            AdminClient, {**client_settings, "log_level": 0, "logger": _NULL_LOGGER}
        )
        committed = isolation == "read_committed"
        self._isolation_name = isolation
        self._isolation = (
            IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        )

    def bounds(self, pattern: str) -> dict[Partition, Bounds]:
        """Every partition of every topic whose whole name matches."""
        partitions = self._matching_partitions(pattern)
        starts = self._list_offsets(partitions, OffsetSpec.earliest())
        ends = self._list_offsets(partitions, OffsetSpec.latest())
        return {
            partition: Bounds(topic_id, starts[partition], max(ends[partition], starts[partition]))
            for partition, topic_id in partitions.items()
            if partition in starts and partition in ends
        }

    def offsets_for_time(self, partitions: list[Partition], timestamp: int) -> dict[Partition, int]:
        """The first offset at or after a time (milliseconds since 1970); -1 where there is none."""
        return self._list_offsets(
            dict.fromkeys(partitions, ""), OffsetSpec.for_timestamp(timestamp)
        )

    def first_unreadable_messages(self, ranges: Ranges) -> dict[Partition, tuple[int, str]]:
        """The first message of each range whose timestamp Spark cannot read, by offset, and why."""
        found: dict[Partition, tuple[int, str]] = {}
        consumer = self._create_consumer({**SCAN_SETTINGS, "isolation.level": self._isolation_name})
        try:
            for partition, whole in ranges.items():
                consumer.assign([TopicPartition(partition.topic, partition.number, whole.start)])
                for message in self._scan_range(consumer, partition, whole):
                    if (
                        not SPARK_TIMESTAMP_RANGE_MS[0]
                        <= (stamp := message.timestamp()[1])
                        <= SPARK_TIMESTAMP_RANGE_MS[1]
                    ):
                        found[partition] = (
                            message.offset() or 0,
                            f"its timestamp is {stamp} ms since 1970",
                        )
                        break
        except KafkaException as error:
            raise self._unreachable_error(error) from None
        finally:
            consumer.close()
        return found

    def sample_message_bytes(self, ranges: Ranges) -> dict[Partition, int]:
        """How large the first messages of a few of these ranges are, on average. None that come in
        time: not known.
        """
        sizes: dict[Partition, list[int]] = {
            partition: [] for partition in list(ranges)[:SAMPLE_PARTITIONS]
        }
        ended, until = set(), time.monotonic() + SAMPLE_SECONDS
        consumer = self._create_consumer({**SCAN_SETTINGS, "isolation.level": self._isolation_name})
        try:
            consumer.assign([TopicPartition(p.topic, p.number, ranges[p].start) for p in sizes])
            while time.monotonic() < until and any(not sizes[p] and p not in ended for p in sizes):
                for message in consumer.consume(SAMPLE_MESSAGES, timeout=0.2):
                    partition = Partition(message.topic() or "", message.partition() or 0)
                    if message.error() is None:
                        sizes[partition].append(
                            len(message.key() or b"") + len(message.value() or b"")
                        )
                    else:
                        ended.add(partition)
        except KafkaException as error:
            raise self._unreachable_error(error) from None
        finally:
            consumer.close()
        return {
            partition: sum(those) // len(those) + 1 for partition, those in sizes.items() if those
        }

    def _create_consumer(self, settings: Mapping[str, str]) -> Consumer:
        return create_client(
            Consumer, {**self._client_settings, **settings, "logger": _NULL_LOGGER}
        )

    def _scan_range(
        self, consumer: Consumer, partition: Partition, offset_range: OffsetRange
    ) -> Iterator[Message]:
        """The messages of a range, until its end or the log's."""
        heard = time.monotonic()
        while True:
            for message in consumer.consume(1000, timeout=1):
                heard, error = time.monotonic(), message.error()
                if error is not None and error.code() not in NO_MESSAGE_ERRORS:
                    raise KafkaException(error)
                if error is not None or (message.offset() or 0) >= offset_range.end:
                    return
                yield message
            if time.monotonic() - heard > self.timeout_seconds:
                raise self._no_message_error(partition)

    def read_retention(
        self, bounds: Mapping[Partition, Bounds], frontiers: Mapping[Partition, int]
    ) -> dict[Partition, RetainedLog]:
        """What Kafka holds of partitions with these bounds, seen from these frontiers, and for how
        long.
        """
        rules = self._retention_rules({partition.topic for partition in bounds})
        there = {partition: seen for partition, seen in bounds.items() if partition.topic in rules}
        oldest = self._timestamps_by_spec(there, OffsetSpec.for_timestamp(0))
        newest = self._timestamps_by_spec(there, OffsetSpec.max_timestamp())
        inside = {
            p: frontiers[p]
            for p, seen in there.items()
            if seen.log_start < frontiers[p] < seen.log_end
        }
        waiting = {
            p: oldest[p]
            for p, seen in there.items()
            if p in oldest and frontiers[p] <= seen.log_start
        }
        waiting |= self._timestamps_at(inside)
        sizes = self._log_sizes(
            [partition for partition in there if rules[partition.topic].has_size_limit]
        )
        return {
            p: RetainedLog(
                rules=rules[p.topic],
                frontier=frontiers[p],
                log_start=seen.log_start,
                log_end=seen.log_end,
                oldest_ms=oldest.get(p),
                frontier_ms=waiting.get(p),
                newest_ms=newest.get(p),
                log_bytes=sizes.get(p),
            )
            for p, seen in there.items()
        }

    def _retention_rules(self, topics: Iterable[str]) -> dict[str, RetentionRules]:
        """Topics' retention settings, broker defaults included. Topics that vanished are left out."""
        asked = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in sorted(topics)]
        if not asked:
            return {}
        answers = self._call_kafka(
            lambda: self._admin.describe_configs(asked, request_timeout=self.timeout_seconds)
        )
        found: dict[str, RetentionRules] = {}
        for resource, answer in answers.items():
            if _is_error(answer, AUTHORIZATION_ERRORS):
                found[resource.name] = RetentionRules(is_known=False)
            elif (entries := self._result_or_none(answer)) is not None:
                found[resource.name] = RetentionRules(
                    retention_ms=int(entries["retention.ms"].value),
                    retention_bytes=int(entries["retention.bytes"].value),
                    has_delete_policy="delete" in entries["cleanup.policy"].value,
                )
        return found

    def _timestamps_by_spec(
        self, partitions: Iterable[Partition], offset_spec: OffsetSpec
    ) -> dict[Partition, int]:
        """The timestamps of the messages that a question finds; partitions without one are left
        out.
        """
        answers = {
            p: self._result_or_none(a)
            for p, a in self._request_offsets(partitions, offset_spec).items()
        }
        return {
            p: answer.timestamp
            for p, answer in answers.items()
            if answer is not None and answer.timestamp >= 0
        }

    def _timestamps_at(self, offsets: Mapping[Partition, int]) -> dict[Partition, int]:
        """The timestamp of the first message at or after each offset, by reading it."""
        if not offsets:
            return {}
        consumer = self._create_consumer(SINGLE_MESSAGE_SETTINGS)
        found: dict[Partition, int] = {}
        until = time.monotonic() + self.timeout_seconds
        try:
            consumer.assign(
                [TopicPartition(p.topic, p.number, offset) for p, offset in offsets.items()]
            )
            while missing := [place for place in offsets if place not in found]:
                message = self._call_kafka(lambda: consumer.poll(0.5))
                if message is not None and message.topic() is not None:
                    place = Partition(message.topic(), message.partition())
                    found.setdefault(place, self._timestamp_of(message))
                    consumer.incremental_unassign([TopicPartition(place.topic, place.number)])
                elif time.monotonic() > until:
                    raise self._no_message_error(missing[0])
        finally:
            consumer.close()
        return {place: timestamp for place, timestamp in found.items() if timestamp >= 0}

    def _timestamp_of(self, message: Message) -> int:
        """A message's timestamp; -1 if it has none, or none is there."""
        error = message.error()
        if error is None:
            return int(message.timestamp()[1])
        if error.code() in NO_MESSAGE_ERRORS:
            return -1
        raise self._unreachable_error(KafkaException(error))

    def _log_sizes(self, partitions: list[Partition]) -> dict[Partition, int]:
        """The size of each partition's log. Empty where the broker will not tell: what was folded
        serves then.
        """
        if not partitions:
            return {}
        from kafka.admin import KafkaAdminClient
        from kafka.errors import KafkaError as PythonKafkaError

        logging.getLogger("kafka").setLevel(logging.CRITICAL)  # what matters comes back as an error
        topics = {
            partition.topic: [p.number for p in partitions if p.topic == partition.topic]
            for partition in partitions
        }
        try:
            admin = KafkaAdminClient(
                **python_settings(self._client_settings),
                bootstrap_timeout_ms=self.timeout_seconds * 1000,
            )
            try:
                return _largest_replicas(admin.describe_log_dirs(topics))
            finally:
                admin.close()
        except PythonKafkaError:
            return {}

    def _matching_partitions(self, pattern: str) -> dict[Partition, str]:
        """Matching partitions and their topics' ids."""
        wanted = re.compile(pattern)
        known = self._call_kafka(
            lambda: self._admin.list_topics(timeout=self.timeout_seconds).topics
        )
        names = sorted(
            name for name in known if wanted.fullmatch(name) and name not in INTERNAL_TOPICS
        )
        if not names:
            return {}
        answers = self._call_kafka(
            lambda: self._admin.describe_topics(
                TopicCollection(names), request_timeout=self.timeout_seconds
            )
        )
        found: dict[Partition, str] = {}
        for name, answer in answers.items():
            topic = self._result_or_none(answer)
            if topic is not None:
                found |= {
                    Partition(name, part.id): str(topic.topic_id) for part in topic.partitions
                }
        return found

    def _list_offsets(
        self, partitions: Mapping[Partition, str], offset_spec: OffsetSpec
    ) -> dict[Partition, int]:
        found: dict[Partition, int] = {}
        left, until = set(partitions), time.monotonic() + self.timeout_seconds
        while left:
            for partition, answer in self._request_offsets(left, offset_spec).items():
                if not (_is_leader_change(answer) and time.monotonic() < until):
                    left.discard(partition)
                    offset = self._result_or_none(answer)
                    found |= {} if offset is None else {partition: offset.offset}
            time.sleep(0.1 if left else 0)
        return found

    def _request_offsets(
        self, partitions: Iterable[Partition], offset_spec: OffsetSpec
    ) -> dict[Partition, Any]:
        asked = {TopicPartition(p.topic, p.number): offset_spec for p in partitions}
        answers = self._call_kafka(
            lambda: self._admin.list_offsets(
                asked, isolation_level=self._isolation, request_timeout=self.timeout_seconds
            )
        )
        return {
            Partition(place.topic, place.partition): answer for place, answer in answers.items()
        }

    def _call_kafka(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except KafkaException as error:
            raise self._unreachable_error(error) from None

    def _result_or_none(self, answer: Any) -> Any:
        """An answer, or None if the topic vanished while we asked."""
        try:
            return answer.result()
        except KafkaException as error:
            if error.args[0].code() in TOPIC_GONE_ERRORS:
                return None
            raise self._unreachable_error(error) from None

    def _no_message_error(self, partition: Partition) -> KafkaSilentError:
        return KafkaSilentError(
            f"Kafka at {self.servers} gave no message of {partition} within {self.timeout_seconds:g} s",
            next="check the broker and the right to read the topic, then look again",
        )

    def _unreachable_error(self, error: KafkaException) -> KafkaSilentError:
        return KafkaSilentError(
            f"Kafka at {self.servers} does not answer: {error.args[0].str()}",
            next="check SERIATIM_KAFKA_BOOTSTRAP_SERVERS and the broker\n"
            "(`seriatim kafka status` for the embedded one), then run again",
        )


def _is_leader_change(answer: Any) -> bool:
    return _is_error(answer, LEADER_CHANGE_ERRORS)


def _is_error(answer: Any, codes: tuple[int, ...]) -> bool:
    error = answer.exception()
    return isinstance(error, KafkaException) and error.args[0].code() in codes


def _largest_replicas(answers: Iterable[Mapping[str, Any]]) -> dict[Partition, int]:
    """Of each partition's replicas the largest: those that are behind, or move to another disk, are
    smaller.
    """
    found: dict[Partition, int] = {}
    topics = (
        topic for answer in answers for folder in answer["log_dirs"] for topic in folder["topics"]
    )
    for topic in topics:
        for replica in topic["partitions"]:
            place = Partition(topic["name"], replica["partition_index"])
            found[place] = max(found.get(place, 0), replica["partition_size"])
    return found


class _NullLogger:
    """Takes the client library's own log lines, which would end up in a person's face."""

    def log(self, *_: Any, **__: Any) -> None:
        """Say nothing: what matters comes back as an error."""


_NULL_LOGGER = _NullLogger()
SCAN_SETTINGS = {
    "group.id": "seriatim-scan",  # the library wants a name; no group is joined, nothing is committed
    "enable.auto.commit": "false",
    "enable.partition.eof": "true",
    "auto.offset.reset": "error",
    "log_level": "0",
}
SINGLE_MESSAGE_SETTINGS = {
    "group.id": "seriatim-clock",  # the library wants a name; no group is joined, nothing is committed
    "enable.auto.commit": "false",
    "enable.partition.eof": "true",
    "auto.offset.reset": "error",
    "fetch.message.max.bytes": "65536",
    "queued.min.messages": "1",
    "log_level": "0",
}
"""Settings of a client that wants one message of each partition and no more."""
