"""Backfill: a range folded again, each session up to where it is as committed, and nothing else changed."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from seriatim.core.errors import ConfigError
from seriatim.core.offsets import OffsetRange
from seriatim.core.refold import Rewind, stages
from seriatim.core.repair import Request
from seriatim.core.request import parse
from seriatim.steps.backfill import ranges
from seriatim.steps.repair import Repairing, plan
from seriatim.testing import MemoryStream
from tests.steps.adders import Add, Adder, Buggy, Total, add, adding, deploy, states
from tests.steps.mending import mending, repair, table
from tests.steps.worlds import A0, A1


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
    over |= {n for n in state["old"] if state["old"][n] == state["new"][n]}
    return rows, {n: state["old" if n in over else "new"][n].value for n in state["old"]}


def timed(count: int = 40) -> MemoryStream:
    """A world whose messages come a second after each other."""
    made = adding(Buggy)
    made.kafka.create("in-a", 2)
    for partition in (A0, A1):
        for number in range(count):
            body = json.dumps({"v": number, "start": number % 10 == 0}).encode()
            made.kafka.produce(
                "in-a", "s", body, partition=partition.number, timestamp=1_800_000_000_000 + number * 1000
            )
    made.run(14)
    return made


def test_ranges_by_offset_and_by_time() -> None:
    """Cut to what was folded; a time is an offset in each partition."""
    made = timed()
    ledger = made.ledger.head("s").ledger  # type: ignore[union-attr]
    moment = "2027-01-15T08:00:20Z"
    for given, expected in (
        ({"partitions": ["in-a/1"], "from": "3", "until": "900"}, {"in-a/1": (3, 40)}),
        ({"topics": ["in-a"], "from": moment}, {"in-a/0": (20, 40), "in-a/1": (20, 40)}),
        ({"partitions": ["in-a/0"], "until": moment}, {"in-a/0": (0, 20)}),
        ({"topics": ["in-a"]}, {"in-a/0": (0, 40), "in-a/1": (0, 40)}),
    ):
        assert ranges(parse({"action": "backfill", **given}), ledger, made.kafka) == expected


def test_ranges_that_were_never_folded_are_refused_by_name() -> None:
    """Unknown topics, and times after all that was folded."""
    made = timed()
    ledger = made.ledger.head("s").ledger  # type: ignore[union-attr]
    for given, says in (
        ({"topics": ["in-z"]}, "in-z was never read"),
        ({"partitions": ["in-a/9"]}, "in-a/9 was never read"),
        ({"topics": ["in-a"], "from": "2030-01-01T00:00:00Z"}, "nothing of this was folded"),
        ({"partitions": ["in-a/0"], "from": "40", "until": "41"}, "nothing of this was folded"),
    ):
        with pytest.raises(ConfigError, match=says):
            ranges(parse({"action": "backfill", **given}), ledger, made.kafka)


def test_unchanged_code_changes_nothing_but_the_files_of_its_range() -> None:
    """Records and state stay as they are, value for value; files outside the range stay under their names."""
    made = timed()
    before, sessions = table(made, A0), states(made)
    files = {file.path: file for file in made.ledger.active()}
    done = repair(made, ranges={str(A0): (15, 20)})
    assert (table(made, A0), states(made)) == (before, sessions)
    whole = done.ranges[A0]
    gone = [files[path] for path in files if path not in {file.path for file in made.ledger.active()}]
    assert gone
    assert all(whole.start <= file.first <= file.last < whole.end for file in gone)
    assert whole.end - whole.start < 25
