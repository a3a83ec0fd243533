"""The data: JSON snapshot and update messages of about 200 bytes, 8 partitions, 200 sessions each.

Next: contenders.py, which folds it.
"""

from __future__ import annotations

import random
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
BATCH_MESSAGES_MAX = 2_000_000
"""The largest slice: ours by default, and so the peers' largest batch, where they have batches."""
MESSAGE_BYTES = 230
PADDING = "x" * 90
"""The text of a field that the machines do not know: real messages have many of them."""


def produce(servers: str, count: int, topic: str = TOPIC) -> None:
    """Put `count` messages on the broker, the same ones every time."""
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
    chance = random.Random(1)
    sessions: dict[str, SentSession] = {}
    for number in range(count):
        partition = number % PARTITIONS
        key = f"p{partition}-session-{chance.randrange(SESSIONS):04d}"
        session = sessions.setdefault(key, SentSession())
        value = msgspec.json.encode(next_message(session, key, chance))
        send(producer, topic, value, key, partition)
    producer.flush()


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
        rows = [{"id": row_id, **_values(chance)} for row_id in row_ids]
        return {"type": "snapshot", **message, "rows": rows}
    kind = chance.random()
    values = _values(chance)
    if kind < 0.05:
        row_ids.append(f"new-{session.sequence}")
        return {"type": "insert", **message, "id": row_ids[-1], **values}
    position = chance.randrange(len(row_ids))
    if kind < 0.1 and len(row_ids) > 5:
        return {"type": "delete", **message, "id": row_ids.pop(position)}
    return {"type": "update", **message, "id": row_ids[position], **values}


def _values(chance: random.Random) -> dict[str, Any]:
    """A price and a size, drawn in this order: the data must be the same every time."""
    price = round(chance.uniform(1, 100), 2)
    return {"price": price, "size": chance.randrange(1000)}
