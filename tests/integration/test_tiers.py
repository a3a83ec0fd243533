"""Tiers on a real broker: a window that heals, and sessions that move when partitions are added."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from seriatim.demo.generator import CollectionPoints
from tests.integration.lab import Lab, fold_messages, fold_records
from tests.integration.test_slices import snapshot, update

REACH = 40


def shuffled(messages: list[Any], chance: random.Random) -> Iterator[Any]:
    """Each session's messages up to `REACH` places from their own; the sessions' places stay."""
    own: dict[str, list[Any]] = {}
    for message in messages:
        own.setdefault(message[2], []).append(message)
    for key, those in own.items():
        order = sorted((i + chance.uniform(0, REACH), i) for i in range(len(those)))
        own[key] = [those[i] for _, i in order]
    turns = {key: iter(those) for key, those in own.items()}
    return (next(turns[message[2]]) for message in messages)


def test_shuffled_within_the_window_is_as_if_sorted(
    lab: Lab, topic: Callable[..., str], full: bool
) -> None:
    """Records and state of a straight fold of the sorted messages, for small slices and for one
    alike.
    """
    count, small = (100_000, 1_000) if full else (10_000, 1_500)
    right, wrong = topic(2), topic(2)
    points = CollectionPoints([right], 30, 5)
    sent = [
        (right, int(one.key[-5:]) % 2, one.key, one.value)
        for one in islice(points.messages(), count)
    ]
    lab.send(sent)
    lab.send((wrong, *rest) for _, *rest in shuffled(sent, random.Random(7)))
    window: dict[str, Any] = {
        "tier": "window",
        "window_messages": REACH + 5,
        "window_seconds": 3600,
    }
    sorted_one, one, many = (
        lab.stream("sorted", right),
        lab.stream("one", wrong, **window),
        lab.stream("many", wrong, **window),
    )

    lab.fold(sorted_one)
    whole, parts = lab.fold(one), lab.fold(many, messages_max=small)

    assert (whole.findings, parts.findings) == ([], [])
    assert (whole.slices, parts.slices > 3) == (1, True)
    assert lab.digest(one) == lab.digest(many)
    expected = {
        (wrong, session): rows for session, rows in fold_messages(lab.read_topic(right, 2)).items()
    }
    assert fold_records(lab.records(one)) == expected
    columns = ("session", "sequence", "op", "id", "price", "size", "before_price")
    by_session = lambda row: (row["session"], row["sequence"], row["offset"], row["index"])  # noqa: E731
    told = [
        [tuple(row[c] for c in columns) for row in sorted(lab.records(n), key=by_session)]
        for n in (sorted_one, one)
    ]
    assert told[0] == told[1]


def test_partitions_added_in_mid_session(lab: Lab, topic: Callable[..., str]) -> None:
    """Sessions that go on in a new partition are found by name; those that begin there by a
    snapshot are not.
    """
    name = topic(1)
    lab.send(
        [(name, 0, key, snapshot(1, ("a", 1.0, 1))) for key in ("moves", "begins again", "stays")]
    )
    stream = lab.stream("moved", name)
    assert not lab.fold(stream).findings

    lab.add_partitions(name, 2)
    lab.send(
        [
            (name, 1, "moves", update(2, "a", 2.0)),
            (name, 1, "begins again", snapshot(1, ("b", 3.0, 3))),
            (name, 0, "stays", update(2, "a", 4.0)),
            (name, 1, "moves", update(3, "a", 5.0)),
            (name, 1, "new here", snapshot(1, ("c", 6.0, 6))),
            (name, 1, "begins again", update(2, "b", 7.0)),
        ]
    )
    outcome = lab.fold(stream)

    assert [(f.finding, f.session, f.partition, f.offset) for f in outcome.findings] == [
        ("moved session", "moves", 1, 0)
    ]
    assert f"it lives in {name}/0" in outcome.findings[0].cause
    assert (outcome.quarantined, outcome.headless) == (1, 0)
    last = {(row["session"], row["partition"]): row["price"] for row in lab.records(stream)}
    assert last == {
        ("moves", 0): 1.0,
        ("begins again", 0): 1.0,
        ("stays", 0): 4.0,
        ("begins again", 1): 7.0,
        ("new here", 1): 6.0,
    }
    assert not lab.fold(stream).findings  # told once
