"""The outbox and the mail server in memory, held to the same contract as the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct, field

from seriatim.core.alert import Desk, Mail, MailRefusedError, Note
from seriatim.core.errors import PlatformError, ensure


class MemoryOutbox(Struct):
    """A desk and its notes."""

    kept: Desk = field(default_factory=Desk)
    left: dict[str, Note] = field(default_factory=dict)
    aside: list[Mail] = field(default_factory=list)
    taken: bool = False
    count: int = 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        ensure(not self.taken, "one at a time")
        self.taken = True
        try:
            yield
        finally:
            self.taken = False

    def desk(self) -> Desk:
        return self.kept

    def put_desk(self, desk: Desk) -> None:
        self.kept = desk

    def notes(self) -> dict[str, Note]:
        return dict(sorted(self.left.items(), key=lambda item: item[1].at_seconds))

    def leave(self, note: Note) -> None:
        self.count += 1
        self.left[f"{self.count:06d}"] = note

    def drop(self, names: list[str]) -> None:
        for name in names:
            self.left.pop(name, None)

    def put_aside(self, mail: Mail) -> str:
        self.aside.append(mail)
        return f"refused/{mail.id}"


class MemoryNotifier(Struct):
    """A mail server that may be down."""

    mails: list[Mail] = field(default_factory=list)
    down: bool = False
    refuses: set[str] = field(default_factory=set)
    """Words of subjects that it does not take."""

    def send(self, mail: Mail) -> str:
        if any(word in mail.subject for word in self.refuses):
            raise MailRefusedError("the mail server refused it")
        if self.down:
            raise PlatformError("the mail server is down")
        self.mails.append(mail)
        return ""
