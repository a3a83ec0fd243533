"""The data: JSON snapshot and update messages of about 200 bytes, 8 partitions, 200 sessions each."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from confluent_kafka import Producer

from seriatim.demo.producer import create_topics

TOPIC = "bench-a"
PARTITIONS = 8
SESSIONS = 200
MESSAGES = 3_200_000
WARM_TOPIC = "warm-a"
WARM_MESSAGES = 16_000
"""What every contender folds before it is measured."""
AT_ONCE = 2_000_000
"""The largest slice: ours by default, and so the peers' largest batch, where they have batches."""
MESSAGE_BYTES = 230
PADDING = "x" * 90
"""A field the machines do not know, as real messages have many."""


def produce(servers: str, count: int, topic: str = TOPIC) -> None:
    """Put `count` messages on the broker, the same ones every time."""
    client = {"bootstrap.servers": servers}
    create_topics(client, {topic: PARTITIONS})
    tuned = {
        "linger.ms": 50,
        "compression.type": "lz4",
        "batch.num.messages": 10_000,
        "enable.idempotence": True,
    }
    producer = Producer(
        {**client, **tuned}
    )  # without idempotence a retry swaps batches, and strict finds them
    chance = random.Random(1)
    tables: dict[str, list[Any]] = {}
    encode = msgspec.json.encode
    for number in range(count):
        partition = number % PARTITIONS
        key = f"p{partition}-session-{chance.randrange(SESSIONS):04d}"
        value = encode(_next(tables.setdefault(key, [0, []]), key, chance))
        while True:
            try:
                producer.produce(topic, value, key, partition)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush()


def _next(table: list[Any], key: str, chance: random.Random) -> dict[str, Any]:
    table[0] += 1
    rows = table[1]
    message = {"session": key, "seq": table[0], "note": PADDING}
    if table[0] == 1:
        rows += [f"row-{i}" for i in range(20)]
        full = [
            {"id": row, "price": _price(chance), "size": chance.randrange(1000)} for row in rows
        ]
        return {"type": "snapshot", **message, "rows": full}
    draw = chance.random()
    price, size = _price(chance), chance.randrange(1000)
    if draw < 0.05:
        rows.append(f"new-{table[0]}")
        return {"type": "insert", **message, "id": rows[-1], "price": price, "size": size}
    if draw < 0.1 and len(rows) > 5:
        return {"type": "delete", **message, "id": rows.pop(chance.randrange(len(rows)))}
    return {
        "type": "update",
        **message,
        "id": rows[chance.randrange(len(rows))],
        "price": price,
        "size": size,
    }


def _price(chance: random.Random) -> float:
    return round(chance.uniform(1, 100), 2)
