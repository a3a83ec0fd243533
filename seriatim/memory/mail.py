"""The mail server in memory, held to the same contract tests as the real one.

Next: alerts/smtp.py has the real one; an outbox in memory is one on a store in memory.
"""

from __future__ import annotations

from msgspec import Struct, field

from seriatim.alerts.incidents import Mail, MailRefusedError
from seriatim.errors import PlatformError


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
