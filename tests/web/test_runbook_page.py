"""The runbook as a page: mails link to its rows, so each finding and each alert has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seriatim.engine.findings import FINDING_TITLES, runbook_row
from seriatim.web.render import runbook_text
from seriatim.web.runbook import parse_runbook
from seriatim.web.views import render_runbook_page
from tests.test_runbook import CONCERNS
from tests.web.streams_on_disk import Lake

NAMES = [*FINDING_TITLES, *CONCERNS, "repair"]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"run"}))
def test_every_finding_and_alert_has_a_row_with_an_address(name: str) -> None:
    """The address that its mail has."""
    assert f'<tr id="{runbook_row(name)}">' in render_runbook_page("/seriatim", runbook_text())


def test_a_failed_run_has_one_too() -> None:
    """Its kind is `run`, its row is that of the subject."""
    assert '<tr id="run-failed">' in render_runbook_page("/seriatim", runbook_text())


def test_all_words_of_the_runbook_are_on_the_page(tmp_path: Path) -> None:
    """Headings, paragraphs, commands and cells; and nothing of it is HTML."""
    page = Lake(tmp_path).get("/runbook").text
    for said in ("A sequence gap", "Exit codes", "seriatim gaps orders --open", "never came"):
        assert said in page
    assert "|---" not in page
    assert "](#" not in page


def test_what_is_no_markdown_of_ours_stays_text() -> None:
    """A page must not be broken by a word in a document."""
    page = render_runbook_page(
        "/seriatim", "# A <b>\n\nsome *text* <script>\n\n| a |\n|---|\n| b |\n"
    )
    assert "<script>" not in page.replace('<script src="/seriatim', "")
    assert "&lt;script&gt;" in page
    assert parse_runbook("") == []
    assert "is not on this host" in render_runbook_page("/seriatim", "")


def test_a_link_to_a_heading_leads_there() -> None:
    """Else the words "see below" of a row would lead nowhere. Each id is there once."""
    page = render_runbook_page("/seriatim", runbook_text())
    assert '<h2 id="a-sequence-gap">A sequence gap</h2>' in page
    row = page.partition('<tr id="sequence-gap">')[2].partition("</tr>")[0]
    assert '<a href="#a-sequence-gap">below</a>' in row
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    linked_ids = re.findall(r'href="#([^"]*)"', page)
    assert linked_ids
    assert set(linked_ids) <= set(ids)
