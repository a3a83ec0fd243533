"""The messages of the golden streams: seeded, with every fault that a tier knows. Nothing of the
product is used.

Two worlds: tables (for the table machine) and order books (for streams/orderbook.py), both over the
topics `TOPIC_A` (three partitions) and `TOPIC_B` (one). In each there are snapshots, restarts,
lost, repeated and swapped messages, messages that break a precondition, poison, tombstones, a
message without a key, a session that moves to another partition, one that is silent until it
expires, and a committed and an aborted transaction.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from random import Random
from typing import Any, Literal, NamedTuple

SEED = 20261118
MESSAGES_PER_PARTITION = 220
START_MS = 1_735_732_800_000
"""1 January 2025, 12:00 UTC: a broker refuses timestamps that are later than its own clock."""
HOUR_MS = 3_600_000
SILENCES = (130, 150, 170)
TOPIC_A, TOPIC_B = "golden-a", "golden-b"
PARTITIONS = {TOPIC_A: 3, TOPIC_B: 1}
POISON = (b"", b"{", b"\xff\xfe", b'{"type":"nonsense","seq":1}', b'{"seq":1}')

Outcome = Literal["plain", "commit", "abort"]
Body = dict[str, Any]


class Message(NamedTuple):
    """One message to be sent."""

    key: bytes | None
    value: bytes | None
    timestamp: int


class Batch(NamedTuple):
    """Messages of one partition, sent one after the other. A transaction takes one more offset, for
    its marker.
    """

    topic: str
    partition: int
    messages: list[Message]
    outcome: Outcome = "plain"


class TableSession:
    """What the producer of one table knows of it."""

    def __init__(self, random: Random) -> None:
        self.random, self.sequence, self.ids = random, 0, set[str]()

    def next(self) -> Body:
        """The next message of a producer that makes no mistakes."""
        self.sequence += 1
        if not self.ids or self.random.random() < 0.1:
            return self.snapshot()
        row = self.random.choice(sorted(self.ids))
        free = sorted(set("abcdef") - self.ids)
        choice = self.random.random()
        if choice < 0.2 and free:
            self.ids.add(free[0])
            return {"type": "insert", "seq": self.sequence, **self.row(free[0])}
        if choice < 0.3 and len(self.ids) > 1:
            self.ids.discard(row)
            return {"type": "delete", "seq": self.sequence, "id": row}
        changed = (
            {"price": self.random.choice([None, 0.5, 1e300, -2.25])}
            if choice < 0.6
            else {"size": self.size()}
        )
        return {"type": "update", "seq": self.sequence, "id": row, **changed}

    def snapshot(self) -> Body:
        """The whole table, which differs from what it was."""
        self.ids = set(self.random.sample("abcdef", self.random.randint(1, 4)))
        return {
            "type": "snapshot",
            "seq": self.sequence,
            "rows": [self.row(name) for name in sorted(self.ids)],
        }

    def row(self, name: str) -> Body:
        """A whole row."""
        return {"id": name, "price": self.random.randint(0, 400) / 4, "size": self.size()}

    def size(self) -> int:
        """A number of whole units, sometimes the largest there is."""
        return 2**63 - 1 if self.random.random() < 0.02 else self.random.randint(0, 1000)

    def wrong(self) -> Body:
        """A message that breaks what its session promised: it changes a row that is not there."""
        self.sequence += 1
        return {"type": "update", "seq": self.sequence, "id": "never", "size": 1}


class BookSession:
    """What the producer of one order book knows of it."""

    def __init__(self, random: Random) -> None:
        self.random, self.sequence = random, 0

    def next(self) -> Body:
        """The next message."""
        self.sequence += 1
        side = self.random.choice(["bid", "ask"])
        choice = self.random.random()
        if self.sequence == 1 or choice < 0.1:
            levels = [
                [price / 2, self.random.randint(1, 9)] for price in self.random.sample(range(20), 6)
            ]
            return {"type": "book", "seq": self.sequence, "bid": levels[:3], "ask": levels[3:]}
        if choice < 0.8:
            size = self.random.choice([0, 1, 5, 40])
            return {
                "type": "quote",
                "seq": self.sequence,
                "side": side,
                "price": self.price(),
                "size": size,
            }
        return {
            "type": "trade",
            "seq": self.sequence,
            "side": side,
            "size": self.random.randint(1, 3),
        }

    def price(self) -> float:
        """A price."""
        return self.random.randint(0, 40) / 4

    def wrong(self) -> Body:
        """Trades after a book without levels: the machine raises."""
        self.sequence += 1
        return {"type": "book", "seq": self.sequence, "bid": [], "ask": []}


Producer = TableSession | BookSession


def partition_messages(
    random: Random, names: list[str], make: Callable[[Random], Producer]
) -> Iterator[Message]:
    """The messages of one partition, with faults on their way in."""
    sessions = {name: make(random) for name in names}
    timestamp = START_MS
    swapped: tuple[str, bytes] | None = None
    for number in range(MESSAGES_PER_PARTITION):
        timestamp += random.choice([0, 1, 250, 4_000, 60_000])
        if number in SILENCES:
            # Sessions that are heard of between two silences live on; the others expire.
            timestamp += 4 * HOUR_MS
        active = names[1:] if number > MESSAGES_PER_PARTITION // 3 and number % 29 else names
        name = random.choice(active)
        fault = random.random()
        if fault < 0.02:
            yield Message(name.encode(), random.choice(POISON), timestamp)
            continue
        if fault < 0.03:
            yield Message(name.encode(), None, timestamp)
            continue
        session = sessions[name]
        content = json.dumps(session.wrong() if fault < 0.045 else session.next()).encode()
        if fault > 0.985:
            # A message is lost: its number is never seen.
            content = json.dumps(session.next()).encode()
        if swapped is None and 0.93 < fault < 0.96:
            swapped = name, content
            continue
        yield Message(name.encode(), content, timestamp)
        if fault > 0.97 and fault < 0.985:
            yield Message(name.encode(), content, timestamp)
        if swapped is not None and swapped[0] == name:
            yield Message(name.encode(), swapped[1], timestamp)
            swapped = None


def world(kind: str) -> list[Batch]:
    """Everything that is sent, as batches; `kind` is tables or books."""
    make: Callable[[Random], Producer] = TableSession if kind == "tables" else BookSession
    random = Random(f"{SEED}-{kind}")
    batches: list[Batch] = []
    for topic, partitions in PARTITIONS.items():
        for partition in range(partitions):
            names = [f"{topic[-1]}{partition}-{number}" for number in range(5)]
            messages = list(partition_messages(random, names, make))
            if (topic, partition) == (TOPIC_A, 1):
                # A session of partition 0 goes on here.
                content = make(random)
                content.next()
                moved = Message(
                    b"a0-2", json.dumps(content.next()).encode(), messages[90].timestamp
                )
                messages.insert(91, moved)
            if (topic, partition) == (TOPIC_A, 2):
                messages.insert(
                    70, Message(b"\xff\xfe", b'{"type":"update"}', messages[70].timestamp)
                )
            batches += cut(random, topic, partition, messages)
            if topic == TOPIC_B:
                # Nobody can say whose message this is, so that the partition waits for a person here.
                nobody = Message(None, b"poison", messages[-1].timestamp)
                tail = [
                    Message(
                        names[0].encode(),
                        json.dumps(make(random).next()).encode(),
                        messages[-1].timestamp,
                    )
                ]
                batches.append(Batch(topic, partition, [nobody, *tail]))
    return batches


def cut(random: Random, topic: str, partition: int, messages: list[Message]) -> Iterator[Batch]:
    """The messages of a partition, some of them in transactions. What an aborted one held is sent
    again.
    """
    edges = [0, 40, 50, 60, 75, 80, 130, 140, len(messages)]
    outcomes: list[Outcome] = [
        "plain",
        "commit",
        "plain",
        "commit",
        "commit",
        "plain",
        "commit",
        "plain",
    ]
    for start, end, outcome in zip(edges[:-1], edges[1:], outcomes, strict=True):
        if outcome == "commit" and random.random() < 0.6:
            yield Batch(topic, partition, messages[start : start + 4], "abort")
        yield Batch(topic, partition, messages[start:end], outcome)


def sessions_of(batches: Iterable[Batch]) -> list[tuple[str, str]]:
    """Topic and session of everything that was sent, where the key is text."""
    found = set()
    for batch in batches:
        for message in batch.messages:
            with_name = (message.key or b"\xff").decode(errors="replace")
            if "\ufffd" not in with_name:
                found.add((batch.topic, with_name))
    return sorted(found)


def to_lines(phase: int, batches: Iterable[Batch]) -> Iterator[str]:
    """Batches as JSON lines, to be kept beside an output."""
    for number, batch in enumerate(batches):
        for message in batch.messages:
            values: dict[str, Any] = {"phase": phase, "batch": number, "topic": batch.topic}
            values |= {
                "partition": batch.partition,
                "outcome": batch.outcome,
                "timestamp": message.timestamp,
            }
            for name, content in (("key", message.key), ("value", message.value)):
                values[name] = None if content is None else base64.b64encode(content).decode()
            yield json.dumps(values)


def from_lines(lines: Iterable[str]) -> dict[int, list[Batch]]:
    """The same read again, by phase."""
    phases: dict[int, list[Batch]] = {}
    rows = [json.loads(line) for line in lines]
    for (phase, _), group in groupby(rows, lambda row: (row["phase"], row["batch"])):
        members = list(group)
        messages = [
            Message(_bytes(member["key"]), _bytes(member["value"]), member["timestamp"])
            for member in members
        ]
        start = members[0]
        batch = Batch(start["topic"], start["partition"], messages, start["outcome"])
        phases.setdefault(phase, []).append(batch)
    return phases


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
