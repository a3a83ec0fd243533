"""Losses: messages that were folded and are not in Kafka any more. Whoever folds again hears of
them before the rest.

A certificate says how many messages its slice had. Where it had one at every offset, a hole of now
is a loss. Where there were holes then (markers of transactions, say), the slice is counted to its
end before anything behind a hole of it is told: only that shows whether more is missing now.
Compaction does that, and deleted records.

Next room: ledger/history.py has the proofs; operations/inspect/session_replay.py refuses,
operations/inspect/replay.py tells.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.ledger.history import SliceProof
from seriatim.ports import PastMessageReader

AT_ONCE = 50_000
"""Offsets that are counted at a time, at least, if there are as many."""


class MessageLoss(Struct, frozen=True):
    """Messages of a range that are gone."""

    offset_range: OffsetRange
    missing_messages: int

    def __str__(self) -> str:
        of = (
            f"{self.missing_messages} of the messages"
            if self.missing_messages < len(self.offset_range)
            else "the messages"
        )
        return f"{of} of {self.offset_range} are not in Kafka any more (compacted away, or deleted)"


class LossDetector:
    """What one partition lost of what was folded."""

    def __init__(
        self, partition: Partition, proofs: Sequence[SliceProof], past_reader: PastMessageReader
    ) -> None:
        self.partition, self.proofs, self.past_reader = partition, proofs, past_reader
        self._starts = [proof.start for proof in proofs]
        self._counted_starts: set[int] = set()
        """Slices that had holes and were counted."""

    def read_and_detect(
        self, offset_range: OffsetRange, on_loss: Callable[[MessageLoss], None]
    ) -> Iterator[MessageBatch]:
        """The messages of a range that are there; `lost` hears what is not, before what comes after
        it.
        """
        at, doubtful = offset_range.start, True
        while doubtful:
            doubtful = False
            for stretch in self._batches_and_end(OffsetRange(at, offset_range.end)):
                hole = OffsetRange(at, stretch.start)
                if doubtful := self._needs_count(hole):
                    break
                for part in self._lost_ranges(hole):
                    on_loss(MessageLoss(part, len(part)))
                if len(stretch):
                    yield stretch
                at = stretch.start + len(stretch)
            if doubtful:  # a read of its own: the reader goes one way at a time
                self._count_messages(at, on_loss)

    def _batches_and_end(self, offset_range: OffsetRange) -> Iterator[MessageBatch]:
        if len(offset_range):
            yield from self.past_reader.read(self.partition, offset_range)
        yield MessageBatch(offset_range.end, [], [], [])

    def _proofs_of_hole(self, hole: OffsetRange) -> Iterator[SliceProof]:
        """Slices that a hole lies in."""
        for proof in self.proofs[max(0, bisect_right(self._starts, hole.start) - 1) :]:
            if proof.start >= hole.end:
                return
            if proof.until > hole.start and len(hole):
                yield proof

    def _needs_count(self, hole: OffsetRange) -> bool:
        return any(
            not proof.is_dense and proof.start not in self._counted_starts
            for proof in self._proofs_of_hole(hole)
        )

    def _lost_ranges(self, hole: OffsetRange) -> Iterator[OffsetRange]:
        """What of a hole was there when it was folded."""
        for proof in self._proofs_of_hole(hole):
            if proof.is_dense:
                yield OffsetRange(max(proof.start, hole.start), min(proof.until, hole.end))

    def _count_messages(self, start: int, on_loss: Callable[[MessageLoss], None]) -> None:
        """Count the next slices with holes, from their first offset to their last."""
        chosen: list[SliceProof] = []
        for proof in self.proofs[max(0, bisect_right(self._starts, start) - 1) :]:
            if chosen and (
                proof.start != chosen[-1].until or proof.until - chosen[0].start > AT_ONCE
            ):
                break
            if (
                proof.until > start
                and not proof.is_dense
                and proof.start not in self._counted_starts
            ):
                chosen.append(proof)
        counts = dict.fromkeys((proof.start for proof in chosen), 0)
        for stretch in self.past_reader.read(
            self.partition, OffsetRange(chosen[0].start, chosen[-1].until)
        ):
            end = stretch.start + len(stretch)
            for proof in chosen:
                counts[proof.start] += max(
                    0, min(end, proof.until) - max(stretch.start, proof.start)
                )
        for proof in chosen:
            self._counted_starts.add(proof.start)
            if counts[proof.start] < proof.messages:
                on_loss(
                    MessageLoss(
                        OffsetRange(proof.start, proof.until), proof.messages - counts[proof.start]
                    )
                )
