"""Messages: batches of one partition in columns, and how bytes become typed messages.

Next: engine/machine.py says what a machine does with a message; engine/fold.py folds the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from seriatim.engine.offsets import Partition
from seriatim.errors import ensure

Header = tuple[str, bytes | None]
TIMESTAMP_RANGE_MS = (-62_135_596_800_000, 253_402_300_799_999)
"""The first millisecond of year 1 and the last of 9999."""
INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
SPARK_TIMESTAMP_RANGE_MS = (INT64_MIN // 1000 + 1, INT64_MAX // 1000)
"""Timestamps whose microseconds fit into 64 bits. Spark cannot read a message with any other."""


class Poison(Struct, frozen=True):
    """Stands in for a message that could not be decoded."""

    cause: str
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
        headers = None if self.headers is None else self.headers[:count]
        return MessageBatch(
            self.start, self.timestamps[:count], self.keys[:count], self.values[:count], headers
        )

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

    def invalid_timestamp_positions(self) -> list[int]:
        """Positions of messages whose timestamp is not between the years 1 and 9999."""
        lowest, highest = TIMESTAMP_RANGE_MS
        return [i for i, time in enumerate(self.timestamps) if not lowest <= time <= highest]


def session_name_of_key(key: bytes | None) -> str | None:
    """A Kafka key as a session's name; None if it is missing or not UTF-8."""
    if key is None:
        return None
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None


def plain_values(value: Any, decode_raw: Callable[[bytes], Any] = msgspec.json.decode) -> Any:
    """A Struct as dicts, lists and scalars. A `msgspec.Raw` in it becomes what it holds, or text if
    it cannot be decoded.
    """

    def decode_or_text(raw: Any) -> Any:
        if not isinstance(raw, msgspec.Raw):
            raise TypeError(f"{type(raw).__name__} has no plain value")
        try:
            return decode_raw(bytes(raw))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return bytes(raw).decode(errors="backslashreplace")

    return msgspec.to_builtins(value, enc_hook=decode_or_text)


def decode_messages(
    decoder: msgspec.json.Decoder[Any], values: Sequence[bytes | None]
) -> list[Any]:
    """Typed messages, one per value, in order; a `Poison` where a value cannot be decoded.

    Each value is decoded by itself. A decoder of lines would misread a value with two messages, or
    a message that is spread over two values, and it would not be faster.
    """
    # First all values at once, which is fast. msgspec does not check the UTF-8 of fields that it
    # skips or keeps raw, so one decode of all values does. If anything raises, the slow loop below
    # finds out which value it was.
    try:
        b"\n".join(values).decode()  # type: ignore[arg-type]  # a null value raises
        return list(map(decoder.decode, values))  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001, S110  # a user's message type may raise anything
        pass
    return [decode_message(decoder.decode, value) for value in values]


def decode_message(decode: Callable[[bytes], Any], value: bytes | None) -> Any:  # noqa: PLR0911  # one return per kind of poison
    """One typed message, or the `Poison` that stands in for it."""
    if value is None:
        return Poison("the value is null")
    try:
        value.decode()
        return decode(value)
    except msgspec.ValidationError as error:
        return Poison(f"wrong schema: {error}")
    except msgspec.DecodeError as error:
        return Poison(f"not JSON: {error}" if value else "the value has 0 bytes")
    except UnicodeDecodeError as error:
        return Poison(f"not UTF-8: byte {error.start} is 0x{value[error.start]:02x}")
    except RecursionError:
        return Poison("nested too deeply")
    except Exception as error:  # noqa: BLE001  # a user's own message type may raise anything
        return Poison(f"{type(error).__name__}: {error}")
