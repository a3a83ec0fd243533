"""A mail catcher for the demo: it takes every mail on a local port and shows them on a page. It
delivers nothing.

Next: demo/stage.py starts it.
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
    """The newest mails, the newest first."""

    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []

    def add(self, content: bytes) -> None:
        """Keep one mail as it came."""
        parsed = message_from_bytes(content, policy=policy.default)
        ensure(isinstance(parsed, EmailMessage), "the policy makes messages of this kind")
        self.mails = [parsed, *self.mails][:MAILS_MAX]

    def render_page(self) -> str:
        """All mails as an HTML page, with their text escaped. The newest one is unfolded."""
        mails = [_render_mail(mail, is_open=i == 0) for i, mail in enumerate(self.mails)]
        count = "1 mail" if len(mails) == 1 else f"{len(mails)} mails"
        return PAGE_HTML.format(count=count, mails="".join(mails))


def _render_mail(mail: EmailMessage, *, is_open: bool) -> str:
    """One mail as HTML."""
    body = mail.get_body(("plain",))
    text = "" if body is None else str(body.get_content())
    return MAIL_HTML.format(
        opened=" open" if is_open else "",
        subject=escape(f"{mail['Date']}  {mail['Subject']}"),
        text=escape(text),
    )


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
