"""Expiry: sessions that were silent for longer than the stream's timeout end when they are next
touched.

Judged by the partition's message time, the largest timestamp so far: never by a clock. Nothing ends
before a message of its own comes, so slicing does not change what comes out.

Next room: fold.py ends the sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seriatim.engine.messages import Poison
from seriatim.engine.session import Session


class Expiry:
    """One partition's message time, and who was silent for too long by it."""

    def __init__(self, timeout_ms: int, message_time_ms: int) -> None:
        self.timeout_ms, self.message_time_ms = timeout_ms, message_time_ms

    def expired_positions(
        self,
        names: Sequence[str | None],
        messages: Sequence[Any],
        timestamps: Sequence[int],
        sessions: Mapping[str, Session],
    ) -> set[int]:
        """Positions of messages at which their session has expired."""
        ended, now, last = set(), self.message_time_ms, {}
        for i, (name, message, given) in enumerate(zip(names, messages, timestamps, strict=True)):
            if name is None or message.__class__ is Poison:
                continue
            time = int(given)
            now = max(now, time)
            session = sessions[name]
            if (
                name not in last
                and session.state_bytes is None
                and session.state is None
                and not session.waiting_messages
            ):
                last[name] = time
            if now - last.get(name, sessions[name].timestamp) > self.timeout_ms:
                ended.add(i)
            last[name] = time
        return ended

    def advance_time(self, messages: Sequence[Any], timestamps: Sequence[int]) -> None:
        """Take in the time of messages that were folded."""
        met = zip(messages, timestamps, strict=False)
        self.message_time_ms = max(
            [
                self.message_time_ms,
                *(int(time) for message, time in met if message.__class__ is not Poison),
            ]
        )
