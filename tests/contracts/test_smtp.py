"""Mail through a real SMTP server on loopback: what arrives, and what becomes of servers that are
down or refuse.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, LoginPassword

from seriatim.alerts.incidents import Mail
from seriatim.alerts.smtp import MailServer, SmtpNotifier, Tls, mail_server
from seriatim.errors import ConfigError, PlatformError
from seriatim.memory.outgoing import MemoryNotifier
from tests.mail_catcher import Catcher, certificate_for_loopback, free_port

MAIL = Mail(
    id="abc", to=("ops@example.org", "dev@example.org"), subject="Frühling – ü", text="text ü\n", html="<p>ü</p>",
    at_seconds=0.0,
)  # fmt: skip
SECRET = "canary-8f2a"


@pytest.fixture
def catcher() -> Iterator[tuple[Catcher, int]]:
    """A mail server on loopback."""
    caught, port = Catcher(), free_port()
    controller = Controller(caught, hostname="127.0.0.1", port=port)
    controller.start()
    yield caught, port
    controller.stop()


def test_a_mail_arrives_in_text_and_html(catcher: tuple[Catcher, int]) -> None:
    """To all, with a subject beyond ASCII, and an id that stays the same."""
    caught, port = catcher
    assert (
        SmtpNotifier(mail_server(f"127.0.0.1:{port}", sender="seriatim@example.org")).send(MAIL)
        == ""
    )
    (mail,) = caught.mails
    assert (mail["Subject"], mail["To"]) == ("Frühling – ü", "ops@example.org, dev@example.org")
    assert mail["Message-ID"] == "<abc@seriatim.example.org>"
    parts = {
        part.get_content_type(): part.get_content().replace("\r", "") for part in mail.iter_parts()
    }
    assert parts == {"text/plain": "text ü\n", "text/html": "<p>ü</p>\n"}


def test_who_was_refused_while_others_got_it_is_said(catcher: tuple[Catcher, int]) -> None:
    """The mail is not sent again for it."""
    caught, port = catcher
    caught.refused.add("dev@example.org")
    assert "refused dev@example.org" in SmtpNotifier(mail_server(f"127.0.0.1:{port}")).send(MAIL)
    assert len(caught.mails) == 1


def test_a_server_that_refuses_all_is_trouble(catcher: tuple[Catcher, int]) -> None:
    """The mail waits: somebody may fix it."""
    caught, port = catcher
    caught.refused |= set(MAIL.to)
    with pytest.raises(PlatformError, match=r"refused dev@example\.org, ops@example\.org"):
        SmtpNotifier(mail_server(f"127.0.0.1:{port}")).send(MAIL)


def test_a_server_that_is_down_or_hangs_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bounded time."""
    with pytest.raises(PlatformError, match="did not take the mail"):
        SmtpNotifier(mail_server(f"127.0.0.1:{free_port()}")).send(MAIL)
    monkeypatch.setattr("seriatim.alerts.smtp.TIMEOUT_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(PlatformError, match="did not take the mail"):
            SmtpNotifier(mail_server(f"127.0.0.1:{silent.getsockname()[1]}")).send(MAIL)


def test_a_server_that_let_nobody_in_is_not_asked_again(catcher: tuple[Catcher, int]) -> None:
    """Mails of thirty streams wait: the time it takes to hear nothing is spent once. Another
    notifier asks anew.
    """
    caught, port = catcher
    away = SmtpNotifier(mail_server(f"127.0.0.1:{free_port()}"))
    with pytest.raises(PlatformError) as first:
        away.send(MAIL)
    away.server = mail_server(f"127.0.0.1:{port}")
    with pytest.raises(PlatformError) as second:
        away.send(MAIL)
    assert (second.value.message, caught.mails) == (first.value.message, [])


def test_a_check_goes_in_and_sends_nothing(catcher: tuple[Catcher, int]) -> None:
    """It tells the address, and asks a server again that it could not reach before."""
    caught, port = catcher
    assert SmtpNotifier(mail_server(f"127.0.0.1:{port}")).check() == f"127.0.0.1:{port}"
    assert caught.mails == []
    away = SmtpNotifier(mail_server(f"127.0.0.1:{free_port()}"))
    for _ in range(2):
        with pytest.raises(PlatformError, match="takes no mail: ConnectionRefusedError"):
            away.check()


@pytest.mark.parametrize("tls", ["tls", "starttls"])
def test_a_check_speaks_tls_as_a_mail_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: Tls
) -> None:
    """A server whose certificate nobody vouches for lets neither in; a trusted one lets both in."""
    context, certificate = certificate_for_loopback(tmp_path)
    caught = Catcher()
    if tls == "tls":
        options: dict[str, Any] = {"ssl_context": context}
    else:
        options = {"tls_context": context, "require_starttls": True}
    controller = Controller(caught, hostname="127.0.0.1", port=free_port(), **options)
    controller.start()
    try:
        address = f"127.0.0.1:{controller.port}"
        with pytest.raises(PlatformError, match="certificate"):
            SmtpNotifier(mail_server(address, tls=tls)).check()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        notifier = SmtpNotifier(mail_server(address, tls=tls, sender="seriatim@example.org"))
        assert (notifier.check(), caught.mails) == (address, [])
        assert (notifier.send(MAIL), len(caught.mails)) == ("", 1)
    finally:
        controller.stop()


def test_the_fake_can_be_down_too() -> None:
    """The same answer as the real one's."""
    fake = MemoryNotifier(is_down=True)
    with pytest.raises(PlatformError):
        fake.send(MAIL)
    fake.is_down = False
    assert (fake.send(MAIL), fake.mails) == ("", [MAIL])


@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")  # on loopback
@pytest.mark.parametrize("right", [True, False])
def test_a_password_comes_from_a_file_and_goes_nowhere_else(tmp_path: Path, *, right: bool) -> None:
    """It opens the server, and is in no error and no text of ours."""
    asked: list[bytes] = []

    def login(
        _server: Any, _session: Any, _envelope: Any, _mechanism: str, data: Any
    ) -> AuthResult:
        assert isinstance(data, LoginPassword)
        asked.append(data.password)
        return AuthResult(success=right, handled=False)

    secret, caught = tmp_path / "password", Catcher()
    secret.write_text(f"{SECRET}\n")
    controller = Controller(
        caught,
        hostname="127.0.0.1",
        port=free_port(),
        authenticator=login,
        auth_required=True,
        auth_require_tls=False,
    )
    controller.start()
    try:
        made = mail_server(f"127.0.0.1:{controller.port}", user="me", password_file=secret)
        if right:
            SmtpNotifier(made).send(MAIL)
        else:
            with pytest.raises(PlatformError) as refused:
                SmtpNotifier(made).send(MAIL)
            assert SECRET not in refused.value.render()
            assert "user or the password" in refused.value.message
    finally:
        controller.stop()
    assert SECRET.encode() in asked
    assert len(caught.mails) == right
    assert SECRET not in repr(made)
    assert repr(made).startswith("MailServer(")


@pytest.mark.parametrize("address", ["", ":25", "host:", "host:0", "host:99999", "host:smtp"])
def test_an_address_that_cannot_be_one_is_refused(address: str) -> None:
    """With what it looks like."""
    with pytest.raises(ConfigError, match="HOST:PORT"):
        mail_server(address)


def test_ports_have_defaults() -> None:
    """25, or 465 with TLS from the start."""
    assert mail_server("mail") == MailServer(host="mail", port=25)
    assert mail_server("mail", tls="tls").port == 465
    with pytest.raises(ConfigError, match="smtp_password_file"):
        mail_server("mail", password_file=Path("/none/such"))
    with pytest.raises(ConfigError, match="smtp_password_file"):
        mail_server("mail", password_file=Path("~nobody-here/such"))


def test_a_server_that_answers_nonsense_is_trouble() -> None:
    """A challenge that is not base64, a password beyond ASCII: said as trouble, and the password in
    no text.
    """
    with Nonsense() as port:
        for password in (SECRET, f"{SECRET}ü"):
            notifier = SmtpNotifier(mail_server(f"127.0.0.1:{port}", user="u", password=password))
            with pytest.raises(PlatformError, match="did not take the mail") as trouble:
                notifier.send(MAIL)
            assert SECRET not in trouble.value.render()


class Nonsense:
    """A server that asks for a login, and answers it with what is no challenge."""

    def __enter__(self) -> int:
        self.socket = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        return int(self.socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                with suppress(OSError), connection, connection.makefile("rw", newline="") as lines:
                    lines.write("220 here\r\n")
                    lines.flush()
                    answers = {"e": "250-here\r\n250 AUTH CRAM-MD5\r\n", "A": "334 a\r\n"}
                    for line in lines:
                        lines.write(answers.get(line[0], "250 so\r\n"))
                        lines.flush()
