"""Check on real files: what the fakes say, great-expectations and pyarrow say too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import RowKeySpec
from seriatim.memory.check import MemoryChecker, MemorySight
from seriatim.operations.prove.check import CheckResult
from seriatim.operations.prove.great_expectations_suites import GreatExpectations
from seriatim.operations.prove.partition_rules import (
    CommittedFile,
    Evidence,
    FoldedRows,
    check_content,
)
from seriatim.operations.prove.suite import (
    BrokenCheckError,
    Checker,
    Expectation,
    Judgement,
    Suite,
)
from seriatim.ports import RecordScanner, ScanRequest, UnreadableFileError
from seriatim.storage.record_scan import RecordScan
from seriatim.storage.store import LocalStore
from tests.contracts.disk_streams import DiskStream, create_filled_output
from tests.contracts.test_column_names import create_output
from tests.operations.check_helper import run_check, shipped_suites, values_between

P = Partition("t", 0)
FILE = File("records/t/0/f.parquet", 1, 0, "", 0, 9)
SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("topic_id", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("index", pa.int32()),
        ("session", pa.string()),
        ("op", pa.string()),
        ("id", pa.string()),
        ("v", pa.int64()),
        ("before_id", pa.string()),
        ("before_v", pa.int64()),
    ]
)
ROW_KEY = RowKeySpec(
    key=("id",),
    columns=("id", "v"),
    deleted_when={"op": "delete"},
    has_before_images=True,
)
WANTED = ScanRequest(first_offsets={"new": 0}, row_key_spec=ROW_KEY)


def row(offset: int, op: str = "update", v: int | None = 0, **fields: Any) -> dict[str, Any]:
    """A record of row a of session x."""
    own = {
        "topic": "t",
        "topic_id": "new",
        "partition": 0,
        "offset": offset,
        "index": 0,
        "session": "x",
    }
    return {**own, "op": op, "id": "a", "v": v, "before_id": "a", "before_v": v, **fields}


ROWS = [
    row(0, "insert", 1, before_id=None, before_v=None),
    row(1, v=2, before_v=1),
    row(2, v=2**53 + 1, before_v=2),
    row(2, "insert", 5, index=1, session="y", before_id=None, before_v=None),
    row(3, "delete", None, before_v=2**53 + 1),
    row(4, "snapshot", None, before_id=None, before_v=None),
]


@pytest.fixture(scope="module")
def library() -> Callable[..., GreatExpectations]:
    """Great expectations over the files of a folder."""

    def at(root: Path, rows_at_once: int = 250_000) -> GreatExpectations:
        return GreatExpectations(LocalStore(root), rows_at_once)

    return at


@pytest.fixture(params=["memory", "real"])
def looking(request: pytest.FixtureRequest, tmp_path: Path, library: Any) -> Any:
    """Sight and checker over given rows, as fakes and for real."""

    def over(
        rows: list[dict[str, Any]], rows_per_group: int = 100
    ) -> tuple[RecordScanner, Checker]:
        if request.param == "memory":
            return MemorySight(lambda _: rows), MemoryChecker(lambda _: rows)
        path = tmp_path / FILE.path
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            pa.Table.from_pylist(rows, schema=SCHEMA), path, row_group_size=rows_per_group
        )
        return RecordScan(LocalStore(tmp_path)), library(tmp_path)

    return over


class Walk(NamedTuple):
    """What one file says, folded over what was."""

    new_rows: int
    misplaced: list[int]
    """The offsets of records out of order, or of another partition."""
    tables: dict[str, dict[Any, Any]]
    """By session, then by key."""
    unlinked_rows: int
    unlinked_offset: int


def walked(
    sight: RecordScanner, wanted: ScanRequest = WANTED, was: dict[str, Any] | None = None
) -> Walk:
    """A walk through one file."""
    scanned = sight.scan([FILE], wanted)
    rows = FoldedRows()
    for name, table in (was or {}).items():
        rows.put_session(("new", name), table)
    unlinked = [image.offset for image in scanned.first_rows if rows.row(image) != image.row]
    if scanned.unlinked_rows:
        unlinked += [scanned.unlinked_offset] * scanned.unlinked_rows
        assert scanned.unlinked_files == [FILE.path]
    for image in scanned.last_rows:
        rows.fold(image)
    change = CommittedFile.of_unread_entry(FILE, 0, P)
    misplaced = [
        max(
            difference.offset,
            scanned.outlines[0].last_offset * ("partition" in difference.description),
        )
        for difference in check_content(change, scanned.outlines[0])
        if difference.promise == "unique" and "(first, last)" not in difference.description
    ]
    tables = {
        name: {key: kept[0] for key, kept in table.items()}
        for (_, name), table in rows.tables.items()
    }
    return Walk(scanned.new_rows, misplaced, tables, len(unlinked), min(unlinked, default=-1))


@pytest.mark.parametrize("rows_per_group", [100, 2, 1])
def test_a_walk_folds_records_however_they_are_cut(looking: Any, rows_per_group: int) -> None:
    """Large numbers, nulls, deletes and other sessions come out as they went in."""
    sight, _ = looking(ROWS, rows_per_group)
    walk = walked(sight)
    assert walk.tables == {"x": {"a": ("a", None)}, "y": {"a": ("a", 5)}}
    assert (walk.new_rows, walk.misplaced, walk.unlinked_rows) == (6, [], 0)


@pytest.mark.parametrize("rows_per_group", [100, 1])
@pytest.mark.parametrize(
    ("number", "values", "offset"),
    [
        (1, {"before_v": 7}, 1),
        (1, {"before_id": None}, 1),
        (0, {"before_id": "a", "before_v": 1}, 0),
        (5, {"before_id": "a"}, 4),
        (4, {"before_v": None}, 3),
    ],
)
def test_a_wrong_before_image_is_seen_in_or_between_parts(
    looking: Any, rows_per_group: int, number: int, values: dict[str, Any], offset: int
) -> None:
    """One, and where."""
    rows = [dict(one) for one in ROWS]
    rows[number].update(values)
    sight, _ = looking(rows, rows_per_group)
    assert (walked(sight).unlinked_rows, walked(sight).unlinked_offset) == (1, offset)


def test_a_walk_goes_on_from_what_was(looking: Any) -> None:
    """The state of before is what the first before-image is held against."""
    sight, _ = looking([row(5, v=3, before_v=2)])
    assert walked(sight, was={"x": {"a": ("a", 2)}}).unlinked_rows == 0
    assert walked(sight, was={"x": {"a": ("a", 9)}}).unlinked_rows == 1
    assert walked(sight).unlinked_rows == 1


@pytest.mark.parametrize("rows_per_group", [100, 1])
def test_order_and_strangers_are_seen(looking: Any, rows_per_group: int) -> None:
    """The same place twice, a step back, another partition's row; another life begins anew."""
    for rows, wrong in (
        ([row(1), row(1)], [1]),
        ([row(2), row(1)], [1]),
        ([row(1), row(2, partition=1)], [2]),
        ([row(7, topic_id="old"), row(1)], []),
    ):
        assert walked(looking(rows, rows_per_group)[0]).misplaced == wrong


def test_old_records_and_other_sessions_are_left_out(looking: Any) -> None:
    """By topic id and offset; in rounds, by the session's name."""
    rows = [
        row(7, topic_id="old"),
        row(1),
        row(2),
        *(row(3, session=f"s{n}", index=n) for n in range(20)),
    ]
    sight, _ = looking(rows)
    walk = walked(sight, ScanRequest(first_offsets={"new": 2}, row_key_spec=ROW_KEY))
    assert (walk.new_rows, len(walk.tables)) == (21, 21)
    rounds = [
        walked(
            sight,
            ScanRequest(
                first_offsets={"new": 0},
                row_key_spec=RowKeySpec(
                    key=("id",), columns=("id",), deleted_when={"op": "delete"}
                ),
                bucket=(number, 3),
            ),
        )
        for number in range(3)
    ]
    names = [name for walk in rounds for name in walk.tables]
    assert len(names) == len(set(names)) == 21


def test_outlines_state_the_ranges_of_rising_columns(tmp_path: Path) -> None:
    """Over all row groups, with times in milliseconds, for the fake and the real scan, in a file that
    is scanned or outlined. A column without values has no range; a nested column shifts nothing.
    """
    schema = pa.schema(
        [
            *(SCHEMA.field(name) for name in ("topic", "topic_id", "partition", "offset", "index")),
            ("source_offset", pa.int64()),
            ("tags", pa.struct([("a", pa.int64()), ("b", pa.int64())])),
            ("timestamp", pa.timestamp("us", "UTC")),
            ("session", pa.string()),
            ("sequence", pa.int64()),
        ]
    )
    times_ms = [5_000, None, -1, 7_001, 6_000]
    sequences = [3, None, None, 4, -8]
    rows: list[dict[str, Any]] = []
    for number, (time_ms, sequence) in enumerate(zip(times_ms, sequences, strict=True)):
        position = {name: row(number)[name] for name in schema.names[:5]}
        rows.append({**position, "timestamp": time_ms, "session": "x", "sequence": sequence})
    stored_rows = [
        {**values, "timestamp": time_ms if time_ms is None else time_ms * 1000, "tags": {"a": 99}}
        for values, time_ms in zip(rows, times_ms, strict=True)
    ]
    path = tmp_path / FILE.path
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(stored_rows, schema=schema), path, row_group_size=2)
    expected = {"offset": (0, 4), "timestamp": (-1, 7_001), "sequence": (-8, 4)}
    real_scan = RecordScan(LocalStore(tmp_path))
    for scan in (MemorySight(lambda _: rows), real_scan):
        assert scan.scan([FILE], ScanRequest()).outlines[0].value_ranges == expected
    assert real_scan.outline(FILE.path).value_ranges == expected
    # A range is stated for all rows or not at all.
    table = pq.read_table(path)
    pq.write_table(table, path, row_group_size=2, write_statistics=["offset"])
    assert real_scan.outline(FILE.path).value_ranges == {"offset": (0, 4)}


def test_composite_keys_are_kept_apart(looking: Any) -> None:
    """(a, 1) and (a, 2) are two rows."""
    sight, _ = looking([row(0, v=1), row(1, v=2), row(2, v=1)])
    wanted = ScanRequest(
        first_offsets={"new": 0},
        row_key_spec=RowKeySpec(
            key=("id", "v"), columns=("id", "v"), deleted_when={"op": "delete"}
        ),
    )
    assert set(walked(sight, wanted).tables["x"]) == {("a", 1), ("a", 2)}


def expects(kind: str, **kwargs: Any) -> Expectation:
    """An expectation."""
    return Expectation(f"expect_{kind}", kwargs, suite="s.json")


EXPECTED = [
    (expects("column_values_to_not_be_null", column="v"), 2, 3),
    (
        expects(
            "column_values_to_be_in_set", column="op", value_set=["insert", "update", "delete"]
        ),
        1,
        4,
    ),
    (expects("column_values_to_be_between", column="v", min_value=0, max_value=2**53), 1, 2),
    (
        expects(
            "column_pair_values_a_to_be_greater_than_b",
            column_A="offset",
            column_B="index",
            or_equal=True,
        ),
        0,
        -1,
    ),
    (expects("compound_columns_to_be_unique", column_list=["offset", "session"]), 0, -1),
    (expects("compound_columns_to_be_unique", column_list=["session", "op"]), 2, 1),
]


@pytest.mark.parametrize(("expectation", "broken", "offset"), EXPECTED)
def test_an_expectation_says_how_many_and_where(
    looking: Any, expectation: Expectation, broken: int, offset: int
) -> None:
    """Both judge alike: the number of rows, the first offset, the file to blame."""
    _, checker = looking(ROWS)
    judged = checker.check_records(Suite("s", (expectation,)), P, [FILE], {"new": 0})
    found = [(one.broken_count, one.row_count, one.example_offset, one.files) for one in judged]
    assert found == ([(broken, 6, offset, (FILE.path,))] if broken else [])


def test_old_records_are_not_judged_again(looking: Any) -> None:
    """Only what is new since then, of the lives that are asked for."""
    _, checker = looking(ROWS)
    suite = Suite("s", (expects("column_values_to_be_between", column="offset", min_value=4),))
    assert checker.check_records(suite, P, [FILE], {"new": 4}) == []
    assert checker.check_records(suite, P, [FILE], {"old": 0}) == []
    assert checker.check_records(suite, P, [FILE], {"new": 3})[0].broken_count == 1


@pytest.mark.parametrize(
    "expectation",
    [
        expects("column_values_to_not_be_null", column="nowhere"),
        expects("the_moon", column="v"),
        expects("column_values_to_match_regex", column="session", regex="("),
        expects(
            "column_values_to_be_between",
            column="v",
            min_value=0,
            row_condition={"column": {"name": "no"}},
        ),
    ],
)
def test_a_broken_expectation_is_named(looking: Any, expectation: Expectation) -> None:
    """It is neither good nor bad."""
    _, checker = looking(ROWS)
    good = expects("column_values_to_not_be_null", column="offset")
    with pytest.raises(BrokenCheckError) as broken:
        checker.check_records(Suite("s", (good, expectation)), P, [FILE], {"new": 0})
    assert broken.value.expectation == expectation


def test_evidence_is_judged_by_partition(looking: Any) -> None:
    """The shipped suites find every broken promise, and whose it is."""
    _, checker = looking([])
    made = filled_suites()
    q = Partition("t", 1)
    rows = [
        Evidence(partition=p, promise=name)
        for p in (P, q)
        for name in ("dense", "counted", "unique", "folded")
    ]
    assert judged_all(checker, rows) == []
    rows[-1] = Evidence(partition=q, promise="folded", broken_count=3, offset=8, files=("f",))
    rows[0] = Evidence(partition=P, promise="dense", broken_count=1, offset=2)
    assert [
        (str(one.partition), one.expectation.name, one.broken_count, one.example_offset)
        for one in judged_all(checker, rows)
    ] == [
        ("t/0", "dense", 1, 2),
        ("t/1", "folded", 3, 8),
    ]
    assert made.count == 18


def filled_suites() -> Any:
    """The shipped suites, for the table machine."""
    from seriatim.stream import OutputSettings, Stream

    return shipped_suites(
        Stream(name="s", topics="t", machine="table", output=OutputSettings(path="x"))
    )


def judged_all(checker: Checker, rows: list[Evidence]) -> list[Judgement]:
    """By both suites about evidence."""
    made = filled_suites()
    return [*checker.check_evidence(made.ledger, rows), *checker.check_evidence(made.state, rows)]


def test_an_aggregate_is_about_a_stretch_of_rows(tmp_path: Path, library: Any) -> None:
    """It blames the files of that stretch; another stretch is judged by itself."""
    path = tmp_path / FILE.path
    path.parent.mkdir(parents=True)
    pq.write_table(
        pa.Table.from_pylist([row(n, v=n) for n in range(8)], schema=SCHEMA), path, row_group_size=4
    )
    suite = Suite("s", (expects("column_mean_to_be_between", column="v", max_value=3),))
    one = library(tmp_path, 4).check_records(suite, P, [FILE], {"new": 0})
    assert [(judged.broken_count, judged.row_count, judged.files) for judged in one] == [
        (1, 4, (FILE.path,))
    ]
    whole = library(tmp_path).check_records(suite, P, [FILE], {"new": 0})
    assert [(judged.broken_count, judged.row_count, judged.found) for judged in whole] == [
        (1, 8, "3.5")
    ]


def test_a_damaged_file_is_unreadable(tmp_path: Path, library: Any) -> None:
    """Neither good nor bad: verify says what is wrong with it."""
    path = tmp_path / FILE.path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(UnreadableFileError, match=r"f\.parquet"):
        RecordScan(LocalStore(tmp_path)).scan([FILE], WANTED)
    with pytest.raises(UnreadableFileError, match=r"f\.parquet"):
        library(tmp_path).check_records(Suite("s", (EXPECTED[0][0],)), P, [FILE], {"new": 0})


def on_disk(made: DiskStream, library: Any, *own: Expectation) -> CheckResult:
    """Check a stream on disk."""
    return run_check(
        made, *own, checker=library(made.root), record_scanner=RecordScan(LocalStore(made.root))
    )


@pytest.mark.parametrize("parts", [(), ("topic", "partition")])
def test_a_stream_on_disk_is_good_and_stays_so(
    tmp_path: Path, library: Any, parts: tuple[str, ...]
) -> None:
    """Quarantine, restarts, decimals and times; checked after each run, whatever the table is
    partitioned by.
    """
    made = create_filled_output(tmp_path, output_partitions=parts)
    done = on_disk(made, library)
    assert set(done.verdict.values()) == {"good"}
    assert done.ledger.checked == done.sequence
    made.send("in-a/0", "x", 8, None, ["a"], 9)
    made.run()
    again = on_disk(made, library)
    assert (again.verdict, again.records) == ({"in-a/0": "good"}, 5)


def rewrite(path: Path, column: str, number: int, value: Any) -> None:
    """Change one value of a committed file."""
    table = pq.read_table(path)
    values = table.column(column).to_pylist()
    values[number] = value
    place = table.schema.get_field_index(column)
    changed = table.set_column(
        place, table.schema.field(column), pa.array(values, table.schema.field(column).type)
    )
    pq.write_table(changed, path)


@pytest.mark.parametrize(
    ("column", "value", "cause"),
    [
        ("v", 77, "folded"),
        ("before_v", 77, "linked"),
        ("session", "z", "folded"),
        ("session", None, "session is there"),
        ("op", "none", "op is known"),
        ("offset", 0, "unique"),
    ],
)
def test_a_changed_value_makes_its_partition_bad(
    tmp_path: Path, library: Any, column: str, value: Any, cause: str
) -> None:
    """One value of one committed row, in each of the columns that promise something."""
    made = DiskStream(tmp_path)
    made.kafka.create("in-a", 2)
    for place in ("in-a/0", "in-a/1"):
        made.send(place, "x", ["a", "b"], 1, 2)
    made.run()
    rewrite(next((tmp_path / "records/in-a/1").glob("*.parquet")), column, -1, value)
    done = on_disk(made, library)
    assert done.verdict == {"in-a/0": "good", "in-a/1": "bad"}
    assert cause in {finding.cause.partition(" (")[0] for finding in done.findings}


def test_a_suite_of_ones_own_opens_the_circuit(tmp_path: Path, library: Any) -> None:
    """With an example offset and value."""
    made = create_filled_output(tmp_path)
    done = on_disk(made, library, values_between("v", 0, 4, name="v is small"))
    assert done.ledger.circuit == "open"
    assert [
        (finding.partition_name, finding.offset, finding.found) for finding in done.findings
    ] == [("in-a/0", 13, "1 of 17 records: 5")]


def test_suites_name_columns_as_the_records_do(tmp_path: Path, library: Any) -> None:
    """Also those of a table whose columns are called as ours are."""
    result = on_disk(create_output(tmp_path), library, values_between("row_offset", 1, 2))
    assert [(finding.offset, finding.found) for finding in result.findings] == [
        (2, "1 of 6 records: 3")
    ]


@pytest.mark.parametrize("parts", [(), ("topic", "partition")])
def test_what_somebody_else_rewrote_is_judged_by_suites_and_not_folded(
    tmp_path: Path, library: Any, parts: tuple[str, ...]
) -> None:
    """An OPTIMIZE changes no data: no alarm, no crash, and what it hides from us is said."""
    made = create_filled_output(tmp_path, output_partitions=parts)
    DeltaTable(tmp_path / "records").optimize.compact()
    done = on_disk(made, library, values_between("v", 0, 4, "warning", name="v is small"))
    assert set(done.verdict.values()) == {"good"}
    assert len(done.notes) >= 1
    assert [(finding.partition_name, finding.offset) for finding in done.findings] == [
        ("in-a/0", 13)
    ]
    made.send("in-b/0", "x", 1)
    made.run()
    assert on_disk(made, library).verdict == {"in-b/0": "good"}
