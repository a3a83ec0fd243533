"""Diff: two outputs compared record by record, by offset and index, where both have something to
say.

Next room: storage/record_query.py reads; cli/diff.py shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from math import isnan
from typing import Any, Protocol

from msgspec import Struct, field

from seriatim.engine.offsets import OffsetRange, Partition

PartitionLife = tuple[Partition, str]
"""A partition, and the life of its topic."""
OFFSETS_AT_ONCE = 200_000
"""Offsets that are compared at a time."""
DIFFERENCES_MAX = 100


class DiffTable(Protocol):
    """Records in columns, in order."""

    num_rows: int

    def equals(self, other: Any) -> bool: ...
    def to_pylist(self) -> list[dict[str, Any]]: ...


class DiffSide(Protocol):
    """One of the two."""

    @property
    def columns(self) -> Sequence[str]: ...

    def read(
        self,
        partition_life: PartitionLife,
        offset_range: OffsetRange,
        columns: Sequence[str] | None = None,
    ) -> DiffTable: ...


class RecordDifference(Struct, frozen=True, kw_only=True):
    """A record that differs, or that only one has."""

    partition: Partition
    offset: int
    index: int
    left: dict[str, Any] | None
    right: dict[str, Any] | None
    columns: tuple[str, ...] = ()
    """Those that differ."""


class DiffResult(Struct, kw_only=True):
    """What differs."""

    ranges: dict[PartitionLife, OffsetRange] = field(default_factory=dict)
    """Compared."""
    records: int = 0
    """Of the left one."""
    differing: int = 0
    only_left: int = 0
    only_right: int = 0
    differences: list[RecordDifference] = field(default_factory=list)
    """The first ones."""
    columns: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    """Columns that only one of them has, and partitions."""

    @property
    def count(self) -> int:
        """How many records differ."""
        return self.differing + self.only_left + self.only_right


def diff_records(
    left: DiffSide,
    right: DiffSide,
    left_ranges: Mapping[PartitionLife, OffsetRange],
    right_ranges: Mapping[PartitionLife, OffsetRange],
    progress: Callable[[int, int], None],
) -> DiffResult:
    """All records at offsets that both have folded."""
    done = DiffResult(columns=[name for name in left.columns if name in right.columns])
    done.not_compared = [
        f"column {name}"
        for name in dict.fromkeys([*left.columns, *right.columns])
        if name not in done.columns
    ]
    alone = []
    for place in sorted({*left_ranges, *right_ranges}):
        both = _overlap(left_ranges.get(place), right_ranges.get(place))
        if both is None:
            alone.append(str(place[0]))
        else:
            done.ranges[place] = both
    if alone:
        more = f" and {len(alone) - 3} more" if len(alone) > 3 else ""
        done.not_compared.append(f"{', '.join(alone[:3])}{more}: only one of them has folded it")
    total, at = sum(map(len, done.ranges.values())), 0
    for place, whole in done.ranges.items():
        for part in _split_range(whole):
            _compare_tables(
                left.read(place, part, done.columns),
                right.read(place, part, done.columns),
                place[0],
                done,
            )
            at += len(part)
            progress(at, total)
    return done


def _overlap(left: OffsetRange | None, right: OffsetRange | None) -> OffsetRange | None:
    """The offsets that both have folded; None: there is no such offset, and one of them has folded
    something.
    """
    if left is None or right is None:
        return None
    if not len(left) and not len(right):
        # Both know the partition and nothing was in it: they agree, although there is no record to compare.
        return left
    if max(left.start, right.start) >= min(left.end, right.end):
        return None
    return OffsetRange(max(left.start, right.start), min(left.end, right.end))


def _split_range(offset_range: OffsetRange) -> Iterator[OffsetRange]:
    for start in range(offset_range.start, offset_range.end, OFFSETS_AT_ONCE):
        yield OffsetRange(start, min(offset_range.end, start + OFFSETS_AT_ONCE))


def _compare_tables(
    left: DiffTable, right: DiffTable, partition: Partition, result: DiffResult
) -> None:
    result.records += left.num_rows
    if left.equals(right):
        return
    for mine, yours in pair_records(left.to_pylist(), right.to_pylist()):
        if same_values(mine, yours):
            continue
        result.differing += mine is not None and yours is not None
        result.only_left += yours is None
        result.only_right += mine is None
        if len(result.differences) < DIFFERENCES_MAX:
            result.differences.append(_record_difference(partition, mine, yours))


def _record_difference(
    partition: Partition, left: dict[str, Any] | None, right: dict[str, Any] | None
) -> RecordDifference:
    there = left or right or {}
    columns = (
        [name for name in there if not same_values(left[name], right.get(name))]
        if left and right
        else []
    )
    at, index = there["offset"], there["index"]
    return RecordDifference(
        partition=partition, offset=at, index=index, left=left, right=right, columns=tuple(columns)
    )


def pair_records(
    left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any] | None, dict[str, Any] | None]]:
    """Records of both by offset and index, each as often as it is there; None where one has none."""
    mine, yours = _by_offset_and_index(left), _by_offset_and_index(right)
    for place in sorted({*mine, *yours}):
        yield from zip_longest(*_drop_equal_records(mine.get(place, []), yours.get(place, [])))


def _by_offset_and_index(
    rows: Sequence[dict[str, Any]],
) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["offset"], row["index"]), []).append(row)
    return found


def _drop_equal_records(
    left_rows: list[dict[str, Any]], right_rows: list[dict[str, Any]]
) -> tuple[list[Any], list[Any]]:
    """What of two lists of one place has no like in the other; more than one record is there only
    by damage.
    """
    left, right = [], list(right_rows)
    for row in left_rows:
        at = next((i for i, other in enumerate(right) if same_values(row, other)), None)
        if at is None:
            left.append(row)
        else:
            right.pop(at)
    return left, right


def same_values(left: Any, right: Any) -> bool:
    """Whether two values are the same; NaN is what NaN is."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(
            same_values(value, right[name]) for name, value in left.items()
        )
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_values, left, right))
    return bool(left == right) or all(
        isinstance(value, float) and isnan(value) for value in (left, right)
    )
