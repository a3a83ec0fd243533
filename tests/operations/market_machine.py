"""A machine with records of several kinds, and streams in memory that run it, for tests.

Next: test_further_tables.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from msgspec import Struct, field

from seriatim.engine.machine import Machine, UserMachine
from seriatim.engine.offsets import Partition
from seriatim.stream import OutputSettings, Stream
from seriatim.testing import MemoryStream


class Book(Struct):
    """State: sizes by price, and how many trades there were."""

    sizes: dict[str, int] = field(default_factory=dict)
    trades: int = 0


class Order(Struct):
    """A message: `whole` begins the book, `quote` sets a size, `trade` takes from it."""

    kind: str
    price: str = ""
    size: Any = 0


class Level(Struct):
    """The first record: a price's size."""

    row_key: ClassVar[tuple[str, ...]] = ("price",)
    row_gone: ClassVar[dict[str, Any]] = {"size": 0}

    price: str
    size: int


class Trade(Struct):
    """The second record: a trade, and the first level that it left."""

    number: int
    size: int


class Note(Struct):
    """The third record: rare."""

    text: str


class Market(Machine[Book, Order, Level | Trade | Note]):
    """Levels, trades, and a note where a trade takes all."""

    def start(self, session: str) -> Book:  # noqa: ARG002  # every book begins alike
        """Empty."""
        return Book()

    def is_snapshot(self, message: Order) -> bool:
        """The whole book."""
        return message.kind == "whole"

    def apply(self, book: Book, message: Order) -> Iterator[Level | Trade | Note]:
        """Trades come before the level that they change."""
        if message.kind == "boom":
            book.sizes.clear()
            raise ValueError("boom")
        if message.kind == "whole":
            yield from (Level(price, 0) for price in sorted(book.sizes) if price != message.price)
            book.sizes.clear()
        if message.kind == "trade":
            book.trades += 1
            yield Trade(book.trades, message.size)
            message.size = max(0, book.sizes.get(message.price, 0) - int(message.size))
            if not message.size:
                yield Note(f"{message.price} is gone")
        book.sizes[message.price] = message.size
        yield Level(message.price, message.size)

    def end(self, book: Book) -> Iterator[Level | Note]:
        """All levels go, and one note."""
        yield Note("the end")
        yield from (Level(price, 0) for price in book.sizes)


def machine() -> UserMachine:
    """The machine, as a new process creates it."""
    return UserMachine("markets:Market", Market)


def stream_of(path: str = "memory", **fields: Any) -> Stream:
    """A stream of markets over topics in-…."""
    return Stream(
        name="s",
        topics="in-.*",
        machine="markets:Market",
        output=OutputSettings(path=path),
        **fields,
    )


def create_market_stream(partitions: int = 1, **fields: Any) -> MemoryStream:
    """A stream of markets with topic in-a, without messages."""
    memory_stream = MemoryStream(stream_of(**fields), machine)
    memory_stream.kafka.create("in-a", partitions)
    return memory_stream


def send_order(
    memory_stream: MemoryStream,
    partition: Partition,
    kind: str,
    price: str = "1",
    size: Any = 5,
    session: str = "s",
) -> None:
    """Send one message."""
    content = json.dumps({"kind": kind, "price": price, "size": size}).encode()
    memory_stream.kafka.produce(partition.topic, session, content, partition=partition.number)


def send_busy_market(
    memory_stream: MemoryStream, partition: Partition, rounds: int = 3, session: str = "s"
) -> None:
    """Send a book, then quotes and trades."""
    send_order(memory_stream, partition, "whole", session=session)
    for number in range(rounds):
        send_order(memory_stream, partition, "quote", str(number), 3 + number, session)
        send_order(memory_stream, partition, "trade", str(number), 2, session)
        send_order(memory_stream, partition, "trade", str(number), 9, session)
