"""The validator: one judge of messages, wherever they are looked at: in a raw capture, in Kafka, in
the output. Pure.

Each session begins by a snapshot, its sequence has no hole, repeat or disorder, and no offset is
missing. `Validator` names the first place where each is wrong; `parting` the first offset at which
two views differ.

Next room: operations/prove/verify_at.py makes sightings of messages and records; fold.py does what
a tier says instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from msgspec import Struct, field

from seriatim.engine.offsets import OffsetRange, Partition

IsExplained = Callable[[Partition, OffsetRange], bool]
"""Whether certificates say why the offsets of a hole are missing."""
FaultLevel = Literal["error", "warning"]


class ObservedMessage(Struct, frozen=True, kw_only=True, gc=False):
    """One message as it was seen somewhere."""

    offset: int
    session: str | None = None
    sequence: int | None = None
    is_snapshot: bool | None = False
    """None: it cannot be told from what is there."""
    poison: str = ""
    content_hash: int | None = None
    """A hash of key and value, where they are there."""
    must_give_record: bool = True
    """Whether it must have left a record, if nothing was wrong with it."""
    is_session_end: bool = False
    """Records that take rows back: the end of a session, or a snapshot without rows."""


class ValidationFault(Struct, kw_only=True):
    """The first place where something is wrong, and how often it is."""

    kind: str
    partition: Partition
    offset: int
    session: str | None = None
    expected: str = ""
    found: str = ""
    level: FaultLevel = "error"
    count: int = 1


class _ValidatedSession(Struct):
    """A session so far."""

    last_sequence: int | None = None
    snapshot_sequence: int | None = None
    missing_sequences: list[tuple[int, int]] = field(default_factory=list)
    """Sequences that were passed over, as half-open ranges."""

    def take_missing(self, sequence: int) -> bool:
        """Whether a sequence was passed over before; it is there now."""
        for number, (start, end) in enumerate(self.missing_sequences):
            if start <= sequence < end:
                parts = [(start, sequence), (sequence + 1, end)]
                self.missing_sequences[number : number + 1] = [
                    part for part in parts if part[0] < part[1]
                ]
                return True
        return False


class Validator:
    """One view's messages, partition by partition, in the order in which they are there."""

    def __init__(
        self,
        *,
        is_contiguous: bool,
        has_snapshots: bool = True,
        is_explained: IsExplained | None = None,
    ) -> None:
        self.is_contiguous, self.has_snapshots = is_contiguous, has_snapshots
        self.is_explained = is_explained or (lambda _partition, _hole: False)
        self.faults: dict[tuple[str, FaultLevel], ValidationFault] = {}
        self.messages = 0

    def validate(
        self, partition: Partition, messages: Iterable[ObservedMessage]
    ) -> Iterator[tuple[ObservedMessage, bool]]:
        """Each message, and whether it should have an effect: nothing is wrong with it that could
        take it away.
        """
        expected: int | None = None
        sessions: dict[str, _ValidatedSession] = {}
        from_birth = False
        for seen in messages:
            self.messages += 1
            if expected is None:
                from_birth = seen.offset == 0
            elif self.is_contiguous and seen.offset != expected:
                self._check_offset(partition, expected, seen)
            expected = seen.offset + 1 if expected is None else max(expected, seen.offset + 1)
            if seen.poison or seen.session is None:
                self._record_fault(
                    "poison",
                    partition,
                    seen,
                    "a message that can be read",
                    seen.poison or "no readable key",
                )
                yield seen, False
                continue
            yield seen, self._check_session(partition, sessions, seen, from_birth=from_birth)

    def _check_offset(self, partition: Partition, expected: int, message: ObservedMessage) -> None:
        if message.offset < expected:
            self._record_fault(
                "offset again", partition, message, f"offset {expected}", f"offset {message.offset}"
            )
            return
        hole = OffsetRange(expected, message.offset)
        known = self.is_explained(partition, hole)
        found = f"offset {message.offset}" + (" (explained when it was folded)" if known else "")
        self._record_fault(
            "gap", partition, message, f"offset {expected}", found, "warning" if known else "error"
        )

    def _check_session(
        self,
        partition: Partition,
        sessions: dict[str, _ValidatedSession],
        message: ObservedMessage,
        *,
        from_birth: bool,
    ) -> bool:
        """Judge a message by its session; whether it counts."""
        session = sessions.get(message.session or "")
        headless = (
            session is None
            and message.is_snapshot is False
            and self.has_snapshots
            and not message.is_session_end
        )
        if headless:
            level: FaultLevel = "error" if from_birth else "warning"
            self._record_fault(
                "headless", partition, message, "a snapshot first", "another message", level
            )
        if session is None:
            session = sessions[message.session or ""] = _ValidatedSession()
        counts = self._check_sequence(partition, session, message)
        if headless or (
            session.snapshot_sequence is None
            and self.has_snapshots
            and message.is_snapshot is False
        ):
            return False
        return counts

    def _check_sequence(
        self, partition: Partition, session: _ValidatedSession, message: ObservedMessage
    ) -> bool:
        sequence, last = message.sequence, session.last_sequence
        if message.is_snapshot:
            if sequence is not None and last is not None and sequence > last + 1:
                closed = f"sequence {sequence}, closed by this snapshot"
                self._record_fault(
                    "sequence gap", partition, message, f"sequence {last + 1}", closed, "warning"
                )
            session.last_sequence, session.snapshot_sequence, session.missing_sequences = (
                sequence,
                -1 if sequence is None else sequence,
                [],
            )
            return True
        if sequence is None or last is None:
            session.last_sequence = sequence
            return True
        if sequence == last + 1:
            session.last_sequence = sequence
            return True
        return self._check_out_of_sequence(partition, session, message, sequence, last)

    def _check_out_of_sequence(
        self,
        partition: Partition,
        session: _ValidatedSession,
        message: ObservedMessage,
        sequence: int,
        last_sequence: int,
    ) -> bool:
        level: FaultLevel = "warning" if message.is_snapshot is None else "error"
        expected, found = f"sequence {last_sequence + 1}", f"sequence {sequence}"
        if sequence > last_sequence:
            session.missing_sequences.append((last_sequence + 1, sequence))
            session.last_sequence = sequence
            self._record_fault("sequence gap", partition, message, expected, found, level)
            return True
        if message.is_session_end:
            return True
        before = session.snapshot_sequence is not None and sequence < session.snapshot_sequence
        kind = "disorder" if session.take_missing(sequence) or before else "repeat"
        self._record_fault(kind, partition, message, expected, found, level)
        return False

    def _record_fault(
        self,
        kind: str,
        partition: Partition,
        message: ObservedMessage,
        expected: str,
        found: str,
        level: FaultLevel = "error",
    ) -> None:
        known = self.faults.get((kind, level))
        if known is not None:
            known.count += 1
            return
        self.faults[kind, level] = ValidationFault(
            kind=kind,
            partition=partition,
            offset=message.offset,
            session=message.session,
            expected=expected,
            found=found,
            level=level,
        )


class PartitionView(Struct, kw_only=True):
    """One partition as one view has it: what is there, in which range, by offset."""

    name: str
    offset_range: OffsetRange
    messages: dict[int, ObservedMessage]
    effective_offsets: set[int] = field(default_factory=set)
    """Offsets whose messages should have an effect."""
    quarantined_offsets: set[int] = field(default_factory=set)
    """Output: offsets of messages set aside."""
    headless_ranges: dict[str, list[OffsetRange]] = field(default_factory=dict)
    """Output: where sessions waited for a snapshot, because messages were lost that may have been
    theirs.
    """
    is_complete: bool = True
    """Whether every message is there: not so in the output, where only those with an effect left a
    record.
    """


class FirstDifference(Struct, frozen=True, kw_only=True):
    """The first offset at which two views differ."""

    partition: Partition
    offset: int
    description: str
    views: Mapping[str, str]
    """What each of them has there."""


def first_difference(
    partition: Partition, views: list[PartitionView], *, must_give_records: bool
) -> FirstDifference | None:
    """Where views of a partition part. `must_give`: a message without fault always leaves a record."""
    found: list[FirstDifference] = []
    for number, one in enumerate(views):
        for two in views[number + 1 :]:
            first = _first_difference_of(partition, one, two, must_give_records=must_give_records)
            found += [first] if first else []
    return min(found, key=lambda each: each.offset, default=None)


def _first_difference_of(
    partition: Partition, left: PartitionView, right: PartitionView, *, must_give_records: bool
) -> FirstDifference | None:
    start, end = (
        max(left.offset_range.start, right.offset_range.start),
        min(left.offset_range.end, right.offset_range.end),
    )
    offsets = sorted(
        offset
        for offset in {
            *left.messages,
            *right.messages,
            *left.quarantined_offsets,
            *right.quarantined_offsets,
        }
        if start <= offset < end
    )
    for offset in offsets:
        what = _describe_difference(left, right, offset, must_give_records=must_give_records)
        if what:
            views = {view.name: _describe_message(view, offset) for view in (left, right)}
            return FirstDifference(
                partition=partition, offset=offset, description=what, views=views
            )
    return None


def _describe_difference(
    left_view: PartitionView, right_view: PartitionView, offset: int, *, must_give_records: bool
) -> str:
    """What differs at an offset; empty if nothing does."""
    left, right = left_view.messages.get(offset), right_view.messages.get(offset)
    if left_view.is_complete and right_view.is_complete:
        if left is None or right is None:
            return "a message that only one of them has"
        return "" if left.content_hash == right.content_hash else "another key or value"
    return _describe_output_difference(
        *((left_view, right_view) if left_view.is_complete else (right_view, left_view)),
        offset,
        must_give_records=must_give_records,
    )


def _describe_output_difference(
    input_view: PartitionView, output: PartitionView, offset: int, *, must_give_records: bool
) -> str:
    """What differs between messages and the records that are left of them."""
    message, record = input_view.messages.get(offset), output.messages.get(offset)
    if message is None:
        return f"the output has a message that {input_view.name} has not"
    if record is None:
        waits = any(
            offset in whole for whole in output.headless_ranges.get(message.session or "", ())
        )
        lacks = (
            must_give_records
            and offset in input_view.effective_offsets
            and message.must_give_record
            and offset not in output.quarantined_offsets
            and not waits
        )
        return "the output has no record of a message without fault" if lacks else ""
    if record.session != message.session:
        return "another session"
    if record.is_session_end:
        return ""
    unlike = record.is_snapshot is not None and record.is_snapshot != message.is_snapshot
    return (
        "another sequence"
        if record.sequence != message.sequence
        else "a snapshot only in one"
        if unlike
        else ""
    )


def _describe_message(view: PartitionView, offset: int) -> str:
    seen = view.messages.get(offset)
    if seen is None:
        return "set aside" if offset in view.quarantined_offsets else "nothing"
    kind = "poison" if seen.poison else "a snapshot" if seen.is_snapshot else "a message"
    return f"{kind} of session {seen.session}, sequence {seen.sequence}"
