"""Looking back in any world: what a trace folds is what was committed, whatever the world went
through.

Next room: chaos.py makes the worlds; tests/operations/inspect/test_session_replay.py has the cases
one by one.
"""

from __future__ import annotations

from random import Random

import pytest

from seriatim.engine.crash_points import arm
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.ledger.model import Account
from seriatim.operations.inspect.session_replay import SessionReplay
from seriatim.operations.rewind import same_session
from seriatim.testing import MemoryStream
from tests.operations.lookback_helper import head_of, session_rows
from tests.sim.chaos import Chaos

SAMPLE = 25


def what_kafka_has(made: MemoryStream, partition: Partition, account: Account) -> list[int] | None:
    """The offsets before the frontier at which Kafka has anything; None: the topic is another one,
    or gone beyond.
    """
    topic = made.kafka.topics.get(partition.topic)
    if (
        topic is None
        or topic.id != account.topic_id
        or topic.log_starts[partition.number] > account.frontier
    ):
        return None
    log = topic.messages[partition.number][: account.frontier]
    first = topic.log_starts[partition.number]
    return [
        offset
        for offset, message in enumerate(log)
        if offset >= first and message.fate != "compacted"
    ]


def grow_old(made: MemoryStream, chance: Random) -> None:
    """Kafka drops what is old, and so does the sweep: states of which nothing is needed for the
    next run.
    """
    for partition, account in made.accounts().items():
        topic = made.kafka.topics.get(partition.topic)
        if topic is None or topic.id != account.topic_id:
            continue
        end = min(account.frontier, len(topic.messages[partition.number]))
        made.kafka.delete_records(partition, chance.randrange(end + 1))
        needed = {file.path for file in account.state}
        old = [
            path
            for path in made.files.paths(partition)
            if path.startswith("state/") and path not in needed
        ]
        made.files.delete(path for path in old if chance.random() < 0.5)


def look_back(seed: int) -> int:
    """Live through one seed, then trace every session from where that is possible; how many were."""
    chaos = Chaos(seed)
    try:
        chaos.live()
    finally:
        arm(None)
    made, traced = chaos.world, 0
    if not any(commit.entry is not None for commit in made.ledger.commits):
        return 0
    chance = Random(seed)
    if chance.random() < 0.5:
        grow_old(made, chance)
    tools, head, runner = made.open(), head_of(made), made.machine()
    for partition, account in made.accounts().items():
        for name, committed in made.files.load_all(account.state).items():
            kept = what_kafka_has(made, partition, account)
            if kept is None:
                with pytest.raises(ConfigError):
                    SessionReplay(tools, head, partition, name).begin_at_or_after(0)
                continue
            way = SessionReplay(tools, head, partition, name)
            way.begin_at_or_after(0)
            start = way.next_offset
            if sum(at >= start for at in kept) < way.committed_end - start:
                with pytest.raises(ConfigError):
                    list(way.steps(way.committed_end))
                continue
            steps = list(way.steps(way.committed_end))
            assert same_session(way.tracing_fold.session_to_save(), committed, runner), (
                f"{partition} {name} differs"
            )
            made_again = [
                {
                    "offset": step.offset,
                    **{k: v for k, v in record.items() if k not in ("source_offset", "table")},
                }
                for step in steps
                for record in step.records
            ]
            assert made_again == session_rows(made, name, partition, start), (
                f"{partition} {name}: other records"
            )
            quick = SessionReplay(tools, head, partition, name)
            quick.begin_at_or_after(0)
            quick.fold_to(quick.committed_end)
            assert same_session(quick.tracing_fold.session_to_save(), committed, runner), (
                f"{partition} {name} differs without looking"
            )
            traced += 1
    return traced


@pytest.mark.long
def test_a_trace_tells_what_was_committed(seeds: range) -> None:
    """In worlds of crashes, repairs, compactions and new topics each session's trace ends as its
    committed state.
    """
    traced = 0
    for seed in seeds[: max(SAMPLE, len(seeds) // 10)]:
        try:
            traced += look_back(seed)
        except Exception as error:  # noqa: BLE001  # whatever it is, the seed is all one needs
            pytest.fail(f"seed={seed} ({type(error).__name__}: {error})", pytrace=False)
    assert traced > len(seeds[:SAMPLE])
