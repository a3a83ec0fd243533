"""The contract of `RecordStore`: files of records and of messages set aside, in memory and in
Parquet.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seriatim.engine.files import File, UnfitRecordsError, finish_files
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Partition
from seriatim.engine.records import fits_column_type
from seriatim.engine.session import FoldOutput, QuarantinedMessage
from seriatim.errors import BrokenPromiseError
from seriatim.memory import MemoryFiles
from seriatim.memory.store import MemoryStore
from seriatim.operations.sweep import SLICE_FILE_NAME, sweep_attempts
from seriatim.ports import RecordStore
from seriatim.storage import parquet
from seriatim.storage.arrow import ArrowMessageBatch
from seriatim.storage.record_files import ParquetRecords
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.store import LocalStore, Store, xxh3_and_sha256

P, P1, P10 = (Partition("in-a", number) for number in (0, 1, 10))
COLUMNS = {
    "text": "string",
    "whole": "int64",
    "ratio": "float64",
    "flag": "bool",
    "at": "timestamp",
    "day": "date",
    "raw": "binary",
    "parts": "list<int64>",
    "times": "list<timestamp>",
}
NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
ROW = ("x", 1, 0.5, True, NOON, date(2024, 1, 1), b"\xff", [1, 2], [NOON])
NULLS = (None,) * len(COLUMNS)
STRETCH = MessageBatch(5, [1_000, 1_001], [b"s", None], [b"v", None], [[], [("h", None)]])
FROM_SPARK = ArrowMessageBatch(
    pa.RecordBatch.from_pydict(
        {
            "timestamp": pa.array([1_000_000, 1_001_000], pa.timestamp("us", tz="UTC")),
            "key": pa.array([b"s", None], pa.binary()),
            "value": pa.array([b"v", None], pa.binary()),
            "headers": pa.array(
                [[], [{"key": "h", "value": None}]],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
        }
    ),
    5,
)


@pytest.fixture(params=["memory", "real"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RecordStore:
    """A store of either kind."""
    if request.param == "memory":
        return MemoryFiles(COLUMNS)
    return ParquetRecords(LocalStore(tmp_path), COLUMNS, "zstd", ())


@pytest.fixture
def stretch(store: RecordStore) -> MessageBatch:
    """The same two messages as each kind meets them."""
    return STRETCH if isinstance(store, MemoryFiles) else FROM_SPARK


def rows_of(store: Any, file: File) -> list[dict[str, Any]]:
    """The rows of a file, times in milliseconds."""
    if isinstance(store, MemoryFiles):
        rows = [dict(row) for row in store.read(file).rows]
    else:
        rows = pq.ParquetFile(store.store.path(file.path)).read().to_pylist()
    for row in rows:
        if isinstance(row["timestamp"], datetime):
            row["timestamp"] = round(row["timestamp"].timestamp() * 1000)
        if row.get("headers"):
            pairs = [one.values() if isinstance(one, dict) else one for one in row["headers"]]
            row["headers"] = [tuple(pair) for pair in pairs]
    return rows


def folded(rows: dict[int, list[tuple[Any, ...]]]) -> FoldOutput:
    """Records by the position of their message."""
    made = FoldOutput(consumed_messages=2)
    for position, records in rows.items():
        made.positions += [position] * len(records)
        made.indexes += range(len(records))
        made.sequences += [None if position else 9] * len(records)
        made.sessions += ["s"] * len(records)
        made.rows += records
    return made


def written(store: RecordStore, stem: str = "0-5-a", partition: Partition = P) -> File:
    """A small record file."""
    writer = store.record_writer(partition, "id", stem)
    writer.write(STRETCH, folded({1: [ROW]}))
    file = writer.close()
    assert file is not None
    return file


def test_records_come_back_as_they_were_written(store: RecordStore, stretch: MessageBatch) -> None:
    """What every record has comes from its message, the rest from the machine; all stretches are
    there.
    """
    writer = store.record_writer(P, "id", "0-5-a")
    writer.write(stretch, folded({0: [ROW, NULLS], 1: [ROW]}))
    writer.write(MessageBatch(7, [5_000], [b"t"], [b"w"]), folded({0: [NULLS]}))
    file = writer.close()
    assert file is not None
    own = [(5, 0, 1_000, 9), (5, 1, 1_000, 9), (6, 0, 1_001, None), (7, 0, 5_000, 9)]
    expected = [
        {
            "topic": "in-a",
            "topic_id": "id",
            "partition": 0,
            "offset": offset,
            "index": index,
            "source_offset": offset,
            "timestamp": timestamp,
            "session": "s",
            "sequence": sequence,
            **dict(zip(COLUMNS, row, strict=True)),
        }
        for (offset, index, timestamp, sequence), row in zip(
            own, [ROW, NULLS, ROW, NULLS], strict=True
        )
    ]
    assert [list(row.items()) for row in rows_of(store, file)] == [
        list(row.items()) for row in expected
    ]


def test_a_record_file_is_described_truly(store: RecordStore, tmp_path: Path) -> None:
    """Rows, lowest and highest offset, and the bytes and digest of what is there."""
    writer = store.record_writer(P, "id", "0-5-a")
    writer.write(STRETCH, folded({0: [ROW, ROW]}))
    writer.write(MessageBatch(900, [0, 0], [b"s"] * 2, [b"v"] * 2), folded({1: [ROW]}))
    file = writer.close()
    assert file is not None
    assert file.path.startswith("records/in-a/0/0-5-a")
    assert (file.rows, file.first_offset, file.last_offset) == (3, 5, 901)
    if isinstance(store, MemoryFiles):
        assert len(store.read(file).content) == file.size_bytes > 0
    else:
        full = tmp_path / file.path
        assert full.stat().st_size == file.size_bytes
        digests = xxh3_and_sha256(LocalStore(full.parent), full.name)
        assert digests == (file.digest, file.sha256)


def test_nothing_written_is_no_file(store: RecordStore) -> None:
    """Neither records nor messages set aside; a sweep finds nothing."""
    writer, kept = store.record_writer(P, "id", "0-5-a"), store.quarantine_writer(P, "id", "0-5-a")
    writer.write(STRETCH, FoldOutput(consumed_messages=2))
    assert (writer.close(), kept.close()) == (None, None)
    assert sweep_attempts(store, P, "0-5-", set()) == []


def test_messages_set_aside_are_kept_whole(store: RecordStore, stretch: MessageBatch) -> None:
    """Key, value, headers, offset and why, so that they outlive Kafka's retention."""
    writer = store.quarantine_writer(P, "id", "0-5-a")
    writer.write(
        stretch,
        [QuarantinedMessage(0, "s", "raised", "why"), QuarantinedMessage(1, "t", "poison", "null")],
    )
    writer.write(MessageBatch(9, [7], [b"k"], [b""]), [QuarantinedMessage(0, "s", "gap", "")])
    file = writer.close()
    assert file is not None
    assert file.path.startswith("kept/in-a/0/0-5-a")
    assert (file.rows, file.first_offset, file.last_offset) == (3, -1, -1)
    common = {"topic": "in-a", "topic_id": "id", "partition": 0}
    names = ("offset", "timestamp", "session", "finding", "cause", "key", "value", "headers")
    values = [
        (5, 1_000, "s", "raised", "why", b"s", b"v", []),
        (6, 1_001, "t", "poison", "null", None, None, [("h", None)]),
        (9, 7, "s", "gap", "", b"k", b"", None),
    ]
    assert rows_of(store, file) == [common | dict(zip(names, row, strict=True)) for row in values]


def test_a_name_is_used_once(store: RecordStore) -> None:
    """Names say partition, epoch, start and attempt: whoever writes one again is wrong."""
    written(store)
    with pytest.raises(BrokenPromiseError, match="there already"):
        written(store)


class Word(StrEnum):
    """Text by another class."""

    YES = "yes"


YEAR_0 = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=12)))
YEAR_10000 = datetime(9999, 12, 31, 23, tzinfo=timezone(-timedelta(hours=12)))
BAD: dict[str, list[Any]] = {
    "text": [1, True, "\ud800", b"x"],
    "whole": ["1", 2**63, 1.5, 1.0, True],
    "ratio": ["x", 2**53 + 1, True],
    "flag": [1, "true"],
    "at": ["2024-01-01", date(2024, 1, 1), 5, YEAR_0, YEAR_10000],
    "day": ["2024-01-01", NOON, 5],
    "raw": [1, "x"],
    "parts": [[1, "x"], [1.5], [True], "x", 1, [[1]], (1,)],
    "times": [[5], [YEAR_0], NOON],
}
GOOD: dict[str, list[Any]] = {
    "text": ["", "é\0", Word.YES],
    "whole": [-(2**63), 2**63 - 1],
    "ratio": [1, 2**53, float("inf")],
    "flag": [False],
    "at": [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)],
    "day": [date.min, date.max],
    "raw": [b""],
    "parts": [[], [None, 1]],
    "times": [[], [None]],
}


def unfit_rows(store: RecordStore, column: str, value: Any, stem: str) -> list[int]:
    """Which of four rows are refused when the second and the last have this value."""
    place = list(COLUMNS).index(column)
    other = (*ROW[:place], value, *ROW[place + 1 :])
    try:
        store.record_writer(P, "id", stem).write(
            STRETCH, folded({0: [ROW, other], 1: [NULLS, other]})
        )
    except UnfitRecordsError as unfit:
        return unfit.rows
    return []


@pytest.mark.parametrize("column", COLUMNS)
def test_values_that_do_not_fit_are_named_by_their_rows(store: RecordStore, column: str) -> None:
    """None is bent into its column: 1.5 among whole numbers is refused, as `fits` says, not written
    as 1.
    """
    for number, bad in enumerate(BAD[column]):
        assert not fits_column_type(bad, COLUMNS[column])
        assert unfit_rows(store, column, bad, f"bad-{number}") == [1, 3], bad
    for number, good in enumerate([*GOOD[column], None]):
        assert fits_column_type(good, COLUMNS[column])
        assert unfit_rows(store, column, good, f"good-{number}") == [], good


def test_after_unfit_records_a_writer_goes_on(store: RecordStore) -> None:
    """The task closes its files all the same; nothing of the refused stretch is in them."""
    writer = store.record_writer(P, "id", "0-5-a")
    with pytest.raises(UnfitRecordsError):
        writer.write(STRETCH, folded({0: [ROW, (1, *ROW[1:])]}))
    assert writer.close() is None


def test_sweeping_takes_what_begins_so_and_is_not_kept(store: RecordStore) -> None:
    """One partition, epoch and start; records and quarantine alike; no other number that begins
    alike.
    """
    stems = [
        (P1, "0-1-a"),
        (P1, "0-1-b"),
        (P1, "0-10-a"),
        (P1, "10-1-a"),
        (P10, "0-1-a"),
        (P, "0-1-a"),
    ]
    paths = {(partition, stem): written(store, stem, partition).path for partition, stem in stems}
    kept = store.quarantine_writer(P1, "id", "0-1-b")
    kept.write(STRETCH, [QuarantinedMessage(1, "s", "poison", "cause")])
    aside = kept.close()
    assert aside is not None
    keep = {paths[P1, "0-1-a"], "records/in-a/1/0-1-never"}
    assert sorted(sweep_attempts(store, P1, "0-1-", keep)) == sorted(
        [paths[P1, "0-1-b"], aside.path]
    )
    assert sweep_attempts(store, P1, "0-1-", keep) == []
    assert sweep_attempts(store, P1, "0-10-", set()) == [paths[P1, "0-10-a"]]
    left = [sweep_attempts(store, partition, "", set()) for partition in (P, P1, P10)]
    assert left == [
        [paths[P, "0-1-a"]],
        [paths[P1, "0-1-a"], paths[P1, "10-1-a"]],
        [paths[P10, "0-1-a"]],
    ]


def test_files_are_asked_for_by_name(store: RecordStore) -> None:
    """All of them are there, or not all."""
    one, other = written(store, "0-1-a"), written(store, "0-2-a", P1)
    assert store.has_files([])
    assert store.has_files([one.path, other.path])
    store.delete([other.path])
    assert not store.has_files([one.path, other.path])
    assert store.has_files([one.path])


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_what_a_killed_task_did_not_finish_is_listed_and_swept(kind: str, tmp_path: Path) -> None:
    """Under the name that it would have got; a task that is still alive then fails."""
    store: Store = LocalStore(tmp_path) if kind == "local" else MemoryStore()
    records = ParquetRecords(store, COLUMNS, "zstd", ())
    writers = []
    for stem in ("0-5-dead", "0-9-alive"):
        writer = records.record_writer(P, "id", stem)
        writer.write(FROM_SPARK, folded({0: [ROW]}))
        writer.file._flush()
        writers.append(writer)
    dead, alive = f"records/{P}/0-5-dead.parquet", f"records/{P}/0-9-alive.parquet"
    assert records.paths(P) == [dead, alive]
    assert list(store.keys("")) == []
    assert sweep_attempts(records, P, "0-5-", set()) == [dead]
    assert records.paths(P) == [alive]
    with pytest.raises(FileNotFoundError):
        writers[0].close()
    file = writers[1].close()
    assert file is not None
    assert store.size(alive) == file.size_bytes
    assert records.paths(P) == [alive]


def test_sweeping_where_nothing_was_written_is_no_error(store: RecordStore) -> None:
    """A partition without files has nothing to sweep."""
    assert sweep_attempts(store, P, "0-0-", set()) == []


def test_large_messages_do_not_wait_in_memory(tmp_path: Path) -> None:
    """A row group is closed by its bytes too: 20 messages of 8 MB are never held all at once."""
    writer = ParquetRecords(LocalStore(tmp_path), COLUMNS, "zstd", ()).quarantine_writer(
        P, "id", "0-0-a"
    )
    large = MessageBatch(0, [0] * 20, [b"s"] * 20, [bytes(8 << 20)] * 20, [[]] * 20)
    for position in range(20):
        writer.write(large, [QuarantinedMessage(position, "s", "poison", "")])
    file = writer.close()
    assert file is not None
    assert pq.ParquetFile(tmp_path / file.path).num_row_groups >= 2


def test_files_of_quarantined_messages_are_cut_at_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold whole messages: a topic full of poison is not gathered in the memory of one task."""
    message_bytes = 1_000
    monkeypatch.setattr(parquet, "BUFFERED_BYTES_MAX", 5 * message_bytes)
    store = ParquetRecords(LocalStore(tmp_path), COLUMNS, "none", (), file_bytes=20_000)
    writer = store.quarantine_writer(P, "id", "0-5-a")
    for number in range(200):
        batch = MessageBatch(5 + number, [0], [b"s"], [b"%0*d" % (message_bytes, number)])
        writer.write(batch, [QuarantinedMessage(0, "s", "poison", "")])
    files = finish_files(writer)
    assert [file.path for file in files[:2]] == [
        "kept/in-a/0/0-5-a.parquet",
        "kept/in-a/0/0-5-a.1.parquet",
    ]
    assert max(file.size_bytes for file in files) < 20_000 + 10 * message_bytes
    offsets: list[int] = []
    for file in files:
        table = pq.read_table(tmp_path / file.path)
        assert table.num_rows == file.rows
        offsets += table.column("offset").to_pylist()
    assert offsets == list(range(5, 205))
    assert sweep_attempts(store, P, "0-5-") == sorted(file.path for file in files)


def test_a_column_the_table_is_partitioned_by_is_not_in_the_file(tmp_path: Path) -> None:
    """Delta has it in the commit; everything else stays in its place."""
    store = ParquetRecords(LocalStore(tmp_path), COLUMNS, "none", ("topic", "partition"))
    (row,) = rows_of(store, written(store))
    assert list(row)[:3] == ["topic_id", "offset", "index"]
    assert not {"topic", "partition"} & set(row)
    assert row["text"] == "x"


def test_pages_carry_checksums(tmp_path: Path) -> None:
    """One flipped byte inside a record file is seen by who reads it."""
    file = written(ParquetRecords(LocalStore(tmp_path), COLUMNS, "none", ()))
    content = bytearray((tmp_path / file.path).read_bytes())
    content[content.index(b"in-a")] ^= 1
    (tmp_path / file.path).write_bytes(content)
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(tmp_path / file.path, page_checksum_verification=True).read()


def test_values_checked_while_decoding_are_still_never_lost(tmp_path: Path) -> None:
    """The table machine's own check is not made twice; what Arrow cannot write is named all the
    same.
    """
    store = ParquetRecords(LocalStore(tmp_path), COLUMNS, "zstd", (), values_are_checked=True)
    assert unfit_rows(store, "whole", "x", "0-5-a") == [1, 3]
    assert rows_of(store, written(store))[0]["whole"] == 1


def test_the_outline_of_a_file_does_not_grow_with_its_sessions(tmp_path: Path) -> None:
    """Verify keeps the outlines of all files of a table: they count sessions, and have no names."""
    rows = 10_000
    table = pa.table(
        {
            "topic": ["t"] * rows,
            "topic_id": ["old"] * 4_000 + ["new"] * 6_000,
            "partition": [0] * rows,
            "offset": [*range(4_000), *range(6_000)],
            "index": [0] * rows,
            "session": [f"session-{i // 2}" for i in range(rows)],
        }
    )
    (tmp_path / "records").mkdir()
    pq.write_table(table, tmp_path / "records/f.parquet", row_group_size=1_500)
    outline = RecordScan(LocalStore(tmp_path)).outline("records/f.parquet")
    assert outline.session_count == 5_000
    assert outline.offsets_by_topic_id == {"old": (0, 3_999), "new": (0, 5_999)}
    assert len(msgspec.json.encode(outline)) < 1_000


def test_record_files_are_cut_at_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket gathers a file in memory, so none becomes much larger than it should. The files follow
    each other by offset, and sweeps know all of them as one attempt.
    """
    file_bytes = 20_000
    group_bytes = 5_000
    monkeypatch.setattr(parquet, "BUFFERED_BYTES_MAX", group_bytes)
    store = ParquetRecords(LocalStore(tmp_path), COLUMNS, "none", (), file_bytes=file_bytes)
    writer = store.record_writer(P, "id", "0-5-a")
    batches = 200
    for number in range(batches):
        batch = MessageBatch(5 + 2 * number, STRETCH.timestamps, STRETCH.keys, STRETCH.values)
        writer.write(batch, folded({0: [ROW] * 5, 1: [ROW] * 5}))
    files = finish_files(writer)
    assert [Path(file.path).name for file in files[:3]] == [
        "0-5-a.parquet",
        "0-5-a.1.parquet",
        "0-5-a.2.parquet",
    ]
    assert max(file.size_bytes for file in files) < file_bytes + 3 * group_bytes
    assert sum(file.rows for file in files) == batches * 10
    for file, next_file in pairwise(files):
        assert file.last_offset < next_file.first_offset
    matches = [SLICE_FILE_NAME.fullmatch(Path(file.path).name) for file in files]
    assert {match[3] for match in matches if match is not None} == {"a"}
    assert None not in matches
    assert sweep_attempts(store, P, "0-5-") == sorted(file.path for file in files)
