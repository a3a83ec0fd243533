"""Streams on real files whose sessions are stored row by row: what every command does with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seriatim.engine import row_parts
from seriatim.engine.crash_points import COMPACT_POINTS, arm
from seriatim.engine.files import Files
from seriatim.engine.offsets import Partition
from seriatim.engine.row_parts import StoredRows
from seriatim.engine.session import Session
from seriatim.engine.table import TableMachine
from seriatim.operations import compact as compact_module
from seriatim.operations.release import release_session
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun
from seriatim.operations.rewind import same_session
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.record_files import ParquetRewriter
from seriatim.storage.row_blocks import RowParts
from seriatim.storage.state_files import StateFiles
from seriatim.storage.store import LocalStore
from tests.contracts.disk_streams import DiskStream
from tests.contracts.verify_helper import first_difference, verify
from tests.operations.compact_helper import run_compaction
from tests.operations.test_crash_points import Killed, killer

A0 = Partition("in-a", 0)
ROW_IDS = [f"r{number}" for number in range(40)]


@pytest.fixture(autouse=True)
def small_tables_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session of three rows is stored row by row, and two state files are worth merging."""
    monkeypatch.setattr(TableMachine, "rows_together_max", 2)
    monkeypatch.setattr(compact_module, "STATE_FILES_MERGE_MIN", 2)


def create_stream(root: Path) -> DiskStream:
    """Session t is a table; x is a small one. Each slice changes a row of each."""
    stream = DiskStream(root)
    stream.kafka.create("in-a", 1)
    stream.send("in-a/0", "t", ["a", *ROW_IDS])
    stream.send("in-a/0", "x", ["a"])
    stream.run()
    for number in range(6):
        stream.send("in-a/0", "t", number)
        stream.send("in-a/0", "x", number)
        stream.run()
    return stream


def state_of(stream: DiskStream) -> Files:
    """The state files now."""
    return stream.accounts()[A0].state


def load(stream: DiskStream, files: Files | None = None, name: str = "t") -> Session:
    """A session as a new process loads it, with all of its rows."""
    state = StateFiles(LocalStore(stream.root), "s")
    return state.load(state_of(stream) if files is None else files, [name])[name]


def values_of(stream: DiskStream, files: Files | None = None) -> dict[str, Any]:
    """The column v of the table's rows."""
    session = load(stream, files)
    rows = stream.runner.to_plain(stream.runner.load(session.state_bytes or b"", 1))["rows"]
    return {row["id"]: row["v"] for row in rows}


def compact(stream: DiskStream) -> None:
    """Merge files, as a process of its own does."""
    run_compaction(stream, rewriter=ParquetRewriter(LocalStore(stream.root), "s"))


def repair(stream: DiskStream, **request: Any) -> None:
    """Repair what is damaged or asked for."""
    open_stream = stream.open().with_ports(joiner=ParquetJoiner(LocalStore(stream.root), "s"))
    RepairRun(open_stream).apply(plan_repair(open_stream, RepairRequest(**request)), 1000)


def expected_values(last: int) -> dict[str, Any]:
    """The table after the update with this value."""
    return {"a": last, **dict.fromkeys(ROW_IDS, 0)}


def test_slices_write_what_they_touch_and_verify_agrees(tmp_path: Path) -> None:
    """The first file keeps all rows; later ones have two sessions and one row, merged now and then."""
    stream = create_stream(tmp_path)
    base, *later = state_of(stream)
    assert base.rows == 1 + 1 + 41
    assert later
    assert all(file.rows <= 3 for file in later)
    assert values_of(stream) == expected_values(5)
    assert list(values_of(stream)) == ["a", *ROW_IDS]
    assert verify(tmp_path, everything=True).difference is None
    opened = StateFiles(LocalStore(tmp_path), "s").open_sessions(state_of(stream), ["t", "x"])
    assert (opened["t"].is_head, opened["x"].is_head) == (True, False)


def test_an_older_version_of_the_state_is_there(tmp_path: Path) -> None:
    """Each entry names the files whose parts make the table as it was."""
    stream = create_stream(tmp_path)
    sequence = stream.ledger.head("s").ledger.sequence
    for back in range(5):
        ledger = stream.ledger.ledger_at("s", sequence - back)
        files = ledger.partitions[str(A0)].state
        assert values_of(stream, files) == expected_values(5 - back)


def test_compaction_changes_nothing_and_folding_goes_on(tmp_path: Path) -> None:
    """All parts become one; a table that is removed row by row is gone then."""
    stream = create_stream(tmp_path)
    stream.send("in-a/0", "t", None)
    stream.run()
    before = load(stream)
    for _ in range(8):
        stream.send("in-a/0", "x", 1)
        stream.run()
    compact(stream)
    (file,) = state_of(stream)
    assert file.rows == 1 + 1 + 40
    assert load(stream).state_bytes == before.state_bytes
    assert verify(tmp_path).difference is None
    stream.send("in-a/0", "t", ["a", "b", "c", "d"], 9)
    stream.run()
    assert values_of(stream) == {"a": 9, "b": 0, "c": 0, "d": 0}
    assert verify(tmp_path, everything=True).difference is None


@pytest.mark.parametrize("times", [1, 2], ids=["records", "state"])
@pytest.mark.parametrize(
    "point", [*COMPACT_POINTS[:3], "record-file-open", "record-file-half", "committed"]
)
def test_a_crash_in_a_merge_changes_nothing(point: str, times: int, tmp_path: Path) -> None:
    """Killed at any point of a compaction of records or state; then slices and a compaction go on."""
    stream = create_stream(tmp_path)
    for _ in range(4):
        stream.send("in-a/0", "x", 1)
        stream.run()
    arm(killer(point, times))
    try:
        with pytest.raises(Killed):
            compact(stream)
    finally:
        arm(None)
    assert values_of(stream) == expected_values(5)
    stream.send("in-a/0", "t", 6)
    stream.run()
    compact(stream)
    assert len(state_of(stream)) == 1
    assert values_of(stream) == expected_values(6)
    assert verify(tmp_path, everything=True).difference is None


@pytest.mark.parametrize("point", ["state-loaded", "record-file-half", "state-file-written"])
def test_a_crash_in_a_slice_changes_nothing(point: str, tmp_path: Path) -> None:
    """The next slice folds the same messages on the same parts."""
    stream = create_stream(tmp_path)
    stream.send("in-a/0", "t", 6)
    arm(killer(point, 1))
    try:
        with pytest.raises(Killed):
            stream.run()
    finally:
        arm(None)
    assert values_of(stream) == expected_values(5)
    stream.run()
    assert values_of(stream) == expected_values(6)
    assert verify(tmp_path, everything=True).difference is None


def test_a_released_session_goes_on_with_its_rows(tmp_path: Path) -> None:
    """In quarantine and out of it: only the head is written."""
    stream = create_stream(tmp_path)
    stream.send("in-a/0", "t", b"poison", 6)
    stream.run()
    assert load(stream).finding == "poison"
    assert values_of(stream) == expected_values(5)
    release_session(stream.open(), "t", "looked at")
    assert (state_of(stream)[0].rows, load(stream).finding) == (43, None)
    assert state_of(stream)[-1].rows <= 3
    assert values_of(stream) == expected_values(5)
    stream.send("in-a/0", "t", 8)
    stream.run()
    assert verify(tmp_path, everything=True).difference is None


def test_a_repair_folds_the_same_rows(tmp_path: Path) -> None:
    """A lost record file is made again. Sessions are compared without reading all of their rows."""
    stream = create_stream(tmp_path)
    before = load(stream)
    files = stream.ledger.active_files(stream.ledger.head("s"))
    (tmp_path / max(files, key=lambda file: file.first_offset).path).unlink()
    repair(stream)
    assert load(stream) == before
    assert verify(tmp_path).difference is None
    stream.send("in-a/0", "t", 6)
    stream.run()
    assert values_of(stream) == expected_values(6)
    assert verify(tmp_path, everything=True).difference is None


def test_a_table_whose_first_part_is_lost_is_made_again(tmp_path: Path) -> None:
    """Newer files have the head and some rows. That is not the table, so it is rebuilt."""
    stream = create_stream(tmp_path)
    (tmp_path / state_of(stream)[0].path).unlink()
    repair(stream)
    assert values_of(stream) == expected_values(5)
    stream.send("in-a/0", "t", ["a", "b", "c"], 7)
    stream.run()
    assert values_of(stream) == {"a": 7, "b": 0, "c": 0}
    assert verify(tmp_path).difference is None


def test_verify_proves_what_the_head_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice that computes a wrong digest is found out: a repair would trust it."""
    stream = create_stream(tmp_path)
    stream.send("in-a/0", "t", 6)
    with monkeypatch.context() as patched:
        patched.setattr(row_parts, "_row_digest", lambda _: 1)
        stream.run()
    difference = first_difference(tmp_path)
    assert difference.description == "a session has other rows than its head says"
    assert (difference.promise, difference.session) == ("folded", "t")


class TestSameSession:
    """Whether two sessions agree, by what their heads know of their rows."""

    @pytest.fixture(autouse=True)
    def _no_rows_are_read(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        def refuse(*_: Any) -> None:
            pytest.fail("rows were read")

        with monkeypatch.context() as patched:
            for reading in ("find", "read_all"):
                patched.setattr(RowParts, reading, refuse)
            yield

    def heads(self, tmp_path: Path, *rows: list[str]) -> list[Session]:
        """Sessions of the same fields with these rows, each opened from a file of its own."""
        runner = DiskStream(tmp_path).runner
        state = StateFiles(LocalStore(tmp_path), "s")
        sessions = []
        for number, row_ids in enumerate(rows):
            table = {row_id: (row_id, 1, None, None) for row_id in row_ids}
            changes = runner.row_changes(table)
            assert changes is not None
            session = Session(row_changes=changes, rows_summary=changes.summary, sequence=3)
            files = state.save(A0, f"0-{number}-a", {"t": session}, ())
            opened = state.open_sessions(files, ["t"])["t"]
            assert isinstance(opened.stored_rows, StoredRows)
            sessions.append(opened)
        return sessions

    def test_by_count_and_digest(self, tmp_path: Path) -> None:
        """The order of rows does not matter, and every row does."""
        runner = DiskStream(tmp_path).runner
        one, turned, more, different = self.heads(
            tmp_path, ["a", "b", "c"], ["c", "a", "b"], ["a", "b", "c", "d"], ["a", "b", "x"]
        )
        assert same_session(one, turned, runner)
        assert not same_session(one, more, runner)
        assert not same_session(one, different, runner)

    def test_with_a_session_that_is_one_value(self, tmp_path: Path) -> None:
        """Which sessions are stored row by row depends on how slices were cut."""
        runner = DiskStream(tmp_path).runner
        (head,) = self.heads(tmp_path, ["a", "b", "c"])
        for row_ids, is_same in ((["b", "c", "a"], True), (["a", "b"], False)):
            table = {row_id: (row_id, 1, None, None) for row_id in row_ids}
            value = Session(state_bytes=runner.dump(table), sequence=3)
            assert same_session(head, value, runner) is is_same
            assert same_session(value, head, runner) is is_same
        assert not same_session(head, Session(), runner)
