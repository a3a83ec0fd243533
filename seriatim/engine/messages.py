"""Messages: batches of one partition in columns, and what stands in for a message that is none.

Next: engine/decoding.py decodes their values; engine/fold.py folds the batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import ClassVar

from msgspec import Struct

from seriatim.engine.offsets import Partition
from seriatim.errors import ensure

Header = tuple[str, bytes | None]
KeysOrValues = Sequence[bytes | None]
"""The keys or the values of consecutive messages, as Kafka has them."""
SequenceNumbers = Sequence[int | None]
"""The producer's own counter of each of several messages; None where a message has none."""
TIMESTAMP_RANGE_MS = (-62_135_596_800_000, 253_402_300_799_999)
"""The first millisecond of year 1 and the last of 9999."""
INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
SPARK_TIMESTAMP_RANGE_MS = (INT64_MIN // 1000 + 1, INT64_MAX // 1000)
"""Timestamps whose microseconds fit into 64 bits. Spark cannot read a message with any other."""


class Poison(Struct, frozen=True):
    """Stands in for a message that no machine gets, most often because it cannot be decoded."""

    cause: str
    has_no_effect: bool = False
    """The message is as it should be, but it says nothing about any session, as a tombstone or a
    heartbeat. It is passed over, and it is no finding.
    """
    sequence: ClassVar[None] = None


class CapturedMessage(Struct, frozen=True, kw_only=True):
    """A message as it was captured from Kafka or written by hand, with its partition and offset."""

    partition: Partition
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int = 0


class MessageBatch:
    """Messages of one partition with no hole inside, in columns: message i has offset `start + i`."""

    def __init__(
        self,
        start: int,
        timestamps: Sequence[int],
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        headers: Sequence[Sequence[Header]] | None = None,
    ) -> None:
        ensure(
            len(timestamps) == len(keys) == len(values), "columns of different length", start=start
        )
        self.start = start
        self.timestamps = timestamps
        """Milliseconds since 1970, as in Kafka."""
        self.keys = keys
        self.values = values
        self.headers = headers

    def __len__(self) -> int:
        return len(self.values)

    def first_messages(self, count: int) -> MessageBatch:
        """The first `count` messages."""
        timestamps = self.timestamps[:count]
        keys = self.keys[:count]
        values = self.values[:count]
        headers = None
        if self.headers is not None:
            headers = self.headers[:count]
        return MessageBatch(self.start, timestamps, keys, values, headers)

    def size_bytes(self) -> int:
        """The size of all keys and values."""
        contents = (*self.keys, *self.values)
        return sum(len(content) for content in contents if content is not None)

    def session_names(self) -> list[str | None]:
        """Sessions by Kafka key; None where there is no readable key."""
        return [session_name_of_key(key) for key in self.keys]

    @property
    def has_rising_timestamps(self) -> bool:
        """Whether no timestamp is below the one before."""
        return all(before <= after for before, after in pairwise(self.timestamps))

    def time_range(self) -> tuple[int, int] | None:
        """The earliest and the latest timestamp; None if there are no messages.

        It costs little. So a rule about times can ask it first whether the batch has anything to
        find, and look at the single messages only then. Such a rule needs no compiled form.
        """
        if not len(self):
            return None
        return int(min(self.timestamps)), int(max(self.timestamps))

    def invalid_timestamp_positions(self) -> list[int]:
        """Positions of messages whose timestamp is not between the years 1 and 9999."""
        time_range = self.time_range()
        lowest, highest = TIMESTAMP_RANGE_MS
        if time_range is None or (lowest <= time_range[0] and time_range[1] <= highest):
            return []
        return [i for i, time in enumerate(self.timestamps) if not lowest <= time <= highest]


def first_unreadable_message(batches: Iterable[MessageBatch]) -> tuple[int, str] | None:
    """The first message whose timestamp Spark cannot read: its offset, and the reason; None if there
    is none.
    """
    lowest_ms, highest_ms = SPARK_TIMESTAMP_RANGE_MS
    for batch in batches:
        for i, timestamp_ms in enumerate(batch.timestamps):
            if not lowest_ms <= timestamp_ms <= highest_ms:
                return batch.start + i, f"its timestamp is {timestamp_ms} ms since 1970"
    return None


def describe_message_fields(
    session: str | None, sequence: str | None, *, has_session_per_partition: bool
) -> str:
    """What names the session and the sequence of a message, as text. Saved state depends on it, and
    it is stored, so it must not change.
    """
    session_text = session or "by key"
    if has_session_per_partition:
        session_text = "by partition"
    return f"session {session_text}, sequence {sequence or 'none'}"


def session_name_of_partition(partition: Partition) -> str:
    """The name of the one session that a partition has with `session = "partition"`. It differs from
    partition to partition, so that no session seems to have moved from one to another.
    """
    return f"partition-{partition.number}"


def session_name_of_key(key: bytes | None) -> str | None:
    """A Kafka key as a session's name; None if it is missing or not UTF-8."""
    if key is None:
        return None
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None
