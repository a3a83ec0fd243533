"""The data: JSON snapshot and update messages of about 200 bytes, 8 partitions, 200 sessions each.

Next: shapes.py has other shapes of the same messages; contenders.py folds them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from confluent_kafka import Producer

from seriatim.kafka.sending import create_topics

TOPIC = "bench-a"
PARTITIONS = 8
SESSIONS = 200
MESSAGES = 3_200_000
WARM_TOPIC = "warm-a"
WARM_MESSAGES = 16_000
"""Messages that every contender folds before it is measured."""
BATCH_MESSAGES_DEFAULT = 2_000_000
BATCH_MESSAGES_MAX = int(os.environ.get("BENCH_SLICE_MESSAGES", BATCH_MESSAGES_DEFAULT))
"""The largest slice of ours, and so the peers' largest batch, where they have batches. A shape may say
another one than our default.
"""
MESSAGE_BYTES = 230
PADDING = "x" * 90
"""The text of a field that the machines do not know: real messages have many of them."""
Sent = tuple[int, str, dict[str, Any]]
"""A partition, a key and a message."""


def produce(servers: str, count: int, topic: str = TOPIC) -> None:
    """Put `count` messages of sessions on the broker, the same ones every time."""
    produce_messages(servers, sessions(count), topic)


def produce_messages(servers: str, messages: Iterable[Sent], topic: str = TOPIC) -> None:
    """Put messages on the broker."""
    client = {"bootstrap.servers": servers}
    create_topics(client, {topic: PARTITIONS})
    producer_settings = {
        **client,
        "linger.ms": 50,
        "compression.type": "lz4",
        "batch.num.messages": 10_000,
        # Without idempotence a retry swaps batches, and the tier `strict` finds that.
        "enable.idempotence": True,
    }
    producer = Producer(producer_settings)
    for partition, key, message in messages:
        send(producer, topic, msgspec.json.encode(message), key, partition)
    producer.flush()


def sessions(count: int) -> Iterator[Sent]:
    """The first `count` messages of sessions that live long."""
    chance = random.Random(1)
    sent_sessions: dict[str, SentSession] = {}
    for number in range(count):
        partition = number % PARTITIONS
        key = f"p{partition}-session-{chance.randrange(SESSIONS):04d}"
        session = sent_sessions.setdefault(key, SentSession())
        yield partition, key, next_message(session, key, chance)


def send(producer: Producer, topic: str, value: bytes, key: str, partition: int) -> None:
    """Send a message; wait while the producer's queue is full."""
    while True:
        try:
            producer.produce(topic, value, key, partition)
        except BufferError:
            producer.poll(0.1)
        else:
            return


class SentSession:
    """What a session has sent so far."""

    def __init__(self) -> None:
        self.sequence = 0
        self.row_ids: list[str] = []


def next_message(session: SentSession, key: str, chance: random.Random) -> dict[str, Any]:
    """The next message of a session: a snapshot first, then mostly updates."""
    session.sequence += 1
    row_ids = session.row_ids
    message = {"session": key, "seq": session.sequence, "note": PADDING}
    if session.sequence == 1:
        row_ids += [f"row-{i}" for i in range(20)]
        rows = [{"id": row_id, **row_values(chance)} for row_id in row_ids]
        return {"type": "snapshot", **message, "rows": rows}
    kind = chance.random()
    values = row_values(chance)
    if kind < 0.05:
        row_ids.append(f"new-{session.sequence}")
        return {"type": "insert", **message, "id": row_ids[-1], **values}
    position = chance.randrange(len(row_ids))
    if kind < 0.1 and len(row_ids) > 5:
        return {"type": "delete", **message, "id": row_ids.pop(position)}
    return {"type": "update", **message, "id": row_ids[position], **values}


def row_values(chance: random.Random) -> dict[str, Any]:
    """A price and a size, drawn in this order: the data must be the same every time."""
    price = round(chance.uniform(1, 100), 2)
    return {"price": price, "size": chance.randrange(1000)}
