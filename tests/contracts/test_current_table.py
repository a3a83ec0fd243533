"""The table `current` on disk: real record files, a real Delta table, read by any reader."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from seriatim.engine.offsets import Partition
from seriatim.engine.records import RowKeySpec
from seriatim.errors import IntegrityError, PlatformError
from seriatim.operations.publish import publish_current
from seriatim.storage.current_table import DeltaCurrent
from seriatim.storage.record_files import record_schema
from seriatim.storage.store import LocalStore
from seriatim.stream import TableSettings
from tests.contracts.disk_streams import DiskStream, create_filled_output
from tests.sim.rewriting import Rewriter


def current_of(made: DiskStream, keyed: RowKeySpec | None = None) -> DeltaCurrent:
    """The table as a process of its own opens it."""
    keyed = keyed or made.runner.row_key_spec
    assert keyed is not None
    return DeltaCurrent(LocalStore(made.root), "s", record_schema(made.runner.columns), keyed)


def rows(made: DiskStream) -> list[dict[str, Any]]:
    """What any Delta reader sees."""
    found = (
        DeltaTable(made.root / "current")
        .to_pyarrow_dataset()
        .to_table(use_threads=False)
        .to_pylist()
    )
    return sorted(
        found, key=lambda row: (row["topic"], row["partition"], row["session"], str(row["id"]))
    )


def values(made: DiskStream) -> dict[tuple[Any, ...], Any]:
    """Each row's value, by what names it."""
    found = {
        (row["topic"], row["partition"], row["session"], row["id"]): row["v"] for row in rows(made)
    }
    assert len(found) == len(rows(made))
    return found


def active(made: DiskStream) -> set[str]:
    """The files of the table."""
    return {uri.split("/current/")[1] for uri in DeltaTable(made.root / "current").file_uris()}


def test_readers_see_the_rows_of_one_entry(tmp_path: Path) -> None:
    """With topic, topic id, partition, session, and offset, sequence and time of the record that
    last touched each.
    """
    made = create_filled_output(tmp_path)
    publish_current("s", made.ledger, current_of(made))
    assert rows(made)[0] == {
        "topic": "in-a",
        "topic_id": "id-1",
        "partition": 0,
        "session": "x",
        "offset": 9,
        "sequence": 7,
        "timestamp": datetime(1970, 1, 1, 0, 0, 0, 9000, UTC),
        "id": "a",
        "v": 0,
        "at": datetime(2026, 1, 1, 10, 0, tzinfo=UTC),
        "cost": Decimal("1.50"),
    }
    last = made.ledger.head("s").ledger
    commit = DeltaTable(made.root / "current").history(1)[0]["seriatim"]
    assert (commit["sequence"], commit["sha256"], commit["key"]) == (
        last.sequence,
        last.sha256,
        ["id"],
    )


def test_only_touched_partitions_are_written_anew(tmp_path: Path) -> None:
    """The files of the others stay as they are."""
    made = create_filled_output(tmp_path)
    publish_current("s", made.ledger, current_of(made))
    before = active(made)
    made.send("in-a/1", "x", 77)
    made.run()
    done = publish_current("s", made.ledger, current_of(made))
    assert (done.written.written_files, done.written.removed_files, done.written.written_rows) == (
        1,
        1,
        4,
    )
    assert {path for path in before if not path.startswith("in-a/1/")} < active(made)
    assert values(made)["in-a", 1, "x", "a"] == 77


def test_large_partitions_fall_into_parts_of_which_few_are_written(tmp_path: Path) -> None:
    """A part holds the sessions whose hash ends alike; one update rewrites one of them."""
    made = DiskStream(tmp_path)
    made.kafka.create("in-a", 1)
    for number in range(64):
        made.send("in-a/0", f"session-{number}", ["a", "b", "c"])
    made.run()

    def opened() -> DeltaCurrent:
        current = current_of(made)
        current.part_rows_max = 24
        return current

    publish_current("s", made.ledger, opened())
    parts = len(active(made))
    assert 8 <= parts <= 24
    assert len(values(made)) == 64 * 3
    made.send("in-a/0", "session-7", 5)
    made.run()
    done = publish_current("s", made.ledger, opened())
    assert (done.written.written_files, done.written.removed_files) == (1, 1)
    assert len(active(made)) == parts
    assert values(made)["in-a", 0, "session-7", "a"] == 5
    for number in range(64):
        made.send("in-a/0", f"session-{number}", [])
    made.run()
    publish_current("s", made.ledger, opened())
    assert active(made) == set()
    made.send("in-a/0", "session-9", ["z"])
    made.run()
    publish_current("s", made.ledger, opened())
    assert values(made) == {("in-a", 0, "session-9", "z"): 0}


KINDS = {
    "id": "string",
    "i": "int64",
    "f": "float64",
    "b": "bool",
    "t": "timestamp",
    "d": "date",
    "x": "binary",
    "m": "decimal(9,2)",
}


@pytest.mark.parametrize("key", [*KINDS, "all"])
def test_any_column_may_be_of_the_key(tmp_path: Path, key: str) -> None:
    """Of every type; the last record of each wins."""
    table = TableSettings(key=tuple(KINDS) if key == "all" else (key,), columns=KINDS, before=False)
    made = DiskStream(tmp_path, table=table, tier="none", sequence=None)
    made.kafka.create("in-a", 1)
    some = {
        "id": "ä",
        "i": -3,
        "f": 0.5,
        "b": True,
        "t": "2026-01-01T12:00:00+02:00",
        "d": "2026-01-02",
    }
    first: dict[str, Any] = {**some, "x": "AP8=", "m": "1.50"}
    other = {
        "id": "b",
        "i": 4,
        "f": 1.5,
        "b": False,
        "t": "2026-01-01T00:00:00Z",
        "d": "2025-01-02",
        "x": "",
        "m": "0",
    }
    for body in (
        {"type": "snapshot", "rows": [first, other]},
        {"type": "update", **first, **({} if key in ("i", "all") else {"i": 9})},
        {"type": "delete", **other},
    ):
        made.kafka.produce("in-a", "s", json.dumps(body).encode())
    made.run(messages_max=1)
    for sequence in range(1, made.ledger.head("s").ledger.sequence + 1):
        publish_current("s", made.ledger, current_of(made), sequence=sequence)
    (row,) = (
        DeltaTable(tmp_path / "current")
        .to_pyarrow_dataset()
        .to_table(use_threads=False)
        .to_pylist()
    )
    assert (row["i"], row["offset"]) == (-3 if key in ("i", "all") else 9, 1)
    assert (row["d"], row["x"], row["m"]) == (date(2026, 1, 2), b"\x00\xff", Decimal("1.50"))


def test_zero_is_one_row_whatever_its_sign(tmp_path: Path) -> None:
    """-0.0 is the machine's 0.0, so its later word replaces the row, within a slice and from one entry to the next."""
    made = DiskStream(
        tmp_path,
        table=TableSettings(key=("id",), columns={"id": "float64", "v": "int64"}, before=False),
    )
    made.kafka.create("in-a", 1)
    for number, (kind, zero) in enumerate(
        [("update", "-0.0"), ("update", "0.0"), ("update", "-0.0"), ("delete", "0")]
    ):
        if not number:
            made.kafka.produce(
                "in-a", "s", b'{"type":"snapshot","seq":1,"rows":[{"id":0.0,"v":1},{"id":7,"v":7}]}'
            )
        body = f'{{"type":"{kind}","seq":{number + 2},"id":{zero},"v":{number}}}'
        made.kafka.produce("in-a", "s", body.encode())
        if number != 1:
            made.run()
            publish_current("s", made.ledger, current_of(made))
            assert [row["v"] for row in rows(made)] == ([7] if kind == "delete" else [number, 7])


def test_a_table_that_others_changed_is_made_again(tmp_path: Path) -> None:
    """Whatever they did to it."""
    made = create_filled_output(tmp_path)
    publish_current("s", made.ledger, current_of(made))
    before = rows(made)
    table = DeltaTable(tmp_path / "current")
    write_deltalake(
        table, pa.table(table.to_pyarrow_dataset().to_table(use_threads=False)), mode="append"
    )
    assert len(rows(made)) == 2 * len(before)
    done = publish_current("s", made.ledger, current_of(made))
    assert (done.previous_sequence, done.has_changed) == (-1, True)
    assert rows(made) == before


def test_a_table_with_another_key_is_made_again(tmp_path: Path) -> None:
    """The machine's records name other columns than before."""
    made = create_filled_output(tmp_path)
    publish_current("s", made.ledger, current_of(made))
    keyed = RowKeySpec(key=("v",), columns=("id", "v", "at", "cost"), deleted_when={"op": "delete"})
    assert publish_current("s", made.ledger, current_of(made, keyed)).previous_sequence == -1
    assert len(
        {(row["partition"], row["topic"], row["session"], row["v"]) for row in rows(made)}
    ) == len(rows(made))
    assert not publish_current("s", made.ledger, current_of(made, keyed)).has_changed


def test_records_that_others_optimized_are_read_all_the_same(tmp_path: Path) -> None:
    """An OPTIMIZE mixes partitions in a file: each takes its own rows."""
    made = create_filled_output(tmp_path)
    publish_current("s", made.ledger, current_of(made), sequence=4)
    publish_current("s", made.ledger, current_of(made))
    expected = rows(made)
    DeltaTable(tmp_path / "records").optimize.compact()
    made.send("in-a/0", "x", 55)
    made.run()
    publish_current("s", made.ledger, current_of(made), rebuild=True)
    again = values(made)
    assert again.pop(("in-a", 0, "x", "a")) == 55
    assert again == {
        (row["topic"], row["partition"], row["session"], row["id"]): row["v"]
        for row in expected
        if (row["topic"], row["partition"], row["session"], row["id"]) != ("in-a", 0, "x", "a")
    }


def test_what_was_compacted_since_is_not_counted_twice(tmp_path: Path) -> None:
    """The file that has the new records has old ones too."""
    made = create_filled_output(tmp_path)
    publish_current("s", made.ledger, current_of(made))
    made.send("in-a/0", "x", None, 8)
    made.run(messages_max=1)
    rewriter = Rewriter(made, Random(1))
    for _ in range(4):
        rewriter.compact(Partition("in-a", 0))
    done = publish_current("s", made.ledger, current_of(made))
    assert [catch.is_full_rebuild for catch in done.catch_ups] == [False]
    stepwise = rows(made)
    publish_current("s", made.ledger, current_of(made), rebuild=True)
    assert rows(made) == stepwise


def test_a_lost_record_file_is_named(tmp_path: Path) -> None:
    """Nothing is published then, and the table stays as it was."""
    made = create_filled_output(tmp_path)
    publish_current("s", made.ledger, current_of(made), sequence=4)
    before = rows(made)
    lost = next(
        file for file in made.ledger.files_at("s", 8) if file.path.startswith("records/in-b/0/")
    )
    (tmp_path / lost.path).unlink()
    with pytest.raises(IntegrityError, match="is missing") as told:
        publish_current("s", made.ledger, current_of(made))
    assert lost.path in told.value.message
    assert "seriatim verify s" in told.value.next
    assert rows(made) == before


def test_a_broken_table_is_told_with_the_way_out(tmp_path: Path) -> None:
    """It is made of the records: nothing is lost with it."""
    made = create_filled_output(tmp_path)
    publish_current("s", made.ledger, current_of(made))
    for path in (tmp_path / "current" / "_delta_log").iterdir():
        path.write_text("{")
    with pytest.raises(PlatformError, match="cannot be read") as told:
        publish_current("s", made.ledger, current_of(made))
    assert "out of the way" in told.value.next


def test_old_files_go_and_what_a_crash_left_as_well(tmp_path: Path) -> None:
    """Those that readers may still have open stay."""
    made = create_filled_output(tmp_path)
    publish_current("s", made.ledger, current_of(made), sequence=4)
    publish_current("s", made.ledger, current_of(made))
    (tmp_path / "current" / "in-a" / "0" / "9-0-0-000000000000.parquet").write_text("half a file")
    files = {
        str(path.relative_to(tmp_path / "current"))
        for path in (tmp_path / "current").rglob("*.parquet")
    }
    current = current_of(made)
    assert current.keep_hours == 24
    assert current.vacuum() == []
    current.keep_hours = 0
    assert set(current.vacuum()) == files - active(made)
    expected = rows(made)
    made.send("in-a/1", "x", 3)
    made.run()
    done = publish_current("s", made.ledger, current_of(made))
    assert done.previous_sequence >= 0, "a vacuum is no change by others"
    assert len(rows(made)) == len(expected)


def test_records_are_reduced_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds the rows that changed, not the records: however often that is done, the last
    word wins.
    """
    made = create_filled_output(tmp_path)
    publish_current("s", made.ledger, current_of(made))
    expected = rows(made)
    monkeypatch.setattr("seriatim.storage.record_rows.BUFFERED_ROWS_MAX", 2)
    publish_current("s", made.ledger, current_of(made), rebuild=True)
    assert rows(made) == expected
