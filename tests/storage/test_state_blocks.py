"""State files in blocks: what is read of them, and how they are merged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seriatim.errors import ConfigError
from seriatim.memory.store import MemoryStore
from seriatim.storage.state_blocks import (
    BLOCK_BYTES,
    FORM_KEY,
    FORM_VERSION,
    GROUP_BYTES,
    SESSIONS_PER_BLOCK,
    SessionRows,
    StateBlocks,
    StateBlockWriter,
    merge_rows,
)

QUARANTINED = "s-000700"
NAMES = [f"s-{number:06}" for number in range(0, 20_000, 2)]
"""Every second name is there."""
ABSENT_NAMES = [f"s-{number:06}" for number in range(1, 20_000, 2)]


def write_file(packed_sessions: Mapping[str, bytes], compression: str = "zstd") -> bytes:
    """A state file of these sessions; one of them is in quarantine."""
    store = MemoryStore()
    writer = StateBlockWriter(store, "state/x.parquet", compression)
    names = sorted(packed_sessions)
    findings = ["gap" if name == QUARANTINED else None for name in names]
    writer.add(SessionRows(names, findings, [packed_sessions[name] for name in names]))
    file = writer.finish()
    assert file is not None
    assert file.rows == len(names)
    content = store.read("state/x.parquet")
    assert file.size_bytes == len(content)
    return content


def open_parquet(content: bytes) -> pq.ParquetFile:
    """The file as any reader of Parquet opens it, with the checksums of its pages."""
    return pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)


class CountedBlocks(StateBlocks):
    """A state file that notes which blocks were read."""

    def __init__(self, content: bytes) -> None:
        super().__init__(open_parquet(content))
        self.unpacked_blocks: list[int] = []

    def read_blocks(self, blocks: Iterable[int]) -> Iterator[SessionRows]:
        wanted_blocks = list(blocks)
        self.unpacked_blocks += wanted_blocks
        return super().read_blocks(wanted_blocks)


@pytest.fixture(scope="module")
def content() -> bytes:
    """A file of 10,000 sessions."""
    return write_file({name: name.encode() for name in NAMES})


def test_only_the_blocks_of_the_searched_sessions_are_read(content: bytes) -> None:
    """Each once, and no other."""
    file = CountedBlocks(content)
    searched = [NAMES[0], NAMES[1], NAMES[5_000], NAMES[-1]]
    assert file.find_packed(searched) == {name: name.encode() for name in searched}
    blocks = [NAMES.index(name) // SESSIONS_PER_BLOCK for name in searched]
    assert file.unpacked_blocks == sorted(set(blocks))


def test_names_that_are_not_there_cost_no_reading_beyond_the_index(content: bytes) -> None:
    """Of a thousand names that lie between those of the file, nearly all are ruled out by the index;
    names before and behind all others, too.
    """
    file = CountedBlocks(content)
    assert file.find_names([*ABSENT_NAMES[::10], "", "zzz"]) == set()
    assert len(file.unpacked_blocks) < 20
    file = CountedBlocks(content)
    assert file.find_names(["", "zzz"]) == set()
    assert file.unpacked_blocks == []


def test_quarantine_is_found_by_the_index(content: bytes) -> None:
    """Only the block of the session in quarantine is read."""
    file = CountedBlocks(content)
    assert file.quarantined_names() == {QUARANTINED}
    assert file.unpacked_blocks == [NAMES.index(QUARANTINED) // SESSIONS_PER_BLOCK]


def test_large_sessions_have_blocks_of_their_own() -> None:
    """Who reads a small session does not read a megabyte of its neighbours."""
    sessions = {f"s-{number}": bytes(BLOCK_BYTES) for number in range(5)}
    file = CountedBlocks(write_file(sessions))
    assert file.find_packed(["s-2"]) == {"s-2": bytes(BLOCK_BYTES)}
    assert [rows.names for rows in file.sorted_rows()] == [[name] for name in sorted(sessions)]


@pytest.mark.parametrize("compression", ["zstd", "snappy", "gzip", "lz4", "none"])
def test_every_compression_gives_the_same_sessions(compression: str) -> None:
    """The setting of a stream says which is taken; the file knows it."""
    sessions = {name: name.encode() * 3 for name in NAMES[:200]}
    file = StateBlocks(open_parquet(write_file(sessions, compression)))
    assert file.find_packed(NAMES) == sessions


def test_the_file_is_parquet(content: bytes) -> None:
    """Any reader can tell which sessions are in it and how many of them are in quarantine."""
    rows = pq.read_table(pa.BufferReader(content)).to_pylist()
    assert sum(row["sessions"] for row in rows) == len(NAMES)
    assert [row["first_session"] for row in rows] == NAMES[::SESSIONS_PER_BLOCK]
    assert [row["first_session"] for row in rows if row["quarantined"]] == ["s-000640"]


def test_a_file_of_several_row_groups_is_found_by_its_index() -> None:
    """Names in the first, a middle and the last row group, and between them."""
    sessions = {f"s-{number:03}": bytes([number]) * (GROUP_BYTES // 4) for number in range(20)}
    parquet = open_parquet(write_file(sessions, "none"))
    assert parquet.num_row_groups == 5
    file = StateBlocks(parquet)
    searched = ["s-000", "s-009", "s-019", "s-", "t"]
    assert file.find_packed(searched) == {name: sessions[name] for name in searched[:3]}
    assert [name for rows in file.sorted_rows() for name in rows.names] == list(sessions)


def test_a_block_that_changed_after_the_file_was_proved_is_refused(content: bytes) -> None:
    """The disk may fail between the proof and the reading."""
    index = open_parquet(content).read(["block"]).column("block")
    stored = index[0].as_py()
    damaged = bytearray(content)
    damaged[content.index(stored) + 3] ^= 1
    file = StateBlocks(open_parquet(bytes(damaged)))
    with pytest.raises(OSError, match="CRC checksum"):
        file.find_packed(NAMES[:1])
    first_name = NAMES[SESSIONS_PER_BLOCK].encode()
    damaged = bytearray(content)
    damaged[content.index(first_name)] ^= 1
    with pytest.raises(OSError, match="CRC checksum"):
        StateBlocks(open_parquet(bytes(damaged)))


def test_a_newer_form_is_refused(content: bytes) -> None:
    """It is not guessed at."""
    table = pq.read_table(pa.BufferReader(content))
    newer = table.replace_schema_metadata({FORM_KEY: str(FORM_VERSION + 1)})
    sink = pa.BufferOutputStream()
    pq.write_table(newer, sink)
    with pytest.raises(ConfigError, match=f"has form {FORM_VERSION + 1}, this one knows"):
        StateBlocks(open_parquet(sink.getvalue().to_pybytes()))


def in_pieces(sessions: Mapping[str, bytes], size: int) -> Iterator[SessionRows]:
    """Sessions sorted by name, some at a time."""
    names = sorted(sessions)
    for begin in range(0, len(names), size):
        piece = names[begin : begin + size]
        yield SessionRows(piece, [None] * len(piece), [sessions[name] for name in piece])


SOURCES = st.lists(
    st.tuples(st.dictionaries(st.text(max_size=3), st.binary(max_size=2)), st.integers(1, 4)),
    max_size=4,
)


@given(SOURCES)
@settings(max_examples=200, derandomize=True, deadline=None, database=None)
def test_a_merge_is_as_if_the_sessions_had_been_in_one_dictionary(
    sources: Sequence[tuple[dict[str, bytes], int]],
) -> None:
    """Any names, any cuts: sorted, each name once, the newest source wins."""
    expected: dict[str, bytes] = {}
    for sessions, _ in sources:
        expected |= sessions
    names: list[str] = []
    packed_sessions: list[bytes] = []
    for rows in merge_rows([in_pieces(sessions, size) for sessions, size in sources]):
        names += rows.names
        packed_sessions += rows.packed_sessions
    assert names == sorted(expected)
    assert dict(zip(names, packed_sessions, strict=True)) == expected
    if expected:
        file = StateBlocks(open_parquet(write_file(expected)))
        assert file.find_packed([*expected, "\x7fabsent"]) == expected


def test_a_merge_has_only_some_sessions_in_memory() -> None:
    """Of each source one piece is read ahead, whatever the names are."""
    read_ahead = 0

    def counted(names: Sequence[str]) -> Iterator[SessionRows]:
        nonlocal read_ahead
        for rows in in_pieces(dict.fromkeys(names, b""), 10):
            read_ahead += len(rows.names)
            yield rows

    for rows in merge_rows([counted(NAMES[:1_000]), counted(ABSENT_NAMES[:1_000])]):
        read_ahead -= len(rows.names)
        assert read_ahead <= 20
    assert read_ahead == 0
