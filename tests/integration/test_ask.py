"""Producers are asked, for real: a session hurt by a lost message is right again without anybody's
help.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from itertools import islice

from confluent_kafka import Consumer, TopicPartition

from seriatim.demo.generator import CollectionPoints, DemoFault, inject_faults
from seriatim.demo.producer import SnapshotRequestListener, send_messages
from seriatim.kafka.sending import create_topics
from seriatim.kafka.snapshot_requests import KafkaSnapshotRequester
from seriatim.ledger.gaps import SnapshotRequest
from tests.integration.lab import Lab, silent

WAIT_SECONDS = 240


def test_a_lost_message_a_request_a_snapshot(lab: Lab, topic_name: Callable[[], str]) -> None:
    """One run finds the gap and asks; the producer, which never stopped, answers; the next run
    makes it right.
    """
    # with this seed the session would send no snapshot by itself
    name, requests, client = topic_name(), topic_name(), {"bootstrap.servers": lab.servers}
    create_topics(client, {name: 2, requests: 1})
    lab.stream("asking", name, snapshot_requests=requests)
    points, asked, heard = (
        CollectionPoints([name], 5),
        SnapshotRequestListener(client, requests),
        list[tuple[str, str]](),
    )
    messages = inject_faults(
        points.messages(lambda: [heard.pop()] if heard else []), [DemoFault("drop", 90)]
    )
    send_messages(client, {}, islice(messages, 150), 0, None, silent)
    first = lab.fold("asking")
    assert [finding.finding for finding in first.findings] == ["sequence gap"]
    assert (first.quarantined, first.snapshot_request_error) == (1, "")
    heard += asked.wait_for_requests(1, 180)
    asked.close()
    assert heard == [(name, "session-00001")]
    send_messages(client, {}, islice(messages, 150), 0, None, silent)
    second = lab.fold("asking")
    assert (second.findings, second.quarantined) == ([], 0)
    truth = {
        table.name: {row: list(values) for row, values in table.rows.items()}
        for table in points.tables
    }
    found = {
        session: {row["id"]: [row["price"], row["size"]] for row in saved["state"]["rows"]}
        for (_, session), saved in lab.sessions("asking").items()
    }
    assert found == truth
    assert len(lab.read_topic(requests, 1)) == 1


def test_the_demo_answers_while_it_sends(lab: Lab, topic_name: Callable[[], str]) -> None:
    """`seriatim produce demo --answer TOPIC` makes the topic, and sends a snapshot of whoever is
    asked for.
    """
    # with this seed and rate it would send its second snapshot by itself after five minutes
    name, prefix, client = topic_name(), topic_name(), {"bootstrap.servers": lab.servers}
    one_table, slowly = (
        ["--topics", "1", "--partitions", "1", "--sessions", "1"],
        ["--messages", "0", "--rate", "10"],
    )
    given = [*one_table, *slowly, "--seed", "112", "--prefix", prefix, "--answer", name]
    sending = lab.start("produce", "demo", *given)
    try:
        snapshots = read_snapshots(lab, f"{prefix}-a")
        next(snapshots)
        request = SnapshotRequest(
            stream="s",
            topic=f"{prefix}-a",
            partition=0,
            session="session-00000",
            reason="gap",
            offset=1,
        )
        KafkaSnapshotRequester(client, name).send([request])
        next(snapshots)
    finally:
        sending.send_signal(signal.SIGINT)
        _, told = sending.communicate(timeout=300)
    assert sending.returncode == 0, told


def read_snapshots(lab: Lab, topic: str) -> Iterator[bytes]:
    """The snapshots in a topic, one by one, as they come."""
    until = time.monotonic() + WAIT_SECONDS
    while topic not in lab.admin.list_topics(timeout=120).topics:
        assert time.monotonic() < until
        time.sleep(0.3)
    consumer = Consumer(
        {"bootstrap.servers": lab.servers, "group.id": "look", "auto.offset.reset": "earliest"}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    while time.monotonic() < until:
        for message in consumer.consume(100, 0.3):
            if message.error() is None and b'"snapshot"' in message.value():
                yield message.value()
    consumer.close()
