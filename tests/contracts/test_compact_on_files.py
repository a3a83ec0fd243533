"""Compaction of real files on a real table: verify agrees before and after, and old versions can be
read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.ledger.commit import commit
from seriatim.ledger.entries import CompactEntry
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import Change
from seriatim.operations.accept import accept_topic
from seriatim.operations.compact import CompactResult
from seriatim.operations.sweep import sweep_dead
from seriatim.storage.record_files import ParquetRewriter
from seriatim.storage.store import LocalStore, digest_object
from tests.contracts.disk_streams import DiskStream, create_filled_output
from tests.contracts.verify_helper import verify
from tests.operations.compact_helper import DAY, run_compaction

A0, A1, B0 = (Partition.parse(place) for place in ("in-a/0", "in-a/1", "in-b/0"))


def compacted(
    made: DiskStream, only: Partition | None = None, *, bytes_target: int = 1 << 20
) -> CompactResult:
    """One compaction, as a process of its own would make it."""
    rewriter = ParquetRewriter(LocalStore(made.root), "s")
    return run_compaction(made, only, bytes_target=bytes_target, rewriter=rewriter)


def records(root: Path, version: int | None = None) -> list[dict[str, Any]]:
    """What a reader sees, by place."""
    table = (
        DeltaTable(root / "records", version=version)
        .to_pyarrow_dataset()
        .to_table(use_threads=False)
    )
    places = ["topic", "topic_id", "partition", "offset", "index"]
    return table.sort_by([(place, "ascending") for place in places]).to_pylist()


def version(root: Path) -> int:
    """The table's version now."""
    return DeltaTable(root / "records").version()


def files(root: Path) -> list[str]:
    """The table's files now."""
    return sorted(
        pa.table(DeltaTable(root / "records").get_add_actions()).column("path").to_pylist()
    )


def head_of(made: DiskStream) -> LedgerHead:
    """The ledger as it is."""
    return made.ledger.head("s") or pytest.fail("there is no ledger")


@pytest.mark.parametrize("parts", [(), ("topic", "partition")], ids=["plain", "partition_by"])
def test_compaction_changes_no_record(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """Few files, the same rows, no data changed by the log; verify agrees, and the old version can
    be read.
    """
    made = create_filled_output(tmp_path, output_partitions=parts)
    assert verify(tmp_path).difference is None
    before, old, names = records(tmp_path), version(tmp_path), files(tmp_path)
    done = compacted(made)
    assert records(tmp_path) == before
    assert len(files(tmp_path)) == 3 < len(names)
    assert {name.rpartition("/")[2].split("-")[0] for name in files(tmp_path)} == {"compact"}
    assert records(tmp_path, old) == before
    checked = verify(tmp_path)
    assert (checked.difference, checked.warnings, checked.has_folded_records) == (None, [], True)
    assert checked.sequence == done.sequence
    assert checked.records == len(before), "those of replaced files are not in the table any more"
    log = tmp_path / "records" / "_delta_log" / f"{old + 1:020d}.json"
    assert '"dataChange":false' in log.read_text()
    assert '"dataChange":true' not in log.read_text()
    made.send("in-a/0", "x", 7, 8)
    made.run()
    assert len(records(tmp_path)) == len(before) + 2
    assert verify(tmp_path).difference is None


def test_after_the_versions_are_gone_verify_agrees_still(tmp_path: Path) -> None:
    """Old files are counted as gone; none of them is missed, and what is there is whole."""
    made = create_filled_output(tmp_path)
    before = records(tmp_path)
    compacted(made)
    made.clock.sleep(31 * DAY)
    done = compacted(made)
    assert done.swept_replaced_files > 10
    assert len(list((tmp_path / "records").rglob("*.parquet"))) == 3
    assert list((tmp_path / "intents").rglob("*.json")) == []
    checked = verify(tmp_path, everything=True)
    assert (checked.difference, checked.warnings, checked.has_folded_records) == (None, [], True)
    assert checked.deleted_files == done.swept_replaced_files
    assert records(tmp_path) == before


def test_lives_of_a_topic_stay_apart(tmp_path: Path) -> None:
    """A topic made again: its two lives become a file each, in order, also when the old files are
    long gone.
    """
    made = create_filled_output(tmp_path)
    made.kafka.delete("in-a")
    made.kafka.create("in-a", 2)
    made.run()
    accept_topic(made.open(), "in-a", "moved")
    made._sequences.clear()
    made.send("in-a/0", "x", ["a", "z"], 5, 6)
    made.run()  # one file, by an entry before the one that compacts the old life
    before = records(tmp_path)
    compacted(made)
    made.clock.sleep(31 * DAY)
    compacted(made)
    mine = [name for name in files(tmp_path) if name.startswith("in-a/0/")]
    lives = [
        set(pq.read_table(tmp_path / "records" / name).column("topic_id").to_pylist())
        for name in mine
    ]
    assert sorted(map(len, lives)) == [1, 1]
    assert records(tmp_path) == before
    checked = verify(tmp_path, everything=True)
    assert (checked.difference, checked.has_folded_records) == (None, True)


def test_a_damaged_file_is_left_alone(tmp_path: Path) -> None:
    """It is refused by name, nothing of it is copied, and verify still names it."""
    made = create_filled_output(tmp_path)
    hurt = (
        tmp_path / "records" / next(name for name in files(tmp_path) if name.startswith("in-b/0/"))
    )
    good = bytearray(hurt.read_bytes())
    good[len(good) // 2] ^= 1
    hurt.write_bytes(good)
    done = compacted(made)
    refused = {path: why for piece in done.pieces for path, why in piece.damaged_inputs.items()}
    assert list(refused) == [str(hurt.relative_to(tmp_path))]
    assert "its digest is" in refused[str(hurt.relative_to(tmp_path))]
    assert sum(name.startswith("in-b/0/0-") for name in files(tmp_path)) > 1
    found = verify(tmp_path, everything=True).difference
    assert found is not None
    assert found.file == str(hurt.relative_to(tmp_path))


def test_files_of_others_are_none_of_ours(tmp_path: Path) -> None:
    """After a foreign OPTIMIZE there is nothing to compact, and later slices are."""
    made = create_filled_output(tmp_path)
    DeltaTable(tmp_path / "records").optimize.compact()
    made.clock.sleep(31 * DAY)
    before = records(tmp_path)
    assert [piece for piece in compacted(made).pieces if piece.groups] == []
    for value in (7, 8):
        made.send("in-a/0", "x", value)
        made.run()
    assert [len(piece.inputs) for piece in compacted(made).pieces if piece.groups] == [2]
    assert len(records(tmp_path)) == len(before) + 2
    assert verify(tmp_path).difference is None


def test_a_run_asks_old_manifests_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compaction and repair left in place is known to be named by notes, so that runs stay
    short.
    """
    made = create_filled_output(tmp_path)
    compacted(made)
    asked: list[int] = []
    real = type(made.ledger).manifest_at
    monkeypatch.setattr(
        type(made.ledger), "manifest_at", lambda *given: asked.append(given[2]) or real(*given)
    )
    sweep_dead(made.ledger, made.files, head_of(made))
    assert asked == []
    for note in (tmp_path / "intents").rglob("*.json"):
        note.unlink()
    assert sweep_dead(made.ledger, made.files, head_of(made)) == []
    assert asked
    asked.clear()
    assert sweep_dead(made.ledger, made.files, head_of(made)) == []
    assert asked == []


def shattered(made: DiskStream, pieces: int) -> None:
    """The table's only file as so many, in one entry that changes no record."""
    head = head_of(made)
    (whole,) = made.ledger.active_files(head)
    table = pq.read_table(made.root / whole.path)
    account = head.ledger.partitions[str(A0)]
    parts = []
    for number in range(pieces):
        part = table.slice(
            number * len(table) // pieces,
            (number + 1) * len(table) // pieces - number * len(table) // pieces,
        )
        path = f"records/{A0}/compact-shattered-{number}.parquet"
        pq.write_table(part, made.root / path, write_page_checksum=True, compression="zstd")
        offsets = part.column("offset")
        size, digest = (made.root / path).stat().st_size, digest_object(LocalStore(made.root), path)
        parts.append(File(path, size, len(part), digest, offsets[0].as_py(), offsets[-1].as_py()))
    change = Change(
        partition=A0,
        epoch=0,
        frontier=account.frontier,
        until=account.frontier,
        topic_id=account.topic_id,
        initial_frontier=0,
        records=tuple(parts),
    )
    entry = CompactEntry(attempt="shattered", changes=(change,), removed_paths=(whole.path,))
    commit(made.ledger, made.clock, head, entry)


@pytest.mark.parametrize("pieces", [300, pytest.param(5_000, marks=pytest.mark.full)])
def test_thousands_of_files_become_few(tmp_path: Path, pieces: int) -> None:
    """Of one record each; the same records, and the version before can be read."""
    made = DiskStream(tmp_path)
    made.kafka.create("in-a", 1)
    made.send("in-a/0", "x", ["a"], *range(pieces - 1))
    made.run()
    shattered(made, pieces)
    before, old = records(tmp_path), version(tmp_path)
    assert len(files(tmp_path)) == pieces
    size = sum(file.size_bytes for file in made.ledger.active_files(head_of(made)))
    done = compacted(made, bytes_target=size // 10)
    assert 10 <= len(files(tmp_path)) <= 12
    assert len([piece for piece in done.pieces if piece.groups]) == 2
    assert records(tmp_path) == before
    assert records(tmp_path, old) == before
    compacted(made, bytes_target=size)
    assert len(files(tmp_path)) == 1
    assert verify(tmp_path).difference is None
