"""The outcome of a real broker and real Spark, by either reader, is the one of the golden file.

The messages are those of test_digests.py, at the same offsets and with the same timestamps, so that
the digests are the very same numbers. A sample of the combinations; all of them with `--full`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from seriatim.embedded.broker import BrokerInfo
from tests.golden.combinations import (
    COMBINATIONS,
    MACHINES,
    counted,
    pinned,
    write_stream,
)
from tests.golden.messages import PARTITIONS, TOPIC_A, TOPIC_B, Batch, sessions_of, world
from tests.golden.outcomes import digest, findings, outcome
from tests.golden.product import command, environment
from tests.integration.lab import Lab

READERS = ("spark", "task")
SAMPLE = {
    ("strict", "table", "task"),
    ("strict", "orderbook", "spark"),
    ("window", "table", "spark"),
    ("window", "orderbook", "task"),
}
"""Every reader and every machine, in the tiers that do most."""
SETTINGS = {"retention.ms": "-1", "retention.bytes": "-1"}
WAIT_SECONDS = 60
MESSAGES_MAX = 600
"""Of a slice, so that there are two: each costs Spark about a second. The outcome does not depend
on it.
"""


def all_cases() -> list[Any]:
    """Every combination with every reader; those beyond the sample are for `--full`."""
    cases = []
    for tier, machine in COMBINATIONS:
        for read in READERS:
            marks = [] if (tier, machine, read) in SAMPLE else [pytest.mark.full]
            cases.append(pytest.param(tier, machine, read, marks=marks))
    return cases


def send(servers: str, topics: dict[str, str], batches: list[Batch]) -> None:
    """Put batches on the broker, in order, with their timestamps and transactions."""
    plain = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "log_level": 0})
    transactional = Producer(
        {"bootstrap.servers": servers, "transactional.id": uuid.uuid4().hex, "log_level": 0}
    )
    transactional.init_transactions(WAIT_SECONDS)
    ends: dict[tuple[str, int], int] = {}
    for batch in batches:
        producer = plain if batch.outcome == "plain" else transactional
        if batch.outcome != "plain":
            producer.begin_transaction()
        for message in batch.messages:
            content = (topics[batch.topic], message.value, message.key, batch.partition)
            producer.produce(*content, timestamp=message.timestamp)
        # Batches of the two producers must not overtake each other.
        assert producer.flush(WAIT_SECONDS) == 0
        if batch.outcome == "commit":
            producer.commit_transaction(WAIT_SECONDS)
        if batch.outcome == "abort":
            producer.abort_transaction(WAIT_SECONDS)
        place = topics[batch.topic], batch.partition
        ends[place] = ends.get(place, 0) + len(batch.messages) + (batch.outcome != "plain")
        if batch.outcome != "plain":
            wait_for_end(servers, *place, ends[place])


def wait_for_end(servers: str, topic: str, partition: int, end: int) -> None:
    """Wait until a log ends here: the marker of a transaction is written after the transaction has
    ended.
    """
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "golden", "log_level": 0})
    place = TopicPartition(topic, partition)
    while consumer.get_watermark_offsets(place, timeout=WAIT_SECONDS)[1] < end:
        time.sleep(0.01)
    consumer.close()


@pytest.fixture(scope="module")
def sent(broker: BrokerInfo) -> Callable[[str], str]:
    """Sends the messages of a machine once for all tests of this module; the ending of the topics'
    names.
    """
    from confluent_kafka.admin import AdminClient, NewTopic

    endings: dict[str, str] = {}

    def get(machine: str) -> str:
        if machine not in endings:
            ending = uuid.uuid4().hex[:8]
            topics = {name: f"{name}-{ending}" for name in PARTITIONS}
            admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
            new = [
                NewTopic(topics[name], count, 1, config=SETTINGS)
                for name, count in PARTITIONS.items()
            ]
            for answer in admin.create_topics(new).values():
                answer.result(WAIT_SECONDS)
            send(broker.bootstrap_servers, topics, world(MACHINES[machine]))
            endings[machine] = ending
        return endings[machine]

    return get


@pytest.mark.parametrize(("tier", "machine", "read"), all_cases())
def test_readers_give_the_golden_outcome(
    tier: str,
    machine: str,
    read: str,
    tmp_path: Path,
    broker: BrokerInfo,
    spark: Callable[[], Any],
    sent: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A real run has the digests that the fold over a Kafka in memory has."""
    ending = sent(machine)
    lab = Lab(tmp_path, broker, spark, read)
    name = write_stream(tmp_path, tier, machine, f"golden-[ab]-{ending}", read)
    done = lab.fold(name, messages_max=MESSAGES_MAX)
    assert done.slices > 1
    with environment(tmp_path, monkeypatch, broker.bootstrap_servers):
        names = {f"{topic}-{ending}": topic for topic in PARTITIONS}
        for row in command("status", name, "--json").objects()[0]["partitions"]:
            # The fake broker gives its topics the ids id-1 and id-2, in the order of their creation.
            names[row["topic_id"]] = {TOPIC_A: "id-1", TOPIC_B: "id-2"}[names[row["topic"]]]
        digests = outcome(
            name, tmp_path / "out" / name, sessions_of(world(MACHINES[machine])), names
        )
        told = findings([finding.to_dict(name) for finding in done.findings], names)
    expected = pinned()[name]
    assert {**digests, "findings": digest(told), "findings_count": counted(told)} == expected
