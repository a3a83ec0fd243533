"""Demo data: collection points that publish tables as a snapshot and then updates, with faults on
request.

Pure and seeded: the same arguments give the same messages. `seriatim produce demo` sends them.

Next: demo/producer.py sends them; cli/produce.py is the command.
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
"""Returns the topics and sessions for which a snapshot was requested since the previous call."""


class DemoMessage(Struct, frozen=True):
    """One message on its way to Kafka."""

    topic: str
    key: str
    value: bytes


class DemoFault(Struct, frozen=True):
    """A fault on the way to Kafka, and the number of the message that has it."""

    kind: str
    message_number: int

    @classmethod
    def parse(cls, text: str) -> DemoFault:
        """Parse `drop:1000` as a person types it. Without a number it is the 1,000th message."""
        kind, _, number = text.partition(":")
        if kind not in FAULTS or (number and not number.isdecimal()):
            allowed = f"KIND or KIND:MESSAGE, kinds {', '.join(FAULTS)}"
            raise ConfigError(f"--fault {text!r}", allowed=allowed, next="write it like drop:1000")
        return cls(kind, int(number or 1000))


class DemoTable(Struct):
    """The table of one session, as its collection point has it."""

    topic: str
    name: str
    sequence: int = 0
    rows: dict[str, tuple[float, int]] = field(default_factory=dict)
    has_begun: bool = False


class CollectionPoints:
    """Sessions spread over topics, each sending a snapshot first and updates after."""

    def __init__(self, topics: list[str], sessions: int, seed: int = 1) -> None:
        self._random = random.Random(seed)  # noqa: S311  # demo data, not secrets
        self.tables: list[DemoTable] = []
        self._table_by_name: dict[tuple[str, str], DemoTable] = {}
        for i in range(sessions):
            table = DemoTable(topics[i % len(topics)], f"session-{i:05d}")
            self.tables.append(table)
            self._table_by_name[table.topic, table.name] = table

    def messages(self, read_requests: ReadSnapshotRequests = tuple) -> Iterator[DemoMessage]:
        """Messages without end. A session for which a snapshot is requested sends its table as it
        is next.
        """
        while True:
            for name in read_requests():
                requested_table = self._table_by_name.get(name)
                if requested_table is not None:
                    yield self._answer_request(requested_table)
            table = self._random.choice(self.tables)
            yield self._to_message(table, self._next_change(table))

    def _answer_request(self, table: DemoTable) -> DemoMessage:
        if table.has_begun:
            table.sequence += 1
            body = self._snapshot_body(table)
        else:
            # The first message of a session is a snapshot anyway.
            body = self._next_change(table)
        return self._to_message(table, body)

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
        table.rows = {}
        row_count = self._random.randrange(5, 25)
        for i in range(row_count):
            price = self._price()
            size = self._random.randrange(1000)
            table.rows[f"row-{i}"] = (price, size)
        return self._snapshot_body(table)

    def _snapshot_body(self, table: DemoTable) -> dict[str, Any]:
        rows = []
        for row, (price, size) in table.rows.items():
            rows.append({"id": row, "price": price, "size": size})
        return {"type": "snapshot", "seq": table.sequence, "rows": rows}

    def _insert(self, table: DemoTable) -> dict[str, Any]:
        row = f"new-{table.sequence}"
        price = self._price()
        size = self._random.randrange(1000)
        table.rows[row] = (price, size)
        return {"type": "insert", "seq": table.sequence, "id": row, "price": price, "size": size}

    def _price(self) -> float:
        return round(self._random.uniform(1, 100), 2)


def inject_faults(
    messages: Iterator[DemoMessage], faults: list[DemoFault]
) -> Iterator[DemoMessage]:
    """The same messages, with the faults."""
    kind_by_number = {fault.message_number: fault.kind for fault in faults}
    # A swapped message waits here until another message of its session was sent.
    swapped: list[DemoMessage] = []
    for number, message in enumerate(messages, 1):
        kind = kind_by_number.get(number)
        if kind == "swap":
            swapped.append(message)
            continue
        yield from _with_fault(kind, message)
        if swapped and swapped[0].key == message.key:
            yield swapped.pop()


def _with_fault(kind: str | None, message: DemoMessage) -> Iterator[DemoMessage]:
    if kind == "drop":
        return
    if kind == "poison":
        yield DemoMessage(message.topic, message.key, b'{"type": "update", "seq": ')
        return
    if kind == "contradict":
        sequence = msgspec.json.decode(message.value)["seq"]
        body = {"type": "update", "seq": sequence, "id": "never-inserted", "price": 1.0}
        yield DemoMessage(message.topic, message.key, msgspec.json.encode(body))
        return
    yield message
    if kind == "repeat":
        yield message
