"""The shipped order book, tested as the README shows users how to."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "streams"))

from orderbook import Book, OrderBook

from seriatim.engine.machine import UserMachine
from seriatim.engine.records import RowKeySpec
from seriatim.testing import CRASH, fold


def test_a_trade_takes_from_the_best_level() -> None:
    """A trade changes the best level, also when the process ends in between."""
    book = {"type": "book", "seq": 1, "bid": [[10.0, 5]], "ask": []}
    done = fold(OrderBook, [book, CRASH, {"type": "trade", "seq": 2, "side": "bid", "size": 2}])

    assert [level.size for level in done.records] == [5, 3]
    assert done.state == Book(bid={10.0: 3})


def test_the_book_stays_bounded() -> None:
    """However many levels are quoted, ten a side are kept, and the others are told as gone."""
    quotes = [
        {"type": "quote", "seq": i + 2, "side": "ask", "price": float(100 - i), "size": 1}
        for i in range(30)
    ]
    done = fold(OrderBook, [{"type": "book", "seq": 1, "bid": [], "ask": []}, *quotes])

    assert sorted(done.state.ask) == [float(price) for price in range(71, 81)]
    assert len(done.records) == 50


def test_the_book_as_it_is_now_is_the_fold_of_its_records() -> None:
    """Each level by side and price; size 0 takes it away, and the end of a book all of them."""
    machine = UserMachine("orderbook:OrderBook", OrderBook)
    assert machine.row_key_spec == RowKeySpec(
        key=("side", "price"), columns=("side", "price", "size"), deleted_when={"size": 0}
    )
    quotes = [
        {"type": "quote", "seq": i + 2, "side": "bid", "price": float(i % 13), "size": i * 7 % 3}
        for i in range(60)
    ]
    done = fold(
        OrderBook, [{"type": "book", "seq": 1, "bid": [[3.0, 9]], "ask": [[4.0, 1]]}, *quotes]
    )

    levels = {(level.side, level.price): level.size for level in done.records}
    now = {place: size for place, size in levels.items() if size}
    assert now == {("bid", price): size for price, size in done.state.bid.items()} | {
        ("ask", 4.0): 1
    }
    ended = {(level.side, level.price): level.size for level in OrderBook().end(done.state)}
    assert ended == dict.fromkeys(now, 0)


def test_a_trade_on_an_empty_side_is_a_finding() -> None:
    """The machine raises, and the session waits with the book it had."""
    book = {"type": "book", "seq": 1, "bid": [], "ask": [[11.0, 1]]}
    done = fold(OrderBook, [book, {"type": "trade", "seq": 2, "side": "bid", "size": 2}])

    (finding,) = done.findings
    assert (finding.finding, finding.offset) == ("raised", 1)
    assert done.state == Book(ask={11.0: 1})
