"""Our streaming source for Spark: it plans which ranges of Kafka each batch has, and nothing else.

A query with Trigger.AvailableNow goes from given starts to given ends, in batches of bounded size.
Each partition of a batch is one row: topic, partition, from, until. Reading a row has no effect,
because Spark reads it again at every action, retry and speculation. The messages of the range are
read by the task that folds it.

Spark starts Python processes of its own for such a source, so this module imports little.

Next: kafka/spark_reader.py runs the query; kafka/task_reader.py reads the messages of a range.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from seriatim.engine.offsets import OffsetByPartition, OffsetRange, Partition, Ranges, first_slice

SOURCE_NAME = "seriatim_ranges"
RANGE_SCHEMA = "topic string, partition int, from long, until long"
RangeRow = tuple[str, int, int, int]
"""Topic, partition, and the first and the last offset (exclusive)."""
Offsets = dict[str, dict[str, int]]
"""Offsets by topic and partition number, as Spark keeps them in a checkpoint."""


class RangeSource(DataSource):  # type: ignore[misc]  # pyspark has no types here
    """The ranges between two offsets of each partition. Its options are `starts`, `ends` (both as
    JSON) and `messages_max`.
    """

    @classmethod
    def name(cls) -> str:
        """The name by which a query asks for this source."""
        return SOURCE_NAME

    def schema(self) -> str:
        """The columns of a range."""
        return RANGE_SCHEMA

    def streamReader(self, schema: Any) -> RangePlanner:  # noqa: N802  # Spark's name, here and below
        """The part that plans."""
        options = self.options
        return RangePlanner(
            json.loads(options["starts"]),
            json.loads(options["ends"]),
            int(options["messages_max"]),
        )


class RangePlanner(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Plans batches of at most `messages_max` offsets, from `starts` to `ends`."""

    def __init__(self, starts: Offsets, ends: Offsets, messages_max: int) -> None:
        self.starts = starts
        self.ends = ends
        self.messages_max = messages_max

    def initialOffset(self) -> Offsets:  # noqa: N802
        """Where the first batch begins: at the frontier of the ledger."""
        return self.starts

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Nothing: the ends were read from Kafka before the query was started."""

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """How large a batch may be."""
        return ReadMaxRows(self.messages_max)

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:  # noqa: N802
        """Where the batch that begins at `start` ends. Equal to `start`: all is read."""
        remaining = _ranges_between(start, self.ends)
        if isinstance(limit, ReadMaxRows):
            remaining = first_slice(remaining, limit.max_rows)
        ends = offsets_from_json(start)
        ends.update({partition: taken.end for partition, taken in remaining.items()})
        return offsets_to_json(ends)

    def partitions(self, start: Offsets, end: Offsets) -> list[InputPartition]:
        """The ranges of a batch. The longest comes first, so that it is not the one that all others
        wait for.
        """
        ranges = [item for item in _ranges_between(start, end).items() if len(item[1])]
        ranges.sort(key=lambda item: (-len(item[1]), item[0]))
        return [
            InputPartition((partition.topic, partition.number, taken.start, taken.end))
            for partition, taken in ranges
        ]

    def read(self, partition: InputPartition) -> Iterator[RangeRow]:
        """The one row of a range."""
        yield partition.value


def _ranges_between(start: Offsets, end: Offsets) -> Ranges:
    ends = offsets_from_json(end)
    ranges: Ranges = {}
    for partition, offset in offsets_from_json(start).items():
        ranges[partition] = OffsetRange(offset, ends[partition])
    return ranges


def offsets_to_json(offsets: OffsetByPartition) -> Offsets:
    """Offsets as Spark keeps them. Equal offsets are the same text, because Spark compares texts."""
    topics: Offsets = {}
    for partition, offset in sorted(offsets.items()):
        topics.setdefault(partition.topic, {})[str(partition.number)] = offset
    return topics


def offsets_from_json(topics: Offsets) -> dict[Partition, int]:
    """The opposite of `offsets_to_json`."""
    offsets = {}
    for topic, numbers in topics.items():
        for number, offset in numbers.items():
            offsets[Partition(topic, int(number))] = offset
    return offsets
