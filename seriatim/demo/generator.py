"""Demo data: collection points that publish tables as snapshot, then updates, with faults on
request.

Pure and seeded: the same arguments give the same messages. `seriatim produce demo` sends them.

Next room: cli/produce.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct, field

from seriatim.errors import ConfigError

FAULTS = ("drop", "swap", "repeat", "poison", "contradict")
RESTART_SHARE = 0.002
INSERT_SHARE = 0.1
DELETE_SHARE = 0.1
ReadSnapshotRequests = Callable[[], Iterable[tuple[str, str]]]
"""Topics and sessions of which a snapshot was asked since the last call."""


class DemoMessage(Struct, frozen=True):
    """One message on its way to Kafka."""

    topic: str
    key: str
    value: bytes


class DemoFault(Struct, frozen=True):
    """What goes wrong on the way in, and at which message of the run."""

    kind: str
    message_number: int

    @classmethod
    def parse(cls, text: str) -> DemoFault:
        """`drop:1000` as a person types it; without a number, at the 1,000th message."""
        kind, _, at = text.partition(":")
        if kind not in FAULTS or (at and not at.isdecimal()):
            allowed = f"KIND or KIND:MESSAGE, kinds {', '.join(FAULTS)}"
            raise ConfigError(f"--fault {text!r}", allowed=allowed, next="write it like drop:1000")
        return cls(kind, int(at or 1000))


class DemoTable(Struct):
    """One session as its collection point knows it."""

    topic: str
    name: str
    sequence: int = 0
    rows: dict[str, tuple[float, int]] = field(default_factory=dict)
    has_begun: bool = False


class CollectionPoints:
    """Sessions spread over topics, each sending a snapshot first and updates after."""

    def __init__(self, topics: list[str], sessions: int, seed: int = 1) -> None:
        self._random = random.Random(seed)  # noqa: S311  # demo data, not secrets
        self.tables = [
            DemoTable(topics[i % len(topics)], f"session-{i:05d}") for i in range(sessions)
        ]
        self._by_name = {(table.topic, table.name): table for table in self.tables}

    def messages(self, read_requests: ReadSnapshotRequests = tuple) -> Iterator[DemoMessage]:
        """Without end. Whoever is asked for a snapshot sends one next, of its table as it is."""
        while True:
            for table in filter(None, map(self._by_name.get, read_requests())):
                yield self._to_message(
                    table,
                    self._requested_snapshot(table)
                    if table.has_begun
                    else self._next_change(table),
                )
            table = self._random.choice(self.tables)
            yield self._to_message(table, self._next_change(table))

    def _to_message(self, table: DemoTable, body: dict[str, Any]) -> DemoMessage:
        return DemoMessage(table.topic, table.name, msgspec.json.encode(body))

    def _next_change(self, table: DemoTable) -> dict[str, Any]:
        table.sequence += 1
        chance = self._random.random()
        if not table.has_begun or chance < RESTART_SHARE:
            return self._snapshot(table)
        if not table.rows or chance < INSERT_SHARE:
            return self._insert(table)
        row = self._random.choice(list(table.rows))
        if chance < INSERT_SHARE + DELETE_SHARE:
            del table.rows[row]
            return {"type": "delete", "seq": table.sequence, "id": row}
        price = self._price()
        table.rows[row] = (price, table.rows[row][1])
        return {"type": "update", "seq": table.sequence, "id": row, "price": price}

    def _snapshot(self, table: DemoTable) -> dict[str, Any]:
        table.has_begun = True
        count = self._random.randrange(5, 25)
        table.rows = {
            f"row-{i}": (self._price(), self._random.randrange(1000)) for i in range(count)
        }
        return self._snapshot_body(table)

    def _requested_snapshot(self, table: DemoTable) -> dict[str, Any]:
        table.sequence += 1
        return self._snapshot_body(table)

    def _snapshot_body(self, table: DemoTable) -> dict[str, Any]:
        rows = [
            {"id": row, "price": price, "size": size} for row, (price, size) in table.rows.items()
        ]
        return {"type": "snapshot", "seq": table.sequence, "rows": rows}

    def _insert(self, table: DemoTable) -> dict[str, Any]:
        row, price, size = f"new-{table.sequence}", self._price(), self._random.randrange(1000)
        table.rows[row] = (price, size)
        return {"type": "insert", "seq": table.sequence, "id": row, "price": price, "size": size}

    def _price(self) -> float:
        return round(self._random.uniform(1, 100), 2)


def inject_faults(
    messages: Iterator[DemoMessage], faults: list[DemoFault]
) -> Iterator[DemoMessage]:
    """The same messages, with what goes wrong on the way in."""
    due = {fault.message_number: fault.kind for fault in faults}
    held: list[DemoMessage] = []
    for number, message in enumerate(messages, 1):
        kind = due.get(number)
        if kind == "swap":
            held.append(message)
            continue
        yield from _with_fault(kind, message)
        if held and held[0].key == message.key:
            yield held.pop()


def _with_fault(kind: str | None, message: DemoMessage) -> Iterator[DemoMessage]:
    if kind == "drop":
        return
    if kind == "poison":
        yield DemoMessage(message.topic, message.key, b'{"type": "update", "seq": ')
        return
    if kind == "contradict":
        value = msgspec.json.decode(message.value)
        changed = {"type": "update", "seq": value["seq"], "id": "never-inserted", "price": 1.0}
        yield DemoMessage(message.topic, message.key, msgspec.json.encode(changed))
        return
    yield message
    if kind == "repeat":
        yield message
