"""How often a repair reads the manifests of a ledger on disk: each at most once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from seriatim.ledger.manifests import MANIFEST_FOLDER
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.store import LocalStore
from seriatim.testing import OpenMemoryStream
from tests.contracts.disk_streams import DiskStream


def create_output(root: Path) -> DiskStream:
    """Two partitions in many small slices."""
    disk_stream = DiskStream(root, sequence=None)
    disk_stream.kafka.create("in-a", 2)
    for place in ("in-a/0", "in-a/1"):
        for session in ("x", "y"):
            disk_stream.send(place, session, ["a", "b"], 1)
    for number in range(12):
        for place in ("in-a/0", "in-a/1"):
            disk_stream.send(place, "x", number)
    disk_stream.run(messages_max=4)
    return disk_stream


def open_for_repair(disk_stream: DiskStream) -> OpenMemoryStream:
    """Open the stream as the process of a repair does."""
    joiner = ParquetJoiner(LocalStore(disk_stream.root), "s")
    return disk_stream.open().with_ports(joiner=joiner)


@pytest.mark.parametrize("damage", ["lost file", "named range"])
def test_a_repair_reads_each_manifest_at_most_once(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To plan, to plan again under the hold, to fold, to sweep and to bring the tables up to date:
    also where intact files are replaced, as by the repair of a range that a person names.
    """
    disk_stream = create_output(tmp_path)
    request = RepairRequest(partition="in-a/1", start=5)
    if damage == "lost file":
        record_files = disk_stream.ledger.active_files(disk_stream.ledger.head("s"))
        lost_path = sorted(file.path for file in record_files if "/in-a/0/" in file.path)[2]
        (tmp_path / lost_path).unlink()
        request = RepairRequest(partition="in-a/0")
    manifest_reads: Counter[str] = Counter()
    read = LocalStore.read

    def counted_read(store: LocalStore, key: str) -> bytes:
        if key.startswith(MANIFEST_FOLDER):
            manifest_reads[key] += 1
        return read(store, key)

    monkeypatch.setattr(LocalStore, "read", counted_read)
    open_stream = open_for_repair(disk_stream)
    plan = plan_repair(open_stream, request)
    result = RepairRun(open_stream).apply(plan, 1_000)
    assert result.sequence >= 0
    assert result.removed_files > 0
    entries_before = plan.sequence + 1
    # All of them, the hold and the repair itself.
    assert len(manifest_reads) <= entries_before + 2
    assert {path: count for path, count in manifest_reads.items() if count > 1} == {}
