"""A table whose columns are called as ours are, on disk: every reader follows the names that the
columns get, and keys may change.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.table import output_column_names
from seriatim.operations.inspect.explain import (
    RowExplainer,
    RowExplanation,
    parse_row_key,
    records_by_session,
)
from seriatim.operations.inspect.views import diff_states
from seriatim.operations.prove.partition_rules import state_row_reader
from seriatim.operations.publish import publish_current
from seriatim.storage.record_query import RecordQuery
from seriatim.storage.store import LocalStore
from seriatim.stream import TableSettings
from tests.contracts.disk_streams import DiskStream
from tests.contracts.test_current_table import current_of
from tests.contracts.test_replay_and_diff import compared, replayed
from tests.contracts.verify_helper import verify
from tests.operations.lookback_helper import head_of, run_bisection, trace_steps

A0 = Partition("in-a", 0)
COLUMNS = {
    "offset": "int64",
    "timestamp": "timestamp",
    "op": "string",
    "Session": "string",
    "row_op": "string",
    "before_offset": "int64",
    "unit price (€)": "float64",
}
TAKEN_NAMES = {
    "offset": "row_offset",
    "timestamp": "row_timestamp",
    "op": "row_row_op",
    "Session": "row_Session",
    "row_op": "row_op",
    "before_offset": "row_before_offset",
    "unit price (€)": "unit_price__€_",
}


def test_a_name_that_is_taken_gets_a_prefix() -> None:
    """A column that can keep its name keeps it; the others get `row_` as often as is needed."""
    assert output_column_names(COLUMNS) == TAKEN_NAMES


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        (["id", "price", "before_tax", "row_id"], ["id", "price", "before_tax", "row_id"]),
        (["a", "A", "row_a"], ["a", "row_row_A", "row_a"]),
        (["a b", "a_b", "a\tb"], ["row_a_b", "a_b", "row_row_a_b"]),
        (["x", "before_x", "before_before_x"], ["x", "row_before_x", "row_before_before_x"]),
        (["index", "row_index"], ["row_row_index", "row_index"]),
        (["before_row_offset", "OFFSET"], ["before_row_offset", "row_row_OFFSET"]),
    ],
)
def test_no_two_columns_have_the_same_name(columns: list[str], names: list[str]) -> None:
    """Whatever their case, and with the columns of every record and the before-images."""
    assert list(output_column_names(columns).values()) == names
    lower_names = [name.casefold() for name in names]
    record_names = [*lower_names, *(f"before_{name}" for name in lower_names)]
    assert len(set(record_names)) == len(record_names)


def create_output(root: Path) -> DiskStream:
    """A stream of such a table, folded in two slices. A row gets a new key, and one is deleted."""
    table = TableSettings(key=("offset",), columns=COLUMNS, before=True)
    stream = DiskStream(root, table=table)
    stream.kafka.create("in-a", 1)
    first = {"offset": 1, "op": "buy", "timestamp": "2026-01-01T00:00:00Z", "unit price (€)": 1.5}
    second = {"offset": 2, "op": "sell", "Session": "x", "row_op": "y", "before_offset": 7}
    send(stream, {"type": "snapshot", "seq": 1, "rows": [first, second]})
    send(stream, {"type": "update", "seq": 2, "offset": 2, "op": "buy", "before": {"op": "sell"}})
    stream.run()
    send(stream, {"type": "update", "seq": 3, "offset": 3, "before": {"offset": 2, "op": "buy"}})
    send(stream, {"type": "delete", "seq": 4, "offset": 1, "before": {"unit price (€)": 1.5}})
    assert stream.run().findings == []
    return stream


@pytest.fixture
def stream(tmp_path: Path) -> DiskStream:
    """Such a stream."""
    return create_output(tmp_path / "lake")


def send(stream: DiskStream, message: dict[str, Any]) -> None:
    """Produce a message of the session s."""
    stream.kafka.produce("in-a", "s", json.dumps(message).encode())


def test_records_and_current_have_both_columns(stream: DiskStream) -> None:
    """Ours under their own names, and those of the table under theirs."""
    publish_current("s", stream.ledger, current_of(stream))
    (row,) = DeltaTable(stream.root / "current").to_pyarrow_dataset().to_table().to_pylist()
    assert row == {
        "topic": "in-a",
        "topic_id": "id-1",
        "partition": 0,
        "session": "s",
        "offset": 2,
        "sequence": 3,
        "timestamp": datetime(1970, 1, 1, 0, 0, 0, 2000, UTC),
        "row_offset": 3,
        "row_timestamp": None,
        "row_row_op": "buy",
        "row_Session": "x",
        "row_op": "y",
        "row_before_offset": 7,
        "unit_price__€_": None,
    }
    records = DeltaTable(stream.root / "records").to_pyarrow_dataset().to_table().to_pylist()
    places = [(record["offset"], record["index"], record["op"]) for record in records]
    assert sorted(places) == [
        (0, 0, "snapshot"),
        (0, 1, "snapshot"),
        (1, 0, "update"),
        (2, 0, "delete"),
        (2, 1, "insert"),
        (3, 0, "delete"),
    ]


def test_verify_finds_nothing_wrong(stream: DiskStream) -> None:
    """Records, before-images and state agree; test_check_on_files.py has the suites."""
    assert verify(stream.root, table=state_row_reader(stream.runner)).difference is None


def test_replay_and_diff_agree(stream: DiskStream, tmp_path: Path) -> None:
    """What is folded again has the same columns and values."""
    outputs = replayed(stream, tmp_path / "again", {A0: OffsetRange(0, 4)})
    difference = compared(stream, tmp_path / "again", outputs)
    assert (difference.count, difference.records) == (0, 6)


def explain_row(stream: DiskStream, row: str) -> RowExplanation:
    """The messages that touched a row of the only session."""
    key = parse_row_key(stream.runner, row)
    query = RecordQuery(LocalStore(stream.root), "s")
    ((location, records),) = records_by_session(query, key, None, None).items()
    return RowExplainer(stream.open(), head_of(stream), key).run(location, records)


def test_explain_trace_and_bisect_use_the_names_of_records(stream: DiskStream) -> None:
    """A row is found by its key, also the message that gave it another; messages are shown as they
    were sent.
    """
    explanation = explain_row(stream, "2")
    assert [touch.offset for touch in explanation.touches] == [0, 1, 2]
    explanation = explain_row(stream, "3")
    assert [touch.offset for touch in explanation.touches] == [2]
    assert explanation.value is not None
    assert explanation.value["row_row_op"] == "buy"
    assert explanation.touches[0].message["before"] == {"offset": 2, "op": "buy"}
    step = trace_steps(stream)[2]
    records = [
        (record["op"], record["row_offset"], record["row_row_op"]) for record in step.records
    ]
    assert records == [("delete", 2, None), ("insert", 3, "buy")]
    changes = diff_states(stream.runner, step.before, step.after)
    assert [change.what for change in changes] == ["3", "2"]
    invariant = "all(row['row_offset'] != 3 for row in state['rows'])"
    assert run_bisection(stream, "s", invariant).first_broken_offset == 2
