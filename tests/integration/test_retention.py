"""The clock against a real broker that really drops: by time and by bytes, in seconds instead of
days.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from seriatim.embedded import broker as embedded
from seriatim.engine.offsets import Partition
from seriatim.engine.retention import TimeLeft, times_left
from seriatim.kafka.log import KafkaLog
from tests.integration.lab import silent

WHOLE_SECONDS = 14
SENT_EVERY_SECONDS = 0.1
MESSAGE_BYTES = 100_000
SEGMENT_SECONDS = 1
EARLY_SECONDS = 1.0
"""The messages' own times are rounded, and the broker rounds to whole segments."""
TOPICS = {
    "by-time": {
        "retention.ms": str(WHOLE_SECONDS * 1000),
        "segment.ms": str(SEGMENT_SECONDS * 1000),
    },
    "by-bytes": {
        "retention.bytes": str(round(WHOLE_SECONDS / SENT_EVERY_SECONDS * MESSAGE_BYTES)),
        "segment.bytes": str(1024 * 1024),
    },
}
WARM_UP = "warm-up"
"""Takes the first message, which is slow: afterwards the rate is constant."""


@pytest.fixture
def impatient(tmp_path: Path, broker_program: embedded.KafkaProgram) -> Iterator[str]:
    """A broker of its own that looks for expired segments all the time."""
    often = {"log.retention.check.interval.ms": "500", "log.initial.task.delay.ms": "500"}
    info = embedded.start_broker(
        tmp_path, overrides=often, program=broker_program, print_notice=silent
    )
    yield info.bootstrap_servers
    embedded.stop_broker(tmp_path, silent)


def test_the_figure_is_when_the_log_start_moves(impatient: str) -> None:
    """No figure since the stall is later than when Kafka really dropped the message; by time it is
    exact.
    """
    admin = AdminClient({"bootstrap.servers": impatient, "log_level": 0})
    made = [NewTopic(name, 1, 1, config=given) for name, given in {**TOPICS, WARM_UP: {}}.items()]
    for answer in admin.create_topics(made).values():
        answer.result(120)
    log = KafkaLog({"bootstrap.servers": impatient})
    producer = Producer({"bootstrap.servers": impatient, "linger.ms": 0, "log_level": 0})
    places = {
        Partition(name, 0): 20 for name in TOPICS
    }  # two seconds after the first message the stream stalls
    figures: dict[Partition, list[tuple[float, TimeLeft]]] = {place: [] for place in places}
    lost: dict[Partition, float] = {}
    _send(producer, [WARM_UP], time.time())
    with _producing(producer) as began:
        until = time.time() + 300
        time.sleep(4)
        while len(lost) < len(places) and time.time() < until:
            _look(log, places, figures, lost)
            time.sleep(0.3)
    for place, offset in places.items():
        limit = {"by-time": "retention.ms", "by-bytes": "retention.bytes"}[place.topic]
        told = [(at, left) for at, left in figures[place] if left.limit == limit]
        assert len(told) >= max(5, len(figures[place]) - 1), (
            place,
            figures[place],
        )  # a broker may not answer once
        # How late a busy broker drops is nobody's promise: only that it never drops before the figure says so.
        assert all(lost[place] >= at + left.seconds - EARLY_SECONDS for at, left in told), (
            place,
            told,
            lost[place],
        )
        if place.topic == "by-time":
            # What was sent every tenth of a second, by its own timetable, goes after the retention, whoever looks when.
            expected_loss = began + offset * SENT_EVERY_SECONDS + WHOLE_SECONDS
            off = [at + left.seconds - expected_loss for at, left in told]
            assert max(map(abs, off)) <= EARLY_SECONDS + SEGMENT_SECONDS, (off, told)


def _send(producer: Producer, topics: Iterable[str], at_seconds: float) -> None:
    for name in topics:
        producer.produce(name, bytes(MESSAGE_BYTES), b"k", 0, timestamp=round(at_seconds * 1000))
    producer.flush(120)


@contextmanager
def _producing(producer: Producer) -> Iterator[float]:
    """A producer at a constant rate beside us, by its own timetable; gives the time of its first
    message.
    """
    over, began = threading.Event(), time.time()

    def produce() -> None:
        at_seconds = began
        while not over.wait(max(0.0, at_seconds - time.time())):
            _send(producer, TOPICS, at_seconds)
            at_seconds += SENT_EVERY_SECONDS

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield began
    finally:
        over.set()
        thread.join()


def _look(
    log: KafkaLog,
    places: dict[Partition, int],
    figures: dict[Partition, list[tuple[float, TimeLeft]]],
    lost: dict[Partition, float],
) -> None:
    """Note the figure of each partition, or that its message is gone. What goes while we ask gives
    no figure.
    """
    held, now = log.read_retention(log.bounds("by-.*"), places), time.time()
    bounds = log.bounds("by-.*")
    for place in [place for place in places if place not in lost]:
        if bounds[place].log_start > places[place]:
            lost[place] = time.time()
        else:
            figures[place].append((now, times_left(held[place], now, MESSAGE_BYTES)[0]))
