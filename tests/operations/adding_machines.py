"""A machine of a user's that adds up, with and without its bugs, and worlds that run it.

Next room: test_repair.py, test_holds.py and test_backfill.py.
"""

from __future__ import annotations

import json
import random
from typing import Any

from msgspec import Struct

from seriatim.engine.machine import Machine, UserMachine
from seriatim.engine.offsets import Partition
from seriatim.stream import OutputSettings, Stream
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0
from tests.operations.repair_helper import table


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

    def start(self, session: str) -> Total:  # noqa: ARG002
        """Nothing yet."""
        return Total()

    def apply(self, state: Total, message: Add) -> list[Sum]:
        """Set or add, and say what it was."""
        if self.raises and message.v == 99:
            raise ValueError("ninety-nine")
        was = state.value
        state.value = (
            message.v
            if message.start
            else was + message.v * (self.factor if message.v % 13 == 0 else 1)
        )
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
    """A world whose machine adds up. Its name is that of the stream file, whatever code is
    deployed.
    """
    stream = Stream(
        name="s", topics="in-.*", machine="m:Adder", output=OutputSettings(path="memory"), **fields
    )
    return MemoryStream(stream, lambda: UserMachine("m:Adder", machine))


def deploy(made: MemoryStream, machine: type[Adder]) -> None:
    """Other code from now on."""
    made.machine = lambda: UserMachine("m:Adder", machine)


def add(
    made: MemoryStream, count: int, seed: int, partition: Partition = A0, sessions: int = 4
) -> None:
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
    return {
        name: (one.state_bytes, one.finding, one.last_offset)
        for name, one in made.sessions(partition).items()
    }
