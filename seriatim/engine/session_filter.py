"""The scope of a refold: which sessions are folded again, and which records that replaces.

Messages of all other sessions are passed over: their output stays as it was committed.

Next: engine/fold.py folds within a scope; operations/repair/refold_rules.py says how a scope
becomes smaller.
"""

from __future__ import annotations

from msgspec import Struct, field


class RefoldScope(Struct, frozen=True, kw_only=True):
    """Which sessions are folded again in one stage of a refold."""

    sessions: tuple[str, ...] | None = None
    """None: all sessions."""
    finished_sessions: tuple[str, ...] = ()
    """Sessions whose refold is over. They are passed over."""


class SessionFilter(Struct, frozen=True, kw_only=True):
    """A scope in the form that the fold asks for each message."""

    sessions: frozenset[str] | None
    finished_sessions: frozenset[str]

    @classmethod
    def from_scope(cls, scope: RefoldScope | None) -> SessionFilter | None:
        """The filter of a scope; None if there is no scope, so that all sessions are folded."""
        if scope is None:
            return None
        sessions = None if scope.sessions is None else frozenset(scope.sessions)
        return cls(sessions=sessions, finished_sessions=frozenset(scope.finished_sessions))

    def excludes(self, name: str | None) -> bool:
        """Whether a message of this session is passed over. A message without a session key concerns
        the whole partition, so it is folded only if all sessions are.
        """
        if name is None:
            return self.sessions is not None
        if name in self.finished_sessions:
            return True
        return self.sessions is not None and name not in self.sessions


class ReplacedRecords(Struct, frozen=True, kw_only=True):
    """Which committed records a refold replaces."""

    start: int
    """The first offset."""
    end: int
    """The end offset, unless `session_ends` has another one for the session."""
    sessions: frozenset[str] | None = None
    """None: all sessions."""
    session_ends: dict[str, int] = field(default_factory=dict)
    """Sessions whose refold ended at another offset, and that offset."""

    def includes(self, session: str, offset: int) -> bool:
        """Whether a record of this session, at this offset, is replaced."""
        if self.sessions is not None and session not in self.sessions:
            return False
        return self.start <= offset < self.session_ends.get(session, self.end)

    def covers(self, first_offset: int, last_offset: int) -> bool:
        """Whether every record from `first_offset` to `last_offset` is replaced, whatever its
        session is.
        """
        if self.sessions is not None:
            return False
        earliest_end = min([self.end, *self.session_ends.values()])
        return self.start <= first_offset and last_offset < earliest_end

    @property
    def end_offset(self) -> int:
        """No record at or after this offset is replaced."""
        return max([self.end, *self.session_ends.values()])
