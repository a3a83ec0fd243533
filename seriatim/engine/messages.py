"""Messages: stretches of one partition in columns, and how bytes become typed messages.

Next room: machine.py says what a machine makes of a message; fold.py walks over stretches.
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
SPARK_TIMESTAMP_RANGE_MS = (-(2**63) // 1000 + 1, (2**63 - 1) // 1000)
"""Timestamps whose microseconds fit 64 bits: Spark cannot read a message with any other."""


class Poison(Struct, frozen=True):
    """What stands in for a message that could not be decoded."""

    cause: str
    sequence: ClassVar[None] = None


class CapturedMessage(Struct, frozen=True, kw_only=True):
    """A message as somebody wrote it down."""

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
        """Milliseconds since 1970, as Kafka has them."""
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
        """Of all keys and values."""
        return sum(len(part) for part in (*self.keys, *self.values) if part is not None)

    def session_names(self) -> list[str | None]:
        """Sessions by Kafka key; None where there is no readable key."""
        return [session_name_of_key(key) for key in self.keys]

    @property
    def has_rising_timestamps(self) -> bool:
        """Whether no timestamp is below the one before."""
        return all(before <= after for before, after in pairwise(self.timestamps))

    def invalid_timestamp_positions(self) -> list[int]:
        """Positions of messages whose timestamp no calendar has."""
        return [
            i
            for i, time in enumerate(self.timestamps)
            if not TIMESTAMP_RANGE_MS[0] <= time <= TIMESTAMP_RANGE_MS[1]
        ]


def session_name_of_key(key: bytes | None) -> str | None:
    """A Kafka key as a session's name; None if it is missing or not UTF-8."""
    try:
        return None if key is None else key.decode()
    except UnicodeDecodeError:
        return None


def plain_values(value: Any, decode_raw: Callable[[bytes], Any] = msgspec.json.decode) -> Any:
    """A Struct as dicts, lists and scalars; a `msgspec.Raw` in it as what it holds, or as text if
    it is unreadable.
    """

    def of_raw(raw: Any) -> Any:
        if not isinstance(raw, msgspec.Raw):
            raise TypeError(f"{type(raw).__name__} has no plain value")
        try:
            return decode_raw(bytes(raw))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return bytes(raw).decode(errors="backslashreplace")

    return msgspec.to_builtins(value, enc_hook=of_raw)


def decode_messages(
    decoder: msgspec.json.Decoder[Any], values: Sequence[bytes | None]
) -> list[Any]:
    """Typed messages, one per value, in order; a `Poison` where a value cannot be decoded.

    Each value is decoded by itself: a decoder of lines would take two messages in one value, or one
    message in two, for what they are not; and it would not be faster.
    """
    try:
        b"\n".join(values).decode()  # type: ignore[arg-type]  # a null value raises, as bad UTF-8 does
        return list(map(decoder.decode, values))  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001, S110  # some value is poison, or a user's type raises: the way below names which
        pass
    return [decode_message(decoder.decode, value) for value in values]


def decode_message(decode: Callable[[bytes], Any], value: bytes | None) -> Any:  # noqa: PLR0911  # one per kind of poison
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
