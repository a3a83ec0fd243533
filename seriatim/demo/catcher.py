"""A mail catcher for the demo: it takes every mail on a local port and shows them on a page. It
delivers nothing.

Each mail is a file, so a restart loses none. The page lists them; a mail is shown as its sender made
it, with links that open in a new tab. Scripts in a mail are never run.

Next: demo/stage.py starts it.
"""

from __future__ import annotations

import threading
import time
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from seriatim.errors import ensure
from seriatim.web.render import render_template

MAILS_MAX = 200
MAIL_PATH = "/mail/"
LIST_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-src 'self'"
MAIL_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "sandbox allow-popups allow-popups-to-escape-sandbox"
)
"""What the page of a mail may do: show itself, and open links in another tab."""
MAIL_HEAD = '<!doctype html><meta name="viewport" content="width=device-width, initial-scale=1"><base target="_blank">'
"""Before a mail: it is as wide as the phone, and its links open in a new tab."""


class MailFolder:
    """The newest mails, each in a file. The name of a file begins with the time at which it came."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, content: bytes) -> None:
        """Keep one mail as it came, and forget the oldest ones."""
        name = f"{time.time_ns():020d}"
        scratch = self.folder / f"{name}.new"
        scratch.write_bytes(content)
        scratch.replace(self.folder / f"{name}.eml")
        for path in self._paths()[MAILS_MAX:]:
            path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        """The files, the newest first."""
        return sorted(self.folder.glob("*.eml"), reverse=True)

    def render_list(self) -> str:
        """All mails as an HTML page, the newest first."""
        mails = []
        for path in self._paths():
            mail = _parse_mail(path.read_bytes())
            address = f"{MAIL_PATH}{path.stem}"
            mails.append(
                {"date": str(mail["Date"]), "subject": str(mail["Subject"]), "address": address}
            )
        return render_template("mail_catcher.html", mails=mails)

    def render_mail(self, name: str) -> str | None:
        """One mail as an HTML page: as its sender made it, or its text. None: there is no such mail."""
        for path in self._paths():
            # Names are compared with those that are there: an address is never made a path.
            if path.stem == name:
                return _mail_html(_parse_mail(path.read_bytes()))
        return None


def _parse_mail(content: bytes) -> EmailMessage:
    mail = message_from_bytes(content, policy=policy.default)
    ensure(isinstance(mail, EmailMessage), "the policy makes messages of this kind")
    return mail


def _mail_html(mail: EmailMessage) -> str:
    body = mail.get_body(("html",))
    if body is not None:
        return f"{MAIL_HEAD}{body.get_content()}"
    plain = mail.get_body(("plain",))
    text = "" if plain is None else str(plain.get_content())
    return render_template("mail_catcher.html", mails=[], text=text)


class MailCatcher:
    """An SMTP server on one port and a page on another, both on 127.0.0.1."""

    def __init__(self, port: int, page_port: int, folder: Path) -> None:
        from aiosmtpd.controller import Controller

        self.folder = MailFolder(folder)
        self.smtp_server = Controller(_SmtpReceiver(self.folder), hostname="127.0.0.1", port=port)
        self.page_server = ThreadingHTTPServer(
            ("127.0.0.1", page_port), _page_request_class(self.folder)
        )

    def start(self) -> None:
        """Begin to take mails and to show them."""
        self.smtp_server.start()
        threading.Thread(target=self.page_server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """End both servers."""
        self.smtp_server.stop()
        self.page_server.shutdown()
        self.page_server.server_close()


class _SmtpReceiver:
    """What the SMTP server calls. The names of its methods are given by aiosmtpd."""

    def __init__(self, folder: MailFolder) -> None:
        self.folder = folder

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802  # aiosmtpd's
        self.folder.add(envelope.content)
        return "250 OK"


def _page_request_class(folder: MailFolder) -> type[BaseHTTPRequestHandler]:
    class Page(BaseHTTPRequestHandler):
        """Answers with the list of mails, or with one mail."""

        def do_GET(self) -> None:  # the library's name
            if self.path.startswith(MAIL_PATH):
                mail = folder.render_mail(self.path.removeprefix(MAIL_PATH))
                self._answer(mail, MAIL_POLICY)
            else:
                self._answer(folder.render_list(), LIST_POLICY)

        def _answer(self, page: str | None, content_policy: str) -> None:
            content = (page or "there is no such mail").encode("utf-8", "replace")
            self.send_response(404 if page is None else 200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Security-Policy", content_policy)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Log no requests."""

    return Page
