"""Partial manifests in a ledger, in memory and on a Delta table: its history, its sweeping, and a
base that is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError, IntegrityError
from seriatim.ledger.commit import build_manifest, commit, start_ledger
from seriatim.ledger.entries import SliceEntry, StartEntry
from seriatim.ledger.manifests import MANIFEST_FORMAT, LedgerHead, Manifest
from seriatim.ledger.model import Ledger
from seriatim.memory import MemoryClock
from seriatim.ports import CommitConflictError
from seriatim.storage.status_file import StatusFiles
from seriatim.storage.store import LocalStore
from tests.contracts.ledger_sides import (
    NOTHING,
    RealSide,
    Side,
    change,
    put_uncommitted_manifest,
    slice_entry,
)
from tests.contracts.verify_helper import first_difference, verify

PARTITIONS = [Partition("in-a", number) for number in range(6)]


def commit_slices(side: Side, count: int) -> list[Ledger]:
    """A ledger of six partitions, with slices of one partition each; the ledger after each entry."""
    clock = MemoryClock()
    changes = tuple(change(partition) for partition in PARTITIONS)
    head = start_ledger(side.store, clock, "s", "a0", changes)
    ledgers = [head.ledger]
    for turn in range(count):
        partition = PARTITIONS[turn % 2]
        frontier = head.ledger.partitions[str(partition)].frontier
        entry = slice_entry(frontier, frontier + 3, partition=partition)
        head, _ = commit(side.store, clock, head, entry)
        ledgers.append(head.ledger)
    return ledgers


def base_path(manifest: Manifest) -> str:
    """The file of a partial manifest's base."""
    assert manifest.base is not None
    return manifest.base.path


def test_a_history_with_several_bases_is_read_as_it_was_committed(side: Side) -> None:
    """The head, each entry of the past, and all of them in order."""
    ledgers = commit_slices(side, 53)
    manifests = list(side.again().entries("s", -1))
    assert [manifest.ledger for manifest in manifests] == ledgers
    assert [manifest.entry.sequence for manifest in manifests if manifest.base is None] == [0, 50]
    head = side.again().head("s")
    assert head is not None
    assert (head.ledger, head.format) == (ledgers[-1], MANIFEST_FORMAT)
    for sequence in (0, 1, 49, 50, 51):
        assert side.again().ledger_at("s", sequence) == ledgers[sequence]
    assert [manifest.ledger for manifest in side.again().entries("s", 49)] == ledgers[50:]


@pytest.mark.parametrize("how", ["damage", "lose"])
def test_a_base_that_cannot_be_read_is_refused_by_name(side: Side, how: str) -> None:
    """Nothing is guessed: the error names the file of the base, whichever later entry is asked for."""
    commit_slices(side, 2)
    path = base_path(side.again().manifest_at("s", 2))
    getattr(side, how)(path)
    for read in (lambda: side.again().head("s"), lambda: side.again().ledger_at("s", 1)):
        with pytest.raises(IntegrityError) as caught:
            read()
        assert path in caught.value.render()


def test_a_base_is_never_swept(side: Side) -> None:
    """Neither the last one nor those before, when manifests that lost lie beside them."""
    ledgers = commit_slices(side, 52)
    head = side.again().head("s")
    assert head is not None
    lost = [put_uncommitted_manifest(side, number).path for number in (0, 50, 52)]
    assert side.again().sweep(head) == sorted(lost)
    assert [manifest.ledger for manifest in side.again().entries("s", -1)] == ledgers


def test_pages_read_partial_manifests(tmp_path: Path) -> None:
    """The last ledger, an entry of the past, and the last entries backward."""
    side = RealSide(tmp_path)
    ledgers = commit_slices(side, 52)
    files = StatusFiles(LocalStore(tmp_path), "s")
    assert files.last_ledger() == ledgers[-1]
    assert files.manifest(7).ledger == ledgers[7]
    backward = [manifest.ledger for manifest in files.manifests_backward(1000)]
    assert backward == ledgers[::-1]


@pytest.mark.parametrize("how", ["damage", "lose"])
def test_pages_name_a_base_that_cannot_be_read(tmp_path: Path, how: str) -> None:
    """As a page shows it: which entry, and which file."""
    side = RealSide(tmp_path)
    commit_slices(side, 2)
    path = base_path(side.again().manifest_at("s", 2))
    getattr(side, how)(path)
    with pytest.raises(IntegrityError, match=f"entry 2 cannot be read: it is based on {path}"):
        StatusFiles(LocalStore(tmp_path), "s").last_ledger()


def commit_nothing(side: RealSide) -> None:
    """Commit an entry that changes no partition."""
    head = side.again().head("s")
    assert head is not None
    commit(side.store, MemoryClock(), head, SliceEntry(attempt="v"))


@pytest.mark.parametrize("how", ["damage", "lose"])
def test_verify_names_a_base_that_cannot_be_read(tmp_path: Path, how: str) -> None:
    """Also if a sign-off has seen the base: the entries after it need it."""
    side = RealSide(tmp_path)
    commit_slices(side, 0)
    commit_nothing(side)
    assert verify(tmp_path).difference is None
    commit_nothing(side)
    path = base_path(side.again().manifest_at("s", 2))
    getattr(side, how)(path)
    found = first_difference(tmp_path)
    assert (found.file, found.sequence) == (path, 0)


def start_in_format(side: Side, manifest_format: int) -> LedgerHead | None:
    """A ledger whose first entry another version of Seriatim wrote."""
    changes = tuple(change(partition) for partition in PARTITIONS)
    entry = StartEntry(attempt="a0", changes=changes, product_version="0.9.1")
    manifest = replace(build_manifest(entry, NOTHING), format=manifest_format)
    side.store.compare_and_set(None, manifest.entry, side.store.put_manifest(manifest))
    return side.again().head("s")


@pytest.fixture
def logged_messages() -> Iterator[list[str]]:
    """What the ledger's own logger says.

    Not `caplog`: handlers that commands or Airflow set up in other tests of the same process would
    swallow a message or count it twice.
    """
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("seriatim.ledger.delta_store")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_the_first_entry_in_this_format_is_told_once(
    tmp_path: Path, logged_messages: list[str]
) -> None:
    """When it is committed, and not when the older ledger is only read."""
    side = RealSide(tmp_path)
    head = start_in_format(side, 3)
    assert head is not None
    assert (head.format, logged_messages) == (3, [])
    head, _ = commit(side.store, MemoryClock(), head, slice_entry(0, 3))
    assert logged_messages == [
        "s: this output is now written in format 4; versions before 0.2.0 refuse it"
    ]
    commit(side.store, MemoryClock(), head, slice_entry(3, 5))
    assert len(logged_messages) == 1


def test_it_is_told_also_if_the_answer_to_its_commit_is_lost(
    tmp_path: Path, logged_messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is done, and the store does not learn it: reading the ledger again shows it."""
    side = RealSide(tmp_path)
    head = start_in_format(side, 3)
    assert head is not None
    commit_to_table = side.store.table.commit

    def lose_the_answer(*arguments: Any, **options: Any) -> int:
        commit_to_table(*arguments, **options)
        raise CommitConflictError("the answer got lost")

    monkeypatch.setattr(side.store.table, "commit", lose_the_answer)
    commit(side.store, MemoryClock(), head, slice_entry(0, 3))
    assert len(logged_messages) == 1


def test_an_older_ledger_is_a_base(side: Side) -> None:
    """The first entry in this format carries only what it changed."""
    head = start_in_format(side, 3)
    assert head is not None
    after, _ = commit(side.store, MemoryClock(), head, slice_entry(0, 3))
    manifest = side.again().manifest_at("s", 1)
    assert manifest.base is not None
    assert (manifest.base.sequence, manifest.format) == (0, MANIFEST_FORMAT)
    assert manifest.ledger == after.ledger
    assert len(manifest.ledger.partitions) == len(PARTITIONS)


def test_a_ledger_of_a_newer_format_is_refused_with_the_version_to_install(side: Side) -> None:
    """It is no damage, and is not guessed at."""
    with pytest.raises(ConfigError, match="format 5, this one knows 4") as caught:
        start_in_format(side, 5)
    assert (caught.value.exit_code, caught.value.next) == (2, "install Seriatim 0.9.1 or newer")
