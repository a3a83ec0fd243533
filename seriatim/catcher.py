"""A mail catcher: takes every mail on a local port and shows them on a page. For the demo; it sends nothing on.

Next room: stage.py starts it.
"""

from __future__ import annotations

import threading
from email import message_from_bytes, policy
from email.message import EmailMessage
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from seriatim.core.errors import ensure

KEPT_MAX = 200
PAGE = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="15"><title>mails</title>'
    '<body style="font-family:sans-serif;max-width:60em;margin:2em auto">'
    "<h2>{count}</h2>{mails}</body>"
)
ONE = (
    '<details{opened} style="border-top:1px solid #ccc"><summary>{subject}</summary>'
    '<pre style="white-space:pre-wrap">{text}</pre></details>'
)


class Kept:
    """The last mails, newest first."""

    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []

    def add(self, content: bytes) -> None:
        """Keep one, as it came."""
        parsed = message_from_bytes(content, policy=policy.default)
        ensure(isinstance(parsed, EmailMessage), "the policy makes messages of this kind")
        self.mails = [parsed, *self.mails][:KEPT_MAX]

    def page(self) -> str:
        """All of them, their text escaped."""
        shown = [_shown(mail, opened=number == 0) for number, mail in enumerate(self.mails)]
        count = f"{len(self.mails)} mail{'s' * (len(self.mails) != 1)}"
        return PAGE.format(count=count, mails="".join(shown))


def _shown(mail: EmailMessage, *, opened: bool) -> str:
    """One of them; the newest is open."""
    body = mail.get_body(("plain",))
    text = "" if body is None else str(body.get_content())
    return ONE.format(opened=" open" * opened, subject=escape(f"{mail['Date']}  {mail['Subject']}"), text=escape(text))


class MailCatcher:
    """SMTP on one port, a page on another, both on 127.0.0.1."""

    def __init__(self, port: int, page_port: int) -> None:
        from aiosmtpd.controller import Controller

        self.kept = Kept()
        self.smtp = Controller(_Taker(self.kept), hostname="127.0.0.1", port=port)
        self.page = ThreadingHTTPServer(("127.0.0.1", page_port), _answering(self.kept))

    def start(self) -> None:
        """Take mails, show them."""
        self.smtp.start()
        threading.Thread(target=self.page.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Both end."""
        self.smtp.stop()
        self.page.shutdown()
        self.page.server_close()


class _Taker:
    """What the SMTP server calls, by its own names."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802  # aiosmtpd's
        self.kept.add(envelope.content)
        return "250 OK"


def _answering(kept: Kept) -> type[BaseHTTPRequestHandler]:
    class Page(BaseHTTPRequestHandler):
        """One page, whatever is asked for."""

        def do_GET(self) -> None:  # the library's name
            content = kept.page().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Say nothing of each look."""

    return Page
