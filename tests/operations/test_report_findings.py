"""Findings reach a person once, also when a run dies before it could tell them."""

from __future__ import annotations

from seriatim.ledger.manifests import REPORTED_NOTE
from seriatim.ledger.model import EntryMark
from seriatim.operations.report_findings import mark_reported, unreported_findings
from tests.operations.memory_streams import A0, create_filled_stream, send


def test_findings_of_a_run_that_died_are_told_by_the_next() -> None:
    """What is in the ledger and was not told is found again, and once told it is not."""
    made = create_filled_stream()
    send(made, A0, b"?")
    made.run()

    (finding,) = unreported_findings(made.ledger, "s")
    assert (finding.finding, finding.offset) == ("poison", 3)
    mark_reported(made.ledger, made.ledger.head("s").ledger.sequence)  # type: ignore[union-attr]
    assert unreported_findings(made.ledger, "s") == []


def test_telling_never_goes_back() -> None:
    """A slow run that tells late does not make the others' findings new again."""
    made = create_filled_stream()
    mark_reported(made.ledger, 5)
    mark_reported(made.ledger, 2)
    assert made.ledger.note(REPORTED_NOTE) == EntryMark(5)


def test_a_stream_without_a_ledger_has_nothing_to_tell() -> None:
    """The first run ever."""
    assert unreported_findings(create_filled_stream().ledger, "s") == []
