"""Columns that the stream file gets behind the others: on disk, in the ledger, in every table, and
whatever is done to files of before and after.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from seriatim.engine.crash_points import arm
from seriatim.errors import ConfigError
from seriatim.ledger.commit import require_head
from seriatim.operations.prove.great_expectations_suites import GreatExpectations
from seriatim.operations.prove.partition_rules import state_row_reader
from seriatim.operations.prove.suite import Expectation
from seriatim.operations.prove.verify import Verification
from seriatim.operations.publish import publish_current
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun
from seriatim.storage.audit import FileAudit
from seriatim.storage.current_table import DeltaCurrent
from seriatim.storage.join import ParquetJoiner
from seriatim.storage.record_files import ParquetRewriter, record_schema
from seriatim.storage.record_query import RecordQuery
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.store import LocalStore, Store, open_store
from tests.contracts.disk_streams import COLUMNS, DiskStream
from tests.formats.captured_stream import CapturedStream
from tests.operations.check_helper import run_check, values_between
from tests.operations.compact_helper import run_compaction
from tests.operations.memory_streams import A0
from tests.operations.repair_helper import remove_file
from tests.operations.repair_helper import repair as repair_in_memory
from tests.operations.test_crash_points import Killed, killer

ADDED = {"size": "int64", "price": "decimal(9,2)", "seen": "timestamp", "note": "string"}
WIDE = {**COLUMNS, **ADDED}
NEW_VALUES = {"size": 7, "price": "2.5", "seen": "2026-01-02T03:04:05Z", "note": "neu"}


def two_sessions(root: Path, url: str = "") -> DiskStream:
    """A stream with one partition and two sessions, in two slices."""
    made = DiskStream(root, url=url)
    made.kafka.create("in-a", 1)
    for session in ("x", "y"):
        made.send("in-a/0", session, ["a", "b"], 1)
    made.run(messages_max=3)
    return made


@pytest.fixture
def disk_stream(tmp_path: Path) -> Iterator[DiskStream]:
    """The same in a folder."""
    yield two_sessions(tmp_path)
    arm(None)


def send_wide(made: DiskStream, session: str, row: str, **values: Any) -> None:
    """An update of a row by a producer that knows the new columns."""
    sequence = made._sequences["in-a/0", session] = made._sequences["in-a/0", session] + 1
    body = {"type": "update", "seq": sequence, "id": row, **values}
    made.kafka.produce("in-a", session, json.dumps(body).encode(), partition=0)


def store_of(made: DiskStream) -> Store:
    """Its output, opened anew."""
    return open_store(made.stream.output.path)


def verify(made: DiskStream) -> str:
    """What verify says is different; empty if nothing is."""
    reader = state_row_reader(made.runner)
    audit = FileAudit(store_of(made))
    result = Verification("s", audit, from_first_entry=True, row_reader=reader).run()
    return result.difference.description if result.difference else ""


def table_rows(made: DiskStream, table: str) -> list[dict[str, Any]]:
    """The rows of a Delta table, as delta-rs reads them, without help of ours."""
    options = store_of(made).delta_options()
    path = made.stream.output.path
    delta = DeltaTable(f"{path}/{table}", storage_options=options)
    rows = delta.to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: (row["offset"], row.get("index", 0), row["id"]))


def publish(made: DiskStream) -> list[tuple[Any, ...]]:
    """The rows of `current` after a publish: session, id and the new columns."""
    row_key_spec = made.runner.row_key_spec
    assert row_key_spec is not None
    schema = record_schema(made.runner.columns)
    current = DeltaCurrent(store_of(made), "s", schema, row_key_spec)
    publish_current("s", made.ledger, current)
    names = ("session", "id", "size", "price", "note")
    return sorted(tuple(row[name] for name in names) for row in table_rows(made, "current"))


def kinds(made: DiskStream) -> list[str]:
    """The kinds of the entries, oldest first."""
    head = require_head(made.ledger, "s")
    entries = []
    for sequence in range(head.ledger.sequence + 1):
        entries.append(made.ledger.manifest_at("s", sequence).entry.kind)
    return entries


EXPECTED_CURRENT = [
    ("x", "a", 7, Decimal("2.50"), "neu"),
    ("x", "b", None, None, None),
    ("y", "a", None, None, None),
    ("y", "b", None, None, None),
]


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_added_columns_are_in_every_table_and_old_rows_have_null(
    request: pytest.FixtureRequest, tmp_path: Path, place: str
) -> None:
    """By one entry of their own. Verify, check, publish and compaction take old and new files alike."""
    url = request.getfixturevalue("s3_url") + "/grown" if place == "bucket" else ""
    disk_stream = two_sessions(tmp_path, url)
    before = table_rows(disk_stream, "records")
    publish_with_few = DeltaCurrent(
        store_of(disk_stream), "s", record_schema(disk_stream.runner.columns), key_spec(disk_stream)
    )
    publish_current("s", disk_stream.ledger, publish_with_few)

    disk_stream.set_columns(WIDE)
    send_wide(disk_stream, "x", "a", **NEW_VALUES)
    disk_stream.run()
    assert kinds(disk_stream).count("columns") == 1
    rows = table_rows(disk_stream, "records")
    assert [{name: row[name] for name in before[0]} for row in rows[:-1]] == before
    assert {name: rows[-1][name] for name in ("size", "price", "note")} == {
        "size": 7,
        "price": Decimal("2.50"),
        "note": "neu",
    }
    assert all(row[name] is None for row in rows[:-1] for name in (*ADDED, "before_note"))
    assert verify(disk_stream) == ""
    checked = run_check(
        disk_stream,
        checker=GreatExpectations(store_of(disk_stream)),
        record_scanner=RecordScan(store_of(disk_stream)),
    )
    assert checked.ledger.checked == checked.ledger.sequence
    assert publish(disk_stream) == EXPECTED_CURRENT

    send_wide(disk_stream, "x", "a", note="zwei")
    disk_stream.run()
    (changed, *_) = publish(disk_stream)
    assert changed == ("x", "a", 7, Decimal("2.50"), "zwei")
    query = RecordQuery(store_of(disk_stream), "s")
    found = list(query.find_records({"session": "x"}))
    assert [record["before_note"] for record in found] == [None] * (len(found) - 1) + ["neu"]

    compacted = run_compaction(disk_stream, rewriter=ParquetRewriter(store_of(disk_stream), "s"))
    assert compacted.sequence >= 0
    after_compaction = table_rows(disk_stream, "records")
    assert len(after_compaction) == len(rows) + 1
    assert verify(disk_stream) == ""
    # Nothing more is added by later runs.
    send_wide(disk_stream, "y", "b", size=1)
    disk_stream.run()
    assert kinds(disk_stream).count("columns") == 1
    assert verify(disk_stream) == ""


def test_a_suite_may_judge_a_new_column_beside_files_without_it(disk_stream: DiskStream) -> None:
    """In them it is null, which this expectation leaves out, as great-expectations always does."""
    disk_stream.set_columns(WIDE)
    send_wide(disk_stream, "x", "a", **NEW_VALUES)
    disk_stream.run()
    schema = record_schema(disk_stream.runner.columns)
    store = store_of(disk_stream)
    for limit, verdict in ((100, "closed"), (5, "open")):
        checked = run_check(
            disk_stream,
            values_between("size", 0, limit),
            checker=GreatExpectations(store, addable_fields=[schema.field(name) for name in ADDED]),
            record_scanner=RecordScan(store),
        )
        assert checked.ledger.circuit == verdict
        send_wide(disk_stream, "y", "a", size=6)
        disk_stream.run()


@pytest.mark.parametrize(
    "expectation",
    [
        values_between("before_size", 0, 5),
        Expectation("expect_table_column_count_to_be_between", {"min_value": 1}),
    ],
    ids=["a-before-image", "no-columns-named"],
)
def test_a_suite_may_be_about_every_column_beside_files_without_it(
    disk_stream: DiskStream, expectation: Expectation
) -> None:
    """The row before has the new columns as well, and files have their columns in two orders."""
    disk_stream.set_columns(WIDE)
    send_wide(disk_stream, "x", "a", **NEW_VALUES)
    disk_stream.run()
    schema = record_schema(disk_stream.runner.columns)
    spec = key_spec(disk_stream)
    fields = [schema.field(name) for name in spec.addable_record_columns]
    store = store_of(disk_stream)
    checked = run_check(
        disk_stream,
        expectation,
        checker=GreatExpectations(store, addable_fields=fields),
        record_scanner=RecordScan(store),
    )
    assert checked.ledger.circuit == "closed"
    assert checked.ledger.checked == checked.ledger.sequence


def key_spec(made: DiskStream) -> Any:
    """How records become rows."""
    assert made.runner.row_key_spec is not None
    return made.runner.row_key_spec


@pytest.mark.parametrize("point", ["manifest-written", "committed", "witness-written"])
@pytest.mark.parametrize("occurrence", [1, 2])
def test_a_crash_around_the_entry_is_harmless(
    disk_stream: DiskStream, point: str, occurrence: int
) -> None:
    """Before its commit, between it and the first file that has the columns, and later."""
    disk_stream.set_columns(WIDE)
    send_wide(disk_stream, "x", "a", **NEW_VALUES)
    arm(killer(point, occurrence))
    with pytest.raises(Killed):
        disk_stream.run()
    arm(None)
    if (point, occurrence) == ("committed", 1):
        assert kinds(disk_stream)[-1] == "columns"
        assert {row["note"] for row in table_rows(disk_stream, "records")} == {None}
        assert verify(disk_stream) == ""
    disk_stream.run()
    assert kinds(disk_stream).count("columns") == 1
    assert publish(disk_stream) == EXPECTED_CURRENT
    assert verify(disk_stream) == ""


def test_who_still_has_fewer_columns_is_refused(disk_stream: DiskStream) -> None:
    """A run that began before, and every later one whose stream file is the old one."""
    few = disk_stream.runner
    stream_before = disk_stream.stream
    disk_stream.send("in-a/0", "x", 2)
    overtaken: list[bool] = []

    def on_point(name: str) -> None:
        if name == "slice-folded" and not overtaken:
            overtaken.append(True)
            # It adds the columns and folds nothing: the frontier stays where it is.
            disk_stream.set_columns(WIDE)
            disk_stream.run(until={A0: 4})

    arm(on_point)
    with pytest.raises(ConfigError, match="column 'size'") as refused:
        disk_stream.folding(few).run(1000)
    arm(None)
    assert refused.value.next.startswith("start again with the newest stream file")
    assert kinds(disk_stream)[-1] == "columns"
    assert verify(disk_stream) == ""
    disk_stream.set_columns(dict(stream_before.table.columns))
    disk_stream.send("in-a/0", "x", 3)
    with pytest.raises(ConfigError, match=r"misread the state|column"):
        disk_stream.run()


def test_two_runs_that_add_the_same_columns_add_them_once(disk_stream: DiskStream) -> None:
    """The one that is second goes on with what is there."""
    disk_stream.set_columns(WIDE)
    send_wide(disk_stream, "x", "a", **NEW_VALUES)
    others: list[bool] = []

    def on_point(name: str) -> None:
        if name == "ledger-read" and not others:
            others.append(True)
            disk_stream.run(until={A0: 4})

    arm(on_point)
    disk_stream.run()
    arm(None)
    assert others
    assert kinds(disk_stream).count("columns") == 1
    assert publish(disk_stream) == EXPECTED_CURRENT
    assert verify(disk_stream) == ""


@pytest.mark.parametrize(
    "columns",
    [
        {"new": "string", **COLUMNS},
        {**COLUMNS, "v": "string"},
        {"id": "string", "v": "int64"},
        {**COLUMNS, "before_v": "string"} | {"op": "string"},
    ],
    ids=["in-front", "another-type", "fewer", "names"],
)
def test_other_changes_of_columns_are_refused(
    disk_stream: DiskStream, columns: dict[str, str]
) -> None:
    """Another order, another type, fewer columns: before anything is read."""
    if "op" in columns:
        # `before_v` is what the before-image of v is called, so it gets another name: that is fine.
        disk_stream.set_columns(columns)
        disk_stream.run()
        assert kinds(disk_stream).count("columns") == 1
        return
    few = dict(disk_stream.stream.table.columns)
    disk_stream.set_columns(columns)
    with pytest.raises(ConfigError, match=r"misread the state|column"):
        disk_stream.run()
    disk_stream.set_columns(few)
    assert "columns" not in kinds(disk_stream)


def repair(made: DiskStream, **request: Any) -> None:
    """Plan a repair, and apply it."""
    open_stream = made.open().with_ports(joiner=ParquetJoiner(LocalStore(made.root), "s"))
    plan = plan_repair(open_stream, RepairRequest(**request))
    RepairRun(open_stream).apply(plan, 1000)


def test_another_command_asks_for_a_run_first(disk_stream: DiskStream) -> None:
    """A repair writes records, so it waits until the table has the columns."""
    disk_stream.set_columns(WIDE)
    with pytest.raises(ConfigError) as refused:
        repair(disk_stream, ranges={"in-a/0": (2, 4)})
    assert "seriatim run s" in (refused.value.next or "")


def test_what_is_folded_again_gets_the_columns(tmp_path: Path) -> None:
    """The messages had them all the time. Records of before and after are joined in one file, and the
    state that is between them is that of the whole table.
    """
    made = DiskStream(tmp_path)
    made.kafka.create("in-a", 1)
    made.send("in-a/0", "x", ["a", "b"])
    send_wide(made, "x", "a", **NEW_VALUES)
    made.run()
    send_wide(made, "x", "b", size=8)
    made.run()
    made.set_columns(WIDE)
    made.run()
    assert [row[2] for row in publish(made)] == [None, None]
    repair(made, ranges={"in-a/0": (2, 3)})
    assert verify(made) == ""
    assert [row[2] for row in publish(made)] == [None, 8]
    repair(made, ranges={"in-a/0": (0, 3)})
    assert verify(made) == ""
    assert [row[2] for row in publish(made)] == [7, 8]


def test_lost_state_is_rebuilt_of_files_that_lack_the_columns(disk_stream: DiskStream) -> None:
    """Also if no file of the partition has them yet."""
    disk_stream.set_columns(WIDE)
    disk_stream.run()
    before = publish(disk_stream)
    account = require_head(disk_stream.ledger, "s").ledger.partitions[str(A0)]
    disk_stream.kafka.delete_records(A0, account.frontier)
    for file in account.state:
        (disk_stream.root / file.path).unlink()
    repair(disk_stream, forward=True)
    assert verify(disk_stream) == ""
    assert publish(disk_stream) == before


def test_a_row_of_which_only_a_part_is_known_contradicts_nothing_else() -> None:
    """Debezium with whole before-images: the source had the column before the stream file did. What is
    not known is not compared, and a value that the connector leaves out is not invented.
    """
    for session in ("key", "partition"):
        made = CapturedStream(session)
        first = {"id": 1, "v": 1, "w": "w1"}
        second = {"id": 2, "v": 1, "w": "w2"}
        third = {"id": 3, "v": 1, "w": "w3"}
        for row in (first, second, third):
            made.send("c", row)
        made.run()
        made.set_columns({"id": "int64", "v": "int64", "w": "string"})
        # The column is known from the first change on.
        made.send("u", {**first, "v": 2}, first)
        made.run()
        # Another row still is not known, in a later slice.
        made.send("d", None, second)
        # A change of `v` from 1 to 8 was lost: `v` is known, and so it is a contradiction.
        made.send("u", {**third, "v": 9}, {**third, "v": 8})
        outcome = made.run()
        causes = [finding.cause for finding in outcome.findings]
        assert causes == ["before-image differs from the row in v: id=3"], session
        assert made.rows_by_id()[1] == {"id": 1, "v": 2, "w": "w1"}
        assert 2 not in made.rows_by_id()


def test_a_value_that_is_not_known_is_headless_and_not_null() -> None:
    """TOAST: the connector leaves out a value that did not change, in a column that was added since."""
    made = CapturedStream("partition", before_images="partial")
    made.send("c", {"id": 1, "v": 1, "w": "long"})
    made.run()
    made.set_columns({"id": "int64", "v": "int64", "w": "string"})
    made.send("u", {"id": 1, "v": 2, "w": "__debezium_unavailable_value"})
    outcome = made.run()
    assert outcome.headless == 1
    assert made.rows_by_id()[1] == {"id": 1, "v": 1, "w": None}
    made.send("u", {"id": 1, "v": 3, "w": "long"})
    made.send("u", {"id": 1, "v": 4, "w": "__debezium_unavailable_value"})
    assert made.run().headless == 0
    assert made.rows_by_id()[1] == {"id": 1, "v": 4, "w": "long"}


def test_a_null_of_a_row_that_was_rebuilt_of_records_may_be_older_than_its_column() -> None:
    """Records are null where the column was not there yet. So no value is taken from such a null."""
    made = CapturedStream("partition", before_images="partial", tier="none")
    made.send("c", {"id": 1, "v": 1, "w": "long"})
    made.run()
    made.set_columns({"id": "int64", "v": "int64", "w": "string"})
    made.run()
    made.kafka.delete_records(A0, 1)
    for file in made.accounts()[A0].state:
        remove_file(made, file.path)
    repair_in_memory(made, forward=True)
    assert made.rows_by_id()[1] == {"id": 1, "v": 1, "w": None}
    made.send("u", {"id": 1, "v": 2, "w": "__debezium_unavailable_value"})
    assert made.run().headless == 1
    assert made.rows_by_id()[1] == {"id": 1, "v": 1, "w": None}
    made.send("u", {"id": 1, "v": 3, "w": "long"})
    made.run()
    assert made.rows_by_id()[1] == {"id": 1, "v": 3, "w": "long"}
