"""Kafka's log for discovery: topics by regex over the whole name, their ids, log start, log end and
retention.

Next: kafka/spark_reader.py and kafka/task_reader.py read the messages.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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

from seriatim.engine.messages import first_unreadable_message
from seriatim.engine.offsets import Bounds, BoundsByPartition, OffsetByPartition, Partition, Ranges
from seriatim.engine.retention import RetainedLog, RetentionRules
from seriatim.errors import KafkaSilentError
from seriatim.kafka.client import ClientSettings, create_client, python_settings
from seriatim.kafka.past_messages import CONSUMER_SETTINGS, KafkaPastMessageReader, assign

T = TypeVar("T")
TOPIC_GONE_ERRORS = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
)
LEADER_CHANGE_ERRORS = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
)
"""A partition that was just created or moved to another broker answers after a moment."""
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
"""There is no message at an offset: the log ends there, or Kafka has just dropped it."""
SAMPLE_PARTITIONS = 8
SAMPLE_MESSAGES = 100
SAMPLE_SECONDS = 3.0
"""Bounds of the sample that tells how large messages are."""
INTERNAL_TOPICS = ("__consumer_offsets", "__transaction_state", "__share_group_state")
"""Kafka's own topics: a stream never reads these, whatever its regex matches."""


class KafkaLog:
    """A Kafka cluster, asked through its admin interface."""

    def __init__(
        self,
        client_settings: ClientSettings,
        isolation: str = "read_committed",
        timeout_seconds: float = 20,
    ) -> None:
        self.servers = client_settings["bootstrap.servers"]
        self.timeout_seconds = timeout_seconds
        self.cluster_id = ""
        """The id of the cluster; empty until it was asked for something."""
        self._client_settings = dict(client_settings)
        self._admin = create_client(
            AdminClient, {**client_settings, "log_level": 0, "logger": _NULL_LOGGER}
        )
        self._isolation_name = isolation
        self._isolation = IsolationLevel.READ_UNCOMMITTED
        if isolation == "read_committed":
            self._isolation = IsolationLevel.READ_COMMITTED

    def bounds(self, pattern: str) -> dict[Partition, Bounds]:
        """The bounds of every partition of every topic whose whole name matches."""
        topic_ids = self._matching_partitions(pattern)
        starts = self._list_offsets(topic_ids, OffsetSpec.earliest())
        ends = self._list_offsets(topic_ids, OffsetSpec.latest())
        bounds = {}
        for partition, topic_id in topic_ids.items():
            # A topic may be deleted between the requests.
            if partition in starts and partition in ends:
                log_start = starts[partition]
                # Start and end are two requests: the log may have changed between them.
                log_end = max(ends[partition], log_start)
                bounds[partition] = Bounds(topic_id, log_start, log_end)
        return bounds

    def offsets_for_time(self, partitions: list[Partition], timestamp: int) -> dict[Partition, int]:
        """The first offset at or after a time (milliseconds since 1970); -1 where there is none."""
        return self._list_offsets(partitions, OffsetSpec.for_timestamp(timestamp))

    def first_unreadable_messages(self, ranges: Ranges) -> dict[Partition, tuple[int, str]]:
        """The first message of each range whose timestamp Spark cannot read: its offset, and the
        reason. Ranges without one are left out.
        """
        unreadable = {}
        reader = KafkaPastMessageReader(
            self._client_settings,
            self._isolation_name,
            self.timeout_seconds,
            end_errors=NO_MESSAGE_ERRORS,
        )
        try:
            for partition, offset_range in ranges.items():
                message = first_unreadable_message(reader.read(partition, offset_range))
                if message is not None:
                    unreadable[partition] = message
        finally:
            reader.close()
        return unreadable

    def sample_message_bytes(self, ranges: Ranges) -> dict[Partition, int]:
        """The average size of the first messages of a few of these ranges. A range whose messages
        do not arrive in time is left out.
        """
        starts = {}
        for partition in list(ranges)[:SAMPLE_PARTITIONS]:
            starts[partition] = ranges[partition].start
        with self._consuming(starts, {"isolation.level": self._isolation_name}) as consumer:
            sizes = _sample_sizes(consumer, starts)
        averages = {}
        for partition, partition_sizes in sizes.items():
            if partition_sizes:
                averages[partition] = sum(partition_sizes) // len(partition_sizes) + 1
        return averages

    @contextmanager
    def _consuming(
        self, offsets: OffsetByPartition, settings: ClientSettings
    ) -> Iterator[Consumer]:
        """A consumer that reads from these offsets on."""
        consumer = create_client(
            Consumer,
            {**self._client_settings, **CONSUMER_SETTINGS, **settings, "logger": _NULL_LOGGER},
        )
        try:
            assign(consumer, offsets)
            yield consumer
        except KafkaException as error:
            raise self._unreachable_error(error) from None
        finally:
            consumer.close()

    def read_retention(
        self, bounds: BoundsByPartition, frontiers: OffsetByPartition
    ) -> dict[Partition, RetainedLog]:
        """What Kafka holds of partitions with these bounds, seen from these frontiers, and for how
        long.
        """
        rules = self._retention_rules({partition.topic for partition in bounds})
        # Topics that were deleted since the bounds were read have no rules.
        known_bounds = {
            partition: partition_bounds
            for partition, partition_bounds in bounds.items()
            if partition.topic in rules
        }
        # One request each for all partitions. Only a frontier inside of a log needs a message.
        oldest_ms = self._timestamps_by_spec(known_bounds, OffsetSpec.for_timestamp(0))
        newest_ms = self._timestamps_by_spec(known_bounds, OffsetSpec.max_timestamp())
        frontier_ms = self._frontier_timestamps(known_bounds, frontiers, oldest_ms)
        sizes = self._log_sizes(
            [partition for partition in known_bounds if rules[partition.topic].has_size_limit]
        )
        return {
            partition: RetainedLog(
                rules=rules[partition.topic],
                frontier=frontiers[partition],
                log_start=partition_bounds.log_start,
                log_end=partition_bounds.log_end,
                oldest_ms=oldest_ms.get(partition),
                frontier_ms=frontier_ms.get(partition),
                newest_ms=newest_ms.get(partition),
                log_bytes=sizes.get(partition),
            )
            for partition, partition_bounds in known_bounds.items()
        }

    def _frontier_timestamps(
        self,
        bounds: BoundsByPartition,
        frontiers: OffsetByPartition,
        oldest_ms: Mapping[Partition, int],
    ) -> dict[Partition, int]:
        """The timestamp of the first message at or after each frontier, where there is one."""
        timestamps = {}
        offsets_to_read = {}
        for partition, partition_bounds in bounds.items():
            frontier = frontiers[partition]
            if frontier <= partition_bounds.log_start:
                if partition in oldest_ms:
                    timestamps[partition] = oldest_ms[partition]
            elif frontier < partition_bounds.log_end:
                offsets_to_read[partition] = frontier
        return timestamps | self._timestamps_at(offsets_to_read)

    def _retention_rules(self, topics: Iterable[str]) -> dict[str, RetentionRules]:
        """The retention settings of topics, broker defaults included. Topics that vanished are left
        out.
        """
        resources = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in sorted(topics)]
        if not resources:
            return {}
        answers = self._call_kafka(
            lambda: self._admin.describe_configs(resources, request_timeout=self.timeout_seconds)
        )
        rules: dict[str, RetentionRules] = {}
        for resource, answer in answers.items():
            if _is_error(answer, AUTHORIZATION_ERRORS):
                rules[resource.name] = RetentionRules(is_known=False)
                continue
            entries = self._result_or_none(answer)
            if entries is not None:
                rules[resource.name] = RetentionRules(
                    retention_ms=int(entries["retention.ms"].value),
                    retention_bytes=int(entries["retention.bytes"].value),
                    has_delete_policy="delete" in entries["cleanup.policy"].value,
                )
        return rules

    def _timestamps_by_spec(
        self, partitions: Iterable[Partition], offset_spec: OffsetSpec
    ) -> dict[Partition, int]:
        """The timestamp of the message that a specification finds in each partition; partitions
        without one are left out.
        """
        timestamps = {}
        for partition, answer in self._request_offsets(partitions, offset_spec).items():
            result = self._result_or_none(answer)
            if result is not None and result.timestamp >= 0:
                timestamps[partition] = result.timestamp
        return timestamps

    def _timestamps_at(self, offsets: OffsetByPartition) -> dict[Partition, int]:
        """The timestamp of the first message at or after each offset, by reading it."""
        if not offsets:
            return {}
        with self._consuming(offsets, SINGLE_MESSAGE_SETTINGS) as consumer:
            timestamps = self._poll_timestamps(consumer, set(offsets))
        return {
            partition: timestamp for partition, timestamp in timestamps.items() if timestamp >= 0
        }

    def _poll_timestamps(
        self, consumer: Consumer, partitions: set[Partition]
    ) -> dict[Partition, int]:
        """The timestamp of the first message of each partition; -1 where there is none."""
        timestamps: dict[Partition, int] = {}
        deadline = time.monotonic() + self.timeout_seconds
        while missing := partitions - timestamps.keys():
            message = consumer.poll(0.5)
            if message is not None and message.topic() is not None:
                partition = Partition(message.topic(), message.partition())
                timestamps.setdefault(partition, self._timestamp_of(message))
                # Without this the consumer would go on fetching messages that nobody needs.
                consumer.incremental_unassign([TopicPartition(partition.topic, partition.number)])
            elif time.monotonic() > deadline:
                raise self._no_message_error(min(missing))
        return timestamps

    def _timestamp_of(self, message: Message) -> int:
        """The timestamp of a message; -1 if it has none, or if there is no message."""
        error = message.error()
        if error is None:
            return int(message.timestamp()[1])
        if error.code() in NO_MESSAGE_ERRORS:
            return -1
        raise self._unreachable_error(KafkaException(error))

    def _log_sizes(self, partitions: list[Partition]) -> dict[Partition, int]:
        """The size of each partition's log in bytes. Empty where the broker does not tell it: the
        caller then estimates it from the messages folded so far.
        """
        if not partitions:
            return {}
        from kafka.admin import KafkaAdminClient
        from kafka.errors import KafkaError as PythonKafkaError

        # Everything important comes back as an error.
        logging.getLogger("kafka").setLevel(logging.CRITICAL)
        topics: dict[str, list[int]] = {}
        for partition in partitions:
            topics.setdefault(partition.topic, []).append(partition.number)
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
        """The matching partitions, each with the id of its topic."""
        topic_regex = re.compile(pattern)
        metadata = self._call_kafka(lambda: self._admin.list_topics(timeout=self.timeout_seconds))
        self.cluster_id = metadata.cluster_id or ""
        topics = metadata.topics
        names = [
            name
            for name in sorted(topics)
            if topic_regex.fullmatch(name) and name not in INTERNAL_TOPICS
        ]
        if not names:
            return {}
        answers = self._call_kafka(
            lambda: self._admin.describe_topics(
                TopicCollection(names), request_timeout=self.timeout_seconds
            )
        )
        topic_ids: dict[Partition, str] = {}
        for name, answer in answers.items():
            description = self._result_or_none(answer)
            if description is not None:
                for partition in description.partitions:
                    topic_ids[Partition(name, partition.id)] = str(description.topic_id)
        return topic_ids

    def _list_offsets(
        self, partitions: Iterable[Partition], offset_spec: OffsetSpec
    ) -> dict[Partition, int]:
        """The offset that a specification finds in each partition. While a partition has no leader
        it is asked again, until the timeout.
        """
        offsets: dict[Partition, int] = {}
        waiting = set(partitions)
        deadline = time.monotonic() + self.timeout_seconds
        while waiting:
            for partition, answer in self._request_offsets(waiting, offset_spec).items():
                # It stays in `waiting` and is asked again. After the deadline its error is raised.
                if _is_error(answer, LEADER_CHANGE_ERRORS) and time.monotonic() < deadline:
                    continue
                waiting.discard(partition)
                result = self._result_or_none(answer)
                if result is not None:
                    offsets[partition] = result.offset
            if waiting:
                time.sleep(0.1)
        return offsets

    def _request_offsets(
        self, partitions: Iterable[Partition], offset_spec: OffsetSpec
    ) -> dict[Partition, Any]:
        """Kafka's answer for each partition, not looked at yet."""
        requests = {
            TopicPartition(partition.topic, partition.number): offset_spec
            for partition in partitions
        }
        answers = self._call_kafka(
            lambda: self._admin.list_offsets(
                requests, isolation_level=self._isolation, request_timeout=self.timeout_seconds
            )
        )
        return {
            Partition(topic_partition.topic, topic_partition.partition): answer
            for topic_partition, answer in answers.items()
        }

    def _call_kafka(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except KafkaException as error:
            raise self._unreachable_error(error) from None

    def _result_or_none(self, answer: Any) -> Any:
        """The result of an answer; None if the topic was deleted meanwhile."""
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


def _is_error(answer: Any, codes: tuple[int, ...]) -> bool:
    error = answer.exception()
    return isinstance(error, KafkaException) and error.args[0].code() in codes


def _sample_sizes(
    consumer: Consumer, partitions: Iterable[Partition]
) -> dict[Partition, list[int]]:
    """The sizes of messages, until each partition has one or has ended, or the time is over."""
    sizes: dict[Partition, list[int]] = {partition: [] for partition in partitions}
    waiting = set(sizes)
    deadline = time.monotonic() + SAMPLE_SECONDS
    while waiting and time.monotonic() < deadline:
        for message in consumer.consume(SAMPLE_MESSAGES, timeout=0.2):
            partition = Partition(message.topic() or "", message.partition() or 0)
            waiting.discard(partition)
            # An error is the end of the log, or a partition that cannot be read now.
            if message.error() is None:
                size = len(message.key() or b"") + len(message.value() or b"")
                sizes[partition].append(size)
    return sizes


def _largest_replicas(answers: Iterable[Mapping[str, Any]]) -> dict[Partition, int]:
    """The size of the largest replica of each partition. Replicas that are behind, or that move to
    another disk, are smaller.
    """
    sizes: dict[Partition, int] = {}
    for answer in answers:
        for folder in answer["log_dirs"]:
            for topic in folder["topics"]:
                for replica in topic["partitions"]:
                    partition = Partition(topic["name"], replica["partition_index"])
                    sizes[partition] = max(sizes.get(partition, 0), replica["partition_size"])
    return sizes


class _NullLogger:
    """Drops the log lines of the client library, which would be printed on the terminal."""

    def log(self, *_: Any, **__: Any) -> None:
        """Print nothing: everything important comes back as an error."""


_NULL_LOGGER = _NullLogger()
SINGLE_MESSAGE_SETTINGS = {"fetch.message.max.bytes": "65536", "queued.min.messages": "1"}
"""Settings of a consumer that reads one message of each partition and then stops."""
