"""The window: messages that come before their turn wait, and late ones are healed. Tier window only.

The buffer is part of the session and is drained by that session's own messages alone, so that slicing
never changes what comes out. It is over when more than `messages` wait, or when a message is more than
`seconds` of message time later than the first that waits: then what is missing is counted as a gap.

Next room: sequence.py has the rules; fold.py applies what the window lets through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from seriatim.core.machine import Runner
from seriatim.core.sequence import found_again, is_missing, is_same_snapshot, kind_of, pass_over
from seriatim.core.session import Folded, Session, Waiting

FIRST_SEQUENCES = (0, 1)
"""A session that may begin with one of these begins for sure: nothing can come before it."""


class WindowSize(Struct, frozen=True):
    """How long a message may wait for those before it."""

    messages: int
    seconds: int


class Turn(Struct, frozen=True):
    """One message at its turn: its place in the stretch, and itself where it waited."""

    name: str
    position: int
    message: Any
    sequence: int
    snapshot: bool
    waited: Waiting | None = None


class Walk(Protocol):
    """What the window needs of the fold."""

    def take(self, session: Session, turn: Turn, out: Folded) -> None: ...
    def dropped(self, kind: str, name: str, offset: int, found: str) -> None: ...
    def passed(self, session: Session, name: str, position: int, offset: int, found: str) -> None: ...
    def headless(self, name: str, waiting: Waiting) -> None: ...
    def aside(self, session: Session, turn: Turn, out: Folded) -> None: ...


class Window:
    """The window over one partition's sessions."""

    def __init__(self, size: WindowSize, runner: Runner, walk: Walk) -> None:
        self.size, self.runner, self.walk = size, runner, walk
        self._decoded: dict[int, Any] = {}
        """Messages that wait, by offset, as long as this fold lives."""

    def meet(self, session: Session, turn: Turn, waiting: Waiting, out: Folded) -> None:
        """One message of a session that is not in quarantine. First those go whose time was over before it came."""
        self._close(session, turn, out, lambda: self._is_late(session, waiting.timestamp))
        if session.finding is not None:
            self.walk.aside(session, turn, out)
            return
        last, sequence = session.sequence, turn.sequence
        begins = turn.snapshot or not self.runner.has_snapshots
        if last is None and begins and sequence in FIRST_SEQUENCES:
            self._abandon(session, turn, lambda held: held.sequence < sequence)
            self.walk.take(session, turn, out)
        elif last is None or sequence > last + 1:
            self._hold(session, turn, waiting)
        elif sequence == last + 1:
            self.walk.take(session, turn, out)
        elif turn.snapshot and not _is_old(session, sequence, waiting):
            self.flush(session, turn, out)  # a producer's new life: what waits belongs to the old one
            self.walk.take(session, turn, out)
        else:
            kind = "repeat" if is_same_snapshot(session, sequence, waiting.value) else kind_of(session, sequence)
            found_again(session, sequence)
            self.walk.dropped(kind, turn.name, waiting.offset, f"sequence {sequence}, after {last}")
        self._drain(session, turn, out)
        self._close(session, turn, out, lambda: len(session.waiting) > self.size.messages)

    def _close(self, session: Session, turn: Turn, out: Folded, is_over: Callable[[], bool]) -> None:
        """Give up on what is missing, as long as the window is over."""
        while session.finding is None and session.waiting and is_over():
            self._give_up(session, turn, out)
            self._drain(session, turn, out)

    def _hold(self, session: Session, turn: Turn, waiting: Waiting) -> None:
        if any(held.sequence == waiting.sequence for held in session.waiting):
            self.walk.dropped("repeat", turn.name, waiting.offset, f"sequence {waiting.sequence}, which waits already")
            return
        self._decoded[waiting.offset] = turn.message
        session.waiting = sorted([*session.waiting, waiting], key=lambda held: held.sequence)

    def _is_late(self, session: Session, now: int) -> bool:
        """Whether the first that waits has waited long enough by this time."""
        return now - min(held.timestamp for held in session.waiting) > self.size.seconds * 1000

    def _drain(self, session: Session, turn: Turn, out: Folded) -> None:
        """All that wait and whose turn it is now."""
        while session.finding is None and session.sequence is not None and session.waiting:
            first = session.waiting[0]
            if first.sequence > session.sequence + 1:
                return
            self._release(session, turn, out)

    def _give_up(self, session: Session, turn: Turn, out: Folded) -> None:
        """What is missing before the first that waits will not come any more."""
        first = session.waiting[0]
        if session.sequence is not None:
            if not first.snapshot:  # a snapshot closes the gap before it
                self.walk.passed(session, turn.name, turn.position, first.offset, f"sequence {first.sequence}")
                pass_over(session, first.sequence)
            self._release(session, turn, out)
        elif first.snapshot or not self.runner.has_snapshots:
            self._release(session, turn, out)
        else:
            session.waiting = session.waiting[1:]
            self._decoded.pop(first.offset, None)
            self.walk.headless(turn.name, first)

    def flush(self, session: Session, turn: Turn, out: Folded) -> None:
        """Let all through that waits: the session ends, or begins again."""
        self._close(session, turn, out, lambda: True)

    def _abandon(self, session: Session, turn: Turn, old: Callable[[Waiting], bool]) -> None:
        """Those that wait from before the session began."""
        for held in filter(old, session.waiting):
            self.walk.headless(turn.name, held)
        session.waiting = [held for held in session.waiting if not old(held)]

    def _release(self, session: Session, turn: Turn, out: Folded) -> None:
        """The first that waits, through the machine."""
        held, *session.waiting = session.waiting
        message = self._decoded.pop(held.offset, None) or self.runner.decode([held.value])[0]
        self.walk.take(session, Turn(turn.name, turn.position, message, held.sequence, held.snapshot, held), out)


def _is_old(session: Session, sequence: int, waiting: Waiting) -> bool:
    """Whether a snapshot is an old one that comes late or twice, and not a new beginning."""
    return is_same_snapshot(session, sequence, waiting.value) or is_missing(session, sequence)
