"""The contract of requests, on a real topic and in memory; and a demo producer that answers them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from seriatim.demo.producer import SnapshotRequestListener
from seriatim.embedded.broker import BrokerInfo
from seriatim.errors import PlatformError
from seriatim.kafka.sending import create_topics
from seriatim.kafka.snapshot_requests import KafkaSnapshotRequester
from seriatim.ledger.gaps import SnapshotRequest
from seriatim.memory import MemoryRequests

NOBODY = {"bootstrap.servers": "127.0.0.1:9"}


def request(session: str = "s", offset: int = 1) -> SnapshotRequest:
    """One request."""
    return SnapshotRequest(
        stream="o", topic="in", partition=0, session=session, reason="gap", offset=offset
    )


def test_requests_arrive_under_their_session(
    broker: BrokerInfo, topic_name: Callable[[], str]
) -> None:
    """Each as one small JSON message; the demo's reader hears those that come while it listens."""
    name, client = topic_name(), {"bootstrap.servers": broker.bootstrap_servers}
    create_topics(client, {name: 2})
    first = SnapshotRequestListener(client, name)
    KafkaSnapshotRequester(client, name).send([request("s"), request("t", 7)])
    consumer = Consumer({**client, "group.id": "look", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(name, number, 0) for number in range(2)])
    found = {message.key(): json.loads(message.value()) for message in consumer.consume(2, 20)}
    consumer.close()
    assert {key: (body["session"], body["offset"]) for key, body in found.items()} == {
        b"s": ("s", 1),
        b"t": ("t", 7),
    }
    assert sorted(first.wait_for_requests(2, 20)) == [("in", "s"), ("in", "t")]
    assert first() == []
    second = SnapshotRequestListener(client, name)
    producer = Producer(client)
    producer.produce(name, b"no request", b"s")
    producer.flush(20)
    KafkaSnapshotRequester(client, name).send([request("u")])
    assert (first.wait_for_requests(1, 20), second.wait_for_requests(1, 20)) == (
        [("in", "u")],
        [("in", "u")],
    )
    first.close()
    second.close()


def test_a_topic_that_is_not_there_is_named(
    broker: BrokerInfo, topic_name: Callable[[], str]
) -> None:
    """At once, with what to do."""
    name = topic_name()
    with pytest.raises(PlatformError, match=f"on topic {name}") as trouble:
        KafkaSnapshotRequester({"bootstrap.servers": broker.bootstrap_servers}, name).send(
            [request()]
        )
    assert f"topic {name} is there" in trouble.value.next
    with pytest.raises(PlatformError, match=f"there is no topic {name}"):
        SnapshotRequestListener({"bootstrap.servers": broker.bootstrap_servers}, name)


def test_a_broker_that_does_not_answer_is_platform_trouble() -> None:
    """Within the time given; as the fake does."""
    down = MemoryRequests()
    down.is_down = True
    for one in (
        down,
        KafkaSnapshotRequester(NOBODY, "asks", timeout_seconds=1),
    ):
        with pytest.raises(PlatformError, match="could not be asked for snapshots"):
            one.send([request()])
