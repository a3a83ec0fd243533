"""SMTP: hands a mail to a mail server. Every failure is a `PlatformError`: the mail stays in the
outbox and is tried again.

Next: alerts/alert.py keeps mails until they are sent; alerts/channels.py lists the channels.
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
from seriatim.config import Settings, expand_user
from seriatim.errors import ConfigError, PlatformError

TIMEOUT_SECONDS = 15.0
REFUSED_ERRORS = (smtplib.SMTPRecipientsRefused, smtplib.SMTPDataError)
SMTP_ERRORS = (smtplib.SMTPException, OSError, ValueError)
"""ValueError: a host name or a password that the library cannot encode."""
CHECK_ADVICE = "start it, or correct SERIATIM_SMTP and SERIATIM_SMTP_*"
Tls = Literal["none", "starttls", "tls"]


class MailServer(Struct, frozen=True, kw_only=True):
    """The address and the credentials of a mail server. Its text form never has the password."""

    host: str
    port: int
    user: str = ""
    password: str = ""
    tls: Tls = "none"
    sender: str = ""

    def __repr__(self) -> str:
        return f"MailServer({self.host}:{self.port}, tls={self.tls})"


def mail_server(
    address: str,
    *,
    user: str = "",
    password: str = "",
    password_file: Path | None = None,
    tls: Tls = "none",
    sender: str = "",
) -> MailServer:
    """The mail server of the settings. `address` is HOST or HOST:PORT; the password comes from its
    own file if one is named.
    """
    host = address
    port = "465" if tls == "tls" else "25"
    if ":" in address:
        host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"smtp: {address!r} is not HOST:PORT",
            next="fix SERIATIM_SMTP, like mail.example.org:587",
        )
    if password_file is not None:
        password = _read_password(password_file)
    return MailServer(
        host=host, port=int(port), user=user, password=password, tls=tls, sender=sender
    )


def notifier_from_settings(settings: Settings) -> SmtpNotifier | None:
    """Sends mails through the mail server of the settings; None if none is set."""
    if not settings.smtp:
        return None
    server = mail_server(
        settings.smtp,
        user=settings.smtp_user,
        password=settings.smtp_password,
        password_file=settings.smtp_password_file,
        tls=settings.smtp_tls,
        sender=settings.smtp_from,
    )
    return SmtpNotifier(server)


def _read_password(password_file: Path) -> str:
    advice = "fix SERIATIM_SMTP_PASSWORD_FILE"
    try:
        path = expand_user(password_file, "smtp_password_file", advice)
        return path.read_text().strip()
    except OSError as error:
        message = f"smtp_password_file: {password_file}: {error.strerror}"
        raise ConfigError(message, next=advice) from None


class SmtpNotifier:
    """Sends mails through one server, with a connection for each. A server that could not be
    reached is not tried again by this object.
    """

    def __init__(self, server: MailServer) -> None:
        self.server = server
        self.unreachable_reason = ""

    def send(self, mail: Mail) -> str:
        """Send a mail; which recipients were refused while others got it, as a sentence. Raises
        `PlatformError` if nobody got it.
        """
        server_name = self._server_name()
        try:
            with self._connect_unless_unreachable() as connection:
                refused = connection.send_message(self._email_message(mail))
        except REFUSED_ERRORS as error:
            reason = f"{server_name} did not take the mail: {_describe_error(error)}"
            raise MailRefusedError(reason) from None
        except SMTP_ERRORS as error:
            reason = f"{server_name} did not take the mail: {_describe_error(error)}"
            raise PlatformError(reason) from None
        if refused:
            return f"{server_name} refused {', '.join(sorted(refused))}"
        return ""

    def check(self) -> str:
        """Connect and log in as for a mail, and send none; returns HOST:PORT of the server. Raises
        `PlatformError` if it lets nobody in.
        """
        server = self.server
        address = f"{server.host}:{server.port}"
        try:
            with self._connect() as connection:
                code, answer = connection.noop()
        except SMTP_ERRORS as error:
            reason = f"{address} takes no mail: {_describe_error(error)}"
            raise PlatformError(reason, next=CHECK_ADVICE) from None
        if code >= 400:
            answer_text = answer.decode(errors="replace")
            reason = f"{address} takes no mail: {code} {answer_text}"[:300]
            raise PlatformError(reason, next=CHECK_ADVICE)
        return address

    def _server_name(self) -> str:
        return f"the mail server {self.server.host}:{self.server.port}"

    def _connect_unless_unreachable(self) -> smtplib.SMTP:
        """A connection that is logged in. When a server is down, many mails may wait, and each
        attempt to connect takes the whole timeout: so only the first one tries.
        """
        if self.unreachable_reason:
            raise PlatformError(self.unreachable_reason)
        try:
            return self._connect()
        except SMTP_ERRORS as error:
            server_name = self._server_name()
            self.unreachable_reason = (
                f"{server_name} did not take the mail: {_describe_error(error)}"
            )
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
        sender_domain = parseaddr(sender)[1].rpartition("@")[2] or "local"
        message = EmailMessage()
        message["Subject"] = mail.subject
        message["From"] = sender
        message["To"] = ", ".join(mail.to)
        message["Date"] = format_datetime(datetime.fromtimestamp(mail.at_seconds, UTC))
        # The same id over all attempts: mail programs show a repeated mail once.
        message["Message-ID"] = f"<{mail.id}@seriatim.{sender_domain}>"
        if mail.follows:
            message["In-Reply-To"] = f"<{mail.follows}@seriatim.{sender_domain}>"
            message["References"] = message["In-Reply-To"]
        message["Auto-Submitted"] = "auto-generated"
        message.set_content(mail.text)
        message.add_alternative(mail.html, subtype="html")
        return message


def _describe_error(error: Exception) -> str:
    """The server's answer, without anything that we sent, such as the password."""
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return f"it refused the user or the password ({error.smtp_code})"
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return f"it refused {', '.join(sorted(error.recipients))}"
    return f"{type(error).__name__}: {error}"[:300]
