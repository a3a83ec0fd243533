"""Ranges read in the task: every codec, transactions, times and nulls as a consumer sees them;
damage never passes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kafka.record.default_records import DefaultRecordBatchBuilder

from seriatim.engine.files import SourceFailedError
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.kafka import task_reader
from seriatim.kafka.past_messages import KafkaPastMessageReader
from seriatim.kafka.task_reader import KafkaRangeReader
from seriatim.kafka.wire import parse_raw_batches
from seriatim.ports import UnreadableMessageError
from tests.contracts.test_raw_batches import RealSide

WAIT_SECONDS = 180
P = Partition("t", 0)
Row = tuple[int, int, bytes | None, bytes | None]
UNPACKERS = {"plain": 10**9, "compiled": 0}
"""From how many messages on the compiled one is taken."""


@pytest.fixture(params=list(UNPACKERS))
def unpacker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either way to unpack."""
    monkeypatch.setattr(task_reader, "COMPILED_MIN", UNPACKERS[request.param])
    return str(request.param)


def rows(batches: Iterable[pa.RecordBatch]) -> list[Row]:
    """Offset, time in milliseconds, key and value of every message."""
    found: list[Row] = []
    for batch in batches:
        assert batch.schema.names[:6] == [
            "topic",
            "partition",
            "offset",
            "timestamp",
            "key",
            "value",
        ]
        times = [value // 1000 for value in batch.column("timestamp").cast(pa.int64()).to_pylist()]
        columns = [batch.column(name).to_pylist() for name in ("offset", "key", "value")]
        found += list(zip(columns[0], times, columns[1], columns[2], strict=True))
    return found


def consumed(
    servers: str, partition: Partition, whole: OffsetRange, isolation: str = "read_committed"
) -> list[Row]:
    """The same through librdkafka."""
    reread = KafkaPastMessageReader({"bootstrap.servers": servers}, isolation)
    found = [
        (stretch.start + i, int(stretch.timestamps[i]), stretch.keys[i], stretch.values[i])
        for stretch in reread.read(partition, whole)
        for i in range(len(stretch))
    ]
    reread.close()
    return found


def built(
    messages: list[Row], headers: list[list[tuple[str, bytes | None]]] | None = None
) -> bytes:
    """A batch as a producer makes it; offsets from 0 on, with holes as given."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1 << 30)
    for number, (offset, at_ms, key, value) in enumerate(messages):
        builder.append(offset, at_ms, key, value, headers[number] if headers else [])
    return bytes(builder.build())


def unpacked(content: bytes, whole: OffsetRange, *, headers: bool = False) -> list[pa.RecordBatch]:
    """Batches as they come out."""
    gathered = task_reader._BatchBuilder(P, whole, headers=headers)
    for raw in parse_raw_batches(memoryview(content)):
        content = gathered.decompressed_records(raw)
        assert gathered.has_capacity(raw.record_count, len(content))
        gathered.add_batch(raw, content)
    return [gathered.take_batch()] if gathered.row_count else []


def random_messages(chance: random.Random) -> list[Row]:
    offset, messages = 0, list[Row]()
    for _ in range(chance.randrange(1, 60)):
        texts = [
            None
            if chance.random() < 0.2
            else chance.randbytes(chance.choice([0, 1, 7, 8, 63, 64, 200, 9000]))
            for _ in range(2)
        ]
        messages.append(
            (offset, chance.choice([0, -1, 1, 2**40, 10**12]) + chance.randrange(1000), *texts)
        )
        offset += chance.choice([1, 1, 1, 5, 200])
    return messages


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.usefixtures("unpacker")
def test_any_batch_comes_out_as_it_went_in(seed: int) -> None:
    """Sizes, nulls, times before 1970, holes of compaction, and any range out of it."""
    chance = random.Random(seed)
    messages = random_messages(chance)
    content = built(messages)
    begin, end = sorted(chance.randrange(messages[-1][0] + 2) for _ in range(2))
    assert rows(unpacked(content, OffsetRange(0, messages[-1][0] + 1))) == messages
    assert rows(unpacked(content, OffsetRange(begin, end))) == [
        one for one in messages if begin <= one[0] < end
    ]


@pytest.mark.usefixtures("unpacker")
def test_headers_come_along_where_they_are_wanted() -> None:
    """None, several, with null and with no name."""
    given: list[list[tuple[str, bytes | None]]] = [
        [],
        [("h", b"x"), ("h", None)],
        [("", b"")],
        [("ü", b"\xff" * 200)],
    ]
    content = built([(offset, 5, b"k", b"v") for offset in range(4)], given)
    (batch,) = unpacked(content, OffsetRange(1, 4), headers=True)
    found = [
        [(one["key"], one["value"]) for one in row] for row in batch.column("headers").to_pylist()
    ]
    assert found == given[1:]


@pytest.mark.usefixtures("unpacker")
def test_a_damaged_batch_is_never_taken() -> None:
    """Whatever bit is flipped after the batch's length: it is refused by offset, or it was not of
    the contents.
    """
    messages = [(offset, 10**12, b"key", b"some value") for offset in range(20)]
    content = built(messages)
    chance = random.Random(1)
    for _ in range(200):
        bit = chance.randrange(task_reader.CHECKSUM_START * 8, len(content) * 8)
        hurt = bytearray(content)
        hurt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SourceFailedError, match="offsets"):
            unpacked(bytes(hurt), OffsetRange(0, 20))


@pytest.mark.usefixtures("unpacker")
def test_records_that_lie_about_their_sizes_are_refused() -> None:
    """A right checksum over nonsense: refused, and no byte is read or written where it should not
    be.
    """
    chance = random.Random(2)
    for _ in range(100):
        content = bytearray(built(random_messages(chance)))
        for _ in range(3):
            content[chance.randrange(61, len(content))] = chance.randrange(256)
        content[17:21] = task_reader.calc_crc32c(bytes(content[21:])).to_bytes(4, "big")
        try:
            found = unpacked(bytes(content), OffsetRange(0, 2**62))
        except (SourceFailedError, UnreadableMessageError):
            continue
        assert sum(batch.num_rows for batch in found) <= 60


def test_a_time_that_no_calendar_has_is_told_apart() -> None:
    """Nanoseconds in place of milliseconds: the log is asked which message it was, and it alone
    halts.
    """
    with pytest.raises(UnreadableMessageError):
        unpacked(built([(0, 1_700_000_000_000_000_000, b"k", b"v")]), OffsetRange(0, 1))


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.usefixtures("unpacker")
def test_every_codec_as_a_consumer_reads_it(
    codec: str, broker: Any, topic: Callable[..., str]
) -> None:
    """Several batches; whole ranges and ranges that begin and end within one."""
    name = topic(1)
    _produce(broker.bootstrap_servers, name, codec)
    partition, reader = (
        Partition(name, 0),
        KafkaRangeReader({"bootstrap.servers": broker.bootstrap_servers}),
    )
    for whole in (OffsetRange(0, 3000), OffsetRange(1234, 1250), OffsetRange(2999, 3000)):
        assert rows(reader(partition, whole)) == consumed(
            broker.bootstrap_servers, partition, whole
        )


def _produce(servers: str, topic: str, codec: str) -> None:
    settings = {
        "compression.type": codec,
        "linger.ms": 20,
        "batch.num.messages": 700,
        "log_level": 0,
    }
    producer = Producer({"bootstrap.servers": servers, **settings})
    for number in range(3000):
        key = None if number % 7 == 0 else f"k{number % 5}"
        value = None if number % 11 == 0 else b"%d " % number * (number % 50)
        producer.produce(topic, value, key, 0)
    assert producer.flush(WAIT_SECONDS) == 0


def test_batches_are_cut_by_messages_and_by_bytes(
    monkeypatch: pytest.MonkeyPatch, broker: Any, topic: Callable[..., str]
) -> None:
    """However they are cut, all messages are there, in order; small fetches give the same."""
    name = topic(1)
    _produce(broker.bootstrap_servers, name, "lz4")
    partition, reader = (
        Partition(name, 0),
        KafkaRangeReader({"bootstrap.servers": broker.bootstrap_servers}),
    )
    expected = consumed(broker.bootstrap_servers, partition, OffsetRange(0, 3000))
    for limits in (
        {"ROWS_PER_BATCH": 100},
        {"BATCH_BYTES": 1000},
        {"FETCH_BYTES": 100},
        {"ROWS_PER_BATCH": 1000, "BATCH_BYTES": 50_000},
    ):
        for name_of, value in limits.items():
            monkeypatch.setattr(task_reader, name_of, value)
        assert rows(reader(partition, OffsetRange(0, 3000))) == expected
        monkeypatch.undo()


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
@pytest.mark.usefixtures("unpacker")
def test_transactions_as_a_consumer_reads_them(
    isolation: str, broker: Any, topic_name: Any
) -> None:
    """Markers are never seen, aborted messages only by those who read uncommitted ones."""
    side, name = RealSide(broker.bootstrap_servers), topic_name()
    side.create(name)
    one, other = side.open(name), side.open(name)
    one.send(["a", "b"])
    other.send(["c"])
    side.send(name, ["d"])
    one.end(abort=True)
    other.send(["e"])
    other.end(abort=False)
    third = side.open(name)
    third.send(["f"])
    third.end(abort=True)
    last = side.send(name, ["g"])[-1]
    partition, whole = Partition(name, 0), OffsetRange(0, last + 1)
    found = rows(
        KafkaRangeReader({"bootstrap.servers": broker.bootstrap_servers}, isolation)(
            partition, whole
        )
    )
    assert found == consumed(broker.bootstrap_servers, partition, whole, isolation)
    assert len(found) == {"read_committed": 4, "read_uncommitted": 7}[isolation]


@pytest.mark.usefixtures("unpacker")
def test_the_broker_s_time_where_the_topic_says_so(broker: Any, topic_name: Any) -> None:
    """Under LogAppendTime all messages of a batch have the time of its arrival."""
    name, servers = topic_name(), broker.bootstrap_servers
    made = NewTopic(name, 1, 1, config={"message.timestamp.type": "LogAppendTime"})
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    admin.create_topics([made])[name].result(WAIT_SECONDS)
    _produce(servers, name, "zstd")
    partition, whole = Partition(name, 0), OffsetRange(0, 3000)
    found = rows(KafkaRangeReader({"bootstrap.servers": servers})(partition, whole))
    assert found == consumed(servers, partition, whole)
    assert len({at_ms for _, at_ms, _, _ in found}) < 3000


def test_what_is_not_in_the_log_is_not_waited_for(broker: Any, topic: Callable[..., str]) -> None:
    """An end past the log's, a start past it, a topic that is not there: each is refused, and says
    where.
    """
    # A reader that waited in vain would say that the topic "cannot be read": the other words prove that nobody waited.
    name = topic(1)
    _produce(broker.bootstrap_servers, name, "none")
    settings = {"bootstrap.servers": broker.bootstrap_servers}
    patient, impatient = (
        KafkaRangeReader(settings, retry_seconds_max=600),
        KafkaRangeReader(settings, retry_seconds_max=3),
    )
    for reader, partition, whole, said in (
        (patient, Partition(name, 0), OffsetRange(2990, 3010), "the log ends at 3000"),
        (patient, Partition(name, 0), OffsetRange(4000, 4010), "offset 4000 is not in the log"),
        (
            impatient,
            Partition(f"{name}-not-there", 0),
            OffsetRange(0, 1),
            "cannot be read from offset 0",
        ),
    ):
        with pytest.raises(SourceFailedError, match=said):
            list(reader(partition, whole))


def test_many_small_ranges_read_again_wait_for_nothing(
    broker: Any, topic: Callable[..., str]
) -> None:
    """Twenty ranges here and there are read; the fetch that each leaves open at the log's end is a
    short one.
    """
    # Kafka's client has one fetch at a time on its way to a broker, so the next range waits for an open one.
    name, other = topic(1), topic(1)
    for one in (name, other):
        _produce(broker.bootstrap_servers, one, "none")
    reread = KafkaPastMessageReader({"bootstrap.servers": broker.bootstrap_servers})
    assert reread._settings["fetch.wait.max.ms"] <= 10
    message_count = 0
    for number in range(20):
        whole = OffsetRange(2900 + number, 2905 + number)
        message_count += sum(
            len(stretch) for stretch in reread.read(Partition((name, other)[number % 2], 0), whole)
        )
    reread.close()
    assert message_count == 100
