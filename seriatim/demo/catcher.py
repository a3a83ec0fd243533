"""A mail catcher for the demo: it takes every mail on a local port and shows them on a page. It
delivers nothing.

Next: demo/stage.py starts it.
"""

from __future__ import annotations

import threading
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from seriatim.errors import ensure
from seriatim.web.render import render_template

MAILS_MAX = 200


class MailFolder:
    """The newest mails, the newest first."""

    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []

    def add(self, content: bytes) -> None:
        """Keep one mail as it came."""
        parsed = message_from_bytes(content, policy=policy.default)
        ensure(isinstance(parsed, EmailMessage), "the policy makes messages of this kind")
        self.mails = [parsed, *self.mails][:MAILS_MAX]

    def render_page(self) -> str:
        """All mails as an HTML page. The newest one is unfolded."""
        return render_template(
            "mail_catcher.html", mails=[_shown_mail(mail) for mail in self.mails]
        )


def _shown_mail(mail: EmailMessage) -> dict[str, str]:
    """What the page shows of one mail."""
    body = mail.get_body(("plain",))
    text = "" if body is None else str(body.get_content())
    return {"date": str(mail["Date"]), "subject": str(mail["Subject"]), "text": text}


class MailCatcher:
    """An SMTP server on one port and a page on another, both on 127.0.0.1."""

    def __init__(self, port: int, page_port: int) -> None:
        from aiosmtpd.controller import Controller

        self.folder = MailFolder()
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
        """Answers every request with the same page."""

        def do_GET(self) -> None:  # the library's name
            content = folder.render_page().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Log no requests."""

    return Page
