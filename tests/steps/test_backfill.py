"""Backfill: a range folded again, each session up to where it is as committed, and nothing else changed."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from seriatim.core.offsets import OffsetRange
from seriatim.core.refold import Rewind, stages
from seriatim.core.repair import Request
from seriatim.steps.repair import Repairing, plan
from seriatim.testing import MemoryStream
from tests.steps.adders import Add, Adder, Buggy, Total, add, adding, deploy
from tests.steps.mending import mending, table
from tests.steps.worlds import A0


@pytest.mark.parametrize("seed", range(40))
def test_a_backfill_changes_the_widened_range_and_nothing_else(seed: int) -> None:
    """Each session up to its first snapshot after the range, or to where it is as committed: nothing beyond."""
    chance = random.Random(seed)
    made = adding(Buggy)
    made.kafka.create("in-a")
    add(made, 150, seed)
    made.run(chance.randint(5, 40))
    before = table(made, A0)
    first = chance.randrange(140)
    last, stage = chance.randint(first + 1, 150), chance.randint(5, 200)
    deploy(made, Adder)
    tools = mending(made)
    planned = plan(tools, Request(ranges={str(A0): (first, last)}))
    done = Repairing(tools).apply(planned, stage)
    rows, sums = by_hand(made, planned.parts[0].rewind, stage)  # type: ignore[union-attr]
    after = table(made, A0)
    assert [(row["offset"], row["session"], row["value"], row["was"]) for row in after] == rows, (first, last)
    whole = done.ranges[A0]
    assert all(old == new or old["offset"] in whole for old, new in zip(before, after, strict=True))
    runner = made.machine()
    assert {n: runner.load(s.saved or b"", s.version).value for n, s in made.sessions(A0).items()} == sums


def by_hand(made: MemoryStream, rewind: Rewind, stage: int) -> tuple[list[Any], dict[str, int]]:
    """Two folds side by side: a session is of the new code from the base on, until it is as the old one has it."""
    borders = {piece.whole.end for piece in stages(rewind, stage) if piece.border}
    codes = {"old": Buggy(), "new": Adder()}
    state: dict[str, dict[str, Total]] = {"old": {}, "new": {}}
    over: set[str] = set()
    rows = []
    stretch = made.reader.stretches(A0, OffsetRange(0, 150), headers=False)[0]
    for offset, name in enumerate(map(str, stretch.names())):
        if offset in borders:
            over |= {n for n in state["old"] if state["old"][n] == state["new"].get(n)}
        message = msgspec.json.decode(stretch.values[offset] or b"", type=Add)
        sums = {
            which: code.apply(state[which].setdefault(name, Total()), message)[0]
            for which, code in codes.items()
            if which == "old" or offset >= rewind.start
        }
        if offset < rewind.start:
            state["new"][name] = Total(state["old"][name].value)
        counts = sums["old" if offset < rewind.start or name in over else "new"]
        rows.append((offset, name, counts.value, counts.was))
        if offset >= rewind.wanted.until and message.start:
            over.add(name)
    over |= {n for n in state["old"] if state["old"][n] == state["new"][n]}
    return rows, {n: state["old" if n in over else "new"][n].value for n in state["old"]}
