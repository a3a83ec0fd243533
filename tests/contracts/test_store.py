"""The contract of `Store`, on every store."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import sys
import threading
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from seriatim.errors import ConfigError
from seriatim.memory.store import MemoryStore
from seriatim.storage import store as storage
from seriatim.storage.store import (
    AlreadyThereError,
    LocalStore,
    Store,
    digest_object,
    open_store,
    xxh3_and_sha256,
)

RACES = 200
RACES_OF_SECOND_SERVER = 20
"""One of them takes a second for each race."""
RACING_WRITERS = 8


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind. A new kind of store is added here."""
    if request.param == "local":
        return LocalStore(tmp_path / "root")
    if request.param == "s3":
        return open_store(request.getfixturevalue("s3_url"))
    return MemoryStore()


@pytest.fixture(params=["local", "memory"])
def store_with_drafts(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind in which a killed writer leaves something."""
    if request.param == "local":
        return LocalStore(tmp_path / "root")
    return MemoryStore()


def test_an_object_that_is_read_again_is_as_it_is_now(store: Store) -> None:
    """Whatever this host may have kept of it."""
    first, second = b"1" * (2 << 20), b"2" * (2 << 20)
    digest = xxhash.xxh3_128_hexdigest(first)
    store.create("state", first)
    for _ in range(3):
        assert store.read_again("state", digest) == first
    store.replace("state", second)
    assert store.read_again("state", digest) == second
    store.delete(["state"])
    with pytest.raises(FileNotFoundError):
        store.read_again("state", digest)


def test_what_was_created_is_read(store: Store) -> None:
    """An object has its content and size, and is listed."""
    store.create("a/b/c.json", b"{}")
    assert store.read("a/b/c.json") == b"{}"
    assert store.size("a/b/c.json") == 2
    assert list(store.keys("a/")) == [("a/b/c.json", 2)]
    assert list(store.unfinished_keys("")) == []


def test_create_never_overwrites(store: Store) -> None:
    """The first content stays; the same content again is no error, because an answer may get lost."""
    store.create("n", b"first")
    store.create("n", b"first")
    with pytest.raises(AlreadyThereError):
        store.create("n", b"second")
    assert store.read("n") == b"first"


def test_one_of_many_creates_wins(store: Store, request: pytest.FixtureRequest) -> None:
    """Of several writers at once exactly one succeeds, and its content is there, race after race."""
    is_second_server = request.config.getoption("--s3-server") != "embedded"
    races = RACES_OF_SECOND_SERVER if is_second_server else RACES
    winners: dict[int, list[int]] = {race: [] for race in range(races)}
    begin = threading.Barrier(RACING_WRITERS)

    def create_in_every_race(number: int) -> None:
        for race, race_winners in winners.items():
            begin.wait()
            try:
                store.create(f"races/{race:010d}", b"%d" % number)
                race_winners.append(number)
            except AlreadyThereError:
                pass
            except BaseException:
                # The others would wait for this thread for ever.
                begin.abort()
                raise

    # Threads take turns as often as Python allows: a check and a write that are two steps show it.
    interval_seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=create_in_every_race, args=(number,))
            for number in range(RACING_WRITERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_seconds)
    for race, race_winners in winners.items():
        assert len(race_winners) == 1
        assert store.read(f"races/{race:010d}") == b"%d" % race_winners[0]


def test_replace_takes_the_last(store: Store) -> None:
    """A note may be written again and again."""
    store.replace("note.json", b"1")
    store.replace("note.json", b"22")
    assert store.read("note.json") == b"22"
    assert list(store.keys("")) == [("note.json", 2)]


def test_a_missing_object_is_said_to_be_missing(store: Store) -> None:
    """Reading raises, a size is None, a listing is empty, and deleting is no error."""
    with pytest.raises(FileNotFoundError):
        store.read("none")
    with pytest.raises(FileNotFoundError):
        store.open("none")
    assert store.size("none") is None
    assert list(store.keys("none/")) == []
    store.create("folder/object", b"1")
    assert store.size("folder") is None
    assert store.delete(["none", "no/such/folder"]) == []


def test_there_is_nothing_below_an_object(store_with_drafts: Store) -> None:
    """No key has an object as a part of its path. Of S3 this is not asked: the embedded server has
    objects in files, and answers 500.
    """
    store_with_drafts.create("folder/object", b"1")
    assert store_with_drafts.size("folder/object/below") is None


def test_a_large_object_is_seen_when_it_is_finished(store: Store) -> None:
    """Nobody sees it before. Its writer tells size and both digests."""
    sink = store.writer("records/x.parquet")
    sink.write(b"one ")
    sink.write(memoryview(b"two"))
    assert list(store.keys("")) == []
    assert store.size("records/x.parquet") is None
    written = sink.finish()
    assert written.size_bytes == 7
    assert written.sha256 == hashlib.sha256(b"one two").hexdigest()
    assert written.xxh3 == xxhash.xxh3_128(b"one two").hexdigest()
    assert digest_object(store, "records/x.parquet") == written.xxh3
    assert list(store.keys("")) == [("records/x.parquet", 7)]
    assert list(store.unfinished_keys("")) == []


def test_a_writer_that_gives_up_leaves_nothing(store: Store) -> None:
    """Closing without finishing is giving up."""
    sink = store.writer("x")
    sink.write(b"half")
    sink.close()
    assert sink.closed
    assert list(store.keys("")) == []
    assert list(store.unfinished_keys("")) == []


def test_an_unfinished_object_is_listed(store_with_drafts: Store) -> None:
    """Whoever sweeps after a killed writer finds what it began."""
    sink = store_with_drafts.writer("records/x.parquet")
    sink.write(b"half")
    assert list(store_with_drafts.unfinished_keys("records/")) == ["records/x.parquet"]
    sink.finish()
    assert list(store_with_drafts.unfinished_keys("")) == []


def test_an_unfinished_object_can_be_deleted(store_with_drafts: Store) -> None:
    """What a killed writer left is swept by its key. A writer that is still alive then fails."""
    sink = store_with_drafts.writer("records/x.parquet")
    sink.write(b"half")
    assert store_with_drafts.delete(["records/x.parquet"]) == ["records/x.parquet"]
    assert list(store_with_drafts.unfinished_keys("")) == []
    with pytest.raises(FileNotFoundError):
        sink.finish()
    assert list(store_with_drafts.keys("")) == []


def test_what_was_not_finished_is_deleted_alone(store_with_drafts: Store) -> None:
    """A finished object stays, also one of the same key: it was just being written again."""
    store_with_drafts.create("notes/a", b"whole")
    store_with_drafts.create("notes/b", b"whole")
    store_with_drafts.writer("notes/a").write(b"half")
    store_with_drafts.writer("notes/c").write(b"half")
    store_with_drafts.writer("others/a").write(b"half")
    assert store_with_drafts.delete_unfinished("notes/") == ["notes/a", "notes/c"]
    assert [key for key, _ in store_with_drafts.keys("notes/")] == ["notes/a", "notes/b"]
    assert list(store_with_drafts.unfinished_keys("")) == ["others/a"]


def test_unfinished_objects_of_one_level_are_deleted(store_with_drafts: Store) -> None:
    """Those further down are of others, who may still be writing them."""
    for key in ("a", "notes/a", "notes/deep/a"):
        store_with_drafts.writer(key).write(b"begun")
    assert store_with_drafts.delete_unfinished("", nested=False) == ["a"]
    assert store_with_drafts.delete_unfinished("notes/", nested=False) == ["notes/a"]
    assert list(store_with_drafts.unfinished_keys("")) == ["notes/deep/a"]


def test_a_large_object_never_overwrites(store: Store) -> None:
    """A second writer of the same key is refused when it finishes."""
    store.create("x", b"first")
    sink = store.writer("x")
    sink.write(b"second")
    with pytest.raises(AlreadyThereError):
        sink.finish()
    assert store.read("x") == b"first"
    assert list(store.unfinished_keys("")) == []


def test_of_two_writers_of_one_key_the_first_to_finish_wins(store: Store) -> None:
    """The other one is told that the object is there, and leaves nothing behind."""
    first, second = store.writer("x"), store.writer("x")
    second.write(b"second")
    first.write(b"first")
    first.finish()
    with pytest.raises(AlreadyThereError):
        second.finish()
    assert store.read("x") == b"first"
    assert list(store.unfinished_keys("")) == []


def test_a_writer_that_gives_up_does_not_disturb_another_of_its_key(store: Store) -> None:
    """Two tries of one task may be at work at the same time."""
    first, second = store.writer("x"), store.writer("x")
    second.write(b"second")
    first.close()
    second.finish()
    assert store.read("x") == b"second"


def test_a_writer_that_gives_up_leaves_the_draft_of_another(store_with_drafts: Store) -> None:
    """What the other one began is still listed."""
    first, second = store_with_drafts.writer("x"), store_with_drafts.writer("x")
    second.write(b"second")
    first.close()
    assert list(store_with_drafts.unfinished_keys("")) == ["x"]


def test_parquet_is_written_and_read_in_parts(store: Store) -> None:
    """Arrow writes into a sink and reads row groups of an opened object."""
    table = pa.table({"offset": list(range(1000))})
    sink = store.writer("t.parquet")
    with pq.ParquetWriter(sink, table.schema) as writer:
        writer.write_table(table, row_group_size=100)
    sink.finish()
    with store.open("t.parquet") as file:
        parquet = pq.ParquetFile(file)
        assert parquet.num_row_groups == 10
        assert parquet.read_row_group(3).column("offset").to_pylist() == list(range(300, 400))


def test_keys_are_listed_by_prefix_and_sorted(store: Store) -> None:
    """Only what is below the prefix, in the order of keys, at any depth."""
    for key in ("b/2", "b/10", "b/a/1", "bb/1", "a"):
        store.create(key, b"")
    assert [key for key, _ in store.keys("b/")] == ["b/10", "b/2", "b/a/1"]
    assert len(list(store.keys(""))) == 5


def test_keys_are_listed_from_one_on(store: Store) -> None:
    """Whoever knows a key that is there lists what came after it."""
    for number in (7, 8, 9, 10):
        store.create(f"log/{number:04d}.json", b"{}")
    store.create("logs/0011.json", b"{}")
    after = [key for key, _ in store.keys("log/", after="log/0008")]
    assert after == ["log/0008.json", "log/0009.json", "log/0010.json"]
    assert list(store.keys("log/", after="log/0010.json")) == []


def test_sizes_come_in_the_order_of_keys(store: Store) -> None:
    """None where there is no object."""
    for number in range(20):
        store.create(f"many/{number}", b"x" * number)
    keys = [f"many/{number}" for number in reversed(range(25))]
    sizes = [number if number < 20 else None for number in reversed(range(25))]
    assert store.sizes(keys) == sizes
    assert store.sizes([]) == []


def test_a_stamp_changes_with_its_content(store: Store) -> None:
    """Only of the objects right below the prefix."""
    store.replace("status.json", b"1")
    store.replace("head.json", b"1")
    store.create("deep/status.json", b"1")
    before = store.stamps("")
    assert set(before) == {"status.json", "head.json"}
    store.replace("status.json", b"2")
    after = store.stamps("")
    assert after["head.json"] == before["head.json"]
    assert after["status.json"] != before["status.json"]
    assert set(store.stamps("deep/")) == {"deep/status.json"}


def test_folders_are_the_next_parts_of_keys(store: Store) -> None:
    """One level below the prefix; objects at that level are none."""
    for key in ("a", "records/x/0/1", "records-fills/x/0/1", "records/_log/1"):
        store.create(key, b"")
    assert store.folders("") == ["records", "records-fills"]
    assert store.folders("records/") == ["_log", "x"]
    assert store.folders("none/") == []


def test_blocks_are_the_whole_content(store: Store) -> None:
    """In order, whatever their sizes; a missing object is missing when it is read."""
    content = bytes(range(256)) * 10_000
    store.create("large", content)
    assert b"".join(store.blocks("large")) == content
    assert xxh3_and_sha256(store, "large") == (
        xxhash.xxh3_128(content).hexdigest(),
        hashlib.sha256(content).hexdigest(),
    )
    with pytest.raises(FileNotFoundError):
        list(store.blocks("none"))


def test_deleting_tells_what_was_there(store: Store) -> None:
    """Each key once, sorted."""
    store.create("a", b"1")
    store.create("b", b"2")
    assert store.delete(["b", "a", "c"]) == ["a", "b"]
    assert list(store.keys("")) == []


def test_a_copy_has_the_same_content_and_its_own_life(store: Store) -> None:
    """It never overwrites, and stays when the original goes."""
    store.create("a", b"content")
    store.copy("a", "deep/b")
    store.copy("a", "deep/b")
    store.delete(["a"])
    assert store.read("deep/b") == b"content"
    store.create("c", b"other")
    with pytest.raises(AlreadyThereError):
        store.copy("c", "deep/b")
    with pytest.raises(FileNotFoundError):
        store.copy("none", "d")


def test_an_address_has_a_scheme_and_the_key(store: Store) -> None:
    """Browsers can open it."""
    assert re.fullmatch(r"[a-z0-9]+://.*reports/1.html", store.uri("reports/1.html"))


def test_names_of_all_kinds_are_keys(store: Store) -> None:
    """Topics may have dots, and people put spaces and percent signs into names."""
    for key in ("a b/c%20d/é.json", "x.y-z_1/.hidden", "x/..y"):
        store.create(key, b"1")
        assert store.read(key) == b"1"
        assert key in [present for present, _ in store.keys("")]


def test_a_folder_that_cannot_be_listed_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails raises. A sweep would delete what is needed if it saw nothing instead."""
    store = LocalStore(tmp_path)
    store.create("intents/a.json", b"{}")

    def fail(path: object) -> NoReturn:
        raise OSError(errno.EIO, "the disk fails", str(path))

    monkeypatch.setattr(os, "scandir", fail)
    for list_keys in (store.keys, store.unfinished_keys):
        with pytest.raises(OSError, match="the disk fails"):
            list(list_keys("intents/"))


def test_a_file_that_was_cut_short_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Reading it raises, and does not kill the process."""
    store = LocalStore(tmp_path)
    store.create("x", b"1234" * 10_000)
    with store.open("x") as file:
        (tmp_path / "x").write_bytes(b"")
        assert file.read() == b""


@pytest.fixture
def store_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """A store on a disk that has no hard links, as FAT and some network disks."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    return LocalStore(tmp_path / "root")


def test_without_hard_links_nothing_is_overwritten_either(
    store_without_links: LocalStore, request: pytest.FixtureRequest
) -> None:
    """Neither by `create` nor by a writer nor by a copy, race after race."""
    test_create_never_overwrites(store_without_links)
    test_a_large_object_never_overwrites(store_without_links)
    test_a_copy_has_the_same_content_and_its_own_life(store_without_links)
    test_one_of_many_creates_wins(store_without_links, request)


def test_without_hard_links_a_name_is_never_an_empty_file(
    store_without_links: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies while it publishes leaves no half object under the final name."""

    def die(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", die)
    monkeypatch.setattr(storage, "_rename_without_overwriting", die, raising=False)
    with pytest.raises(KeyboardInterrupt):
        store_without_links.create("n", b"content")
    assert store_without_links.size("n") is None


def test_a_disk_that_can_only_overwrite_is_refused(
    store_without_links: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said as what it is, with what to do: no retry helps."""

    class Libc:
        """Without the call."""

    monkeypatch.setattr(storage.ctypes, "CDLL", lambda *_, **__: Libc())
    with pytest.raises(ConfigError, match="neither hard links nor") as caught:
        store_without_links.create("n", b"content")
    assert "another disk" in caught.value.next
    assert store_without_links.size("n") is None
