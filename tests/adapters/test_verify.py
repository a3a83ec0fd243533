"""Verify over real files: every flipped bit, every file too many, too few or in another's place is found by name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from msgspec.structs import replace

from seriatim.adapters.audit import FileAudit
from seriatim.adapters.delta import DeltaLedger
from seriatim.core.difference import Difference
from seriatim.core.ledger import Change, Entry
from seriatim.core.verify import SignOff
from seriatim.ports import Head
from seriatim.steps.commit import commit
from seriatim.steps.verify import Table, Verified, Verifying
from tests.adapters.on_disk import COLUMNS, DiskStream, filled

FLIPS_SAMPLE, FLIPS_FULL = 30, 300
TABLE = Table(("id",), tuple(COLUMNS), DiskStream(Path()).runner.load)


def verify(root: Path, *, everything: bool = False, table: Table | None = TABLE) -> Verified:
    """One pass."""
    return Verifying("s", FileAudit(root), everything=everything, table=table).run()


def first(root: Path, **how: Any) -> Difference:
    """The difference that a pass names."""
    found = verify(root, **how).difference
    assert found is not None
    return found


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream's output, never touched."""
    root = tmp_path_factory.mktemp("original") / "lake"
    filled(root)
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A copy of it, to be hurt."""
    shutil.copytree(original, tmp_path / "lake")
    return tmp_path / "lake"


def paths(root: Path, pattern: str) -> list[Path]:
    """Files below the output path, by name."""
    found = sorted(root.glob(pattern))
    assert found
    return found


def test_a_clean_stream_is_good_and_signed_off(root: Path) -> None:
    """Every entry, file, record and session is looked at; nothing is warned of; the last entry is signed off."""
    done = verify(root)
    assert (done.difference, done.warnings, done.notes, done.folded) == (None, [], [], True)
    assert (done.sequence, done.entries, done.sessions, done.orphans) == (8, 9, 6, 0)
    assert done.files == len(paths(root, "*/in-*/*/*.parquet"))
    assert done.records == DeltaTable(root / "records").to_pyarrow_table().num_rows
    signed = SignOff.opened((root / "verified.json").read_bytes())
    assert signed is not None
    assert (signed.sequence, signed.version) == (8, 8)


@pytest.mark.parametrize("fields", [{"tier": "none"}, {"output_partitions": ("topic", "partition")}])
def test_other_streams_are_good_too(tmp_path: Path, fields: dict[str, Any]) -> None:
    """A tier that only counts, and columns that are folders' names."""
    filled(tmp_path, **fields)
    done = verify(tmp_path)
    assert (done.difference, done.warnings, done.folded) == (None, [], True)


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
        path.write_bytes(_flipped(good, bit))
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
        path.write_bytes(_flipped(good, bit))
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
        path.write_bytes(_flipped(good, dice.randrange(len(good) * 8)))
        if verify(root).difference is None:
            missed.append(path.name)
        path.write_bytes(good)
    assert missed == []


def _flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize(
    ("pattern", "number"),
    [("records/in-*/*/*.parquet", 1), ("kept/*/*/*.parquet", 0), ("manifests/*.zst", 3), ("state/in-a/0/*-12-*", 0)],
)
def test_a_missing_file_is_found_by_name(root: Path, pattern: str, number: int) -> None:
    """Records in the table, messages set aside, manifests in the chain, and the state of now."""
    path = paths(root, pattern)[number]
    path.unlink()
    found = first(root)
    assert found.file == str(path.relative_to(root))
    assert "missing" in found.what + found.found
    assert "restore" in found.next


def test_a_missing_commit_is_found_by_name(root: Path) -> None:
    """In the middle of the log; at its end the witness has seen it."""
    path = root / "records/_delta_log" / f"{4:020d}.json"
    path.unlink()
    assert first(root).file == f"records/_delta_log/{path.name}"


def test_a_ledger_that_was_rolled_back_is_found(root: Path) -> None:
    """The last commit is gone: the witness has seen its entry."""
    (root / "records/_delta_log" / f"{8:020d}.json").unlink()
    found = first(root)
    assert (found.file, found.sequence) == ("head.json", 8)


def test_old_state_that_is_gone_is_no_damage(root: Path) -> None:
    """State that later state replaced may be deleted one day: it is counted."""
    head = DeltaLedger(root).head("s")
    assert head is not None
    current = {file.path for account in head.ledger.partitions.values() for file in account.state}
    old = next(path for path in paths(root, "state/*/*/*.parquet") if str(path.relative_to(root)) not in current)
    old.unlink()
    done = verify(root)
    assert (done.difference, done.gone) == (None, 1)


@pytest.mark.parametrize("pattern", ["records/in-a/*/*.parquet", "state/in-b/0/*.parquet", "manifests/*.zst"])
def test_two_files_swapped_are_found_by_name(root: Path, pattern: str) -> None:
    """The one that comes first is named, and whose content it has."""
    one, two = paths(root, pattern)[:2]
    left, right = one.read_bytes(), two.read_bytes()
    one.write_bytes(right)
    two.write_bytes(left)
    found = first(root)
    assert found.file in {str(path.relative_to(root)) for path in (one, two)}
    if "manifests" not in pattern and "size" not in found.what:
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
    found = first(root)
    assert found.file == str(one.relative_to(root))
    assert str(two.relative_to(root)) in found.cause


def test_records_written_anew_with_other_content_are_found(root: Path) -> None:
    """A well-formed file, of the same rows and name, whose digest is in nothing."""
    path = paths(root, "records/in-*/*/*.parquet")[0]
    table = pq.read_table(path, partitioning=None)
    changed = table.set_column(table.schema.get_field_index("v"), "v", pa.array([7] * table.num_rows, pa.int64()))
    pq.write_table(changed, path, write_page_checksum=True)
    assert first(root).file == str(path.relative_to(root))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("records/in-a/0/0-3-crashed.parquet", "crashed or was fenced"),
        ("state/in-a/0/0-3-crashed.parquet", "crashed or was fenced"),
        ("kept/in-a/0/0-99-now.parquet", "at work now"),
        ("records/in-a/0/part-0001.parquet", "ask who put it there"),
        ("state/in-z/0/0-0-a.parquet", "ask who put it there"),
        ("manifests/0000000003-" + "0" * 64 + ".json.zst", "crashed or was fenced"),
        ("manifests/notes.txt", "ask who put it there"),
    ],
)
def test_a_file_that_nobody_names_is_told_and_no_damage(root: Path, name: str, why: str) -> None:
    """Orphans of crashed runs, files of a run at work, and strangers are told apart."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"?")
    done = verify(root)
    assert (done.difference, done.orphans) == (None, 1)
    (warning,) = done.warnings
    assert warning.file == name
    assert why in warning.next


def test_a_file_in_the_table_that_no_entry_added_is_found(root: Path) -> None:
    """Somebody appended beside Seriatim: what it added is named."""
    table = DeltaTable(root / "records")
    rows = table.to_pyarrow_table().slice(0, 1)
    before = set(table.file_uris())
    write_deltalake(table, rows, mode="append")
    (added,) = set(DeltaTable(root / "records").file_uris()) - before
    found = first(root)
    assert found.file == "records/" + added.rpartition("/records/")[2]
    assert "no entry added" in found.what


def test_a_file_taken_out_of_the_table_is_found(root: Path) -> None:
    """Somebody deleted rows beside Seriatim."""
    DeltaTable(root / "records").delete("topic = 'in-b'")
    found = first(root)
    assert "no entry added" in found.what or "lacks" in found.what


def test_files_rewritten_by_somebody_else_are_no_damage(root: Path) -> None:
    """An OPTIMIZE keeps all rows: said, since such records cannot be folded partition by partition."""
    DeltaTable(root / "records").optimize.compact()
    done = verify(root)
    assert done.difference is None
    assert not done.folded
    assert "OPTIMIZE" in done.notes[0]


def test_a_checkpoint_of_the_log_that_lies_is_found(root: Path) -> None:
    """Readers believe checkpoints: what they see is held against the commits."""
    table = DeltaTable(root / "records")
    table.create_checkpoint()
    (path,) = paths(root, "records/_delta_log/*.checkpoint.parquet")
    kept = pq.read_table(path)
    is_add = kept.column("add").is_valid().to_pylist()
    pq.write_table(kept.filter(pa.array([number != is_add.index(True) for number in range(len(is_add))])), path)
    found = first(root)
    assert "readers do not see" in found.what
    assert found.file.startswith("records/in-")


# What an entry may say wrongly, by the name of what verify then says. Each is committed by the real rule.
Lie = Callable[[Change], Change]


def certified(change: Change, **fields: Any) -> Change:
    """The change with a certificate that says something else."""
    assert change.certificate is not None
    raw = msgspec.to_builtins(change.certificate)
    counts = {**raw["counts"], **fields.pop("counts", {})}
    return replace(change, certificate=msgspec.convert({**raw, **fields, "counts": counts}, type(change.certificate)))


LIES: dict[str, Lie] = {
    "other records than its files": lambda c: certified(c, counts={"records": 1}),
    "other sessions than its state file": lambda c: certified(c, sessions=9),
    "fewer sessions": lambda c: certified(c, sessions=0),
    "fewer messages": lambda c: certified(c, counts={"messages": 1}, holes={"expired": c.until - c.frontier - 1}),
    "other offsets": lambda c: replace(c, records=tuple(replace(f, first=f.first + 1) for f in c.records)),
    "another range": lambda c: certified(c, epoch=5),
    "other number of rows": lambda c: certified(
        replace(c, records=tuple(replace(f, rows=f.rows + 1) for f in c.records)),
        counts={"records": sum(f.rows + 1 for f in c.records)},
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_entry_that_lies_is_found(tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate or a change that says something else than its files, though hashes and chain are right."""
    made = DiskStream(tmp_path)
    made.kafka.create("in-a", 1)
    made.send("in-a/0", "x", ["a", "b"], 1)
    made.run()
    made.send("in-a/0", "x", 2, 3)
    made.send("in-a/0", "y", ["a"], 4)

    def lying(store: Any, clock: Any, head: Head, entry: Entry) -> tuple[Head, Entry]:
        changes = tuple(LIES[lie](change) if change.records else change for change in entry.changes)
        return commit(store, clock, head, replace(entry, changes=changes))

    monkeypatch.setattr("seriatim.steps.fold.commit", lying)
    made.run()
    found = first(tmp_path)
    assert found.sequence == 2
    assert _matches(lie, found.what), found.what


def _matches(lie: str, what: str) -> bool:
    return all(word in what for word in lie.split() if word not in ("other", "than", "its"))


def test_a_slice_that_leaves_a_hole_is_found(tmp_path: Path) -> None:
    """Certificates tile the range from birth to the frontier: one that begins later is named."""
    made = filled(tmp_path)
    head = made.ledger.head("s")
    assert head is not None
    account = head.ledger.partitions["in-a/1"]
    skipping = replace(account, frontier=account.frontier + 5)
    moved = replace(head.ledger, partitions={**head.ledger.partitions, "in-a/1": skipping})
    _commit_by_hand(made, moved)
    found = first(tmp_path)
    assert (found.partition, found.sequence) == ("in-a/1", 9)


def _commit_by_hand(made: DiskStream, ledger: Any) -> None:
    """An entry of nothing whose manifest says another ledger: chain, hashes and transaction are right."""
    from seriatim.core.ledger import Manifest, encode

    entry = Entry(kind="verdict", attempt="hand", sequence=ledger.sequence + 1, previous=ledger.sha256)
    manifest = Manifest(entry=entry, ledger=replace(ledger, sequence=entry.sequence))
    path, sha256 = made.ledger.put_manifest(entry.sequence, encode(manifest))
    mark = {"sequence": entry.sequence, "previous": entry.previous, "manifest": path, "sha256": sha256}
    table = DeltaTable(made.root / "records")
    properties = CommitProperties(
        custom_metadata={"seriatim": mark},  # type: ignore[dict-item]  # any JSON is fine
        app_transactions=[Transaction("seriatim", entry.sequence)],
    )
    table.create_write_transaction([], "append", table.schema(), commit_properties=properties)
    made.ledger.put_witness(entry.sequence, sha256)


def test_a_state_that_its_records_do_not_make_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Session and row are named, with what the records make and what the state has, digests and counts being right."""
    made = DiskStream(tmp_path)
    made.kafka.create("in-a", 1)
    made.send("in-a/0", "x", ["a", "b"], 1)
    dump = made.runner.dump

    def wrong(rows: dict[Any, Any]) -> bytes:
        return dump({key: (*row[:1], 99, *row[2:]) if key == "b" else row for key, row in rows.items()})

    monkeypatch.setattr(made.runner, "dump", wrong)
    made.run()
    found = first(tmp_path)
    assert (found.partition, found.session, found.offset) == ("in-a/0", "x", 0)
    assert "v=0" in found.expected
    assert "v=99" in found.found


def test_records_twice_in_the_table_are_found(root: Path) -> None:
    """The same rows under another name, added by a commit that looks like ours: offset and index are not unique."""
    path = paths(root, "records/in-b/0/*.parquet")[0]
    outline = FileAudit(root).outline(str(path.relative_to(root)))
    assert outline.disorder is None
    table = pq.read_table(path, partitioning=None)
    pq.write_table(pa.concat_tables([table, table.slice(table.num_rows - 1)]), path)
    twice = FileAudit(root).outline(str(path.relative_to(root)))
    assert twice.disorder == (table.column("offset")[-1].as_py(), table.column("index")[-1].as_py())


def test_a_pass_goes_on_from_the_last_signed_off(tmp_path: Path) -> None:
    """Only what came since is read again, the state of now always; records since fold on from the state of then."""
    made = filled(tmp_path)
    assert verify(tmp_path).since == -1
    again = verify(tmp_path)
    assert (again.since, again.entries, again.records, again.difference) == (8, 0, 0, None)
    made.send("in-a/0", "x", 6, 7)
    made.run()
    later = verify(tmp_path)
    assert (later.since, later.entries, later.records, later.difference, later.folded) == (8, 1, 2, None, True)
    whole = verify(tmp_path, everything=True)
    assert (whole.since, whole.entries, whole.difference) == (-1, 10, None)


def test_state_and_witness_are_looked_at_in_every_pass(root: Path) -> None:
    """Also when everything was signed off."""
    assert verify(root).difference is None
    path = paths(root, "state/in-a/0/*-12-*")[0]
    good = path.read_bytes()
    path.write_bytes(_flipped(good, 999))
    assert first(root).file == str(path.relative_to(root))
    path.write_bytes(good)
    (root / "head.json").write_bytes(json.dumps({"sequence": 8, "sha256": "0" * 64}).encode())
    assert first(root).file == "head.json"


def test_old_records_are_looked_at_by_all(root: Path) -> None:
    """What was signed off is read again only if asked; that it is there, in every pass."""
    assert verify(root).difference is None
    path = paths(root, "records/in-a/0/*.parquet")[0]
    good = path.read_bytes()
    path.write_bytes(_flipped(good, 999))
    assert verify(root).difference is None
    assert first(root, everything=True).file == str(path.relative_to(root))
    path.unlink()
    assert first(root).file == str(path.relative_to(root))


def test_nothing_is_signed_off_where_something_differs(root: Path) -> None:
    """The sign-off comes after a clean pass alone."""
    path = paths(root, "records/in-a/0/*.parquet")[0]
    path.write_bytes(_flipped(path.read_bytes(), 999))
    assert verify(root).difference is not None
    assert not (root / "verified.json").exists()


def test_a_sign_off_that_was_changed_is_not_believed(root: Path) -> None:
    """Every flipped bit: it is warned of and everything is looked at, never an error and never a shorter pass."""
    assert verify(root).difference is None
    path = root / "verified.json"
    good, dice = path.read_bytes(), random.Random(7)
    for bit in dice.sample(range(len(good) * 8), 30):
        path.write_bytes(_flipped(good, bit))
        done = verify(root)
        assert (done.difference, done.since) == (None, -1)
        assert [warning.file for warning in done.warnings] == ["verified.json"]
        assert path.read_bytes() == good


def test_a_ledger_older_than_its_sign_off_is_found(tmp_path: Path) -> None:
    """Rolled back with its witness: only the sign-off knows. `--all` takes the older ledger as meant, and warns."""
    made = filled(tmp_path / "lake")
    shutil.copytree(made.root, tmp_path / "yesterday")
    made.send("in-a/0", "x", 6)
    made.run()
    assert verify(made.root).difference is None
    shutil.copy(made.root / "verified.json", tmp_path / "yesterday")
    found = first(tmp_path / "yesterday")
    assert (found.file, found.sequence) == ("verified.json", 9)
    assert "--all" in found.next
    done = verify(tmp_path / "yesterday", everything=True)
    assert (done.difference, len(done.warnings)) == (None, 1)
    assert verify(tmp_path / "yesterday").since == 8


def test_other_machines_records_are_not_folded_and_that_is_said(root: Path) -> None:
    """Only the stock machine's records say how they make the state; all else is looked at."""
    done = verify(root, table=None)
    assert (done.difference, done.folded, done.records > 0) == (None, False, True)
    assert "not folded" in done.notes[0]


def test_a_stream_that_was_never_run_says_so(tmp_path: Path) -> None:
    """There is nothing to verify."""
    from seriatim.core.errors import ConfigError

    with pytest.raises(ConfigError, match="never run"):
        verify(tmp_path)
