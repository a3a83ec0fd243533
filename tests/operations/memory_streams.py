"""Small streams in memory for tests of the operations.

Next: seriatim/testing.py, which has `MemoryStream`.
"""

from __future__ import annotations

import json
from typing import Any

from seriatim.engine.offsets import Partition
from seriatim.stream import OutputSettings, Stream, TableSettings
from seriatim.testing import MemoryStream

A0, A1, A2, B0 = *(Partition("in-a", number) for number in range(3)), Partition("in-b", 0)


def create_stream(**fields: Any) -> MemoryStream:
    """A stream of rows (id, v) over topics in-…; there is no topic yet."""
    table = TableSettings(key=("id",), columns={"id": "string", "v": "int64"}, before=False)
    stream = Stream(
        name="s",
        topics="in-.*",
        machine="table",
        table=table,
        output=OutputSettings(path="memory"),
        **fields,
    )
    return MemoryStream(stream, stream.table_machine)


def send(
    memory_stream: MemoryStream, partition: Partition, *values: Any, session: str | None = "s"
) -> None:
    """Send messages: numbers are updates of row a, lists are snapshots, bytes are bytes."""
    for value in values:
        body: Any = {"type": "update", "id": "a", "v": value}
        if isinstance(value, list):
            body = {"type": "snapshot", "rows": [{"id": row_id, "v": 0} for row_id in value]}
        content = value if isinstance(value, bytes) else json.dumps(body).encode()
        memory_stream.kafka.produce(partition.topic, session, content, partition=partition.number)


def create_filled_stream(partitions: int = 1, **fields: Any) -> MemoryStream:
    """A stream with topic in-a, and a snapshot and two updates in each partition; nothing is folded."""
    memory_stream = create_stream(**fields)
    memory_stream.kafka.create("in-a", partitions)
    for number in range(partitions):
        send(memory_stream, Partition("in-a", number), ["a", "b"], 1, 2)
    return memory_stream


def offsets(memory_stream: MemoryStream, partition: Partition) -> list[int]:
    """The offsets of a partition's records."""
    return [row["offset"] for row in memory_stream.rows(partition)]


def frontiers(memory_stream: MemoryStream) -> dict[str, int]:
    """The frontier of each partition."""
    return {
        str(partition): account.frontier for partition, account in memory_stream.accounts().items()
    }


def kinds(memory_stream: MemoryStream) -> list[str]:
    """The kinds of the ledger's entries."""
    return [
        commit.entry.kind for commit in memory_stream.ledger.commits if commit.entry is not None
    ]
