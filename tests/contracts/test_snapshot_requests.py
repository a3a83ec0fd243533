"""The contract of requests, on a real topic and in memory; and a demo producer that answers them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from seriatim.demo.producer import SnapshotRequestListener
from seriatim.embedded.broker import BrokerInfo
from seriatim.errors import ConfigError, PlatformError
from seriatim.kafka.sending import create_topics
from seriatim.kafka.snapshot_requests import KafkaSnapshotRequester, encode_signals
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


def row_request(
    session: str, topic: str = "shop.public.orders", offset: int = 1
) -> SnapshotRequest:
    """A request for a row of a table from Debezium."""
    return SnapshotRequest(
        stream="o", topic=topic, partition=2, session=session, reason="precondition", offset=offset
    )


def signals_of(
    *requests: SnapshotRequest, columns: dict[str, str] | None = None
) -> list[tuple[str, dict[str, Any]]]:
    """The key and the data of each signal."""
    signals = []
    for key, value in encode_signals(requests, columns or {}):
        signal = json.loads(value)
        assert signal["type"] == "execute-snapshot"
        assert signal["data"]["type"] == "incremental"
        signals.append((key.decode(), signal["data"]))
    return signals


def test_a_signal_names_the_rows_of_each_table() -> None:
    """Under the prefix of the connector, whose name may have dots."""
    signals = signals_of(
        row_request('{"id":7}'),
        row_request('{"schema":{},"payload":{"id":9}}'),
        row_request('{"id":7}'),
        row_request('{"country":"D 1","street":3}', "a.b.eu.places"),
    )
    assert signals == [
        (
            "shop",
            {
                "data-collections": ["public.orders"],
                "type": "incremental",
                "additional-conditions": [
                    {"data-collection": "public.orders", "filter": "(id = 7 or id = 9)"}
                ],
            },
        ),
        (
            "a.b",
            {
                "data-collections": ["eu.places"],
                "type": "incremental",
                "additional-conditions": [
                    {
                        "data-collection": "eu.places",
                        "filter": "((country = 'D 1' and street = 3))",
                    }
                ],
            },
        ),
    ]
    ((_, value),) = encode_signals([row_request('{"id":7}', offset=41)], {})
    assert json.loads(value)["id"] == "seriatim-o-2-41"


@pytest.mark.parametrize(
    "session",
    [
        '{"id":"x\' or 1=1 --"}',
        '{"id":"x\\\\"}',
        '{"id":1.5}',
        '{"id":true}',
        '{"id":null}',
        '{"Id":1}',
        '{"user":1}',
        '{"order":1}',
        '{"key":"a"}',
        '{"id; drop table orders":1}',
        '{"id":"\u2019"}',
        "no JSON",
        "7",
        "{}",
    ],
)
def test_what_is_no_plain_key_is_in_no_sql(session: str) -> None:
    """Then the whole table is read."""
    ((_, data),) = signals_of(row_request('{"id":7}'), row_request(session))
    assert data == {"data-collections": ["public.orders"], "type": "incremental"}


@pytest.mark.parametrize(
    ("key", "type_name"),
    [
        ('{"day":20611}', "date"),
        ('{"day":1780000000000000}', "timestamp"),
        ('{"amount":"MDkA"}', "decimal(9,2)"),
        ('{"raw":"MDkA"}', "binary"),
    ],
)
def test_a_value_that_the_key_encodes_is_in_no_sql(key: str, type_name: str) -> None:
    """A date is the number of its days there, a decimal its bytes. By the type in the stream file, or
    by the schema of the key.
    """
    (name,) = json.loads(key)
    ((_, data),) = signals_of(row_request(key), columns={name: type_name})
    assert "additional-conditions" not in data


@pytest.mark.parametrize(
    ("field", "condition"),
    [
        ({"type": "int32", "name": "io.debezium.time.Date"}, ""),
        ({"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal"}, ""),
        ({"type": "bytes"}, ""),
        ({"type": "string", "name": "io.debezium.data.Uuid"}, "(k = 'a')"),
        ({"type": "string"}, "(k = 'a')"),
    ],
)
def test_the_schema_of_a_key_says_what_its_value_is(field: dict[str, str], condition: str) -> None:
    """A UUID is a text for every database."""
    schema = {"type": "struct", "fields": [{**field, "field": "k"}]}
    session = json.dumps({"schema": schema, "payload": {"k": "a"}})
    ((_, data),) = signals_of(row_request(session))
    (conditions,) = data.get("additional-conditions", [{"filter": ""}])
    assert conditions["filter"] == condition


def test_many_rows_are_a_whole_table() -> None:
    """A hundred are named."""
    requests = [row_request(f'{{"id":{number}}}') for number in range(101)]
    ((_, few),) = signals_of(*requests[:100])
    ((_, many),) = signals_of(*requests)
    assert "id = 99)" in few["additional-conditions"][0]["filter"]
    assert "additional-conditions" not in many


@pytest.mark.parametrize("topic", ["orders", "shop.orders", "shop..orders", ".public.orders"])
def test_a_topic_without_prefix_and_schema_is_refused(topic: str) -> None:
    """No signal could name its table."""
    with pytest.raises(ConfigError, match=r"PREFIX\.SCHEMA\.TABLE"):
        encode_signals([row_request('{"id":7}', topic)], {})


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
