"""The validator: judges messages by the same rules in every view: a raw capture, Kafka, the output.

A session begins by a snapshot, its sequence has no hole, repeat or disorder, and no offset is
missing. `Validator` finds the first place where each of these is wrong; `first_difference` finds
the first offset at which two views differ. This module is pure.

Next: operations/prove/verify_at.py reads messages and records as views; engine/fold.py does what a
tier says instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Literal

from msgspec import Struct, field

from seriatim.engine.offsets import OffsetRange, Partition

IsExplained = Callable[[Partition, OffsetRange], bool]
"""Whether certificates say why the offsets of a hole are missing."""
FaultLevel = Literal["error", "warning"]


class ObservedMessage(Struct, frozen=True, kw_only=True, gc=False):
    """One message as a view shows it."""

    offset: int
    session: str | None = None
    sequence: int | None = None
    is_snapshot: bool | None = False
    """None: the view does not show it."""
    poison: str = ""
    """Why it cannot be read; empty: it can."""
    has_no_effect: bool = False
    """Whether it concerns no session, as a tombstone that the decoder passes over."""
    content_hash: int | None = None
    """A hash of key and value, if the view has them."""
    must_give_record: bool = True
    """Whether it must have left a record, if nothing was wrong with it."""
    is_session_end: bool = False
    """Records that delete rows: the end of a session, or a snapshot without rows."""


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
    """A session up to the present message."""

    last_sequence: int | None = None
    snapshot_sequence: int | None = None
    missing_sequences: list[tuple[int, int]] = field(default_factory=list)
    """Sequences that were passed over, as half-open ranges."""

    def take_missing(self, sequence: int) -> bool:
        """Whether a sequence was passed over before. It counts as present from now on."""
        for i, (start, end) in enumerate(self.missing_sequences):
            if start <= sequence < end:
                remaining = [(start, sequence), (sequence + 1, end)]
                non_empty = [(low, high) for low, high in remaining if low < high]
                self.missing_sequences[i : i + 1] = non_empty
                return True
        return False


class Validator:
    """Judges the messages of one view, partition by partition, in the order of the view."""

    def __init__(
        self,
        *,
        is_contiguous: bool,
        has_snapshots: bool = True,
        is_explained: IsExplained | None = None,
    ) -> None:
        self.is_contiguous = is_contiguous
        self.has_snapshots = has_snapshots
        self.is_explained = is_explained or (lambda _partition, _hole: False)
        self.faults: dict[tuple[str, FaultLevel], ValidationFault] = {}
        self.messages = 0

    def validate(
        self, partition: Partition, messages: Iterable[ObservedMessage]
    ) -> Iterator[tuple[ObservedMessage, bool]]:
        """Each message, and whether it should have an effect: no fault takes it away."""
        expected_offset: int | None = None
        sessions: dict[str, _ValidatedSession] = {}
        from_birth = False
        for message in messages:
            self.messages += 1
            next_offset = message.offset + 1
            if expected_offset is None:
                from_birth = message.offset == 0
                expected_offset = next_offset
            else:
                if self.is_contiguous and message.offset != expected_offset:
                    self._check_offset(partition, expected_offset, message)
                expected_offset = max(expected_offset, next_offset)
            if message.has_no_effect:
                yield message, False
                continue
            if message.poison or message.session is None:
                self._record_fault(
                    "poison",
                    partition,
                    message,
                    "a message that can be read",
                    message.poison or "no readable key",
                )
                yield message, False
                continue
            has_effect = self._check_session(partition, sessions, message, from_birth=from_birth)
            yield message, has_effect

    def _check_offset(self, partition: Partition, expected: int, message: ObservedMessage) -> None:
        """Record an offset that comes again, or a hole before it."""
        expected_text = f"offset {expected}"
        actual = f"offset {message.offset}"
        if message.offset < expected:
            self._record_fault("offset again", partition, message, expected_text, actual)
            return
        level: FaultLevel = "error"
        if self.is_explained(partition, OffsetRange(expected, message.offset)):
            level = "warning"
            actual += " (explained when it was folded)"
        self._record_fault("gap", partition, message, expected_text, actual, level)

    def _check_session(
        self,
        partition: Partition,
        sessions: dict[str, _ValidatedSession],
        message: ObservedMessage,
        *,
        from_birth: bool,
    ) -> bool:
        """Judge a message by its session. Returns whether it should have an effect.

        `from_birth`: the view has the partition from its first offset on, so no snapshot can be
        missing legitimately.
        """
        session_name = message.session or ""
        needs_snapshot = self.has_snapshots and message.is_snapshot is False
        session = sessions.get(session_name)
        is_headless = False
        if session is None:
            session = sessions[session_name] = _ValidatedSession()
            is_headless = needs_snapshot and not message.is_session_end
        if is_headless:
            level: FaultLevel = "error" if from_birth else "warning"
            self._record_fault(
                "headless", partition, message, "a snapshot first", "another message", level
            )
        has_effect = self._check_sequence(partition, session, message)
        if is_headless or (needs_snapshot and session.snapshot_sequence is None):
            return False
        return has_effect

    def _check_sequence(
        self, partition: Partition, session: _ValidatedSession, message: ObservedMessage
    ) -> bool:
        """Judge a message by its sequence. Returns whether it should have an effect."""
        sequence = message.sequence
        last_sequence = session.last_sequence
        if message.is_snapshot:
            self._check_snapshot_sequence(partition, session, message)
            session.last_sequence = sequence
            session.snapshot_sequence = -1 if sequence is None else sequence
            session.missing_sequences = []
            return True
        if sequence is None or last_sequence is None or sequence == last_sequence + 1:
            session.last_sequence = sequence
            return True
        return self._check_out_of_sequence(partition, session, message, sequence, last_sequence)

    def _check_snapshot_sequence(
        self, partition: Partition, session: _ValidatedSession, message: ObservedMessage
    ) -> None:
        """Record a hole before a snapshot, as a warning: the snapshot closes it."""
        sequence = message.sequence
        last_sequence = session.last_sequence
        if sequence is None or last_sequence is None or sequence <= last_sequence + 1:
            return
        expected = f"sequence {last_sequence + 1}"
        actual = f"sequence {sequence}, closed by this snapshot"
        self._record_fault("sequence gap", partition, message, expected, actual, "warning")

    def _check_out_of_sequence(
        self,
        partition: Partition,
        session: _ValidatedSession,
        message: ObservedMessage,
        sequence: int,
        last_sequence: int,
    ) -> bool:
        """Record a hole, a repeat or a disorder. Returns whether the message has an effect."""
        # Where snapshots do not show, a snapshot may have closed the hole.
        level: FaultLevel = "warning" if message.is_snapshot is None else "error"
        expected = f"sequence {last_sequence + 1}"
        actual = f"sequence {sequence}"
        if sequence > last_sequence:
            session.missing_sequences.append((last_sequence + 1, sequence))
            session.last_sequence = sequence
            self._record_fault("sequence gap", partition, message, expected, actual, level)
            return True
        if message.is_session_end:
            return True
        was_missing = session.take_missing(sequence)
        snapshot_sequence = session.snapshot_sequence
        is_before_snapshot = snapshot_sequence is not None and sequence < snapshot_sequence
        kind = "disorder" if was_missing or is_before_snapshot else "repeat"
        self._record_fault(kind, partition, message, expected, actual, level)
        return False

    def _record_fault(
        self,
        kind: str,
        partition: Partition,
        message: ObservedMessage,
        expected: str,
        actual: str,
        level: FaultLevel = "error",
    ) -> None:
        """Record the first fault of a kind, and count the others."""
        fault = self.faults.get((kind, level))
        if fault is not None:
            fault.count += 1
            return
        self.faults[kind, level] = ValidationFault(
            kind=kind,
            partition=partition,
            offset=message.offset,
            session=message.session,
            expected=expected,
            found=actual,
            level=level,
        )


class PartitionView(Struct, kw_only=True):
    """One partition as one view shows it: its messages by offset, and their range."""

    name: str
    offset_range: OffsetRange
    messages: dict[int, ObservedMessage]
    effective_offsets: set[int] = field(default_factory=set)
    """Offsets whose messages should have an effect."""
    quarantined_offsets: set[int] = field(default_factory=set)
    """Output: offsets of quarantined messages."""
    headless_ranges: dict[str, list[OffsetRange]] = field(default_factory=dict)
    """Output: where sessions waited for a snapshot, because messages were lost that may have been
    theirs.
    """
    is_complete: bool = True
    """Whether every message shows. It is not so in the output, where only those with an effect left
    a record.
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
    """The first difference of any two views of a partition; None if there is none.

    `must_give_records`: a message without fault always leaves a record.
    """
    earliest: FirstDifference | None = None
    for left, right in combinations(views, 2):
        difference = _first_difference_of(
            partition, left, right, must_give_records=must_give_records
        )
        if difference is None:
            continue
        if earliest is None or difference.offset < earliest.offset:
            earliest = difference
    return earliest


def _first_difference_of(
    partition: Partition, left: PartitionView, right: PartitionView, *, must_give_records: bool
) -> FirstDifference | None:
    start = max(left.offset_range.start, right.offset_range.start)
    end = min(left.offset_range.end, right.offset_range.end)
    offsets = {
        *left.messages,
        *right.messages,
        *left.quarantined_offsets,
        *right.quarantined_offsets,
    }
    for offset in sorted(offsets):
        if not start <= offset < end:
            continue
        description = _describe_difference(left, right, offset, must_give_records=must_give_records)
        if description:
            views = {view.name: _describe_message(view, offset) for view in (left, right)}
            return FirstDifference(
                partition=partition, offset=offset, description=description, views=views
            )
    return None


def _describe_difference(
    left_view: PartitionView, right_view: PartitionView, offset: int, *, must_give_records: bool
) -> str:
    """What differs at an offset; empty if nothing does."""
    if not right_view.is_complete:
        return _describe_output_difference(
            left_view, right_view, offset, must_give_records=must_give_records
        )
    if not left_view.is_complete:
        return _describe_output_difference(
            right_view, left_view, offset, must_give_records=must_give_records
        )
    left = left_view.messages.get(offset)
    right = right_view.messages.get(offset)
    if left is None or right is None:
        return "a message that only one of them has"
    if left.content_hash != right.content_hash:
        return "another key or value"
    return ""


def _describe_output_difference(
    input_view: PartitionView, output: PartitionView, offset: int, *, must_give_records: bool
) -> str:
    """What differs between a message and the records that it left; empty if nothing does."""
    message = input_view.messages.get(offset)
    record = output.messages.get(offset)
    description = ""
    if message is None:
        description = f"the output has a message that {input_view.name} has not"
    elif record is None:
        should_have_record = must_give_records and message.must_give_record
        has_effect = offset in input_view.effective_offsets
        if should_have_record and has_effect and not _is_set_aside(output, message):
            description = "the output has no record of a message without fault"
    elif record.session != message.session:
        description = "another session"
    elif record.is_session_end:
        description = ""
    elif record.sequence != message.sequence:
        description = "another sequence"
    elif record.is_snapshot is not None and record.is_snapshot != message.is_snapshot:
        description = "a snapshot only in one"
    return description


def _is_set_aside(output: PartitionView, message: ObservedMessage) -> bool:
    """Whether a message legitimately has no record: in quarantine, or while its session waited."""
    if message.offset in output.quarantined_offsets:
        return True
    headless_ranges = output.headless_ranges.get(message.session or "", ())
    return any(message.offset in headless_range for headless_range in headless_ranges)


def _describe_message(view: PartitionView, offset: int) -> str:
    """What a view has at an offset, for people."""
    message = view.messages.get(offset)
    if message is None:
        return "set aside" if offset in view.quarantined_offsets else "nothing"
    kind = "a message"
    if message.poison:
        kind = "poison"
    elif message.is_snapshot:
        kind = "a snapshot"
    return f"{kind} of session {message.session}, sequence {message.sequence}"
