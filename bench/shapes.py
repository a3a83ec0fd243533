"""The shapes of work that are measured: what producers send, and what a slice has.

In every shape messages are those of bench/data.py, so all contenders can fold them: a session begins by
a snapshot, its sequence goes up by one, and updates and deletes name rows that are there.

Next: run.py measures a shape; data.py has the messages of the first one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from bench import data
from bench.data import PARTITIONS, Sent, row_values

OWN = ("floor", "table", "machine", "table-spark", "machine-spark")


class Shape(Struct, frozen=True, kw_only=True):
    """One shape of work."""

    messages: int
    """So many messages at scale 1."""
    make_messages: Callable[[int], Iterator[Sent]]
    """The first so many messages, the same ones every time."""
    slice_messages: int = data.BATCH_MESSAGES_DEFAULT
    """The largest slice of ours, and batch of peers."""
    warm_messages: int = data.WARM_MESSAGES
    """Messages that every contender folds before it is measured. 0: its start is part of the figure."""
    only: tuple[str, ...] = ()
    """The contenders that take part; empty: all."""


def change_capture(count: int) -> Iterator[Sent]:
    """A session for each key, which is one row: two messages per key, and a fifth of all messages are
    deletes. Keys come in any order; some wait long for their second message.
    """
    chance = random.Random(1)
    keys_left = (count + 1) // 2
    waiting: list[int] = []
    for _ in range(count):
        is_new = keys_left > 0 and (not waiting or chance.random() < 0.5)
        if is_new:
            number = keys_left
            keys_left -= 1
            waiting.append(number)
            row = {"id": f"row-{number}", **row_values(chance)}
            message: dict[str, Any] = {"type": "snapshot", "seq": 1, "rows": [row]}
        else:
            position = chance.randrange(len(waiting))
            waiting[position], waiting[-1] = waiting[-1], waiting[position]
            number = waiting.pop()
            message = {"type": "delete", "seq": 2, "id": f"row-{number}"}
            if chance.random() >= 0.4:
                message = {**message, "type": "update", **row_values(chance)}
        key = f"key-{number:08}"
        yield number % PARTITIONS, key, {"session": key, "note": data.PADDING, **message}


def large_table(count: int) -> Iterator[Sent]:
    """A topic that is one table, with a session for each partition: the first half of the messages
    inserts rows, and each later hundred messages per row of the table change one row in a hundred.
    """
    chance = random.Random(1)
    sequences = [0] * PARTITIONS
    row_count = count // 2
    touched = max(1, row_count // 100)
    for number in range(count):
        if number < PARTITIONS:
            partition = number
            message: dict[str, Any] = {"type": "snapshot", "rows": []}
        elif number < row_count:
            partition = number % PARTITIONS
            message = {"type": "insert", "id": f"row-{number}", **row_values(chance)}
        else:
            # Other rows in each slice.
            turn = (number - row_count) // LARGE_TABLE_SLICE
            row_number = PARTITIONS + (turn * touched + chance.randrange(touched)) % (
                row_count - PARTITIONS
            )
            partition = row_number % PARTITIONS
            message = {"type": "update", "id": f"row-{row_number}", **row_values(chance)}
        sequences[partition] += 1
        key = f"table-{partition}"
        message = {"session": key, "seq": sequences[partition], "note": data.PADDING, **message}
        yield partition, key, message


LARGE_TABLE_SLICE = 100_000
SHAPES = {
    "sessions": Shape(messages=data.MESSAGES, make_messages=data.sessions),
    "cdc": Shape(messages=4_000_000, make_messages=change_capture),
    "large-table": Shape(
        messages=2_000_000, make_messages=large_table, slice_messages=LARGE_TABLE_SLICE
    ),
    # Peers were not tried with nothing to warm up on.
    "small": Shape(messages=10_000, make_messages=data.sessions, warm_messages=0, only=OWN),
    "backlog": Shape(messages=20_000_000, make_messages=data.sessions),
}
"""By name. The first is the one of docs/PERFORMANCE.md."""
