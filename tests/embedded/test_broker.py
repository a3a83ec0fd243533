"""The embedded broker: real processes, killed for real."""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import Consumer, Producer, TopicPartition

from seriatim.embedded.broker import BrokerInfo


def test_what_is_produced_can_be_consumed(broker: BrokerInfo, topic: Callable[..., str]) -> None:
    """The broker of the test run takes messages and gives them back in order."""
    name = topic(partitions=2)
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for number in range(100):
        producer.produce(name, value=str(number).encode(), partition=1)
    producer.flush()
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": name})
    consumer.assign([TopicPartition(name, 1, 0)])
    values = [message.value() for message in consumer.consume(100, timeout=30)]
    consumer.close()
    assert values == [str(number).encode() for number in range(100)]
