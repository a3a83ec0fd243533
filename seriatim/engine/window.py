"""The window: messages that come before their turn wait, and late ones are healed. Tier window
only.

The buffer is part of the session and is drained by that session's own messages alone, so that
slicing never changes what comes out. It is over when more than `messages` wait, or when a message
is more than `seconds` of message time later than the first that waits: then what is missing is
counted as a gap.

Next room: sequence.py has the rules; fold.py applies what the window lets through.
"""

from __future__ import annotations

from collections.abc import Callable
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
"""A session that may begin with one of these begins for sure: nothing can come before it."""


class WindowSize(Struct, frozen=True):
    """How long a message may wait for those before it."""

    messages: int
    seconds: int


class WindowTurn(Struct, frozen=True):
    """One message at its turn: its place in the stretch, and itself where it waited."""

    name: str
    position: int
    message: Any
    sequence: int
    is_snapshot: bool
    waiting_message: WaitingMessage | None = None


class WindowFold(Protocol):
    """What the window needs of the fold."""

    def apply_turn(self, session: Session, turn: WindowTurn, output: FoldOutput) -> None: ...
    def on_message_dropped(self, kind: str, name: str, offset: int, found: str) -> None: ...
    def on_gap_passed(
        self, session: Session, name: str, position: int, offset: int, found: str
    ) -> None: ...
    def on_headless(self, name: str, waiting_message: WaitingMessage) -> None: ...
    def on_quarantined(self, session: Session, turn: WindowTurn, output: FoldOutput) -> None: ...


class Window:
    """The window over one partition's sessions."""

    def __init__(self, size: WindowSize, runner: Runner, fold: WindowFold) -> None:
        self.size, self.runner, self.fold = size, runner, fold
        self._decoded_messages: dict[int, Any] = {}
        """Messages that wait, by offset, as long as this fold lives."""

    def add_message(
        self,
        session: Session,
        turn: WindowTurn,
        waiting_message: WaitingMessage,
        output: FoldOutput,
    ) -> None:
        """One message of a session that is not in quarantine. First those go whose time was over
        before it came.
        """
        self._close_window(
            session,
            turn,
            output,
            lambda: self._has_waited_too_long(session, waiting_message.timestamp),
        )
        if session.finding is not None:
            self.fold.on_quarantined(session, turn, output)
            return
        last, sequence = session.sequence, turn.sequence
        begins = turn.is_snapshot or not self.runner.has_snapshots
        if last is None and begins and sequence in FIRST_SEQUENCES:
            self._drop_headless(session, turn, lambda held: held.sequence < sequence)
            self.fold.apply_turn(session, turn, output)
        elif last is None or sequence > last + 1:
            self._keep_waiting(session, turn, waiting_message)
        elif sequence == last + 1:
            self.fold.apply_turn(session, turn, output)
        elif turn.is_snapshot and not _is_old_snapshot(session, sequence, waiting_message):
            self.flush(
                session, turn, output
            )  # a producer's new life: what waits belongs to the old one
            self.fold.apply_turn(session, turn, output)
        else:
            kind = (
                "repeat"
                if is_same_snapshot(session, sequence, waiting_message.value)
                else sequence_finding(session, sequence)
            )
            remove_missing_sequence(session, sequence)
            self.fold.on_message_dropped(
                kind, turn.name, waiting_message.offset, f"sequence {sequence}, after {last}"
            )
        self._drain(session, turn, output)
        self._close_window(
            session, turn, output, lambda: len(session.waiting_messages) > self.size.messages
        )

    def _close_window(
        self, session: Session, turn: WindowTurn, output: FoldOutput, is_over: Callable[[], bool]
    ) -> None:
        """Give up on what is missing, as long as the window is over."""
        while session.finding is None and session.waiting_messages and is_over():
            self._give_up_missing(session, turn, output)
            self._drain(session, turn, output)

    def _keep_waiting(
        self, session: Session, turn: WindowTurn, waiting_message: WaitingMessage
    ) -> None:
        if any(held.sequence == waiting_message.sequence for held in session.waiting_messages):
            self.fold.on_message_dropped(
                "repeat",
                turn.name,
                waiting_message.offset,
                f"sequence {waiting_message.sequence}, which waits already",
            )
            return
        self._decoded_messages[waiting_message.offset] = turn.message
        session.waiting_messages = sorted(
            [*session.waiting_messages, waiting_message], key=lambda held: held.sequence
        )

    def _has_waited_too_long(self, session: Session, message_time_ms: int) -> bool:
        """Whether the first that waits has waited long enough by this time."""
        return (
            message_time_ms - min(held.timestamp for held in session.waiting_messages)
            > self.size.seconds * 1000
        )

    def _drain(self, session: Session, turn: WindowTurn, output: FoldOutput) -> None:
        """All that wait and whose turn it is now."""
        while session.finding is None and session.sequence is not None and session.waiting_messages:
            first = session.waiting_messages[0]
            if first.sequence > session.sequence + 1:
                return
            self._apply_first_waiting(session, turn, output)

    def _give_up_missing(self, session: Session, turn: WindowTurn, output: FoldOutput) -> None:
        """What is missing before the first that waits will not come any more."""
        first = session.waiting_messages[0]
        if session.sequence is not None:
            if not first.is_snapshot:  # a snapshot closes the gap before it
                self.fold.on_gap_passed(
                    session, turn.name, turn.position, first.offset, f"sequence {first.sequence}"
                )
                add_missing_sequences(session, first.sequence)
            self._apply_first_waiting(session, turn, output)
        elif first.is_snapshot or not self.runner.has_snapshots:
            self._apply_first_waiting(session, turn, output)
        else:
            session.waiting_messages = session.waiting_messages[1:]
            self._decoded_messages.pop(first.offset, None)
            self.fold.on_headless(turn.name, first)

    def flush(self, session: Session, turn: WindowTurn, output: FoldOutput) -> None:
        """Let all through that waits: the session ends, or begins again."""
        self._close_window(session, turn, output, lambda: True)

    def _drop_headless(
        self, session: Session, turn: WindowTurn, is_headless: Callable[[WaitingMessage], bool]
    ) -> None:
        """Those that wait from before the session began."""
        for held in filter(is_headless, session.waiting_messages):
            self.fold.on_headless(turn.name, held)
        session.waiting_messages = [
            held for held in session.waiting_messages if not is_headless(held)
        ]

    def _apply_first_waiting(self, session: Session, turn: WindowTurn, output: FoldOutput) -> None:
        """The first that waits, through the machine."""
        held, *session.waiting_messages = session.waiting_messages
        message = (
            self._decoded_messages.pop(held.offset, None) or self.runner.decode([held.value])[0]
        )
        self.fold.apply_turn(
            session,
            WindowTurn(turn.name, turn.position, message, held.sequence, held.is_snapshot, held),
            output,
        )


def _is_old_snapshot(session: Session, sequence: int, waiting_message: WaitingMessage) -> bool:
    """Whether a snapshot is an old one that comes late or twice, and not a new beginning."""
    return is_same_snapshot(session, sequence, waiting_message.value) or is_missing_sequence(
        session, sequence
    )
