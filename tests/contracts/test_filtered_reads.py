"""Readers with a filter: delta-rs must see the rows of our tables that it would see without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from seriatim.operations.publish import publish_current
from tests.contracts.disk_streams import DiskStream
from tests.contracts.test_current_table import current_of

LONG = "x" * 300


@pytest.fixture
def made(tmp_path: Path) -> DiskStream:
    """A stream of sessions with short and long names, folded in slices and published."""
    one = DiskStream(tmp_path / "lake", sequence=None)
    one.kafka.create("in-a", 1)
    for number in range(30):
        body: dict[str, Any] = {"type": "update", "id": "a", "v": number}
        if number < 3:
            body = {"type": "snapshot", "rows": [{"id": row, "v": 0} for row in "ab"]}
        one.kafka.produce("in-a", ("s", "t", LONG)[number % 3], json.dumps(body).encode())
    one.run(7)
    publish_current("s", one.ledger, current_of(one))
    return one


@pytest.mark.parametrize("table", ["records", "current"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("session", "s"), ("session", LONG), ("id", "b"), ("v", 7), ("offset", 5), ("partition", 0)],
)
def test_a_filter_loses_nothing(made: DiskStream, table: str, name: str, value: Any) -> None:
    """By any column, whether statistics name it or not."""
    dataset = DeltaTable(made.root / table).to_pyarrow_dataset()
    every = dataset.to_table(use_threads=False).to_pylist()
    found = dataset.to_table(filter=pc.field(name) == value, use_threads=False).to_pylist()
    wanted = [row for row in every if row[name] == value]
    assert sorted(map(str, found)) == sorted(map(str, wanted))
    assert wanted or table == "current"
