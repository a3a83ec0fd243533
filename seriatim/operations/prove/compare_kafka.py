"""Step 7 of verify: the ranges that Kafka still has are read again and compared with their
certificates.

What Kafka no longer has is noted, and is no difference: retention dropped it, or compaction, or the
topic was created again.

Next: operations/prove/verify.py looks at everything else; kafka/past_messages.py reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from seriatim.engine.files import Certificate, Digests
from seriatim.engine.offsets import Bounds, OffsetRange, Partition
from seriatim.ledger.model import Change
from seriatim.operations.prove.difference import Difference, DifferenceError
from seriatim.operations.prove.verify import Verification
from seriatim.ports import PastMessageReader

ProgressCallback = Callable[[int, int], None]


class ComparedRange(Struct, frozen=True):
    """What one entry says it read of one partition."""

    sequence: int
    change: Change
    certificate: Certificate

    @property
    def partition(self) -> Partition:
        """The partition that was read."""
        return self.change.partition

    @property
    def offset_range(self) -> OffsetRange:
        """The range of the certificate."""
        return OffsetRange(self.change.frontier, self.change.until)


class KafkaComparison:
    """Compares a stream with Kafka. Verify calls it before it signs off."""

    def __init__(
        self,
        past_reader: PastMessageReader,
        bounds: Mapping[Partition, Bounds],
        digests: Callable[[], Digests],
        progress: ProgressCallback | None = None,
    ) -> None:
        self.past_reader = past_reader
        self.bounds = bounds
        self.digests = digests
        self.progress = progress or (lambda _messages, _total: None)

    def __call__(self, verification: Verification) -> None:
        """Compare all ranges of entries that were not compared before.

        Raises `DifferenceError` for the first range that is not as its certificate says.
        """
        compared_sequence = verification.kafka_signed_sequence
        if verification.from_first_entry:
            compared_sequence = -1
        ranges = self._uncompared_ranges(verification, compared_sequence)
        ranges.sort(key=lambda compared_range: (compared_range.partition, compared_range.sequence))
        messages_total = sum(len(compared_range.offset_range) for compared_range in ranges)
        missing_ranges: dict[Partition, OffsetRange] = {}
        for compared_range in ranges:
            partition = compared_range.partition
            is_there = _is_in_kafka(compared_range, self.bounds.get(partition))
            if is_there and self._matches_certificate(compared_range, verification):
                self.progress(verification.result.compared_messages, messages_total)
                continue
            start = compared_range.offset_range.start
            if partition in missing_ranges:
                start = missing_ranges[partition].start
            missing_ranges[partition] = OffsetRange(start, compared_range.offset_range.end)
        for partition, missing in missing_ranges.items():
            verification.result.notes.append(
                f"{partition}: Kafka no longer has all of {missing}: not compared"
            )
        verification.kafka_signed_sequence = verification.result.sequence

    def _uncompared_ranges(
        self, verification: Verification, compared_sequence: int
    ) -> list[ComparedRange]:
        """The ranges of all entries after `compared_sequence` that have digests."""
        ranges: list[ComparedRange] = []
        for sequence in range(compared_sequence + 1, verification.result.sequence + 1):
            for change in verification.manifest(sequence).entry.changes:
                certificate = change.certificate
                if certificate is not None and certificate.digests:
                    ranges.append(ComparedRange(sequence, change, certificate))
        return ranges

    def _matches_certificate(
        self, compared_range: ComparedRange, verification: Verification
    ) -> bool:
        """Whether a range is as its certificate says; False if compaction removed messages of it.

        Raises `DifferenceError` if it is otherwise.
        """
        partition = compared_range.partition
        certificate = compared_range.certificate
        digests = self.digests()
        message_count = 0
        for batch in self.past_reader.read(partition, compared_range.offset_range):
            digests.update(batch)
            message_count += len(batch)
        kafka_digests = digests.finish()
        if kafka_digests == certificate.digests:
            verification.result.compared_messages += message_count
            return True
        # Compaction can only remove messages. If there are as many as before, they were changed.
        has_fewer = message_count < certificate.counts.messages
        if has_fewer and self.past_reader.is_compacted(partition.topic):
            return False
        raise DifferenceError(_digest_difference(compared_range, message_count, kafka_digests))


def _digest_difference(
    compared_range: ComparedRange, message_count: int, kafka_digests: dict[str, str]
) -> Difference:
    """What Kafka has is not what the certificate of a range says."""
    certificate = compared_range.certificate
    differing_names: list[str] = []
    for name, digest in kafka_digests.items():
        if digest != certificate.digests.get(name):
            differing_names.append(name)
    expected_count = f"{certificate.counts.messages} messages in {compared_range.offset_range}"
    return Difference(
        description=f"Kafka has other {', '.join(differing_names)} than were folded",
        partition=str(compared_range.partition),
        offset=compared_range.offset_range.start,
        sequence=compared_range.sequence,
        expected=f"{expected_count}, {_describe_digests(certificate.digests)}",
        found=f"{message_count} messages, {_describe_digests(kafka_digests)}",
        cause="Kafka's log was changed, or something else was folded than what it has",
        next="look at this range with `seriatim verify {stream} --at kafka --at output`",
    )


def _is_in_kafka(compared_range: ComparedRange, bounds: Bounds | None) -> bool:
    """Whether Kafka's log still reaches over all of a range."""
    if bounds is None or bounds.topic_id != compared_range.change.topic_id:
        return False
    offset_range = compared_range.offset_range
    return bounds.log_start <= offset_range.start and offset_range.end <= bounds.log_end


def _describe_digests(digests: dict[str, str]) -> str:
    return ", ".join(f"{name} {digest[:12]}" for name, digest in digests.items())
