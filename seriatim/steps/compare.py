"""Compare: the ranges that Kafka still has, read again and held against their certificates. Step 7 of verify.

What Kafka has no longer is said and no difference: retention, another life of the topic, compaction.

Next room: steps/verify.py looks at everything else; adapters/consumer.py reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct

from seriatim.core.difference import Difference, Differs
from seriatim.core.ledger import Change
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.slice import Bounds
from seriatim.ports import Digests, Reread
from seriatim.steps.verify import Verifying

Progress = Callable[[int, int], None]


class Range(Struct, frozen=True):
    """What one entry says it read of one partition."""

    sequence: int
    change: Change

    @property
    def whole(self) -> OffsetRange:
        """The range of its certificate."""
        return OffsetRange(self.change.frontier, self.change.until)


class Comparing:
    """Called by verify before it signs off."""

    def __init__(
        self,
        reread: Reread,
        bounds: Mapping[Partition, Bounds],
        digests: Callable[[], Digests],
        progress: Progress | None = None,
    ) -> None:
        self.reread, self.bounds, self.digests = reread, bounds, digests
        self.progress = progress or (lambda _done, _total: None)

    def __call__(self, verifying: Verifying) -> None:
        """All ranges of entries that were not compared before."""
        since = -1 if verifying.everything else verifying.kafka_signed
        ranges = list(self._ranges(verifying, since))
        total, gone = sum(len(one.whole) for one in ranges), dict[Partition, OffsetRange]()
        for one in sorted(ranges, key=lambda each: (each.change.partition, each.sequence)):
            partition = one.change.partition
            if _is_there(one, self.bounds.get(partition)) and self._same(one, verifying):
                self.progress(verifying.done.compared, total)
            else:
                before = gone.get(partition)
                gone[partition] = OffsetRange(before.start, one.whole.end) if before else one.whole
        for partition, whole in gone.items():
            verifying.done.notes.append(f"{partition}: Kafka no longer has all of {whole}: not compared")
        verifying.kafka_signed = verifying.done.sequence

    def _ranges(self, verifying: Verifying, since: int) -> Iterator[Range]:
        for sequence in range(since + 1, verifying.done.sequence + 1):
            for change in verifying.manifest(sequence).entry.changes:
                if change.certificate is not None and change.certificate.digests:
                    yield Range(sequence, change)

    def _same(self, one: Range, verifying: Verifying) -> bool:
        """Whether a range is as its certificate says; False if compaction thinned it out since."""
        certificate, made, count = one.change.certificate, self.digests(), 0
        for stretch in self.reread.read(one.change.partition, one.whole):
            made.update(stretch)
            count += len(stretch)
        found = made.finish()
        if certificate is None or found == certificate.digests:
            verifying.done.compared += count
            return True
        if count < certificate.counts.messages and self.reread.compacts(one.change.partition.topic):
            return False
        differing = ", ".join(name for name in found if found[name] != certificate.digests.get(name))
        raise Differs(
            Difference(
                what=f"Kafka has other {differing} than were folded",
                partition=str(one.change.partition),
                offset=one.whole.start,
                sequence=one.sequence,
                expected=f"{certificate.counts.messages} messages in {one.whole}, {_shown(certificate.digests)}",
                found=f"{count} messages, {_shown(found)}",
                cause="Kafka's log was changed, or something else was folded than what it has",
                next="look at this range with `seriatim verify {stream} --at kafka --at output`",
            )
        )


def _is_there(one: Range, seen: Bounds | None) -> bool:
    if seen is None or seen.topic_id != one.change.topic_id:
        return False
    return seen.log_start <= one.whole.start and one.whole.end <= seen.log_end


def _shown(digests: dict[str, str]) -> str:
    return ", ".join(f"{name} {digest[:12]}" for name, digest in digests.items())
