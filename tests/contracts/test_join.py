"""The contract of `Joiner`: committed files looked at again and put together anew, in memory and in
Parquet.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec import Struct

from seriatim.engine.files import File
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.session import FoldOutput, ReplacedRecords
from seriatim.errors import IntegrityError
from seriatim.memory import MemoryFiles
from seriatim.ports import Joiner, RecordStore
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.record_files import ParquetRecords
from seriatim.storage.store import LocalStore

P = Partition("in-a", 0)
NOTHING = ReplacedRecords(start=0, end=0)
ALL = OffsetRange(0, 1 << 62)


class Side(Struct):
    """One kind of store, and ways to look at it and to hurt it."""

    records: RecordStore
    joiner: Joiner
    rows: Callable[[File], list[tuple[int, int, str, int]]]
    flip: Callable[[File], None]
    lose: Callable[[File], None]

    def file(self, stem: str, *rows: tuple[int, str, int]) -> File:
        """A committed file of (offset, session, value); rows of one offset are counted through."""
        first, last = rows[0][0], rows[-1][0]
        stretch = MessageBatch(
            first,
            [0] * (last - first + 1),
            [b"k"] * (last - first + 1),
            [b"v"] * (last - first + 1),
        )
        offsets = [row[0] for row in rows]
        folded = FoldOutput(
            positions=[offset - first for offset in offsets],
            indexes=[offsets[:i].count(offset) for i, offset in enumerate(offsets)],
            sequences=[None] * len(rows),
            sessions=[row[1] for row in rows],
            rows=[(row[2],) for row in rows],
        )
        writer = self.records.record_writer(P, "id", stem)
        writer.write(stretch, folded)
        file = writer.close()
        assert file is not None
        return file


@pytest.fixture(params=["memory", "real"])
def side(request: pytest.FixtureRequest, tmp_path: Path) -> Side:
    """A store of either kind, with one column."""
    if request.param == "memory":
        files = MemoryFiles({"v": "int64"})

        def rows(file: File) -> list[tuple[int, int, str, int]]:
            return [(r["offset"], r["index"], r["session"], r["v"]) for r in files.read(file).rows]

        def flip(file: File) -> None:
            content = files.files[file.path].content
            files.files[file.path].content = bytes([content[0] ^ 1]) + content[1:]

        return Side(files, files, rows, flip, lambda file: files.files.pop(file.path) and None)

    def read(file: File) -> list[tuple[int, int, str, int]]:
        found: list[dict[str, Any]] = pq.read_table(tmp_path / file.path).to_pylist()
        return [(r["offset"], r["index"], r["session"], r["v"]) for r in found]

    def flipped(file: File) -> None:
        content = bytearray((tmp_path / file.path).read_bytes())
        content[len(content) // 2] ^= 1
        (tmp_path / file.path).write_bytes(content)

    records = ParquetRecords(LocalStore(tmp_path), {"v": "int64"}, "zstd", ())
    return Side(
        records,
        ParquetJoiner(LocalStore(tmp_path), "s"),
        read,
        flipped,
        lambda file: (tmp_path / file.path).unlink(),
    )


def test_what_stays_and_what_comes_is_one_file_in_order(side: Side) -> None:
    """Rows of both, by offset and index; its description says where it begins and ends."""
    old = side.file("old", (1, "s", 1), (2, "t", 2), (3, "s", 3), (3, "s", 4), (5, "t", 5))
    new = side.file("new", (1, "s", 10), (3, "s", 30), (3, "s", 40), (4, "s", 41))
    replaced = ReplacedRecords(start=0, end=6, sessions=frozenset({"s"}))
    made = side.joiner.join_files(P, "made", [old], replaced, [new], ALL)
    assert made is not None
    expected = [
        (1, 0, "s", 10),
        (2, 0, "t", 2),
        (3, 0, "s", 30),
        (3, 1, "s", 40),
        (4, 0, "s", 41),
        (5, 0, "t", 5),
    ]
    assert side.rows(made) == expected
    assert (made.rows, made.first_offset, made.last_offset) == (6, 1, 5)
    assert side.joiner.find_damaged_files([made]) == {}


def test_each_session_is_replaced_up_to_its_own_end(side: Side) -> None:
    """From its end on the committed rows stay."""
    old = side.file("old", (1, "s", 1), (2, "t", 2), (3, "s", 3), (4, "t", 4))
    replaced = ReplacedRecords(start=2, end=3, session_ends={"t": 9})
    made = side.joiner.join_files(P, "made", [old], replaced, [], ALL)
    assert made is not None
    assert [row[0] for row in side.rows(made)] == [1, 3]


def test_only_rows_of_the_region_come(side: Side) -> None:
    """The others are another region's; nothing at all makes no file."""
    new = side.file("new", (1, "s", 1), (5, "s", 5), (9, "s", 9))
    made = side.joiner.join_files(P, "made", [], NOTHING, [new], OffsetRange(2, 9))
    assert made is not None
    assert [row[0] for row in side.rows(made)] == [5]
    assert side.joiner.join_files(P, "none", [], NOTHING, [new], OffsetRange(6, 9)) is None


def test_a_file_is_touched_by_a_row_that_is_replaced(side: Side) -> None:
    """By session and offset, not by its range."""
    old = side.file("old", (1, "s", 1), (9, "t", 2))
    assert side.joiner.has_replaced_records(
        old, ReplacedRecords(start=5, end=20, sessions=frozenset({"t"}))
    )
    assert not side.joiner.has_replaced_records(
        old, ReplacedRecords(start=5, end=20, sessions=frozenset({"s"}))
    )
    assert side.joiner.has_records_in([old], OffsetRange(9, 10))
    assert not side.joiner.has_records_in([old], OffsetRange(2, 9))


def test_damage_is_seen_and_never_copied(side: Side) -> None:
    """A flipped bit by the digest alone, a lost file by any look."""
    flipped, lost, well = (side.file(name, (1, "s", 1)) for name in ("flipped", "lost", "well"))
    side.flip(flipped)
    side.lose(lost)
    assert set(side.joiner.find_damaged_files([flipped, lost, well])) == {flipped.path, lost.path}
    assert set(side.joiner.find_damaged_files([flipped, lost, well], check_digests=False)) == {
        lost.path
    }
    for hurt in (flipped, lost):
        with pytest.raises(IntegrityError):
            side.joiner.join_files(P, "made", [hurt], NOTHING, [], ALL)


def test_where_what_is_made_parts_from_what_is_replaced(side: Side) -> None:
    """By offset: another value, one too many, one too few; what stays, or lies elsewhere, is not
    asked.
    """
    old = side.file("a", (1, "x", 1), (2, "y", 2), (3, "x", 3), (9, "x", 9))
    only = ReplacedRecords(start=0, end=5, sessions=frozenset("x"))
    within = OffsetRange(0, 5)
    for stem, rows, expected in (
        ("b", [(1, "x", 1), (3, "x", 3), (7, "x", 7)], None),
        ("c", [(1, "x", 1), (3, "x", 4)], 3),
        ("d", [(1, "x", 1)], 3),
        ("e", [(1, "x", 1), (2, "x", 2), (3, "x", 3)], 2),
    ):
        assert (
            side.joiner.first_difference_offset([old], only, [side.file(stem, *rows)], within)
            == expected
        )
    assert side.joiner.first_difference_offset([], only, [], within) is None
    assert side.joiner.first_difference_offset([old], only, [], within) == 1
