"""Rows out of records: the one implementation beside a plain fold in Python, over random records."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import RowImage, RowKeySpec
from seriatim.ledger.current_rows import PartitionCatchUp
from seriatim.ports import ScanRequest, UnreadableFileError
from seriatim.storage import record_rows, record_scan
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.record_files import record_schema
from seriatim.storage.record_rows import RecordGroups, RowMerger, deleted_mask
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.store import LocalStore, digest_object

PARTITION = Partition("in-a", 0)
COLUMNS = {
    "op": "string",
    "_row": "string",
    "row": "float64",
    "_gone": "int64",
    "tags": "list<string>",
    "price": "decimal(10,2)",
    "at": "timestamp",
}
"""Some are named like helper columns."""
SCHEMA = record_schema(COLUMNS)
AT = datetime(2026, 1, 2, tzinfo=UTC)
SPECS = [
    RowKeySpec(key=("_row",), columns=tuple(COLUMNS)[1:], deleted_when={"op": "delete"}),
    RowKeySpec(key=("_row", "row"), columns=tuple(COLUMNS)[1:], deleted_when={"op": "delete"}),
    RowKeySpec(key=("row", "price"), columns=tuple(COLUMNS), deleted_when={"tags": []}),
    RowKeySpec(key=("_gone",), columns=tuple(COLUMNS), deleted_when={"tags": None, "_gone": 1}),
    RowKeySpec(key=("at",), columns=tuple(COLUMNS), deleted_when={"at": AT.replace(tzinfo=None)}),
    RowKeySpec(key=("price",), columns=("price", "tags"), deleted_when={"price": Decimal("1.50")}),
    RowKeySpec(key=("_row",), columns=("_row", "at")),
]
Record = dict[str, Any]


def random_records(rng: random.Random, topic_id: str, count: int) -> list[Record]:
    """Records of a few sessions and keys, in order."""
    records = []
    offset = rng.randrange(3)
    index = 0
    for _ in range(count):
        if rng.random() < 0.3:
            index += 1
        else:
            offset += rng.randrange(1, 4)
            index = 0
        record = {
            "topic": "in-a",
            "topic_id": topic_id,
            "partition": 0,
            "offset": offset,
            "index": index,
            "source_offset": offset,
            "timestamp": AT,
            "session": rng.choice(["x", "y", "é"]),
            "sequence": rng.choice([None, offset]),
            "op": rng.choice(["insert", "update", "delete", "snapshot"]),
            "_row": rng.choice(["a", "b", None]),
            "row": rng.choice([0.0, -0.0, 1.5, None]),
            "_gone": rng.choice([0, 1, None]),
            "tags": rng.choice([None, [], ["x"], ["x", None]]),
            "price": rng.choice([Decimal("1.50"), Decimal("-2.00"), None]),
            "at": rng.choice([AT, AT.replace(year=2027), None]),
        }
        records.append(record)
    return records


def write_files(root: Path, rng: random.Random, records: list[Record]) -> list[File]:
    """Several files of several row groups, cut between offsets."""
    files: list[File] = []
    while records:
        end = min(len(records), rng.randrange(1, 20))
        while end < len(records) and records[end]["offset"] == records[end - 1]["offset"]:
            end += 1
        part, records = records[:end], records[end:]
        key = f"records/{PARTITION}/0-{part[0]['topic_id']}-{part[0]['offset']}.parquet"
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist(part, schema=SCHEMA)
        pq.write_table(table, root / key, row_group_size=rng.randrange(1, 9))
        file = File(
            path=key,
            size_bytes=(root / key).stat().st_size,
            rows=len(part),
            digest=digest_object(LocalStore(root), key),
            first_offset=part[0]["offset"],
            last_offset=part[-1]["offset"],
        )
        files.append(file)
    return files


def plain_fold(records: list[Record], spec: RowKeySpec) -> dict[Any, tuple[Record, bool]]:
    """The last record by session and key, and whether it deletes its row."""
    rows: dict[Any, tuple[Record, bool]] = {}
    for record in records:
        key = (record["session"], *(record[name] for name in spec.key))
        is_deleted = bool(spec.deleted_when)
        for name, value in spec.deleted_when.items():
            wanted = value.replace(tzinfo=UTC) if isinstance(value, datetime) else value
            is_deleted = is_deleted and record[name] == wanted
        rows[key] = (record, is_deleted)
    return rows


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("spec", SPECS)
def test_all_that_fold_records_agree_with_a_plain_fold(
    tmp_path: Path, seed: int, spec: RowKeySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`current`, rebuilt state, verify and check make the same rows, whatever the values are."""
    rng = random.Random(seed)
    # Small, so that what waits in memory is reduced many times.
    monkeypatch.setattr(record_rows, "BUFFERED_ROWS_MAX", 5)
    monkeypatch.setattr(record_scan, "WAITING_RECORDS_MAX", 5)
    monkeypatch.setattr(record_rows, "ROWS_AT_ONCE", 3)
    records = random_records(rng, "T", 60)
    files = write_files(tmp_path, rng, records)
    store = LocalStore(tmp_path)
    folded = plain_fold(records, spec)
    remaining = {key: record for key, (record, is_deleted) in folded.items() if not is_deleted}

    merger = RowMerger(store, "s", SCHEMA, spec)
    catch_up = PartitionCatchUp(partition=PARTITION, files=tuple(files), topic_ids=("T",))
    changes = merger.read_changes(catch_up)
    current = merger.merge(None, changes, PARTITION).to_pylist()
    assert {(row["session"], *(row[name] for name in spec.key)): row for row in current} == {
        key: {name: record[name] for name in merger.schema.names}
        for key, record in remaining.items()
    }
    assert len(current) == len(remaining)

    scanned = RecordScan(store).scan(files, ScanRequest(row_key_spec=spec))
    images = list(scanned.last_rows)
    assert len(list(scanned.first_rows)) == len(folded)
    assert len(images) == len(folded)
    for image in images:
        key = image.key if len(spec.key) > 1 else (image.key,)
        record, is_deleted = folded[image.session, *key]
        row = None if is_deleted else tuple(record[name] for name in spec.columns)
        assert (image.row, image.offset, image.topic_id) == (row, record["offset"], "T")

    tables = list(ParquetJoiner(store, "s").session_tables(PARTITION, "T", files, spec))
    for table in tables:
        last = [record for record in records if record["session"] == table.session][-1]
        assert (table.offset, table.sequence) == (last["offset"], last["sequence"])
        expected = [record for key, record in remaining.items() if key[0] == table.session]
        rows = [tuple(record[name] for name in spec.columns) for record in expected]
        assert sorted(table.rows, key=repr) == sorted(rows, key=repr)
    assert {table.session for table in tables} == {record["session"] for record in records}


@pytest.mark.parametrize("seed", range(12))
def test_a_topic_that_was_created_again_goes_on_with_its_rows(tmp_path: Path, seed: int) -> None:
    """Records of the older topic id come first, whatever their offsets, and later publishes add to
    the rows before.
    """
    rng = random.Random(seed)
    spec = SPECS[1]
    old = random_records(rng, "old", 30)
    new = random_records(rng, "new", 30)
    files = write_files(tmp_path, rng, old) + write_files(tmp_path, rng, new)
    rng.shuffle(files)
    merger = RowMerger(LocalStore(tmp_path), "s", SCHEMA, spec)
    catch_up = PartitionCatchUp(partition=PARTITION, files=tuple(files), topic_ids=("old", "new"))
    rows = merger.merge(None, merger.read_changes(catch_up), PARTITION)
    folded = plain_fold(old + new, spec)
    remaining = [record for record, is_deleted in folded.values() if not is_deleted]
    positions = {(record["topic_id"], record["offset"], record["index"]) for record in remaining}
    assert rows.num_rows == len(positions)
    assert {(row["topic_id"], row["offset"]) for row in rows.to_pylist()} == {
        position[:2] for position in positions
    }


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("spec", SPECS)
def test_records_of_one_row_are_one_group(seed: int, spec: RowKeySpec) -> None:
    """First, last and neighbouring records of each row, and which of them delete it."""
    records = random_records(random.Random(seed), "T", 50)
    table = pa.Table.from_pylist(records, schema=SCHEMA)
    groups = RecordGroups(table, ("session", *spec.key))
    numbers_by_row: dict[Any, list[int]] = {}
    for number, record in enumerate(records):
        key = (record["session"], *(record[name] for name in spec.key))
        numbers_by_row.setdefault(key, []).append(number)
    assert groups.first_rows().tolist() == sorted(rows[0] for rows in numbers_by_row.values())
    assert groups.last_rows().tolist() == sorted(rows[-1] for rows in numbers_by_row.values())
    pairs = {pair for rows in numbers_by_row.values() for pair in pairwise(rows)}
    earlier, later = groups.neighbours
    assert set(zip(earlier.tolist(), later.tolist(), strict=True)) == pairs
    deleted = deleted_mask(table, spec).tolist()
    assert deleted == [spec.deletes_row(record) for record in records]


def test_check_links_the_records_of_a_key_that_is_zero(tmp_path: Path) -> None:
    """-0.0 and 0.0 are one key to a machine, and to Python: the record of one follows that of the
    other.
    """
    schema = record_schema(
        {"op": "string", "row": "float64", "before_row": "float64"},
    )
    owner = {"topic": "in-a", "topic_id": "T", "partition": 0, "index": 0, "session": "x"}
    records = [
        {**owner, "offset": 0, "op": "insert", "row": 0.0, "before_row": None},
        {**owner, "offset": 1, "op": "update", "row": -0.0, "before_row": 0.0},
    ]
    path = tmp_path / "records/in-a/0/0-0-x.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(records, schema=schema), path)
    file = File(path="records/in-a/0/0-0-x.parquet", size_bytes=0, rows=2, digest="")
    spec = RowKeySpec(
        key=("row",), columns=("row",), deleted_when={"op": "delete"}, has_before_images=True
    )
    request = ScanRequest(first_offsets={"T": 0}, row_key_spec=spec)
    scanned = RecordScan(LocalStore(tmp_path)).scan([file], request)
    assert scanned.unlinked_rows == 0
    assert list(scanned.first_rows) == [RowImage("T", "x", 0.0, None, 0)]
    assert list(scanned.last_rows) == [RowImage("T", "x", 0.0, (0.0,), 1)]


def test_a_file_that_is_missing_is_called_so(tmp_path: Path) -> None:
    """A mail may have this reason, and the words of a library would only say it at length."""
    with pytest.raises(UnreadableFileError) as missing:
        RecordScan(LocalStore(tmp_path)).outline("records/a/0/gone.parquet")
    assert str(missing.value) == "records/a/0/gone.parquet: it is missing"
    assert missing.value.path == "records/a/0/gone.parquet"
