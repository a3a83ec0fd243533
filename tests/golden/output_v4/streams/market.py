"""A machine with records of two kinds: levels go to the table `records`, fills to the table
`records-fill`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from msgspec import Struct, field

from seriatim import Machine


class Book(Struct):
    """State: sizes by price, and how many trades there were."""

    sizes: dict[str, int] = field(default_factory=dict)
    trades: int = 0


class Order(Struct):
    """A message: `whole` begins the book, `quote` sets a size, `trade` takes from it."""

    kind: str
    price: str = ""
    size: int = 0


class Level(Struct):
    """The first kind of record: the size at a price. Size 0: it is gone."""

    row_key: ClassVar[tuple[str, ...]] = ("price",)
    row_gone: ClassVar[dict[str, Any]] = {"size": 0}

    price: str
    size: int


class Fill(Struct):
    """The second kind of record: a trade."""

    number: int
    size: int


class Market(Machine[Book, Order, Level | Fill]):
    """Levels and fills."""

    state_version = 1

    def start(self, session: str) -> Book:  # noqa: ARG002  # every book begins alike
        """An empty book."""
        return Book()

    def is_snapshot(self, message: Order) -> bool:
        """The whole book may begin a session."""
        return message.kind == "whole"

    def apply(self, book: Book, message: Order) -> Iterator[Level | Fill]:
        """Change one level; a fill comes before the level that it changes."""
        size = message.size
        if message.kind == "whole":
            yield from (Level(price, 0) for price in sorted(book.sizes) if price != message.price)
            book.sizes.clear()
        if message.kind == "trade":
            book.trades += 1
            yield Fill(book.trades, size)
            size = max(0, book.sizes[message.price] - size)
        book.sizes[message.price] = size
        yield Level(message.price, size)

    def end(self, book: Book) -> Iterator[Level]:
        """A book that ends takes its levels along."""
        yield from (Level(price, 0) for price in book.sizes)
