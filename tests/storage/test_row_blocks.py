"""Row parts in state files: what is read of them, and how they are merged."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec.msgpack import decode, encode

from seriatim.engine.files import Files, save_state
from seriatim.engine.offsets import Partition
from seriatim.engine.row_parts import (
    NEW_ROW,
    RowSource,
    StoredRow,
    complete_rows,
    hash_key,
    join_rows,
    summarize_state_bytes,
)
from seriatim.engine.session import Session
from seriatim.errors import ConfigError
from seriatim.memory.store import MemoryStore
from seriatim.storage import state_blocks
from seriatim.storage.state_blocks import StateBlocks
from seriatim.storage.state_files import StateFiles

P = Partition("in-a", 0)
ROWS = 20_000


def new_row(key: int, content: str = "") -> StoredRow:
    """A row as the machine gives it."""
    return StoredRow(hash_key((key,)), NEW_ROW, encode((key, content)))


def complete_session(rows: Iterable[StoredRow], **fields: Any) -> Session:
    """A session that is stored row by row, with all of its rows."""
    changes = complete_rows(rows)
    return Session(row_changes=changes, rows_summary=changes.summary, **fields)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of all blocks that are unpacked from now on."""
    numbers: list[int] = []
    read_contents = StateBlocks.read_contents

    def noting(self: StateBlocks, blocks: Iterable[int], **options: Any) -> Iterator[Any]:
        listed = list(blocks)
        numbers.extend(listed)
        return read_contents(self, listed, **options)

    monkeypatch.setattr(StateBlocks, "read_contents", noting)
    return numbers


def saved_table() -> tuple[StateFiles, Files]:
    """A session of many rows, between two others."""
    state = StateFiles(MemoryStore(), "s")
    sessions = {name: Session(state_bytes=name.encode()) for name in ("a", "z")}
    sessions["m"] = complete_session(map(new_row, range(ROWS)), sequence=7)
    files = save_state(state, P, "0-0-a", sessions, ())
    assert [file.rows for file in files] == [ROWS + 3]
    return StateFiles(state.store, "s"), files


def source_of(session: Session) -> RowSource:
    """Where the rows of an open session are."""
    assert session.stored_rows is not None
    return session.stored_rows.source


def test_only_blocks_of_searched_rows_are_unpacked(unpacked: list[int]) -> None:
    """The block of the session, the index, and one block for each of three rows."""
    state, files = saved_table()
    session = state.open_sessions(files, ["m"])["m"]
    assert (session.sequence, session.state_bytes, len(unpacked)) == (7, None, 1)
    keys = [3, 9_000, ROWS - 1]
    rows = source_of(session).find({hash_key((key,)) for key in keys})
    assert sorted(row.number for row in rows) == keys
    assert len(unpacked) == 1 + 1 + 3


def test_rows_that_are_not_there_cost_the_index_alone(unpacked: list[int]) -> None:
    """A thousand keys that nobody has: no block of rows is unpacked."""
    state, files = saved_table()
    session = state.open_sessions(files, ["m"])["m"]
    assert source_of(session).find({hash_key((-1 - key,)) for key in range(1_000)}) == []
    assert len(unpacked) == 1 + 1


def test_other_sessions_are_found_beside_a_table() -> None:
    """Sessions of one value, before and behind the rows of another."""
    state, files = saved_table()
    assert state.load(files, ["z"])["z"].state_bytes == b"z"
    assert state.find_names(files, ["a", "m", "n", "z"]) == {"a", "m", "z"}
    sessions = list(state.all_sessions(files))
    assert [name for name, _ in sessions] == ["a", "m", "z"]
    expected = join_rows([new_row(key).packed for key in range(ROWS)])
    assert sessions[1][1].state_bytes == expected


def test_files_without_row_parts_are_as_before() -> None:
    """They have the form that older code reads; one with row parts does not."""
    forms = []
    for session in (Session(state_bytes=b"x"), complete_session([new_row(1)])):
        store = MemoryStore()
        (file,) = StateFiles(store, "s").save(P, "0-0-a", {"s": session}, [])
        with store.open(file.path) as content:
            parquet = pq.ParquetFile(content)
            forms.append(parquet.metadata.metadata[state_blocks.FORM_KEY])
    assert forms == [b"1", b"2"]


def test_code_that_does_not_know_row_parts_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By exit code 2, and with what to do."""
    state, files = saved_table()
    monkeypatch.setattr(state_blocks, "FORM_VERSION", 1)
    with pytest.raises(ConfigError, match="newer Seriatim: its file has form 2") as refused:
        state.open_sessions(files, ["a"])
    assert refused.value.exit_code == 2
    assert refused.value.next.startswith("install a version")


def test_keys_that_are_equal_have_one_hash() -> None:
    """As Python compares them in the dict of the plain machine."""
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    abroad = noon.astimezone(timezone(timedelta(hours=2)))
    for one, other in [
        (0.0, -0.0),
        (Decimal("1.50"), Decimal("1.5")),
        (Decimal("0.00"), Decimal("-0")),
        (Decimal(100), Decimal("1E+2")),
        (noon, abroad),
    ]:
        assert one == other
        assert hash_key((one,)) == hash_key((other,))
    assert hash_key(("a", 1)) != hash_key(("a", 2))


class TableModel:
    """A table as a dict, beside the same one in state files."""

    def __init__(self, chance: random.Random, *, hashes: int) -> None:
        self.chance = chance
        self.hashes = hashes
        """How many hashes there are: with few, many keys share one."""
        self.rows: dict[int, bytes] = {}
        self.store = MemoryStore()
        self.files: Files = ()
        self.saves = 0

    def hash_of(self, key: int) -> int:
        """Hashes as large as those of real keys."""
        return hash_key((key % self.hashes,))

    def change(self) -> None:
        """A slice: some rows are changed, removed, and added."""
        self.saves += 1
        state = StateFiles(self.store, "s")
        session = state.open_sessions(self.files, ["t"]).get("t")
        if session is None or self.chance.random() < 0.1:
            keys = self.chance.sample(range(60), self.chance.randrange(40))
            self.rows = {key: self._content(key) for key in keys}
            rows = [StoredRow(self.hash_of(key), NEW_ROW, row) for key, row in self.rows.items()]
            session = complete_session(rows)
        else:
            self._change_rows(session)
        stem = f"0-{self.saves}-a"
        self.files = save_state(state, P, stem, {"t": session}, self.files)

    def _change_rows(self, session: Session) -> None:
        stored_rows = session.stored_rows
        assert stored_rows is not None
        keys = self.chance.sample(range(60), self.chance.randrange(8))
        stored_rows.read([self.hash_of(key) for key in keys])
        read_rows = {}
        for row in stored_rows.take_rows():
            key, _ = decode(row.packed)
            read_rows[key] = row
        for key in keys:
            assert (key in read_rows) == (key in self.rows)
            draw = self.chance.random()
            if draw < 0.3:
                read_rows.pop(key, None)
                self.rows.pop(key, None)
            elif draw < 0.9:
                number = read_rows[key].number if key in read_rows else NEW_ROW
                self.rows[key] = self._content(key)
                read_rows[key] = StoredRow(self.hash_of(key), number, self.rows[key])
        session.row_changes = stored_rows.changes(read_rows.values())
        session.rows_summary = session.row_changes.summary
        session.stored_rows = None

    def _content(self, key: int) -> bytes:
        return encode((key, self.chance.random()))

    def merge(self) -> None:
        """Merge the oldest files, as compact does."""
        state = StateFiles(self.store, "s")
        count = self.chance.randrange(1, len(self.files) + 1)
        stem = f"compact-{self.saves}-0"
        merged = state.save(P, stem, {}, self.files[:count])
        self.files = (*merged, *self.files[count:])

    def check(self) -> None:
        """The files have what the dict has, in its order, and the head knows it."""
        session = StateFiles(self.store, "s").load(self.files, ["t"])["t"]
        assert session.state_bytes == join_rows(list(self.rows.values()))
        assert session.rows_summary is not None
        summary = session.rows_summary
        assert (summary.count, summary.digest) == summarize_state_bytes(session.state_bytes)


@pytest.mark.parametrize("hashes", [1, 5, 1_000])
@pytest.mark.parametrize("seed", range(8))
def test_parts_are_the_table_that_they_make(seed: int, hashes: int) -> None:
    """However rows are changed and files merged, also where many keys have the same hash."""
    model = TableModel(random.Random(seed), hashes=hashes)
    for _ in range(40):
        model.change()
        model.check()
        if model.chance.random() < 0.3:
            model.merge()
            model.check()


def test_a_merge_of_all_files_forgets_removals() -> None:
    """They are needed only as long as there is an older file."""
    model = TableModel(random.Random(1), hashes=1_000)
    for _ in range(20):
        model.change()
    state = StateFiles(model.store, "s")
    (file,) = state.save(P, "compact-all-0", {}, model.files)
    assert file.rows == 1 + len(model.rows)
