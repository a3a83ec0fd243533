"""One contract for fakes and real adapters: what the steps rely on holds for both."""

from __future__ import annotations

import itertools
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seriatim.adapters.arrow import ArrowDigests, ArrowStretch
from seriatim.adapters.delta import DeltaLedger
from seriatim.adapters.memory import MemoryClock, MemoryDigests, MemoryFiles, MemoryLedger
from seriatim.adapters.parquet import ParquetRecords, record_schema
from seriatim.adapters.state import ParquetState
from seriatim.core.errors import FencedError, IntegrityError
from seriatim.core.fold import Folded, Kept, Session
from seriatim.core.ledger import Change, Entry, File
from seriatim.core.machine import fits
from seriatim.core.message import Stretch
from seriatim.core.offsets import Partition
from seriatim.ports import Conflict, Head, LedgerStore, RecordStore, StateStore, UnfitRecords
from seriatim.steps.commit import commit, read_head, start

P, Q = Partition("in-a", 0), Partition("in-a", 1)
COLUMNS = {
    "text": "string",
    "whole": "int64",
    "ratio": "float64",
    "flag": "bool",
    "at": "timestamp",
    "day": "date",
    "raw": "binary",
    "parts": "list<int64>",
}
ROW = ("x", 1, 0.5, True, datetime(2024, 1, 1, tzinfo=UTC), date(2024, 1, 1), b"\xff", [1, 2])
KINDS = ["memory", "real"]


def arrow(start: int, keys: list[bytes | None], values: list[bytes | None]) -> ArrowStretch:
    """A stretch as it comes from Spark."""
    count = len(keys)
    columns = {
        "offset": pa.array(range(start, start + count), pa.int64()),
        "timestamp": pa.array([0] * count, pa.timestamp("us", tz="UTC")),
        "key": pa.array(keys, pa.binary()),
        "value": pa.array(values, pa.binary()),
    }
    return ArrowStretch(pa.RecordBatch.from_pydict(columns), start)


@pytest.fixture(params=KINDS)
def records(request: pytest.FixtureRequest, tmp_path: Path) -> RecordStore:
    """A store of record files."""
    return (
        MemoryFiles(COLUMNS) if request.param == "memory" else ParquetRecords(tmp_path, COLUMNS, "zstd", ())
    )


@pytest.fixture(params=KINDS)
def state(request: pytest.FixtureRequest, tmp_path: Path) -> StateStore:
    """A store of state files."""
    return MemoryFiles({}) if request.param == "memory" else ParquetState(tmp_path)


@pytest.fixture(params=KINDS)
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerStore:
    """A ledger's store."""
    return (
        MemoryLedger()
        if request.param == "memory"
        else DeltaLedger(tmp_path, record_schema({"op": "string"}))
    )


@given(
    st.lists(st.tuples(*[st.one_of(st.none(), st.binary(max_size=6))] * 2), max_size=12),
    st.integers(0, 2**40),
    st.lists(st.integers(0, 12), max_size=3),
)
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
def test_digests_are_the_same_numbers_however_cut(
    messages: list[tuple[bytes | None, bytes | None]], start_offset: int, cuts: list[int]
) -> None:
    """Fake and real, in one stretch or many, give the same three digests."""
    keys, values = [key for key, _ in messages], [value for _, value in messages]
    whole = MemoryDigests()
    whole.update(Stretch(start_offset, [0] * len(keys), keys, values))
    real, batch = ArrowDigests(), arrow(start_offset, keys, values).batch
    edges = sorted({0, len(keys), *(cut for cut in cuts if cut < len(keys))})
    for begin, end in itertools.pairwise(edges):
        real.update(ArrowStretch(batch.slice(begin, end - begin), start_offset + begin))
    assert real.finish() == whole.finish()


def one_record(row: tuple[Any, ...] = ROW) -> Folded:
    """One record of the second message of a stretch."""
    return Folded(positions=[1], indexes=[0], sequences=[None], sessions=["s"], rows=[row], consumed=2)


STRETCH = Stretch(5, [0, 1], [b"s", b"s"], [b"v", b"w"], [[], [("h", None)]])


def test_a_record_file_says_what_is_in_it(records: RecordStore) -> None:
    """Rows, offsets, bytes and a digest; nothing written is no file."""
    writer = records.records(P, "id", "0-5-a")
    writer.write(STRETCH, one_record())
    file = writer.close()
    assert file is not None
    assert (file.rows, file.first, file.last) == (1, 6, 6)
    assert file.bytes > 0
    assert len(file.digest) == 32
    empty = records.records(P, "id", "0-9-a")
    empty.write(STRETCH, Folded(consumed=2))
    assert empty.close() is None


BAD = {
    "text": [1, True, "\ud800"],
    "whole": ["1", 2**63],
    "ratio": ["x", 2**53 + 1],
    "flag": [1, "true"],
    "at": ["2024-01-01", date(2024, 1, 1)],
    "day": ["2024-01-01"],
    "raw": [1],
    "parts": [[1, "x"], "x", 1],
}
YEAR_0 = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=12)))
COERCED = {
    "text": [b"x"],
    "whole": [1.5, True],
    "ratio": [True],
    "day": [ROW[4], 5],
    "at": [YEAR_0, 5],
    "raw": ["x"],
}


def unfit_rows(store: RecordStore, column: str, value: Any) -> list[int]:
    """Which of two rows are refused when the second has this value."""
    place = list(COLUMNS).index(column)
    rows = [ROW, (*ROW[:place], value, *ROW[place + 1 :])]
    writer = store.records(P, "id", f"0-5-{place}")
    try:
        writer.write(STRETCH, Folded([0, 1], [0, 0], [None] * 2, ["s"] * 2, rows))
    except UnfitRecords as unfit:
        return unfit.rows
    return []


@pytest.mark.parametrize("column", COLUMNS)
def test_values_that_do_not_fit_are_named_by_their_row(records: RecordStore, column: str) -> None:
    """So that the fold can set the session aside, which checks by `fits`; null always fits."""
    for bad in BAD[column]:
        assert not fits(bad, COLUMNS[column])
        assert unfit_rows(records, column, bad) == [1], bad
    assert unfit_rows(records, column, None) == []


@pytest.mark.parametrize("column", COERCED)
def test_values_are_never_bent_into_their_column(records: RecordStore, column: str) -> None:
    """1.5 in a column of whole numbers is refused, not written as 1."""
    for bad in COERCED[column]:
        assert not fits(bad, COLUMNS[column])
        assert unfit_rows(records, column, bad) == [1], bad


def test_sweeping_takes_what_begins_so_and_is_not_kept(records: RecordStore) -> None:
    """One partition, one epoch and start; records and quarantine alike."""
    paths = {}
    for partition, stem in ((P, "0-5-a"), (P, "0-5-b"), (P, "0-50-a"), (P, "1-5-a"), (Q, "0-5-a")):
        writer = records.records(partition, "id", stem)
        writer.write(STRETCH, one_record())
        file = writer.close()
        assert file is not None
        paths[partition, stem] = file.path
    kept = records.kept(P, "id", "0-5-b")
    kept.write(STRETCH, [Kept(1, "s", "poison", "cause")])
    aside = kept.close()
    assert aside is not None
    assert sorted(records.sweep(P, "0-5-", {paths[P, "0-5-a"]})) == sorted([paths[P, "0-5-b"], aside.path])
    assert records.sweep(P, "0-5-", {paths[P, "0-5-a"]}) == []


def session(saved: bytes | None, **fields: Any) -> Session:
    """A session as a fold hands it over."""
    return Session(saved=saved, state=object(), awake=True, touched=True, version=3, sequence=7, **fields)


def test_sessions_come_back_as_they_were_saved(state: StateStore) -> None:
    """Every lasting field, odd names too; what is only of the fold is not saved."""
    full = session(
        b"\x00",
        anchor=2,
        first_offset=1,
        last_offset=9,
        snapshot_offset=4,
        timestamp=123,
        finding="gap",
        finding_offset=8,
    )
    names = {"s": full, "": session(None), "é\n": session(b"")}
    file = state.save(P, "0-5-a", names, [])
    assert file.rows == 3
    back = state.load([file], ["s", "", "é\n", "unknown"])
    assert set(back) == set(names)
    for name, kept in names.items():
        for one in ("saved", "version", "sequence", "anchor", "first_offset", "last_offset"):
            assert getattr(back[name], one) == getattr(kept, one), (name, one)
        for one in ("snapshot_offset", "timestamp", "finding", "finding_offset"):
            assert getattr(back[name], one) == getattr(kept, one), (name, one)
        assert (back[name].state, back[name].awake, back[name].touched) == (None, False, False)


def test_the_newest_file_wins_merged_or_not(state: StateStore) -> None:
    """A session is in the newest file that has it; merging changes nothing else."""
    one = state.save(P, "0-0-a", {"s": session(b"1"), "t": session(b"1", finding="gap")}, [])
    two = state.save(P, "0-5-a", {"s": session(b"2")}, [])
    three = state.save(P, "0-9-a", {"u": session(b"3")}, [one, two])
    assert three.rows == 3
    for files in ([one, two], [three]):
        found = state.load(files, ["s", "t"])
        assert {name: session.saved for name, session in found.items()} == {"s": b"2", "t": b"1"}
        assert list(state.quarantined(files)) == ["t"]
    later = state.save(P, "0-12-a", {"t": session(b"4")}, [])
    assert state.quarantined([three, later]) == {}


@pytest.mark.parametrize("damage", ["flip", "missing"])
def test_a_damaged_state_file_is_refused_before_use(state: StateStore, damage: str) -> None:
    """By name, whatever was done to it."""
    file = state.save(P, "0-5-a", {"s": session(b"state")}, [])
    wrong = File(file.path if damage == "flip" else "state/in-a/0/none", file.bytes, file.rows, "0" * 32)
    with pytest.raises(IntegrityError, match=wrong.path):
        state.load([wrong], ["s"])


def change(partition: Partition = P, frontier: int = 0, until: int = 0, *files: File) -> Change:
    """A change that moves a frontier."""
    return Change(
        partition=partition, epoch=0, frontier=frontier, until=until, topic_id="id", born=0, records=files
    )


def begun(store: LedgerStore) -> Head:
    """A ledger with its first entry."""
    return start(store, MemoryClock(), "s", "a0", (change(), change(Q)))


def moved(until: int, attempt: str = "a1") -> Entry:
    """A slice from 0."""
    return Entry(kind="slice", attempt=attempt, changes=(change(P, 0, until),))


def test_there_is_no_ledger_before_the_first_entry(ledger: LedgerStore) -> None:
    """Neither a head nor a witness."""
    assert (ledger.head("s"), ledger.witness()) == (None, None)


def test_entries_are_read_back_as_committed(ledger: LedgerStore) -> None:
    """The head, any earlier entry, whether a manifest is there, and the witness."""
    first = begun(ledger)
    second, done = commit(ledger, MemoryClock(), first, moved(5))
    found = read_head(ledger, "s")
    assert found is not None
    assert (found.ledger, found.foreign) == (second.ledger, [])
    assert found.ledger.partitions["in-a/0"].frontier == 5
    assert done.previous == first.ledger.sha256
    assert ledger.at("s", 0).partitions["in-a/0"].frontier == 0
    assert ledger.at("s", 1).partitions == second.ledger.partitions
    assert ledger.has(second.ledger.sha256, 0)
    assert not ledger.has("0" * 64, -1)
    assert ledger.witness() == (1, second.ledger.sha256)


def test_a_zombie_is_refused(ledger: LedgerStore) -> None:
    """It may only set on exactly the head it read; by the rule it is fenced."""
    old = begun(ledger)
    commit(ledger, MemoryClock(), old, moved(5))
    path, sha256 = ledger.put_manifest(1, b"{}")
    with pytest.raises(Conflict):
        ledger.compare_and_set(old, moved(3, "zombie"), path, sha256)
    with pytest.raises(FencedError):
        commit(ledger, MemoryClock(), old, moved(3, "zombie"))
    with pytest.raises(Conflict):
        ledger.compare_and_set(None, Entry(kind="start", attempt="zombie"), path, sha256)
    found = ledger.head("s")
    assert found is not None
    assert found.ledger.sequence == 1


def test_the_ledger_as_of_an_earlier_entry_knows_its_hash(ledger: LedgerStore) -> None:
    """So that a chain can be walked from any point."""
    first = begun(ledger)
    commit(ledger, MemoryClock(), first, moved(5))
    assert ledger.at("s", 0).sha256 == first.ledger.sha256


def test_what_the_fake_writes_is_what_parquet_has(tmp_path: Path) -> None:
    """The same record through both stores, column by column."""
    fake, real = MemoryFiles(COLUMNS), ParquetRecords(tmp_path, COLUMNS, "zstd", ())
    files = []
    for store in (fake, real):
        writer = store.records(P, "id", "0-5-a")
        writer.write(STRETCH, one_record())
        files.append(writer.close())
    (row,) = fake.read(files[0]).rows  # type: ignore[arg-type]
    (read,) = pq.read_table(tmp_path / files[1].path, partitioning=None).to_pylist()  # type: ignore[union-attr]
    assert list(read) == list(row)
    assert read | {"timestamp": 1} == row
