"""Offsets: partitions, and ranges of offsets in them. All ranges are half-open.

Next: operations/plan.py plans slices with them; ledger/model.py stores them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from seriatim.errors import ConfigError, ensure

TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


class Partition(Struct, frozen=True, order=True):
    """A Kafka topic-partition, written `topic/number`."""

    topic: str
    number: int

    def __post_init__(self) -> None:
        ensure(bool(TOPIC_NAME.fullmatch(self.topic)), "not a topic name", topic=self.topic)
        ensure(self.number >= 0, "not a partition number", number=self.number)

    def __str__(self) -> str:
        return f"{self.topic}/{self.number}"

    @classmethod
    def parse(cls, text: str) -> Partition:
        """The partition that a person typed, such as `orders-a/3`. Anything else is refused."""
        topic, _, number = text.rpartition("/")
        if not TOPIC_NAME.fullmatch(topic) or not re.fullmatch("[0-9]{1,9}", number):
            raise ConfigError(
                f"{text!r} is not a partition", next="write it as TOPIC/NUMBER, like orders-a/3"
            )
        return cls(topic, int(number))


class OffsetRange(Struct, frozen=True, order=True):
    """Messages of one partition from `start` up to, not including, `end`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        ensure(0 <= self.start <= self.end, "range goes backward", start=self.start, end=self.end)

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, offset: int) -> bool:
        return self.start <= offset < self.end

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"

    def joined_with(self, later: OffsetRange) -> OffsetRange:
        """Both ranges as one. Only neighbours are joined: joining across a hole would hide it."""
        ensure(self.end == later.start, "ranges do not touch", end=self.end, start=later.start)
        return OffsetRange(self.start, later.end)

    def until(self, offset: int) -> OffsetRange:
        """The range up to `offset`."""
        ensure(
            self.start <= offset <= self.end,
            "cut lies outside",
            cut=offset,
            start=self.start,
            end=self.end,
        )
        return OffsetRange(self.start, offset)


Ranges = dict[Partition, OffsetRange]
"""A range of offsets for each partition."""


class Bounds(Struct, frozen=True):
    """Kafka's view of one partition: the id of its topic, the oldest offset that it has, and the
    next offset that it will write.
    """

    topic_id: str
    log_start: int
    log_end: int


BoundsByPartition = Mapping[Partition, Bounds]
"""What Kafka has of each partition."""
OffsetByPartition = Mapping[Partition, int]
"""One offset for each partition: where reading begins or ends."""


def drop_empty_ranges(ranges: Ranges) -> Ranges:
    """The ranges that hold at least one offset."""
    return {partition: offset_range for partition, offset_range in ranges.items() if offset_range}


def first_slice(ranges: Ranges, messages_max: int) -> Ranges:
    """The first slice of these ranges: at most `messages_max` offsets, shared fairly by partitions."""
    ensure(messages_max > 0, "a slice holds at least one message", messages_max=messages_max)
    remaining = drop_empty_ranges(ranges)
    share = max(1, messages_max // max(1, len(remaining)))
    slice_ranges: Ranges = {}
    # With more partitions than messages, only so many take part, with one message each.
    for partition in list(remaining)[:messages_max]:
        offset_range = remaining[partition]
        cut = min(offset_range.end, offset_range.start + share)
        slice_ranges[partition] = offset_range.until(cut)
    return slice_ranges


def cut_into_slices(ranges: Ranges, messages_max: int) -> list[Ranges]:
    """Cut ranges into slices of at most `messages_max` offsets, shared fairly by partitions."""
    slices: list[Ranges] = []
    remaining = drop_empty_ranges(ranges)
    while remaining:
        slice_ranges = first_slice(remaining, messages_max)
        for partition, taken in slice_ranges.items():
            remaining[partition] = OffsetRange(taken.end, remaining[partition].end)
        remaining = drop_empty_ranges(remaining)
        slices.append(slice_ranges)
    return slices
