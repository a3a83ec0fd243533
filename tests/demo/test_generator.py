"""The demo's collection points: seeded, and honest when they are asked for a snapshot."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

from seriatim.demo.generator import CollectionPoints, DemoMessage


def body(message: DemoMessage) -> dict[str, Any]:
    """What a message says."""
    return json.loads(message.value)  # type: ignore[no-any-return]


def test_the_same_seed_gives_the_same_messages() -> None:
    """And nobody who asks for nothing changes that."""
    one, two = (
        islice(CollectionPoints(["a", "b"], 5, seed=7).messages(asks), 500)
        for asks in (tuple, list)
    )
    assert list(one) == list(two)


def test_who_is_asked_for_sends_its_table_as_it_is() -> None:
    """Next, in sequence, and once; requests for tables of others are not its matter."""
    asks: list[list[tuple[str, str]]] = []
    points = CollectionPoints(["a"], 3)
    messages = points.messages(lambda: asks.pop() if asks else [])
    before = [body(message) for message in islice(messages, 200) if message.key == "session-00001"]
    asks.append([("a", "session-00001"), ("elsewhere", "session-00001"), ("a", "nobody")])
    answer = next(messages)
    told = body(answer)
    rows = {row["id"]: row for row in told["rows"]}
    last = before[-1]
    assert (answer.key, told["type"], told["seq"]) == ("session-00001", "snapshot", last["seq"] + 1)
    assert last["type"] == "delete" or rows[last["id"]]["price"] == last["price"]
    assert body(next(messages))["type"] != "snapshot"


def test_one_that_never_began_begins() -> None:
    """Its first message is a snapshot anyhow."""
    message = next(CollectionPoints(["a"], 3).messages(lambda: [("a", "session-00002")]))
    assert (message.key, body(message)["type"], body(message)["seq"]) == (
        "session-00002",
        "snapshot",
        1,
    )
