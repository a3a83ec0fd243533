"""Reports are made of the ledger alone: what a run did, what was found, what was judged."""

from __future__ import annotations

import pytest

from seriatim.errors import ConfigError
from seriatim.operations.report import build_report
from seriatim.web.views import render_report
from tests.operations.check_helper import run_check, values_between
from tests.operations.memory_streams import A0, create_filled_stream, create_stream, send


def test_a_report_says_what_a_run_did() -> None:
    """Certificates, findings with their commands, verdicts, what keeps the circuit open, a picture
    of partitions.
    """
    made = create_filled_stream(2)
    made.run()
    send(made, A0, b"poison", 3)
    made.run()
    run_check(made, values_between("v", 0, 1, name="v is small"))
    last, page = build_report(made.ledger, "s")
    assert last == 3
    drawn = render_report(page)
    for word in (
        "Certificates",
        "PoisonError: s in-a/0",
        "CheckError: s in-a/0",
        "v is small",
        "Verdicts",
        "bad",
    ):
        assert word in drawn
    assert "seriatim accept s --sequence 2" in drawn
    assert 'aria-label="in-a/1: folded 0 to 3, log end 3"' in drawn
    cards = {card.label: card.value for card in page.cards}
    assert (cards["messages"], cards["records"], cards["circuit"]) == ("8", "8", "open")


def test_a_report_of_the_past_can_be_made_again() -> None:
    """As of any entry, and of a range of them."""
    made = create_filled_stream()
    made.run()
    send(made, A0, 3)
    made.run()
    assert render_report(build_report(made.ledger, "s", 1, 0)[1]) == render_report(
        build_report(made.ledger, "s", 1, 0)[1]
    )
    assert {
        card.value
        for card in build_report(made.ledger, "s", 2, 1)[1].cards
        if card.label == "messages"
    } == {"1"}
    with pytest.raises(ConfigError, match="there is no entry 9"):
        build_report(made.ledger, "s", 9)
    with pytest.raises(ConfigError, match="never run"):
        build_report(create_stream().ledger, "s")


def test_hostile_sessions_do_nothing_on_the_page() -> None:
    """A session's name is whatever a producer sent as key."""
    made = create_filled_stream()
    send(made, A0, b"<img src=x>", session='<script>alert("x")</script>')
    made.run()
    drawn = render_report(build_report(made.ledger, "s")[1])
    assert "<script" not in drawn
    assert "<img" not in drawn


def test_all_that_waits_for_a_person_is_there() -> None:
    """Not only halts: sessions in quarantine, holds and failed checks wait as well, each with what
    to type.
    """
    made = create_filled_stream(2)
    made.run()
    send(made, A0, b"poison", 3)
    made.run()
    run_check(made, values_between("v", 0, 1, name="v is small"))
    _, page = build_report(made.ledger, "s")
    waiting = next(table for table in page.tables if table.title == "What waits for a person")
    found = {(row[0], row[1]) for row in waiting.rows}
    assert {("in-a/0", "quarantine"), ("in-a/0", "check")} <= found
    assert all(row[-1].startswith("seriatim ") for row in waiting.rows)
