"""Backfill: a range folded again, each session up to where it is as committed, and nothing else
changed.
"""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from seriatim.engine.machine import Machine
from seriatim.engine.offsets import OffsetRange
from seriatim.errors import ConfigError, IntegrityError
from seriatim.operations.repair.backfill import backfill_ranges
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun
from seriatim.operations.rewind import Rewind, plan_stages
from seriatim.operations.run_request import parse_run_request
from seriatim.testing import MemoryStream
from tests.operations.adding_machines import (
    Add,
    Adder,
    BuggyAdder,
    Sum,
    Total,
    create_adding_stream,
    deploy,
    send_numbers,
    session_states,
)
from tests.operations.decision_helper import retire
from tests.operations.memory_streams import A0, A1, kinds
from tests.operations.repair_helper import records_in_order, remove_file, repair


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_a_backfill_changes_the_widened_range_and_nothing_else(seed: int) -> None:
    """Each session up to its first snapshot after the range, or to where it is as committed:
    nothing beyond.
    """
    chance = random.Random(seed)
    made = create_adding_stream(BuggyAdder)
    made.kafka.create("in-a")
    send_numbers(made, 150, seed)
    made.run(chance.randint(5, 40))
    before = records_in_order(made, A0)
    first = chance.randrange(140)
    last, stage = chance.randint(first + 1, 150), chance.randint(5, 200)
    deploy(made, Adder)
    tools = made.open()
    planned = plan_repair(tools, RepairRequest(ranges={str(A0): (first, last)}))
    done = RepairRun(tools).apply(planned, stage)
    rows, sums = by_hand(made, planned.actions[0].rewind, stage)  # type: ignore[union-attr]
    after = records_in_order(made, A0)
    assert [(row["offset"], row["session"], row["value"], row["was"]) for row in after] == rows, (
        first,
        last,
    )
    whole = done.ranges[A0]
    assert all(old == new or old["offset"] in whole for old, new in zip(before, after, strict=True))
    runner = made.machine()
    assert {
        n: runner.load(s.state_bytes or b"", s.state_version).value
        for n, s in made.sessions(A0).items()
    } == sums


def by_hand(made: MemoryStream, rewind: Rewind, stage: int) -> tuple[list[Any], dict[str, int]]:
    """Two folds side by side: a session is of the new code from the base on, until it is as the old
    one has it.
    """
    borders = {
        piece.offset_range.end for piece in plan_stages(rewind, stage) if piece.ends_at_commit
    }
    codes = {"old": BuggyAdder(), "new": Adder()}
    state: dict[str, dict[str, Total]] = {"old": {}, "new": {}}
    over: set[str] = set()
    rows = []
    stretch = made.reader.batches(A0, OffsetRange(0, 150), with_headers=False)[0]
    for offset, name in enumerate(map(str, stretch.session_names())):
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
    made = create_adding_stream(BuggyAdder)
    made.kafka.create("in-a", 2)
    for partition in (A0, A1):
        for number in range(count):
            body = json.dumps({"v": number, "start": number % 10 == 0}).encode()
            made.kafka.produce(
                "in-a",
                "s",
                body,
                partition=partition.number,
                timestamp=1_800_000_000_000 + number * 1000,
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
        assert (
            backfill_ranges(parse_run_request({"action": "backfill", **given}), ledger, made.kafka)
            == expected
        )


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
            backfill_ranges(parse_run_request({"action": "backfill", **given}), ledger, made.kafka)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({"topics": ["in-a"]}, "in-a"),
        ({"partitions": ["in-a/1"]}, "in-a/1"),
        ({"from": "2026-11-16T08:00:00Z"}, "in-a"),
    ],
)
def test_a_retired_topic_is_refused_with_the_command_that_takes_it_back(
    form: dict[str, Any], name: str
) -> None:
    """Nothing of it is read, so nothing of it is folded again."""
    made = timed()
    retire(made)
    ledger = made.ledger.head("s").ledger  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=f"{name} is retired") as refused:
        backfill_ranges(parse_run_request({"action": "backfill", **form}), ledger, made.kafka)
    assert f"seriatim accept s {name} --because" in refused.value.next


def test_unchanged_code_changes_nothing_but_the_files_of_its_range() -> None:
    """Records and state stay as they are, value for value; files outside the range stay under their
    names.
    """
    made = timed()
    before, sessions = records_in_order(made, A0), session_states(made)
    files = {file.path: file for file in made.ledger.files_now()}
    done = repair(made, ranges={str(A0): (15, 20)})
    assert (records_in_order(made, A0), session_states(made)) == (before, sessions)
    whole = done.ranges[A0]
    gone = [
        files[path] for path in files if path not in {file.path for file in made.ledger.files_now()}
    ]
    assert gone
    assert all(whole.start <= file.first_offset <= file.last_offset < whole.end for file in gone)
    assert whole.end - whole.start < 25


def test_the_unchanged_machine_is_proved_to_be_so() -> None:
    """Where it is, the files of the range are made again; where it makes other state or records,
    nothing changes.
    """
    made = timed()
    before = records_in_order(made, A0)
    assert repair(made, ranges={str(A0): (22, 27)}, unchanged=True).sequence >= 0
    for code, says in (
        (Adder, "another state of 1 sessions"),
        (Boasting, "other records at offset 21"),
    ):
        deploy(made, code)
        with pytest.raises(IntegrityError, match=says):
            repair(made, ranges={str(A0): (22, 27)}, unchanged=True)
        assert (records_in_order(made, A0), made.accounts()[A0].hold) == (before, None)
    assert kinds(made)[-2:] == ["hold", "release"]
    repair(made, ranges={str(A0): (22, 27)})
    assert records_in_order(made, A0) != before


class Boasting(BuggyAdder):
    """The same state, other records."""

    def apply(self, state: Total, message: Add) -> list[Sum]:
        """One more than it is."""
        return [Sum(one.value + 1, one.was) for one in super().apply(state, message)]


class Counted(Struct):
    """A sum, and of how many."""

    value: int = 0
    count: int = 0


class Counting(Machine[Counted, Add, Sum]):
    """The fixed adder's next version: it also counts since the last start."""

    state_version = 2

    def start(self, session: str) -> Counted:  # noqa: ARG002
        """Nothing yet."""
        return Counted()

    def apply(self, state: Counted, message: Add) -> list[Sum]:
        """Set or add."""
        was, state.count = state.value, 0 if message.start else state.count + 1
        state.value = message.v if message.start else was + message.v
        return [Sum(state.value, was)]

    def is_snapshot(self, message: Add) -> bool:
        """Where a sum is set anew."""
        return message.start

    def upgrade(self, old: bytes, version: int) -> Counted:
        """From the version without a count."""
        assert version == 1
        return Counted(msgspec.msgpack.decode(old, type=Total).value, 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_a_new_state_version_rewrites_history_if_asked(seed: int) -> None:
    """It takes over lazily; then any middle range, and all of it, folded again: as if it had been
    there all along.
    """
    chance = random.Random(seed)
    made = create_adding_stream(BuggyAdder)
    made.kafka.create("in-a")
    send_numbers(made, 80, seed)
    made.run(chance.randint(3, 30))
    deploy(made, Counting)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the deployed machine 2"):
        repair(made, ranges={str(A0): (0, 9)}, unchanged=True)
    send_numbers(made, chance.randint(0, 40), seed + 7)
    made.run(chance.randint(3, 30))
    if chance.random() < 0.5:
        remove_file(made, chance.choice(made.accounts()[A0].state).path)
        repair(made, chance.randint(3, 50))
    frontier = made.accounts()[A0].frontier
    middle = chance.randint(0, frontier // 2), chance.randint(frontier // 2 + 1, frontier)
    repair(made, chance.randint(3, 60), ranges={str(A0): middle})
    repair(made, chance.randint(3, 60), ranges={str(A0): (0, frontier)})
    other = create_adding_stream(Counting)  # type: ignore[arg-type]
    other.kafka = other.reader.kafka = other.explain.kafka = made.kafka
    other.run()
    assert records_in_order(made, A0) == records_in_order(other, A0)
    runner = made.machine()

    def known(world: MemoryStream) -> dict[str, Any]:
        return {
            n: (runner.load(s.state_bytes or b"", s.state_version), s.last_offset)
            for n, s in world.sessions(A0).items()
        }

    assert known(made) == known(other)
