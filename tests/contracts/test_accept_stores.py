"""What accept needs of every store, real and in memory: records that end sessions, every session, a
witness moved.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from seriatim.engine.files import UnfitRecordsError
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session, SessionEndRecords
from seriatim.ledger.delta_store import DeltaLedger
from seriatim.ledger.model import EntryMark
from seriatim.memory import MemoryFiles, MemoryLedger
from seriatim.storage.record_files import ParquetRecords
from seriatim.storage.state_files import StateFiles
from seriatim.storage.store import LocalStore

A3 = Partition("in-a", 3)
COLUMNS = {"op": "string", "id": "string", "n": "int64"}
Made = tuple[Any, Callable[[Any], list[dict[str, Any]]]]


@pytest.fixture(params=["memory", "parquet", "parquet without topic"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    """A record store, and how to read a file of it."""
    if request.param == "memory":
        files = MemoryFiles(COLUMNS)
        return files, lambda file: files.read(file).rows
    leave_out = ("topic",) if "without" in request.param else ()
    return ParquetRecords(
        LocalStore(tmp_path), COLUMNS, "zstd", leave_out
    ), lambda file: pq.ParquetFile(tmp_path / file.path).read().to_pylist()


def ending(count: int, first: int = 0) -> SessionEndRecords:
    """Records of two sessions."""
    ended = SessionEndRecords()
    ended.add(
        "s",
        Session(timestamp=1000, sequence=7),
        first,
        [("delete", f"r{i}", None) for i in range(count)],
    )
    ended.add("t", Session(timestamp=2000), first + count, [("delete", "q", 4)])
    return ended


def test_records_that_end_sessions_share_an_offset(store: Made) -> None:
    """Each has its session's time and sequence, and a number of its own; written in as many parts
    as one likes.
    """
    files, read = store
    writer = files.record_writer(A3, "old-id", "0-41-a")
    writer.write_end_records(41, ending(2))
    writer.write_end_records(41, ending(1, 3))
    file = writer.close()
    assert (file.rows, file.first_offset, file.last_offset) == (5, 41, 41)
    rows = read(file)
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert {
        (row["topic_id"], row["partition"], row["offset"], row["source_offset"]) for row in rows
    } == {("old-id", 3, 41, 41)}
    assert [(row["session"], row["sequence"], row["id"], row["n"]) for row in rows[:3]] == [
        ("s", 7, "r0", None),
        ("s", 7, "r1", None),
        ("t", None, "q", 4),
    ]
    times = [row["timestamp"] for row in rows]
    stamps = [time if isinstance(time, int) else round(time.timestamp() * 1000) for time in times]
    assert stamps == [1000, 1000, 2000, 1000, 2000]


def test_values_that_do_not_fit_are_named(store: Made) -> None:
    """By their row: whose session it is can be told."""
    ended = SessionEndRecords()
    ended.add("s", Session(), 0, [("delete", "a", 1), ("delete", "b", "one")])
    with pytest.raises(UnfitRecordsError) as unfit:
        store[0].record_writer(A3, "id", "0-0-a").write_end_records(0, ended)
    assert unfit.value.rows == [1]


@pytest.mark.parametrize("kind", ["memory", "parquet"])
def test_every_session_comes_once_and_newest(kind: str, tmp_path: Path) -> None:
    """However many files there are."""
    files: Any = MemoryFiles(COLUMNS)
    if kind != "memory":
        files = StateFiles(LocalStore(tmp_path), "s")
    (first,) = files.save(
        A3, "0-0-a", {f"s{i}": Session(state_bytes=b"old", timestamp=1) for i in range(5)}, ()
    )
    (second,) = files.save(A3, "0-5-b", {"s3": Session(state_bytes=b"new", timestamp=2)}, ())
    found = list(files.all_sessions((first, second)))
    assert sorted(name for name, _ in found) == ["s0", "s1", "s2", "s3", "s4"]
    assert {session.state_bytes for name, session in found if name == "s3"} == {b"new"}
    assert list(files.all_sessions(())) == []


@pytest.mark.parametrize("kind", ["memory", "delta"])
def test_a_witness_is_moved_aside(kind: str, tmp_path: Path) -> None:
    """It is a witness no more, and what it was is not lost."""
    ledger: Any = MemoryLedger() if kind == "memory" else DeltaLedger(LocalStore(tmp_path))
    ledger.put_witness(EntryMark(5, "ab" * 32))
    path = ledger.archive_witness("because")
    assert ledger.witness() is None
    assert path == "head-5-abababababab.json"
    if kind == "delta":
        assert json.loads((tmp_path / path).read_text()) == {
            "sequence": 5,
            "sha256": "ab" * 32,
            "accepted because": "because",
        }
