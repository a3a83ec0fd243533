"""A mail catcher: takes every mail on a local port and shows them on a page. For the demo; it sends
nothing on.

Next room: stage.py starts it.
"""

from __future__ import annotations

import threading
from email import message_from_bytes, policy
from email.message import EmailMessage
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from seriatim.errors import ensure

MAILS_MAX = 200
PAGE_HTML = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="15"><title>mails</title>'
    '<body style="font-family:sans-serif;max-width:60em;margin:2em auto">'
    "<h2>{count}</h2>{mails}</body>"
)
MAIL_HTML = (
    '<details{opened} style="border-top:1px solid #ccc"><summary>{subject}</summary>'
    '<pre style="white-space:pre-wrap">{text}</pre></details>'
)


class MailFolder:
    """The last mails, newest first."""

    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []

    def add(self, content: bytes) -> None:
        """Keep one, as it came."""
        parsed = message_from_bytes(content, policy=policy.default)
        ensure(isinstance(parsed, EmailMessage), "the policy makes messages of this kind")
        self.mails = [parsed, *self.mails][:MAILS_MAX]

    def render_page(self) -> str:
        """All of them, their text escaped."""
        shown = [_render_mail(mail, is_open=number == 0) for number, mail in enumerate(self.mails)]
        count = f"{len(self.mails)} mail{'s' * (len(self.mails) != 1)}"
        return PAGE_HTML.format(count=count, mails="".join(shown))


def _render_mail(mail: EmailMessage, *, is_open: bool) -> str:
    """One of them; the newest is open."""
    body = mail.get_body(("plain",))
    text = "" if body is None else str(body.get_content())
    return MAIL_HTML.format(
        opened=" open" * is_open,
        subject=escape(f"{mail['Date']}  {mail['Subject']}"),
        text=escape(text),
    )


class MailCatcher:
    """SMTP on one port, a page on another, both on 127.0.0.1."""

    def __init__(self, port: int, page_port: int) -> None:
        from aiosmtpd.controller import Controller

        self.folder = MailFolder()
        self.smtp_server = Controller(_SmtpReceiver(self.folder), hostname="127.0.0.1", port=port)
        self.page_server = ThreadingHTTPServer(
            ("127.0.0.1", page_port), _page_request_class(self.folder)
        )

    def start(self) -> None:
        """Take mails, show them."""
        self.smtp_server.start()
        threading.Thread(target=self.page_server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Both end."""
        self.smtp_server.stop()
        self.page_server.shutdown()
        self.page_server.server_close()


class _SmtpReceiver:
    """What the SMTP server calls, by its own names."""

    def __init__(self, folder: MailFolder) -> None:
        self.folder = folder

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802  # aiosmtpd's
        self.folder.add(envelope.content)
        return "250 OK"


def _page_request_class(folder: MailFolder) -> type[BaseHTTPRequestHandler]:
    class Page(BaseHTTPRequestHandler):
        """One page, whatever is asked for."""

        def do_GET(self) -> None:  # the library's name
            content = folder.render_page().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Say nothing of each look."""

    return Page
