"""Tables of further kinds of records on disk: real files, real Delta tables, verify and sweep over
all of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from msgspec.structs import replace

from seriatim import cli
from seriatim.engine.crash_points import arm
from seriatim.engine.machine import Machine, Runner, UserMachine
from seriatim.errors import ConfigError
from seriatim.ledger.delta_store import DeltaLedger
from seriatim.operations.followers import catch_up_derived
from seriatim.operations.prove.partition_rules import state_row_reader
from seriatim.operations.prove.verify import Verification, VerifyResult
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun
from seriatim.storage.audit import FileAudit
from seriatim.storage.derived_tables import DeltaDerived, DeltaOutputs
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.record_files import ParquetRecords, record_schema
from seriatim.storage.state_files import StateFiles
from seriatim.storage.store import LocalStore
from seriatim.testing import MemoryStream, OpenMemoryStream
from tests.integration.lab import _toml as toml
from tests.operations.market_machine import (
    Book,
    Level,
    Market,
    Note,
    machine,
    send_busy_market,
    send_order,
    stream_of,
)
from tests.operations.memory_streams import A0, A1
from tests.operations.test_crash_points import Killed, killer
from tests.operations.test_further_tables import head, straight, tables


class MarketFiles(ParquetRecords, StateFiles):
    """Record and state files in one, as the fake has them."""

    def __init__(self, root: Path, runner: Runner, parts: tuple[str, ...]) -> None:
        ParquetRecords.__init__(
            self, LocalStore(root), runner.columns, "zstd", parts, other_tables=runner.other_columns
        )
        StateFiles.__init__(self, LocalStore(root), "s")


class DiskMarket(MemoryStream):
    """Markets whose output lies below `root`."""

    def __init__(self, root: Path, parts: tuple[str, ...] = ()) -> None:
        stream = stream_of(str(root))
        super().__init__(
            replace(stream, output=replace(stream.output, partition_by=parts)), machine
        )
        self.root, self.parts = root, parts
        self.kafka.create("in-a", 2)
        self._open()

    def _open(self) -> None:
        runner = machine()
        schemas = {table: record_schema(columns) for table, columns in runner.other_columns.items()}
        self.files: Any = MarketFiles(self.root, runner, self.parts)
        store = LocalStore(self.root)
        self.ledger: Any = DeltaLedger(store, record_schema(runner.columns), self.parts)
        self.derived: Any = DeltaDerived(store, "zstd", DeltaOutputs(store, schemas, self.parts))

    def open(self, runner: Runner | None = None) -> OpenMemoryStream:
        """Open files and ledger, as a process of its own does."""
        self._open()
        return super().open(runner)

    def rows(self, _: Any = None) -> list[dict[str, Any]]:
        """What any Delta reader sees."""
        return self._read("records")

    def other_rows(self, table: str) -> list[dict[str, Any]]:
        """The same of another table."""
        return self._read(f"records-{table}")

    def _read(self, room: str) -> list[dict[str, Any]]:
        rows = (
            DeltaTable(self.root / room)
            .to_pyarrow_dataset()
            .to_table(use_threads=False)
            .to_pylist()
        )
        return [{**row, "timestamp": row["timestamp"].timestamp() * 1000} for row in rows]


def verified(made: DiskMarket, *, everything: bool = True) -> VerifyResult:
    """What verify says."""
    return Verification("s", FileAudit(LocalStore(made.root)), from_first_entry=everything).run()


def expected(made: DiskMarket) -> dict[str, Any]:
    """The same messages folded in memory, as the disk has times."""
    found = straight(made, 2)
    return {
        table: [{**row, "timestamp": float(row["timestamp"])} for row in rows]
        for table, rows in found.items()
    }


class Forgetful(Market):
    """Takes back all levels but one: as if its state had lost that one."""

    def end(self, book: Book) -> Iterator[Level | Note]:
        """All levels but the last."""
        yield from list(super().end(book))[:-1]


class Endless(Market):
    """Does not say what is in its state."""

    end = Machine.end


def fold_own_records(
    made: DiskMarket, kind: type[Market], *, everything: bool = True
) -> VerifyResult:
    """What verify says of records that it folds by this machine."""
    table = state_row_reader(UserMachine("markets:Market", kind))
    return Verification(
        "s", FileAudit(LocalStore(made.root)), row_reader=table, from_first_entry=everything
    ).run()


def quoted(root: Path) -> DiskMarket:
    """Books with levels, one of which is gone by a trade and still in the state, with nothing in
    it.
    """
    stream = DiskMarket(root)
    for session in ("s", "t"):
        send_order(stream, A0, "whole", "1", 5, session)
        send_order(stream, A0, "quote", "2", 5, session)
        send_order(stream, A0, "trade", "1", 9, session)
        send_order(stream, A0, "quote", "3", 7, session)
    stream.run(messages_max=3)
    return stream


def test_own_records_are_folded_to_state(tmp_path: Path) -> None:
    """Every row that the records make is one that the state would take back; in slices after a
    sign-off, too.
    """
    made = quoted(tmp_path)
    done = fold_own_records(made, Market)
    assert (done.difference, done.has_folded_records, done.notes) == (None, True, [])
    send_order(made, A0, "quote", "4", 1)
    made.run()
    done = fold_own_records(made, Market, everything=False)
    assert (done.difference, done.has_folded_records, done.since > 0) == (None, True, True)


def write_stream_file(made: DiskMarket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream as a command finds it."""
    streams = made.root / "streams"
    streams.mkdir()
    given = {
        "topics": "in-.*",
        "machine": "tests.operations.market_machine:Market",
        "output": {"path": str(made.root)},
    }
    lines = [f"{key} = {toml(value)}" for key, value in given.items()]
    (streams / "s.toml").write_text("\n".join(lines))
    monkeypatch.setenv("SERIATIM_STREAMS", str(streams))


def test_the_command_folds_own_records_to_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so in its summary, as for the table machine."""
    write_stream_file(quoted(tmp_path), monkeypatch)
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", "s"])
    assert not ended.value.code
    assert "folding the records gives the saved state" in capsys.readouterr().out


def test_a_state_of_an_own_machine_that_lacks_a_row_is_named(tmp_path: Path) -> None:
    """The session, the row and the record's offset are told."""
    difference = fold_own_records(quoted(tmp_path), Forgetful).difference
    assert difference is not None
    assert difference.description == "the state lacks a row that its records make"
    assert (difference.session, difference.partition, difference.offset) == ("s", "in-a/0", 3)
    assert difference.expected == "price='3', size=7"


def test_a_machine_that_does_not_say_what_it_holds_is_not_folded(tmp_path: Path) -> None:
    """Without an `end` nothing is known of its state, and that is said."""
    done = fold_own_records(quoted(tmp_path), Endless)
    assert (done.difference, done.has_folded_records) == (None, False)
    assert "row_key" in done.notes[0]


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path: Path) -> DiskMarket:
    """Two partitions of books and trades, in several slices."""
    stream = DiskMarket(tmp_path, getattr(request, "param", ()))
    for _ in range(2):
        send_busy_market(stream, A0)
        send_busy_market(stream, A1, 2)
        stream.run(messages_max=8)
    return stream


@pytest.mark.parametrize(
    "made", [(), ("topic", "partition")], indirect=True, ids=["plain", "partitioned"]
)
def test_readers_open_each_table(made: DiskMarket) -> None:
    """All kinds are there, each record once, and each table says as of which entry it is."""
    assert tables(made) == expected(made)
    for table in ("trade", "note"):
        commit = DeltaTable(made.root / f"records-{table}").history(1)[0]["seriatim"]
        assert commit["sequence"] == head(made).sequence
    assert verified(made).difference is None


@pytest.mark.parametrize("point", ["committed", "derived", "output-half"])
def test_a_crash_is_caught_up_with(made: DiskMarket, point: str) -> None:
    """The next run does it, even one with nothing else to do; verify calls it behind, not damaged."""
    send_busy_market(made, A0)
    arm(killer(point, 1))
    try:
        with pytest.raises(Killed):
            made.run(messages_max=4)
    finally:
        arm(None)
    seen = verified(made)
    assert seen.difference is None
    assert any("the ledger is at" in warning.description for warning in seen.warnings)
    made.run()
    assert tables(made) == expected(made)
    assert verified(made).difference is None


def test_publish_brings_them_up_too(made: DiskMarket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run died right after its commit, and no other came."""
    send_busy_market(made, A0)
    arm(killer("committed", 1))
    try:
        with pytest.raises(Killed):
            made.run()
    finally:
        arm(None)
    write_stream_file(made, monkeypatch)
    with pytest.raises(SystemExit) as ended:
        cli.main(["publish", "s", "--unchecked"])
    assert not ended.value.code
    assert tables(made) == expected(made)


@pytest.mark.parametrize("made", [(), ("topic",)], indirect=True, ids=["plain", "partitioned"])
def test_a_repair_replaces_files_in_all_tables(made: DiskMarket) -> None:
    """And verify is content with what came of it."""
    tools = made.open().with_ports(joiner=ParquetJoiner(LocalStore(made.root), "s"))
    before = {
        file
        for uri in DeltaTable(made.root / "records-trade").file_uris()
        for file in [uri.split("trade/")[1]]
    }
    done = RepairRun(tools).apply(plan_repair(tools, RepairRequest(partition=str(A0), start=5)), 6)
    assert done.sequence == head(made).sequence
    assert tables(made) == expected(made)
    after = {
        file
        for uri in DeltaTable(made.root / "records-trade").file_uris()
        for file in [uri.split("trade/")[1]]
    }
    assert {path for path in before if path.startswith("in-a/1")} <= after
    assert not before <= after
    assert verified(made).difference is None
    send_order(made, A0, "trade", "1", 1)
    made.run()
    assert tables(made) == expected(made)


def test_a_lost_table_is_made_again(made: DiskMarket) -> None:
    """From the ledger and the files that are there."""
    before = tables(made)
    shutil.rmtree(made.root / "records-trade" / "_delta_log")
    made._open()
    catch_up_derived(made.ledger, made.derived, head(made))
    assert tables(made) == before
    assert verified(made).difference is None


@pytest.mark.parametrize("made", [(), ("topic",)], indirect=True, ids=["plain", "partitioned"])
@pytest.mark.parametrize("deleted", ["", "offset >= 9"], ids=["complete", "changed by others"])
def test_a_table_that_is_still_there_is_rebuilt(made: DiskMarket, deleted: str) -> None:
    """A rebuild gives an existing table exactly the files that the ledger names, in one commit."""
    before = tables(made)
    table = DeltaTable(made.root / "records-trade")
    if deleted:
        table.delete(deleted)
    made._open()
    catch_up_derived(made.ledger, made.derived, head(made), rebuild=True)
    assert tables(made) == before
    assert DeltaTable(made.root / "records-trade").version() == table.version() + 1
    assert verified(made).difference is None


def test_verify_knows_these_rooms(made: DiskMarket) -> None:
    """A damaged, a lost and a stray file of another table are found, and a table that is not what
    entries made it.
    """
    path = next((made.root / "records-note").rglob("*.parquet"))
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert verified(made).difference is not None
    path.unlink()
    lost = verified(made).difference
    assert lost is not None
    assert (lost.description, lost.file) == ("a file is missing", str(path.relative_to(made.root)))
    path.write_bytes(content)
    stray = path.with_name("0-0-stray.parquet")
    stray.write_bytes(content)
    seen = verified(made)
    assert (seen.difference, seen.orphans) == (None, 1)
    send_order(made, A0, "quote")
    send_order(made, A1, "quote")
    made.run()
    assert not stray.exists(), "what no entry named is swept"
    DeltaTable(made.root / "records-trade").delete("number = 1")
    found = verified(made).difference
    assert found is not None
    assert found.file.startswith("records-trade/")
    assert "rebuild" in found.next


def test_other_columns_are_refused(made: DiskMarket) -> None:
    """Before anything of them is written."""
    other = {"trade": record_schema({"number": "int64", "price": "string"})}
    outputs = DeltaOutputs(LocalStore(made.root), other, made.parts)
    with pytest.raises(ConfigError, match="records-trade"):
        outputs.applied_version("trade")
