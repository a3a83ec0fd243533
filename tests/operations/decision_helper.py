"""A person's decisions about worlds in memory, for tests: accept, retire, release; and what must
hold afterwards.

Next room: worlds.py makes the worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seriatim.engine.offsets import Partition
from seriatim.operations.accept import DecisionContext, TopicDecision, accept_topic
from seriatim.operations.retire import RetireDecision, retire_topic
from seriatim.operations.status import read_status
from seriatim.testing import MemoryClock, MemoryStream
from tests.operations.memory_streams import send


def means(made: MemoryStream) -> DecisionContext:
    """What a decision is made with, in memory."""
    folding = made.folding()
    return DecisionContext(
        stream=made.stream,
        runner=made.machine(),
        log=made.kafka,
        ledger=made.ledger,
        records=made.files,
        state=made.files,
        clock=made.clock,
        new_attempt=folding.context.new_attempt,
    )


def accepted(made: MemoryStream, name: str = "in-a", **more: Any) -> TopicDecision:
    """Accept a topic."""
    return accept_topic(means(made), name, "meant", **more)


def retired(made: MemoryStream, name: str = "in-a", **more: Any) -> RetireDecision:
    """Retire a topic or a partition."""
    return retire_topic(
        made.ledger, made.kafka, MemoryClock(), "s", made.stream.topics, name, "r1", "over", **more
    )


def made_again(made: MemoryStream, partitions: int = 1, topic: str = "in-a") -> str:
    """Delete a topic and make it again, with a snapshot and an update in each partition."""
    made.kafka.delete(topic)
    new = made.kafka.create(topic, partitions)
    for number in range(partitions):
        send(made, Partition(topic, number), ["x", "y"], b'{"type": "update", "id": "x", "v": 7}')
    return new


def folded(made: MemoryStream, partition: Partition) -> dict[str, dict[str, Any]]:
    """Tables by session, from the records alone, in the order in which they were committed."""
    tables: dict[str, dict[str, Any]] = {}
    for row in made.rows(partition):
        table = tables.setdefault(row["session"], {})
        if row["op"] == "delete":
            del table[row["id"]]
        else:
            table[row["id"]] = row["v"]
    return {session: table for session, table in tables.items() if table}


def saved(made: MemoryStream, partition: Partition) -> dict[str, dict[str, Any]]:
    """Tables by session, from the state."""
    runner, tables = made.machine(), {}
    for name, session in made.sessions(partition).items():
        if session.state_bytes is not None:
            rows = runner.to_plain(runner.load(session.state_bytes, session.state_version))["rows"]
            tables[name] = {row["id"]: row["v"] for row in rows}
    return {session: table for session, table in tables.items() if table}


def is_right(made: MemoryStream) -> None:
    """Folding the records gives the state, and no record has the place of another."""
    places = [
        (row["topic_id"], row["partition"], row["offset"], row["index"]) for row in made.rows()
    ]
    assert len(places) == len(set(places))
    for partition in made.accounts():
        assert folded(made, partition) == saved(made, partition), partition


def status_of(made: MemoryStream) -> dict[str, Any]:
    """What `seriatim status` shows."""
    return read_status(made.stream, made.kafka, made.ledger, made.files)


def meanwhile(made: MemoryStream, call: str, deed: Callable[[], object]) -> None:
    """Somebody else does something just before a call to the ledger, once."""
    waiting = [deed]

    def before(name: str) -> None:
        if name == call and waiting:
            waiting.pop()()

    made.ledger.on_call = before
