"""The runbook knows every finding, every alert and every exit code, and what it says can be typed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from seriatim.alerts.incidents import MAIL_DELAY_SECONDS, Alert
from seriatim.alerts.mail import MailContext, compose_mail
from seriatim.engine.findings import FINDING_TITLES, ConcernKind, Finding
from seriatim.errors import ConfigError, FencedError, IntegrityError, PlatformError, SeriatimError
from tests.test_readme import _unknown_options

PAGES = {
    name: (Path(__file__).parent.parent / "docs" / name).read_text()
    for name in ("RUNBOOK.md", "ALERTS.md")
}
CONCERNS = get_args(ConcernKind)
PACKAGE = Path(__file__).parent.parent / "seriatim"


@pytest.mark.parametrize("finding", sorted(FINDING_TITLES))
def test_every_finding_is_there(finding: str) -> None:
    """By what the subject of its mail says, with its own name beside it."""
    assert f"\n| `{FINDING_TITLES[finding]}` | `{finding}` |" in PAGES["RUNBOOK.md"]
    mail = compose_mail(
        Alert(findings=[Finding(finding=finding, topic="a", partition=0)]),
        MailContext(stream="s", to=()),
        0.0,
    )
    assert mail.subject.startswith(f"[seriatim] s: {FINDING_TITLES[finding]} in ")


@pytest.mark.parametrize("concern", CONCERNS)
def test_every_alert_is_there(concern: str) -> None:
    """On both pages."""
    assert re.search(rf"^\| `{concern}", PAGES["RUNBOOK.md"], re.MULTILINE)
    assert f"`{concern}`" in PAGES["ALERTS.md"]
    assert set(MAIL_DELAY_SECONDS) <= set(CONCERNS)


def test_every_kind_that_is_raised_is_listed() -> None:
    """The list of kinds is what the pages are compared with, so nothing may be missing in it."""
    written = set()
    for path in PACKAGE.rglob("*.py"):
        written |= set(re.findall(r"\bConcern\(\s*kind=\"([^\"]+)\"", path.read_text()))
    assert {"swapped", "held", "blind"} <= written
    assert written <= set(CONCERNS)


def test_the_row_about_poison_tells_a_session_from_a_partition() -> None:
    """`--forward` passes over nothing where only a session is set aside."""
    (row,) = [line for line in PAGES["RUNBOOK.md"].splitlines() if "| `poison` |" in line]
    session, _, partition = row.partition("A partition that waits:")
    assert "snapshot" in session
    assert "--forward" not in session
    assert "--forward" in partition


@pytest.mark.parametrize(
    "error", [SeriatimError, ConfigError, IntegrityError, PlatformError, FencedError]
)
def test_every_exit_code_is_there(error: type[SeriatimError]) -> None:
    """With whether a retry can help."""
    assert re.search(rf"^\| {error.exit_code} \|", PAGES["RUNBOOK.md"], re.MULTILINE)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_what_it_says_can_be_typed(page: str) -> None:
    """No command and no option that does not exist."""
    lines = re.findall(r"(?:`|\$ )(seriatim [^`\n#]+)", PAGES[page])
    assert len(lines) >= 2
    assert {line: _unknown_options(line) for line in lines if _unknown_options(line)} == {}
