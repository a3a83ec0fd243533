"""Holes: why offsets are missing, told from the log's own record batches. Pure: batches come in as
values.

A reader never sees transaction markers, records of aborted transactions (read_committed), nor what
compaction took away. Everything else that is missing is a loss: expired, or unexplained, which is a
gap. Whoever knows the batches calls `explain`; whoever folds walks a `HolePassage` over the answer.

Next room: kafka/raw_batches.py reads the batches; engine/task.py meets the holes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.findings import Finding, GapMark, Tier, tier_action
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ensure

HoleCause = Literal["marker", "aborted", "compacted", "expired", "unexplained"]
ExplainedRange = tuple[OffsetRange, HoleCause]
LOSS_FINDINGS: dict[str, str] = {"expired": "expired", "unexplained": "gap"}
"""The causes that are losses, and the finding each is."""


class KafkaRecordBatch(Struct, frozen=True):
    """One record batch, as its header has it."""

    first_offset: int
    last_offset: int
    """Its last offset, which it keeps when compaction takes the record away."""
    is_control: bool = False
    """It holds a transaction marker."""
    is_abort_marker: bool = False
    """That marker ends an aborted transaction."""
    producer_id: int = -1
    is_transactional: bool = False
    is_aborted: bool = False
    """Its records belong to an aborted transaction."""
    record_offsets: tuple[int, ...] | None = None
    """The offsets that still have a record, rising; None: all of them."""


class LogView(Struct, frozen=True):
    """What is known of a log from an offset on: every batch there is from `start` up to `end`."""

    start: int
    end: int
    log_start: int
    stable_end: int
    """Readers get no further: the last stable offset under read_committed, else the high end of the
    log.
    """
    is_compacted: bool
    batches: tuple[KafkaRecordBatch, ...] = ()


def mark_aborted_batches(
    batches: Iterable[KafkaRecordBatch], aborted_transactions: Iterable[tuple[int, int]]
) -> Iterator[KafkaRecordBatch]:
    """Batches of one fetch, told whether their transaction was aborted.

    `aborted` is what Kafka says beside them: producer and first offset of every aborted transaction
    that reaches into the fetch, also of those whose marker comes after it. A producer has one
    transaction at a time, so its records count as aborted from that offset to its abort marker:
    Kafka's own consumers decide just so.
    """
    coming = sorted(aborted_transactions, key=lambda one: one[1])
    now: set[int] = set()
    for batch in batches:
        while coming and coming[0][1] <= batch.last_offset:
            now.add(coming.pop(0)[0])
        if batch.is_control:
            if batch.is_abort_marker:
                now.discard(batch.producer_id)
            yield batch
        else:
            yield (
                replace(batch, is_aborted=True)
                if batch.is_transactional and batch.producer_id in now
                else batch
            )


def explain_hole(hole: OffsetRange, view: LogView, isolation: str) -> list[ExplainedRange]:
    """Every offset of a hole with its cause, as neighbouring pieces that tile it exactly."""
    first, until = max(hole.start, view.log_start), min(hole.end, view.stable_end)
    seen = first >= until or (view.start <= first and until <= view.end)
    ensure(
        seen,
        "a hole is explained from a view that covers it",
        hole=str(hole),
        start=view.start,
        end=view.end,
    )
    return list(_merge_neighbours(_explained_ranges(hole, view, isolation)))


def _explained_ranges(hole: OffsetRange, view: LogView, isolation: str) -> Iterator[ExplainedRange]:
    at = max(hole.start, min(view.log_start, hole.end))
    yield OffsetRange(hole.start, at), "expired"
    end = max(at, min(hole.end, view.stable_end))
    absent: HoleCause = "compacted" if view.is_compacted else "unexplained"
    for batch in _batches_from(view.batches, at):
        if batch.first_offset >= end:
            break
        first, until = max(batch.first_offset, at), min(batch.last_offset + 1, end)
        yield OffsetRange(at, first), absent
        yield from _explain_within_batch(batch, OffsetRange(first, until), absent, isolation)
        at = until
    yield OffsetRange(at, end), absent
    yield OffsetRange(end, hole.end), "unexplained"


def _batches_from(batches: Sequence[KafkaRecordBatch], offset: int) -> Iterator[KafkaRecordBatch]:
    """The batches from the first that has `offset` or comes after it."""
    for number in range(
        bisect_left(batches, offset, key=lambda batch: batch.last_offset), len(batches)
    ):
        yield batches[number]


def _explain_within_batch(
    batch: KafkaRecordBatch, offset_range: OffsetRange, missing_cause: HoleCause, isolation: str
) -> Iterator[ExplainedRange]:
    """Missing offsets within one batch. A record that is there and counts should have been read:
    unexplained.
    """
    if batch.is_control:
        yield offset_range, "marker"
        return
    there: HoleCause = (
        "aborted" if batch.is_aborted and isolation == "read_committed" else "unexplained"
    )
    if batch.record_offsets is None:
        yield offset_range, there
        return
    at = offset_range.start
    for offset in batch.record_offsets[
        bisect_left(batch.record_offsets, offset_range.start) : bisect_left(
            batch.record_offsets, offset_range.end
        )
    ]:
        yield OffsetRange(at, offset), missing_cause
        yield OffsetRange(offset, offset + 1), there
        at = offset + 1
    yield OffsetRange(at, offset_range.end), missing_cause


def _merge_neighbours(pieces: Iterable[ExplainedRange]) -> Iterator[ExplainedRange]:
    """Neighbours of one cause as one, empty ones left out."""
    last: ExplainedRange | None = None
    for whole, cause in pieces:
        if not len(whole):
            continue
        if last is not None and last[1] == cause:
            last = last[0].joined_with(whole), cause
            continue
        if last is not None:
            yield last
        last = whole, cause
    if last is not None:
        yield last


class HolePassage(Struct):
    """The way of one partition's walk over its holes: what was passed over, by cause, and what
    stopped it.
    """

    partition: Partition
    tier: Tier
    until: int
    counts: dict[str, int] = field(default_factory=dict)
    marks: list[GapMark] = field(default_factory=list)
    """Losses that the tier only counts."""
    halt: Finding | None = None

    def pass_hole(self, hole: OffsetRange, pieces: Iterable[ExplainedRange]) -> bool:
        """Pass over one hole; whether its end was reached."""
        ensure(
            self.halt is None and self.until <= hole.start,
            "holes come in order",
            hole=str(hole),
            until=self.until,
        )
        self.until = hole.start
        for whole, cause in pieces:
            ensure(
                whole.start == self.until,
                "pieces tile their hole",
                hole=str(hole),
                piece=str(whole),
            )
            if cause in LOSS_FINDINGS:
                self.halt = loss_finding(self.partition, whole, cause, self.tier)
                if self.halt is not None:
                    return False
                self.marks.append(loss_mark(whole, cause))
            self.counts[cause] = self.counts.get(cause, 0) + len(whole)
            self.until = whole.end
        ensure(self.until == hole.end, "pieces tile their hole", hole=str(hole), until=self.until)
        return True


def loss_mark(offset_range: OffsetRange, cause: HoleCause) -> GapMark:
    """Lost offsets that are only counted, for the gaps table."""
    return GapMark(
        finding=LOSS_FINDINGS[cause],
        offset=offset_range.start,
        until=offset_range.end,
        cause=_describe_loss(offset_range, cause),
    )


def loss_finding(
    partition: Partition, offset_range: OffsetRange, cause: HoleCause, tier: Tier
) -> Finding | None:
    """Lost offsets as a finding that halts; None where the tier only counts them."""
    if tier_action(LOSS_FINDINGS[cause], tier) != "halt":
        return None
    return Finding(
        finding=LOSS_FINDINGS[cause],
        topic=partition.topic,
        partition=partition.number,
        offset=offset_range.start,
        expected=f"offset {offset_range.start}",
        found=f"offset {offset_range.end}",
        cause=_describe_loss(offset_range, cause),
    )


def _describe_loss(offset_range: OffsetRange, cause: HoleCause) -> str:
    many = "message" if len(offset_range) == 1 else "messages"
    if cause == "expired":
        return f"{len(offset_range)} {many} {offset_range} were deleted before they were read"
    return (
        f"unexplained: {len(offset_range)} {many} {offset_range} missing;\n"
        "no transaction marker, aborted transaction or compaction covers them"
    )
