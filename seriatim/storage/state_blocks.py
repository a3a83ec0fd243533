"""The form of a state file: sessions sorted by name, in small compressed blocks, and an index of them.

    block | block | ... | index | footer

Whoever needs a few sessions reads the footer, the index, and the blocks that may have them. So that
costs what it touches, however many sessions the file has. A Bloom filter in the index rules out nearly
all names that are not in the file, without reading a block.

Next: state_files.py keeps the state of a stream in such files.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import xxhash
from msgspec import Struct

from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import File
from seriatim.errors import ConfigError, raise_broken_promise
from seriatim.storage.store import AlreadyThereError, Sink, Store

SESSIONS_PER_BLOCK = 64
BLOCK_BYTES = 64 << 10
"""A block ends with the session that makes it so large, before it is compressed."""
WRITE_BYTES = 1 << 20
"""Blocks are handed to the store in pieces of about this size."""
BLOOM_BITS_PER_NAME = 10
BLOOM_HASHES = 7
"""With ten bits a name and seven hashes, one of about 120 names that are not there seems to be there."""
BLOOM_BATCH = 1 << 16
FORM_VERSION = 1
"""The version of the form that is written. A newer one is refused, not guessed at."""
MAGIC = b"SRTSTATE"
FOOTER = struct.Struct("<QQII8s")
"""Size of the index as it is stored, its size before it was compressed, its checksum, the version of
the form, and `MAGIC`.
"""
INDEX_COMPRESSION = "zstd"
NO_COMPRESSION = "none"


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
        found: dict[str, bytes] = {}
        for name in names:
            row = bisect_left(self.names, name)
            if row < len(self.names) and self.names[row] == name:
                found[name] = self.packed_sessions[row]
        return found


class BlockIndex(Struct, array_like=True):
    """What a file says of its blocks. Numbers are little-endian."""

    compression: str
    first_names: list[str]
    """The first name of each block."""
    block_ends: bytes
    """Where each block ends in the file: unsigned numbers of eight bytes."""
    unpacked_sizes: bytes
    """The sizes of the blocks before they were compressed: unsigned numbers of eight bytes."""
    checksums: bytes
    """The XXH32 of each block as it is stored: unsigned numbers of four bytes."""
    quarantined_blocks: list[int]
    """The numbers of the blocks that have sessions in quarantine."""
    bloom_bits: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_rows = msgspec.msgpack.Decoder(SessionRows).decode
_decode_index = msgspec.msgpack.Decoder(BlockIndex).decode


class StateBlockWriter:
    """Writes one state file. The sessions must come sorted by name, each once. Nobody sees the file
    before it is finished.
    """

    def __init__(self, store: Store, path: str, compression: str) -> None:
        self.store = store
        self.path = path
        self.compression = compression
        self.rows = 0
        self._sink: Sink | None = None
        self._waiting_bytes = bytearray()
        self._written_bytes = 0
        self._block = SessionRows([], [], [])
        self._block_bytes = 0
        self._name_hashes = array("Q")
        self._first_names: list[str] = []
        self._block_ends = array("Q")
        self._unpacked_sizes = array("Q")
        self._checksums = array("I")
        self._quarantined_blocks: list[int] = []

    @property
    def written_bytes(self) -> int:
        """How large the file is so far, without the block that is being filled."""
        return self._written_bytes

    def add(self, rows: SessionRows) -> None:
        """Add sessions. A block is written once it is full."""
        block = self._block
        for name, finding, packed in zip(
            rows.names, rows.findings, rows.packed_sessions, strict=True
        ):
            block.names.append(name)
            block.findings.append(finding)
            block.packed_sessions.append(packed)
            self._block_bytes += len(packed)
            if len(block.names) >= SESSIONS_PER_BLOCK or self._block_bytes >= BLOCK_BYTES:
                self._write_block()
                block = self._block

    def _write_block(self) -> None:
        block = self._block
        if block.quarantined_names():
            self._quarantined_blocks.append(len(self._first_names))
        self._first_names.append(block.names[0])
        self._name_hashes.extend(map(_hash_name, block.names))
        self.rows += len(block.names)
        content = _encode(block)
        stored = _compress(content, self.compression)
        self._unpacked_sizes.append(len(content))
        self._checksums.append(xxhash.xxh32_intdigest(stored))
        self._write(stored)
        self._block_ends.append(self._written_bytes)
        self._block = SessionRows([], [], [])
        self._block_bytes = 0

    def _write(self, content: bytes) -> None:
        self._waiting_bytes += content
        self._written_bytes += len(content)
        if len(self._waiting_bytes) >= WRITE_BYTES:
            self._write_waiting_bytes()

    def _write_waiting_bytes(self) -> None:
        if self._sink is None:
            self._sink = self.store.writer(self.path)
            crash_point("record-file-open")
        self._sink.write(bytes(self._waiting_bytes))
        self._waiting_bytes.clear()
        crash_point("record-file-half")

    def finish(self) -> File | None:
        """Write the last block, the index and the footer, and publish the file. Returns its description
        for the ledger; None if there were no sessions.
        """
        if self._block.names:
            self._write_block()
        if not self.rows:
            return None
        content = _encode(self._index())
        stored = _compress(content, INDEX_COMPRESSION)
        checksum = xxhash.xxh32_intdigest(stored)
        self._write(stored + FOOTER.pack(len(stored), len(content), checksum, FORM_VERSION, MAGIC))
        self._write_waiting_bytes()
        try:
            written = self._sink.finish()  # type: ignore[union-attr]  # opened by what was written
        except AlreadyThereError:
            raise_broken_promise("the file is there already", path=self.path)
        return File(
            path=self.path,
            size_bytes=written.size_bytes,
            rows=self.rows,
            digest=written.xxh3,
            sha256=written.sha256,
        )

    def _index(self) -> BlockIndex:
        hashes = np.frombuffer(self._name_hashes, np.uint64)
        return BlockIndex(
            compression=self.compression,
            first_names=self._first_names,
            block_ends=self._block_ends.tobytes(),
            unpacked_sizes=self._unpacked_sizes.tobytes(),
            checksums=self._checksums.tobytes(),
            quarantined_blocks=self._quarantined_blocks,
            bloom_bits=_bloom_bits(hashes),
        )


class StateBlocks:
    """One state file, opened. It keeps the index, and reads a block when it is asked for."""

    def __init__(self, content: pa.NativeFile) -> None:
        self._content = content
        index_end = content.size() - FOOTER.size
        footer = content.read_at(FOOTER.size, index_end)
        stored_size, unpacked_size, checksum, version, _ = FOOTER.unpack(footer)
        if version > FORM_VERSION:
            raise ConfigError(
                f"the state was written by a newer Seriatim: its file has form {version},"
                f" this one knows {FORM_VERSION}",
                next="install a version that is at least as new as the one that wrote it",
            )
        stored = content.read_at(stored_size, index_end - stored_size)
        _refuse_if_damaged(stored, checksum, "its index")
        self._index = _decode_index(_decompress(stored, unpacked_size, INDEX_COMPRESSION))
        self._ends = np.frombuffer(self._index.block_ends, np.uint64).tolist()
        self._unpacked_sizes = np.frombuffer(self._index.unpacked_sizes, np.uint64)
        self._checksums = np.frombuffer(self._index.checksums, np.uint32)

    def find_packed(self, names: Collection[str]) -> dict[str, bytes]:
        """Those of these sessions that are in this file, packed. Only blocks that may have them are
        read.
        """
        # 1. Which names the file may have.
        sorted_names = sorted(names)
        hashes = np.fromiter(map(_hash_name, sorted_names), np.uint64, len(sorted_names))
        is_possible = _may_contain(self._index.bloom_bits, hashes)
        # 2. In which block each would be: the last one that does not begin behind it.
        names_by_block: dict[int, list[str]] = {}
        first_names = self._index.first_names
        for row in np.flatnonzero(is_possible).tolist():
            name = sorted_names[row]
            block = bisect_right(first_names, name) - 1
            if block >= 0:
                names_by_block.setdefault(block, []).append(name)
        # 3. Read these blocks.
        found: dict[str, bytes] = {}
        for block, names_of_block in names_by_block.items():
            found.update(self.read_block(block).find_packed(names_of_block))
        return found

    def find_names(self, names: Collection[str]) -> set[str]:
        """Which of these sessions are in this file."""
        return set(self.find_packed(names))

    def quarantined_names(self) -> set[str]:
        """The names of the sessions that are in quarantine."""
        names: set[str] = set()
        for block in self._index.quarantined_blocks:
            names.update(self.read_block(block).quarantined_names())
        return names

    def sorted_rows(self) -> Iterator[SessionRows]:
        """All sessions, block by block, sorted by name."""
        for block in range(len(self._ends)):
            yield self.read_block(block)

    def read_block(self, block: int) -> SessionRows:
        """The sessions of one block. It is proved by its checksum."""
        begin = self._ends[block - 1] if block else 0
        stored = self._content.read_at(self._ends[block] - begin, begin)
        _refuse_if_damaged(stored, int(self._checksums[block]), f"block {block}")
        unpacked_size = int(self._unpacked_sizes[block])
        return _decode_rows(_decompress(stored, unpacked_size, self._index.compression))


def has_blocks(content: pa.NativeFile) -> bool:
    """Whether an open file has the form of this module. Files of before are Parquet."""
    size = content.size()
    if size < FOOTER.size:
        return False
    ending: bytes = content.read_at(len(MAGIC), size - len(MAGIC))
    return ending == MAGIC


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


def _hash_name(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


def _bloom_bits(hashes: Any) -> bytes:
    """A Bloom filter of names, by their hashes."""
    bit_count = 8 * (1 + len(hashes) * BLOOM_BITS_PER_NAME // 8)
    is_set = np.zeros(bit_count, np.bool_)
    for begin in range(0, len(hashes), BLOOM_BATCH):
        is_set[_bloom_positions(hashes[begin : begin + BLOOM_BATCH], bit_count)] = True
    return np.packbits(is_set, bitorder="little").tobytes()


def _may_contain(bloom_bits: bytes, hashes: Any) -> Any:
    """For each hash: whether its name may be among those of the filter."""
    bits = np.frombuffer(bloom_bits, np.uint8)
    positions = _bloom_positions(hashes, 8 * len(bits))
    selected_bits = np.uint8(1) << (positions & np.uint64(7)).astype(np.uint8)
    is_set = bits[positions >> np.uint64(3)] & selected_bits
    return is_set.all(axis=1)


def _bloom_positions(hashes: Any, bit_count: int) -> Any:
    """The bits of each name: a line per name. One hash gives a first bit and the step to the next."""
    first_bits = hashes & np.uint64(0xFFFFFFFF)
    steps = (hashes >> np.uint64(32)) | np.uint64(1)
    turns = np.arange(BLOOM_HASHES, dtype=np.uint64)
    return (first_bits[:, None] + steps[:, None] * turns) % np.uint64(bit_count)


def _compress(content: bytes, compression: str) -> bytes:
    if compression == NO_COMPRESSION:
        return content
    compressed: bytes = pa.compress(content, codec=compression, asbytes=True)
    return compressed


def _decompress(stored: bytes, unpacked_size: int, compression: str) -> bytes:
    if compression == NO_COMPRESSION:
        return stored
    content: bytes = pa.decompress(stored, unpacked_size, codec=compression, asbytes=True)
    return content


def _refuse_if_damaged(stored: bytes, checksum: int, part: str) -> None:
    """Raise an `OSError`, as reading a damaged Parquet file does."""
    if xxhash.xxh32_intdigest(stored) != checksum:
        raise OSError(f"{part} is damaged: its checksum is not that which the file names")
