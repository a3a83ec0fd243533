"""The contract of `Rewriter` and of the notes that sweeping goes by, in memory and on disk."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Partition
from seriatim.engine.session import FoldOutput
from seriatim.errors import BrokenPromiseError, DamagedFileError, IntegrityError
from seriatim.ledger.replaced_files import Intent
from seriatim.memory import MemoryFiles
from seriatim.storage.record_files import ParquetRecords, ParquetRewriter
from seriatim.storage.store import LocalStore, digest_object

P, Q = Partition("in-a", 0), Partition("in-a", 1)
COLUMNS = {"text": "string", "parts": "list<int64>", "cost": "decimal(9,2)"}


class Side:
    """Record files and who rewrites them, of either kind."""

    def __init__(self, root: Path | None, leave_out: tuple[str, ...] = ()) -> None:
        self.root = root
        self.files: Any = (
            MemoryFiles(COLUMNS)
            if root is None
            else ParquetRecords(LocalStore(root), COLUMNS, "zstd", leave_out)
        )
        self.rewriter: Any = self.files if root is None else ParquetRewriter(LocalStore(root), "s")

    def written(self, stem: str, *offsets: int, topic_id: str = "id") -> File:
        """A record file with two records at each of these offsets."""
        writer = self.files.record_writer(P, topic_id, stem)
        for offset in offsets:
            rows = [(f"text {offset}", [offset, index], None) for index in range(2)]
            folded = FoldOutput(
                [0, 0], [0, 1], [offset, offset], ["s", "s"], rows, consumed_messages=1
            )
            writer.write(MessageBatch(offset, [offset * 1_000], [b"s"], [b"v"]), folded)
        return writer.close() or pytest.fail("nothing was written")

    def rows(self, file: File) -> list[dict[str, Any]]:
        """What is in a file."""
        if self.root is None:
            return list(self.files.read(file).rows)
        return (
            pq.ParquetFile(self.root / file.path, page_checksum_verification=True)
            .read()
            .to_pylist()
        )

    def hurt(self, file: File, how: str) -> None:
        """Damage a file, or lose it."""
        if self.root is None:
            stored = self.files.files.pop(file.path)
            if how != "lost":
                self.files.files[file.path] = replace(stored, content=stored.content[:-1] + b"!")
            return
        full = self.root / file.path
        good = bytearray(full.read_bytes())
        full.unlink()
        if how != "lost":
            good[random.Random(how).randrange(len(good))] ^= 4
            full.write_bytes(good)


@pytest.fixture(params=["memory", "real"])
def side(request: pytest.FixtureRequest, tmp_path: Path) -> Side:
    """Files of either kind."""
    return Side(None if request.param == "memory" else tmp_path)


def test_files_become_one_with_the_same_records(side: Side) -> None:
    """In order, described truly, under its own name; the old ones stay."""
    olds = [side.written("0-0-a", 0, 1), side.written("0-2-a", 4), side.written("0-5-a", 5, 9)]
    new = side.rewriter.concatenate(P, "id", "compact-x-0", olds)
    assert side.rows(new) == [row for old in olds for row in side.rows(old)]
    assert (new.rows, new.first_offset, new.last_offset) == (10, 0, 9)
    assert "compact-x-0" in new.path
    assert set(side.files.paths(P)) == {new.path, *(old.path for old in olds)}
    if side.root is not None:
        assert (new.size_bytes, new.digest) == (
            (side.root / new.path).stat().st_size,
            digest_object(LocalStore(side.root), new.path),
        )


@pytest.mark.parametrize("how", ["lost", "one bit", "another bit", "a third one"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_file_is_refused_by_name(side: Side, how: str, which: int) -> None:
    """Whichever it is, and whatever happened to it."""
    olds = [side.written("0-0-a", 0, 1), side.written("0-2-a", 2, 3)]
    side.hurt(olds[which], how)
    with pytest.raises(IntegrityError) as refused:
        side.rewriter.concatenate(P, "id", "compact-x-0", olds)
    assert olds[which].path in refused.value.message
    assert isinstance(refused.value, DamagedFileError)
    assert refused.value.path == olds[which].path


def test_files_that_do_not_follow_each_other_are_our_bug(side: Side) -> None:
    """Overlapping, in another order, or of another life of their topic: nothing of it is made."""
    olds = [
        side.written("0-0-a", 0, 2),
        side.written("0-1-b", 1, 3),
        side.written("0-4-a", 4, topic_id="other"),
    ]
    for files in (olds[:2], [olds[1], olds[0]], [olds[0], olds[2]]):
        with pytest.raises(BrokenPromiseError):
            side.rewriter.concatenate(
                P, "id", f"compact-{files[0].first_offset}-{files[1].first_offset}", files
            )


def test_columns_that_are_folders_names_stay_out(tmp_path: Path) -> None:
    """A file has what its inputs have, no more."""
    side = Side(tmp_path, ("topic", "partition"))
    olds = [side.written("0-0-a", 0), side.written("0-1-a", 1)]
    new = side.rewriter.concatenate(P, "id", "compact-x-0", olds)
    schemas = [pq.ParquetFile(tmp_path / file.path).schema_arrow for file in (*olds, new)]
    assert schemas[0] == schemas[2]
    assert "topic" not in schemas[2].names


def test_many_rows_are_copied_group_by_group(tmp_path: Path) -> None:
    """A file of several row groups comes out as it was, in row groups of a good size, checksums on."""
    side = Side(tmp_path)
    olds = [side.written("0-0-a", *range(300)), side.written("0-300-a", *range(300, 600))]
    new = side.rewriter.concatenate(P, "id", "compact-x-0", olds)
    assert [row["offset"] for row in side.rows(new)] == [
        offset for offset in range(600) for _ in range(2)
    ]


def test_intents_are_kept_until_they_are_dropped(side: Side) -> None:
    """By partition and attempt."""
    intent = Intent(
        partition=P, attempt="a1", epoch=2, sequence=7, records=("r1", "r2"), state=("s1",)
    )
    other = Intent(partition=P, attempt="found-9", sequence=9, records=("r3",))
    elsewhere = replace(intent, partition=Q)
    for one in (intent, other, elsewhere):
        side.files.put_intent(one)
    assert sorted(side.files.intents(P), key=str) == sorted([intent, other], key=str)
    assert side.files.intents(Q) == [elsewhere]
    side.files.drop_intent(intent)
    side.files.drop_intent(intent)
    assert side.files.intents(P) == [other]
    assert side.files.intents(Partition("in-z", 0)) == []


def test_an_intent_that_cannot_be_read_protects_what_it_may_stand_for(tmp_path: Path) -> None:
    """It is of the attempt that its name says, and always open; half ones go with the next that is
    dropped.
    """
    files = Side(tmp_path).files
    files.put_intent(Intent(partition=P, attempt="a1", epoch=0, records=("r1",)))
    (tmp_path / "intents" / "in-a" / "0" / "a1.json").write_bytes(b'{"half')
    (tmp_path / "intents" / "in-a" / "0" / ".a2.json.0a1b2c3d").write_bytes(b"{")
    assert files.intents(P) == [Intent(partition=P, attempt="a1")]
    files.drop_intent(files.intents(P)[0])
    assert list((tmp_path / "intents" / "in-a" / "0").iterdir()) == []
