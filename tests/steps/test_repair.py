"""Repair: one command, and the output is what a straight fold of Kafka gives."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from seriatim.core.errors import ConfigError, FencedError, IntegrityError
from seriatim.core.machine import Machine, UserMachine
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.refold import Rewind, stages
from seriatim.core.repair import Request
from seriatim.core.stream import Output, Stream
from seriatim.steps.repair import Repairing, abandon, held_request, plan
from seriatim.testing import MemoryStream
from tests.steps.mending import mending, repair, table
from tests.steps.worlds import A0, A1, begun, kinds, send, world


def straight(made: MemoryStream, **fields: Any) -> MemoryStream:
    """The same messages in a world that never had trouble, folded at once."""
    other = world(**fields)
    other.kafka = made.kafka
    other.reader.kafka = other.explain.kafka = made.kafka
    other.run()
    return other


def assert_straight(made: MemoryStream, partition: Partition = A0, **fields: Any) -> None:
    """Records and state are those of a straight fold."""
    other = straight(made, **fields)
    assert table(made, partition) == table(other, partition)
    mine = {name: (one.saved, one.finding) for name, one in made.sessions(partition).items() if one.saved}
    assert mine == {name: (one.saved, one.finding) for name, one in other.sessions(partition).items() if one.saved}


def updates(made: MemoryStream, count: int, partition: Partition = A0, sessions: int = 3, seed: int = 1) -> None:
    """Random messages: snapshots now and then, updates else."""
    chance = random.Random(seed)
    for number in range(count):
        name = f"s{chance.randrange(sessions)}"
        if number < sessions or chance.random() < 0.1:
            send(
                made, partition, ["a", "b"][: chance.randint(1, 2)], session=f"s{number}" if number < sessions else name
            )
        else:
            send(made, partition, chance.randrange(100), session=name)


def sliced(count: int = 60, size: int = 7, partitions: int = 1, **fields: Any) -> MemoryStream:
    """A world folded in small slices."""
    made = world(**fields)
    made.kafka.create("in-a", partitions)
    for number in range(partitions):
        updates(made, count, Partition("in-a", number))
    made.run(size * partitions)
    return made


def lose(made: MemoryStream, path: str) -> None:
    """A file vanishes."""
    del made.files.files[path]


def test_a_lost_record_file_is_made_again() -> None:
    """Only its range is folded again; all other files stay in the table under their names."""
    made = sliced()
    before, files = table(made, A0), [file.path for file in made.ledger.active()]
    lose(made, files[3])
    done = repair(made)
    after = [file.path for file in made.ledger.active()]
    assert table(made, A0) == before
    assert set(files) - set(after) == {files[3]}
    assert len(set(after) - set(files)) == 1
    assert done.ranges[A0].start >= 21
    assert made.accounts()[A0].epoch == 1
    assert_straight(made)


def test_a_lost_state_file_is_made_again() -> None:
    """From the nearest state before it that is as committed, with the records since: whatever code makes them."""
    made = sliced()
    files = [file.path for file in made.ledger.active()]
    lose(made, made.accounts()[A0].state[-1].path)
    with pytest.raises(IntegrityError):
        made.sessions(A0)
    repair(made)
    assert [file.path for file in made.ledger.active()][:-1] == files[:-1]
    assert_straight(made)
    updates(made, 20, seed=5)
    made.run(7)
    assert_straight(made)


def test_nothing_hurt_nothing_done() -> None:
    """A repair of what is well changes nothing, the ledger included."""
    made = sliced()
    before = kinds(made)
    assert plan(mending(made), Request()).parts == ()
    assert repair(made).sequence == -1
    assert kinds(made) == before


class Total(Struct):
    """A session's sum."""

    value: int = 0


class Add(Struct):
    """A message: set, or add."""

    v: int
    start: bool = False


class Sum(Struct):
    """What a session's sum is now."""

    value: int
    was: int


class Adder(Machine[Total, Add, Sum]):
    """Adds up; a buggy one gets thirteens wrong, and raises at 99."""

    factor = 1
    raises = False

    def start(self, session: str) -> Total:
        """Nothing yet."""
        return Total()

    def apply(self, state: Total, message: Add) -> list[Sum]:
        """Set or add, and say what it was."""
        if self.raises and message.v == 99:
            raise ValueError("ninety-nine")
        was = state.value
        state.value = message.v if message.start else was + message.v * (self.factor if message.v % 13 == 0 else 1)
        return [Sum(state.value, was)]

    def is_snapshot(self, message: Add) -> bool:
        """Where a sum is set anew."""
        return message.start


class Buggy(Adder):
    """Before the fix."""

    factor = 2


class Raising(Adder):
    """Before another fix."""

    raises = True


def adding(machine: type[Adder], **fields: Any) -> MemoryStream:
    """A world whose machine adds up. Its name is that of the stream file, whatever code is deployed."""
    stream = Stream(name="s", topics="in-.*", machine="m:Adder", output=Output(path="memory"), **fields)
    return MemoryStream(stream, lambda: UserMachine("m:Adder", machine))


def deploy(made: MemoryStream, machine: type[Adder]) -> None:
    """Other code from now on."""
    made.machine = lambda: UserMachine("m:Adder", machine)


def add(made: MemoryStream, count: int, seed: int, partition: Partition = A0, sessions: int = 4) -> None:
    """Random messages of an adder."""
    chance = random.Random(seed)
    for number in range(count):
        start = number < sessions or chance.random() < 0.08
        value = 99 if chance.random() < 0.02 else chance.randrange(60)
        body = json.dumps({"v": value, "start": start}).encode()
        name = f"s{number if number < sessions else chance.randrange(sessions)}"
        made.kafka.produce(partition.topic, name, body, partition=partition.number)


def fixed(made: MemoryStream, partition: Partition = A0) -> tuple[list[Any], dict[str, Any]]:
    """What the right code makes of all that Kafka has."""
    other = adding(Adder, tier=made.stream.tier)
    other.kafka = other.reader.kafka = other.explain.kafka = made.kafka
    other.run()
    return table(other, partition), states(other, partition)


def states(made: MemoryStream, partition: Partition = A0) -> dict[str, Any]:
    """What is known of each session."""
    return {name: (one.saved, one.finding, one.last_offset) for name, one in made.sessions(partition).items()}


@pytest.mark.parametrize("seed", range(20))
def test_a_bug_fixed_later(seed: int) -> None:
    """From the first wrong message on everything is as if the code had been right all along, in any slicing."""
    chance = random.Random(seed)
    made = adding(Buggy)
    made.kafka.create("in-a", 2)
    for partition in (A0, A1):
        add(made, 120, seed, partition)
    made.run(chance.randint(5, 60))
    others = [file.path for file in made.ledger.active() if "/1/" in file.path]
    deploy(made, Adder)
    done = repair(made, chance.randint(5, 200), partition=str(A0), start=0)
    assert (table(made, A0), states(made)) == fixed(made)
    assert [file.path for file in made.ledger.active() if "/1/" in file.path] == others
    assert done.ranges[A0].start == 0
    add(made, 40, seed + 1)
    made.run(13)
    assert (table(made, A0), states(made)) == fixed(made)


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
