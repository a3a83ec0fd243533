"""Verify over real files: what is good is signed off, and a pass goes on from there."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from seriatim.operations.prove.stream_rules import SignOff
from seriatim.operations.prove.verify import Verification
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun
from seriatim.storage.audit import FileAudit
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.store import LocalStore
from tests.contracts.disk_streams import DiskStream, create_filled_output
from tests.contracts.verify_helper import first_difference, flip_bit, paths, verify


def test_a_clean_stream_is_good_and_signed_off(root: Path) -> None:
    """Every entry, file, record and session is looked at; nothing is warned of; the last entry is
    signed off.
    """
    done = verify(root)
    assert (done.difference, done.warnings, done.notes, done.has_folded_records) == (
        None,
        [],
        [],
        True,
    )
    assert (done.sequence, done.entries, done.sessions, done.orphans) == (8, 9, 6, 0)
    assert done.files == len(paths(root, "*/in-*/*/*.*"))
    assert done.records == DeltaTable(root / "records").to_pyarrow_table().num_rows
    signed = SignOff.from_bytes((root / "verified.json").read_bytes())
    assert signed is not None
    assert (signed.sequence, signed.version) == (8, 8)


def test_its_rate_counts_from_the_first_file_on(root: Path) -> None:
    """What came before, such as imports, would make the time to go many times too long."""
    told: list[tuple[int, int]] = []
    audit = FileAudit(LocalStore(root))
    Verification("s", audit, progress=lambda done, total: told.append((done, total))).run()
    assert told[0] == (0, told[-1][0])
    assert told[-1][0] == told[-1][1] > 0


@pytest.mark.parametrize(
    "fields", [{"tier": "none"}, {"output_partitions": ("topic", "partition")}]
)
def test_other_streams_are_good_too(tmp_path: Path, fields: dict[str, Any]) -> None:
    """A tier that only counts, and columns that are folders' names."""
    create_filled_output(tmp_path, **fields)
    done = verify(tmp_path)
    assert (done.difference, done.warnings, done.has_folded_records) == (None, [], True)


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


def test_a_pass_goes_on_from_the_last_signed_off(tmp_path: Path) -> None:
    """Only what came since is read again, the state of now always; records since fold on from the
    state of then.
    """
    made = create_filled_output(tmp_path)
    assert verify(tmp_path).since == -1
    again = verify(tmp_path)
    assert (again.since, again.entries, again.records, again.difference) == (8, 0, 0, None)
    made.send("in-a/0", "x", 6, 7)
    made.run()
    later = verify(tmp_path)
    assert (
        later.since,
        later.entries,
        later.records,
        later.difference,
        later.has_folded_records,
    ) == (8, 1, 2, None, True)
    whole = verify(tmp_path, everything=True)
    assert (whole.since, whole.entries, whole.difference) == (-1, 10, None)


def test_state_and_witness_are_looked_at_in_every_pass(root: Path) -> None:
    """Also when everything was signed off."""
    assert verify(root).difference is None
    path = paths(root, "state/in-a/0/*-12-*")[0]
    good = path.read_bytes()
    path.write_bytes(flip_bit(good, 999))
    assert first_difference(root).file == str(path.relative_to(root))
    path.write_bytes(good)
    (root / "head.json").write_bytes(json.dumps({"sequence": 8, "sha256": "0" * 64}).encode())
    assert first_difference(root).file == "head.json"


def test_old_records_are_looked_at_by_all(root: Path) -> None:
    """What was signed off is read again only if asked; that it is there, in every pass."""
    assert verify(root).difference is None
    path = paths(root, "records/in-a/0/*.parquet")[0]
    good = path.read_bytes()
    path.write_bytes(flip_bit(good, 999))
    assert verify(root).difference is None
    assert first_difference(root, everything=True).file == str(path.relative_to(root))
    path.unlink()
    assert first_difference(root).file == str(path.relative_to(root))


def test_nothing_is_signed_off_where_something_differs(root: Path) -> None:
    """The sign-off comes after a clean pass alone."""
    path = paths(root, "records/in-a/0/*.parquet")[0]
    path.write_bytes(flip_bit(path.read_bytes(), 999))
    assert verify(root).difference is not None
    assert not (root / "verified.json").exists()


def test_a_sign_off_that_was_changed_is_not_believed(root: Path) -> None:
    """Every flipped bit: it is warned of and everything is looked at, never an error and never a
    shorter pass.
    """
    assert verify(root).difference is None
    path = root / "verified.json"
    good, dice = path.read_bytes(), random.Random(7)
    for bit in dice.sample(range(len(good) * 8), 30):
        path.write_bytes(flip_bit(good, bit))
        done = verify(root)
        assert (done.difference, done.since) == (None, -1)
        assert [warning.file for warning in done.warnings] == ["verified.json"]
        assert path.read_bytes() == good


def test_a_ledger_older_than_its_sign_off_is_found(tmp_path: Path) -> None:
    """Rolled back with its witness: only the sign-off knows. `--all` takes the older ledger as
    meant, and warns.
    """
    made = create_filled_output(tmp_path / "lake")
    shutil.copytree(made.root, tmp_path / "yesterday")
    made.send("in-a/0", "x", 6)
    made.run()
    assert verify(made.root).difference is None
    shutil.copy(made.root / "verified.json", tmp_path / "yesterday")
    found = first_difference(tmp_path / "yesterday")
    assert (found.file, found.sequence) == ("verified.json", 9)
    assert "--all" in found.next
    done = verify(tmp_path / "yesterday", everything=True)
    assert (done.difference, len(done.warnings)) == (None, 1)
    assert verify(tmp_path / "yesterday").since == 8


def test_other_machines_records_are_not_folded_and_that_is_said(root: Path) -> None:
    """Only the stock machine's records say how they make the state; all else is looked at."""
    done = verify(root, table=None)
    assert (done.difference, done.has_folded_records, done.records > 0) == (None, False, True)
    assert "not folded" in done.notes[0]


def test_a_stream_that_was_never_run_says_so(tmp_path: Path) -> None:
    """There is nothing to verify."""
    from seriatim.errors import ConfigError

    with pytest.raises(ConfigError, match="never run"):
        verify(tmp_path)


def test_messages_that_were_put_into_order_are_good(tmp_path: Path) -> None:
    """A repair releases an early message with the late one: the records of real files still give the
    state, and the mark of the repair is kept.
    """
    made = DiskStream(tmp_path)
    made.kafka.create("in-a", 1)
    made.send("in-a/0", "x", ["a"])
    for sequence in (2, 4, 3, 5):
        body = {"type": "update", "seq": sequence, "id": "a", "v": sequence}
        made.kafka.produce("in-a", "x", json.dumps(body).encode(), partition=0)
    made.run()
    joiner = ParquetJoiner(LocalStore(tmp_path), "s")
    opened = made.open().with_ports(joiner=joiner)
    plan = plan_repair(opened, RepairRequest(session="x"))
    RepairRun(opened).apply(plan, 1000)
    result = verify(tmp_path, everything=True)
    assert result.difference is None
    # A refold of everything gives the same, by what the ledger says.
    opened = made.open().with_ports(joiner=joiner)
    plan = plan_repair(opened, RepairRequest(ranges={"in-a/0": (0, 5)}))
    assert RepairRun(opened).apply(plan, 1000).repeated_findings == []
    assert verify(tmp_path, everything=True).difference is None


def test_a_missing_file_is_made_again_by_the_command_with_apply(root: Path) -> None:
    """Without --apply the command that is named only shows a plan."""
    paths(root, "records/in-*/*/*.parquet")[0].unlink()
    advice = first_difference(root).next
    assert "`seriatim repair {stream}` shows how it is made again" in advice
    assert "with --apply" in advice
