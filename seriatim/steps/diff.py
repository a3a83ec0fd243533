"""Diff: two outputs compared record by record, by offset and index, where both have something to say.

Next room: adapters/lookup.py reads; cli/diff.py shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from math import isnan
from typing import Any, Protocol

from msgspec import Struct, field

from seriatim.core.offsets import OffsetRange, Partition

Place = tuple[Partition, str]
"""A partition, and the life of its topic."""
AT_ONCE = 200_000
"""Offsets that are compared at a time."""
SHOWN_MAX = 100


class Table(Protocol):
    """Records in columns, in order."""

    num_rows: int

    def equals(self, other: Any) -> bool: ...
    def to_pylist(self) -> list[dict[str, Any]]: ...


class Side(Protocol):
    """One of the two."""

    @property
    def columns(self) -> Sequence[str]: ...

    def read(self, place: Place, whole: OffsetRange, columns: Sequence[str] | None = None) -> Table: ...


class Parting(Struct, frozen=True, kw_only=True):
    """A record that differs, or that only one has."""

    partition: Partition
    offset: int
    index: int
    left: dict[str, Any] | None
    right: dict[str, Any] | None
    columns: tuple[str, ...] = ()
    """Those that differ."""


class Compared(Struct, kw_only=True):
    """What differs."""

    ranges: dict[Place, OffsetRange] = field(default_factory=dict)
    """Compared."""
    records: int = 0
    """Of the left one."""
    differing: int = 0
    only_left: int = 0
    only_right: int = 0
    partings: list[Parting] = field(default_factory=list)
    """The first ones."""
    columns: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    """Columns that only one of them has, and partitions."""

    @property
    def count(self) -> int:
        """How many records differ."""
        return self.differing + self.only_left + self.only_right


def compare(
    left: Side,
    right: Side,
    lefts: Mapping[Place, OffsetRange],
    rights: Mapping[Place, OffsetRange],
    progress: Callable[[int, int], None],
) -> Compared:
    """All records at offsets that both have folded."""
    done = Compared(columns=[name for name in left.columns if name in right.columns])
    done.not_compared = [
        f"column {name}" for name in dict.fromkeys([*left.columns, *right.columns]) if name not in done.columns
    ]
    alone = []
    for place in sorted({*lefts, *rights}):
        both = _both(lefts.get(place), rights.get(place))
        if both is None:
            alone.append(str(place[0]))
        else:
            done.ranges[place] = both
    if alone:
        more = f" and {len(alone) - 3} more" if len(alone) > 3 else ""
        done.not_compared.append(f"{', '.join(alone[:3])}{more}: only one of them has folded it")
    total, at = sum(map(len, done.ranges.values())), 0
    for place, whole in done.ranges.items():
        for part in _parts(whole):
            _compare(left.read(place, part, done.columns), right.read(place, part, done.columns), place[0], done)
            at += len(part)
            progress(at, total)
    return done


def _both(one: OffsetRange | None, other: OffsetRange | None) -> OffsetRange | None:
    """The offsets that both have folded; None: there is no such offset, and one of them has folded something."""
    if one is None or other is None:
        return None
    if not len(one) and not len(other):
        # Both know the partition and nothing was in it: they agree, although there is no record to compare.
        return one
    if max(one.start, other.start) >= min(one.end, other.end):
        return None
    return OffsetRange(max(one.start, other.start), min(one.end, other.end))


def _parts(whole: OffsetRange) -> Iterator[OffsetRange]:
    for start in range(whole.start, whole.end, AT_ONCE):
        yield OffsetRange(start, min(whole.end, start + AT_ONCE))


def _compare(left: Table, right: Table, partition: Partition, done: Compared) -> None:
    done.records += left.num_rows
    if left.equals(right):
        return
    for mine, yours in paired(left.to_pylist(), right.to_pylist()):
        if same(mine, yours):
            continue
        done.differing += mine is not None and yours is not None
        done.only_left += yours is None
        done.only_right += mine is None
        if len(done.partings) < SHOWN_MAX:
            done.partings.append(_parting(partition, mine, yours))


def _parting(partition: Partition, mine: dict[str, Any] | None, yours: dict[str, Any] | None) -> Parting:
    there = mine or yours or {}
    columns = [name for name in there if not same(mine[name], yours.get(name))] if mine and yours else []
    at, index = there["offset"], there["index"]
    return Parting(partition=partition, offset=at, index=index, left=mine, right=yours, columns=tuple(columns))


def paired(
    left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any] | None, dict[str, Any] | None]]:
    """Records of both by offset and index, each as often as it is there; None where one has none."""
    mine, yours = _by_place(left), _by_place(right)
    for place in sorted({*mine, *yours}):
        yield from zip_longest(*_without_same(mine.get(place, []), yours.get(place, [])))


def _by_place(rows: Sequence[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["offset"], row["index"]), []).append(row)
    return found


def _without_same(mine: list[dict[str, Any]], yours: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """What of two lists of one place has no like in the other; more than one record is there only by damage."""
    left, right = [], list(yours)
    for row in mine:
        at = next((i for i, other in enumerate(right) if same(row, other)), None)
        if at is None:
            left.append(row)
        else:
            right.pop(at)
    return left, right


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same; NaN is what NaN is."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or all(isinstance(value, float) and isnan(value) for value in (one, other))
