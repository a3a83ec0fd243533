"""Bisection: the first message after which a session's state breaks an invariant.

1. Narrow the range by saved states: each costs a load and no fold.
2. Fold up to the last good saved state, and read the session's messages up to the first bad one.
3. Search those messages by halves. Each fold goes on from the last position that was good.

As with any bisection, an invariant that is broken once must stay broken up to the end. Where it
heals by itself, `check_every_message` checks after each message instead.

Next: operations/inspect/session_replay.py folds; cli/bisect.py shows the messages around the
result.
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
"""The names that an invariant about a session has."""


class BisectResult(Struct, kw_only=True):
    """Where an invariant breaks."""

    first_broken_offset: int = -1
    """The offset of the message after which it does not hold; -1: it holds at the end."""
    last_good_offset: int = -1
    """The last message before it after which it was found to hold; -1: none."""
    start_offset: int
    """Where folding began."""
    end_offset: int
    folds: int = 0
    messages: int = 0
    saved_states_checked: int = 0
    """How many saved states were checked."""
    saved_state_differs: bool = False
    """It holds as folded today, and the state that was saved at the end breaks it."""


class Bisection:
    """One search in one session."""

    def __init__(
        self, replay: SessionReplay, invariant: Invariant, *, uses_state: bool = True
    ) -> None:
        self.replay = replay
        self.invariant = invariant
        self.saved_states_checked = 0
        self.uses_state = uses_state
        """Whether the invariant names the state."""

    def run(self, start: int, end: int, *, check_every_message: bool = False) -> BisectResult:
        """The first offset from `start` up to `end` after which the invariant does not hold.

        A ConfigError is raised if the range is empty, or if the invariant does not hold before it.
        """
        replay = self.replay
        self._check_range(start, end)
        # 1. saved states
        base = start
        until = end
        if not check_every_message:
            base, until = self._narrow_by_saved_states(start, end)
        # 2. the messages between two of them
        replay.begin_at(base)
        replay.fold_to(start)
        begin_offset = replay.next_offset
        offset_before = replay.tracing_fold.session.last_offset
        self._check_holds_at_start()
        offsets = replay.cache_messages(until)
        # 3. the first message that breaks it
        if check_every_message:
            broken_index = self._search_each(offsets)
        else:
            broken_index = self._search_by_halves(offsets, replay.current_position())
        # The figures are taken before `_saved_state_breaks`, which begins another fold.
        result = BisectResult(
            start_offset=begin_offset,
            end_offset=until,
            folds=replay.folds_begun,
            messages=replay.messages_folded,
            saved_states_checked=self.saved_states_checked,
        )
        if broken_index is None:
            result.saved_state_differs = self._saved_state_breaks(until)
            return result
        result.first_broken_offset = offsets[broken_index]
        result.last_good_offset = offsets[broken_index - 1] if broken_index > 0 else offset_before
        return result

    def _check_range(self, start: int, end: int) -> None:
        replay = self.replay
        if start >= end:
            raise ConfigError(
                f"{replay.open_stream.stream.name}: {replay.partition}:"
                f" there is no offset from {start} up to {end}",
                next="choose --from before --until;"
                f" it is committed up to offset {replay.committed_end - 1}",
            )

    def _check_holds_at_start(self) -> None:
        replay = self.replay
        if not self._holds():
            raise ConfigError(
                f"{replay.open_stream.stream.name}: session {replay.session_name!r}:"
                f" the invariant does not hold before offset {replay.next_offset}",
                next="begin earlier with --from, or check the invariant: it must hold at the beginning",
            )

    def _saved_state_breaks(self, until: int) -> bool:
        """Whether a state was saved exactly at `until`, and breaks the invariant."""
        self.replay.begin_at(until)
        return self.replay.next_offset == until and not self._holds()

    def _narrow_by_saved_states(self, start: int, end: int) -> tuple[int, int]:
        """The offsets of the last saved state that is good and of the first that is not.

        Where there is no such state, the offset is `start` or `end`.
        """
        replay = self.replay
        earliest = max(start, replay.bounds.log_start)
        frontiers = [point.account.frontier for point in replay.saved_points()]
        offsets = [offset for offset in frontiers if earliest <= offset <= end]
        low = -1
        high = len(offsets)
        while high - low > 1:
            middle = (low + high) // 2
            replay.begin_at(offsets[middle])
            self.saved_states_checked += 1
            if self._holds():
                low = middle
            else:
                high = middle
        good_offset = offsets[low] if low >= 0 else start
        bad_offset = offsets[high] if high < len(offsets) else end
        return good_offset, bad_offset

    def _search_by_halves(self, offsets: list[int], position: ReplayPosition) -> int | None:
        """The index of the first offset after which it is broken; None: it holds after the last.

        `position` is before the first offset, and moves on to the last one that was good.
        """
        if not offsets or self._holds_after(offsets[-1], position):
            return None
        low = -1
        high = len(offsets) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._holds_after(offsets[middle], position):
                low = middle
                position = self.replay.current_position()
            else:
                high = middle
        return high

    def _holds_after(self, offset: int, position: ReplayPosition) -> bool:
        """Fold from a position up to and with an offset; return whether the invariant holds."""
        self.replay.go_back(position)
        self.replay.fold_to(offset + 1)
        return self._holds()

    def _search_each(self, offsets: list[int]) -> int | None:
        """The index of the first offset after which it is broken, by one fold that checks each."""
        for i, offset in enumerate(offsets):
            self.replay.fold_to(offset + 1)
            if i > 0:
                # `fold_to` counts a fold per call; all of these are one.
                self.replay.folds_begun -= 1
            if not self._holds():
                return i
        return None

    def _holds(self) -> bool:
        """Whether the invariant holds at the current position.

        A session that had no message yet breaks no invariant; a session without state breaks no
        invariant that names the state.
        """
        tracing_fold = self.replay.tracing_fold
        state = tracing_fold.copy_of_state()
        session = tracing_fold.session
        if state is None and (self.uses_state or session.last_offset < 0):
            return True
        return self.invariant(invariant_values(self.replay, state, session))


def invariant_values(replay: SessionReplay, state: Any, session: Session) -> dict[str, Any]:
    """The values of INVARIANT_NAMES."""
    return {
        "offset": session.last_offset,
        "time": session.timestamp,
        "session": replay.session_name,
        "sequence": session.sequence,
        "state": view_of_state(replay.open_stream.runner, state),
        "damaged": session.damaged_since_offset >= 0,
        "quarantined": session.finding is not None,
    }
