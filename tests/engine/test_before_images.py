"""Before-images of the table machine's messages: what they say of a row must be true, and they say
which row gets another key.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from seriatim.engine.messages import Poison
from seriatim.engine.table import PreconditionError, TableMachine
from seriatim.testing import CRASH, fold_table

COLUMNS = {"id": "string", "v": "int64", "w": "float64"}
TYPED_COLUMNS = {"id": "string", "at": "timestamp", "cost": "decimal(9,2)", "f": "float64"}
Rows = dict[Any, Any]
Records = list[tuple[Any, ...]]


def new_table(**settings: Any) -> TableMachine:
    """A table machine of rows (id, v, w)."""
    return TableMachine(**{"key": ["id"], "columns": COLUMNS, "before": False, **settings})


def decode(table: TableMachine, message: dict[str, Any]) -> Any:
    """The message as the machine takes it."""
    (decoded,) = table.decode([json.dumps(message).encode()])
    return decoded


def apply_message(table: TableMachine, rows: Rows, message: dict[str, Any]) -> Records:
    """Apply a message, and return its records."""
    decoded = decode(table, message)
    assert not isinstance(decoded, Poison), decoded.cause
    return list(table.apply(rows, decoded))


def begin(table: TableMachine) -> Rows:
    """The rows after a snapshot of two."""
    rows: Rows = {}
    two_rows = [{"id": "a", "v": 1, "w": 1.5}, {"id": "b", "v": 2}]
    apply_message(table, rows, {"type": "snapshot", "rows": two_rows})
    return rows


TRUE_IMAGES = [
    {"v": 1},
    {"id": "a"},
    {"id": "a", "v": 1, "w": 1.5, "unknown": [1]},
    {"w": 1.5},
    {},
    None,
]


@pytest.mark.parametrize("before", TRUE_IMAGES)
@pytest.mark.parametrize("kind", ["update", "delete"])
def test_a_true_before_image_changes_nothing(kind: str, before: Any) -> None:
    """The records are those of the same message without it: of all columns, some or none."""
    message = {"type": kind, "id": "a", "v": 7}
    table = new_table()
    rows = begin(table)
    rows_without = begin(table)
    with_image = apply_message(table, rows, {**message, "before": before})
    assert with_image == apply_message(table, rows_without, message)
    assert rows == rows_without


FALSE_IMAGES = [
    ({"v": 2}, "v"),
    ({"v": None}, "v"),
    ({"id": "a", "v": 1, "w": 1.25}, "w"),
]


@pytest.mark.parametrize(("before", "column"), FALSE_IMAGES)
@pytest.mark.parametrize("kind", ["update", "delete"])
def test_a_false_before_image_contradicts(kind: str, before: Any, column: str) -> None:
    """The message has no effect, and the cause names the column and the row. Null is a value."""
    table = new_table()
    rows = begin(table)
    rows_before = dict(rows)
    with pytest.raises(PreconditionError) as raised:
        apply_message(table, rows, {"type": kind, "id": "a", "before": before})
    assert str(raised.value) == f"before-image differs from the row in {column}: id='a'"
    assert rows == rows_before


def test_a_lenient_machine_counts_a_false_before_image() -> None:
    """The message is applied, as under the tiers none and order."""
    table = new_table(lenient=True)
    rows = begin(table)
    message = {"type": "update", "id": "a", "v": 7, "before": {"v": 5}}
    assert apply_message(table, rows, message) == [("update", "a", 7, 1.5)]
    assert table.contradictions == 1


def test_the_image_of_an_insert_or_a_snapshot_says_nothing() -> None:
    """There is no row before an insert, and a snapshot replaces all rows."""
    table = new_table()
    rows = begin(table)
    insert = {"type": "insert", "id": "c", "before": {"id": "a", "v": "nonsense"}}
    assert apply_message(table, rows, insert) == [("insert", "c", None, None)]
    snapshot = {"type": "snapshot", "rows": [{"id": "a", "before": 1}], "before": {"v": 9}}
    assert len(apply_message(table, rows, snapshot)) == 3


@pytest.mark.parametrize(
    "before", ["a", 1, [], {"f": "x"}, {"at": "noon"}, {"cost": "1.234"}, {"id": 7}, {"id": None}]
)
def test_an_image_that_does_not_fit_the_table_is_poison(before: Any) -> None:
    """It is never passed over in silence: the check would not happen."""
    table = new_table(columns=TYPED_COLUMNS)
    for kind in ("update", "delete"):
        decoded = decode(table, {"type": kind, "id": "a", "before": before})
        assert "wrong schema" in decoded.cause


@pytest.mark.parametrize(
    ("before", "is_true"),
    [
        ({"at": "2026-01-01T12:00:00Z"}, True),
        ({"at": "2026-01-01 13:00+01"}, True),
        ({"at": "2026-01-01T12:00:01Z"}, False),
        ({"cost": 1.5}, True),
        ({"cost": "1.51"}, False),
        ({"f": 2}, True),
        ({"f": 2.5}, False),
    ],
)
def test_values_are_compared_and_not_their_texts(before: dict[str, Any], is_true: bool) -> None:
    """A time without a zone is in UTC, also where the row was sent so."""
    table = new_table(columns=TYPED_COLUMNS)
    rows: Rows = {}
    row = {"id": "a", "at": "2026-01-01T12:00:00", "cost": "1.50", "f": 2.0}
    apply_message(table, rows, {"type": "snapshot", "rows": [row]})
    rows = table.load(table.dump(rows), 1)
    message = {"type": "delete", "id": "a", "before": before}
    decoded = decode(table, message)
    if is_true:
        assert len(table.apply(rows, decoded)) == 1
    else:
        with pytest.raises(PreconditionError):
            table.apply(rows, decoded)


def test_a_row_gets_another_key_and_keeps_what_was_left_out() -> None:
    """One record deletes the row under its old key, one inserts it under the new key. The message
    names the columns that changed, and in `before` the old key.
    """
    table = new_table(before=True)
    rows = begin(table)
    records = apply_message(
        table, rows, {"type": "update", "id": "c", "v": 8, "before": {"id": "a", "v": 1}}
    )
    assert records == [
        ("delete", "a", None, None, "a", 1, 1.5),
        ("insert", "c", 8, 1.5, None, None, None),
    ]
    assert rows == {"b": ("b", 2, None), "c": ("c", 8, 1.5)}


def test_one_column_of_a_key_may_change() -> None:
    """A column of the key that `before` leaves out did not change."""
    table = new_table(key=["id", "v"])
    rows = begin(table)
    message = {"type": "update", "id": "a", "v": 5, "before": {"v": 1}}
    assert apply_message(table, rows, message) == [
        ("delete", "a", 1, None),
        ("insert", "a", 5, 1.5),
    ]


@pytest.mark.parametrize(
    ("message", "cause", "lenient_records"),
    [
        (
            {"id": "c", "before": {"id": "z"}},
            "update of a missing row: id='z'",
            [("insert", "c", None, None)],
        ),
        (
            {"id": "b", "before": {"id": "a"}},
            "change of a key to one that is there already: id='b'",
            [("delete", "a", None, None), ("update", "b", 1, 1.5)],
        ),
        (
            {"id": "c", "before": {"id": "a", "v": 9}},
            "before-image differs from the row in v: id='a'",
            [("delete", "a", None, None), ("insert", "c", 1, 1.5)],
        ),
    ],
)
def test_a_key_that_cannot_change_contradicts(
    message: dict[str, Any], cause: str, lenient_records: Records
) -> None:
    """Nothing is changed then; a lenient machine changes the key as well as it can."""
    table = new_table()
    rows = begin(table)
    rows_before = dict(rows)
    with pytest.raises(PreconditionError) as raised:
        apply_message(table, rows, {"type": "update", **message})
    assert str(raised.value) == cause
    assert rows == rows_before
    lenient_table = new_table(lenient=True)
    rows = begin(lenient_table)
    assert apply_message(lenient_table, rows, {"type": "update", **message}) == lenient_records
    assert lenient_table.contradictions == 1
    assert lenient_table.load(lenient_table.dump(rows), 1) == rows


def test_a_delete_takes_the_key_of_the_message() -> None:
    """A before-image of another row contradicts it."""
    table = new_table()
    rows = begin(table)
    with pytest.raises(PreconditionError, match="differs from the row in id: id='b'"):
        apply_message(table, rows, {"type": "delete", "id": "b", "before": {"id": "a"}})


@pytest.mark.parametrize("kind", ["update", "delete"])
def test_a_key_of_times_is_found_whatever_its_zone(kind: str) -> None:
    """In the message and in its before-image."""
    table = new_table(key=["at"], columns=TYPED_COLUMNS)
    rows: Rows = {}
    row = {"id": "a", "at": "2026-01-01T12:00:00"}
    apply_message(table, rows, {"type": "snapshot", "rows": [row]})
    before = {"at": "2026-01-01 13:00+01", "id": "a"}
    message = {"type": kind, "at": "2026-01-01T12:00:00Z", "before": before}
    assert [record[0] for record in apply_message(table, rows, message)] == [kind]


def test_a_lost_update_is_found_at_the_next_one_of_its_row() -> None:
    """Without `sequence`, and through a crash: at its exact offset."""
    folded = fold_table(
        [
            {"type": "snapshot", "rows": [{"id": "a", "v": 1}, {"id": "b", "v": 1}]},
            {"type": "update", "id": "a", "v": 2, "before": {"v": 1}},
            CRASH,
            # The update of a from 2 to 3 is lost.
            {"type": "update", "id": "b", "v": 2, "before": {"v": 1}},
            {"type": "update", "id": "a", "v": 4, "before": {"v": 3}},
        ],
        key=["id"],
        columns={"id": "string", "v": "int64"},
    )
    assert [(found.finding, found.offset, found.cause) for found in folded.findings] == [
        ("precondition", 3, "before-image differs from the row in v: id='a'")
    ]


def test_the_field_can_have_another_name_or_none() -> None:
    """With None the machine ignores it, as any field that is no column."""
    message = {"type": "update", "id": "a", "before": {"v": 9}}
    table = new_table(before_field=None)
    assert apply_message(table, begin(table), message) == [("update", "a", 1, 1.5)]
    table = new_table(before_field="old")
    assert apply_message(table, begin(table), message) == [("update", "a", 1, 1.5)]
    message["old"] = {"v": 9}
    with pytest.raises(PreconditionError, match="differs from the row in v"):
        apply_message(table, begin(table), message)
