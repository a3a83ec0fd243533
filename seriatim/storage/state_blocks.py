"""The form of a state file: a Parquet file whose rows are small compressed blocks of sessions, sorted by
name.

    first_session | sessions | quarantined | bloom | unpacked_bytes | block

All columns but `block` are the index of the file: they are small, and are read whole. Of `block` only
the row groups that may have a searched session are read, and only those blocks are unpacked. So that
costs what it touches, however many sessions the file has. A Bloom filter of each block rules out
nearly all names that are not in it, without unpacking the block.

Next: state_files.py keeps the state of a stream in such files.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.errors import ConfigError
from seriatim.storage.parquet import ParquetFileWriter
from seriatim.storage.row_blocks import (
    ROWS_PER_BLOCK,
    PartToWrite,
    RowPart,
    build_index,
    pack_block,
)
from seriatim.storage.store import Store

SESSIONS_PER_BLOCK = 64
BLOCK_BYTES = 64 << 10
"""A block ends with the session that makes it so large, before it is compressed."""
GROUP_BYTES = 1 << 20
"""A row group ends with the block that makes it so large. Whoever needs one block reads its group."""
BLOOM_BITS_PER_NAME = 10
BLOOM_HASHES = 7
"""With ten bits a name and seven hashes, one of about 120 names that are not there seems to be there."""
FORM_VERSION, FORM_WITHOUT_PARTS = 2, 1
"""The newest version of the form, and the one without row parts. Each file is written in the lowest that
it needs. A newer one than these is refused, not guessed at.
"""
FORM_KEY = b"seriatim.state_blocks"
COMPRESSION_KEY = b"seriatim.block_compression"
"""What the file says in its metadata: the version of its form, and how blocks are compressed."""
NO_COMPRESSION = "none"
INDEX_COLUMNS = (
    pa.field("first_session", pa.string(), nullable=False),
    pa.field("sessions", pa.int32(), nullable=False),
    pa.field("quarantined", pa.int32(), nullable=False),
    pa.field("bloom", pa.binary(), nullable=False),
    pa.field("unpacked_bytes", pa.int64(), nullable=False),
)
"""Of each block: its first name, how many sessions it has, how many of them are in quarantine, the
Bloom filter of its names, and its size before it was compressed.
"""
BLOCK_COLUMN = pa.field("block", pa.binary(), nullable=False)
PART_COLUMNS = (
    pa.field("kind", pa.int8(), nullable=False),
    pa.field("rows", pa.int32(), nullable=False),
)
"""Only in files with row parts: what a block has, and how many rows if it has rows."""
SESSION_BLOCK, ROW_BLOCK, ROW_INDEX = 0, 1, 2
"""The kinds of blocks. The row blocks of a session are behind the block in which it is the last, and
their index is behind them.
"""
ROW_COMPRESSION = "lz4_raw"
"""Many small blocks are unpacked for a few rows each. With zstd, beginning alone takes ten times as long
as unpacking a block with this, and the blocks are a sixth smaller. An index is not compressed at all:
hashes do not compress.
"""
KEPT_BYTES_MAX = 64 << 20
"""So many bytes of row groups stay in memory for the next batches, which need other rows of them."""


class SessionRows(Struct, array_like=True):
    """Some sessions of a state, sorted by name. A block has one such value."""

    names: list[str]
    findings: list[str | None]
    """None: the session is live. The packed session has it, too. It serves to find the sessions in
    quarantine without unpacking the others.
    """
    packed_sessions: list[bytes]
    """See engine/session.py."""

    def quarantined_names(self) -> list[str]:
        """The names of the sessions that are in quarantine."""
        pairs = zip(self.names, self.findings, strict=True)
        return [name for name, finding in pairs if finding is not None]

    def find_packed(self, names: Iterable[str]) -> dict[str, bytes]:
        """Those of these sessions that are among the rows."""
        packed_by_name: dict[str, bytes] = {}
        for name in names:
            row = bisect_left(self.names, name)
            if row < len(self.names) and self.names[row] == name:
                packed_by_name[name] = self.packed_sessions[row]
        return packed_by_name


FindPart = Callable[[str, bytes], PartToWrite | None]
"""Gives the row part of a session, by its name and what is packed of it; None if it has none."""

_encode = msgspec.msgpack.Encoder().encode
_decode_rows = msgspec.msgpack.Decoder(SessionRows).decode


class StateBlockWriter:
    """Writes one state file. The sessions must come sorted by name, each once. Nobody sees the file
    before it is finished.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        compression: str,
        *,
        with_row_parts: bool = False,
    ) -> None:
        self.compression = compression
        self.sessions = 0
        self.stored_rows = 0
        """Rows and removals in row parts."""
        columns = [*INDEX_COLUMNS, BLOCK_COLUMN]
        version = FORM_WITHOUT_PARTS
        if with_row_parts:
            columns += PART_COLUMNS
            version = FORM_VERSION
        metadata = {FORM_KEY: str(version), COMPRESSION_KEY: compression}
        self._schema = pa.schema(columns, metadata)
        # The blocks are compressed one by one, so that each can be unpacked alone.
        self._file = ParquetFileWriter(store, path, self._schema, NO_COMPRESSION)
        self._block = SessionRows([], [], [])
        self._block_bytes = 0
        self._group: list[dict[str, Any]] = []
        self._group_bytes = 0

    @property
    def written_bytes(self) -> int:
        """How large the file is so far, without the block that is being filled."""
        return self._file.written_bytes + self._group_bytes

    def add(self, rows: SessionRows, find_part: FindPart | None = None) -> None:
        """Add sessions, and of those that have one the row part. A block is written once it is full."""
        block = self._block
        for name, finding, packed in zip(
            rows.names, rows.findings, rows.packed_sessions, strict=True
        ):
            block.names.append(name)
            block.findings.append(finding)
            block.packed_sessions.append(packed)
            self._block_bytes += len(packed)
            row_part = None if find_part is None else find_part(name, packed)
            is_full = len(block.names) >= SESSIONS_PER_BLOCK or self._block_bytes >= BLOCK_BYTES
            if is_full or row_part is not None:
                self._end_block()
                block = self._block
            if row_part is not None:
                self._add_part(name, row_part)

    def _end_block(self) -> None:
        block = self._block
        content = _encode(block)
        self._add_to_group(
            content,
            _compress(content, self.compression),
            first_session=block.names[0],
            sessions=len(block.names),
            quarantined=len(block.quarantined_names()),
            bloom=_bloom_bits(block.names),
        )
        self.sessions += len(block.names)
        self._block = SessionRows([], [], [])
        self._block_bytes = 0

    def _add_part(self, name: str, row_part: PartToWrite) -> None:
        """Add the rows of a session, block by block, and their index."""
        hashes: list[int] = []
        numbers: list[int] = []
        packed_rows: list[bytes] = []
        block_bytes = 0
        for rows in row_part.rows():
            for key_hash, number, packed in rows:
                hashes.append(key_hash)
                numbers.append(number)
                packed_rows.append(packed)
                block_bytes += len(packed)
                if len(numbers) >= ROWS_PER_BLOCK or block_bytes >= BLOCK_BYTES:
                    self._add_row_block(name, numbers, packed_rows)
                    numbers = []
                    packed_rows = []
                    block_bytes = 0
        if numbers:
            self._add_row_block(name, numbers, packed_rows)
        removed_hashes = row_part.removed_hashes()
        index = build_index(hashes, removed_hashes, is_complete=row_part.is_complete)
        self._add_to_group(index, index, first_session=name, kind=ROW_INDEX)
        self.stored_rows += len(hashes) + len(removed_hashes)

    def _add_row_block(
        self, name: str, numbers: Sequence[int], packed_rows: Sequence[bytes]
    ) -> None:
        content = pack_block(numbers, packed_rows)
        stored = _compress(content, _compression_of(ROW_BLOCK, self.compression))
        rows = len(numbers)
        self._add_to_group(
            content,
            stored,
            first_session=name,
            kind=ROW_BLOCK,
            rows=rows,
        )

    def _add_to_group(
        self,
        content: bytes,
        stored: bytes,
        *,
        first_session: str,
        sessions: int = 0,
        quarantined: int = 0,
        bloom: bytes = b"",
        kind: int = SESSION_BLOCK,
        rows: int = 0,
    ) -> None:
        self._group.append(
            {
                "first_session": first_session,
                "sessions": sessions,
                "quarantined": quarantined,
                "bloom": bloom,
                "unpacked_bytes": len(content),
                "block": stored,
                "kind": kind,
                "rows": rows,
            }
        )
        self._group_bytes += len(stored)
        if self._group_bytes >= GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        batch = pa.RecordBatch.from_pylist(self._group, self._schema)
        self._file.add(batch, rows_per_group=1)
        self._group = []
        self._group_bytes = 0

    def finish(self) -> File | None:
        """Write the last block, and publish the file. Returns its description for the ledger; None if
        there were no sessions.
        """
        if self._block.names:
            self._end_block()
        if self._group:
            self._write_group()
        file = self._file.finish()
        if file is None:
            return None
        # The rows of the file are blocks. What the ledger counts are sessions, and rows in row parts.
        return replace(file, rows=self.sessions + self.stored_rows)


class StateBlocks:
    """One state file, opened. It keeps the index, and reads a block when it is asked for."""

    def __init__(self, parquet: pq.ParquetFile) -> None:
        metadata = parquet.metadata.metadata
        version = int(metadata[FORM_KEY])
        if version > FORM_VERSION:
            raise ConfigError(
                f"the state was written by a newer Seriatim: its file has form {version},"
                f" this one knows {FORM_VERSION}",
                next="install a version that is at least as new as the one that wrote it",
            )
        self._compression = metadata[COMPRESSION_KEY].decode()
        self._parquet = parquet
        columns = [*INDEX_COLUMNS]
        if version > FORM_WITHOUT_PARTS:
            columns += PART_COLUMNS
        index = parquet.read([field.name for field in columns]).combine_chunks()
        self._unpacked_sizes = index.column("unpacked_bytes").to_numpy()
        self._part_edges: dict[str, tuple[int, list[int]]] = {}
        """By session: the number of its first row block, and how many rows each of them has."""
        self._session_blocks = np.arange(len(index))
        """The numbers of the blocks that have sessions."""
        self._kinds: list[int] = [SESSION_BLOCK] * len(index)
        self._kept_groups: dict[int, pa.ChunkedArray] = {}
        """The blocks of row groups that were read for some of their rows, the last one last."""
        if version > FORM_WITHOUT_PARTS:
            kinds = index.column("kind").to_numpy()
            self._kinds = kinds.tolist()
            self._session_blocks = np.flatnonzero(kinds == SESSION_BLOCK)
            self._find_parts(index, np.flatnonzero(kinds == ROW_INDEX).tolist())
            index = index.take(self._session_blocks)
        self._first_names: list[str] = index.column("first_session").to_pylist()
        self._quarantined = index.column("quarantined").to_numpy()
        self._blooms = _BloomFilters(index.column("bloom"))
        groups = range(parquet.num_row_groups)
        sizes = [parquet.metadata.row_group(group).num_rows for group in groups]
        self._group_edges = list(accumulate(sizes, initial=0))
        """The number of the first block of each row group, and the number of all blocks."""

    def _find_parts(self, index: pa.Table, index_blocks: Iterable[int]) -> None:
        """Note where the row part of each session is. It begins behind the last block of sessions."""
        rows = index.column("rows").to_numpy()
        names = index.column("first_session")
        for index_block in index_blocks:
            session_position = np.searchsorted(self._session_blocks, index_block)
            first_block = int(self._session_blocks[session_position - 1]) + 1
            sizes = rows[first_block:index_block].tolist()
            self._part_edges[names[index_block].as_py()] = first_block, sizes

    @property
    def has_parts(self) -> bool:
        """Whether a session of this file is stored row by row."""
        return bool(self._part_edges)

    def part_of(self, name: str) -> RowPart | None:
        """The row part of a session; None if it has none here."""
        if name not in self._part_edges:
            return None
        first_block, sizes = self._part_edges[name]
        return RowPart(self, first_block, sizes)

    def find_packed(self, names: Collection[str]) -> dict[str, bytes]:
        """Those of these sessions that are in this file, packed. Only blocks that may have them are
        unpacked.
        """
        # 1. In which block each name would be: the last one that does not begin behind it.
        pairs = [(bisect_right(self._first_names, name) - 1, name) for name in sorted(names)]
        pairs = [(block, name) for block, name in pairs if block >= 0]
        # 2. Which names these blocks may have.
        names_by_block: dict[int, list[str]] = {}
        for position in self._blooms.find_possible(pairs):
            block, name = pairs[position]
            names_by_block.setdefault(block, []).append(name)
        # 3. Read these blocks. They are sorted, because the names were.
        packed_sessions: dict[str, bytes] = {}
        blocks = list(names_by_block)
        file_blocks = self._session_blocks[blocks].tolist()
        for block, rows in zip(blocks, self.read_blocks(file_blocks), strict=True):
            packed_sessions.update(rows.find_packed(names_by_block[block]))
        return packed_sessions

    def find_names(self, names: Collection[str]) -> set[str]:
        """Which of these sessions are in this file."""
        return set(self.find_packed(names))

    def quarantined_names(self) -> set[str]:
        """The names of the sessions that are in quarantine."""
        names: set[str] = set()
        blocks = self._session_blocks[np.flatnonzero(self._quarantined)]
        for rows in self.read_blocks(blocks.tolist()):
            names.update(rows.quarantined_names())
        return names

    def sorted_rows(self) -> Iterator[SessionRows]:
        """All sessions, block by block, sorted by name."""
        return self.read_blocks(self._session_blocks.tolist())

    def read_blocks(self, blocks: Iterable[int]) -> Iterator[SessionRows]:
        """The sessions of each of these blocks, whose numbers rise."""
        return map(_decode_rows, self.read_contents(blocks))

    def read_contents(
        self,
        blocks: Iterable[int],
        *,
        keeps_groups: bool = False,
    ) -> Iterator[pa.Buffer]:
        """The contents of these blocks, whose numbers rise. Of the file one row group is in memory at a
        time, or some of them if they are kept. Its pages are proved by their checksums.
        """
        for group, blocks_of_group in groupby(blocks, self._group_of):
            column = self._read_group(group, keeps_groups=keeps_groups)
            for block in blocks_of_group:
                stored = column[block - self._group_edges[group]].as_buffer()
                unpacked_size = int(self._unpacked_sizes[block])
                compression = _compression_of(self._kinds[block], self._compression)
                yield _decompress(stored, unpacked_size, compression)

    def _read_group(self, group: int, *, keeps_groups: bool) -> pa.ChunkedArray:
        if group in self._kept_groups:
            return self._kept_groups[group]
        column = self._parquet.read_row_group(group, [BLOCK_COLUMN.name]).column(0)
        if keeps_groups:
            self._kept_groups[group] = column
            while sum(kept.nbytes for kept in self._kept_groups.values()) > KEPT_BYTES_MAX:
                del self._kept_groups[next(iter(self._kept_groups))]
        return column

    def _group_of(self, block: int) -> int:
        return bisect_right(self._group_edges, block) - 1


def has_blocks(parquet: pq.ParquetFile) -> bool:
    """Whether a state file has the form of this module. Files of before have a row for each session."""
    return FORM_KEY in (parquet.metadata.metadata or {})


def merge_rows(sources: Sequence[Iterable[SessionRows]]) -> Iterator[SessionRows]:
    """The sessions of several sources, oldest source first, each sorted by name. If several sources
    have a session, that of the newest is taken. Of each source only some rows are in memory.
    """
    readers = [_MergedSource(source) for source in sources]
    readers = [reader for reader in readers if reader.read_next()]
    while readers:
        # Behind this name a source may have more rows that have not been read.
        last_name = min(reader.last_name for reader in readers)
        merged: dict[str, tuple[str | None, bytes]] = {}
        for reader in readers:  # the newest comes last, and wins
            merged.update(reader.take_up_to(last_name))
        names = sorted(merged)
        findings = [merged[name][0] for name in names]
        packed_sessions = [merged[name][1] for name in names]
        yield SessionRows(names, findings, packed_sessions)
        readers = [reader for reader in readers if reader.read_next()]


class _MergedSource:
    """A source of a merge, and the rows of it that were read and not yet taken."""

    def __init__(self, source: Iterable[SessionRows]) -> None:
        self._source = iter(source)
        self._rows = SessionRows([], [], [])
        self._taken = 0

    @property
    def last_name(self) -> str:
        return self._rows.names[-1]

    def read_next(self) -> bool:
        """Read on if all rows were taken. False if there are no more."""
        while self._taken == len(self._rows.names):
            rows = next(self._source, None)
            if rows is None:
                return False
            self._rows = rows
            self._taken = 0
        return True

    def take_up_to(self, last_name: str) -> Iterator[tuple[str, tuple[str | None, bytes]]]:
        """The rows up to this name: (name, (finding, packed session))."""
        rows = self._rows
        begin = self._taken
        end = bisect_right(rows.names, last_name, begin)
        self._taken = end
        contents = zip(rows.findings[begin:end], rows.packed_sessions[begin:end], strict=True)
        return zip(rows.names[begin:end], contents, strict=True)


class _BloomFilters:
    """The Bloom filters of all blocks of a file."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        filters = column.combine_chunks()
        _, offsets, bits = filters.buffers()
        ends = np.frombuffer(offsets, np.int32)[filters.offset : filters.offset + len(filters) + 1]
        self._begins = ends[:-1].astype(np.uint64)
        """Where the filter of each block begins among the bytes of all."""
        self._sizes = np.diff(ends).astype(np.uint64)
        self._bytes = np.frombuffer(bits, np.uint8)

    def find_possible(self, pairs: Sequence[tuple[int, str]]) -> list[int]:
        """The positions of those pairs of block and name of which the block may have the name."""
        blocks = np.fromiter((block for block, _ in pairs), np.int64, len(pairs))
        hashes = _hash_names([name for _, name in pairs])
        bit_numbers = _bloom_bit_numbers(hashes, 8 * self._sizes[blocks])
        byte_numbers = self._begins[blocks][:, None] + (bit_numbers >> np.uint64(3))
        masks = np.uint8(1) << (bit_numbers & np.uint64(7)).astype(np.uint8)
        is_possible = (self._bytes[byte_numbers] & masks).all(axis=1)
        positions: list[int] = np.flatnonzero(is_possible).tolist()
        return positions


def _hash_names(names: Sequence[str]) -> Any:
    hashes = (xxhash.xxh3_64_intdigest(name.encode()) for name in names)
    return np.fromiter(hashes, np.uint64, len(names))


def _bloom_bits(names: Sequence[str]) -> bytes:
    """A Bloom filter of names."""
    bit_count = 8 * (1 + len(names) * BLOOM_BITS_PER_NAME // 8)
    is_set = np.zeros(bit_count, np.bool_)
    is_set[_bloom_bit_numbers(_hash_names(names), np.full(len(names), bit_count, np.uint64))] = True
    return np.packbits(is_set, bitorder="little").tobytes()


def _bloom_bit_numbers(hashes: Any, bit_counts: Any) -> Any:
    """The bits of each name in a filter of so many bits: a line per name. One hash gives a first bit
    and the step to the next.
    """
    first_bits = hashes & np.uint64(0xFFFFFFFF)
    steps = (hashes >> np.uint64(32)) | np.uint64(1)
    turns = np.arange(BLOOM_HASHES, dtype=np.uint64)
    return (first_bits[:, None] + steps[:, None] * turns) % bit_counts[:, None]


def _compression_of(kind: int, session_compression: str) -> str:
    """How blocks of a kind are compressed, in a file whose sessions are compressed so."""
    if session_compression == NO_COMPRESSION or kind == ROW_INDEX:
        return NO_COMPRESSION
    return ROW_COMPRESSION if kind == ROW_BLOCK else session_compression


def _compress(content: bytes, compression: str) -> bytes:
    if compression == NO_COMPRESSION:
        return content
    compressed: bytes = pa.compress(content, codec=compression, asbytes=True)
    return compressed


def _decompress(stored: pa.Buffer, unpacked_size: int, compression: str) -> pa.Buffer:
    if compression == NO_COMPRESSION:
        return stored
    return pa.decompress(stored, unpacked_size, codec=compression)
