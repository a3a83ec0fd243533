"""Records of two kinds and the table `current`, through real Kafka, real Spark and the real command
line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.integration.lab import Lab

MACHINE = """
from typing import Any, ClassVar
from msgspec import Struct, field
from seriatim import Machine

class Book(Struct):
    sizes: dict[str, int] = field(default_factory=dict)

class Order(Struct):
    kind: str
    price: str
    size: int

class Level(Struct):
    row_key: ClassVar[tuple[str, ...]] = ("price",)
    row_gone: ClassVar[dict[str, Any]] = {"size": 0}
    price: str
    size: int

class Trade(Struct):
    price: str
    size: int

class Market(Machine[Book, Order, Level | Trade]):
    def start(self, session):
        return Book()
    def apply(self, book, message):
        if message.kind == "trade":
            yield Trade(message.price, message.size)
        left = message.size if message.kind == "quote" else max(0, book.sizes.get(message.price, 0) - message.size)
        book.sizes[message.price] = left
        yield Level(message.price, left)
"""


def rows(lab: Lab, stream: str, table: str) -> list[dict[str, Any]]:
    """What any Delta reader sees, in order."""
    dataset = lab.table(stream, table).to_pyarrow_dataset()
    found = dataset.to_table(use_threads=False).to_pylist()
    return sorted(found, key=lambda row: (row["partition"], row["offset"], row.get("index", 0)))


def test_two_kinds_of_records_and_the_table_of_now(lab: Lab, topic: Callable[..., str]) -> None:
    """Each kind in its table, both as of the last entry; `current` has the levels that are left."""
    name = topic(2)
    (lab.folder / "streams" / "twokinds.py").write_text(MACHINE)
    stream = lab.stream("two", name, {"machine": "twokinds:Market"})
    sent = [
        ("quote", "1", 5),
        ("trade", "1", 2),
        ("quote", "2", 4),
        ("trade", "2", 9),
        ("trade", "1", 1),
    ]
    for partition in (0, 1):
        lab.send(
            (name, partition, f"s{partition}", {"kind": kind, "price": price, "size": size})
            for kind, price, size in sent
        )
    outcome = lab.fold(stream, messages_max=4)
    assert (outcome.records, outcome.derived_error) == (10, "")
    trades = rows(lab, stream, "records-trade")
    assert [
        (row["partition"], row["offset"], row["index"], row["price"], row["size"]) for row in trades
    ] == [
        (partition, offset, 0, price, size)
        for partition in (0, 1)
        for offset, price, size in ((1, "1", 2), (3, "2", 9), (4, "1", 1))
    ]
    (last_commit,) = lab.table(stream, "records-trade").history(1)
    assert last_commit["seriatim"]["sequence"] == outcome.sequence
    assert lab.command("publish", stream, "--sequence", str(outcome.sequence)).returncode == 0
    now = [
        (row["session"], row["price"], row["size"], row["offset"])
        for row in rows(lab, stream, "current")
    ]
    assert now == [("s0", "1", 2, 4), ("s1", "1", 2, 4)]
    told = json.loads(lab.command("status", stream, "--json").stdout)
    assert (told["published"], told["outputs"]) == (outcome.sequence, {"trade": outcome.sequence})
    assert "records-trade is as of entry" in lab.command("status", stream).stdout
    assert lab.command("verify", stream, "--kafka").returncode == 0
