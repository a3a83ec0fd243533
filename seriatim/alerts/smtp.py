"""Mail: hands an alert to an SMTP server. Any trouble is trouble of the platform: the mail is kept
and tried again.

Next room: alerts/alert.py keeps mails until they are sent.
"""

from __future__ import annotations

import smtplib
import socket
import ssl
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime, parseaddr
from pathlib import Path
from typing import Literal

from msgspec import Struct

from seriatim.alerts.incidents import Mail, MailRefusedError
from seriatim.config import expand_user
from seriatim.errors import ConfigError, PlatformError

TIMEOUT_SECONDS = 15.0
REFUSED_ERRORS = (smtplib.SMTPRecipientsRefused, smtplib.SMTPDataError)
SMTP_ERRORS = (smtplib.SMTPException, OSError, ValueError)
"""The last: what no server or password should be."""
Tls = Literal["none", "starttls", "tls"]


class MailServer(Struct, frozen=True, kw_only=True):
    """A mail server. The password is a secret: it is in no text that this class makes."""

    host: str
    port: int
    user: str = ""
    password: str = ""
    tls: Tls = "none"
    sender: str = ""

    def __repr__(self) -> str:
        return f"Server({self.host}:{self.port}, tls={self.tls})"


def mail_server(address: str, *, user: str = "", password: str = "", password_file: Path | None = None,
           tls: Tls = "none", sender: str = "") -> MailServer:  # fmt: skip
    """A server from settings: HOST or HOST:PORT, and a password of its own file if one is named."""
    host, _, port = (
        address.rpartition(":")
        if ":" in address
        else (address, "", "465" if tls == "tls" else "25")
    )
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"smtp: {address!r} is not HOST:PORT",
            next="fix SERIATIM_SMTP, like mail.example.org:587",
        )
    if password_file is not None:
        try:
            named = expand_user(
                password_file, "smtp_password_file", "fix SERIATIM_SMTP_PASSWORD_FILE"
            )
            password = named.read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"smtp_password_file: {password_file}: {error.strerror}",
                next="fix SERIATIM_SMTP_PASSWORD_FILE",
            ) from None
    return MailServer(
        host=host, port=int(port), user=user, password=password, tls=tls, sender=sender
    )


class SmtpNotifier:
    """Sends through one server, a connection for each mail. One that let nobody in is not asked
    again.
    """

    def __init__(self, server: MailServer) -> None:
        self.server, self.unreachable_reason = server, ""

    def send(self, mail: Mail) -> str:
        """Hand it over, or raise PlatformError; who was refused while others got it."""
        where = f"the mail server {self.server.host}:{self.server.port}"
        try:
            with self._connect_unless_unreachable() as connection:
                refused = connection.send_message(self._email_message(mail))
        except REFUSED_ERRORS as error:
            raise MailRefusedError(
                f"{where} did not take the mail: {_describe_error(error)}"
            ) from None
        except SMTP_ERRORS as error:
            raise PlatformError(
                f"{where} did not take the mail: {_describe_error(error)}"
            ) from None
        return f"{where} refused {', '.join(sorted(refused))}" if refused else ""

    def _connect_unless_unreachable(self) -> smtplib.SMTP:
        """A connection that may send. Many mails wait when a server is away, and each would wait
        for it again.
        """
        if self.unreachable_reason:
            raise PlatformError(self.unreachable_reason)
        try:
            return self._connect()
        except SMTP_ERRORS as error:
            where = f"the mail server {self.server.host}:{self.server.port}"
            self.unreachable_reason = f"{where} did not take the mail: {_describe_error(error)}"
            raise PlatformError(self.unreachable_reason) from None

    def _connect(self) -> smtplib.SMTP:
        server = self.server
        if server.tls == "tls":
            context = ssl.create_default_context()
            connection: smtplib.SMTP = smtplib.SMTP_SSL(
                server.host, server.port, timeout=TIMEOUT_SECONDS, context=context
            )
        else:
            connection = smtplib.SMTP(server.host, server.port, timeout=TIMEOUT_SECONDS)
        try:
            if server.tls == "starttls":
                connection.starttls(context=ssl.create_default_context())
            if server.user:
                connection.login(server.user, server.password)
        except BaseException:
            connection.close()
            raise
        return connection

    def _email_message(self, mail: Mail) -> EmailMessage:
        sender = self.server.sender or f"seriatim@{socket.getfqdn()}"
        message = EmailMessage()
        message["Subject"] = mail.subject
        message["From"] = sender
        message["To"] = ", ".join(mail.to)
        message["Date"] = format_datetime(datetime.fromtimestamp(mail.at_seconds, UTC))
        message["Message-ID"] = (
            f"<{mail.id}@seriatim.{parseaddr(sender)[1].rpartition('@')[2] or 'local'}>"
        )
        message["Auto-Submitted"] = "auto-generated"
        message.set_content(mail.text)
        message.add_alternative(mail.html, subtype="html")
        return message


def _describe_error(error: Exception) -> str:
    """What the server answered, without what we sent it."""
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return f"it refused the user or the password ({error.smtp_code})"
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return f"it refused {', '.join(sorted(error.recipients))}"
    return f"{type(error).__name__}: {error}"[:300]
