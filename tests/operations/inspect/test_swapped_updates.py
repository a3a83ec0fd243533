"""Hunting: two swapped updates of one row, which leave no row over and contradict none, by their
numbers alone.
"""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from seriatim.stream import OutputSettings, Stream, TableSettings
from seriatim.testing import MemoryStream
from tests.operations.lookback_helper import explain_row, run_bisection, session_replay

FOLDS_MAX = 25
HUNTED = "session-3"


def market(
    count: int, seed: int, slices: int, *, heals: bool
) -> tuple[MemoryStream, tuple[int, int]]:
    """A stream of tier none that names the producer's numbers; of one session two updates of one
    row are swapped.

    Returns the world and their offsets. `heals`: sessions send their whole table again now and
    then, which makes good what was swapped before.
    """
    chance = Random(seed)
    table = TableSettings(key=("id",), columns={"id": "string", "v": "int64"}, before=False)
    fields: dict[str, Any] = {"machine": "table", "tier": "none", "sequence": "n", "table": table}
    stream = Stream(name="s", topics="in-.*", output=OutputSettings(path="memory"), **fields)
    made = MemoryStream(stream, stream.table_machine)
    made.kafka.create("in-a", 1)
    counters = {f"session-{number}": 0 for number in range(12)}
    sent: list[tuple[str, dict[str, Any]]] = []
    while len(sent) < count:
        name = (
            list(counters)[len(sent)]
            if len(sent) < len(counters)
            else chance.choice(list(counters))
        )
        whole = not counters[name] or (heals and chance.random() < 0.01)
        body: dict[str, Any] = {"type": "update", "id": chance.choice("abc"), "v": len(sent)}
        if whole:
            body = {"type": "snapshot", "rows": [{"id": one, "v": len(sent)} for one in "abc"]}
        counters[name] += 1
        sent.append((name, {**body, "n": counters[name]}))
    own = [at for at, (name, _) in enumerate(sent) if name == HUNTED and at > count // 10]
    one, other = chance.choice(
        [(a, b) for a, b in pairwise(own) if sent[a][1].get("id") == sent[b][1].get("id", "")]
    )
    sent[one], sent[other] = sent[other], sent[one]
    for name, body in sent:
        made.kafka.produce("in-a", name, json.dumps(body).encode())
    made.run(-(-len(sent) // slices))
    return made, (one, other)


def hunt(made: MemoryStream, *, every: bool) -> tuple[list[int], int]:
    """The script: since when is the session damaged, what came there, and who else touched that row
    just then.
    """
    found = run_bisection(made, HUNTED, "not damaged", check_every_message=every)
    gone = session_replay(made, HUNTED)
    gone.begin_at(found.first_broken_offset)
    gone.fold_to(found.first_broken_offset)
    first, *after = [
        step for step, _ in zip(gone.steps(gone.committed_end), range(4), strict=False)
    ]
    late = [step for step in after if step.sequence is not None and step.sequence < first.sequence]
    (row,) = explain_row(made, first.message.c0, HUNTED)
    told = {touch.offset: touch.sequence for touch in row.touches}
    offsets = [first.offset, *(step.offset for step in late)]
    assert [told[at] for at in offsets] == [step.sequence for step in (first, *late)]
    assert [step.findings[0].finding for step in (first, *late)] == ["sequence gap", "disorder"]
    return offsets, found.folds + gone.folds_begun + 1


@pytest.mark.long
@pytest.mark.parametrize(("seed", "slices", "heals"), [(1, 1, False), (2, 7, False), (3, 5, True)])
def test_two_swapped_updates_are_found(seed: int, slices: int, heals: bool) -> None:
    """Thirty thousand messages: both offsets are named in fewer than 25 folds; where it heals, by
    one look at each.
    """
    made, pair = market(30_000, seed, slices, heals=heals)
    offsets, folds = hunt(made, every=heals)
    assert tuple(offsets) == pair
    assert folds < FOLDS_MAX


@pytest.mark.full
def test_two_swapped_updates_among_300_000_are_found() -> None:
    """The same in a stream of 300,000 messages, folded as one slice: no saved state helps."""
    made, pair = market(300_000, 4, 1, heals=False)
    offsets, folds = hunt(made, every=False)
    assert tuple(offsets) == pair
    assert folds < FOLDS_MAX
