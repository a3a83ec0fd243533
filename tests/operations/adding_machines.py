"""A user machine that adds up, with and without bugs, and streams in memory that run it.

Next: the tests of repair, in tests/operations/repair.
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
from tests.operations.repair_helper import records_in_order


class Total(Struct):
    """A session's sum."""

    value: int = 0


class Add(Struct):
    """A message: set, or add."""

    v: int
    start: bool = False


class Sum(Struct):
    """The record: a session's sum, and what it was before."""

    value: int
    was: int


class Adder(Machine[Total, Add, Sum]):
    """Adds up. Subclasses get multiples of 13 wrong, or raise at 99."""

    factor = 1
    raises = False

    def start(self, session: str) -> Total:  # noqa: ARG002
        """Nothing yet."""
        return Total()

    def apply(self, state: Total, message: Add) -> list[Sum]:
        """Set or add; one record."""
        if self.raises and message.v == 99:
            raise ValueError("ninety-nine")
        old_value = state.value
        if message.start:
            state.value = message.v
        elif message.v % 13 == 0:
            state.value += message.v * self.factor
        else:
            state.value += message.v
        return [Sum(state.value, old_value)]

    def is_snapshot(self, message: Add) -> bool:
        """Whether the message sets the sum."""
        return message.start


class BuggyAdder(Adder):
    """The machine before a bug was fixed: it counts multiples of 13 twice."""

    factor = 2


class RaisingAdder(Adder):
    """The machine before another bug was fixed: it raises at 99."""

    raises = True


def create_adding_stream(machine: type[Adder], **fields: Any) -> MemoryStream:
    """A stream whose machine adds up. The machine has the name of the stream file, whatever code is
    deployed.
    """
    stream = Stream(
        name="s", topics="in-.*", machine="m:Adder", output=OutputSettings(path="memory"), **fields
    )
    return MemoryStream(stream, lambda: UserMachine("m:Adder", machine))


def deploy(memory_stream: MemoryStream, machine: type[Adder]) -> None:
    """Use other code from now on."""
    memory_stream.machine = lambda: UserMachine("m:Adder", machine)


def send_numbers(
    memory_stream: MemoryStream, count: int, seed: int, partition: Partition = A0, sessions: int = 4
) -> None:
    """Send random messages to an adder."""
    chance = random.Random(seed)
    for number in range(count):
        start = number < sessions or chance.random() < 0.08
        value = 99 if chance.random() < 0.02 else chance.randrange(60)
        body = json.dumps({"v": value, "start": start}).encode()
        name = f"s{number if number < sessions else chance.randrange(sessions)}"
        memory_stream.kafka.produce(partition.topic, name, body, partition=partition.number)


def expected_outcome(
    memory_stream: MemoryStream, partition: Partition = A0
) -> tuple[list[Any], dict[str, Any]]:
    """Records and session states that the right code gives for all messages of Kafka."""
    correct_stream = create_adding_stream(Adder, tier=memory_stream.stream.tier)
    correct_stream.kafka = correct_stream.reader.kafka = correct_stream.explain.kafka = (
        memory_stream.kafka
    )
    correct_stream.run()
    return records_in_order(correct_stream, partition), session_states(correct_stream, partition)


def session_states(memory_stream: MemoryStream, partition: Partition = A0) -> dict[str, Any]:
    """State bytes, finding and last offset of each session."""
    return {
        name: (session.state_bytes, session.finding, session.last_offset)
        for name, session in memory_stream.sessions(partition).items()
    }
