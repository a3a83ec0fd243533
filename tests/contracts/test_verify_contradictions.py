"""Verify finds what is whole and says something else: entries, tables and state that do not add up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from msgspec.structs import replace

from seriatim.ledger.commit import commit
from seriatim.ledger.entries import Entry, VerdictEntry
from seriatim.ledger.manifests import LedgerHead
from seriatim.ledger.model import Change, EntryMark
from seriatim.memory.check import MemoryChecker
from seriatim.storage.audit import FileAudit
from seriatim.storage.parquet import ParquetFileWriter
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.store import LocalStore
from tests.contracts.disk_streams import DiskStream, create_filled_output
from tests.contracts.verify_helper import first_difference, paths, verify
from tests.operations.check_helper import run_check


def test_records_written_anew_with_other_content_are_found(root: Path) -> None:
    """A well-formed file, of the same rows and name, whose digest is in nothing."""
    path = paths(root, "records/in-*/*/*.parquet")[0]
    table = pq.read_table(path, partitioning=None)
    changed = table.set_column(
        table.schema.get_field_index("v"), "v", pa.array([7] * table.num_rows, pa.int64())
    )
    pq.write_table(changed, path, write_page_checksum=True)
    assert first_difference(root).file == str(path.relative_to(root))


def test_a_file_in_the_table_that_no_entry_added_is_found(root: Path) -> None:
    """Somebody appended beside Seriatim: what it added is named."""
    table = DeltaTable(root / "records")
    rows = table.to_pyarrow_table().slice(0, 1)
    before = set(table.file_uris())
    write_deltalake(table, rows, mode="append")
    (added,) = set(DeltaTable(root / "records").file_uris()) - before
    found = first_difference(root)
    assert found.file == "records/" + added.rpartition("/records/")[2]
    assert "no entry added" in found.description


def test_a_file_taken_out_of_the_table_is_found(root: Path) -> None:
    """Somebody deleted rows beside Seriatim."""
    DeltaTable(root / "records").delete("topic = 'in-b'")
    found = first_difference(root)
    assert "no entry added" in found.description or "lacks" in found.description


def test_files_rewritten_by_somebody_else_are_no_damage(root: Path) -> None:
    """An OPTIMIZE keeps all rows: said, since such records cannot be folded partition by partition."""
    DeltaTable(root / "records").optimize.compact()
    done = verify(root)
    assert done.difference is None
    assert not done.has_folded_records
    assert "OPTIMIZE" in done.notes[0]


def test_a_checkpoint_of_the_log_that_lies_is_found(root: Path) -> None:
    """Readers believe checkpoints: what they see is held against the commits."""
    table = DeltaTable(root / "records")
    table.create_checkpoint()
    (path,) = paths(root, "records/_delta_log/*.checkpoint.parquet")
    kept = pq.read_table(path)
    is_add = kept.column("add").is_valid().to_pylist()
    pq.write_table(
        kept.filter(pa.array([number != is_add.index(True) for number in range(len(is_add))])), path
    )
    found = first_difference(root)
    assert "readers do not see" in found.description
    assert found.file.startswith("records/in-")


Lie = Callable[[Change], Change]


def certified(change: Change, **fields: Any) -> Change:
    """The change with a certificate that says something else."""
    assert change.certificate is not None
    raw = msgspec.to_builtins(change.certificate)
    counts = {**raw["counts"], **fields.pop("counts", {})}
    return replace(
        change,
        certificate=msgspec.convert({**raw, **fields, "counts": counts}, type(change.certificate)),
    )


LIES: dict[str, Lie] = {
    "other records than its files": lambda c: certified(c, counts={"records": 1}),
    "other sessions than its state file": lambda c: certified(c, sessions=9),
    "fewer sessions": lambda c: certified(c, sessions=0),
    "fewer messages": lambda c: certified(
        c, counts={"messages": 1}, holes={"expired": c.until - c.frontier - 1}
    ),
    "other offsets": lambda c: replace(
        c, records=tuple(replace(f, first_offset=f.first_offset + 1) for f in c.records)
    ),
    "another range": lambda c: certified(c, epoch=5),
    "other number of rows": lambda c: certified(
        replace(c, records=tuple(replace(f, rows=f.rows + 1) for f in c.records)),
        counts={"records": sum(f.rows + 1 for f in c.records)},
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_entry_that_lies_is_found(
    tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate or a change that says something else than its files, though hashes and chain
    are right.
    """
    made = DiskStream(tmp_path)
    made.kafka.create("in-a", 1)
    made.send("in-a/0", "x", ["a", "b"], 1)
    made.run()
    made.send("in-a/0", "x", 2, 3)
    made.send("in-a/0", "y", ["a"], 4)

    def lying(store: Any, clock: Any, head: LedgerHead, entry: Entry) -> tuple[LedgerHead, Entry]:
        changes = tuple(LIES[lie](change) if change.records else change for change in entry.changes)
        return commit(store, clock, head, replace(entry, changes=changes))

    monkeypatch.setattr("seriatim.operations.run.commit", lying)
    made.run()
    found = first_difference(tmp_path)
    assert found.sequence == 2
    assert _matches(lie, found.description), found.description


PROMISES = {
    "other records than its files": "dense",
    "other sessions than its state file": "counted",
    "fewer sessions": "counted",
    "fewer messages": "counted",
    "other offsets": "unique",
    "another range": "dense",
    "other number of rows": "counted",
}
"""The promise that each lie breaks."""


@pytest.mark.parametrize("lie", LIES)
def test_check_finds_a_lie_of_an_entry_since_the_last_verdict(
    tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules are those of verify: what it would find is found by the check after the run."""
    made = DiskStream(tmp_path)
    made.kafka.create("in-a", 1)
    made.send("in-a/0", "x", ["a", "b"], 1)
    made.run()
    assert broken_promises(made) == []
    made.send("in-a/0", "x", 2, 3)
    made.send("in-a/0", "y", ["a"], 4)

    def lying(store: Any, clock: Any, head: LedgerHead, entry: Entry) -> tuple[LedgerHead, Entry]:
        changes = tuple(LIES[lie](change) if change.records else change for change in entry.changes)
        return commit(store, clock, head, replace(entry, changes=changes))

    with monkeypatch.context() as patched:
        patched.setattr("seriatim.operations.run.commit", lying)
        made.run()
    assert PROMISES[lie] in broken_promises(made)


def broken_promises(made: DiskStream) -> list[str]:
    """The promises that a check finds broken. Its verdict follows them."""
    store = LocalStore(made.root)
    rows = MemoryChecker(lambda file: list(FileAudit(store).rows(file.path)))
    done = run_check(made, checker=rows, record_scanner=RecordScan(store))
    broken = [evidence.promise for evidence in done.evidence if not evidence.holds]
    assert ("bad" in done.verdict.values()) == bool(broken)
    return broken


def _matches(lie: str, what: str) -> bool:
    return all(word in what for word in lie.split() if word not in ("other", "than", "its"))


def test_a_slice_that_leaves_a_hole_is_found(tmp_path: Path) -> None:
    """Certificates tile the range from birth to the frontier: one that begins later is named."""
    made = create_filled_output(tmp_path)
    head = made.ledger.head("s")
    assert head is not None
    account = head.ledger.partitions["in-a/1"]
    skipping = replace(account, frontier=account.frontier + 5)
    moved = replace(head.ledger, partitions={**head.ledger.partitions, "in-a/1": skipping})
    _commit_by_hand(made, moved)
    found = first_difference(tmp_path)
    assert (found.partition, found.sequence) == ("in-a/1", 9)
    assert broken_promises(made) == ["dense"]


def _commit_by_hand(made: DiskStream, ledger: Any) -> None:
    """An entry of nothing whose manifest says another ledger: chain, hashes and transaction are
    right.
    """
    from seriatim.ledger.manifests import Manifest

    entry = VerdictEntry(attempt="hand", sequence=ledger.sequence + 1, previous=ledger.sha256)
    manifest = Manifest(entry=entry, ledger=replace(ledger, sequence=entry.sequence))
    reference = made.ledger.put_manifest(manifest)
    mark = {
        "sequence": entry.sequence,
        "previous": entry.previous,
        "manifest": reference.path,
        "sha256": reference.sha256,
    }
    table = DeltaTable(made.root / "records")
    properties = CommitProperties(
        custom_metadata={"seriatim": mark},  # type: ignore[dict-item]  # any JSON is fine
        app_transactions=[Transaction("seriatim", entry.sequence)],
    )
    table.create_write_transaction([], "append", table.schema(), commit_properties=properties)
    made.ledger.put_witness(EntryMark(entry.sequence, reference.sha256))


def test_a_state_that_its_records_do_not_make_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Session and row are named, with what the records make and what the state has, digests and
    counts being right.
    """
    made = DiskStream(tmp_path)
    made.kafka.create("in-a", 1)
    made.send("in-a/0", "x", ["a", "b"], 1)
    dump = made.runner.dump

    def wrong(rows: dict[Any, Any]) -> bytes:
        return dump(
            {key: (*row[:1], 99, *row[2:]) if key == "b" else row for key, row in rows.items()}
        )

    monkeypatch.setattr(made.runner, "dump", wrong)
    made.run()
    found = first_difference(tmp_path)
    assert (found.partition, found.session, found.offset) == ("in-a/0", "x", 0)
    assert "v=0" in found.expected
    assert "v=99" in found.found
    assert broken_promises(made) == ["folded"]


@pytest.mark.parametrize(
    ("column", "value", "promise"),
    [
        ("v", 77, "folded"),
        ("before_v", 77, "linked"),
        ("offset", 0, "unique"),
        ("topic", "z", "unique"),
    ],
)
def test_records_that_were_written_wrong_are_found_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, value: Any, promise: str
) -> None:
    """A writer that makes a mistake: digests and counts are right, one value of the last record is
    not.
    """
    made = DiskStream(tmp_path)
    made.kafka.create("in-a", 1)
    made.send("in-a/0", "x", ["a", "b"], 1)
    made.run()
    assert broken_promises(made) == []
    made.send("in-a/0", "x", 2, 3)
    add = ParquetFileWriter.add

    def wrong(self: ParquetFileWriter, batch: pa.RecordBatch, **rest: Any) -> None:
        if column in batch.schema.names:
            number = batch.schema.get_field_index(column)
            values = batch.column(number).to_pylist()
            values[-1] = value
            wrong_values = pa.array(values).cast(batch.column(number).type)
            batch = batch.set_column(number, batch.schema.field(number), wrong_values)
        add(self, batch, **rest)

    with monkeypatch.context() as patched:
        patched.setattr(ParquetFileWriter, "add", wrong)
        made.run()
    found = first_difference(tmp_path, everything=True)
    assert found.promise == promise
    assert promise in broken_promises(made)


def test_records_twice_in_the_table_are_found(root: Path) -> None:
    """The same rows under another name, added by a commit that looks like ours: offset and index
    are not unique.
    """
    path = paths(root, "records/in-b/0/*.parquet")[0]
    outline = FileAudit(LocalStore(root)).outline(str(path.relative_to(root)))
    assert outline.first_disorder is None
    table = pq.read_table(path, partitioning=None)
    pq.write_table(pa.concat_tables([table, table.slice(table.num_rows - 1)]), path)
    twice = FileAudit(LocalStore(root)).outline(str(path.relative_to(root)))
    assert twice.first_disorder == (
        table.column("offset")[-1].as_py(),
        table.column("index")[-1].as_py(),
    )
