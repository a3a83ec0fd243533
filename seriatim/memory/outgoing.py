"""What goes out, in memory: snapshot requests to producers, and mails.

Next: kafka/snapshot_requests.py and alerts/smtp.py have the real ones; an outbox in memory is one on a
store in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from seriatim.alerts.incidents import Mail, MailRefusedError
from seriatim.errors import PlatformError
from seriatim.ledger.gaps import SnapshotRequest


class MemoryRequests:
    """A topic of requests. While `is_down` is set, its broker does not answer."""

    def __init__(self) -> None:
        self.sent_requests: list[SnapshotRequest] = []
        self.is_down = False

    def send(self, requests: Sequence[SnapshotRequest]) -> None:
        """Send all requests, or raise `PlatformError`."""
        if self.is_down:
            raise PlatformError(
                "producers could not be asked for snapshots: the broker is down", next="start it"
            )
        self.sent_requests += requests


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

    def check(self) -> str:
        if self.is_down:
            raise PlatformError("the mail server is down", next="set `is_down` to False")
        return "memory"
