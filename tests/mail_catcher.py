"""A mail catcher for tests: an SMTP server on loopback that keeps what arrives.

Next room: tests/contracts/test_smtp.py sends to it; tests/integration has Airflow send to it.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from aiosmtpd.smtp import Envelope


class Catcher:
    """Keeps what arrives; refuses whom it is told to."""

    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []
        self.refused: set[str] = set()

    async def handle_RCPT(  # noqa: N802  # aiosmtpd's name
        self, _server: Any, _session: Any, envelope: Envelope, address: str, _options: Any
    ) -> str:
        """Refuse whom it should."""
        if address in self.refused:
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Envelope) -> str:  # noqa: N802
        """Keep it."""
        content = envelope.content
        assert isinstance(content, bytes)
        parsed = message_from_bytes(content, policy=policy.default)
        assert isinstance(parsed, EmailMessage)
        self.mails.append(parsed)
        return "250 OK"


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def certificate_for_loopback(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's side of TLS for 127.0.0.1, and the certificate that a client must trust."""
    certificate, key = folder / "mail.pem", folder / "mail.key"
    command = ["openssl", "req", "-x509", "-nodes", "-days", "1", "-newkey", "rsa:2048"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate
