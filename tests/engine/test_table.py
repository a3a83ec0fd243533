"""The table machine: what snapshot, insert, update and delete do to rows, and what they tell."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seriatim.engine.messages import Poison
from seriatim.engine.table import PreconditionError, TableMachine, column_type
from seriatim.testing import CRASH, fold_table

COLUMNS = {"id": "string", "v": "int64", "w": "float64"}


def machine(**more: Any) -> TableMachine:
    """A machine of rows (id, v, w)."""
    return TableMachine(**{"key": ["id"], "columns": COLUMNS, "before": False, **more})


def told(made: TableMachine, rows: dict[Any, Any], /, **message: Any) -> list[tuple[Any, ...]]:
    """Apply one message; its records."""
    (decoded,) = made.decode([json.dumps(message).encode()])
    assert not isinstance(decoded, Poison), decoded.cause
    return list(made.apply(rows, decoded))


def row(key: str, v: Any = None, w: Any = None) -> dict[str, Any]:
    """A row as sent."""
    return {"id": key, "v": v, "w": w}


def test_a_life_of_rows() -> None:
    """Snapshot, insert, update, delete: one record per row touched, and the rows follow."""
    made, rows = machine(before=True), {}
    none = (None, None, None)
    assert told(made, rows, type="snapshot", rows=[row("a", 1)]) == [
        ("snapshot", "a", 1, None, *none)
    ]
    assert told(made, rows, type="insert", **row("b", 2)) == [("insert", "b", 2, None, *none)]
    assert told(made, rows, type="update", id="b", w=2.5) == [("update", "b", 2, 2.5, "b", 2, None)]
    assert told(made, rows, type="delete", id="a") == [("delete", "a", None, None, "a", 1, None)]
    assert made.to_plain(rows) == {"rows": [{"id": "b", "v": 2, "w": 2.5}]}


def test_a_column_left_out_is_unchanged_and_null_is_null() -> None:
    """In an update; in an insert or a snapshot a column left out is null."""
    made, rows = machine(), {}
    told(made, rows, type="snapshot", rows=[row("a", 1, 1.5)])
    assert told(made, rows, type="update", id="a", v=None) == [("update", "a", None, 1.5)]
    assert told(made, rows, type="insert", id="b") == [("insert", "b", None, None)]
    assert told(made, rows, type="snapshot", rows=[{"id": "c"}])[0] == ("snapshot", "c", None, None)


def test_an_update_that_names_only_the_key_gives_a_record() -> None:
    """The producer said something: it is told."""
    made, rows = machine(), {}
    told(made, rows, type="snapshot", rows=[row("a", 1)])
    assert told(made, rows, type="update", id="a") == [("update", "a", 1, None)]


def test_a_restart_tells_every_row_and_deletes_the_vanished() -> None:
    """So that folding the records gives the state, whatever was there before."""
    made, rows = machine(before=True), {}
    told(made, rows, type="snapshot", rows=[row("a", 1), row("b", 2)])
    assert told(made, rows, type="snapshot", rows=[row("b", 3), row("c", 4)]) == [
        ("snapshot", "b", 3, None, "b", 2, None),
        ("snapshot", "c", 4, None, None, None, None),
        ("delete", "a", None, None, "a", 1, None),
    ]
    assert told(made, rows, type="snapshot", rows=[]) == [
        ("delete", "b", None, None, "b", 3, None),
        ("delete", "c", None, None, "c", 4, None),
    ]
    assert rows == {}


CONTRADICTIONS = [
    (
        {"type": "insert", **row("a", 9)},
        "insert of a row that is there already: id='a'",
        [("update", "a", 9, None)],
    ),
    (
        {"type": "update", "id": "z", "v": 1},
        "update of a missing row: id='z'",
        [("insert", "z", 1, None)],
    ),
    ({"type": "delete", "id": "z"}, "delete of a missing row: id='z'", []),
    (
        {"type": "snapshot", "rows": [row("a", 1), row("a", 2)]},
        "a snapshot that names a row twice: id='a'",
        [("snapshot", "a", 2, None)],
    ),
]


@pytest.mark.parametrize(("message", "said", "_lenient"), CONTRADICTIONS)
def test_a_contradiction_changes_nothing(message: dict[str, Any], said: str, _lenient: Any) -> None:
    """It raises before the rows are touched, and names the row."""
    made, rows = machine(), {}
    told(made, rows, type="snapshot", rows=[row("a", 1)])
    before = dict(rows)
    with pytest.raises(PreconditionError) as raised:
        told(made, rows, **message)
    assert str(raised.value) == said
    assert rows == before


@pytest.mark.parametrize(("message", "_said", "lenient"), CONTRADICTIONS)
def test_a_lenient_machine_takes_contradictions_as_well_as_it_can(
    message: dict[str, Any], _said: str, lenient: Any
) -> None:
    """They are counted, and the records still fold to the rows."""
    made, rows = machine(lenient=True), {}
    told(made, rows, type="snapshot", rows=[row("a", 1)])
    assert told(made, rows, **message) == lenient
    assert made.contradictions == 1


ALL_TYPES = {
    "id": "string",
    "i": "int64",
    "f": "float64",
    "b": "bool",
    "t": "timestamp",
    "d": "date",
    "x": "binary",
    "m": "decimal(10,2)",
}
GOOD = {
    "id": "a",
    "i": 2**63 - 1,
    "f": 3,
    "b": True,
    "t": "2024-02-29T12:00:00.123456Z",
    "d": "2024-02-29",
    "x": "AAEC",
    "m": "12345678.90",
}
MEANT = (
    "a",
    2**63 - 1,
    3.0,
    True,
    datetime(2024, 2, 29, 12, 0, 0, 123456, tzinfo=UTC),
    date(2024, 2, 29),
    b"\x00\x01\x02",
    Decimal("12345678.90"),
)


def test_every_column_type_is_read_and_survives_bytes() -> None:
    """State goes through bytes between slices; each value comes back as it was."""
    made, rows = machine(columns=ALL_TYPES), {}
    assert told(made, rows, type="snapshot", rows=[GOOD]) == [("snapshot", *MEANT)]
    assert made.load(made.dump(rows), 1) == rows
    assert told(made, rows, type="insert", id="b")[0][2:] == (None,) * 7
    assert made.load(made.dump(rows), 1) == rows


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("id", wrong) for wrong in (None, 7)),
        *(("i", wrong) for wrong in (2**63, -(2**63) - 1, 1.5, "1", True)),
        *(("f", wrong) for wrong in ("1.0", True)),
        *(("b", wrong) for wrong in (1, "true")),
        *(
            ("t", wrong)
            for wrong in ("yesterday", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00")
        ),
        *(("d", wrong) for wrong in ("2024-02-30", 7)),
        *(("x", wrong) for wrong in ("?", [1])),
        *(("m", wrong) for wrong in ("123456789.00", "1.234", "NaN", "Infinity", "one")),
    ],
)
def test_a_value_that_does_not_fit_its_column_is_poison(column: str, value: Any) -> None:
    """In every kind of message that carries it, and never an exception."""
    made = machine(columns=ALL_TYPES)
    bad = {**GOOD, column: value}
    messages = [
        {"type": "snapshot", "rows": [GOOD, bad]},
        {"type": "insert", **bad},
        {"type": "update", **bad},
    ]
    decoded = made.decode([json.dumps(message).encode() for message in messages])
    assert [type(message) for message in decoded] == [Poison] * 3
    assert all("wrong schema" in message.cause for message in decoded)


def test_zero_fits_any_decimal() -> None:
    """However many zeroes it is written with."""
    made, rows = machine(columns=ALL_TYPES), {}
    assert told(made, rows, type="snapshot", rows=[{"id": "a", "m": "0.0000"}])[0][-1] == 0


def test_a_zero_that_cannot_be_written_is_poison() -> None:
    """Zero with a large exponent is refused when it is decoded, not when it is written."""
    (decoded,) = machine(columns=ALL_TYPES).decode(
        [b'{"type": "snapshot", "rows": [{"id": "a", "m": "0E+100"}]}']
    )
    assert "does not fit decimal" in decoded.cause


def test_a_delete_may_carry_its_row() -> None:
    """Columns that are not its key are ignored, also those that are checked elsewhere."""
    made, rows = machine(columns=ALL_TYPES), {}
    told(made, rows, type="snapshot", rows=[{"id": "a", "m": "1.00"}])
    assert told(made, rows, type="delete", id="a", m="1.00", t="yesterday")[0][0] == "delete"


def test_a_delete_needs_only_its_key() -> None:
    """Other columns may be there, of whatever type: they are ignored."""
    made, rows = machine(), {}
    told(made, rows, type="snapshot", rows=[row("a", 1)])
    assert told(made, rows, type="delete", id="a", v="nonsense") == [("delete", "a", None, None)]


def test_unknown_fields_are_ignored() -> None:
    """Producers may add what they like."""
    made, rows = machine(), {}
    assert told(made, rows, type="snapshot", rows=[{**row("a", 1), "new": {}}], more=[1]) == [
        ("snapshot", "a", 1, None)
    ]


def test_keys_of_several_columns() -> None:
    """Rows differ if any key column does; each is required."""
    made, rows = machine(key=["id", "v"]), {}
    told(made, rows, type="snapshot", rows=[row("a", 1), row("a", 2)])
    assert told(made, rows, type="delete", id="a", v=2) == [("delete", "a", 2, None)]
    assert isinstance(made.decode([b'{"type":"delete","id":"a"}'])[0], Poison)
    assert made.load(made.dump(rows), 1) == rows


def test_field_names_can_be_set() -> None:
    """Type, rows, sequence and session under the producer's own names."""
    made = machine(type_field="op", rows_field="table", sequence="n", session="who")
    (message,) = made.decode([b'{"op":"snapshot","n":5,"who":"me","table":[{"id":"a"}]}'])
    assert (made.is_snapshot(message), made.sequences([message])[0], made.session(message)) == (
        True,
        5,
        "me",
    )
    for missing in (
        b'{"op":"snapshot","who":"me","table":[]}',
        b'{"op":"snapshot","n":5,"table":[]}',
    ):
        assert isinstance(made.decode([missing])[0], Poison)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["snapshot", "insert", "update", "delete"]),
            st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), min_size=1, max_size=4),
        ),
        max_size=25,
    ),
    st.booleans(),
)
def test_records_folded_give_the_rows(
    messages: list[tuple[str, list[tuple[str, int]]]], lenient: bool
) -> None:
    """At every message, applied or refused, strict or lenient."""
    made, rows, again = machine(lenient=lenient), {}, {}
    for kind, given_rows in messages:
        body = (
            {"rows": [row(*one) for one in given_rows]}
            if kind == "snapshot"
            else row(*given_rows[0])
        )
        try:
            records = told(made, rows, type=kind, **body)
        except PreconditionError:
            records = []
        for op, key, v, w in records:
            if op == "delete":
                del again[key]
            else:
                again[key] = (key, v, w)
        assert again == rows


@pytest.mark.parametrize(
    "name", ["decimal(0,0)", "decimal(39,2)", "decimal(5,6)", "int", "text", "", "decimal"]
)
def test_unknown_column_types_have_no_python_type(name: str) -> None:
    """The stream file refuses them by this."""
    assert column_type(name) is None
    assert column_type("decimal(38, 38)") is Decimal


NAIVE, AWARE, SUMMER = "2024-01-01T00:00:00", "2024-01-01T00:00:00Z", "2024-01-01T02:00:00+02:00"
TIMED: Any = {"key": ["at"], "columns": {"at": "timestamp", "v": "int64"}}


@pytest.mark.parametrize("between", [[], [CRASH]])
def test_one_instant_is_one_row_however_it_is_written(between: list[Any]) -> None:
    """A time without a zone is UTC as a key, too: state and records have the same rows."""
    snapshot = {"type": "snapshot", "rows": [{"at": NAIVE, "v": 1}]}
    updates = [
        {"type": "update", "at": text, "v": v} for v, text in enumerate((AWARE, SUMMER, NAIVE), 2)
    ]
    done = fold_table([snapshot, *between, *updates], **TIMED)
    assert not done.findings
    assert done.state == {"rows": [{"at": AWARE, "v": 4}]}
    assert {record["at"] for record in done.records} == {datetime(2024, 1, 1, tzinfo=UTC)}
    (twice,) = fold_table(
        [snapshot, *between, {"type": "insert", "at": AWARE, "v": 2}], **TIMED
    ).findings
    assert twice.finding == "precondition"


def test_a_snapshot_that_names_an_instant_twice_contradicts_itself() -> None:
    """With a zone and without."""
    rows = [{"at": NAIVE, "v": 1}, {"at": SUMMER, "v": 2}]
    (found,) = fold_table([{"type": "snapshot", "rows": rows}], **TIMED).findings
    assert "names a row twice" in found.cause


def test_keys_of_saved_state_are_read_in_utc() -> None:
    """Earlier versions kept them as they came; a message that has the zone finds its row."""
    made = machine(**TIMED)
    rows = made.load(msgspec.msgpack.encode([(NAIVE, 1)]), 1)
    assert told(made, rows, type="update", at=AWARE, v=2) == [
        ("update", datetime(2024, 1, 1, tzinfo=UTC), 2)
    ]
    assert len(rows) == 1
