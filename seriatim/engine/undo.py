"""Undo: a session's state as it was before the message on which the user's `apply` raised.

A failed `apply` may leave the state half changed. To save the state before every message would cost
as much as the state is large, for every message. So it is saved once, and the messages since then
are remembered as bytes: to go back, the saved state is read and those messages are applied again,
without their records.

Next room: judge.py decides when a message must be undone; operations/retry.py folds again with more
care.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seriatim.engine.machine import Runner
from seriatim.engine.session import Session

EACH_MESSAGE = -1
"""In the place of an offset: save the state before and after each message of a session."""
REMEMBERED_BYTES_MIN = 64 * 1024
"""A session remembers at least so many bytes of messages before its state is saved again."""


class UndoError(Exception):
    """The state before a message cannot be had this way: it cannot be saved, or its messages raise
    when repeated.
    """


class Undo:
    """How one session goes back to before a message, from one offset on."""

    def __init__(self, runner: Runner, since: int) -> None:
        self.runner = runner
        self.since = since
        """The offset of the first message that can be undone; those before it are known not to
        raise.
        """
        self._saved: bytes | None = None
        self._values: list[bytes | None] = []
        """Messages applied since the state was saved. As bytes: a state may hold, and change, parts
        of a message.
        """
        self._values_bytes = 0

    def apply(
        self, session: Session, message: Any, value: bytes | None
    ) -> Sequence[tuple[Any, ...]]:
        """The records of a message; if it raises, or its records do not fit, the state is as
        before.
        """
        # To save the state costs as much as it is large. Doing so only after as many bytes of messages bounds
        # what is remembered, and keeps the cost in proportion to the messages.
        saved = self._saved
        if saved is None or self._values_bytes > max(len(saved), REMEMBERED_BYTES_MIN):
            self._save(session.state)
        try:
            records = self.runner.apply(session.state, message)
            self.runner.check_records(records)
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException:
            session.state = self._state_before()
            raise
        self._values.append(value)
        self._values_bytes += len(value or b"")
        return records

    def _save(self, state: Any) -> bytes:
        try:
            saved = self.runner.dump(state)
        except Exception as error:
            raise UndoError("the state cannot be saved") from error
        self._saved, self._values, self._values_bytes = saved, [], 0
        return saved

    def _state_before(self) -> Any:
        """The state after the remembered messages. It went through bytes, as a saved state does."""
        version = self.runner.state_version
        state = self.runner.load(self._saved or b"", version)
        if not self._values:
            return state
        for value in self._values:
            (message,) = self.runner.decode([value])
            try:
                self.runner.apply(state, message)
            except (MemoryError, KeyboardInterrupt):
                raise
            except BaseException as error:
                # The message did not raise before: this machine depends on more than its state and message.
                raise UndoError("a message raises when it is repeated") from error
        return self.runner.load(self._save(state), version)
