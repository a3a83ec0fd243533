"""Row parts in a state file: the rows of large sessions, in blocks of their own, each part with an index.

A part is some blocks of rows, in the order of their numbers, and behind them its index: the sorted
hashes of their keys, and where each row is. So a few rows are found among many by the index alone,
also that they are not there, and only their blocks are unpacked.

Next: state_blocks.py writes parts behind the sessions that they belong to; engine/row_parts.py says what
they mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec import Struct

from seriatim.engine.row_parts import RowChanges, StoredRow
from seriatim.errors import ensure

END, NUMBER = struct.Struct("<I"), struct.Struct("<q")
ROWS_PER_BLOCK = 64
"""Whoever needs one row unpacks its block."""

Array = Any


class RowBlock:
    """Some rows of a part. One of them is taken out without looking at the others: making objects of all
    would cost more than unpacking the block.

    Its content is little-endian: for each row where it ends (uint32), for each row its number (int64),
    and the packed rows.
    """

    def __init__(self, content: bytes, size: int) -> None:
        self._content = content
        self._size = size
        self._first_row = (END.size + NUMBER.size) * size

    def row(self, position: int) -> tuple[int, bytes]:
        """The number of a row, and the row."""
        begin = 0
        if position:
            (begin,) = END.unpack_from(self._content, END.size * (position - 1))
        (end,) = END.unpack_from(self._content, END.size * position)
        numbers_begin = END.size * self._size
        (number,) = NUMBER.unpack_from(self._content, numbers_begin + NUMBER.size * position)
        return number, self._content[self._first_row + begin : self._first_row + end]

    def rows(self) -> Iterator[tuple[int, bytes]]:
        """All rows with their numbers."""
        return map(self.row, range(self._size))


def pack_block(numbers: Sequence[int], packed_rows: Sequence[bytes]) -> bytes:
    """The content of a block with these rows."""
    ends = accumulate(map(len, packed_rows))
    size = len(numbers)
    header = struct.pack(f"<{size}I{size}q", *ends, *numbers)
    return header + b"".join(packed_rows)


class RowIndex(Struct, array_like=True):
    """The index of a part. Its arrays are little-endian."""

    is_complete: bool
    """Whether older parts of the session are void."""
    hashes: memoryview
    """uint64: the hash of each row, sorted."""
    positions: memoryview
    """uint32: for each of these hashes, which row of the part it is."""
    removed_hashes: memoryview
    """uint64: hashes that have no row any more, sorted."""


class BlockReader(Protocol):
    """A file of blocks."""

    def read_contents(
        self,
        blocks: Iterable[int],
        *,
        keeps_groups: bool = False,
    ) -> Iterator[Any]:
        """The unpacked contents of blocks whose numbers rise. With `keeps_groups` what was read around
        them is kept for the next call.
        """


_encode_index = msgspec.msgpack.Encoder().encode
_decode_index = msgspec.msgpack.Decoder(RowIndex).decode


def build_index(
    hashes: Sequence[int],
    removed_hashes: Collection[int],
    *,
    is_complete: bool,
) -> bytes:
    """The index of a part, from the hashes of its rows in their order."""
    hash_array = np.array(hashes, np.uint64)
    order = np.argsort(hash_array, kind="stable")
    removed_array = np.array(sorted(removed_hashes), np.uint64)
    index = RowIndex(
        is_complete=is_complete,
        hashes=hash_array[order].data,
        positions=order.astype(np.uint32).data,
        removed_hashes=removed_array.data,
    )
    return _encode_index(index)


class RowPart:
    """The rows of one session in one state file. The index is read when it is first needed."""

    def __init__(
        self,
        reader: BlockReader,
        first_block: int,
        block_sizes: Sequence[int],
    ) -> None:
        self._reader = reader
        self._first_block = first_block
        self._edges: Array = np.cumsum([0, *block_sizes])
        """The number of the first row of each block, and the number of all rows."""
        self._index: _OpenIndex | None = None

    @property
    def _block_count(self) -> int:
        return len(self._edges) - 1

    @property
    def index(self) -> _OpenIndex:
        """The index, which lies behind the last block of rows."""
        if self._index is None:
            (content,) = self._reader.read_contents([self._first_block + self._block_count])
            self._index = _OpenIndex(_decode_index(content))
        return self._index

    @property
    def stored_count(self) -> int:
        """How many rows and removals the part has."""
        return int(self._edges[-1]) + len(self.index.removed_hashes)

    def read_rows(self, positions: Array, hashes: Array) -> list[StoredRow]:
        """The rows at these positions, which have these hashes. Only their blocks are unpacked."""
        order = np.argsort(positions)
        positions = positions[order]
        blocks = np.searchsorted(self._edges, positions, "right") - 1
        rows_in_blocks = positions - self._edges[blocks]
        distinct_blocks = np.unique(blocks) + self._first_block
        block_numbers = distinct_blocks.tolist()
        contents = self._reader.read_contents(block_numbers, keeps_groups=True)
        rows = []
        last_number = -1
        block = RowBlock(b"", 0)
        columns: tuple[Array, ...] = (blocks, rows_in_blocks, hashes[order])
        for number, row, key_hash in zip(*[c.tolist() for c in columns], strict=True):
            if number != last_number:
                block = self._open_block(number, next(contents))
                last_number = number
            rows.append(StoredRow(key_hash, *block.row(row)))
        return rows

    def _open_block(self, number: int, content: Any) -> RowBlock:
        size = int(self._edges[number + 1] - self._edges[number])
        return RowBlock(bytes(content), size)

    def read_in_order(self, void_hashes: Array = ()) -> Iterator[list[StoredRow]]:
        """The rows, block by block, without those of some hashes."""
        is_valid = np.ones(len(self.index.hashes), np.bool_)
        void_positions, _ = self.index.find_positions(np.asarray(void_hashes, np.uint64))
        is_valid[void_positions] = False
        hashes: Array = np.empty(len(is_valid), np.uint64)
        hashes[self.index.positions] = self.index.hashes
        numbers = range(self._first_block, self._first_block + self._block_count)
        for i, content in enumerate(self._reader.read_contents(numbers)):
            span = slice(self._edges[i], self._edges[i + 1])
            pairs = zip(
                hashes[span].tolist(),
                self._open_block(i, content).rows(),
                strict=True,
            )
            rows = (StoredRow(key_hash, *row) for key_hash, row in pairs)
            valid = is_valid[span]
            if valid.all():
                yield list(rows)
            else:
                yield [row for row, keeps in zip(rows, valid.tolist(), strict=True) if keeps]


class _OpenIndex:
    """The index of a part, as arrays."""

    def __init__(self, index: RowIndex) -> None:
        self.is_complete = index.is_complete
        self.hashes: Array = np.frombuffer(index.hashes, np.uint64)
        self.positions: Array = np.frombuffer(index.positions, np.uint32)
        self.removed_hashes: Array = np.frombuffer(index.removed_hashes, np.uint64)

    def find_positions(self, wanted_hashes: Array) -> tuple[Array, Array]:
        """Where the rows with these hashes are in the part, and the hash of each of them."""
        begins = np.searchsorted(self.hashes, wanted_hashes, "left")
        ends = np.searchsorted(self.hashes, wanted_hashes, "right")
        counts = ends - begins
        # Nearly always there is one row of a hash. The general form is for those that have more.
        run_starts = np.cumsum(counts) - counts
        numbers_in_run = np.arange(counts.sum()) - np.repeat(run_starts, counts)
        places = np.repeat(begins, counts) + numbers_in_run
        positions = self.positions[places].astype(np.int64)
        return positions, self.hashes[places]

    def knows(self, wanted_hashes: Array) -> Array:
        """Which of these hashes the part decides about: it has a row of it, or has removed all."""
        has_rows = _is_in(self.hashes, wanted_hashes)
        has_removed = _is_in(self.removed_hashes, wanted_hashes)
        return has_rows | has_removed


def _is_in(sorted_hashes: Array, wanted_hashes: Array) -> Array:
    if not len(sorted_hashes):
        return np.zeros(len(wanted_hashes), np.bool_)
    places: Array = np.searchsorted(sorted_hashes, wanted_hashes)
    places[places == len(sorted_hashes)] = 0
    return sorted_hashes[places] == wanted_hashes


class RowParts:
    """The rows of one session in several files. It is a `RowSource`.

    Parts behind a complete one are void. If none is complete, files that are not here have more rows.
    """

    def __init__(self, candidates: Callable[[], Iterable[RowPart]]) -> None:
        self._candidates = candidates
        """The parts of the session in the files, newest first. It is asked once, when it is needed."""
        self._parts: list[RowPart] | None = None

    @property
    def row_parts(self) -> list[RowPart]:
        """The parts, newest first, up to the first complete one."""
        if self._parts is None:
            self._parts = []
            for row_part in self._candidates():
                self._parts.append(row_part)
                if row_part.index.is_complete:
                    break
        return self._parts

    @property
    def is_complete(self) -> bool:
        """Whether these are all rows of the session."""
        return bool(self.row_parts) and self.row_parts[-1].index.is_complete

    @property
    def stored_count(self) -> int:
        """How many rows and removals the parts have, also those that a newer part has again."""
        return sum(row_part.stored_count for row_part in self.row_parts)

    def find(self, key_hashes: Collection[int]) -> list[StoredRow]:
        """All rows with these hashes."""
        ensure(self.is_complete, "a row is looked for in all parts of its session")
        wanted = np.fromiter(sorted(key_hashes), np.uint64, len(key_hashes))
        rows: list[StoredRow] = []
        for row_part in self.row_parts:
            positions, hashes = row_part.index.find_positions(wanted)
            if len(positions):
                rows += row_part.read_rows(positions, hashes)
            wanted = wanted[~row_part.index.knows(wanted)]
            if not len(wanted):
                break
        return rows

    def read_all(self) -> Iterator[StoredRow]:
        """All rows, in the order of their numbers."""
        ensure(self.is_complete, "all rows of a session are read from all of its parts")
        for rows in PartToWrite(self, None).rows():
            yield from rows


class PartToWrite:
    """The part of a session that a new file gets: that of the files that are merged, with the changes of
    a slice on top.
    """

    def __init__(self, row_parts: RowParts, changes: RowChanges | None) -> None:
        self._changes = changes
        self._parts = row_parts.row_parts
        self.is_complete = row_parts.is_complete
        if changes is not None and changes.is_complete:
            self._parts = []
            self.is_complete = True

    def rows(self) -> Iterator[list[StoredRow]]:
        """The rows, in the order of their numbers. Of each file one block is in memory."""
        sources: list[Iterator[list[StoredRow]]] = []
        void_hashes = np.zeros(0, np.uint64)
        if self._changes is not None:
            changed_rows = list(self._changes.rows)
            if changed_rows:
                sources.append(iter([changed_rows]))
            void_hashes = np.concatenate(_hashes_of_changes(self._changes))
        for row_part in self._parts:
            sources.append(row_part.read_in_order(void_hashes))
            index = row_part.index
            void_hashes = np.concatenate([void_hashes, index.hashes, index.removed_hashes])
        return _merge_by_number(sources)

    def removed_hashes(self) -> list[int]:
        """The hashes that have no row any more, and may have one in files that are older."""
        if self.is_complete:
            return []
        steps = [(row_part.index.hashes, row_part.index.removed_hashes) for row_part in self._parts]
        if self._changes is not None:
            steps.insert(0, _hashes_of_changes(self._changes))
        removed: Array = np.zeros(0, np.uint64)
        for hashes, removed_by_step in reversed(steps):  # oldest first
            still_removed = np.setdiff1d(removed, hashes)
            removed = np.union1d(still_removed, removed_by_step)
        removed_list: list[int] = removed.tolist()
        return removed_list


def _hashes_of_changes(changes: RowChanges) -> tuple[Array, Array]:
    """The hashes of changed rows, and those that were removed."""
    hashes = np.array([row.key_hash for row in changes.rows], np.uint64)
    return hashes, np.array(list(changes.removed_hashes), np.uint64)


def _merge_by_number(sources: Iterable[Iterator[list[StoredRow]]]) -> Iterator[list[StoredRow]]:
    readers = [_NumberedSource(source) for source in sources]
    readers = [reader for reader in readers if reader.read_next()]
    while readers:
        if len(readers) == 1:
            yield readers[0].take_rest()
        else:
            # Behind this number a source may have more rows that have not been read.
            last_number = min(reader.last_number for reader in readers)
            rows: list[StoredRow] = []
            for reader in readers:
                rows += reader.take_up_to(last_number)
            rows.sort(key=_number_of)
            yield rows
        readers = [reader for reader in readers if reader.read_next()]


def _number_of(row: StoredRow) -> int:
    return row.number


class _NumberedSource:
    """A source of a merge, and the rows of it that were read and not yet taken."""

    def __init__(self, source: Iterator[list[StoredRow]]) -> None:
        self._source = source
        self._rows: list[StoredRow] = []

    @property
    def last_number(self) -> int:
        return self._rows[-1].number

    def read_next(self) -> bool:
        """Read on if all rows were taken. False if there are no more."""
        while not self._rows:
            rows = next(self._source, None)
            if rows is None:
                return False
            self._rows = rows
        return True

    def take_rest(self) -> list[StoredRow]:
        """The rows that were read."""
        rows = self._rows
        self._rows = []
        return rows

    def take_up_to(self, last_number: int) -> list[StoredRow]:
        """The rows that were read, up to this number."""
        if self.last_number <= last_number:
            return self.take_rest()
        end = 0
        while self._rows[end].number <= last_number:
            end += 1
        rows = self._rows[:end]
        self._rows = self._rows[end:]
        return rows
