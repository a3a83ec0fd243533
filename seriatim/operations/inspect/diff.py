"""Diff: two outputs compared record by record, by offset and index, where both have folded.

Next: storage/record_query.py reads the records; cli/diff.py shows the differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from math import isnan
from typing import Any, Protocol

from msgspec import Struct, field

from seriatim.engine.findings import list_some
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.records import Record
from seriatim.ports import ProgressCallback

RecordsByPosition = dict[tuple[int, int], list[Record]]
"""Records by offset and index."""
PartitionLife = tuple[Partition, str]
"""A partition, and the id of its topic: a topic that is made again has another id."""
RangeByPartition = Mapping[PartitionLife, OffsetRange]
OFFSETS_AT_ONCE = 200_000
"""How many offsets are compared at a time."""
DIFFERENCES_MAX = 100
"""How many differences are kept as examples."""
PARTITIONS_NAMED = 3
"""How many partitions are named that only one side has folded."""


class DiffTable(Protocol):
    """Records in columns, in order."""

    num_rows: int

    def equals(self, other: Any) -> bool: ...
    def to_pylist(self) -> list[Record]: ...


class DiffSide(Protocol):
    """One of the two outputs."""

    @property
    def columns(self) -> Sequence[str]: ...

    def read(
        self,
        partition_life: PartitionLife,
        offset_range: OffsetRange,
        columns: Sequence[str] | None = None,
    ) -> DiffTable: ...


class RecordDifference(Struct, frozen=True, kw_only=True):
    """A record that differs, or that only one side has."""

    partition: Partition
    offset: int
    index: int
    left: Record | None
    right: Record | None
    columns: tuple[str, ...] = ()
    """The columns that differ."""


class DiffResult(Struct, kw_only=True):
    """What differs between two outputs."""

    ranges: dict[PartitionLife, OffsetRange] = field(default_factory=dict)
    """The offsets that were compared."""
    records: int = 0
    """How many records of the left side were compared."""
    differing: int = 0
    only_left: int = 0
    only_right: int = 0
    differences: list[RecordDifference] = field(default_factory=list)
    """The first DIFFERENCES_MAX differences."""
    columns: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    """Columns and partitions that only one side has."""

    @property
    def count(self) -> int:
        """How many records differ."""
        return self.differing + self.only_left + self.only_right


def diff_records(
    left_side: DiffSide,
    right_side: DiffSide,
    left_ranges: RangeByPartition,
    right_ranges: RangeByPartition,
    progress: ProgressCallback,
) -> DiffResult:
    """Compare all records at offsets that both sides have folded."""
    result = DiffResult()
    _choose_columns(left_side, right_side, result)
    _choose_ranges(left_ranges, right_ranges, result)
    offsets_total = sum(map(len, result.ranges.values()))
    offsets_compared = 0
    for partition_life, offset_range in result.ranges.items():
        for subrange in _split_range(offset_range):
            left_table = left_side.read(partition_life, subrange, result.columns)
            right_table = right_side.read(partition_life, subrange, result.columns)
            _compare_tables(left_table, right_table, partition_life[0], result)
            offsets_compared += len(subrange)
            progress(offsets_compared, offsets_total)
    return result


def _choose_columns(left_side: DiffSide, right_side: DiffSide, result: DiffResult) -> None:
    """Columns of both sides are compared, the others are noted as not compared."""
    left_columns = list(left_side.columns)
    right_columns = list(right_side.columns)
    for name in dict.fromkeys(left_columns + right_columns):
        if name in left_columns and name in right_columns:
            result.columns.append(name)
        else:
            result.not_compared.append(f"column {name}")


def _choose_ranges(
    left_ranges: RangeByPartition,
    right_ranges: RangeByPartition,
    result: DiffResult,
) -> None:
    """Offsets of both sides are compared, other partitions are noted as not compared."""
    on_one_side = []
    for partition_life in sorted({*left_ranges, *right_ranges}):
        overlap = _overlap(left_ranges.get(partition_life), right_ranges.get(partition_life))
        if overlap is None:
            on_one_side.append(str(partition_life[0]))
        else:
            result.ranges[partition_life] = overlap
    if on_one_side:
        names = list_some(on_one_side, PARTITIONS_NAMED)
        result.not_compared.append(f"{names}: only one of them has folded it")


def _overlap(left_range: OffsetRange | None, right_range: OffsetRange | None) -> OffsetRange | None:
    """The offsets that both have folded; None: there is no such offset, and one of them has folded
    something.
    """
    if left_range is None or right_range is None:
        return None
    if not len(left_range) and not len(right_range):
        # Both know the partition and nothing was in it: they agree, although there is no record
        # to compare.
        return left_range
    start = max(left_range.start, right_range.start)
    end = min(left_range.end, right_range.end)
    if start >= end:
        return None
    return OffsetRange(start, end)


def _split_range(offset_range: OffsetRange) -> Iterator[OffsetRange]:
    for start in range(offset_range.start, offset_range.end, OFFSETS_AT_ONCE):
        yield OffsetRange(start, min(offset_range.end, start + OFFSETS_AT_ONCE))


def _compare_tables(
    left_table: DiffTable, right_table: DiffTable, partition: Partition, result: DiffResult
) -> None:
    result.records += left_table.num_rows
    # Whole columns are compared first: nearly always nothing differs.
    if left_table.equals(right_table):
        return
    pairs = pair_records(left_table.to_pylist(), right_table.to_pylist())
    for left_record, right_record in pairs:
        if left_record is None:
            result.only_right += 1
        elif right_record is None:
            result.only_left += 1
        else:
            result.differing += 1
        if len(result.differences) < DIFFERENCES_MAX:
            difference = _record_difference(partition, left_record, right_record)
            result.differences.append(difference)


def _record_difference(
    partition: Partition,
    left_record: Record | None,
    right_record: Record | None,
) -> RecordDifference:
    record = left_record or right_record or {}
    columns = []
    if left_record and right_record:
        columns = [
            name
            for name, left_value in left_record.items()
            if not same_values(left_value, right_record.get(name))
        ]
    return RecordDifference(
        partition=partition,
        offset=record["offset"],
        index=record["index"],
        left=left_record,
        right=right_record,
        columns=tuple(columns),
    )


def pair_records(
    left_records: Sequence[Record], right_records: Sequence[Record]
) -> Iterator[tuple[Record | None, Record | None]]:
    """Records of both sides in pairs by offset and index; None where a side has none.

    Pairs of equal records are left out.
    """
    left_by_position = _by_offset_and_index(left_records)
    right_by_position = _by_offset_and_index(right_records)
    for position in sorted({*left_by_position, *right_by_position}):
        left_rest, right_rest = _drop_equal_records(
            left_by_position.get(position, []), right_by_position.get(position, [])
        )
        yield from zip_longest(left_rest, right_rest)


def _by_offset_and_index(
    records: Sequence[Record],
) -> RecordsByPosition:
    records_by_position: RecordsByPosition = {}
    for record in records:
        position = (record["offset"], record["index"])
        records_by_position.setdefault(position, []).append(record)
    return records_by_position


def _drop_equal_records(
    left_records: list[Record], right_records: list[Record]
) -> tuple[list[Record], list[Record]]:
    """The records of one offset and index that have no equal on the other side.

    An undamaged output has one record there, a damaged one may have several.
    """
    left_rest = []
    right_rest = list(right_records)
    for left_record in left_records:
        for i, right_record in enumerate(right_rest):
            if same_values(left_record, right_record):
                right_rest.pop(i)
                break
        else:
            left_rest.append(left_record)
    return left_rest, right_rest


def same_values(left_value: Any, right_value: Any) -> bool:
    """Whether two values are the same. Unlike in Python, NaN is the same as NaN."""
    if isinstance(left_value, dict) and isinstance(right_value, dict):
        if left_value.keys() != right_value.keys():
            return False
        return all(same_values(value, right_value[name]) for name, value in left_value.items())
    if isinstance(left_value, list) and isinstance(right_value, list):
        if len(left_value) != len(right_value):
            return False
        return all(map(same_values, left_value, right_value))
    return bool(left_value == right_value) or (_is_nan(left_value) and _is_nan(right_value))


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and isnan(value)
