"""Sight: committed record files read again for check, a row group at a time, pages proved by their checksums.

Within a part everything is done on whole columns: which rows are new, whether they are in order, and for each row of a
session the one before it. Only the first and the last of each row become Python values.

Next room: core/evidence.py asks; adapters/gx.py judges the same files by suites.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from seriatim.core.evidence import Part, Wanted, in_bucket
from seriatim.core.ledger import File
from seriatim.ports import Unreadable

OWN = ("topic", "topic_id", "partition", "offset", "index", "session")
BROKEN = (OSError, pa.ArrowException, KeyError, ValueError)
"""What reading a damaged file raises."""
Rows = Any  # a numpy array of row numbers


class FileSight:
    """A stream's record files, below its output path."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def parts(self, file: File, wanted: Wanted) -> Iterator[Part]:
        """A file's rows, a row group at a time."""
        before = (-1, -1, "")
        for table in self._tables(file, wanted):
            part = Part(every=table.num_rows)
            _look(part, table, wanted, before)
            before = tuple(table.column(name)[-1].as_py() for name in ("offset", "index", "topic_id"))
            new = _new(table, wanted)
            part.rows = len(new)
            _spans(part, table, new)
            if wanted.key:
                _rows(part, table, new, wanted)
            yield part

    def _tables(self, file: File, wanted: Wanted) -> Iterator[pa.Table]:
        machine = [*wanted.key, *wanted.columns, *(f"before_{name}" for name in wanted.columns if wanted.before)]
        names = [*OWN, *(["op", *machine] if wanted.key else [])]
        try:
            with pq.ParquetFile(self.root / file.path, page_checksum_verification=True) as parquet:
                there = [name for name in dict.fromkeys(names) if name in parquet.schema_arrow.names]
                for group in range(parquet.num_row_groups):
                    if parquet.metadata.row_group(group).num_rows:
                        yield parquet.read_row_group(group, there, use_threads=False).combine_chunks()
        except BROKEN as error:
            raise Unreadable(f"{file.path}: {str(error).splitlines()[0][:300]}") from None


def _look(part: Part, table: pa.Table, wanted: Wanted, before: tuple[Any, ...]) -> None:
    """Order, and whose rows they are. Folders of the table's partitioning stand for columns that are left out."""
    offsets, indexes = _numbers(table, "offset"), _numbers(table, "index")
    lives, codes = _codes(table.column("topic_id"))
    step, turn = np.diff(offsets, prepend=before[0]), np.diff(indexes, prepend=before[1])
    same = np.diff(codes, prepend=lives.index(before[2]) if before[2] in lives else -1) == 0
    wrong = np.flatnonzero(same & ((step < 0) | ((step == 0) & (turn <= 0))))
    part.disorder = int(offsets[wrong[0]]) if len(wrong) else -1
    for name, mine in (("topic", wanted.partition.topic), ("partition", wanted.partition.number)):
        if name in table.column_names:
            other = np.flatnonzero(~_flags(pc.equal(table.column(name), mine)))
            part.strange = int(offsets[other[0]]) if len(other) and part.strange < 0 else part.strange


def _new(table: pa.Table, wanted: Wanted) -> Rows:
    """The rows that are new, by number."""
    offsets, (lives, codes) = _numbers(table, "offset"), _codes(table.column("topic_id"))
    least = np.array([wanted.since.get(life, np.iinfo(np.int64).max) for life in lives], dtype=np.int64)
    return np.flatnonzero(offsets >= least[codes])


def _spans(part: Part, table: pa.Table, new: Rows) -> None:
    offsets, (lives, codes) = _numbers(table, "offset")[new], _codes(table.column("topic_id"))
    for number, life in enumerate(lives):
        mine = offsets[codes[new] == number]
        if len(mine):
            part.spans[life] = int(mine.min()), int(mine.max())


def _rows(part: Part, table: pa.Table, new: Rows, wanted: Wanted) -> None:
    """Rows of sessions: each as it is met first, as it is left, and whether those between follow each other."""
    names, sessions = _codes(table.column("session"))
    chosen = np.array([name is not None and in_bucket(name, wanted.bucket) for name in names], dtype=bool)
    rows = new[chosen[sessions[new]]]
    if not len(rows):
        return
    table = table.take(pa.array(rows))
    groups = _groups([table.column(name) for name in ("topic_id", "session", *wanted.key)])
    order = np.argsort(groups, kind="stable")
    joined = np.diff(groups[order]) == 0
    first, last = np.sort(order[np.append(True, ~joined)]), np.sort(order[np.append(~joined, True)])
    if wanted.before:
        earlier, later = order[:-1][joined], order[1:][joined]
        wrong = np.sort(later[~_linked(table, earlier, later, wanted)])
        part.unlinked = len(wrong)
        part.unlinked_at = int(_numbers(table, "offset")[wrong[0]]) if len(wrong) else -1
    part.firsts = list(_met(table.take(pa.array(first)), wanted))
    part.lasts = list(_left(table.take(pa.array(last)), wanted))


def _linked(table: pa.Table, earlier: Rows, later: Rows, wanted: Wanted) -> Any:
    """Whether each later row's before-image is its earlier row: none where that was a delete."""
    was, now = table.take(pa.array(earlier)), table.take(pa.array(later))
    deleted = _flags(pc.equal(was.column("op"), "delete"))
    blank = _flags(now.column(f"before_{wanted.key[0]}").is_null())
    equal = np.ones(len(earlier), dtype=bool)
    for name in wanted.columns:
        one, other = was.column(name), now.column(f"before_{name}")
        equal &= _flags(pc.equal(one, other)) | (_flags(one.is_null()) & _flags(other.is_null()))
    return np.where(deleted, blank, equal & ~blank)


def _met(table: pa.Table, wanted: Wanted) -> Iterator[tuple[str, str, Any, tuple[Any, ...] | None, int]]:
    names = [f"before_{name}" for name in wanted.columns] if wanted.before else []
    images: Sequence[tuple[Any, ...] | None] = [None] * table.num_rows
    if names:
        there = _flags(table.column(f"before_{wanted.key[0]}").is_valid()).tolist()
        images = [row if known else None for row, known in zip(_tuples(table, names), there, strict=True)]
    yield from zip(*_places(table, wanted), images, table.column("offset").to_pylist(), strict=True)


def _left(table: pa.Table, wanted: Wanted) -> Iterator[tuple[str, str, Any, tuple[Any, ...] | None, int]]:
    gone = _flags(pc.equal(table.column("op"), "delete")).tolist()
    rows = [None if end else row for row, end in zip(_tuples(table, wanted.columns), gone, strict=True)]
    yield from zip(*_places(table, wanted), rows, table.column("offset").to_pylist(), strict=True)


def _places(table: pa.Table, wanted: Wanted) -> tuple[list[str], list[str], list[Any]]:
    """Topic id, session and key of each row."""
    keys = table.column(wanted.key[0]).to_pylist() if len(wanted.key) == 1 else _tuples(table, wanted.key)
    return table.column("topic_id").to_pylist(), table.column("session").to_pylist(), keys


def _tuples(table: pa.Table, names: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(zip(*(table.column(name).to_pylist() for name in names), strict=True))


def _groups(columns: Sequence[pa.ChunkedArray]) -> Any:
    """A number for each row, the same where all columns are the same."""
    groups = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, codes = _codes(column)
        groups = np.unique(groups * (len(values) + 1) + codes, return_inverse=True)[1]
    return groups


def _codes(column: pa.ChunkedArray) -> tuple[list[Any], Any]:
    """Different values, and their number for each row."""
    coded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    return coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def _numbers(table: pa.Table, name: str) -> Any:
    return table.column(name).to_numpy()


def _flags(column: Any) -> Any:
    """Truth by row; nothing is false."""
    return pc.fill_null(column, False).to_numpy(zero_copy_only=False).astype(bool)
