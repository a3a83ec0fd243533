"""Repairs of real files with flipped bits: whatever Parquet makes of them, the range is widened and folded again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from seriatim.adapters.join import ParquetJoiner
from seriatim.core.errors import IntegrityError
from seriatim.core.ledger import File
from seriatim.core.repair import Request
from seriatim.core.scope import Replaced
from seriatim.disk import file_digest
from seriatim.steps.repair import Mending, Repairing, plan
from tests.adapters.on_disk import DiskStream
from tests.steps.mending import mending


def tools(made: DiskStream) -> Mending:
    """What a repair of real files is made with."""
    given = mending(made)
    return replace(given, world=replace(given.world, joiner=ParquetJoiner(made.root)))


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
    path = tmp_path / sorted(files, key=lambda path: files[path].first)[seed % 2]
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    mend = tools(made)
    Repairing(mend).apply(plan(mend, Request()), 1000)
    assert plan(tools(made), Request(partition="in-a/0")).parts[1:] == ()
    entry = made.ledger.manifest("s", made.ledger.head("s").ledger.sequence).entry
    assert not mend.world.joiner.damaged(entry.changes[0].records)
    assert str(path.relative_to(tmp_path)) in entry.removed


def test_what_parquet_cannot_read_is_damage_and_is_named(tmp_path: Path) -> None:
    """Not a bug of ours, nor trouble with the disk: the file, and the command that proves its partition."""
    path = tmp_path / "records" / "in-a" / "0" / "x.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PAR1 nothing of the kind PAR1")
    file = File("records/in-a/0/x.parquet", path.stat().st_size, 1, file_digest(path), 0, 1)
    with pytest.raises(IntegrityError, match=r"records/in-a/0/x\.parquet") as refused:
        ParquetJoiner(tmp_path).touches(file, Replaced(start=0, end=9))
    assert "--partition in-a/0" in refused.value.next
