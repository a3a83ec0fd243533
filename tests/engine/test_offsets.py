"""Offsets: half-open ranges that never overlap, never skip, and never hide a hole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import BrokenPromiseError, ConfigError


def test_only_neighbours_join() -> None:
    """A join across a hole would hide it, so it is refused."""
    with pytest.raises(BrokenPromiseError, match="do not touch"):
        OffsetRange(0, 10).joined_with(OffsetRange(11, 20))


def test_a_range_never_goes_backward() -> None:
    """An end before its start, or a start before 0, is our bug."""
    with pytest.raises(BrokenPromiseError, match="backward"):
        OffsetRange(5, 4)
    with pytest.raises(BrokenPromiseError, match="backward"):
        OffsetRange(-1, 4)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_a_cut_and_a_join_are_each_others_undoing(start: int, left: int, right: int) -> None:
    """Cutting anywhere and joining again gives the range, with as many offsets."""
    whole = OffsetRange(start, start + left + right)
    head = whole.until(start + left)
    tail = OffsetRange(head.end, whole.end)
    assert head.joined_with(tail) == whole
    assert len(head) + len(tail) == len(whole)


def test_a_cut_outside_is_refused() -> None:
    """A range cannot be cut where it is not."""
    with pytest.raises(BrokenPromiseError, match="outside"):
        OffsetRange(5, 9).until(10)


@given(st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True), st.integers(0, 10_000))
def test_a_partition_reads_as_it_is_written(topic: str, number: int) -> None:
    """`topic/number` goes there and back."""
    assert Partition.parse(str(Partition(topic, number))) == Partition(topic, number)


@pytest.mark.parametrize("text", ["", "orders", "orders/", "orders/x", "/3", "a b/1", "orders/-1"])
def test_what_is_no_partition_is_refused(text: str) -> None:
    """A person's typing error is theirs to fix, with the right form shown."""
    with pytest.raises(ConfigError) as refused:
        Partition.parse(text)
    assert "TOPIC/NUMBER" in refused.value.next


def test_partitions_are_checked_when_made() -> None:
    """Names that Kafka could not have are our bug."""
    with pytest.raises(BrokenPromiseError, match="topic name"):
        Partition("a/b", 0)
    with pytest.raises(BrokenPromiseError, match="partition number"):
        Partition("a", -1)
