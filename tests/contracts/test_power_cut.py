"""A power cut: whatever is noted beside a table was on the disk in the table's own log first.

delta-rs writes a commit file without fsync. The tests record every fsync of ours, in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from seriatim.ledger.delta_store import DeltaLedger
from seriatim.operations.publish import publish_current
from seriatim.storage.record_query import RecordQuery
from seriatim.storage.store import LocalStore
from tests.contracts.disk_streams import DiskStream, create_filled_output
from tests.contracts.test_current_table import current_of
from tests.contracts.test_further_tables import DiskMarket
from tests.operations.market_machine import send_busy_market
from tests.operations.memory_streams import A0

Synced = list[tuple[Path, set[Path]]]
"""Each path that was synced, in order, and the commit files that were there then and had not been
synced yet.
"""


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Synced:
    """What is synced from now on."""
    seen: Synced = []
    real = os.fsync

    def recorded(descriptor: int) -> None:
        real(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        before = {earlier for earlier, _ in seen}
        seen.append((path, commits(tmp_path) - before))

    monkeypatch.setattr(os, "fsync", recorded)
    return seen


def commits(root: Path) -> set[Path]:
    """The commit files of all tables."""
    return set(root.rglob("_delta_log/*.json"))


def assert_all_durable(root: Path, synced: Synced) -> None:
    """Every commit file was synced, and after it the folder that has its name."""
    paths = [path for path, _ in synced]
    assert commits(root)
    for commit in commits(root):
        assert commit in paths, commit
        assert commit.parent in paths[paths.index(commit) :], commit
        if commit.stem == "0" * 20:
            assert commit.parent.parent in paths[paths.index(commit) :], (
                "the name of the log's folder"
            )


def test_a_commit_is_on_the_disk_before_its_witness(tmp_path: Path, synced: Synced) -> None:
    """head.json never names an entry that a power cut could still take out of the log."""
    create_filled_output(tmp_path / "lake")
    witnesses = [missing for path, missing in synced if path.name.startswith(".head.json.")]
    assert len(witnesses) > 5
    assert [[path for path in missing if path.parts[-3] == "records"] for missing in witnesses] == [
        []
    ] * len(witnesses)


def test_commits_of_all_tables_are_on_the_disk(tmp_path: Path, synced: Synced) -> None:
    """Records, gaps and quarantine, the current rows, and the machine's other tables."""
    made = create_filled_output(tmp_path / "lake")
    publish_current("s", made.ledger, current_of(made))
    made.send("in-a/0", "x", 7)
    made.run()
    publish_current("s", made.ledger, current_of(made))
    market = DiskMarket(tmp_path / "market")
    send_busy_market(market, A0)
    market.run()
    rooms = {path.parts[-3] for path in commits(tmp_path)}
    assert {"records", "gaps", "quarantine", "current"} < rooms
    assert any(room.startswith("records-") for room in rooms)
    assert_all_durable(tmp_path, synced)


def test_the_note_of_derived_tables_comes_after_their_commits(
    tmp_path: Path, synced: Synced
) -> None:
    """What says how far gaps and quarantine are is never ahead of them."""
    create_filled_output(tmp_path / "lake")
    notes = [missing for path, missing in synced if path.name.startswith(".derived.json.")]
    assert notes
    assert [
        [path for path in missing if path.parts[-3] in ("gaps", "quarantine")] for missing in notes
    ] == [[]] * len(notes)


def test_a_witness_that_catches_up_makes_the_commit_durable_first(
    tmp_path: Path, synced: Synced
) -> None:
    """A process was killed between its commit and the sync of it: whoever writes the witness later
    does both.
    """
    made: DiskStream = create_filled_output(tmp_path / "lake")
    version = RecordQuery(LocalStore(made.root), "s").version
    head = made.ledger.head("s")
    assert head is not None
    synced.clear()
    DeltaLedger(LocalStore(made.root)).put_witness(head.ledger.mark)
    paths = [path for path, _ in synced]
    witness = next(
        number for number, path in enumerate(paths) if path.name.startswith(".head.json.")
    )
    log = made.root / "records" / "_delta_log"
    assert {log / f"{version:020d}.json", log / f"{version - 1:020d}.json", log} <= set(
        paths[:witness]
    )


def test_an_object_and_its_name_are_on_the_disk_when_the_call_returns(
    tmp_path: Path, synced: Synced
) -> None:
    """However it was written: its content first, then the folder that has its name."""
    store = LocalStore(tmp_path / "lake")

    def write_large(key: str) -> None:
        sink = store.writer(key)
        sink.write(b"large")
        sink.finish()

    ways: dict[str, Callable[[str], None]] = {
        "created": lambda key: store.create(key, b"new"),
        "replaced": lambda key: store.replace(key, b"note"),
        "large": write_large,
    }
    for way, write in ways.items():
        synced.clear()
        write(f"{way}/object")
        folder = tmp_path / "lake" / way
        paths = [path for path, _ in synced]
        assert folder.parent in paths, "the name of the new folder"
        (draft,) = [path for path in paths if path.name.startswith(".object.")]
        assert paths[-1] == folder, way
        assert paths.index(draft) < len(paths) - 1
