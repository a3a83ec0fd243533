"""The order of records, seen batch by batch."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from seriatim.storage.record_rows import RecordOrderScan

Position = tuple[str | None, int | None, int]
"""Topic id, offset and index of a record."""


def scan_batches(positions: list[Position], rows_per_batch: int) -> tuple[list[int], int]:
    """The numbers of the rows out of order, and the number of offsets."""
    order_scan = RecordOrderScan()
    disordered: list[int] = []
    distinct_offsets = 0
    for start in range(0, len(positions), rows_per_batch):
        topic_ids, offsets, indexes = zip(*positions[start : start + rows_per_batch], strict=True)
        batch = pa.table(
            {
                "topic_id": pa.array(topic_ids, pa.string()),
                "offset": pa.array(offsets, pa.int64()),
                "index": pa.array(indexes, pa.int32()),
            }
        )
        order = order_scan.scan(batch)
        disordered += [start + int(row) for row in order.disordered_rows]
        distinct_offsets += order.distinct_offsets
    return disordered, distinct_offsets


@pytest.mark.parametrize("rows_per_batch", [100, 2, 1])
@pytest.mark.parametrize(
    ("positions", "disordered"),
    [
        ([("a", 0, 0), ("a", 0, 1), ("a", 7, 0)], []),
        ([("a", 5, 0), ("a", 5, 0)], [1]),
        ([("a", 5, 1), ("a", 5, 0), ("a", 6, 0)], [1]),
        ([("a", 5, 0), ("a", 4, 9)], [1]),
        ([("a", 5, 0), ("b", 0, 0), ("b", 0, 0)], [2]),
        ([("a", 5, 0), ("b", 1, 0), ("a", 5, 0)], [2]),
        ([("a", 5, 0), ("b", 1, 0), ("a", 6, 0)], []),
        ([("a", None, 0), ("a", 0, 0)], [0]),
        ([(None, 3, 0), (None, 3, 0)], [1]),
    ],
)
def test_a_record_comes_after_the_record_before_it(
    rows_per_batch: int, positions: list[Position], disordered: list[int]
) -> None:
    """By offset and then by index, each topic id by itself, however the records are cut."""
    assert scan_batches(positions, rows_per_batch)[0] == disordered


def test_the_scan_is_the_same_however_records_are_cut() -> None:
    """Random records: one batch, single rows, and plain Python say the same."""
    rng = random.Random(7)
    for _ in range(100):
        count = rng.randrange(1, 30)
        positions: list[Position] = [
            (rng.choice("ab"), rng.randrange(6), rng.randrange(3)) for _ in range(count)
        ]
        expected = _plain_scan(positions)
        assert scan_batches(positions, 1000) == expected
        assert scan_batches(positions, rng.randrange(1, 5)) == expected


def _plain_scan(positions: list[Any]) -> tuple[list[int], int]:
    """The same rules, one record at a time."""
    previous: dict[str, tuple[int, int]] = {}
    disordered = []
    distinct_offsets = 0
    for row, (topic_id, offset, index) in enumerate(positions):
        last = previous.get(topic_id)
        if last is not None and (offset, index) <= last:
            disordered.append(row)
        if last is None or last[0] != offset:
            distinct_offsets += 1
        previous[topic_id] = (offset, index)
    return disordered, distinct_offsets


def test_rows_without_an_index_rise_by_offset() -> None:
    """As those of a file of quarantined messages."""
    batch = pa.table({"topic_id": ["a", "a", "a"], "offset": [1, 2, 2]})
    assert RecordOrderScan().scan(batch).disordered_rows.tolist() == [2]
