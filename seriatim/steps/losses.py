"""Losses: messages that were folded and are not in Kafka any more. Whoever folds again hears of them before the rest.

A certificate says how many messages its slice had. Where it had one at every offset, a hole of now is a loss. Where
there were holes then (markers of transactions, say), the slice is counted to its end before anything behind a hole of
it is told: only that shows whether more is missing now. Compaction does that, and deleted records.

Next room: core/history.py has the proofs; steps/retrace.py refuses, steps/replay.py tells.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from seriatim.core.history import Proof
from seriatim.core.message import Stretch
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.ports import Reread

AT_ONCE = 50_000
"""Offsets that are counted at a time, at least, if there are as many."""


class Loss(Struct, frozen=True):
    """Messages of a range that are gone."""

    whole: OffsetRange
    missing: int

    def __str__(self) -> str:
        of = f"{self.missing} of the messages" if self.missing < len(self.whole) else "the messages"
        return f"{of} of {self.whole} are not in Kafka any more (compacted away, or deleted)"


class Losses:
    """What one partition lost of what was folded."""

    def __init__(self, partition: Partition, proofs: Sequence[Proof], reread: Reread) -> None:
        self.partition, self.proofs, self.reread = partition, proofs, reread
        self._starts = [proof.start for proof in proofs]
        self._counted: set[int] = set()
        """Slices that had holes and were counted."""

    def read(self, whole: OffsetRange, lost: Callable[[Loss], None]) -> Iterator[Stretch]:
        """The messages of a range that are there; `lost` hears what is not, before what comes after it."""
        at, doubtful = whole.start, True
        while doubtful:
            doubtful = False
            for stretch in self._and_end(OffsetRange(at, whole.end)):
                hole = OffsetRange(at, stretch.start)
                if doubtful := self._is_doubtful(hole):
                    break
                for part in self._dense(hole):
                    lost(Loss(part, len(part)))
                if len(stretch):
                    yield stretch
                at = stretch.start + len(stretch)
            if doubtful:  # a read of its own: the reader goes one way at a time
                self._count(at, lost)

    def _and_end(self, whole: OffsetRange) -> Iterator[Stretch]:
        if len(whole):
            yield from self.reread.read(self.partition, whole)
        yield Stretch(whole.end, [], [], [])

    def _touched(self, hole: OffsetRange) -> Iterator[Proof]:
        """Slices that a hole lies in."""
        for proof in self.proofs[max(0, bisect_right(self._starts, hole.start) - 1) :]:
            if proof.start >= hole.end:
                return
            if proof.until > hole.start and len(hole):
                yield proof

    def _is_doubtful(self, hole: OffsetRange) -> bool:
        return any(not proof.is_dense and proof.start not in self._counted for proof in self._touched(hole))

    def _dense(self, hole: OffsetRange) -> Iterator[OffsetRange]:
        """What of a hole was there when it was folded."""
        for proof in self._touched(hole):
            if proof.is_dense:
                yield OffsetRange(max(proof.start, hole.start), min(proof.until, hole.end))

    def _count(self, at: int, lost: Callable[[Loss], None]) -> None:
        """Count the next slices with holes, from their first offset to their last."""
        chosen: list[Proof] = []
        for proof in self.proofs[max(0, bisect_right(self._starts, at) - 1) :]:
            if chosen and (proof.start != chosen[-1].until or proof.until - chosen[0].start > AT_ONCE):
                break
            if proof.until > at and not proof.is_dense and proof.start not in self._counted:
                chosen.append(proof)
        counts = dict.fromkeys((proof.start for proof in chosen), 0)
        for stretch in self.reread.read(self.partition, OffsetRange(chosen[0].start, chosen[-1].until)):
            end = stretch.start + len(stretch)
            for proof in chosen:
                counts[proof.start] += max(0, min(end, proof.until) - max(stretch.start, proof.start))
        for proof in chosen:
            self._counted.add(proof.start)
            if counts[proof.start] < proof.messages:
                lost(Loss(OffsetRange(proof.start, proof.until), proof.messages - counts[proof.start]))
