"""Messages that were folded and are no longer in Kafka. A caller that reads messages again is told
of a loss before it gets the messages behind it.

The certificate of a slice says how many messages the slice had. If it had one at every offset, then
every hole that is there now is a loss. If the slice had holes when it was folded (transaction
markers, for example), a hole alone proves nothing. Then all messages of the slice are counted
before anything behind its first hole is returned: only the count shows whether more is missing now.
Messages vanish by compaction and by deletion.

Next: ledger/history.py has the proofs; operations/inspect/session_replay.py refuses a loss, and
operations/inspect/replay.py reports it.
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
"""How many offsets are counted at a time: several small slices are counted in one reading."""


class MessageLoss(Struct, frozen=True):
    """Messages of a range that are gone."""

    offset_range: OffsetRange
    missing_messages: int

    def __str__(self) -> str:
        amount = "the messages"
        if self.missing_messages < len(self.offset_range):
            amount = f"{self.missing_messages} of the messages"
        return (
            f"{amount} of {self.offset_range} are not in Kafka any more"
            " (compacted away, or deleted)"
        )


class LossDetector:
    """Reads messages of one partition again, and finds those that Kafka has lost."""

    def __init__(
        self, partition: Partition, proofs: Sequence[SliceProof], past_reader: PastMessageReader
    ) -> None:
        self.partition = partition
        self.proofs = proofs
        """What each slice folded, by rising offset."""
        self.past_reader = past_reader
        self._starts = [proof.start for proof in proofs]
        self._counted_starts: set[int] = set()
        """Where the slices begin that had holes and were counted."""

    def read_and_detect(
        self, offset_range: OffsetRange, on_loss: Callable[[MessageLoss], None]
    ) -> Iterator[MessageBatch]:
        """The messages of a range that are still there.

        `on_loss` is called with each loss, before the messages behind the loss are returned.
        """
        offset = offset_range.start
        is_complete = False
        while not is_complete:
            is_complete = True
            for batch in self._batches_and_end(OffsetRange(offset, offset_range.end)):
                hole = OffsetRange(offset, batch.start)
                if self._needs_count(hole):
                    is_complete = False
                    break
                for lost in self._lost_ranges(hole):
                    on_loss(MessageLoss(lost, len(lost)))
                if len(batch):
                    yield batch
                offset = batch.start + len(batch)
            if not is_complete:
                # The reader can read only one range at a time. So the reading above is given up
                # for the count, and begins again where it stopped.
                self._count_messages(offset, on_loss)

    def _batches_and_end(self, offset_range: OffsetRange) -> Iterator[MessageBatch]:
        """The messages of a range, and an empty batch at its end, so that a last hole shows."""
        if len(offset_range):
            yield from self.past_reader.read(self.partition, offset_range)
        yield MessageBatch(offset_range.end, [], [], [])

    def _proofs_from(self, offset: int) -> Iterator[SliceProof]:
        """The proofs from the one on that may contain an offset."""
        first_index = max(0, bisect_right(self._starts, offset) - 1)
        yield from self.proofs[first_index:]

    def _proofs_of_hole(self, hole: OffsetRange) -> Iterator[SliceProof]:
        """The slices that a hole lies in."""
        if not len(hole):
            return
        for proof in self._proofs_from(hole.start):
            if proof.start >= hole.end:
                return
            if proof.until > hole.start:
                yield proof

    def _has_to_be_counted(self, proof: SliceProof) -> bool:
        return not proof.is_dense and proof.start not in self._counted_starts

    def _needs_count(self, hole: OffsetRange) -> bool:
        """Whether only a count can show what a hole means."""
        return any(self._has_to_be_counted(proof) for proof in self._proofs_of_hole(hole))

    def _lost_ranges(self, hole: OffsetRange) -> Iterator[OffsetRange]:
        """What of a hole was there when it was folded."""
        for proof in self._proofs_of_hole(hole):
            if proof.is_dense:
                start = max(proof.start, hole.start)
                end = min(proof.until, hole.end)
                yield OffsetRange(start, end)

    def _count_messages(self, start: int, on_loss: Callable[[MessageLoss], None]) -> None:
        """Count the messages of the next slices that had holes, and report what is missing."""
        proofs = self._next_proofs_to_count(start)
        counts = [0] * len(proofs)
        counted_range = OffsetRange(proofs[0].start, proofs[-1].until)
        for batch in self.past_reader.read(self.partition, counted_range):
            batch_end = batch.start + len(batch)
            for i, proof in enumerate(proofs):
                overlap = min(batch_end, proof.until) - max(batch.start, proof.start)
                counts[i] += max(0, overlap)
        for proof, count in zip(proofs, counts, strict=True):
            self._counted_starts.add(proof.start)
            if count < proof.messages:
                slice_range = OffsetRange(proof.start, proof.until)
                on_loss(MessageLoss(slice_range, proof.messages - count))

    def _next_proofs_to_count(self, start: int) -> list[SliceProof]:
        """Adjacent slices from an offset on that had holes, as many as are counted at a time."""
        proofs: list[SliceProof] = []
        for proof in self._proofs_from(start):
            if proofs:
                is_adjacent = proof.start == proofs[-1].until
                if not is_adjacent or proof.until - proofs[0].start > AT_ONCE:
                    break
            if proof.until > start and self._has_to_be_counted(proof):
                proofs.append(proof)
        return proofs
