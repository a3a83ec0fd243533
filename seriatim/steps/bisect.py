"""Bisect: the first message after which a session's state breaks an invariant, found in a few folds.

First among the saved states, which costs no fold at all; then between two of them, by halves, each fold going on from
the last place that was good. As with any bisection, what is broken once must stay broken up to the end; where it
heals again by itself, `every` looks after each message instead.

Next room: steps/retrace.py folds; cli/bisect.py shows what is around the place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from seriatim.core.errors import ConfigError
from seriatim.core.looks import view_of_state
from seriatim.core.session import Session
from seriatim.steps.retrace import Place, Way

Invariant = Callable[[Mapping[str, Any]], bool]
ROOTS = ("offset", "time", "session", "sequence", "state", "damaged", "quarantined")
"""What an invariant may ask of a session between two messages."""


class Bisected(Struct, kw_only=True):
    """Where an invariant breaks."""

    broken: int = -1
    """The offset of the message after which it does not hold; -1: it holds at the end."""
    good: int = -1
    """The last message before it after which it was seen to hold; -1: none."""
    base: int
    """Where folding began."""
    end: int
    folds: int = 0
    messages: int = 0
    looked: int = 0
    """Saved states that were looked at."""
    parted: bool = False
    """It holds as folded today, and the state that was saved at the end breaks it."""


class Bisecting:
    """One hunt, in one session."""

    def __init__(self, way: Way, invariant: Invariant, *, of_state: bool = True) -> None:
        self.way, self.invariant, self.looked = way, invariant, 0
        self.of_state = of_state
        """Whether the invariant names the state."""

    def run(self, start: int, end: int, *, every: bool = False) -> Bisected:
        """The first offset from `start` up to `end` after which the invariant does not hold."""
        way = self.way
        if start >= end:
            raise ConfigError(
                f"{way.looking.stream.name}: {way.partition}: there is no offset from {start} up to {end}",
                next=f"choose --from before --until; it is committed up to offset {way.end - 1}",
            )
        base, until = (start, end) if every else self._between(start, end)
        way.begin(base)
        way.to(start)
        begin, last = way.at, way.retrace.session.last_offset
        if not self._holds():
            raise ConfigError(
                f"{way.looking.stream.name}: session {way.name!r}: the invariant does not hold before offset {begin}",
                next="begin earlier with --from, or check the invariant: it must hold at the beginning",
            )
        offsets, place = way.keep(until), way.mark()
        found = self._each(offsets) if every else self._halves(offsets, place)
        folds, messages = way.folds, way.messages
        return Bisected(
            parted=found is None and self._saved_breaks(until),
            broken=-1 if found is None else offsets[found],
            good=-1 if found is None else offsets[found - 1] if found else last,
            base=begin,
            end=until,
            folds=folds,
            messages=messages,
            looked=self.looked,
        )

    def _saved_breaks(self, until: int) -> bool:
        """Whether a state was saved right there, and breaks it."""
        self.way.begin(until)
        return self.way.at == until and not self._holds()

    def _between(self, start: int, end: int) -> tuple[int, int]:
        """The saved states between which it breaks: the last that is good, and the first that is not."""
        way = self.way
        edges = [point for point in way.saved() if start <= point.account.frontier <= end]
        edges = [point for point in edges if point.account.frontier >= way.seen.log_start]
        low, high = -1, len(edges)
        while high - low > 1:
            middle = (low + high) // 2
            way.begin(edges[middle].account.frontier)
            self.looked += 1
            low, high = (middle, high) if self._holds() else (low, middle)
        base = edges[low].account.frontier if low >= 0 else start
        return base, edges[high].account.frontier if high < len(edges) else end

    def _halves(self, offsets: list[int], place: Place) -> int | None:
        """By halves; the last place that was good is where each fold goes on from."""
        low, high = -1, len(offsets)
        if not offsets or self._after(offsets[-1], place):
            return None
        high -= 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._after(offsets[middle], place):
                low, place = middle, self.way.mark()
            else:
                high = middle
        return high

    def _after(self, offset: int, place: Place) -> bool:
        self.way.back(place)
        self.way.to(offset + 1)
        return self._holds()

    def _each(self, offsets: list[int]) -> int | None:
        for number, offset in enumerate(offsets):
            self.way.to(offset + 1)
            self.way.folds -= number > 0  # one fold, looked at after each message
            if not self._holds():
                return number
        return None

    def _holds(self) -> bool:
        """Whether the invariant holds right here. What was not met yet breaks none; what has no state, none of it."""
        retrace = self.way.retrace
        state, session = retrace.state(), retrace.session
        if state is None and (self.of_state or session.last_offset < 0):
            return True
        return self.invariant(asked(self.way, state, session))


def asked(way: Way, state: Any, session: Session) -> dict[str, Any]:
    """What an invariant may ask."""
    return {
        "offset": session.last_offset,
        "time": session.timestamp,
        "session": way.name,
        "sequence": session.sequence,
        "state": view_of_state(way.looking.runner, state),
        "damaged": session.damaged >= 0,
        "quarantined": session.finding is not None,
    }
