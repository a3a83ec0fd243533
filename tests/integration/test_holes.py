"""Holes on a real broker: transactions, compaction and markers raise no alarm, dropped messages
always do.

A topic is written by transactional producers that abort every third transaction, or compacted until
the cleaner really came by. What is missing is known from the producers' own receipts. The same
offsets, dropped between Kafka and the fold on a plain topic, must each be found.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from confluent_kafka import Message, Producer

from seriatim import context, stream_files
from seriatim.config import Settings
from seriatim.engine.findings import GapMark
from seriatim.engine.offsets import OffsetRange, Partition, Ranges
from seriatim.kafka.spark_reader import SparkSource, TaskSource
from seriatim.operations.run import FoldRun, RunOutcome
from seriatim.ports import DEFAULT_READ_OPTIONS, OnSlice, ReadOptions, Source
from tests.contracts.test_raw_batches import COMPACTED, RealSide
from tests.integration.lab import Lab, fold_messages, silent
from tests.integration.test_slices import snapshot, update

WAIT_SECONDS = 180
Topic = Callable[..., str]


class Transactions:
    """A transactional producer, and what became of everything it sent."""

    def __init__(self, servers: str, topic: str) -> None:
        self.topic = topic
        self.producer = Producer(
            {
                "bootstrap.servers": servers,
                "transactional.id": uuid.uuid4().hex,
                "linger.ms": 1,
                "log_level": 0,
            }
        )
        self.producer.init_transactions(WAIT_SECONDS)
        self.good: dict[int, tuple[str, bytes]] = {}
        self.void: set[int] = set()
        self.markers = 0

    def transact(self, messages: list[tuple[str, dict[str, Any]]], *, abort: bool = False) -> None:
        """One transaction from begin to end."""
        self.begin(messages)
        self.end(abort=abort)

    def begin(self, messages: list[tuple[str, dict[str, Any]]]) -> None:
        """Begin one and send its messages."""
        self.sent: list[int] = []
        self.open = [(key, json.dumps(value).encode()) for key, value in messages]
        self.producer.begin_transaction()
        for key, value in self.open:
            self.producer.produce(self.topic, value, key, 0, on_delivery=self._told)
        assert self.producer.flush(WAIT_SECONDS) == 0

    def end(self, *, abort: bool = False) -> None:
        """Commit or abort it."""
        (self.producer.abort_transaction if abort else self.producer.commit_transaction)(
            WAIT_SECONDS
        )
        self.markers += 1
        if abort:
            self.void |= set(self.sent)
        else:
            self.good |= zip(self.sent, self.open, strict=True)

    def _told(self, error: Any, message: Message) -> None:
        assert error is None, error
        self.sent.append(message.offset())


def written(lab: Lab, topic: str, messages: int, each: int) -> Transactions:
    """So many messages in transactions of `each`, every third aborted and sent again by the next."""
    made, number, sequence = Transactions(lab.servers, topic), 0, 1
    made.transact([("s", snapshot(1, ("a", 0.0, 0)))])
    while len(made.good) + len(made.void) < messages:
        number += 1
        batch = [
            ("s", update(sequence + i, "a", float(number * each + i))) for i in range(1, each + 1)
        ]
        abort = number % 3 == 0
        made.transact(batch, abort=abort)
        sequence += 0 if abort else each
    return made


def counts(lab: Lab, stream: str, topic: str) -> dict[str, int]:
    """Holes by cause, as the ledger has them."""
    return lab.ledger(stream).partitions[f"{topic}/0"].counts


def status_counts(lab: Lab, stream: str, topic: str) -> dict[str, int]:
    """The same, as `seriatim status --json` tells them."""
    done = lab.command("status", stream, "--json")
    assert done.returncode == 0, done.stderr
    (told,) = [one for one in json.loads(done.stdout)["partitions"] if one["topic"] == topic]
    found: dict[str, int] = told["counts"]
    return found


def marks(lab: Lab, stream: str) -> list[GapMark]:
    """Every stretch that the ledger says not to trust."""
    entries = [
        lab.manifest(stream, number).entry for number in range(lab.ledger(stream).sequence + 1)
    ]
    return [mark for entry in entries for change in entry.changes for mark in change.marks]


@pytest.fixture
def size(full: bool) -> int:
    """How many messages: the whole number with --full."""
    return 100_000 if full else 2_000


def test_transactions_raise_no_alarm(lab: Lab, topic: Topic, size: int) -> None:
    """Every third aborted: 0 findings, markers and aborted messages counted right, the rest folded
    exactly.
    """
    name = topic(1)
    truth = written(lab, name, size, max(20, size // 2000))
    end = len(truth.good) + len(truth.void) + truth.markers
    stream = lab.stream("transactional", name)

    outcome = lab.fold(stream, size // 2)

    assert outcome.findings == []
    assert outcome.messages == len(truth.good)
    assert counts(lab, stream, name) == {
        "hole: aborted": len(truth.void),
        "hole: marker": truth.markers,
    }
    assert lab.ledger(stream).partitions[f"{name}/0"].frontier == end
    assert [record["offset"] for record in lab.records(stream)] == sorted(truth.good)
    folded = fold_messages(
        (0, offset, key.encode(), value) for offset, (key, value) in sorted(truth.good.items())
    )
    assert {row["id"]: row for row in lab.sessions(stream)[name, "s"]["state"]["rows"]} == folded[
        "s"
    ]
    assert marks(lab, stream) == []

    lab.stream("uncommitted", name, tier="none", sequence=None, isolation="read_uncommitted")
    again = lab.fold("uncommitted", size // 2)

    assert again.findings == []
    assert again.messages == len(truth.good) + len(truth.void)
    assert counts(lab, "uncommitted", name) == {"hole: marker": truth.markers}
    assert status_counts(lab, stream, name) == counts(lab, stream, name)


def test_a_range_of_markers_only(lab: Lab, topic: Topic) -> None:
    """Markers at the tail, then a slice that is nothing else: no message comes, and none is
    missing.
    """
    name = topic(1)
    first, void, second = (Transactions(lab.servers, name) for _ in range(3))
    first.begin([("s", snapshot(1, ("a", 0.0, 0)))])
    void.begin([("s", update(2, "a", 9.0))])
    second.begin([("t", snapshot(1, ("a", 0.0, 0)))])
    first.end()
    void.end(abort=True)
    second.end()
    lab.stream("committed", name)
    lab.stream("uncommitted", name, tier="none", sequence=None, isolation="read_uncommitted")
    for stream, there in (("committed", [0, 2]), ("uncommitted", [0, 1, 2])):
        assert lab.fold(stream, until={f"{name}/0": 3}).findings == []
        outcome = lab.fold(stream, until={f"{name}/0": 5})
        assert (outcome.findings, outcome.messages, outcome.slices) == ([], 0, 1)
        outcome = lab.fold(stream)
        assert (outcome.findings, outcome.messages, outcome.slices) == ([], 0, 1)
        aborted = {"hole: aborted": 1} if stream == "committed" else {}
        assert counts(lab, stream, name) == {**aborted, "hole: marker": 3}
        assert lab.ledger(stream).partitions[f"{name}/0"].frontier == 6
        assert [record["offset"] for record in lab.records(stream)] == there


def test_a_compacted_topic_raises_no_alarm(lab: Lab, topic: Topic, size: int) -> None:
    """After the cleaner came by: what it took away is counted, what is left is folded."""
    name = topic(1, {**COMPACTED, "segment.ms": "1000"})
    keys = [f"s{number * 7919 % 97}" for number in range(size)]
    lab.send(
        (name, 0, key, snapshot(number + 1, ("a", float(number), 0)))
        for number, key in enumerate(keys)
    )
    side = RealSide(lab.servers)
    side.newest[name] = {key: offset for offset, key in enumerate(keys)}
    side.compact_all([name], wait_seconds=1.2, value=json.dumps(snapshot(1)).encode())
    left = side.readable(name)
    assert len(left) < size / 2

    outcome = lab.fold(lab.stream("compacted", name), size // 3)

    assert outcome.findings == []
    assert outcome.messages == len(left)
    assert counts(lab, "compacted", name) == {"hole: compacted": size + 1 - len(left)}
    lab.stream("uncommitted", name, isolation="read_uncommitted")
    assert lab.fold("uncommitted").findings == []
    assert counts(lab, "uncommitted", name) == {"hole: compacted": size + 1 - len(left)}


class Dropping(context.LazySpark):
    """A reader that loses messages on the way from Kafka to the fold."""

    def __init__(self, file: stream_files.StreamFile, settings: Settings, lost: set[int]) -> None:
        super().__init__(file, settings, silent)
        self.lost = lost

    def read_slices(
        self,
        starts: Mapping[Partition, int],
        messages_max: int,
        on_slice: OnSlice,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        super().read_slices(
            starts,
            messages_max,
            lambda ranges, source: on_slice(ranges, self._without(source)),
            options,
        )

    def read_ranges(self, ranges: Ranges, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Source:
        return self._without(super().read_ranges(ranges, options))

    def _without(self, source: Source) -> Source:
        if isinstance(source, TaskSource):
            read, lost = source.read_range, list(self.lost)

            def losing(
                partition: Partition, whole: OffsetRange, headers: bool
            ) -> Iterator[pa.RecordBatch]:
                for batch in read(partition, whole, headers):
                    yield batch.filter(pc.invert(pc.is_in(batch["offset"], pa.array(lost))))

            source.read_range = losing
            return source
        assert isinstance(source, SparkSource)
        return SparkSource(
            source.frame.where(~source.frame["offset"].isin(*self.lost)), source.options
        )


def fold_dropping(lab: Lab, name: str, lost: set[int], messages_max: int) -> RunOutcome:
    """Run a stream through a reader that drops these offsets."""
    file = stream_files.load_stream(name, lab.settings.streams)
    open_stream = context.open_for_fold(file, lab.settings, silent)
    open_stream.spark = Dropping(file, lab.settings, lost)
    open_stream.spark.spark = lab.spark()
    return FoldRun(open_stream).run(messages_max)


def test_the_same_holes_by_dropping_are_each_found(lab: Lab, topic: Topic, full: bool) -> None:
    """On a plain topic every dropped stretch is a gap with its exact [a, b): inside, at the tail,
    and whole slices.
    """
    size, name = 20_000 if full else 1_200, topic(1)
    lab.send([(name, 0, "s", snapshot(1, ("a", 0.0, 0)))])
    lab.send((name, 0, "s", update(number + 1, "a", float(number))) for number in range(1, size))
    aborted = {
        offset
        for start in range(21, size - 1, 63)
        for offset in range(start, min(start + 21, size))
    }
    lost = (
        aborted
        | set(range(0, size - 1, 21)) - {0}
        | set(range(size // 2, size // 2 + 250))
        | {size - 1}
    )
    stretches: list[OffsetRange] = []
    for offset in sorted(lost):
        one = OffsetRange(offset, offset + 1)
        follows = bool(stretches) and stretches[-1].end == offset
        stretches.append(stretches.pop().joined_with(one) if follows else one)
    assert any(len(one) > 200 for one in stretches)

    lab.stream("counted", name, tier="none", sequence=None)
    outcome = fold_dropping(lab, "counted", lost, 200)

    assert (outcome.findings, outcome.messages) == ([], size - len(lost))
    assert counts(lab, "counted", name)["hole: unexplained"] == len(lost)
    told = [(mark.finding, mark.session, mark.offset, mark.until) for mark in marks(lab, "counted")]
    assert all(mark[:2] == ("gap", None) for mark in told)
    assert joined([mark[2:] for mark in told]) == [(one.start, one.end) for one in stretches]

    lab.stream("strict", name)
    outcome = fold_dropping(lab, "strict", lost, size)
    (finding,) = outcome.findings
    assert (finding.finding, finding.offset) == ("gap", stretches[0].start)
    assert str(stretches[0]) in finding.cause
    assert lab.ledger("strict").partitions[f"{name}/0"].frontier == stretches[0].start


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stretches that slices cut in two, as one."""
    whole: list[tuple[int, int]] = []
    for start, end in ranges:
        if whole and whole[-1][1] == start:
            whole[-1] = whole[-1][0], end
        else:
            whole.append((start, end))
    return whole


def test_a_dropped_message_between_markers_is_found(lab: Lab, topic: Topic) -> None:
    """Holes that are explained do not hide one that is not, right beside them."""
    name = topic(1)
    truth = written(lab, name, 200, 10)
    victim = sorted(truth.good)[50]
    while victim + 1 in truth.good:
        victim += 1

    lab.stream("strict", name)
    (finding,) = fold_dropping(lab, "strict", {victim}, 1000).findings

    assert (finding.finding, finding.offset) == ("gap", victim)
    assert f"[{victim}, {victim + 1})" in finding.cause
