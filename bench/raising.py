"""What one exception in a user's `apply` costs, as a multiple of the same messages without one.

    python -m bench.raising

Two cases, with the testing kit, so without a broker and without Spark:
- one session with a large state, whose machine raises at the very last message;
- many small sessions, each of which raises once and goes on with a snapshot.

The times are CPU seconds of this process, and the best of several runs: a busy machine changes them
little.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

from msgspec import Struct

from seriatim.engine.machine import Machine
from seriatim.testing import fold

ROWS = 20_000
LARGE_MESSAGES = 2_000
SMALL_SESSIONS = 1_000
SMALL_MESSAGES = 100_000
SMALL_ROWS = 100
FATAL_PRICE = -1
RUNS = 3


class Book(Struct):
    """The prices of a session."""

    prices: dict[str, int] = {}


class Prices(Struct, tag="prices"):
    """All prices: a snapshot."""

    prices: dict[str, int]


class Price(Struct, tag="price"):
    """One price that changed."""

    item: str
    price: int


class Changed(Struct):
    """A record: an item and its price."""

    item: str
    price: int


class PriceBook(Machine[Book, Prices | Price, Changed]):
    """Keeps the prices of a session, and raises at a price that cannot be."""

    def start(self, _session: str) -> Book:
        """A session without prices."""
        return Book({})

    def is_snapshot(self, message: Prices | Price) -> bool:
        """All prices."""
        return isinstance(message, Prices)

    def apply(self, book: Book, message: Prices | Price) -> Iterable[Changed]:
        """A record for the price that changed; one for a snapshot, so that its records do not cover
        the rest.
        """
        if isinstance(message, Prices):
            book.prices = message.prices
            return [Changed("all", len(message.prices))]
        book.prices[message.item] = message.price
        if message.price == FATAL_PRICE:
            raise ValueError(f"{message.item} costs {message.price}")
        return [Changed(message.item, message.price)]


Messages = list[tuple[str, Prices | Price]]


def large_session(*, raises: bool) -> Messages:
    """One session of many rows; the last message is the fatal one."""
    messages: Messages = [("large", Prices({f"item{number}": number for number in range(ROWS)}))]
    messages += [("large", Price(f"item{number}", number)) for number in range(LARGE_MESSAGES)]
    if raises:
        messages[-1] = ("large", Price("item0", FATAL_PRICE))
    return messages


def small_sessions(*, raises: bool) -> Messages:
    """Many sessions in turns; each has one fatal message at a random turn, and a snapshot after it."""
    chance = random.Random(1)
    turns = SMALL_MESSAGES // SMALL_SESSIONS
    fatal_turns = [chance.randrange(1, turns - 1) for _ in range(SMALL_SESSIONS)]
    messages: Messages = []
    for turn in range(turns):
        for session in range(SMALL_SESSIONS):
            since_fatal = turn - fatal_turns[session]
            if turn == 0 or since_fatal == 1:
                messages.append(
                    (f"s{session}", Prices({f"item{number}": turn for number in range(SMALL_ROWS)}))
                )
            elif since_fatal == 0 and raises:
                messages.append((f"s{session}", Price("item0", FATAL_PRICE)))
            else:
                messages.append((f"s{session}", Price(f"item{turn % 10}", turn)))
    return messages


def cpu_seconds(messages: Messages) -> float:
    """The least CPU time in which the messages were folded."""
    seconds = []
    for _ in range(RUNS):
        begin = time.process_time()
        fold(PriceBook, messages)
        seconds.append(time.process_time() - begin)
    return min(seconds)


def ratio(messages: Callable[..., Messages]) -> float:
    """The cost of messages of which some raise, as a multiple of the cost of those that do not."""
    return cpu_seconds(messages(raises=True)) / cpu_seconds(messages(raises=False))


def main() -> None:
    """Print both ratios."""
    large = ratio(large_session)
    print(
        f"{LARGE_MESSAGES:,} messages on {ROWS:,} rows, the last one raises: {large:.2f} times a clean fold"
    )
    small = ratio(small_sessions)
    print(
        f"{SMALL_SESSIONS:,} sessions raise once in {SMALL_MESSAGES:,} messages: {small:.2f} times a clean fold"
    )


if __name__ == "__main__":
    main()
