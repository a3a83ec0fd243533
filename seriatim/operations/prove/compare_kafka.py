"""Compare: the ranges that Kafka still has, read again and held against their certificates. Step 7
of verify.

What Kafka has no longer is said and no difference: retention, another life of the topic,
compaction.

Next room: operations/prove/verify.py looks at everything else; kafka/consumer.py reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.ledger.model import Change
from seriatim.operations.prove.difference import Difference, DifferenceError
from seriatim.operations.prove.verify import Verification
from seriatim.operations.slicing import Bounds
from seriatim.ports import Digests, PastMessageReader

ProgressCallback = Callable[[int, int], None]


class ComparedRange(Struct, frozen=True):
    """What one entry says it read of one partition."""

    sequence: int
    change: Change

    @property
    def offset_range(self) -> OffsetRange:
        """The range of its certificate."""
        return OffsetRange(self.change.frontier, self.change.until)


class KafkaComparison:
    """Called by verify before it signs off."""

    def __init__(
        self,
        past_reader: PastMessageReader,
        bounds: Mapping[Partition, Bounds],
        digests: Callable[[], Digests],
        progress: ProgressCallback | None = None,
    ) -> None:
        self.past_reader, self.bounds, self.digests = past_reader, bounds, digests
        self.progress = progress or (lambda _done, _total: None)

    def __call__(self, verification: Verification) -> None:
        """All ranges of entries that were not compared before."""
        since = -1 if verification.from_first_entry else verification.kafka_signed_sequence
        ranges = list(self._uncompared_ranges(verification, since))
        total, gone = sum(len(one.offset_range) for one in ranges), dict[Partition, OffsetRange]()
        for one in sorted(ranges, key=lambda each: (each.change.partition, each.sequence)):
            partition = one.change.partition
            if _is_in_kafka(one, self.bounds.get(partition)) and self._matches_certificate(
                one, verification
            ):
                self.progress(verification.result.compared_messages, total)
            else:
                before = gone.get(partition)
                gone[partition] = (
                    OffsetRange(before.start, one.offset_range.end) if before else one.offset_range
                )
        for partition, whole in gone.items():
            verification.result.notes.append(
                f"{partition}: Kafka no longer has all of {whole}: not compared"
            )
        verification.kafka_signed_sequence = verification.result.sequence

    def _uncompared_ranges(self, verification: Verification, since: int) -> Iterator[ComparedRange]:
        for sequence in range(since + 1, verification.result.sequence + 1):
            for change in verification.manifest(sequence).entry.changes:
                if change.certificate is not None and change.certificate.digests:
                    yield ComparedRange(sequence, change)

    def _matches_certificate(
        self, compared_range: ComparedRange, verification: Verification
    ) -> bool:
        """Whether a range is as its certificate says; False if compaction thinned it out since."""
        certificate, made, count = compared_range.change.certificate, self.digests(), 0
        for stretch in self.past_reader.read(
            compared_range.change.partition, compared_range.offset_range
        ):
            made.update(stretch)
            count += len(stretch)
        found = made.finish()
        if certificate is None or found == certificate.digests:
            verification.result.compared_messages += count
            return True
        if count < certificate.counts.messages and self.past_reader.is_compacted(
            compared_range.change.partition.topic
        ):
            return False
        differing = ", ".join(
            name for name in found if found[name] != certificate.digests.get(name)
        )
        raise DifferenceError(
            Difference(
                description=f"Kafka has other {differing} than were folded",
                partition=str(compared_range.change.partition),
                offset=compared_range.offset_range.start,
                sequence=compared_range.sequence,
                expected=f"{certificate.counts.messages} messages in {compared_range.offset_range}, {_describe_digests(certificate.digests)}",
                found=f"{count} messages, {_describe_digests(found)}",
                cause="Kafka's log was changed, or something else was folded than what it has",
                next="look at this range with `seriatim verify {stream} --at kafka --at output`",
            )
        )


def _is_in_kafka(compared_range: ComparedRange, bounds: Bounds | None) -> bool:
    if bounds is None or bounds.topic_id != compared_range.change.topic_id:
        return False
    return (
        bounds.log_start <= compared_range.offset_range.start
        and compared_range.offset_range.end <= bounds.log_end
    )


def _describe_digests(digests: dict[str, str]) -> str:
    return ", ".join(f"{name} {digest[:12]}" for name, digest in digests.items())
