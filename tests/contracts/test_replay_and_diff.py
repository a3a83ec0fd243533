"""Replay into a folder, and diff: what is folded again equals what was committed, and what differs
is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from seriatim.cli import main
from seriatim.cli.replay import (
    create_folder,
    refuse_unusable_address,
    refuse_unusable_folder,
    replay_into_folder,
)
from seriatim.engine.files import File
from seriatim.engine.machine import Runner
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.task import TaskContext
from seriatim.errors import ConfigError, DamagedFileError, IntegrityError
from seriatim.memory import MemoryDigests
from seriatim.operations.inspect.diff import DiffResult, diff_records
from seriatim.operations.inspect.replay import ReplayOutput, ReplayRun
from seriatim.storage import scratch
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.record_files import ParquetRecords, record_schema
from seriatim.storage.record_query import RecordQuery
from seriatim.storage.scratch import LayeredState
from seriatim.storage.state_files import StateFiles
from seriatim.storage.store import LocalStore, open_store
from tests.contracts.disk_streams import DiskStream
from tests.operations.lookback_helper import head_of

A0, A1 = Partition("in-a", 0), Partition("in-a", 1)


class Plainly:
    """Messages of the past, with their headers."""

    def __init__(self, made: DiskStream) -> None:
        self.made = made

    def read(self, partition: Partition, offset_range: OffsetRange) -> Any:
        """Those of a range that are there."""
        yield from self.made.reader.batches(partition, offset_range, with_headers=True)

    def is_compacted(self, _: str) -> bool:
        """No topic does."""
        return False


def feed(made: DiskStream, partition: Partition, count: int, seed: int = 0) -> None:
    """Snapshots, then updates, of three sessions; now and then something wrong."""
    for number in range(count):
        name, seq = f"s{number % 3}", number // 3 + 1
        body: dict[str, Any] = {"type": "update", "seq": seq, "id": "a", "v": number + seed}
        if seq in (1, 9):
            body = {
                "type": "snapshot",
                "seq": seq,
                "rows": [{"id": one, "v": number} for one in "ab"],
            }
        elif number == 16:
            body["seq"] = 77
        made.kafka.produce(
            partition.topic, name, json.dumps(body).encode(), partition=partition.number
        )


@pytest.fixture
def made(tmp_path: Path) -> DiskStream:
    """A stream of two partitions folded in small slices; session s1 is set aside for a while."""
    one = DiskStream(tmp_path / "lake")
    one.kafka.create("in-a", 2)
    feed(one, A0, 60)
    feed(one, A1, 30)
    one.run(14)
    return one


def kit(
    made: DiskStream, folder: Path, runner: Runner
) -> Callable[[tuple[File, ...]], TaskContext]:
    """What a replay works with."""
    stream = made.stream
    return lambda base: TaskContext(
        runner=runner,
        tier=stream.tier,
        on_poison=stream.on_poison,
        limits=stream.limits,
        has_session_field=False,
        records=ParquetRecords(LocalStore(folder), runner.columns, "zstd", ()),
        state=LayeredState(StateFiles(LocalStore(folder), "s"), made.files, base),
        explain=made.explain,
        digests=MemoryDigests,
        peak_memory_bytes=lambda: 0,
    )


def replayed(
    made: DiskStream,
    folder: Path,
    wanted: dict[Partition, OffsetRange],
    *,
    fresh: bool = False,
    size: int = 7,
) -> list[ReplayOutput]:
    """Fold ranges into a folder, as the command does."""
    refuse_unusable_folder(folder)
    runner = made.stream.table_machine()
    tools = made.open(runner).with_ports(
        past_reader=Plainly(made), joiner=ParquetJoiner(LocalStore(made.root), "s")
    )
    replaying = ReplayRun(
        tools, head_of(made), kit(made, folder, runner), without_state=fresh, messages_max=size
    )
    done = list(replaying.run(wanted))
    scratch.create_table(
        LocalStore(folder),
        "",
        record_schema(runner.columns),
        [file for part in done for file in part.records],
    )
    scratch.write_manifest(LocalStore(folder), {"replay": "s"})
    return done


def compared(made: DiskStream, folder: Path, done: list[ReplayOutput]) -> DiffResult:
    """The folder against what is committed."""
    accounts = made.accounts()
    lefts = {
        (p, account.topic_id): OffsetRange(account.initial_frontier, account.frontier)
        for p, account in accounts.items()
    }
    rights = {(part.partition, part.topic_id): OffsetRange(part.start, part.until) for part in done}
    return diff_records(
        RecordQuery(LocalStore(made.root), "s"),
        RecordQuery(LocalStore(folder), None),
        lefts,
        rights,
        lambda _done, _total: None,
    )


def test_a_replay_equals_what_was_committed(made: DiskStream, tmp_path: Path) -> None:
    """From a saved state in the middle, in stages of seven messages: the same records, and nothing
    is committed.
    """
    entries = head_of(made).ledger.sequence
    done = replayed(made, tmp_path / "again", {A0: OffsetRange(20, 50), A1: OffsetRange(0, 30)})
    assert [(part.requested_start, part.until) for part in done] == [(20, 50), (0, 30)]
    assert done[0].start <= 20
    assert done[0].findings
    told = compared(made, tmp_path / "again", done)
    assert (told.count, told.records > 60, told.not_compared) == (0, True, [])
    assert head_of(made).ledger.sequence == entries


def test_what_differs_is_named(made: DiskStream, tmp_path: Path) -> None:
    """The first record and how many; by column where both have it."""
    done = replayed(made, tmp_path / "again", {A0: OffsetRange(0, 60)})
    made.kafka.topics["in-a"].messages[0][40:41] = [
        replace(
            made.kafka.topics["in-a"].messages[0][40],
            value=b'{"type": "update", "seq": 14, "id": "a", "v": -5}',
        )
    ]
    other = replayed(made, tmp_path / "other", {A0: OffsetRange(0, 60)})
    ranges = {
        (part.partition, part.topic_id): OffsetRange(part.start, part.until)
        for part in (*done, *other)
    }
    sides = (
        RecordQuery(LocalStore(tmp_path / "again"), None),
        RecordQuery(LocalStore(tmp_path / "other"), None),
    )
    told = diff_records(*sides, ranges, ranges, lambda _done, _total: None)
    first = told.differences[0]
    assert (first.partition, first.offset, first.index, first.columns) == (A0, 40, 0, ("v",))
    assert (told.count, told.differing) == (2, 2)
    assert told.differences[1].columns == ("before_v",)


def test_only_what_both_have_is_compared(made: DiskStream, tmp_path: Path) -> None:
    """Partitions that one has not are said; records that one lacks count."""
    done = replayed(made, tmp_path / "again", {A0: OffsetRange(0, 60)}, fresh=True)
    told = compared(made, tmp_path / "again", done)
    assert told.not_compared == ["in-a/1: only one of them has folded it"]
    fresh = replayed(made, tmp_path / "late", {A0: OffsetRange(10, 60)}, fresh=True)
    told = compared(made, tmp_path / "late", fresh)
    assert fresh[0].headless > 0
    assert told.only_left > 0
    assert told.only_right == 0
    assert told.differences[0].offset == 10


def test_another_folder_is_left_alone(made: DiskStream, tmp_path: Path) -> None:
    """Not an output, not below one, not one with something in it, and no replay over another."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    (tmp_path / "file").write_text("x")
    replayed(made, tmp_path / "again", {A1: OffsetRange(0, 30)})
    for folder, why in (
        (made.root, "is an output"),
        (made.root / "records" / "deep", "is an output"),
        (tmp_path / "full", "not empty"),
        (tmp_path / "file", "a file"),
        (tmp_path / "again", "a replay is in it already"),
    ):
        with pytest.raises(ConfigError, match=why):
            refuse_unusable_folder(folder)


def test_another_place_in_a_bucket_is_left_alone(s3_url: str) -> None:
    """As a folder: where something is, where a replay is, and inside an output."""
    open_store(s3_url).replace("full/x", b"x")
    open_store(s3_url).replace("output/head.json", b"{}")
    open_store(f"{s3_url}/again").replace(scratch.MANIFEST_FILE, b"{}")
    for key, why in (
        ("full", "not empty"),
        ("again", "a replay is in it already"),
        ("output/deep/er", "is an output"),
        ("sp ace", "other characters"),
    ):
        with pytest.raises(ConfigError, match=why):
            refuse_unusable_address(f"{s3_url}/{key}")
    refuse_unusable_address(f"{s3_url}/new")


@pytest.mark.parametrize("target", ["s3:/bucket/x", "s3a://bucket/x", "file:///tmp/x"])
def test_an_address_that_is_not_whole_makes_no_folder(target: str) -> None:
    """It would be one below the current folder."""
    with pytest.raises(ConfigError, match=target):
        replay_into_folder(
            "none",
            target,
            machine=None,
            partition=None,
            topic=None,
            start=None,
            until=None,
            fresh=False,
        )


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    """In words, with what to do."""
    with pytest.raises(ConfigError, match="cannot be made"):
        create_folder(Path("/proc/x"))


class Rows:
    """One side of a comparison, in memory."""

    columns = ("offset", "index", "v")

    def __init__(self, *rows: tuple[int, int, float]) -> None:
        self.rows = rows

    def read(self, *_: Any) -> pa.Table:
        """All of it."""
        schema = pa.schema([("offset", pa.int64()), ("index", pa.int32()), ("v", pa.float64())])
        return pa.Table.from_pylist(
            [dict(zip(self.columns, row, strict=True)) for row in self.rows], schema=schema
        )


def test_records_that_are_there_twice_count() -> None:
    """On either side, and whatever lies beside them; NaN is what NaN is."""
    places = {(A0, "x"): OffsetRange(0, 9)}

    def told(left: Rows, right: Rows) -> tuple[int, int, int]:
        done = diff_records(left, right, places, places, lambda _done, _total: None)
        return done.differing, done.only_left, done.only_right

    nan = float("nan")
    one, two, odd = (1, 0, nan), (2, 0, 2.0), (2, 0, 3.0)
    assert told(Rows(one, two), Rows((1, 0, -nan), two)) == (0, 0, 0)
    assert told(Rows(one, two, two), Rows(one, two)) == (0, 1, 0)
    assert told(Rows(one, two), Rows(one, odd, two)) == (0, 0, 1)
    assert told(Rows(one, two), Rows(one, odd)) == (1, 0, 0)
    assert told(Rows(one), Rows((1, 0, 0.0))) == (1, 0, 0)


def test_what_is_damaged_is_said(made: DiskStream, tmp_path: Path) -> None:
    """A manifest that says nothing, a file of records that is cut or gone: an error of ours, with
    what to do.
    """
    folder = tmp_path / "again"
    done = replayed(made, folder, {A0: OffsetRange(0, 60)})
    for text in (
        "{}",
        "[]",
        '{"partitions": [{}]}',
        '{"partitions": [{"topic": "a", "partition": -1}]}',
        "null",
        '{"p',
    ):
        (folder / scratch.MANIFEST_FILE).write_text(text)
        with pytest.raises(ConfigError) as told:
            scratch.folded_ranges(LocalStore(folder))
        assert "again into another folder" in told.value.next
    file = next((folder / "records").rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:100])
    for _ in range(2):
        with pytest.raises(IntegrityError, match="cannot be read"):
            compared(made, folder, done)
        file.unlink(missing_ok=True)


def test_other_tables_are_named(made: DiskStream) -> None:
    """A comparison that leaves them out must say so."""
    assert RecordQuery(LocalStore(made.root), "s").other_tables == []
    (made.root / "records-trade" / "_delta_log").mkdir(parents=True)
    assert RecordQuery(LocalStore(made.root), "s").other_tables == ["records-trade"]


def test_what_kafka_has_no_more_is_said(made: DiskStream, tmp_path: Path) -> None:
    """A range whose messages, or whose saved state's messages, are gone is refused with what to do."""
    made.kafka.delete_records(A0, 20)
    with pytest.raises(ConfigError, match="Kafka has"):
        replayed(made, tmp_path / "one", {A0: OffsetRange(10, 30)})
    made.kafka.delete_records(A0, 45)
    with pytest.raises(ConfigError, match="no saved state") as told:
        replayed(made, tmp_path / "two", {A0: OffsetRange(46, 60)})
    assert "--fresh" in told.value.next


def test_records_are_found_by_their_columns(tmp_path: Path) -> None:
    """Also where the table is partitioned by one of them, which is not in the files then."""
    one = DiskStream(tmp_path / "lake", output_partitions=("topic",))
    one.kafka.create("in-a", 1)
    one.kafka.create("in-b", 1)
    feed(one, A0, 30)
    feed(one, Partition("in-b", 0), 30, seed=1000)
    one.run(14)
    lookup = RecordQuery(LocalStore(one.root), "s")
    rows = list(lookup.find_records({"id": "a", "session": "s0", "topic": "in-b"}))
    assert rows
    assert {(row["topic"], row["session"], row["id"]) for row in rows} == {("in-b", "s0", "a")}
    assert len(list(lookup.find_records({}))) == sum(
        file.rows for file in one.ledger.active_files(head_of(one))
    )
    life = one.accounts()[A0].topic_id
    part = lookup.read((A0, life), OffsetRange(5, 12))
    assert sorted({row["offset"] for row in part.to_pylist()}) == list(range(5, 12))
    with pytest.raises(ConfigError, match="no table of records"):
        RecordQuery(LocalStore(tmp_path / "nowhere"), None)


def test_a_record_file_that_cannot_be_read_is_told_with_its_way_out(made: DiskStream) -> None:
    """Of a stream, verify says what is hurt, by the stream's name; a replay is simply folded again."""
    path = next(file.path for file in made.ledger.active_files(head_of(made)))
    (made.root / path).write_bytes(b"nothing of the kind")
    for stream, advice in (
        ("orders", "seriatim verify orders tells"),
        (None, "fold the replay again"),
    ):
        with pytest.raises(DamagedFileError, match="cannot be read") as refused:
            list(RecordQuery(LocalStore(made.root), stream).find_records({}))
        assert refused.value.path == path
        assert refused.value.next.startswith(advice)


def test_messages_that_are_gone_are_counted(made: DiskStream, tmp_path: Path) -> None:
    """A replay over what was compacted away since says how many messages it had to do without; else
    none.
    """
    whole = {A0: OffsetRange(0, 60), A1: OffsetRange(0, 30)}
    assert [part.missing_messages for part in replayed(made, tmp_path / "one", whole)] == [0, 0]
    made.kafka.topics["in-a"].compacted = True
    made.kafka.compact(A0, 50)
    done = replayed(made, tmp_path / "other", whole)
    assert [(part.messages + part.missing_messages, part.missing_messages) for part in done] == [
        (60, 50),
        (30, 0),
    ]
    (part,) = replayed(made, tmp_path / "edge", {A0: OffsetRange(0, 20)})
    assert (part.missing_messages, part.messages) == (20, 0)


def test_a_partition_that_is_empty_in_both_outputs_does_not_differ() -> None:
    """A topic that nobody has written to yet is compared like any other; neither lacks it."""
    places = {(A0, "x"): OffsetRange(0, 9), (A1, "x"): OffsetRange(0, 0)}
    told = diff_records(
        Rows((1, 0, 2.0)), Rows((1, 0, 2.0)), places, places, lambda _done, _total: None
    )
    assert (told.ranges, told.count, told.not_compared) == (places, 0, [])
    one_has_more = {**places, (A1, "x"): OffsetRange(0, 5)}
    told = diff_records(Rows(), Rows(), places, one_has_more, lambda _done, _total: None)
    assert told.not_compared == ["in-a/1: only one of them has folded it"]


def test_two_outputs_without_a_record_do_not_differ(
    tmp_path: Path, s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0 from the command itself, over tables that have no file at all. One is in a bucket."""
    part = {"topic": "in-a", "partition": 0, "topic_id": "x", "from": 0, "until": 0}
    for address in (str(tmp_path / "one"), s3_url):
        store = open_store(address)
        scratch.create_table(store, "", record_schema({"id": "string"}), [])
        scratch.write_manifest(store, {"partitions": [part]})
    with pytest.raises(SystemExit) as ended:
        main(["diff", str(tmp_path / "one"), s3_url])
    assert (ended.value.code, "do not differ: 0 records" in capsys.readouterr().out) == (0, True)
