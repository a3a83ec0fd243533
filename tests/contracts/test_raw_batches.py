"""The contract of `Explain`: why offsets are missing, the same in memory and from a real broker's
batches.
"""

from __future__ import annotations

import gc
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from seriatim.engine.files import Explain
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import PlatformError
from seriatim.kafka import raw_batches, wire
from seriatim.kafka.raw_batches import KafkaHoleExplainer
from seriatim.memory import MemoryBatches, MemoryKafka

SET = AlterConfigOpType.SET
WAIT_SECONDS = 180
COMPACTED = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.001",
    "min.compaction.lag.ms": "0",
    "segment.ms": "50",
    "delete.retention.ms": "86400000",
}


class MemorySide:
    """The fake's log, and ways to write to it."""

    def __init__(self) -> None:
        self.kafka = MemoryKafka()

    def create(self, topic: str, *, compacted: bool = False) -> None:
        self.kafka.create(topic, compacted=compacted)

    def send(self, topic: str, keys: Iterable[str]) -> list[int]:
        return [self.kafka.produce(topic, key, b"v", partition=0)[1] for key in keys]

    def open(self, topic: str) -> MemoryTransaction:
        return MemoryTransaction(self, topic)

    def compact(self, topic: str) -> None:
        (last,) = self.send(topic, ["the active segment"])
        self.kafka.compact(Partition(topic, 0), last)

    def delete_records(self, topic: str, before: int) -> None:
        self.kafka.delete_records(Partition(topic, 0), before)

    def explain(self, isolation: str) -> Explain:
        return MemoryBatches(self.kafka, isolation)


class MemoryTransaction:
    """A transaction of the fake's."""

    def __init__(self, side: MemorySide, topic: str) -> None:
        self.side, self.topic, self.offsets = side, topic, list[int]()

    def send(self, keys: Iterable[str]) -> list[int]:
        sent = self.side.send(self.topic, keys)
        self.offsets += sent
        return sent

    def end(self, *, abort: bool) -> int:
        return self.side.kafka.end_transaction(Partition(self.topic, 0), self.offsets, abort=abort)


class RealSide:
    """A broker, and the same ways to write to it."""

    def __init__(self, servers: str) -> None:
        self.client = {"bootstrap.servers": servers, "log_level": 0}
        self.admin = AdminClient(self.client)
        self.codec = "none"
        self.newest: dict[str, dict[str, int]] = {}

    def create(self, topic: str, *, compacted: bool = False) -> None:
        made = NewTopic(topic, 1, 1, config=COMPACTED if compacted else {})
        self.admin.create_topics([made])[topic].result(WAIT_SECONDS)

    def send(self, topic: str, keys: Iterable[str], value: bytes = b"v") -> list[int]:
        producer = Producer({**self.client, "compression.type": self.codec, "linger.ms": 50})
        return self.sent(producer, topic, keys, value)

    def sent(
        self, producer: Producer, topic: str, keys: Iterable[str], value: bytes = b"v"
    ) -> list[int]:
        """Send and wait; the offsets."""
        offsets: list[int] = []

        def told(error: Any, message: Message) -> None:
            assert error is None, error
            offsets.append(message.offset())

        for key in keys:
            producer.produce(topic, value, key, 0, on_delivery=told)
        assert producer.flush(WAIT_SECONDS) == 0
        self.newest.setdefault(topic, {}).update(zip(keys, offsets, strict=True))
        return offsets

    def open(self, topic: str) -> RealTransaction:
        return RealTransaction(self, topic)

    def compact(self, topic: str) -> None:
        """Roll the segment, and wait until only the newest of every key is there before it."""
        self.compact_all([topic])

    def compact_all(
        self, topics: Sequence[str], wait_seconds: float = 0.1, value: bytes = b"v"
    ) -> None:
        resource = ConfigResource(ResourceType.BROKER, "1")
        resource.add_incremental_config(
            ConfigEntry("log.cleaner.backoff.ms", "100", incremental_operation=SET)
        )
        for answer in self.admin.incremental_alter_configs([resource]).values():
            answer.result(WAIT_SECONDS)
        time.sleep(wait_seconds)
        for topic in topics:
            self.send(topic, ["the active segment"], value)
        until = time.monotonic() + WAIT_SECONDS
        while any(not set(self.readable(t)) <= set(self.newest[t].values()) for t in topics):
            assert time.monotonic() < until, "compaction did not come"
            time.sleep(0.2)

    def readable(self, topic: str) -> list[int]:
        """The offsets that a consumer gets."""
        consumer = Consumer(
            {**self.client, "group.id": uuid.uuid4().hex, "auto.offset.reset": "earliest"}
        )
        place = TopicPartition(topic, 0)
        end, found = consumer.get_watermark_offsets(place, timeout=WAIT_SECONDS)[1], list[int]()
        consumer.assign([TopicPartition(topic, 0, 0)])
        until = time.monotonic() + WAIT_SECONDS
        while (not found or found[-1] < end - 1) and time.monotonic() < until:
            found += [message.offset() for message in consumer.consume(1000, 0.2)]
        consumer.close()
        return found

    def delete_records(self, topic: str, before: int) -> None:
        for answer in self.admin.delete_records([TopicPartition(topic, 0, before)]).values():
            answer.result(WAIT_SECONDS)

    def explain(self, isolation: str) -> Explain:
        return KafkaHoleExplainer(self.client, isolation)


class RealTransaction:
    """A transaction of a producer of its own."""

    def __init__(self, side: RealSide, topic: str) -> None:
        self.side, self.topic = side, topic
        self.producer = Producer(
            {**side.client, "transactional.id": uuid.uuid4().hex, "linger.ms": 50}
        )
        self.producer.init_transactions(WAIT_SECONDS)
        self.begin()

    def begin(self) -> None:
        """The next one of the same producer."""
        self.producer.begin_transaction()

    def send(self, keys: Iterable[str]) -> list[int]:
        return self.side.sent(self.producer, self.topic, keys)

    def end(self, *, abort: bool) -> int:
        before = self._log_end()
        (self.producer.abort_transaction if abort else self.producer.commit_transaction)(
            WAIT_SECONDS
        )
        until = time.monotonic() + WAIT_SECONDS
        while self._log_end() == before and time.monotonic() < until:
            time.sleep(0.01)
        return before

    def _log_end(self) -> int:
        consumer = Consumer(
            {**self.side.client, "group.id": "x", "isolation.level": "read_uncommitted"}
        )
        end: int = consumer.get_watermark_offsets(
            TopicPartition(self.topic, 0), timeout=WAIT_SECONDS
        )[1]
        consumer.close()
        return end


Side = MemorySide | RealSide


@pytest.fixture(params=["memory", "real"])
def side(request: pytest.FixtureRequest) -> Side:
    """A log of either kind."""
    if request.param == "memory":
        return MemorySide()
    return RealSide(request.getfixturevalue("broker").bootstrap_servers)


@pytest.fixture
def real(request: pytest.FixtureRequest) -> RealSide:
    """The real kind alone."""
    return RealSide(request.getfixturevalue("broker").bootstrap_servers)


def causes(explain: Explain, topic: str, start: int, end: int) -> str:
    """What is said of each offset, a letter each: Marker, Aborted, Compacted, Expired, Unexplained."""
    pieces = explain(Partition(topic, 0), OffsetRange(start, end))
    assert [offset for whole, _ in pieces for offset in range(whole.start, whole.end)] == list(
        range(start, end)
    )
    return "".join(cause[0].upper() * len(whole) for whole, cause in pieces)


def test_markers_and_aborted_records_are_told_from_messages(side: Side, name: str) -> None:
    """Committed, aborted and plain messages, in whatever order, with markers between and at the
    tail.
    """
    side.create(name)
    side.send(name, "ab")
    for abort in (False, True):
        transaction = side.open(name)
        transaction.send("abc")
        transaction.end(abort=abort)
    side.send(name, "c")
    last = side.open(name)
    last.send("d")
    last.end(abort=True)
    assert (
        causes(side.explain("read_committed"), name, 0, 13) == "UU" + "UUUM" + "AAAM" + "U" + "AM"
    )
    assert (
        causes(side.explain("read_uncommitted"), name, 0, 13) == "UU" + "UUUM" + "UUUM" + "U" + "UM"
    )


def test_transactions_may_interleave(side: Side, name: str) -> None:
    """Each message belongs to its own producer's, and the marker may come long after the hole."""
    side.create(name)
    void, good = side.open(name), side.open(name)
    void.send("ab")
    good.send("ab")
    void.send("c")
    good.end(abort=False)
    side.send(name, "xy")
    void.end(abort=True)
    explain = side.explain("read_committed")
    assert causes(explain, name, 0, 9) == "AAUUAMUUM"
    assert causes(side.explain("read_committed"), name, 1, 5) == "AUUA"
    assert causes(side.explain("read_committed"), name, 4, 6) == "AM"


def test_what_compaction_took_is_told_from_what_a_reader_dropped(side: Side, name: str) -> None:
    """Older messages of a key are compacted away; the newest is there and should have been read."""
    side.create(name, compacted=True)
    side.send(name, "abcabc")
    side.send(name, "aad")
    side.compact(name)
    for isolation in ("read_committed", "read_uncommitted"):
        assert causes(side.explain(isolation), name, 0, 10) == "CCCC" + "UUC" + "UU" + "U"
    assert causes(side.explain("read_committed"), name, 1, 4) == "CCC"


def test_markers_stay_markers_in_a_compacted_log(side: Side, name: str) -> None:
    """Aborted messages are compacted away or still there, but are never a loss."""
    side.create(name, compacted=True)
    for abort in (True, False):
        transaction = side.open(name)
        transaction.send("ab")
        transaction.end(abort=abort)
    side.compact(name)
    told = causes(side.explain("read_committed"), name, 0, 6)
    assert told in ("CCMUUM", "AAMUUM")


def test_what_is_below_the_log_start_has_expired(side: Side, name: str) -> None:
    """Whatever it was; what comes after it can still be told."""
    side.create(name)
    transaction = side.open(name)
    transaction.send("abc")
    transaction.end(abort=True)
    side.delete_records(name, 2)
    assert causes(side.explain("read_committed"), name, 0, 4) == "EEAM"
    assert causes(side.explain("read_committed"), name, 0, 2) == "EE"


def test_nothing_beyond_the_log_end_is_explained(side: Side, name: str) -> None:
    """There is nothing that could say why."""
    side.create(name)
    side.open(name)
    transaction = side.open(name)
    transaction.send("a")
    transaction.end(abort=False)
    assert causes(side.explain("read_committed"), name, 1, 4) == "MUU"
    assert causes(side.explain("read_committed"), name, 7, 9) == "UU"


def test_nothing_beyond_the_stable_offset_is_explained(real: RealSide, name: str) -> None:
    """A transaction that is open may still be committed: its messages are not void, nor what
    follows them.
    """
    real.create(name)
    ended, still_open = real.open(name), real.open(name)
    ended.send("a")
    still_open.send("ab")
    ended.end(abort=True)
    assert causes(real.explain("read_committed"), name, 0, 4) == "AUUU"
    still_open.end(abort=True)
    assert causes(real.explain("read_committed"), name, 0, 5) == "AAAMM"


def test_many_holes_cost_few_looks(real: RealSide, name: str) -> None:
    """A marker after every third message: what lies ahead is read with the first hole and
    remembered.
    """
    real.create(name)
    transaction = real.open(name)
    for number in range(100):
        if number:
            transaction.begin()
        transaction.send("abc")
        (
            transaction.producer.abort_transaction
            if number % 3 == 2
            else transaction.producer.commit_transaction
        )(30)
    explain = KafkaHoleExplainer(real.client)
    told = ""
    for number in range(100):
        hole = (4 * number, 4 * number + 4) if number % 3 == 2 else (4 * number + 3, 4 * number + 4)
        told += causes(explain, name, *hole)
    assert told == "MMAAAM" * 33 + "M"
    assert explain.log_reads == 1


def test_a_region_larger_than_one_fetch_is_read_through(
    real: RealSide, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetches that end anywhere, in the middle of transactions too, give the same answer as one."""
    real.create(name)
    transaction = real.open(name)
    for number in range(30):
        if number:
            transaction.begin()
        transaction.send("a")
        transaction.send("b")
        (
            transaction.producer.abort_transaction
            if number % 2
            else transaction.producer.commit_transaction
        )(30)
    monkeypatch.setattr(raw_batches, "FETCH_BYTES", 300)
    assert causes(real.explain("read_committed"), name, 0, 90) == "UUMAAM" * 15


def test_every_codec_is_understood(real: RealSide, name: str) -> None:
    """Where compaction left a part of a batch, its records are looked at, however they are
    compressed.
    """
    topics = {codec: f"{name}-{codec}" for codec in ("none", "gzip", "snappy", "lz4", "zstd")}
    for codec, topic in topics.items():
        real.create(topic, compacted=True)
        real.codec = codec
        real.send(topic, [f"k{number % 7}" for number in range(40)])
    real.compact_all(list(topics.values()))
    told = {
        codec: causes(real.explain("read_committed"), topic, 0, 41)
        for codec, topic in topics.items()
    }
    assert told == dict.fromkeys(topics, "C" * 33 + "U" * 7 + "U")


def test_what_was_compacted_after_the_look_is_no_loss(real: RealSide, name: str) -> None:
    """A record seen ahead may be gone when the reader comes by: the log is asked again before it is
    called lost.
    """
    real.create(name, compacted=True)
    real.send(name, "abcabc")
    explain = KafkaHoleExplainer(real.client)
    assert causes(explain, name, 0, 1) == "U"
    real.compact(name)
    assert causes(explain, name, 0, 3) == "CCC"
    assert explain.log_reads == 2


@pytest.mark.filterwarnings(
    "ignore:unclosed <socket:ResourceWarning"
)  # kafka-python forgets those that fail
def test_a_broker_that_does_not_answer_is_platform_trouble() -> None:
    """A hole that nobody can explain now is not called a gap: the run fails, and is run again."""
    explain = KafkaHoleExplainer({"bootstrap.servers": "127.0.0.1:1"}, retry_seconds_max=0.3)
    with pytest.raises(PlatformError, match=r"t/0: offsets are missing.*127\.0\.0\.1:1") as caught:
        explain(Partition("t", 0), OffsetRange(0, 1))
    assert "run again" in caught.value.next
    del caught
    gc.collect()


def test_snappy_of_java_and_of_others() -> None:
    """Java writes a chain of blocks under a header, others one block."""
    import pyarrow as pa

    codec, first, second = pa.Codec("snappy"), b"a" * 300, b"b" * 10
    plain = codec.compress(first, asbytes=True)
    blocks = [codec.compress(part, asbytes=True) for part in (first, second)]
    framed = b"\x82SNAPPY\x00" + bytes(8) + b"".join(len(b).to_bytes(4, "big") + b for b in blocks)
    assert bytes(wire.decompress(memoryview(plain), 2)) == first
    assert bytes(wire.decompress(memoryview(framed), 2)) == first + second
