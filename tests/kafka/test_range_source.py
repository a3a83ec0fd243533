"""Our streaming source: what it plans, as Spark asks it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from seriatim.engine.offsets import OffsetRange, Partition, Ranges, cut_into_slices
from seriatim.kafka.range_source import (
    RangePlanner,
    RangeSource,
    offsets_from_json,
    offsets_to_json,
)

PARTITIONS = [Partition("b", 10), Partition("b", 2), Partition("a", 0)]


def planner(ranges: Ranges, messages_max: int) -> RangePlanner:
    """The planner of these ranges, made as Spark makes it."""
    starts = {partition: whole.start for partition, whole in ranges.items()}
    ends = {partition: whole.end for partition, whole in ranges.items()}
    source = RangeSource(
        {
            "starts": json.dumps(offsets_to_json(starts)),
            "ends": json.dumps(offsets_to_json(ends)),
            "messages_max": str(messages_max),
        }
    )
    return source.streamReader(None)


def planned_batches(planned: RangePlanner) -> list[list[tuple[str, int, int, int]]]:
    """The rows of all batches of an AvailableNow query, as Spark goes through them."""
    planned.prepareForTriggerAvailableNow()
    start = planned.initialOffset()
    batches = []
    while True:
        end = planned.latestOffset(start, planned.getDefaultReadLimit())
        if json.dumps(end) == json.dumps(start):
            return batches
        batches.append(
            [row for part in planned.partitions(start, end) for row in planned.read(part)]
        )
        # Spark keeps offsets as text.
        start = json.loads(json.dumps(end))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=3),
    st.integers(1, 12),
)
def test_batches_are_the_slices_that_we_would_cut(
    bounds: list[tuple[int, int]], messages_max: int
) -> None:
    """With the query and without it a stream is cut at the same offsets."""
    ranges = {
        partition: OffsetRange(start, start + size)
        for partition, (start, size) in zip(PARTITIONS, bounds, strict=True)
    }
    slices = cut_into_slices(dict(sorted(ranges.items())), messages_max)
    batches = planned_batches(planner(ranges, messages_max))
    assert [
        {Partition(topic, number): OffsetRange(start, end) for topic, number, start, end in batch}
        for batch in batches
    ] == slices


def test_the_longest_range_comes_first() -> None:
    """So that it is not the one that all others wait for; and an empty one is no task."""
    ranges = {PARTITIONS[0]: OffsetRange(0, 5), PARTITIONS[1]: OffsetRange(7, 16)}
    planned = planner({**ranges, PARTITIONS[2]: OffsetRange(3, 3)}, 1000)
    assert planned_batches(planned) == [[("b", 2, 7, 16), ("b", 10, 0, 5)]]


def test_a_limit_of_spark_wins() -> None:
    """Spark may ask for everything at once."""
    planned = planner({PARTITIONS[2]: OffsetRange(0, 100)}, 7)
    assert planned.getDefaultReadLimit() == ReadMaxRows(7)
    assert planned.latestOffset({"a": {"0": 40}}, ReadAllAvailable()) == {"a": {"0": 100}}
    assert planned.latestOffset({"a": {"0": 40}}, ReadMaxRows(3)) == {"a": {"0": 43}}


def test_reading_a_range_has_no_effect() -> None:
    """Spark reads it again at every action, retry and speculation."""
    planned = planner({PARTITIONS[2]: OffsetRange(0, 9)}, 5)
    (part,) = planned.partitions({"a": {"0": 0}}, {"a": {"0": 5}})
    assert list(planned.read(part)) == list(planned.read(part)) == [("a", 0, 0, 5)]


@pytest.mark.parametrize("order", [PARTITIONS, PARTITIONS[::-1]])
def test_equal_offsets_are_the_same_text(order: list[Partition]) -> None:
    """Spark compares texts; were they to differ, an AvailableNow query would never end."""
    texts = {json.dumps(offsets_to_json(dict.fromkeys(order, 3))) for _ in range(2)}
    assert texts == {'{"a": {"0": 3}, "b": {"2": 3, "10": 3}}'}
    back = offsets_from_json(json.loads(texts.pop()))
    assert list(back) == sorted(PARTITIONS)
    assert all(left < right for left, right in pairwise(back))
