"""Ledgers that are refused by name: hurt, of another stream, of other columns, of somebody else."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from msgspec.structs import replace

from seriatim.errors import ConfigError, IntegrityError
from seriatim.ledger.commit import build_manifest, commit
from seriatim.ledger.delta_store import DeltaLedger
from seriatim.memory import MemoryClock
from seriatim.storage.record_files import record_schema
from seriatim.storage.store import LocalStore
from tests.contracts.ledger_sides import (
    COLUMNS,
    RealSide,
    Side,
    record_file,
    slice_entry,
    start_side,
)


@pytest.mark.parametrize("how", ["damage", "lose"])
def test_a_hurt_manifest_is_refused_by_name(side: Side, how: str) -> None:
    """The last one leaves no head; an earlier one does no harm until it is asked for."""
    first = start_side(side)
    manifest = build_manifest(slice_entry(0, 5), first.ledger)
    reference = side.store.put_manifest(manifest)
    side.store.compare_and_set(first, manifest.entry, reference)
    getattr(side, how)(reference.path)
    for read in (lambda: side.again().head("s"), lambda: side.again().ledger_at("s", 1)):
        with pytest.raises(IntegrityError) as caught:
            read()
        assert reference.path in caught.value.render()
    assert side.again().ledger_at("s", 0) == first.ledger


def test_another_streams_ledger_is_refused(side: Side) -> None:
    """Two streams must not share an output path: whose it is is told."""
    start_side(side)
    for read in (lambda: side.again().head("other"), lambda: side.again().ledger_at("other", 0)):
        with pytest.raises(ConfigError, match="holds stream 's'"):
            read()


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        (
            {"op": "int64", "at": "timestamp", "parts": "list<int64>"},
            "'op' is string in the records table, but int64 in",
        ),
        (
            {"at": "timestamp", "parts": "list<int64>"},
            "'op' is string in the records table, but not there in",
        ),
        ({**COLUMNS, "new": "date"}, "'new' is not there in the records table, but date32"),
        ({**COLUMNS, "parts": "list<string>"}, "'parts' is list"),
    ],
    ids=["type", "gone", "new", "inside a list"],
)
def test_other_columns_are_refused_by_name(
    tmp_path: Path, columns: dict[str, str], told: str
) -> None:
    """What the table has and what the stream file says; reading alone needs no schema."""
    start_side(RealSide(tmp_path))
    with pytest.raises(ConfigError) as caught:
        DeltaLedger(LocalStore(tmp_path), record_schema(columns)).head("s")
    assert told in caught.value.message
    assert DeltaLedger(LocalStore(tmp_path)).head("s") is not None


def test_another_partitioning_is_refused(tmp_path: Path) -> None:
    """The table cannot change it, so the stream file must not."""
    start_side(RealSide(tmp_path))
    with pytest.raises(ConfigError, match="partitioned by"):
        DeltaLedger(LocalStore(tmp_path), record_schema(COLUMNS), ("topic",)).head("s")


def test_a_table_by_somebody_else_is_refused(tmp_path: Path) -> None:
    """Neither folded into nor taken for an empty ledger."""
    write_deltalake(tmp_path / "records", pa.table({"op": ["mine"]}))
    with pytest.raises(ConfigError, match="did not make"):
        RealSide(tmp_path).store.head("s")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"sequence": 1}',
        b'{"sequence": "x", "sha256": "y"}',
        b'{"sequence": 1e999, "sha256": "y"}',
    ],
)
def test_a_witness_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes) -> None:
    """It is never taken for no witness."""
    (tmp_path / "head.json").write_bytes(content)
    with pytest.raises(IntegrityError, match=r"head\.json cannot be read"):
        RealSide(tmp_path).store.witness()


def rewritten(side: RealSide, old: str, new: str) -> None:
    """The last commit's log with other text."""
    log = max((side.root / "records" / "_delta_log").glob("*.json"))
    text = log.read_text()
    assert old in text
    log.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"sha256":', '"sha":'),
        ('"sequence":1', '"sequence":"x"'),
        ('"seriatim":{', '"seriatim":3,"other":{'),
    ],
    ids=["a key is missing", "not a number", "not an object"],
)
def test_a_damaged_mark_is_a_ledger_that_cannot_be_read(tmp_path: Path, old: str, new: str) -> None:
    """Whoever reads it is told so, and which commit it is."""
    side = RealSide(tmp_path)
    commit(side.store, MemoryClock(), start_side(side), slice_entry(0, 5))
    rewritten(side, old, new)
    reads = (
        lambda: side.again().head("s"),
        lambda: side.again().ledger_at("s", 0),
        lambda: side.again().has_manifest("0" * 64, -1),
    )
    for read in reads:
        with pytest.raises(IntegrityError, match="the ledger cannot be read") as caught:
            read()
        assert "Delta version 1" in caught.value.render()


def test_half_a_commit_is_told_in_one_line(tmp_path: Path) -> None:
    """Without the frames of the library that met it."""
    side = RealSide(tmp_path)
    commit(
        side.store, MemoryClock(), start_side(side), slice_entry(0, 5, record_file(side, "0-0-a"))
    )
    log = tmp_path / "records" / "_delta_log" / f"{1:020d}.json"
    log.write_text(log.read_text()[:-200])
    with pytest.raises(IntegrityError, match="the ledger cannot be read") as caught:
        side.again().head("s")
    assert len(str(caught.value.fields["cause"]).splitlines()) == 1


def test_a_manifest_of_another_entry_is_refused(tmp_path: Path) -> None:
    """A commit that names it is damaged, even if the hash is right."""
    side = RealSide(tmp_path)
    head = start_side(side)
    manifest = build_manifest(slice_entry(0, 5), head.ledger)
    other = replace(manifest, entry=replace(manifest.entry, sequence=7))
    reference = replace(side.store.put_manifest(other), sequence=1)
    side.store.compare_and_set(head, manifest.entry, reference)
    with pytest.raises(IntegrityError) as caught:
        side.again().head("s")
    assert "entry 7, not 1" in caught.value.render()
