"""The contract of `StateStore`: sessions come back as saved, newest first, from files proved by
digest.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session, WaitingMessage
from seriatim.errors import BrokenPromiseError, DamagedFileError
from seriatim.memory import MemoryFiles
from seriatim.memory.store import MemoryStore
from seriatim.operations.sweep import SLICE_FILE_NAME, sweep_attempts
from seriatim.storage.record_files import ParquetRecords
from seriatim.storage.state_blocks import BLOCK_BYTES, SESSIONS_PER_BLOCK
from seriatim.storage.state_files import ROWS_AT_ONCE, StateFiles
from seriatim.storage.store import LocalStore

P = Partition("in-a", 0)
Store = MemoryFiles | StateFiles
RUNS = count()


@pytest.fixture(params=["memory", "blocks on disk", "blocks in memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store of each kind."""
    if request.param == "memory":
        return MemoryFiles({})
    if request.param == "blocks on disk":
        return StateFiles(LocalStore(tmp_path), "s")
    return StateFiles(MemoryStore(), "s")


def again(store: Store) -> Store:
    """The same files as the next run sees them."""
    return store if isinstance(store, MemoryFiles) else StateFiles(store.store, "s")


def session(saved: bytes | None, **fields: Any) -> Session:
    """A session as the store hands it out."""
    return Session(state_bytes=saved, state_version=3, **fields)


FULL = session(
    b"\x00\xff",
    sequence=7,
    snapshot_sequence=2,
    snapshot_fingerprint=b"12345678",
    missing_sequences=[(3, 5), (8, 9)],
    waiting_messages=[WaitingMessage(12, 40, 1_700_000_000_000, b"k", b"{}", is_snapshot=False)],
    damaged_since_offset=31,
    messages_since_snapshot=7,
    snapshot_timestamp=1_700_000_000_000,
    snapshot_distance_ms=60_000,
    first_offset=1,
    last_offset=9,
    snapshot_offset=4,
    timestamp=123,
    finding="gap",
    finding_offset=8,
)


def test_sessions_come_back_as_they_were_saved(store: Store) -> None:
    """Every lasting field, odd names too; what is only of the fold is not saved."""
    names = {"s": FULL, "": session(None), "é\n\0": session(b"")}
    used = {
        name: replace(one, state=object(), is_active=True, is_touched=True, is_undoable=True)
        for name, one in names.items()
    }
    (file,) = store.save(P, "0-5-a", used, [])
    assert file.path.startswith("state/in-a/0/0-5-a")
    assert file.rows == 3
    assert again(store).load([file], [*names, "unknown"]) == names
    assert again(store).load([file], ["s"]) == {"s": FULL}
    assert again(store).load([file], []) == again(store).load([], ["s"]) == {}


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abcde"), st.booleans(), min_size=1), st.integers(0, 4)
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_the_newest_file_wins_however_files_are_merged(
    store: Store, slices: list[tuple[dict[str, bool], int]]
) -> None:
    """As if sessions had been kept in one dictionary all along; quarantine is the newest file's
    word too.
    """
    expected: dict[str, Session] = {}
    files: list[File] = []
    run = next(RUNS)
    for number, (touched, merged) in enumerate(slices):
        sessions = {
            name: session(b"%d" % number, finding="gap" if hurt else None)
            for name, hurt in touched.items()
        }
        cut = len(files) - min(merged, len(files))
        files[cut:] = store.save(P, f"{run}-{number}", sessions, files[cut:])
        expected |= sessions
    fresh = again(store)
    assert fresh.load(files, "abcdef") == expected
    assert dict(fresh.all_sessions(files)) == expected
    assert fresh.quarantined_sessions(files) == {
        name: one for name, one in expected.items() if one.finding
    }


def test_large_states_keep_every_session(store: Store) -> None:
    """Merged, over many blocks, with sessions of the first, the middle and the last replaced."""
    many = SESSIONS_PER_BLOCK * 20 + 5
    (base,) = store.save(P, "0-0-a", {str(i): session(b"old") for i in range(many)}, [])
    touched = {str(i): session(b"new") for i in (0, SESSIONS_PER_BLOCK, many - 1, many)}
    (whole,) = store.save(P, "0-5-a", touched, [base])
    assert whole.rows == many + 1
    found = again(store).load([whole], map(str, range(many + 1)))
    assert {name for name, one in found.items() if one.state_bytes == b"new"} == set(touched)
    assert len(found) == many + 1


def test_state_is_saved_only_where_there_is_some(store: Store) -> None:
    """A file without sessions would mean nothing."""
    with pytest.raises(BrokenPromiseError, match="only where there is some"):
        store.save(P, "0-5-a", {}, [])


def test_a_name_is_used_once(store: Store) -> None:
    """A committed file is never written over."""
    store.save(P, "0-5-a", {"s": session(b"1")}, [])
    with pytest.raises(BrokenPromiseError, match="there already"):
        store.save(P, "0-5-a", {"s": session(b"2")}, [])


def hurt(store: Store, file: File, how: str) -> None:
    """Damage a file behind the store's back."""
    if isinstance(store, MemoryFiles):
        if how == "missing":
            del store.files[file.path]
        elif how == "truncated":
            store.files[file.path].content = store.files[file.path].content[:-1]
        else:
            content = store.files[file.path].content
            store.files[file.path].content = content[:-1] + bytes([content[-1] ^ 1])
        return
    content = store.store.read(file.path)
    middle = len(content) // 2
    if how == "missing":
        store.store.delete([file.path])
    elif how == "truncated":
        store.store.replace(file.path, content[:-20])
    else:
        store.store.replace(file.path, content[:middle] + b"\x00!" + content[middle + 2 :])


@pytest.mark.parametrize("how", ["altered", "missing", "truncated"])
def test_a_damaged_state_file_is_refused_by_name(store: Store, how: str) -> None:
    """Before anything of it is used: loading, merging and looking alike."""
    (good,) = store.save(P, "0-0-a", {"t": session(b"1")}, [])
    (file,) = store.save(P, "0-5-a", {"s": session(b"state")}, [])
    hurt(store, file, how)
    for use in (
        lambda: again(store).load([good, file], ["s"]),
        lambda: again(store).save(P, "0-9-a", {"t": session(b"2")}, [good, file]),
        lambda: again(store).quarantined_sessions([good, file]),
        lambda: again(store).find_names([good, file], ["s"]),
    ):
        with pytest.raises(DamagedFileError, match=file.path) as refused:
            use()
        assert refused.value.path == file.path
        if isinstance(store, StateFiles):
            assert refused.value.next.startswith("seriatim repair s: ")
    assert again(store).find_names([good], ["s", "t"]) == {"t"}
    assert again(store).load([good], ["t"]) == {"t": session(b"1")}


def test_state_files_are_swept_with_their_slice(store: Store) -> None:
    """A dead attempt's state goes with its records; the file that the ledger names stays."""
    (dead,) = store.save(P, "0-5-a", {"s": session(b"1")}, [])
    (named,) = store.save(P, "0-5-b", {"s": session(b"2")}, [])
    sweeper = (
        store if isinstance(store, MemoryFiles) else ParquetRecords(store.store, {}, "zstd", ())
    )
    assert sweep_attempts(sweeper, P, "0-5-", {named.path}) == [dead.path]
    assert again(store).load([named], ["s"]) == {"s": session(b"2")}


def test_a_state_that_is_large_is_cut_into_files() -> None:
    """Each is a little larger than it should be at most, because a bucket gathers a file in memory. Each
    session is in one of them, and they are merged as one state.
    """
    file_bytes = 200_000
    bytes_at_once = 150 * ROWS_AT_ONCE + BLOCK_BYTES
    objects = MemoryStore()
    store = StateFiles(objects, "s", "none", file_bytes)
    sessions = {f"{number:06d}": session(b"%0100d" % number) for number in range(20_000)}
    files = store.save(P, "0-0-a", sessions, [])
    assert len(files) == len(objects.objects) > 2
    # The sweep takes all of them for files of one attempt.
    names = [file.path.rpartition("/")[2] for file in files]
    matches = [SLICE_FILE_NAME.fullmatch(name) for name in names]
    assert {match[3] for match in matches if match} == {"a"}
    assert max(file.size_bytes for file in files) < file_bytes + bytes_at_once
    assert sum(file.rows for file in files) == len(sessions)
    newer = {"000007": session(b"new")}
    merged = StateFiles(objects, "s", "none", file_bytes).save(P, "0-5-a", newer, files)
    assert len(merged) > 2
    again_read = dict(StateFiles(objects, "s").all_sessions(merged))
    assert again_read.keys() == sessions.keys()
    assert again_read["000007"].state_bytes == b"new"
    assert again_read["019999"].state_bytes == sessions["019999"].state_bytes
