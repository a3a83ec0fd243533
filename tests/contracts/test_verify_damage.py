"""Verify finds damage on real files: every flipped bit, every file that is missing or in another's
place, by name.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NoReturn

import pytest

from seriatim.ledger.delta_store import DeltaLedger
from seriatim.ports import UnreadableFileError
from seriatim.storage import audit
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.store import LocalStore, Store, xxh3_and_sha256
from tests.contracts.verify_helper import first_difference, flip_bit, paths, verify

FLIPS_SAMPLE, FLIPS_FULL = 30, 300


FLIPPED = {
    "state": "state/*/*/*.parquet",
    "records": "records/in-*/*/*.parquet",
    "kept": "kept/*/*/*.parquet",
    "manifest": "manifests/*.zst",
    "witness": "head.json",
}


@pytest.mark.parametrize("kind", FLIPPED)
def test_every_flipped_bit_is_found(root: Path, kind: str, full: bool) -> None:
    """Seeded single-bit flips anywhere in these files; each is named by its file."""
    dice, missed = random.Random(kind), []
    for _ in range(FLIPS_FULL if full else FLIPS_SAMPLE):
        path = dice.choice(paths(root, FLIPPED[kind]))
        good = path.read_bytes()
        bit = dice.randrange(len(good) * 8)
        path.write_bytes(flip_bit(good, bit))
        found = verify(root).difference
        if found is None or found.file != str(path.relative_to(root)):
            missed.append((path.name, bit, found))
        path.write_bytes(good)
    assert missed == []
    assert verify(root).difference is None


def test_every_flipped_bit_of_an_entry_in_the_delta_log_is_found(root: Path, full: bool) -> None:
    """Where a commit carries our entry, before it was ever signed off."""
    dice, missed = random.Random("log"), []
    for _ in range(FLIPS_FULL if full else FLIPS_SAMPLE):
        path = dice.choice(paths(root, "records/_delta_log/*.json"))
        good = path.read_bytes()
        begin = good.index(b'"seriatim":{')
        bit = dice.randrange(begin * 8, good.index(b"}", begin) * 8)
        path.write_bytes(flip_bit(good, bit))
        if verify(root).difference is None:
            missed.append((path.name, bit))
        path.write_bytes(good)
    assert missed == []


def test_every_flipped_bit_of_a_log_that_was_signed_off_is_found(root: Path, full: bool) -> None:
    """Anywhere in the commits, also where nothing depends on it."""
    assert verify(root).difference is None
    dice, missed = random.Random("signed"), []
    for _ in range(FLIPS_FULL if full else FLIPS_SAMPLE):
        path = dice.choice(paths(root, "records/_delta_log/*.json"))
        good = path.read_bytes()
        path.write_bytes(flip_bit(good, dice.randrange(len(good) * 8)))
        if verify(root).difference is None:
            missed.append(path.name)
        path.write_bytes(good)
    assert missed == []


@pytest.mark.parametrize(
    ("pattern", "number"),
    [
        ("records/in-*/*/*.parquet", 1),
        ("kept/*/*/*.parquet", 0),
        ("manifests/*.zst", 3),
        ("state/in-a/0/*-12-*", 0),
    ],
)
def test_a_missing_file_is_found_by_name(root: Path, pattern: str, number: int) -> None:
    """Records in the table, messages set aside, manifests in the chain, and the state of now."""
    path = paths(root, pattern)[number]
    path.unlink()
    found = first_difference(root)
    assert found.file == str(path.relative_to(root))
    assert "missing" in found.description + found.found
    assert "restore" in found.next


def test_a_file_forged_to_have_the_same_xxh3_is_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XXH3 is no proof against somebody who wants another content: SHA-256 is checked as well."""
    path = paths(root, "records/**/*.parquet")[0]
    forged_key = path.relative_to(root).as_posix()
    store = LocalStore(root)
    committed = xxh3_and_sha256(store, forged_key)

    def with_forged_xxh3(opened: Store, key: str) -> tuple[str, str]:
        xxh3, sha256 = xxh3_and_sha256(opened, key)
        return (committed[0] if key == forged_key else xxh3), sha256

    monkeypatch.setattr(audit, "xxh3_and_sha256", with_forged_xxh3)
    assert verify(root).difference is None
    # The name of the library in the footer: nothing else would notice this change.
    path.write_bytes(path.read_bytes().replace(b"parquet-cpp-arrow", b"parquet-cpp-arroW"))
    difference = first_difference(root, everything=True)
    assert difference.description == "a file is damaged"
    assert difference.expected == f"SHA-256 {committed[1]}"
    assert difference.found == f"SHA-256 {xxh3_and_sha256(store, forged_key)[1]}"


def test_a_missing_commit_is_found_by_name(root: Path) -> None:
    """In the middle of the log; at its end the witness has seen it."""
    path = root / "records/_delta_log" / f"{4:020d}.json"
    path.unlink()
    assert first_difference(root).file == f"records/_delta_log/{path.name}"


def test_a_ledger_that_was_rolled_back_is_found(root: Path) -> None:
    """The last commit is gone: the witness has seen its entry."""
    (root / "records/_delta_log" / f"{8:020d}.json").unlink()
    found = first_difference(root)
    assert (found.file, found.sequence) == ("head.json", 8)


def test_old_state_that_is_gone_is_no_damage(root: Path) -> None:
    """State that later state replaced may be deleted one day: it is counted."""
    head = DeltaLedger(LocalStore(root)).head("s")
    assert head is not None
    current = {file.path for account in head.ledger.partitions.values() for file in account.state}
    old = next(
        path
        for path in paths(root, "state/*/*/*.parquet")
        if str(path.relative_to(root)) not in current
    )
    old.unlink()
    done = verify(root)
    assert (done.difference, done.deleted_files) == (None, 1)


@pytest.mark.parametrize(
    "pattern", ["records/in-a/*/*.parquet", "state/in-b/0/*.parquet", "manifests/*.zst"]
)
def test_two_files_swapped_are_found_by_name(root: Path, pattern: str) -> None:
    """The one that comes first is named, and whose content it has."""
    one, two = paths(root, pattern)[:2]
    left, right = one.read_bytes(), two.read_bytes()
    one.write_bytes(right)
    two.write_bytes(left)
    found = first_difference(root)
    assert found.file in {str(path.relative_to(root)) for path in (one, two)}
    if "manifests" not in pattern and "size" not in found.description:
        other = two if found.file.endswith(one.name) else one
        assert str(other.relative_to(root)) in found.cause


def test_two_files_of_one_size_swapped_tell_whose_content_they_have(root: Path) -> None:
    """The digest of one is known as the other's."""
    by_size: dict[int, list[Path]] = {}
    for path in paths(root, "records/in-*/*/*.parquet"):
        by_size.setdefault(path.stat().st_size, []).append(path)
    one, two = next(same for same in by_size.values() if len(same) > 1)[:2]
    left, right = one.read_bytes(), two.read_bytes()
    assert left != right
    one.write_bytes(right)
    two.write_bytes(left)
    found = first_difference(root)
    assert found.file == str(one.relative_to(root))
    assert str(two.relative_to(root)) in found.cause


def test_a_file_that_fails_while_it_is_folded_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was whole when its digest was compared, and cannot be read a moment later."""
    path = str(paths(root, "records/in-*/*/*.parquet")[0].relative_to(root))

    def fail(*_: object) -> NoReturn:
        raise UnreadableFileError(path, "the disk fails")

    monkeypatch.setattr(RecordScan, "scan", fail)
    difference = first_difference(root)
    assert (difference.file, difference.found) == (path, "the disk fails")
    assert difference.sequence is not None
