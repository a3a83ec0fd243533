"""The scope of a refold: which sessions are folded again, and up to where each. Values, and what
they mean.

Everybody else is passed over as if not there: their output stays as it was committed.

Next room: fold.py walks within a scope; refold.py says how a scope grows smaller.
"""

from __future__ import annotations

from msgspec import Struct, field


class RefoldScope(Struct, frozen=True, kw_only=True):
    """Who is folded again in one stage."""

    sessions: tuple[str, ...] | None = None
    """None: all."""
    finished_sessions: tuple[str, ...] = ()
    """Sessions whose refold is over."""


class SessionFilter(Struct, frozen=True, kw_only=True):
    """A scope while it is walked."""

    sessions: frozenset[str] | None
    finished_sessions: frozenset[str]

    @classmethod
    def from_scope(cls, scope: RefoldScope | None) -> SessionFilter | None:
        """A walk; None where everybody is folded."""
        if scope is None:
            return None
        only = None if scope.sessions is None else frozenset(scope.sessions)
        return cls(sessions=only, finished_sessions=frozenset(scope.finished_sessions))

    def excludes(self, name: str | None) -> bool:
        """Whether a message of this session is passed over. One of nobody's is the whole
        partition's matter.
        """
        if name is None:
            return self.sessions is not None
        return name in self.finished_sessions or (
            self.sessions is not None and name not in self.sessions
        )


class ReplacedRecords(Struct, frozen=True, kw_only=True):
    """Which committed records a refold replaces."""

    start: int
    """The first offset."""
    end: int
    """The offset up to which, where `ends` does not say otherwise."""
    sessions: frozenset[str] | None = None
    """None: all."""
    session_ends: dict[str, int] = field(default_factory=dict)
    """Sessions whose refold ended elsewhere, and where."""

    def includes(self, session: str, offset: int) -> bool:
        """Whether a record of this session, at this offset, is replaced."""
        if self.sessions is not None and session not in self.sessions:
            return False
        return self.start <= offset < self.session_ends.get(session, self.end)

    def covers(self, first_offset: int, last_offset: int) -> bool:
        """Whether every record from offset `first` to `last` is replaced, whoever's it is."""
        return (
            self.sessions is None
            and self.start <= first_offset
            and last_offset < min([self.end, *self.session_ends.values()])
        )

    @property
    def end_offset(self) -> int:
        """No record at or after this offset is replaced."""
        return max([self.end, *self.session_ends.values()])
