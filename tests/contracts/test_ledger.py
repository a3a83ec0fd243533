"""The contract of `LedgerStore`: compare-and-set or nothing, in memory and on a Delta table."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from seriatim.errors import ConfigError, FencedError, IntegrityError
from seriatim.ledger.commit import commit, read_head, start_ledger
from seriatim.ledger.entries import StartEntry
from seriatim.ledger.manifests import REPORTED_NOTE, REQUESTED_NOTE, SWEPT_NOTE
from seriatim.ledger.model import EntryMark
from seriatim.memory import MemoryClock
from seriatim.ports import CommitConflictError
from seriatim.storage.store import LocalStore
from tests.contracts.ledger_sides import (
    Q,
    RealSide,
    Side,
    change,
    frontier,
    prepare_commit,
    put_uncommitted_manifest,
    record_file,
    slice_entry,
    start_side,
)


def test_there_is_no_ledger_before_the_first_entry(side: Side) -> None:
    """Neither a head nor a witness, whatever files and manifests lie around: they mean nothing."""
    record_file(side, "0-0-a")
    sha256 = put_uncommitted_manifest(side, 0).sha256
    assert (side.store.head("s"), side.store.witness()) == (None, None)
    assert not side.store.has_manifest(sha256, -1)
    with pytest.raises(ConfigError, match="no ledger entry 0"):
        side.store.ledger_at("s", 0)


def test_entries_are_read_back_as_committed(side: Side) -> None:
    """The head, and the ledger as of every earlier entry, each with its hash: a chain."""
    heads = [start_side(side)]
    for number in range(3):
        head, done = commit(
            side.store, MemoryClock(), heads[-1], slice_entry(number * 5, number * 5 + 5)
        )
        assert (done.sequence, done.previous) == (number + 1, heads[-1].ledger.sha256)
        heads.append(head)
    found = read_head(side.again(), "s")
    assert found is not None
    assert (found.ledger, found.foreign_findings) == (heads[-1].ledger, [])
    assert found.ledger.partitions["in-a/0"].frontier == 15
    assert [side.again().ledger_at("s", number) for number in range(4)] == [
        head.ledger for head in heads
    ]


@pytest.mark.parametrize("sequence", [-1, 2, 99])
def test_an_entry_that_is_not_there_is_refused_by_number(side: Side, sequence: int) -> None:
    """Whoever asks has mistyped it."""
    commit(side.store, MemoryClock(), start_side(side), slice_entry(0, 5))
    with pytest.raises(ConfigError, match=f"no ledger entry {sequence}"):
        side.store.ledger_at("s", sequence)


def test_an_entry_is_known_by_its_manifest_after_another(side: Side) -> None:
    """`has` looks only after the entry that it was given."""
    first = start_side(side)
    second, _ = commit(side.store, MemoryClock(), first, slice_entry(0, 5))
    one, two, store = first.ledger.sha256, second.ledger.sha256, side.again()
    assert [store.has_manifest(two, after) for after in (-1, 0, 1)] == [True, True, False]
    assert [store.has_manifest(one, after) for after in (-1, 0, 1)] == [True, False, False]
    assert not store.has_manifest("0" * 64, -1)


def test_a_long_ledger_is_read_to_its_beginning(side: Side) -> None:
    """Entries far back are found as the last ones are."""
    head = first = start_side(side)
    for number in range(20):
        head, _ = commit(side.store, MemoryClock(), head, slice_entry(number, number + 1))
    assert side.again().ledger_at("s", 0) == first.ledger
    assert side.again().ledger_at("s", 20) == head.ledger
    assert side.again().has_manifest(first.ledger.sha256, -1)


def test_entries_are_walked_from_any_of_them_on(side: Side) -> None:
    """Oldest first, past what others committed in between; none where there is nothing later, or no
    ledger.
    """
    assert list(side.store.entries("s", -1)) == []
    head = start_side(side)
    for number in range(20):
        head = commit(side.store, MemoryClock(), head, slice_entry(number, number + 1))[0]
    for after in (-1, 0, 17, 20, 99):
        found = [manifest.entry.sequence for manifest in side.store.entries("s", after)]
        assert found == list(range(after + 1, 21))
    assert next(side.store.entries("s", 4)) == side.store.manifest_at("s", 5)


def test_a_commit_on_an_old_head_changes_nothing(side: Side) -> None:
    """It may only be set on exactly the head that was read; by the rule its maker is fenced."""
    old = start_side(side)
    file = record_file(side, "0-0-zombie")
    commit(side.store, MemoryClock(), old, slice_entry(0, 5))
    with pytest.raises(CommitConflictError):
        prepare_commit(side, old, slice_entry(0, 3, file, attempt="zombie"))()
    with pytest.raises(CommitConflictError):
        prepare_commit(side, None, StartEntry(attempt="zombie"))()
    assert frontier(side) == (1, 5)
    assert side.active() == []
    with pytest.raises(FencedError):
        commit(side.store, MemoryClock(), old, slice_entry(0, 3, attempt="zombie"))
    assert frontier(side) == (1, 5)


def test_of_two_on_one_head_one_wins(side: Side) -> None:
    """Each read the ledger before the other wrote; the loser is told so."""
    start_side(side)
    first, second = side.again().head("s"), side.again().head("s")
    prepare_commit(side, first, slice_entry(0, 5))()
    with pytest.raises(CommitConflictError):
        prepare_commit(side, second, slice_entry(0, 7, attempt="b"))()
    assert frontier(side) == (1, 5)


def test_of_two_who_create_one_wins(side: Side) -> None:
    """Both saw no ledger; by the rule the second takes the first one's."""
    births = (change(), change(Q))
    one, two = (prepare_commit(side, None, StartEntry(attempt=a, changes=births)) for a in "ab")
    sha256 = one()
    with pytest.raises(CommitConflictError):
        two()
    head = side.again().head("s")
    assert head is not None
    assert head.ledger.sha256 == sha256
    assert start_ledger(side.store, MemoryClock(), "s", "b", births).ledger == head.ledger


@pytest.mark.parametrize("first", [True, False], ids=["create", "append"])
def test_at_the_same_moment_one_wins_too(tmp_path: Path, first: bool) -> None:
    """Four at once on the real store: three are refused, and the one that is there was answered
    well.
    """
    side = RealSide(tmp_path)
    if not first:
        start_side(side)
    entries = [
        StartEntry(attempt=a, changes=(change(),)) if first else slice_entry(0, 5, attempt=a)
        for a in "abcd"
    ]
    tries = [
        prepare_commit(side, None if first else side.again().head("s"), entry) for entry in entries
    ]
    with ThreadPoolExecutor(4) as pool:
        outcomes = [
            future.exception() or future.result() for future in [pool.submit(one) for one in tries]
        ]
    won = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(won) == 1
    assert sum(isinstance(outcome, CommitConflictError) for outcome in outcomes) == 3
    head = side.again().head("s")
    assert head is not None
    assert [head.ledger.sha256] == won


def test_the_witness_is_what_was_last_written(side: Side) -> None:
    """It is beside the ledger, and stays when the ledger does not."""
    assert side.store.witness() is None
    side.store.put_witness(EntryMark(3, "a"))
    side.store.put_witness(EntryMark(4, "b"))
    assert side.again().witness() == EntryMark(4, "b")
    with pytest.raises(IntegrityError, match="there is no ledger"):
        read_head(side.again(), "s")


@pytest.mark.parametrize("key", [REPORTED_NOTE, REQUESTED_NOTE, SWEPT_NOTE])
def test_a_note_is_what_was_last_put(side: Side, key: str) -> None:
    """No entry at first; kept by whoever comes next."""
    assert side.store.note(key) == EntryMark()
    side.store.put_note(key, EntryMark(4, "abc"))
    side.store.put_note(key, EntryMark(5, "def"))
    assert side.again().note(key) == EntryMark(5, "def")


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"sequence": "x", "sha256": ""}', b'{"sequence": 1e999}']
)
def test_a_note_that_cannot_be_read_names_no_entry(side: Side, content: bytes) -> None:
    """Then the work is done again: findings are told twice, producers are asked twice, all entries
    are looked at for files to sweep.
    """
    side.store.store.replace(REQUESTED_NOTE, content)
    assert side.again().note(REQUESTED_NOTE) == EntryMark()


def test_rows_appended_by_others_are_one_finding_until_told(side: Side) -> None:
    """The next entry carries it; a commit on the head from before is refused."""
    before = start_side(side)
    side.foreign_append()
    with pytest.raises(CommitConflictError):
        prepare_commit(side, before, slice_entry(0, 3))()
    head = side.again().head("s")
    assert head is not None
    assert [finding.finding for finding in head.foreign_findings] == ["foreign"]
    assert head.ledger == before.ledger
    after, done = commit(side.store, MemoryClock(), head, slice_entry(0, 5))
    assert done.findings == tuple(head.foreign_findings)
    assert (after.foreign_findings, frontier(side)) == ([], (1, 5))


def test_files_rewritten_by_others_are_no_finding(side: Side) -> None:
    """A foreign OPTIMIZE changes no record; the ledger goes on."""
    head = start_side(side)
    for number in range(2):
        file = record_file(side, f"0-{number}-a")
        head, _ = commit(side.store, MemoryClock(), head, slice_entry(number, number + 1, file))
    side.foreign_rewrite()
    found = side.again().head("s")
    assert found is not None
    assert (found.ledger, found.foreign_findings) == (head.ledger, [])
    commit(side.store, MemoryClock(), found, slice_entry(2, 5))
    assert frontier(side) == (3, 5)


def test_a_commit_says_which_entry_it_is(tmp_path: Path) -> None:
    """Any Delta reader finds sequence, chain and manifest in the log, and the stream's transaction."""
    side = RealSide(tmp_path)
    first = start_side(side)
    head, _ = commit(side.store, MemoryClock(), first, slice_entry(0, 5))
    log = (tmp_path / "records" / "_delta_log" / f"{1:020d}.json").read_text().splitlines()
    actions = {name: content for line in log for name, content in json.loads(line).items()}
    mark = actions["commitInfo"]["seriatim"]
    assert (mark["sequence"], mark["previous"]) == (1, first.ledger.sha256)
    assert mark["sha256"] == head.ledger.sha256
    assert (tmp_path / mark["manifest"]).is_file()
    assert (actions["txn"]["appId"], actions["txn"]["version"]) == ("seriatim", 1)
    assert side.store.delta_version("s", 1) == 1


def test_an_entry_is_found_without_reading_through_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many commits came after it. Those of others between make it a few reads more, and a log
    that has lost commits is searched as before.
    """
    side = RealSide(tmp_path)
    head = start_side(side)
    version_of = [0]
    for number in range(40):
        if number in (7, 20, 21):
            side.foreign_append()
            head = side.store.head("s") or head
        head, _ = commit(side.store, MemoryClock(), head, slice_entry(number, number + 1))
        version_of.append(head.token.version())
    reads: list[str] = []
    read = LocalStore.read

    def read_and_note(store: LocalStore, key: str) -> Any:
        if "/_delta_log/" in key:
            reads.append(key)
        return read(store, key)

    monkeypatch.setattr(LocalStore, "read", read_and_note)
    for sequence in (0, 3, 7, 8, 19, 20, 22, 39, 40):
        store = side.again()
        reads.clear()
        assert store.delta_version("s", sequence) == version_of[sequence]
        assert len(reads) <= 8, sequence
    with pytest.raises(ConfigError, match="no ledger entry 41"):
        side.again().delta_version("s", 41)
    side.table().create_checkpoint()
    (tmp_path / "records" / "_delta_log" / f"{version_of[5]:020d}.json").unlink()
    assert side.again().delta_version("s", 4) == version_of[4]
    with pytest.raises(ConfigError, match="no ledger entry 5"):
        side.again().delta_version("s", 5)
