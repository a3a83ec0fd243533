"""Repairs of streams in memory, for tests.

Next: memory_streams.py creates the streams.
"""

from __future__ import annotations

import random
from typing import Any

from seriatim.engine.offsets import Partition
from seriatim.ledger.gaps import Gap
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RefoldResult, RepairRun
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0, create_stream, send


def repair(
    memory_stream: MemoryStream, messages_max: int = 1_000_000, **request: Any
) -> RefoldResult:
    """Plan and apply, as one command does."""
    open_stream = memory_stream.open()
    return RepairRun(open_stream).apply(
        plan_repair(open_stream, RepairRequest(**request)), messages_max
    )


def records_in_order(memory_stream: MemoryStream, partition: Partition) -> list[dict[str, Any]]:
    """A partition's records by offset and index, without what a refold may change."""
    return sorted(memory_stream.rows(partition), key=lambda row: (row["offset"], row["index"]))


def fold_without_trouble(memory_stream: MemoryStream, **fields: Any) -> MemoryStream:
    """A stream that folds the same messages at once and never had trouble."""
    clean_stream = create_stream(**fields)
    clean_stream.kafka = memory_stream.kafka
    clean_stream.reader.kafka = clean_stream.explain.kafka = memory_stream.kafka
    clean_stream.run()
    return clean_stream


def assert_equals_clean_fold(
    memory_stream: MemoryStream, partition: Partition = A0, **fields: Any
) -> None:
    """Assert that records and state are those of a fold without trouble."""
    clean_stream = fold_without_trouble(memory_stream, **fields)
    assert records_in_order(memory_stream, partition) == records_in_order(clean_stream, partition)
    own_states = {
        name: (session.state_bytes, session.finding)
        for name, session in memory_stream.sessions(partition).items()
        if session.state_bytes
    }
    assert own_states == {
        name: (session.state_bytes, session.finding)
        for name, session in clean_stream.sessions(partition).items()
        if session.state_bytes
    }


def send_random_messages(
    memory_stream: MemoryStream,
    count: int,
    partition: Partition = A0,
    sessions: int = 3,
    seed: int = 1,
) -> None:
    """Send random messages: mostly updates, snapshots now and then."""
    chance = random.Random(seed)
    for number in range(count):
        name = f"s{chance.randrange(sessions)}"
        if number < sessions or chance.random() < 0.1:
            send(
                memory_stream,
                partition,
                ["a", "b"][: chance.randint(1, 2)],
                session=f"s{number}" if number < sessions else name,
            )
        else:
            send(memory_stream, partition, chance.randrange(100), session=name)


def create_sliced_stream(
    count: int = 60, size: int = 7, partitions: int = 1, **fields: Any
) -> MemoryStream:
    """A stream in memory that was folded in small slices."""
    memory_stream = create_stream(**fields)
    memory_stream.kafka.create("in-a", partitions)
    for number in range(partitions):
        send_random_messages(memory_stream, count, Partition("in-a", number))
    memory_stream.run(size * partitions)
    return memory_stream


def remove_file(memory_stream: MemoryStream, path: str) -> None:
    """Remove a file, as if it were lost."""
    del memory_stream.files.files[path]


def gaps_of(memory_stream: MemoryStream) -> list[Gap]:
    """The gaps as the table has them."""
    return memory_stream.derived.gaps(memory_stream.derived.applied_version("gaps"))
