"""Small worlds in memory for tests of the steps.

Next room: seriatim/testing.py, which these are made of.
"""

from __future__ import annotations

import json
from typing import Any

from seriatim.engine.offsets import Partition
from seriatim.stream import OutputSettings, Stream, TableSettings
from seriatim.testing import MemoryStream

A0, A1, A2, B0 = *(Partition("in-a", number) for number in range(3)), Partition("in-b", 0)


def world(**fields: Any) -> MemoryStream:
    """A stream of rows (id, v) over topics in-…, of which there are none yet."""
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


def send(made: MemoryStream, partition: Partition, *values: Any, session: str | None = "s") -> None:
    """Send messages: numbers are updates of row a, lists are snapshots, bytes are bytes."""
    for value in values:
        body: Any = {"type": "update", "id": "a", "v": value}
        if isinstance(value, list):
            body = {"type": "snapshot", "rows": [{"id": one, "v": 0} for one in value]}
        content = value if isinstance(value, bytes) else json.dumps(body).encode()
        made.kafka.produce(partition.topic, session, content, partition=partition.number)


def begun(partitions: int = 1, **fields: Any) -> MemoryStream:
    """A world with topic in-a, a snapshot and two updates in each partition."""
    made = world(**fields)
    made.kafka.create("in-a", partitions)
    for number in range(partitions):
        send(made, Partition("in-a", number), ["a", "b"], 1, 2)
    return made


def offsets(made: MemoryStream, partition: Partition) -> list[int]:
    """The offsets of a partition's records."""
    return [row["offset"] for row in made.rows(partition)]


def frontiers(made: MemoryStream) -> dict[str, int]:
    """How far each partition is."""
    return {str(partition): account.frontier for partition, account in made.accounts().items()}


def kinds(made: MemoryStream) -> list[str]:
    """The kinds of the ledger's entries."""
    return [commit.entry.kind for commit in made.ledger.commits if commit.entry is not None]
