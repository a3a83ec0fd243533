"""An order book per instrument: an arbitrary machine with typed messages, state and records.

A `book` message is the whole book (a snapshot); a `quote` sets the size at a price, 0 takes it
away; a `trade` takes size from the best level. The book keeps `DEPTH` levels a side; a record is
written whenever a visible level changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

from msgspec import Struct, field

from seriatim import Machine

DEPTH = 10
Side = Literal["bid", "ask"]


class Book(Struct):
    """State: price to size, for each side."""

    bid: dict[float, int] = field(default_factory=dict)
    ask: dict[float, int] = field(default_factory=dict)


class Whole(Struct, tag_field="type", tag="book"):
    """All levels: a session begins, or begins again, here."""

    seq: int
    bid: list[tuple[float, int]]
    ask: list[tuple[float, int]]


class Quote(Struct, tag_field="type", tag="quote"):
    """The size at one price."""

    seq: int
    side: Side
    price: float
    size: int


class Trade(Struct, tag_field="type", tag="trade"):
    """Size taken from the best level."""

    seq: int
    side: Side
    size: int


class Level(Struct):
    """Record: one visible level as it is now. Size 0: it is gone."""

    row_key: ClassVar[tuple[str, ...]] = ("side", "price")
    row_gone: ClassVar[dict[str, Any]] = {"size": 0}

    side: str
    price: float
    size: int


class OrderBook(Machine[Book, Whole | Quote | Trade, Level]):
    """Order books of bounded depth."""

    state_version = 1

    def start(self, session: str) -> Book:  # noqa: ARG002  # every book begins alike
        """An empty book."""
        return Book()

    def is_snapshot(self, message: Whole | Quote | Trade) -> bool:
        """The whole book may begin a session."""
        return isinstance(message, Whole)

    def apply(self, book: Book, message: Whole | Quote | Trade) -> Iterable[Level]:
        """Change the book; tell every visible level that changed."""
        before = visible(book)
        if isinstance(message, Whole):
            book.bid, book.ask = dict(message.bid), dict(message.ask)
        elif isinstance(message, Quote):
            set_level(levels(book, message.side), message.price, message.size)
        else:
            trade(book, message)
        trim(book)
        return changes(before, visible(book))

    def end(self, book: Book) -> Iterable[Level]:
        """A book that ends takes its levels along."""
        return changes(visible(book), {})


def levels(book: Book, side: Side) -> dict[float, int]:
    """One side of the book."""
    return book.bid if side == "bid" else book.ask


def set_level(side: dict[float, int], price: float, size: int) -> None:
    """Set, or with size 0 take away, one level."""
    if size:
        side[price] = size
    else:
        side.pop(price, None)


def trade(book: Book, message: Trade) -> None:
    """Take size from the best level; a trade on an empty side is a producer's mistake."""
    side = levels(book, message.side)
    if not side:
        raise ValueError(f"trade of {message.size} on an empty {message.side} side")
    best = max(side) if message.side == "bid" else min(side)
    set_level(side, best, max(0, side[best] - message.size))


def trim(book: Book) -> None:
    """Keep the best levels only: the state stays bounded."""
    for price in sorted(book.bid, reverse=True)[DEPTH:]:
        del book.bid[price]
    for price in sorted(book.ask)[DEPTH:]:
        del book.ask[price]


def visible(book: Book) -> dict[tuple[str, float], int]:
    """All levels by side and price."""
    sides: list[tuple[Side, dict[float, int]]] = [("bid", book.bid), ("ask", book.ask)]
    return {(name, price): size for name, side in sides for price, size in side.items()}


def changes(
    before: dict[tuple[str, float], int], after: dict[tuple[str, float], int]
) -> Iterator[Level]:
    """What differs, as records."""
    for place in sorted({*before, *after}):
        if before.get(place) != after.get(place):
            yield Level(side=place[0], price=place[1], size=after.get(place, 0))
