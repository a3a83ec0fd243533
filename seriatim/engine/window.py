"""The window: messages that come before their turn wait for the missing ones. Tier window only.

The waiting messages are part of the session, and only messages of that session release them. So
how messages are cut into slices does not change the output. The window is over when more than
`messages` wait, or when a message is more than `seconds` of message time later than the earliest
that waits. Then the missing messages are counted as a gap, and the session goes on without them.

Next: engine/sequence.py has the rules of sequences; engine/fold.py applies the messages.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct

from seriatim.engine.machine import Runner
from seriatim.engine.sequence import (
    add_missing_sequences,
    is_missing_sequence,
    is_same_snapshot,
    remove_missing_sequence,
    sequence_finding,
)
from seriatim.engine.session import FoldOutput, Session, WaitingMessage

FIRST_SEQUENCES = (0, 1)
"""A session that can begin with one of these sequences begins at once: nothing comes before them."""


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

    def apply_turn(self, session: Session, turn: WindowTurn, output: FoldOutput) -> None: ...
    def on_message_dropped(self, kind: str, name: str, offset: int, found: str) -> None: ...
    def on_gap_passed(
        self, session: Session, name: str, position: int, offset: int, found: str
    ) -> None: ...
    def on_headless(self, name: str, waiting_message: WaitingMessage) -> None: ...
    def on_quarantined(self, session: Session, turn: WindowTurn, output: FoldOutput) -> None: ...


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
        output: FoldOutput,
    ) -> None:
        """Take one message of a session that is not in quarantine.

        1. Give up what is missing, if by the time of this message the window is over.
        2. Apply the message, let it wait, or drop it.
        3. Apply the waiting messages whose turn it is now.
        4. Give up what is missing, if too many messages wait.
        """
        # 1. The time is over.
        while self._is_waiting(session) and self._is_overdue(session, waiting_message.timestamp):
            self._give_up_missing(session, turn, output)
        if session.finding is not None:
            self.fold.on_quarantined(session, turn, output)
            return
        # 2. The message itself.
        previous = session.sequence
        sequence = turn.sequence
        if previous is None:
            can_begin = turn.is_snapshot or not self.runner.has_snapshots
            if can_begin and sequence in FIRST_SEQUENCES:
                self._drop_waiting_before(session, turn)
                self.fold.apply_turn(session, turn, output)
            else:
                self._keep_waiting(session, turn, waiting_message)
        elif sequence > previous + 1:
            self._keep_waiting(session, turn, waiting_message)
        elif sequence == previous + 1:
            self.fold.apply_turn(session, turn, output)
        elif turn.is_snapshot and not _is_old_snapshot(session, sequence, waiting_message):
            # The producer has begun anew: the messages that wait belong to what was before.
            self.flush(session, turn, output)
            self.fold.apply_turn(session, turn, output)
        else:
            self._drop_old_message(session, turn, waiting_message)
        # 3. Those whose turn it is.
        self._apply_waiting_in_turn(session, turn, output)
        # 4. Too many wait.
        while self._is_waiting(session) and len(session.waiting_messages) > self.size.messages:
            self._give_up_missing(session, turn, output)

    def flush(self, session: Session, turn: WindowTurn, output: FoldOutput) -> None:
        """Apply all messages that wait, because the session ends or begins anew."""
        while self._is_waiting(session):
            self._give_up_missing(session, turn, output)

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

    def _apply_waiting_in_turn(
        self, session: Session, turn: WindowTurn, output: FoldOutput
    ) -> None:
        """Apply all messages that wait and whose turn it is now."""
        while session.finding is None and session.sequence is not None and session.waiting_messages:
            if session.waiting_messages[0].sequence > session.sequence + 1:
                return
            self._apply_first_waiting(session, turn, output)

    def _give_up_missing(self, session: Session, turn: WindowTurn, output: FoldOutput) -> None:
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
            self._apply_first_waiting(session, turn, output)
        else:
            session.waiting_messages = session.waiting_messages[1:]
            self._decoded_messages.pop(waiting.offset, None)
            self.fold.on_headless(turn.name, waiting)
        self._apply_waiting_in_turn(session, turn, output)

    def _apply_first_waiting(self, session: Session, turn: WindowTurn, output: FoldOutput) -> None:
        """Apply the first message that waits."""
        waiting = session.waiting_messages[0]
        session.waiting_messages = session.waiting_messages[1:]
        message = self._decoded_messages.pop(waiting.offset, None)
        if message is None:  # it waited since an earlier slice
            (message,) = self.runner.decode([waiting.value])
        waiting_turn = WindowTurn(
            turn.name, turn.position, message, waiting.sequence, waiting.is_snapshot, waiting
        )
        self.fold.apply_turn(session, waiting_turn, output)


def _sequence_of(waiting_message: WaitingMessage) -> int:
    return waiting_message.sequence


def _is_old_snapshot(session: Session, sequence: int, waiting_message: WaitingMessage) -> bool:
    """Whether a snapshot is an old one that comes late or twice, and not a new beginning."""
    if is_same_snapshot(session, sequence, waiting_message.value):
        return True
    return is_missing_sequence(session, sequence)
