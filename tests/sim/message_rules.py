"""The rules about messages, written once more without the fold: a session begins by a snapshot, its
sequence has no hole, repeat or disorder, and no offset is missing.

It shares no rule with the fold: a mistake there shows as a difference here.

Next: test_messages.py holds both against each other; operations/prove/verify_at.py is the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.operations.prove.verify_at import (
    FaultLevel,
    IsExplained,
    ObservedMessage,
    ValidationFault,
    record_fault,
)


class _ValidatedSession(Struct):
    """A session up to the present message."""

    last_sequence: int | None = None
    snapshot_sequence: int | None = None
    first_sequence: int | None = None
    """The sequence of its first message, or of its last snapshot."""
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
                record_fault(
                    self.faults,
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
            record_fault(self.faults, "offset again", partition, message, expected_text, actual)
            return
        level: FaultLevel = "error"
        if self.is_explained(partition, OffsetRange(expected, message.offset)):
            level = "warning"
            actual += " (explained when it was folded)"
        record_fault(self.faults, "gap", partition, message, expected_text, actual, level)

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
            session = sessions[session_name] = _ValidatedSession(first_sequence=message.sequence)
            is_headless = needs_snapshot and not message.is_session_end
        if is_headless:
            level: FaultLevel = "error" if from_birth else "warning"
            record_fault(
                self.faults,
                "headless",
                partition,
                message,
                "a snapshot first",
                "another message",
                level,
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
            session.first_sequence = sequence
            session.missing_sequences = []
            return True
        if sequence is None or last_sequence is None or sequence == last_sequence + 1:
            session.last_sequence = sequence
            return True
        return self._check_out_of_sequence(partition, session, message, sequence, last_sequence)

    def _check_snapshot_sequence(
        self, partition: Partition, session: _ValidatedSession, message: ObservedMessage
    ) -> None:
        """Record a hole before a snapshot, as a warning: the snapshot closes it. A snapshot that was
        passed over before comes late.
        """
        sequence = message.sequence
        last_sequence = session.last_sequence
        if sequence is None or last_sequence is None:
            return
        expected = f"sequence {last_sequence + 1}"
        if session.take_missing(sequence):
            record_fault(
                self.faults, "disorder", partition, message, expected, f"sequence {sequence}"
            )
        if sequence <= last_sequence + 1:
            return
        actual = f"sequence {sequence}, closed by this snapshot"
        record_fault(self.faults, "sequence gap", partition, message, expected, actual, "warning")

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
            record_fault(self.faults, "sequence gap", partition, message, expected, actual, level)
            return True
        if message.is_session_end:
            return True
        was_missing = session.take_missing(sequence)
        first_sequence = session.first_sequence
        is_before_first = first_sequence is not None and sequence < first_sequence
        kind = "disorder" if was_missing or is_before_first else "repeat"
        record_fault(self.faults, kind, partition, message, expected, actual, level)
        return False
