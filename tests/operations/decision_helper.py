"""A person's decisions about streams in memory, for tests: accept, retire, release; and what must
hold afterwards.

Next: memory_streams.py creates the streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seriatim.engine.offsets import Partition
from seriatim.operations.accept import RetireDecision, TopicDecision, accept_topic, retire_topic
from seriatim.operations.status import StreamStatus, read_status
from seriatim.testing import MemoryClock, MemoryStream
from tests.operations.memory_streams import send


def accept(memory_stream: MemoryStream, name: str = "in-a", **options: Any) -> TopicDecision:
    """Accept a topic."""
    return accept_topic(memory_stream.open(), name, "meant", **options)


def retire(memory_stream: MemoryStream, name: str = "in-a", **options: Any) -> RetireDecision:
    """Retire a topic or a partition."""
    return retire_topic(
        memory_stream.ledger,
        memory_stream.kafka,
        MemoryClock(),
        "s",
        memory_stream.stream.topics,
        name,
        "r1",
        "over",
        **options,
    )


def recreate_topic(memory_stream: MemoryStream, partitions: int = 1, topic: str = "in-a") -> str:
    """Delete a topic and create it again, with a snapshot and an update in each partition."""
    memory_stream.kafka.delete(topic)
    new = memory_stream.kafka.create(topic, partitions)
    for number in range(partitions):
        send(
            memory_stream,
            Partition(topic, number),
            ["x", "y"],
            b'{"type": "update", "id": "x", "v": 7}',
        )
    return new


def tables_from_records(
    memory_stream: MemoryStream, partition: Partition
) -> dict[str, dict[str, Any]]:
    """Tables by session, from the records alone, in the order in which they were committed."""
    tables: dict[str, dict[str, Any]] = {}
    for row in memory_stream.rows(partition):
        table = tables.setdefault(row["session"], {})
        if row["op"] == "delete":
            del table[row["id"]]
        else:
            table[row["id"]] = row["v"]
    return {session: table for session, table in tables.items() if table}


def tables_from_state(
    memory_stream: MemoryStream, partition: Partition
) -> dict[str, dict[str, Any]]:
    """Tables by session, from the state."""
    runner, tables = memory_stream.machine(), {}
    for name, session in memory_stream.sessions(partition).items():
        if session.state_bytes is not None:
            rows = runner.to_plain(runner.load(session.state_bytes, session.state_version))["rows"]
            tables[name] = {row["id"]: row["v"] for row in rows}
    return {session: table for session, table in tables.items() if table}


def assert_records_match_state(memory_stream: MemoryStream) -> None:
    """Assert that folding the records gives the state, and that no two records have one position."""
    places = [
        (row["topic_id"], row["partition"], row["offset"], row["index"])
        for row in memory_stream.rows()
    ]
    assert len(places) == len(set(places))
    for partition in memory_stream.accounts():
        assert tables_from_records(memory_stream, partition) == tables_from_state(
            memory_stream, partition
        ), partition


def status_of(memory_stream: MemoryStream) -> StreamStatus:
    """What `seriatim status` shows."""
    return read_status(
        memory_stream.stream,
        memory_stream.kafka,
        memory_stream.ledger,
        memory_stream.files,
        memory_stream.clock,
    )


def run_before_ledger_call(
    memory_stream: MemoryStream, call: str, deed: Callable[[], object]
) -> None:
    """Run something, once, just before a call to the ledger: what another process could do there."""
    waiting = [deed]

    def before(name: str) -> None:
        if name == call and waiting:
            waiting.pop()()

    memory_stream.ledger.on_call = before
