"""The ledger and files: what a commit names is there, and what nobody names is swept."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import pytest

from seriatim.ledger.commit import commit
from seriatim.memory import MemoryClock
from seriatim.operations.sweep import sweep_dead
from seriatim.ports import CommitConflictError
from seriatim.storage import store
from seriatim.storage.store import LocalStore
from tests.contracts.ledger_sides import (
    P,
    RealSide,
    Side,
    frontier,
    prepare_commit,
    put_uncommitted_manifest,
    record_file,
    slice_entry,
    start_side,
)


def test_committed_record_files_are_in_the_table(side: Side) -> None:
    """Only those that an entry names; others are invisible."""
    named, _ = record_file(side, "0-0-a"), record_file(side, "0-0-orphan")
    commit(side.store, MemoryClock(), start_side(side), slice_entry(0, 5, named))
    assert side.active() == [named.path]


def test_a_file_that_is_gone_is_never_named(side: Side) -> None:
    """Another run has swept it: nothing is committed."""
    head, file = start_side(side), record_file(side, "0-0-a")
    side.lose(file.path)
    with pytest.raises(CommitConflictError, match="0-0-a"):
        prepare_commit(side, head, slice_entry(0, 5, file))()
    assert frontier(side) == (0, 0)


def test_a_manifest_is_stored_under_what_it_says(side: Side) -> None:
    """Twice the same is the same place, other content is another: none is ever overwritten."""
    one, same, other, later = (
        put_uncommitted_manifest(side, sequence, attempt)
        for sequence, attempt in ((3, "a"), (3, "a"), (3, "b"), (4, "a"))
    )
    assert one == same
    assert len({one.path, other.path, later.path}) == 3
    assert all(reference.sha256 in reference.path for reference in (one, other, later))


def test_manifests_that_lost_are_swept(side: Side) -> None:
    """Up to the head, by another hash; those in the chain, and of entries to come, stay."""
    first = start_side(side)
    head, _ = commit(side.store, MemoryClock(), first, slice_entry(0, 5))
    lost = [put_uncommitted_manifest(side, number).path for number in (0, 1)]
    coming = put_uncommitted_manifest(side, 2).path
    assert side.again().sweep(head) == sorted(lost)
    assert side.again().sweep(head) == []
    assert [side.again().ledger_at("s", number) for number in (0, 1)] == [first.ledger, head.ledger]
    side.lose(coming)


def test_the_table_tells_its_files(side: Side) -> None:
    """As of the head that was read, by the paths that entries name; later ones are not in it."""
    head = start_side(side)
    assert side.store.active_paths(head) == set()
    file = record_file(side, "0-0-a")
    head, _ = commit(side.store, MemoryClock(), head, slice_entry(0, 5, file))
    assert (
        side.store.active_paths(head)
        == {one.path for one in side.store.active_files(head)}
        == {file.path}
    )
    another = side.again().head("s")
    assert another is not None
    commit(side.again(), MemoryClock(), another, slice_entry(5, 9, record_file(side, "0-5-a")))
    assert side.store.active_paths(head) == {file.path}


def test_dead_files_are_swept_on_either_side(side: Side) -> None:
    """A late attempt at an older start goes; what is named, and what is at the frontier, stays."""
    head = start_side(side)
    for number in range(3):
        head, _ = commit(
            side.store,
            MemoryClock(),
            head,
            slice_entry(number, number + 1, record_file(side, f"0-{number}-a")),
        )
    late, live = record_file(side, "0-1-late-3"), record_file(side, "0-3-b")
    assert sweep_dead(side.store, side.files, head) == [late.path]
    assert sorted(side.files.paths(P)) == sorted([*side.active(), live.path])


def test_drafts_are_swept(tmp_path: Path) -> None:
    """Of manifests and of the witness; nothing else that begins with a dot."""
    side = RealSide(tmp_path)
    head = start_side(side)
    drafts = [".head.json.0a1b2c3d", f"manifests/.{'0' * 10}-{'a' * 64}.json.zst.0a1b2c3d"]
    for name in (*drafts, ".keep"):
        (tmp_path / name).write_bytes(b"half")
    assert side.store.sweep(head) == ["head.json", f"manifests/{'0' * 10}-{'a' * 64}.json.zst"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [".keep"]


@pytest.mark.parametrize("write", ["create", "replace"])
def test_a_file_whose_draft_was_swept_is_written_all_the_same(
    write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run cannot tell a draft being written from a dead one's."""
    local_store = LocalStore(tmp_path)
    swept: list[str] = []

    def sweep_and_sync(file: IO[bytes]) -> None:
        if not swept:
            swept.extend(local_store.delete_unfinished(""))
        sync_file(file)

    sync_file = store._sync_file
    monkeypatch.setattr(store, "_sync_file", sweep_and_sync)
    getattr(local_store, write)("head.json", b"{}")
    assert swept == ["head.json"]
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("head.json", b"{}")]
