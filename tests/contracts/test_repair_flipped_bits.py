"""Repairs of real files with flipped bits: whatever Parquet makes of them, the range is widened and
folded again.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from deltalake import DeltaTable

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.session import ReplacedRecords
from seriatim.errors import IntegrityError
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.store import LocalStore, digest_object
from seriatim.testing import OpenMemoryStream
from tests.contracts.disk_streams import DiskStream
from tests.contracts.verify_helper import verify


def tools(made: DiskStream) -> OpenMemoryStream:
    """What a repair of real files is made with."""
    return made.open().with_ports(joiner=ParquetJoiner(LocalStore(made.root), "s"))


def built(root: Path) -> DiskStream:
    """Session q is in quarantine, in a file with records of others; another file comes after it."""
    made = DiskStream(root, sequence=None)
    made.kafka.create("in-a", 1)
    for session in "xyq":
        made.send("in-a/0", session, ["a", "b"], 1, 2)
    made.send("in-a/0", "q", b"{")
    for number in range(20):
        made.send("in-a/0", "x", number)
        made.send("in-a/0", "y", number + 1)
    made.run(messages_max=30)
    return made


@pytest.mark.parametrize("seed", range(12))
def test_a_bit_anywhere_in_a_record_file(seed: int, tmp_path: Path) -> None:
    """The repair of a session that shares the file mends the file as well."""
    made, chance = built(tmp_path), random.Random(seed)
    files = {file.path: file for file in made.ledger.active_files(made.ledger.head("s"))}
    path = tmp_path / sorted(files, key=lambda path: files[path].first_offset)[seed % 2]
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    mend = tools(made)
    RepairRun(mend).apply(plan_repair(mend, RepairRequest()), 1000)
    assert plan_repair(tools(made), RepairRequest(partition="in-a/0")).actions[1:] == ()
    entry = made.ledger.manifest_at("s", made.ledger.head("s").ledger.sequence).entry
    assert not mend.joiner.find_damaged_files(entry.changes[0].records)
    assert str(path.relative_to(tmp_path)) in entry.removed_paths


def test_what_parquet_cannot_read_is_damage_and_is_named(tmp_path: Path) -> None:
    """Not a bug of ours, nor trouble with the disk: the file, and the command that proves its
    partition.
    """
    path = tmp_path / "records" / "in-a" / "0" / "x.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PAR1 nothing of the kind PAR1")
    digest = digest_object(LocalStore(path.parent), path.name)
    file = File("records/in-a/0/x.parquet", path.stat().st_size, 1, digest, 0, 1)
    with pytest.raises(IntegrityError, match=r"records/in-a/0/x\.parquet") as refused:
        ParquetJoiner(LocalStore(tmp_path), "s").has_replaced_records(
            file, ReplacedRecords(start=0, end=9)
        )
    assert refused.value.next.startswith("seriatim repair s --partition in-a/0: ")


def optimized(root: Path) -> DiskStream:
    """Two partitions of several slices, which somebody's OPTIMIZE has put into one file; more
    slices came since.
    """
    made = DiskStream(root, sequence=None)
    made.kafka.create("in-a", 2)
    for _ in range(3):
        for place in ("in-a/0", "in-a/1"):
            made.send(place, "x", ["a", "b"], 1, 2)
            made.send(place, "y", ["a", "b"], 1)
        made.run()
    DeltaTable(root / "records").optimize.compact()
    made.kafka.create("in-b", 1)
    for place in ("in-a/0", "in-b/0"):
        made.send(place, "x", ["a"], 7, b"{", 8)
        made.run()
        made.send(place, "y", ["a"], 7)
        made.run()
    return made


def test_what_came_after_a_foreign_optimize_can_be_mended(tmp_path: Path) -> None:
    """Its file holds nothing of what is replaced: a session set aside, a lost file and lost state
    are made again.
    """
    made = optimized(tmp_path)
    strange = made.ledger.active_paths(made.ledger.head("s"))
    (tmp_path / made.accounts()[Partition("in-a", 0)].state[-1].path).unlink()
    (tmp_path / min(path for path in strange if path.startswith("records/in-b/0"))).unlink()
    mend = tools(made)
    planned = plan_repair(mend, RepairRequest())
    assert planned.notes == ()
    RepairRun(mend).apply(planned, 100)
    found = verify(tmp_path, everything=True)
    assert found.difference is None
    rows = DeltaTable(tmp_path / "records").to_pyarrow_table().to_pylist()
    assert sorted(row["offset"] for row in rows if row["topic"] == "in-b") == [0, 1, 4, 5]


def test_what_is_in_the_file_of_a_foreign_optimize_is_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    """It would be there twice. Nothing is held, and the advice loses nothing that came since."""
    made = optimized(tmp_path)
    for asked in (
        RepairRequest(partition="in-a/0", start=3),
        RepairRequest(ranges={"in-a/1": (0, 4)}),
    ):
        with pytest.raises(IntegrityError, match="rewritten by somebody else") as refused:
            plan_repair(tools(made), asked)
        assert "a later --from" in refused.value.next
        assert "the whole output folder" in refused.value.next
    assert plan_repair(tools(made), RepairRequest(partition="in-a/0", start=17)).actions
