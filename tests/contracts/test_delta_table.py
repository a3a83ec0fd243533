"""The Delta tables below an output path: every commit is made on exactly the version that was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from seriatim.ledger.model import EntryMark
from seriatim.ports import CommitConflictError
from seriatim.storage.delta_table import (
    ColumnDifference,
    MarkedTable,
    TableFile,
    TableVersion,
)
from seriatim.storage.store import LocalStore

SCHEMA = pa.schema([("offset", pa.int64()), ("topic", pa.string())])


def table_at(root: Path, **options: Any) -> MarkedTable:
    """The table `rows`, as a process of its own opens it."""
    return MarkedTable(LocalStore(root), "rows", SCHEMA, **options)


def written_file(table: MarkedTable, name: str, *offsets: int) -> TableFile:
    """A data file that no commit names yet."""
    rows = pa.table({"offset": offsets, "topic": ["a"] * len(offsets)}, SCHEMA)
    path = Path(table.url) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path)
    return TableFile(
        key=f"rows/{name}",
        size_bytes=path.stat().st_size,
        rows=len(offsets),
        lowest={"offset": min(offsets)},
        highest={"offset": max(offsets)},
        null_counts={"offset": 0},
        partition_values={"topic": "a"},
    )


def mark_of(sequence: int) -> dict[str, Any]:
    """The mark of a commit that reaches an entry."""
    return {"sequence": sequence, "sha256": f"sha-{sequence}"}


def filled_table(root: Path, versions: int = 2, **options: Any) -> MarkedTable:
    """A table with one file for each version."""
    table = table_at(root, **options)
    for number in range(versions):
        file = written_file(table, f"{number}.parquet", number)
        table.commit(table.load(), mark_of(number), [file])
    return table


def loaded_from(table: MarkedTable) -> TableVersion:
    """The table as it is, which must be there."""
    loaded = table.load()
    assert loaded is not None
    return loaded


def offsets_in(table: MarkedTable) -> list[int]:
    """What any Delta reader sees."""
    rows = DeltaTable(table.url).to_pyarrow_dataset().to_table(use_threads=False)
    return sorted(rows.column("offset").to_pylist())


def test_a_table_is_created_by_its_first_commit(tmp_path: Path) -> None:
    """With its columns and settings, and empty if need be."""
    table = table_at(tmp_path / "new", settings={"delta.dataSkippingStatsColumns": "offset"})
    assert table.load() is None
    assert table.commit(None, mark_of(3)) == 0
    loaded = loaded_from(table)
    assert table.last_mark(loaded, EntryMark) == EntryMark(3, "sha-3")
    assert (table.files(loaded), table.column_difference(loaded)) == ({}, None)
    assert loaded.delta.metadata().configuration == {"delta.dataSkippingStatsColumns": "offset"}
    with pytest.raises(CommitConflictError):
        table.commit(None, mark_of(4))


@pytest.mark.parametrize("parts", [(), ("topic",)], ids=["plain", "partitioned"])
def test_files_come_back_as_they_were_added(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """With sizes and statistics; a removed file is gone, and the others stay."""
    table = table_at(tmp_path, partition_by=parts)
    files = [written_file(table, name, 5, 7) for name in ("x.parquet", "in-a/0/y.parquet")]
    table.commit(None, mark_of(0), files)
    stored = table.files(loaded_from(table))
    assert list(stored) == [file.key for file in files]
    for file in files:
        same = stored[file.key]
        assert (same.size_bytes, same.rows) == (file.size_bytes, 2)
        assert (same.lowest["offset"], same.highest["offset"]) == (5, 7)
        assert same.null_counts["offset"] == 0
        assert [same.partition_values[name] for name in parts] == ["a" for _ in parts]
    table.commit(loaded_from(table), mark_of(1), [], [files[0].key])
    assert list(table.files(loaded_from(table))) == [files[1].key]
    assert offsets_in(table) == [5, 7]


@pytest.mark.parametrize("replaces_all", [False, True])
def test_a_commit_on_a_version_that_is_not_the_newest_is_refused(
    tmp_path: Path, replaces_all: bool
) -> None:
    """Whatever the two commits do. A retry inside delta-rs would accept an append."""
    table = filled_table(tmp_path)
    stale = loaded_from(table)
    table.commit(loaded_from(table), mark_of(2), [written_file(table, "2.parquet", 2)])
    late = written_file(table, "late.parquet", 9)
    with pytest.raises(CommitConflictError):
        table.commit(stale, mark_of(2), [late], replaces_all=replaces_all)
    assert offsets_in(table) == [0, 1, 2]


def test_a_file_that_is_not_in_the_table_is_not_removed(tmp_path: Path) -> None:
    """Nothing of such a commit happens."""
    table = filled_table(tmp_path)
    late = written_file(table, "late.parquet", 9)
    with pytest.raises(CommitConflictError, match=r"rows/other\.parquet is not in the table"):
        table.commit(loaded_from(table), mark_of(2), [late], ["rows/other.parquet"])
    assert offsets_in(table) == [0, 1]


def test_a_commit_may_replace_all(tmp_path: Path) -> None:
    """Files and columns, in one version."""
    table = filled_table(tmp_path)
    wider = MarkedTable(table.store, "rows", SCHEMA.append(pa.field("more", pa.string())))
    assert wider.column_difference(loaded_from(table)) == ColumnDifference("more", "", "string")
    fresh = written_file(table, "fresh.parquet", 9)
    assert wider.commit(loaded_from(table), mark_of(9), [fresh], replaces_all=True) == 2
    assert wider.column_difference(loaded_from(table)) is None
    assert table.column_difference(loaded_from(table)) == ColumnDifference("more", "string", "")
    assert offsets_in(table) == [9]


def test_commits_are_those_of_the_loaded_version(tmp_path: Path) -> None:
    """Newest first, each with its own number, whatever was committed since. `DeltaTable.history`
    counts later commits in, and numbers them from the loaded version down.
    """
    table = filled_table(tmp_path, 3)
    loaded = loaded_from(table)
    table.commit(loaded_from(table), mark_of(7))
    commits = list(table.commits(loaded))
    assert [commit.version for commit in commits] == [2, 1, 0]
    assert [commit.mark for commit in commits] == [mark_of(2), mark_of(1), mark_of(0)]
    assert table.last_mark(loaded, EntryMark) == EntryMark(2, "sha-2")


def test_commits_of_others_have_no_mark(tmp_path: Path) -> None:
    """They say who made them, and whether they changed rows."""
    table = filled_table(tmp_path)
    loaded_from(table).delta.optimize.compact()
    loaded_from(table).delta.delete("offset = 1")
    commits = list(table.commits(loaded_from(table)))
    seen = [(one.version, one.mark is None, one.changes_data, one.operation) for one in commits]
    assert seen[:2] == [(3, True, True, "DELETE"), (2, True, False, "OPTIMIZE")]
    assert [one.version for one in commits] == [3, 2, 1, 0]
    assert "delta-rs" in commits[0].author
    assert table.last_mark(loaded_from(table), EntryMark) == EntryMark(1, "sha-1")


def test_a_log_that_was_cleaned_up_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """Behind a checkpoint, holes and all."""
    table = filled_table(tmp_path, 6)
    loaded_from(table).delta.create_checkpoint()
    log = tmp_path / "rows" / "_delta_log"
    for version in (0, 2, 3):
        (log / f"{version:020d}.json").unlink()
    assert [commit.version for commit in table.commits(loaded_from(table))] == [5, 4, 1]
    assert offsets_in(table) == [0, 1, 2, 3, 4, 5]


def test_a_version_of_before_can_be_loaded(tmp_path: Path) -> None:
    """With its own files and marks."""
    table = filled_table(tmp_path, 3)
    earlier = table.load(version=1)
    assert earlier is not None
    assert sorted(table.files(earlier)) == ["rows/0.parquet", "rows/1.parquet"]
    assert table.last_mark(earlier, EntryMark) == EntryMark(1, "sha-1")


def test_files_that_left_the_table_are_deleted(tmp_path: Path) -> None:
    """With `full` those that no commit named as well; unfinished ones always."""
    table = filled_table(tmp_path)
    assert table_at(tmp_path / "nowhere").vacuum(0) == []
    table.commit(loaded_from(table), mark_of(2), [], ["rows/0.parquet"])
    written_file(table, "stray.parquet", 9)
    table.store.writer("rows/killed.parquet").write(b"half a file")
    assert table.vacuum(1) == []
    assert list(table.store.unfinished_keys("rows/")) == []
    table.vacuum(0)
    assert _data_files(tmp_path) == {"1.parquet", "stray.parquet"}
    table.vacuum(0, full=True)
    assert _data_files(tmp_path) == {"1.parquet"}
    assert offsets_in(table) == [1]


def _data_files(root: Path) -> set[str]:
    return {path.name for path in (root / "rows").glob("*.parquet")}
