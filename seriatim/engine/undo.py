"""Undo: brings back the state of a session from before the message on which `apply` raised.

A failed `apply` may leave the state half changed. Saving the state before every message would cost
too much if the state is large. So the state is saved once, and the messages since then are
remembered as bytes. To undo a message, the saved state is decoded and those messages are applied
again, without their records.

Next: engine/fold.py decides when a message must be undone; operations/run.py folds again with
more care.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seriatim.engine.machine import Runner
from seriatim.engine.session import Row, Session

EACH_MESSAGE = -1
"""Stands for an offset: save the state before and after each message of the session."""
REMEMBERED_BYTES_MIN = 64 * 1024
"""A session remembers at least this many bytes of messages before its state is saved again."""


class UndoError(Exception):
    """The state before a message cannot be brought back: it cannot be saved, or one of the messages
    raises when it is applied again.
    """


class Undo:
    """Undoes messages of one session, from one offset on."""

    def __init__(self, runner: Runner, since: int) -> None:
        self.runner = runner
        self.since = since
        """The offset of the first message that can be undone. The messages before it did not raise
        in an earlier try.
        """
        self._saved: bytes | None = None
        self._values: list[bytes | None] = []
        """Messages that were applied since the state was saved. They are remembered as bytes because
        a state may contain, and change, parts of a decoded message.
        """
        self._values_bytes = 0

    def apply(self, session: Session, message: Any, value: bytes | None) -> Sequence[Row]:
        """Apply a message and return its records. If it raises, or its records do not fit, the state
        is as before.
        """
        # The cost of saving grows with the size of the state. Saving only after as many bytes of
        # messages bounds what is remembered, and keeps the cost in proportion to the messages.
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
        self._saved = saved
        self._values = []
        self._values_bytes = 0
        return saved

    def _state_before(self) -> Any:
        """The state after the remembered messages, decoded from bytes as any saved state is."""
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
                # The message did not raise before, so the machine depends on more than its state
                # and message.
                raise UndoError("a message raises when it is repeated") from error
        return self.runner.load(self._save(state), version)
