"""Bisect: the first message after which a session's state breaks an invariant, found in a few
folds.

First among the saved states, which costs no fold at all; then between two of them, by halves, each
fold going on from the last place that was good. As with any bisection, what is broken once must
stay broken up to the end; where it heals again by itself, `every` looks after each message instead.

Next room: operations/inspect/session_replay.py folds; cli/bisect.py shows what is around the place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from seriatim.engine.session import Session
from seriatim.errors import ConfigError
from seriatim.operations.inspect.session_replay import ReplayPosition, SessionReplay
from seriatim.operations.inspect.views import view_of_state

Invariant = Callable[[Mapping[str, Any]], bool]
INVARIANT_NAMES = ("offset", "time", "session", "sequence", "state", "damaged", "quarantined")
"""What an invariant may ask of a session between two messages."""


class BisectResult(Struct, kw_only=True):
    """Where an invariant breaks."""

    first_broken_offset: int = -1
    """The offset of the message after which it does not hold; -1: it holds at the end."""
    last_good_offset: int = -1
    """The last message before it after which it was seen to hold; -1: none."""
    start_offset: int
    """Where folding began."""
    end_offset: int
    folds: int = 0
    messages: int = 0
    saved_states_checked: int = 0
    """Saved states that were looked at."""
    saved_state_differs: bool = False
    """It holds as folded today, and the state that was saved at the end breaks it."""


class Bisection:
    """One hunt, in one session."""

    def __init__(
        self, replay: SessionReplay, invariant: Invariant, *, uses_state: bool = True
    ) -> None:
        self.replay, self.invariant, self.saved_states_checked = replay, invariant, 0
        self.uses_state = uses_state
        """Whether the invariant names the state."""

    def run(self, start: int, end: int, *, check_every_message: bool = False) -> BisectResult:
        """The first offset from `start` up to `end` after which the invariant does not hold."""
        way = self.replay
        if start >= end:
            raise ConfigError(
                f"{way.context.stream.name}: {way.partition}: there is no offset from {start} up to {end}",
                next=f"choose --from before --until; it is committed up to offset {way.committed_end - 1}",
            )
        base, until = (
            (start, end) if check_every_message else self._narrow_by_saved_states(start, end)
        )
        way.begin_at(base)
        way.fold_to(start)
        begin, last = way.next_offset, way.tracing_fold.session.last_offset
        if not self._holds():
            raise ConfigError(
                f"{way.context.stream.name}: session {way.session_name!r}: the invariant does not hold before offset {begin}",
                next="begin earlier with --from, or check the invariant: it must hold at the beginning",
            )
        offsets, place = way.cache_messages(until), way.current_position()
        found = (
            self._search_each(offsets)
            if check_every_message
            else self._search_by_halves(offsets, place)
        )
        folds, messages = way.folds_begun, way.messages_folded
        return BisectResult(
            saved_state_differs=found is None and self._saved_state_breaks(until),
            first_broken_offset=-1 if found is None else offsets[found],
            last_good_offset=-1 if found is None else offsets[found - 1] if found else last,
            start_offset=begin,
            end_offset=until,
            folds=folds,
            messages=messages,
            saved_states_checked=self.saved_states_checked,
        )

    def _saved_state_breaks(self, until: int) -> bool:
        """Whether a state was saved right there, and breaks it."""
        self.replay.begin_at(until)
        return self.replay.next_offset == until and not self._holds()

    def _narrow_by_saved_states(self, start: int, end: int) -> tuple[int, int]:
        """The saved states between which it breaks: the last that is good, and the first that is
        not.
        """
        way = self.replay
        edges = [point for point in way.saved_points() if start <= point.account.frontier <= end]
        edges = [point for point in edges if point.account.frontier >= way.bounds.log_start]
        low, high = -1, len(edges)
        while high - low > 1:
            middle = (low + high) // 2
            way.begin_at(edges[middle].account.frontier)
            self.saved_states_checked += 1
            low, high = (middle, high) if self._holds() else (low, middle)
        base = edges[low].account.frontier if low >= 0 else start
        return base, edges[high].account.frontier if high < len(edges) else end

    def _search_by_halves(self, offsets: list[int], position: ReplayPosition) -> int | None:
        """By halves; the last place that was good is where each fold goes on from."""
        low, high = -1, len(offsets)
        if not offsets or self._holds_after(offsets[-1], position):
            return None
        high -= 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._holds_after(offsets[middle], position):
                low, position = middle, self.replay.current_position()
            else:
                high = middle
        return high

    def _holds_after(self, offset: int, position: ReplayPosition) -> bool:
        self.replay.go_back(position)
        self.replay.fold_to(offset + 1)
        return self._holds()

    def _search_each(self, offsets: list[int]) -> int | None:
        for number, offset in enumerate(offsets):
            self.replay.fold_to(offset + 1)
            self.replay.folds_begun -= number > 0  # one fold, looked at after each message
            if not self._holds():
                return number
        return None

    def _holds(self) -> bool:
        """Whether the invariant holds right here. What was not met yet breaks none; what has no
        state, none of it.
        """
        retrace = self.replay.tracing_fold
        state, session = retrace.copy_of_state(), retrace.session
        if state is None and (self.uses_state or session.last_offset < 0):
            return True
        return self.invariant(invariant_values(self.replay, state, session))


def invariant_values(replay: SessionReplay, state: Any, session: Session) -> dict[str, Any]:
    """What an invariant may ask."""
    return {
        "offset": session.last_offset,
        "time": session.timestamp,
        "session": replay.session_name,
        "sequence": session.sequence,
        "state": view_of_state(replay.context.runner, state),
        "damaged": session.damaged_since_offset >= 0,
        "quarantined": session.finding is not None,
    }
