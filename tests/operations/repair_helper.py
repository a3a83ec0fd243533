"""Repairs of worlds in memory, for tests.

Next room: worlds.py makes the worlds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.ledger.gaps import Gap
from seriatim.operations.repair.plan import RepairRequest
from seriatim.operations.repair.repair import RefoldResult, RepairContext, RepairRun, plan_repair
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0, send, world


class MemoryReread:
    """Messages of the past, read again."""

    def __init__(self, made: MemoryStream) -> None:
        self.made = made

    def read(self, partition: Partition, offset_range: OffsetRange) -> Iterator[Any]:
        """Those of a range that are there."""
        yield from self.made.reader.batches(partition, offset_range, with_headers=False)

    def is_compacted(self, topic: str) -> bool:
        """As the topic says."""
        return self.made.kafka.topics[topic].compacted


def mending(made: MemoryStream) -> RepairContext:
    """What a repair of a world is made with."""
    folding = made.folding()
    return RepairContext(
        stream=made.stream,
        runner=folding.runner,
        fold_context=folding.context,
        past_reader=MemoryReread(made),
    )


def repair(made: MemoryStream, messages_max: int = 1_000_000, **request: Any) -> RefoldResult:
    """Plan and apply, as one command does."""
    tools = mending(made)
    return RepairRun(tools).apply(plan_repair(tools, RepairRequest(**request)), messages_max)


def table(made: MemoryStream, partition: Partition) -> list[dict[str, Any]]:
    """A partition's records by offset and index, without what a refold may change."""
    return sorted(made.rows(partition), key=lambda row: (row["offset"], row["index"]))


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
    mine = {
        name: (one.state_bytes, one.finding)
        for name, one in made.sessions(partition).items()
        if one.state_bytes
    }
    assert mine == {
        name: (one.state_bytes, one.finding)
        for name, one in other.sessions(partition).items()
        if one.state_bytes
    }


def updates(
    made: MemoryStream, count: int, partition: Partition = A0, sessions: int = 3, seed: int = 1
) -> None:
    """Random messages: snapshots now and then, updates else."""
    chance = random.Random(seed)
    for number in range(count):
        name = f"s{chance.randrange(sessions)}"
        if number < sessions or chance.random() < 0.1:
            send(
                made,
                partition,
                ["a", "b"][: chance.randint(1, 2)],
                session=f"s{number}" if number < sessions else name,
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


def gaps_of(made: MemoryStream) -> list[Gap]:
    """The gaps as the table has them."""
    return made.derived.gaps(made.derived.applied_version("gaps"))
