"""The outbox and the mail server in memory, held to the same contract tests as the real ones.

Next: alerts/ has the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct, field

from seriatim.alerts.incidents import AlertState, Mail, MailRefusedError, Note
from seriatim.errors import PlatformError, ensure


class MemoryOutbox(Struct):
    """The alert state of one stream, and its notes."""

    saved_state: AlertState = field(default_factory=AlertState)
    saved_notes: dict[str, Note] = field(default_factory=dict)
    refused_mails: list[Mail] = field(default_factory=list)
    is_locked: bool = False
    notes_count: int = 0

    @contextmanager
    def lock(self) -> Iterator[None]:
        ensure(not self.is_locked, "one at a time")
        self.is_locked = True
        try:
            yield
        finally:
            self.is_locked = False

    def alert_state(self) -> AlertState:
        return self.saved_state

    def put_alert_state(self, alert_state: AlertState) -> None:
        self.saved_state = alert_state

    def notes(self) -> dict[str, Note]:
        by_time = sorted(self.saved_notes.items(), key=lambda item: item[1].at_seconds)
        return dict(by_time)

    def add_note(self, note: Note) -> None:
        self.notes_count += 1
        self.saved_notes[f"{self.notes_count:06d}"] = note

    def delete_notes(self, names: list[str]) -> None:
        for name in names:
            self.saved_notes.pop(name, None)

    def put_refused_mail(self, mail: Mail) -> str:
        self.refused_mails.append(mail)
        return f"refused/{mail.id}"


class MemoryNotifier(Struct):
    """A mail server that may be down."""

    mails: list[Mail] = field(default_factory=list)
    is_down: bool = False
    refused_words: set[str] = field(default_factory=set)
    """A mail with one of these words in its subject is refused."""

    def send(self, mail: Mail) -> str:
        if any(word in mail.subject for word in self.refused_words):
            raise MailRefusedError("the mail server refused it")
        if self.is_down:
            raise PlatformError("the mail server is down")
        self.mails.append(mail)
        return ""
