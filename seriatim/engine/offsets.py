"""Offsets: the arithmetic of where we are in a partition. Everything half-open, nothing else here.

Next room: slice.py cuts work out of these; ledger.py remembers them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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
        """`orders-a/3` as a person types it."""
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
        """The two as one. Only neighbours join: a join across a hole would hide it."""
        ensure(self.end == later.start, "ranges do not touch", end=self.end, start=later.start)
        return OffsetRange(self.start, later.end)

    def until(self, offset: int) -> OffsetRange:
        """The part before `offset`."""
        ensure(
            self.start <= offset <= self.end,
            "cut lies outside",
            cut=offset,
            start=self.start,
            end=self.end,
        )
        return OffsetRange(self.start, offset)


def find_holes(offsets: Iterable[int], offset_range: OffsetRange) -> list[OffsetRange]:
    """The offsets of `within` that do not occur in `offsets` (which rise), as ranges."""
    missing, expected = [], offset_range.start
    for offset in offsets:
        ensure(
            expected <= offset < offset_range.end,
            "offset outside its range or out of order",
            offset=offset,
        )
        if offset > expected:
            missing.append(OffsetRange(expected, offset))
        expected = offset + 1
    if expected < offset_range.end:
        missing.append(OffsetRange(expected, offset_range.end))
    return missing
