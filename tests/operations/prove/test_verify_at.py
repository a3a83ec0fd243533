"""`verify --at` and `--kafka` over real files and a broker in memory: where raw, Kafka and output
part.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ConfigError
from seriatim.kafka.past_messages import read_capture
from seriatim.memory import MemoryDigests, MemoryKafka
from seriatim.operations.prove import verify_at
from seriatim.operations.prove.verify import KafkaComparison, Verification, VerifyResult
from seriatim.operations.prove.verify_at import ValidationResult
from seriatim.storage.audit import FileAudit
from seriatim.storage.store import LocalStore
from seriatim.stream import DebeziumSettings, TableSettings
from tests.contracts.disk_streams import DiskStream, create_filled_output
from tests.formats.change_events import encode, event

A0, A1, B0 = Partition("in-a", 0), Partition("in-a", 1), Partition("in-b", 0)


class MemoryReread:
    """Reads a `MemoryKafka` again."""

    def __init__(self, kafka: MemoryKafka, *, compacting: bool = False) -> None:
        self.kafka, self.compacting = kafka, compacting
        self.lost: set[tuple[Partition, int]] = set()

    def read(self, partition: Partition, offset_range: OffsetRange) -> Iterator[MessageBatch]:
        """One stretch a message: cuts mean nothing."""
        for offset, message in enumerate(
            self.kafka.read(partition, offset_range), offset_range.start
        ):
            if (partition, offset) not in self.lost:
                yield MessageBatch(offset, [message.timestamp], [message.key], [message.value])

    def is_compacted(self, _: str) -> bool:
        return self.compacting


def changed(made: DiskStream, partition: Partition, offset: int, **fields: Any) -> None:
    """A message in Kafka becomes another."""
    log = made.kafka.topics[partition.topic].messages[partition.number]
    log[offset] = replace(log[offset], **fields)


def compared(
    made: DiskStream,
    reread: MemoryReread | None = None,
    *,
    everything: bool = False,
    told: list[tuple[int, int]] | None = None,
) -> VerifyResult:
    """Verify with Kafka; its progress is appended to `told`."""
    bounds = made.kafka.bounds(made.stream.topics)
    steps = [] if told is None else told
    comparing = KafkaComparison(
        reread or MemoryReread(made.kafka),
        bounds,
        MemoryDigests,
        progress=lambda done, total: steps.append((done, total)),
    )
    return Verification("s", FileAudit(LocalStore(made.root)), from_first_entry=everything).run(
        comparing
    )


@pytest.mark.long
def test_kafka_has_what_was_folded(tmp_path: Path) -> None:
    """All messages are read again, and each certificate's three digests are right; then only what
    came since.
    """
    made = create_filled_output(tmp_path)
    told: list[tuple[int, int]] = []
    done = compared(made, told=told)
    # The rate is that of reading Kafka alone, without the files before it.
    assert told[0] == (0, told[-1][0])
    assert (done.difference, done.compared_messages) == (
        None,
        sum(len(log) for t in made.kafka.topics.values() for log in t.messages),
    )
    assert compared(made).compared_messages == 0
    made.send("in-a/0", "x", 1, 2)
    made.run()
    assert Verification("s", FileAudit(LocalStore(made.root))).run().difference is None
    assert compared(made).compared_messages == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "what"), [({"value": b"{}"}, "values"), ({"key": b"z"}, "keys")]
)
def test_a_message_that_changed_in_kafka_is_found(
    tmp_path: Path, fields: dict[str, Any], what: str
) -> None:
    """Range, entry and which of the digests differ are named, and nothing is signed off."""
    made = create_filled_output(tmp_path)
    changed(made, A1, 7, **fields)
    found = compared(made).difference
    assert found is not None
    assert (found.partition, found.offset, found.description) == (
        "in-a/1",
        6,
        f"Kafka has other {what} than were folded",
    )
    assert not (tmp_path / "verified.json").exists()


@pytest.mark.long
def test_a_message_that_is_missing_in_kafka_is_found_unless_it_was_compacted(
    tmp_path: Path,
) -> None:
    """Compaction takes messages away lawfully: such a range is said and not compared."""
    made = create_filled_output(tmp_path)
    for compacting in (False, True):
        reread = MemoryReread(made.kafka, compacting=compacting)
        reread.lost.add((A1, 7))
        done = compared(made, reread, everything=True)
        assert (done.difference is None) == compacting
        assert [note for note in done.notes if "in-a/1" in note] == (
            ["in-a/1: Kafka no longer has all of [6, 10): not compared"] if compacting else []
        )


@pytest.mark.long
def test_what_kafka_no_longer_has_is_said(tmp_path: Path) -> None:
    """Expired, or another life of the topic: no difference."""
    made = create_filled_output(tmp_path)
    made.kafka.delete_records(A0, 7)
    made.kafka.delete("in-b")
    made.kafka.create("in-b", 1)
    made.send("in-b/0", "other", *range(30))
    done = compared(made)
    assert done.difference is None
    said = "\n".join(done.notes)
    assert "in-a/0: Kafka no longer has all of [0, 10)" in said
    assert "in-b/0: Kafka no longer has all of [0, " in said


def capture(made: DiskStream, path: Path, *, base64_values: bool = False) -> list[dict[str, Any]]:
    """What Kafka has, written down."""
    lines = []
    for name, topic in made.kafka.topics.items():
        for number, log in enumerate(topic.messages):
            for offset, message in enumerate(log):
                line: dict[str, Any] = {
                    "topic": name,
                    "partition": number,
                    "offset": offset,
                    "timestamp": 0,
                }
                line["key"] = None if message.key is None else message.key.decode()
                if message.value is None:
                    line["value"] = None
                elif base64_values:
                    line["value_base64"] = base64.b64encode(message.value).decode()
                else:
                    line["value"] = message.value.decode()
                lines.append(line)
    write(path, lines)
    return lines


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def judged(
    made: DiskStream, *at: str, raw: Path | None = None, reread: MemoryReread | None = None
) -> ValidationResult:
    """The validator at these places."""
    views: dict[str, Any] = {}
    audit, stream, runner = FileAudit(LocalStore(made.root)), made.stream, made.runner
    places, certificates = verify_at.output_sources(Verification("s", audit), audit)
    if raw is not None:
        views["raw"] = verify_at.capture_sources(read_capture(raw), stream, runner)
    if "kafka" in at:
        bounds = made.kafka.bounds(stream.topics)
        views["kafka"] = verify_at.kafka_sources(
            reread or MemoryReread(made.kafka), bounds, stream, runner
        )
    if "output" in at:
        views["output"] = places
    return verify_at.validate_views(
        stream, runner, views, verify_at.holes_explained_by(certificates)
    )


def clean(root: Path, **fields: Any) -> DiskStream:
    """Two partitions with nothing wrong in them."""
    made = DiskStream(root, **fields)
    made.kafka.create("in-a", 2)
    for place in ("in-a/0", "in-a/1"):
        for session in ("x", "y"):
            made.send(place, session, ["a", "b"], 1, 2, None, [], ["a"], 3, [], [])
        made.run(messages_max=5)
    return made


@pytest.mark.long
@pytest.mark.parametrize("base64_values", [False, True])
@pytest.mark.parametrize("fields", [{}, {"tier": "none"}, {"output_partitions": ("topic",)}])
def test_three_views_of_a_clean_stream_do_not_part(
    tmp_path: Path, base64_values: bool, fields: dict[str, Any]
) -> None:
    """And nothing is wrong in any of them."""
    made = clean(tmp_path / "lake", **fields)
    capture(made, tmp_path / "raw", base64_values=base64_values)
    done = judged(made, "kafka", "output", raw=tmp_path / "raw")
    assert (done.first_differences, done.faults) == ([], {"raw": [], "kafka": [], "output": []})
    assert done.messages["raw"] == done.messages["kafka"] == 36


@pytest.mark.long
def test_quarantine_is_no_parting(tmp_path: Path) -> None:
    """Messages set aside are in the output's own way; poison is named at raw and Kafka."""
    made = create_filled_output(tmp_path / "lake")
    capture(made, tmp_path / "raw")
    done = judged(made, "kafka", "output", raw=tmp_path / "raw")
    assert done.first_differences == []
    (poison,) = [wrong for wrong in done.faults["kafka"] if wrong.kind == "poison"]
    assert (poison.partition, poison.offset, poison.count) == (A0, 10, 2)


@pytest.mark.long
def test_a_message_that_the_capture_has_and_kafka_has_not_is_where_they_part(
    tmp_path: Path,
) -> None:
    """Lost between the collection point and Kafka: the offset is named."""
    made = clean(tmp_path / "lake")
    capture(made, tmp_path / "raw")
    reread = MemoryReread(made.kafka)
    reread.lost.add((A1, 5))
    done = judged(made, "kafka", raw=tmp_path / "raw", reread=reread)
    (first,) = done.first_differences
    assert (first.partition, first.offset, first.views["kafka"]) == (A1, 5, "nothing")
    assert [(wrong.kind, wrong.offset, wrong.expected) for wrong in done.faults["kafka"]] == [
        ("gap", 6, "offset 5"),
        ("sequence gap", 6, "sequence 6"),
    ]


@pytest.mark.long
def test_a_message_that_changed_on_its_way_is_where_they_part(tmp_path: Path) -> None:
    """Another value under the same offset."""
    made = clean(tmp_path / "lake")
    lines = capture(made, tmp_path / "raw")
    lines[3]["value"] = lines[2]["value"]
    write(tmp_path / "raw", lines)
    done = judged(made, "kafka", "output", raw=tmp_path / "raw")
    assert [(one.partition, one.offset) for one in done.first_differences] == [(A0, 3)]
    assert [(wrong.kind, wrong.offset) for wrong in done.faults["raw"]] == [
        ("repeat", 3),
        ("sequence gap", 4),
    ]
    assert done.faults["kafka"] == []


def test_records_that_lack_a_message_are_where_they_part(tmp_path: Path) -> None:
    """The reader lost a message and the tier only counts that: Kafka has it, the output has not."""
    made = DiskStream(tmp_path, tier="none")
    made.kafka.create("in-a", 1)
    made.send("in-a/0", "x", ["a"], 1, 2, 3)
    made.reader.lost_offsets.add((A0, 2))
    made.run()
    done = judged(made, "kafka", "output")
    (first,) = done.first_differences
    assert (first.offset, first.views["output"]) == (2, "nothing")
    assert [(wrong.kind, wrong.offset) for wrong in done.faults["output"]] == [("sequence gap", 3)]


@pytest.mark.long
def test_a_capture_that_goes_back_is_named(tmp_path: Path) -> None:
    """Lines out of order: the capture itself is wrong."""
    made = clean(tmp_path / "lake")
    lines = capture(made, tmp_path / "raw")
    write(tmp_path / "raw", [*lines[:4], lines[2], *lines[4:]])
    done = judged(made, raw=tmp_path / "raw")
    assert ("offset again", 2) in [(wrong.kind, wrong.offset) for wrong in done.faults["raw"]]


def clean_changes(root: Path, session: str = "partition") -> DiskStream:
    """Changes of rows as Debezium sends them, with tombstones, in two partitions. If each of these is
    one session, a truncate is among them.
    """
    changes: list[tuple[str | None, dict[str, Any] | None]] = [
        ('{"id":1}', event("r", {"id": 1, "customer": "a"})),
        ('{"id":2}', event("c", {"id": 2, "customer": "b"})),
        ('{"id":1}', event("u", {"id": 1, "customer": "c"})),
        ('{"id":1}', event("d", None, {"id": 1})),
        ('{"id":1}', None),
        ('{"id":2}', event("u", {"id": 2, "customer": "d"})),
        ('{"id":1}', event("c", {"id": 1, "customer": "e"})),
    ]
    if session == "partition":
        changes.append((None, event("t")))
    made = DiskStream(
        root,
        decoder="debezium",
        session=session,
        sequence=None,
        table=TableSettings(key=("id",), columns={"id": "int64", "customer": "string"}),
        debezium=DebeziumSettings(history="whole"),
    )
    made.kafka.create("in-a", 2)
    for number in (0, 1):
        # A tombstone may come before anything else of its key.
        for key, value in [('{"id":9}', None), *changes]:
            made.kafka.produce("in-a", key, encode(value), partition=number)
        assert made.run(messages_max=5).findings == []
    return made


@pytest.mark.long
@pytest.mark.parametrize(
    ("session", "messages", "messages_with_records"), [("partition", 18, 14), ("key", 16, 12)]
)
def test_views_of_captured_changes_do_not_part(
    tmp_path: Path, session: str, messages: int, messages_with_records: int
) -> None:
    """Tombstones concern no session, and the output does not show where a session begins."""
    made = clean_changes(tmp_path / "lake", session)
    capture(made, tmp_path / "raw")
    done = judged(made, "kafka", "output", raw=tmp_path / "raw")
    assert (done.first_differences, done.faults) == ([], {"raw": [], "kafka": [], "output": []})
    assert done.messages == {"raw": messages, "kafka": messages, "output": messages_with_records}


@pytest.mark.long
@pytest.mark.parametrize("lost_offset", [3, 5], ids=["an update", "a tombstone"])
def test_a_captured_change_that_kafka_lost_is_where_they_part(
    tmp_path: Path, lost_offset: int
) -> None:
    """Its offset is named, whether it is a change or a tombstone."""
    made = clean_changes(tmp_path / "lake")
    capture(made, tmp_path / "raw")
    reread = MemoryReread(made.kafka)
    reread.lost.add((A1, lost_offset))
    done = judged(made, "kafka", raw=tmp_path / "raw", reread=reread)
    (first,) = done.first_differences
    assert (first.partition, first.offset) == (A1, lost_offset)
    assert first.views["kafka"] == "nothing"
    (gap,) = done.faults["kafka"]
    assert (gap.kind, gap.partition, gap.offset) == ("gap", A1, lost_offset + 1)
    assert gap.expected == f"offset {lost_offset}"
    assert done.faults["raw"] == []


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        "[]",
        '{"topic": "a", "partition": 0}',
        '{"topic": "a b", "partition": 0, "offset": 0}',
        '{"topic": "a", "partition": 0, "offset": -1}',
        '{"topic": "a", "partition": 0, "offset": 0, "value_base64": "?"}',
        '{"topic": "a", "partition": 0, "offset": 0, "value": {}}',
    ],
)
def test_a_line_that_is_no_message_is_named(tmp_path: Path, line: str) -> None:
    """File and line, and what a message looks like."""
    good = '{"topic": "a", "partition": 0, "offset": 0, "key": "k", "value": "v"}'
    (tmp_path / "raw").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(ConfigError, match="raw:3: not a captured message"):
        read_capture(tmp_path / "raw")


def test_what_kcat_writes_is_taken(tmp_path: Path) -> None:
    """Its names are payload and ts."""
    line = {
        "topic": "a",
        "partition": 1,
        "offset": 2,
        "tstype": "create",
        "ts": 5,
        "key": "k",
        "payload": None,
    }
    write(tmp_path / "raw", [line])
    (message,) = read_capture(tmp_path / "raw")
    assert (message.partition, message.offset, message.key) == (Partition("a", 1), 2, b"k")
    assert (message.value, message.timestamp) == (None, 5)
