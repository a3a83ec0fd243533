"""Expiry: a session that was silent for longer than the stream's timeout ends at its next message.

Silence is measured by the message time of the partition, which is the largest timestamp so far, and
never by a clock. A session ends only when a message of its own comes, so how messages are cut into
slices does not change the output.

Next: engine/fold.py ends the sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seriatim.engine.messages import Poison
from seriatim.engine.session import Session


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
        sessions: Mapping[str, Session],
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
