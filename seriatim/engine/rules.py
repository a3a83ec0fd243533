"""The rules that the fold follows: sequences, doubt after a loss, the window, expiry and snapshot
distance.

Each is a rule about the sessions of one partition, and none reads or writes anything. None depends on
how messages are cut into slices: what a rule must remember is part of the session.

Next: engine/fold.py asks them for each message; engine/findings.py says what a tier does about what
they find.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import Any, Protocol

from msgspec import Struct

from seriatim.engine.findings import Tier, tier_action
from seriatim.engine.machine import Runner
from seriatim.engine.messages import MessageBatch, Poison
from seriatim.engine.session import Counts, Session, SessionsByName, WaitingMessage

MISSING_RANGES_MAX = 64
"""Ranges of missing sequences that a session remembers. A late message of an older range looks like
a repeat.
"""
FIRST_SEQUENCES = (0, 1)
"""A session that can begin with one of these sequences begins at once: nothing comes before them."""
OnDistanceExceeded = Callable[[str, Session, int, int], None]
"""Called at the message that goes beyond the limit, with the session's name, the session, the
message's offset, and the offset of the session's last snapshot.
"""


# Sequences: what the producer's own counter says about missing, late and repeated messages.
#
# A session remembers the last ranges of sequences that were passed over. That is how a message that
# comes late is distinguished from one that comes twice. A snapshot begins the count anew.


def sequence_finding(session: Session, sequence: int) -> str:
    """The finding for a sequence that does not follow the session's last one."""
    if session.sequence is None or sequence > session.sequence:
        return "sequence gap"
    if is_missing_sequence(session, sequence):
        return "disorder"
    # What is below the last snapshot was sent before the session began: it cannot be a repeat.
    first_sequence = session.snapshot_sequence
    if first_sequence is None:
        first_sequence = session.sequence
    return "repeat" if sequence >= first_sequence else "disorder"


def is_missing_sequence(session: Session, sequence: int) -> bool:
    """Whether a sequence was passed over."""
    return any(start <= sequence < end for start, end in session.missing_sequences)


def add_missing_sequences(session: Session, sequence: int) -> None:
    """Remember that everything between the last sequence and this one is missing."""
    if session.sequence is None:
        return
    missing_range = (session.sequence + 1, sequence)
    # Bounded: a session is saved with every slice, and a producer may lose messages for ever.
    ranges = [*session.missing_sequences, missing_range]
    session.missing_sequences = ranges[-MISSING_RANGES_MAX:]


def remove_missing_sequence(session: Session, sequence: int) -> None:
    """Take one sequence off the missing ones."""
    ranges: list[tuple[int, int]] = []
    for start, end in session.missing_sequences:
        if not start <= sequence < end:
            ranges.append((start, end))
            continue
        if start < sequence:
            ranges.append((start, sequence))
        if sequence + 1 < end:
            ranges.append((sequence + 1, end))
    session.missing_sequences = ranges


def fingerprint(value: bytes | None) -> bytes:
    """Eight bytes by which two snapshots can be compared."""
    return blake2b(value or b"", digest_size=8).digest()


def is_same_snapshot(session: Session, sequence: int | None, value: bytes | None) -> bool:
    """Whether a snapshot is the one that the session last began with, sent again before any other
    message followed it.

    Once another message has followed, the same snapshot may as well be a producer that begins anew.
    """
    if sequence is None or session.sequence != sequence:
        return False
    if session.snapshot_sequence != sequence:
        return False
    return fingerprint(value) == session.snapshot_fingerprint


# Doubt after a loss: which sessions may have lost messages.
#
# When lost messages are passed over (operations/repair/forward.py), the frontier goes on at
# `headless_since`. A session last met before that offset may have lost some of its messages, so its
# next message decides:
# - A snapshot begins the session anew.
# - A sequence that follows the last one proves that no lost message was of this session.
# - With any other message the session is headless until its next snapshot.
# No table is scanned for this: a session without a further message is never judged.


def tier_doubts_after_loss(tier: Tier) -> bool:
    """Whether a tier doubts its sessions after a loss. These are the tiers that quarantine a session
    when a sequence is missing.
    """
    return tier_action("sequence gap", tier) == "halt"


def is_in_doubt(session: Session, headless_since: int) -> bool:
    """Whether a session has a state and may have lost messages after its last message."""
    last_certain_offset = max(session.last_offset, session.snapshot_offset)
    return session.has_state and last_certain_offset < headless_since


def needs_snapshot(session: Session, headless_since: int) -> bool:
    """Whether a session in doubt had a headless message already. From then on only a snapshot helps."""
    return session.damaged_since_offset >= headless_since


def sequence_proves_no_loss(session: Session, sequence: int | None, headless_since: int) -> bool:
    """Whether the sequence of a message proves that a session in doubt lost nothing."""
    if sequence is None or session.sequence is None:
        return False
    if needs_snapshot(session, headless_since):
        return False
    return sequence == session.sequence + 1


# The window (tier window only): messages that come before their turn wait for the missing ones.
#
# The waiting messages are part of the session, and only messages of that session release them. The
# window is over when more than `messages` wait, or when a message is more than `seconds` of message
# time later than the earliest that waits. Then the missing messages are counted as a gap, and the
# session goes on without them.


class WindowSize(Struct, frozen=True):
    """How long a message may wait for the messages before it."""

    messages: int
    seconds: int


class WindowTurn(Struct, frozen=True):
    """A message whose turn it may be."""

    name: str
    position: int
    """The position in the batch of the message that is folded just now."""
    message: Any
    sequence: int
    is_snapshot: bool
    waiting_message: WaitingMessage | None = None
    """Set if `message` waited. Then it is not the message at `position`."""


class WindowFold(Protocol):
    """What the window calls in the fold."""

    def apply_turn(self, session: Session, turn: WindowTurn) -> None: ...
    def on_message_dropped(self, kind: str, name: str, offset: int, found: str) -> None: ...
    def on_gap_passed(
        self, session: Session, name: str, position: int, offset: int, found: str
    ) -> None: ...
    def on_headless(self, name: str, waiting_message: WaitingMessage) -> None: ...
    def on_quarantined(self, session: Session, turn: WindowTurn) -> None: ...


class Window:
    """The window over the sessions of one partition."""

    def __init__(self, size: WindowSize, runner: Runner, fold: WindowFold) -> None:
        self.size = size
        self.runner = runner
        self.fold = fold
        self._decoded_messages: dict[int, Any] = {}
        """Waiting messages that this fold has decoded, by offset."""

    def add_message(
        self,
        session: Session,
        turn: WindowTurn,
        waiting_message: WaitingMessage,
    ) -> None:
        """Take one message of a session that is not in quarantine.

        1. Give up what is missing, if by the time of this message the window is over.
        2. Apply the message, let it wait, or drop it.
        3. Apply the waiting messages whose turn it is now.
        4. Give up what is missing, if too many messages wait.
        """
        # 1. The time is over.
        while self._is_waiting(session) and self._is_overdue(session, waiting_message.timestamp):
            self._give_up_missing(session, turn)
        if session.finding is not None:
            self.fold.on_quarantined(session, turn)
            return
        # 2. The message itself.
        previous = session.sequence
        sequence = turn.sequence
        if previous is None:
            can_begin = turn.is_snapshot or not self.runner.has_snapshots
            if can_begin and sequence in FIRST_SEQUENCES:
                self._drop_waiting_before(session, turn)
                self.fold.apply_turn(session, turn)
            else:
                self._keep_waiting(session, turn, waiting_message)
        elif sequence > previous + 1:
            self._keep_waiting(session, turn, waiting_message)
        elif sequence == previous + 1:
            self.fold.apply_turn(session, turn)
        elif turn.is_snapshot and not _is_old_snapshot(session, sequence, waiting_message):
            # The producer has begun anew: the messages that wait belong to what was before.
            self.flush(session, turn)
            self.fold.apply_turn(session, turn)
        else:
            self._drop_old_message(session, turn, waiting_message)
        # 3. Those whose turn it is.
        self._apply_waiting_in_turn(session, turn)
        # 4. Too many wait.
        while self._is_waiting(session) and len(session.waiting_messages) > self.size.messages:
            self._give_up_missing(session, turn)

    def flush(self, session: Session, turn: WindowTurn) -> None:
        """Apply all messages that wait, because the session ends or begins anew."""
        while self._is_waiting(session):
            self._give_up_missing(session, turn)

    def _is_waiting(self, session: Session) -> bool:
        """Whether messages wait in a session that is not in quarantine."""
        return bool(session.waiting_messages) and session.finding is None

    def _is_overdue(self, session: Session, message_time_ms: int) -> bool:
        """Whether the earliest message that waits has waited too long by this time."""
        earliest = min(waiting.timestamp for waiting in session.waiting_messages)
        return message_time_ms - earliest > self.size.seconds * 1000

    def _keep_waiting(
        self, session: Session, turn: WindowTurn, waiting_message: WaitingMessage
    ) -> None:
        """Let a message wait, unless one with its sequence waits already."""
        sequence = waiting_message.sequence
        offset = waiting_message.offset
        if any(waiting.sequence == sequence for waiting in session.waiting_messages):
            self.fold.on_message_dropped(
                "repeat", turn.name, offset, f"sequence {sequence}, which waits already"
            )
            return
        self._decoded_messages[offset] = turn.message
        # A new list: copies of the session may share the old one.
        messages = [*session.waiting_messages, waiting_message]
        messages.sort(key=_sequence_of)
        session.waiting_messages = messages

    def _drop_old_message(
        self, session: Session, turn: WindowTurn, waiting_message: WaitingMessage
    ) -> None:
        """Drop a message that comes late or twice."""
        sequence = turn.sequence
        kind = sequence_finding(session, sequence)
        if is_same_snapshot(session, sequence, waiting_message.value):
            kind = "repeat"
        remove_missing_sequence(session, sequence)
        self.fold.on_message_dropped(
            kind,
            turn.name,
            waiting_message.offset,
            f"sequence {sequence}, after {session.sequence}",
        )

    def _drop_waiting_before(self, session: Session, turn: WindowTurn) -> None:
        """Drop the messages that wait from before the session began."""
        remaining: list[WaitingMessage] = []
        for waiting in session.waiting_messages:
            if waiting.sequence < turn.sequence:
                self.fold.on_headless(turn.name, waiting)
            else:
                remaining.append(waiting)
        session.waiting_messages = remaining

    def _apply_waiting_in_turn(self, session: Session, turn: WindowTurn) -> None:
        """Apply all messages that wait and whose turn it is now."""
        while self._is_waiting(session):
            if session.sequence is None:
                return
            first_waiting = session.waiting_messages[0]
            if first_waiting.sequence > session.sequence + 1:
                return
            self._apply_first_waiting(session, turn)

    def _give_up_missing(self, session: Session, turn: WindowTurn) -> None:
        """Go on without the messages that are missing before the first that waits."""
        waiting = session.waiting_messages[0]
        has_begun = session.sequence is not None
        can_begin = waiting.is_snapshot or not self.runner.has_snapshots
        if has_begun and not waiting.is_snapshot:  # a snapshot closes the gap before it
            sequence = waiting.sequence
            self.fold.on_gap_passed(
                session, turn.name, turn.position, waiting.offset, f"sequence {sequence}"
            )
            add_missing_sequences(session, sequence)
        if has_begun or can_begin:
            self._apply_first_waiting(session, turn)
        else:
            session.waiting_messages = session.waiting_messages[1:]
            self._decoded_messages.pop(waiting.offset, None)
            self.fold.on_headless(turn.name, waiting)
        self._apply_waiting_in_turn(session, turn)

    def _apply_first_waiting(self, session: Session, turn: WindowTurn) -> None:
        """Apply the first message that waits."""
        waiting = session.waiting_messages[0]
        session.waiting_messages = session.waiting_messages[1:]
        message = self._decoded_messages.pop(waiting.offset, None)
        if message is None:  # it waited since an earlier slice
            (message,) = self.runner.decode([waiting.value])
        waiting_turn = WindowTurn(
            name=turn.name,
            position=turn.position,
            message=message,
            sequence=waiting.sequence,
            is_snapshot=waiting.is_snapshot,
            waiting_message=waiting,
        )
        self.fold.apply_turn(session, waiting_turn)


def _sequence_of(waiting_message: WaitingMessage) -> int:
    return waiting_message.sequence


def _is_old_snapshot(session: Session, sequence: int, waiting_message: WaitingMessage) -> bool:
    """Whether a snapshot is an old one that comes late or twice, and not a new beginning."""
    if is_same_snapshot(session, sequence, waiting_message.value):
        return True
    return is_missing_sequence(session, sequence)


# Expiry: a session that was silent for longer than the stream's timeout ends at its next message.
#
# Silence is measured by the message time of the partition, which is the largest timestamp so far, and
# never by a clock. A session ends only when a message of its own comes.


class Expiry:
    """The message time of one partition, and which sessions have expired by it."""

    def __init__(self, timeout_ms: int, message_time_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self.message_time_ms = message_time_ms

    def expired_positions(
        self,
        names: Sequence[str | None],
        messages: Sequence[Any],
        timestamps: Sequence[int],
        sessions: SessionsByName,
    ) -> set[int]:
        """Positions of messages before which their session has expired."""
        expired: set[int] = set()
        message_time = self.message_time_ms
        last_times: dict[str, int] = {}
        columns = zip(names, messages, timestamps, strict=True)
        for i, (name, message, timestamp) in enumerate(columns):
            if name is None or message.__class__ is Poison:
                continue
            time = int(timestamp)
            message_time = max(message_time, time)
            last_time = last_times.get(name)
            if last_time is None:
                session = sessions[name]
                # A session that has not begun cannot have been silent.
                is_begun = session.has_state or session.waiting_messages
                last_time = session.timestamp if is_begun else time
            if message_time - last_time > self.timeout_ms:
                expired.add(i)
            last_times[name] = time
        return expired

    def advance_time(self, messages: Sequence[Any], timestamps: Sequence[int]) -> None:
        """Advance the message time by messages that were folded. Poison does not count."""
        for message, timestamp in zip(messages, timestamps, strict=False):
            if message.__class__ is not Poison:
                self.message_time_ms = max(self.message_time_ms, int(timestamp))


# Snapshot distance: how far each session is from its last snapshot, in messages and in time.
#
# One lost message spoils a session until its next snapshot, so the largest distance is the most that
# can be lost at once. It is measured at every message, and the ledger stores the largest.


class SnapshotDistance:
    """Measures the sessions of one partition."""

    def __init__(self, limit_ms: int, on_exceeded: OnDistanceExceeded) -> None:
        self.limit_ms = limit_ms
        self.on_exceeded = on_exceeded
        self._snapshot_offsets: dict[str, int] = {}
        """The offset of the last measured snapshot by session. The sessions themselves have the last
        snapshot of the batch, which may be a later one.
        """

    def add_sessions(self, sessions: SessionsByName) -> None:
        """Add sessions that were just loaded."""
        for name, session in sessions.items():
            self._snapshot_offsets[name] = session.snapshot_offset

    def measure(
        self,
        batch: MessageBatch,
        names: Sequence[str | None],
        snapshot_positions: Collection[int],
        end_positions: Collection[int],
        sessions: SessionsByName,
        counts: Counts,
    ) -> None:
        """Measure the folded messages of a batch, given the positions of snapshots and of messages
        before which their session was ended.
        """
        has_beginnings = bool(snapshot_positions or end_positions)
        must_measure_each = has_beginnings or self.limit_ms > 0
        if must_measure_each or not batch.has_rising_timestamps:
            self._measure_one_by_one(
                batch, names, snapshot_positions, end_positions, sessions, counts
            )
            return
        # Timestamps only rise, so the last message of a session is the farthest from its snapshot.
        last_times = dict(zip(names, batch.timestamps, strict=False))
        for name, message_count in Counter(names).items():
            session = sessions.get(name) if name is not None else None
            if session is None or session.snapshot_timestamp < 0:
                continue
            session.messages_since_snapshot += message_count
            distance_ms = int(last_times[name]) - session.snapshot_timestamp
            session.snapshot_distance_ms = max(session.snapshot_distance_ms, distance_ms)
            _record_distance(session, counts)

    def _measure_one_by_one(
        self,
        batch: MessageBatch,
        names: Sequence[str | None],
        snapshot_positions: Collection[int],
        end_positions: Collection[int],
        sessions: SessionsByName,
        counts: Counts,
    ) -> None:
        snapshots = set(snapshot_positions)
        ends = set(end_positions)
        for i, (name, time) in enumerate(zip(names, batch.timestamps, strict=False)):
            session = sessions.get(name) if name is not None else None
            if session is None or name is None:
                continue
            if i in ends:
                _restart_at(session, -1)
            if i in snapshots:
                _restart_at(session, int(time))
                if self.limit_ms:
                    self._snapshot_offsets[name] = batch.start + i
            elif session.snapshot_timestamp >= 0:
                distance_before = session.snapshot_distance_ms
                distance = max(distance_before, int(time) - session.snapshot_timestamp)
                session.messages_since_snapshot += 1
                session.snapshot_distance_ms = distance
                _record_distance(session, counts)
                exceeds_limit_now = distance_before <= self.limit_ms < distance
                if self.limit_ms and exceeds_limit_now:
                    snapshot_offset = self._snapshot_offsets[name]
                    self.on_exceeded(name, session, batch.start + i, snapshot_offset)


def _restart_at(session: Session, snapshot_timestamp: int) -> None:
    """Measure from a snapshot at this time; -1: from the next snapshot."""
    session.messages_since_snapshot = 0
    session.snapshot_distance_ms = 0
    session.snapshot_timestamp = snapshot_timestamp


def _record_distance(session: Session, counts: Counts) -> None:
    session.is_touched = True
    counts.distance_messages = max(counts.distance_messages, session.messages_since_snapshot)
    counts.distance_ms = max(counts.distance_ms, session.snapshot_distance_ms)
