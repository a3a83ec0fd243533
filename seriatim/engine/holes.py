"""Holes: why offsets are missing, explained from the record batches of the log. Pure.

A reader never gets transaction markers, records of aborted transactions (with read_committed), or
records that compaction removed. Any other missing message is lost: it expired, or it is missing
without an explanation, which is a gap. `explain_hole` gives the cause of every offset of a hole,
`HolePassage` takes a partition over it.

Next: kafka/raw_batches.py reads the batches; engine/task.py comes upon the holes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.findings import Finding, GapMark, Tier, count_of, tier_action
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ensure

HoleCause = Literal["marker", "aborted", "compacted", "expired", "unexplained"]
ExplainedRange = tuple[OffsetRange, HoleCause]
LOSS_FINDINGS: dict[str, str] = {"expired": "expired", "unexplained": "gap"}
"""The causes that are losses, and the finding for each."""


class KafkaRecordBatch(Struct, frozen=True):
    """One record batch, as its header describes it."""

    first_offset: int
    last_offset: int
    """The batch keeps its last offset even if compaction removes the record."""
    is_control: bool = False
    """Whether the batch holds a transaction marker."""
    is_abort_marker: bool = False
    """Whether that marker ends an aborted transaction."""
    producer_id: int = -1
    is_transactional: bool = False
    is_aborted: bool = False
    """Whether its records belong to an aborted transaction."""
    record_offsets: tuple[int, ...] | None = None
    """The offsets that still have a record, in rising order. None: all of them."""


class LogView(Struct, frozen=True):
    """What is known of a log: all batches from offset `start` up to `end`."""

    start: int
    end: int
    log_start: int
    stable_end: int
    """Readers get no further than this: the last stable offset with read_committed, else the end of
    the log.
    """
    is_compacted: bool
    batches: tuple[KafkaRecordBatch, ...] = ()


def mark_aborted_batches(
    batches: Iterable[KafkaRecordBatch], aborted_transactions: Iterable[tuple[int, int]]
) -> Iterator[KafkaRecordBatch]:
    """The batches of one fetch, with `is_aborted` set.

    Kafka sends the aborted transactions with the fetch: producer and first offset of each one that
    reaches into the fetch, even if its marker comes after it. A producer has one transaction at a
    time, so its records are aborted from that offset up to its abort marker. Kafka's own consumers
    decide in the same way.
    """
    upcoming = sorted(aborted_transactions, key=_first_offset_of_transaction)
    aborting_producers: set[int] = set()
    for batch in batches:
        # A transaction counts from its first offset on, even if that is inside of this batch: a
        # batch is of one producer and one transaction.
        while upcoming and upcoming[0][1] <= batch.last_offset:
            producer_id, _ = upcoming.pop(0)
            aborting_producers.add(producer_id)
        if batch.is_control:
            if batch.is_abort_marker:
                aborting_producers.discard(batch.producer_id)
            yield batch
        elif batch.is_transactional and batch.producer_id in aborting_producers:
            yield replace(batch, is_aborted=True)
        else:
            yield batch


def _first_offset_of_transaction(transaction: tuple[int, int]) -> int:
    _, first_offset = transaction
    return first_offset


def explain_hole(hole: OffsetRange, view: LogView, isolation: str) -> list[ExplainedRange]:
    """The cause of every offset of a hole, as ranges that cover it exactly and in order."""
    start = max(hole.start, view.log_start)
    end = min(hole.end, view.stable_end)
    is_empty = start >= end
    is_within_view = view.start <= start and end <= view.end
    ensure(
        is_empty or is_within_view,
        "a hole is explained from a view that covers it",
        hole=str(hole),
        start=view.start,
        end=view.end,
    )
    return list(_merge_neighbours(_explained_ranges(hole, view, isolation)))


def _explained_ranges(hole: OffsetRange, view: LogView, isolation: str) -> Iterator[ExplainedRange]:
    """The hole in pieces, some of them empty.

    1. What is before the start of the log has expired.
    2. What the batches of the log explain.
    3. What is after the end that readers reach is unexplained.
    """
    # 1. Expired.
    position = max(hole.start, min(view.log_start, hole.end))
    yield OffsetRange(hole.start, position), "expired"
    # 2. Within the log.
    end = max(position, min(hole.end, view.stable_end))
    cause_without_batch: HoleCause = "compacted" if view.is_compacted else "unexplained"
    for batch in _batches_from(view.batches, position):
        if batch.first_offset >= end:
            break
        batch_start = max(batch.first_offset, position)
        batch_end = min(batch.last_offset + 1, end)
        yield OffsetRange(position, batch_start), cause_without_batch
        offsets_in_batch = OffsetRange(batch_start, batch_end)
        yield from _explain_within_batch(batch, offsets_in_batch, cause_without_batch, isolation)
        position = batch_end
    yield OffsetRange(position, end), cause_without_batch
    # 3. Beyond the end.
    yield OffsetRange(end, hole.end), "unexplained"


def _batches_from(batches: Sequence[KafkaRecordBatch], offset: int) -> Iterator[KafkaRecordBatch]:
    """The batches from the first one that contains `offset` or comes after it."""
    first_index = bisect_left(batches, offset, key=lambda batch: batch.last_offset)
    for i in range(first_index, len(batches)):
        yield batches[i]


def _explain_within_batch(
    batch: KafkaRecordBatch, offset_range: OffsetRange, missing_cause: HoleCause, isolation: str
) -> Iterator[ExplainedRange]:
    """The causes of missing offsets within one batch. A record that exists and was not aborted
    should have been read, so it is unexplained that it is missing.
    """
    if batch.is_control:
        yield offset_range, "marker"
        return
    existing_cause: HoleCause = "unexplained"
    if batch.is_aborted and isolation == "read_committed":
        existing_cause = "aborted"
    record_offsets = batch.record_offsets
    if record_offsets is None:
        yield offset_range, existing_cause
        return
    position = offset_range.start
    first_index = bisect_left(record_offsets, offset_range.start)
    end_index = bisect_left(record_offsets, offset_range.end)
    for offset in record_offsets[first_index:end_index]:
        yield OffsetRange(position, offset), missing_cause
        yield OffsetRange(offset, offset + 1), existing_cause
        position = offset + 1
    yield OffsetRange(position, offset_range.end), missing_cause


def _merge_neighbours(pieces: Iterable[ExplainedRange]) -> Iterator[ExplainedRange]:
    """Neighbours with the same cause as one range. Empty ranges are left out."""
    current: ExplainedRange | None = None
    for piece in pieces:
        offset_range, cause = piece
        if not len(offset_range):
            continue
        if current is None:
            current = piece
        elif current[1] == cause:
            current = (current[0].joined_with(offset_range), cause)
        else:
            yield current
            current = piece
    if current is not None:
        yield current


class HolePassage(Struct):
    """Takes one partition over its holes: counts what is passed over, by cause, and halts at a
    loss.
    """

    partition: Partition
    tier: Tier
    until: int
    counts: dict[str, int] = field(default_factory=dict)
    marks: list[GapMark] = field(default_factory=list)
    """Marks of losses that the tier only counts."""
    halt: Finding | None = None

    def pass_hole(self, hole: OffsetRange, pieces: Iterable[ExplainedRange]) -> bool:
        """Pass over one hole. Returns whether its end was reached."""
        ensure(
            self.halt is None and self.until <= hole.start,
            "holes come in order",
            hole=str(hole),
            until=self.until,
        )
        self.until = hole.start
        for offset_range, cause in pieces:
            ensure(
                offset_range.start == self.until,
                "pieces tile their hole",
                hole=str(hole),
                piece=str(offset_range),
            )
            if cause in LOSS_FINDINGS:
                self.halt = loss_finding(self.partition, offset_range, cause, self.tier)
                if self.halt is not None:
                    return False
                self.marks.append(loss_mark(offset_range, cause))
            self.counts[cause] = self.counts.get(cause, 0) + len(offset_range)
            self.until = offset_range.end
        ensure(self.until == hole.end, "pieces tile their hole", hole=str(hole), until=self.until)
        return True


def loss_mark(offset_range: OffsetRange, cause: HoleCause) -> GapMark:
    """The mark of lost offsets that are only counted, for the gaps table."""
    return GapMark(
        finding=LOSS_FINDINGS[cause],
        offset=offset_range.start,
        until=offset_range.end,
        cause=_describe_loss(offset_range, cause),
    )


def loss_finding(
    partition: Partition, offset_range: OffsetRange, cause: HoleCause, tier: Tier
) -> Finding | None:
    """The finding that halts the partition at lost offsets; None if the tier only counts them."""
    kind = LOSS_FINDINGS[cause]
    if tier_action(kind, tier) != "halt":
        return None
    return Finding.at(
        partition,
        kind,
        offset_range.start,
        expected=f"offset {offset_range.start}",
        found=f"offset {offset_range.end}",
        cause=_describe_loss(offset_range, cause),
    )


def _describe_loss(offset_range: OffsetRange, cause: HoleCause) -> str:
    if cause == "expired":
        return describe_expired(offset_range)
    return (
        f"unexplained: {count_of(len(offset_range), 'message')} {offset_range} missing;\n"
        "no transaction marker, aborted transaction or compaction covers them"
    )


def describe_expired(offset_range: OffsetRange) -> str:
    """The cause of a finding about offsets before the log start."""
    return f"Kafka deleted {count_of(len(offset_range), 'message')} {offset_range} that no run had read"
