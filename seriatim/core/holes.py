"""Holes: why offsets are missing, told from the log's own record batches. Pure: batches come in as values.

A reader never sees transaction markers, records of aborted transactions (read_committed), nor what compaction
took away. Everything else that is missing is a loss: expired, or unexplained, which is a gap. Whoever knows the
batches calls `explain`; whoever folds walks a `Passage` over the answer.

Next room: adapters/batches.py reads the batches; steps/task.py meets the holes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.core.errors import ensure
from seriatim.core.integrity import Finding, Mark, Tier, action
from seriatim.core.offsets import OffsetRange, Partition

Cause = Literal["marker", "aborted", "compacted", "expired", "unexplained"]
Piece = tuple[OffsetRange, Cause]
FINDINGS: dict[str, str] = {"expired": "expired", "unexplained": "gap"}
"""The causes that are losses, and the finding each is."""


class Batch(Struct, frozen=True):
    """One record batch, as its header has it."""

    base: int
    last: int
    """Its last offset, which it keeps when compaction takes the record away."""
    control: bool = False
    """It holds a transaction marker."""
    abort: bool = False
    """That marker ends an aborted transaction."""
    producer: int = -1
    transactional: bool = False
    aborted: bool = False
    """Its records belong to an aborted transaction."""
    records: tuple[int, ...] | None = None
    """The offsets that still have a record, rising; None: all of them."""


class LogView(Struct, frozen=True):
    """What is known of a log from an offset on: every batch there is from `start` up to `end`."""

    start: int
    end: int
    log_start: int
    stable: int
    """Readers get no further: the last stable offset under read_committed, else the high end of the log."""
    compacted: bool
    batches: tuple[Batch, ...] = ()


def judged(batches: Iterable[Batch], aborted: Iterable[tuple[int, int]]) -> Iterator[Batch]:
    """Batches of one fetch, told whether their transaction was aborted.

    `aborted` is what Kafka says beside them: producer and first offset of every aborted transaction that reaches
    into the fetch, also of those whose marker comes after it. A producer has one transaction at a time, so its
    records count as aborted from that offset to its abort marker: Kafka's own consumers decide just so.
    """
    coming = sorted(aborted, key=lambda one: one[1])
    now: set[int] = set()
    for batch in batches:
        while coming and coming[0][1] <= batch.last:
            now.add(coming.pop(0)[0])
        if batch.control:
            if batch.abort:
                now.discard(batch.producer)
            yield batch
        else:
            yield replace(batch, aborted=True) if batch.transactional and batch.producer in now else batch


def explain(hole: OffsetRange, view: LogView, isolation: str) -> list[Piece]:
    """Every offset of a hole with its cause, as neighbouring pieces that tile it exactly."""
    first, until = max(hole.start, view.log_start), min(hole.end, view.stable)
    seen = first >= until or (view.start <= first and until <= view.end)
    ensure(seen, "a hole is explained from a view that covers it", hole=str(hole), start=view.start, end=view.end)
    return list(_joined(_pieces(hole, view, isolation)))


def _pieces(hole: OffsetRange, view: LogView, isolation: str) -> Iterator[Piece]:
    at = max(hole.start, min(view.log_start, hole.end))
    yield OffsetRange(hole.start, at), "expired"
    end = max(at, min(hole.end, view.stable))
    absent: Cause = "compacted" if view.compacted else "unexplained"
    for batch in _reaching(view.batches, at):
        if batch.base >= end:
            break
        first, until = max(batch.base, at), min(batch.last + 1, end)
        yield OffsetRange(at, first), absent
        yield from _inside(batch, OffsetRange(first, until), absent, isolation)
        at = until
    yield OffsetRange(at, end), absent
    yield OffsetRange(end, hole.end), "unexplained"


def _reaching(batches: Sequence[Batch], offset: int) -> Iterator[Batch]:
    """The batches from the first that has `offset` or comes after it."""
    for number in range(bisect_left(batches, offset, key=lambda batch: batch.last), len(batches)):
        yield batches[number]


def _inside(batch: Batch, part: OffsetRange, absent: Cause, isolation: str) -> Iterator[Piece]:
    """Missing offsets within one batch. A record that is there and counts should have been read: unexplained."""
    if batch.control:
        yield part, "marker"
        return
    there: Cause = "aborted" if batch.aborted and isolation == "read_committed" else "unexplained"
    if batch.records is None:
        yield part, there
        return
    at = part.start
    for offset in batch.records[bisect_left(batch.records, part.start) : bisect_left(batch.records, part.end)]:
        yield OffsetRange(at, offset), absent
        yield OffsetRange(offset, offset + 1), there
        at = offset + 1
    yield OffsetRange(at, part.end), absent


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Neighbours of one cause as one, empty ones left out."""
    last: Piece | None = None
    for whole, cause in pieces:
        if not len(whole):
            continue
        if last is not None and last[1] == cause:
            last = last[0].then(whole), cause
            continue
        if last is not None:
            yield last
        last = whole, cause
    if last is not None:
        yield last


class Passage(Struct):
    """The way of one partition's walk over its holes: what was passed over, by cause, and what stopped it."""

    partition: Partition
    tier: Tier
    until: int
    counts: dict[str, int] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    """Losses that the tier only counts."""
    halt: Finding | None = None

    def over(self, hole: OffsetRange, pieces: Iterable[Piece]) -> bool:
        """Pass over one hole; whether its end was reached."""
        ensure(self.halt is None and self.until <= hole.start, "holes come in order", hole=str(hole), until=self.until)
        self.until = hole.start
        for whole, cause in pieces:
            ensure(whole.start == self.until, "pieces tile their hole", hole=str(hole), piece=str(whole))
            if cause in FINDINGS:
                self.halt = lost(self.partition, whole, cause, self.tier)
                if self.halt is not None:
                    return False
                self.marks.append(mark(whole, cause))
            self.counts[cause] = self.counts.get(cause, 0) + len(whole)
            self.until = whole.end
        ensure(self.until == hole.end, "pieces tile their hole", hole=str(hole), until=self.until)
        return True


def mark(whole: OffsetRange, cause: Cause) -> Mark:
    """Lost offsets that are only counted, for the gaps table."""
    return Mark(finding=FINDINGS[cause], offset=whole.start, until=whole.end, cause=_told(whole, cause))


def lost(partition: Partition, whole: OffsetRange, cause: Cause, tier: Tier) -> Finding | None:
    """Lost offsets as a finding that halts; None where the tier only counts them."""
    if action(FINDINGS[cause], tier) != "halt":
        return None
    return Finding(
        finding=FINDINGS[cause],
        topic=partition.topic,
        partition=partition.number,
        offset=whole.start,
        expected=f"offset {whole.start}",
        found=f"offset {whole.end}",
        cause=_told(whole, cause),
    )


def _told(whole: OffsetRange, cause: Cause) -> str:
    many = "message" if len(whole) == 1 else "messages"
    if cause == "expired":
        return f"{len(whole)} {many} {whole} were deleted before they were read"
    return (
        f"unexplained: {len(whole)} {many} {whole} missing;\n"
        "no transaction marker, aborted transaction or compaction covers them"
    )
