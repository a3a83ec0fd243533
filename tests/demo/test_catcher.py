"""The demo's mail catcher: every mail is on its page, as its sender made it, also after a restart."""

from __future__ import annotations

import smtplib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from pathlib import Path

import pytest

from seriatim.alerts.incidents import Mail
from seriatim.alerts.smtp import SmtpNotifier, mail_server
from seriatim.demo.catcher import MAILS_MAX, MailCatcher, MailFolder
from tests.mail_catcher import free_port

LINK = "http://127.0.0.1:8080/dags/live/runs/r1"


@contextmanager
def started(folder: Path) -> Iterator[tuple[int, int]]:
    """A catcher on two free ports."""
    ports = free_port(), free_port()
    catcher = MailCatcher(*ports, folder)
    catcher.start()
    try:
        yield ports
    finally:
        catcher.stop()


def page_of(port: int, path: str = "/") -> tuple[str, str]:
    """A page, and what it may do."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=120) as answer:
        return answer.read().decode(), answer.headers["Content-Security-Policy"]


def send_text(port: int, subject: str, text: str) -> None:
    """Send a mail without HTML."""
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = subject, "a@localhost", "b@localhost"
    mail.set_content(text)
    with smtplib.SMTP("127.0.0.1", port) as server:
        server.send_message(mail)


def addresses(page: str) -> list[str]:
    """The addresses of the mails in the list, the newest first."""
    return [part.partition('"')[0] for part in page.split('<a href="')[1:]]


def test_mails_are_on_the_page(tmp_path: Path) -> None:
    """Newest first, as text: nothing in a mail becomes HTML of ours."""
    with started(tmp_path) as (mail_port, page_port):
        for number in range(2):
            send_text(mail_port, f"mail {number} <b>", "<script>x</script>")
        page, _ = page_of(page_port)
        mail, _ = page_of(page_port, addresses(page)[0])
    assert "2 mails" in page
    assert page.index("mail 1") < page.index("mail 0")
    assert "&lt;b&gt;" in page
    assert "<script>" not in page + mail
    assert "&lt;script&gt;x" in mail


def test_an_alert_is_shown_as_html_with_links_that_work(tmp_path: Path) -> None:
    """The links open in another tab; a script in a mail would not be run."""
    with started(tmp_path) as (mail_port, page_port):
        mail = Mail(
            id="1",
            to=("on-call@localhost",),
            subject="[seriatim] live: a run failed",
            text="the text",
            html=f'<div><a href="{LINK}">the run</a><script>x</script></div>',
            at_seconds=0.0,
        )
        SmtpNotifier(mail_server(f"127.0.0.1:{mail_port}")).send(mail)
        listed, list_policy = page_of(page_port)
        shown, mail_policy = page_of(page_port, addresses(listed)[0])
    assert f'<a href="{LINK}">the run</a>' in shown
    assert '<base target="_blank">' in shown
    assert f'<iframe src="{addresses(listed)[0]}"' in listed
    assert "script-src" not in list_policy + mail_policy
    assert "default-src 'none'" in mail_policy
    assert "allow-popups allow-popups-to-escape-sandbox" in mail_policy
    assert "allow-scripts" not in mail_policy


def test_a_phone_shows_mails_at_its_own_width(tmp_path: Path) -> None:
    """The list, a mail of text, and a mail of HTML: without this a phone shows them tiny."""
    with started(tmp_path) as (mail_port, page_port):
        send_text(mail_port, "text", "seriatim status live")
        mail = Mail(id="1", to=("a@b",), subject="html", text="t", html="<p>h</p>", at_seconds=0.0)
        SmtpNotifier(mail_server(f"127.0.0.1:{mail_port}")).send(mail)
        listed, _ = page_of(page_port)
        pages = [listed, *(page_of(page_port, address)[0] for address in set(addresses(listed)))]
    assert len(pages) == 3
    for page in pages:
        assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page


def test_mails_are_there_after_a_restart(tmp_path: Path) -> None:
    """Each is a file."""
    with started(tmp_path) as (mail_port, _):
        send_text(mail_port, "before", "it was red")
    with started(tmp_path) as (mail_port, page_port):
        send_text(mail_port, "after", "it is over")
        page, _ = page_of(page_port)
        texts = [page_of(page_port, address)[0] for address in addresses(page)]
    assert page.index("after") < page.index("before")
    assert "it is over" in texts[0]
    assert "it was red" in texts[1]


def test_only_mails_are_shown(tmp_path: Path) -> None:
    """An address is never a path on the disk."""
    (tmp_path / "secret.eml").write_text("secret")
    folder = tmp_path / "mails"
    with started(folder) as (_, page_port):
        for path in ("../secret", "..%2Fsecret", "nobody", ""):
            with pytest.raises(urllib.error.HTTPError) as refused:
                page_of(page_port, f"/mail/{path}")
            assert refused.value.code == 404
            refused.value.close()


def test_the_oldest_are_forgotten(tmp_path: Path) -> None:
    """The folder does not grow without end."""
    folder = MailFolder(tmp_path)
    for number in range(MAILS_MAX + 5):
        folder.add(f"Subject: mail {number}\n\ntext".encode())
    page = folder.render_list()
    assert f"{MAILS_MAX} mails" in page
    assert "mail 4<" not in page
    assert "mail 5<" in page
