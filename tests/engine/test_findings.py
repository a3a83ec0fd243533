"""Findings: the tier table of the design, and how a finding reads."""

from __future__ import annotations

import pickle
import subprocess

import pytest

from seriatim.engine.findings import (
    FINDING_ADVICE,
    FINDING_TITLES,
    FORWARD,
    TIER_ACTIONS,
    TIERS,
    WARNING_KINDS,
    Finding,
    group_findings,
    new_findings_error,
    shell_quote,
    shorten,
    tier_action,
)
from seriatim.errors import BrokenPromiseError

DESIGN = """
    re-created    halt  halt halt  halt halt
    truncated     halt  halt halt  halt halt
    gap           count halt count halt halt
    expired       count halt count halt halt
    sequence gap  count halt count wait halt
    repeat        count drop drop  drop halt
    disorder      count count drop heal halt
    moved session count halt count halt halt
    precondition  count halt count halt halt
    raised        halt  halt halt  halt halt
"""


def test_the_tier_table_is_the_designs() -> None:
    """What each tier does about each finding, word for word."""
    for line in DESIGN.strip().splitlines():
        *kind, none, once, order, window, strict = line.split()
        row = dict(zip(TIERS, (none, once, order, window, strict), strict=True))
        assert TIER_ACTIONS[" ".join(kind)] == row
    assert tier_action("gap", "none") == "count"


@pytest.mark.parametrize("kind", sorted(FINDING_TITLES))
def test_every_finding_has_a_title_and_a_next_deed(kind: str) -> None:
    """One screen, with stream, place, offset and what to do; no finding leaves a person alone."""
    finding = Finding(
        finding=kind,
        topic="orders-a",
        partition=3,
        offset=41337,
        expected="x" * 9999,
        cause="tab\there",
    )
    shown = finding.render("orders")
    assert shown.startswith(f"{FINDING_TITLES[kind]}: orders orders-a/3: {kind} at offset 41337")
    assert "next " in shown
    assert "\t" not in shown
    assert len(shown.splitlines()) <= 24
    assert "{" not in finding.advice("orders")


@pytest.mark.parametrize("kind", sorted(FINDING_TITLES))
def test_a_kind_that_only_warns_keeps_its_advice(kind: str) -> None:
    """Also if it names a session, whose other warnings share one advice."""
    assert (kind in WARNING_KINDS) == FINDING_TITLES[kind].endswith("Warning")
    if kind in WARNING_KINDS:
        finding = Finding(finding=kind, topic="a", partition=0, session="s", level="warning")
        assert finding.advice_key == kind


def test_advice_offers_forward_where_it_helps() -> None:
    """The mail's form and the command in the advice agree."""
    assert {kind for kind, advice in FINDING_ADVICE.items() if "--forward" in advice} == set(
        FORWARD
    )
    assert Finding(finding="poison", topic="a", partition=0).can_go_forward
    assert not Finding(finding="poison", topic="a", partition=0, level="warning").can_go_forward
    assert not Finding(finding="raised", topic="a", partition=0, session="s").can_go_forward


def test_a_sequence_gap_offers_no_repair_before_kafka_was_looked_at() -> None:
    """Folding again helps only if the missing message came later, and `status` says whether."""
    finding = Finding(finding="sequence gap", topic="in-a", partition=0, session="s")
    advice = finding.advice("orders")
    assert "seriatim repair" not in advice
    assert "seriatim status orders" in advice
    assert "seriatim quarantine release orders s --topic in-a/0" in advice


@pytest.mark.parametrize("kind", ["poison", "raised", "repeat", "disorder"])
def test_advice_for_sessions_of_several_partitions_names_none(kind: str) -> None:
    """The command then folds all of them again; for one partition it names that."""
    findings = [
        Finding(finding=kind, topic="a", partition=number, session="s") for number in range(4)
    ]
    (group,) = group_findings(findings)
    assert "seriatim repair orders" in group.render("orders")
    assert "--partition" not in group.render("orders")
    assert "seriatim repair orders --partition a/2" in findings[2].advice("orders")


def test_scope_is_as_narrow_as_what_is_known() -> None:
    """A session, else a partition, else the stream."""
    assert Finding(finding="raised", topic="a", partition=0, session="s").scope == "session"
    assert Finding(finding="gap", topic="a", partition=0).scope == "partition"
    assert Finding(finding="foreign").scope == "stream"
    assert Finding(finding="poison", topic="a", partition=0, session="").scope == "session"


def test_a_session_without_a_name_is_seen() -> None:
    """An empty key is a name too, and quotes show it."""
    assert "(session '')" in Finding(finding="raised", topic="a", partition=0, session="").render(
        "orders"
    )


def test_a_sessions_name_forges_no_line() -> None:
    """A name with a line break in it stays within its line, so that it cannot tell people what to
    type next.
    """
    told = Finding(
        finding="raised", topic="a", partition=0, session="x)\n  next       rm -rf /"
    ).render("orders")
    assert "(session x)\\n  next       rm -rf /)" in told


@pytest.mark.parametrize(
    "name", ["plain", "it's", "$(id)'", '"`id`"', "a b", "", "\x1b[2J\n'\\", "ü\u202e漢", "-rf"]
)
def test_a_name_in_a_command_is_one_word(name: str) -> None:
    """Pasted into a shell it is the name itself, whatever a stranger called a session; nothing of
    it is run.
    """
    word = shell_quote(name)
    assert word.isprintable()
    done = subprocess.run(["bash", "-c", f"printf '%s' {word}"], capture_output=True, check=True)
    assert done.stdout == name.encode()


def test_scripts_get_every_field() -> None:
    """The JSON object has the documented keys, with null for what is not known."""
    told = Finding(finding="gap", topic="a", partition=0, offset=0, expected="offset 0").to_dict(
        "orders"
    )
    assert list(told) == [
        *("finding", "level", "stream", "topic", "partition", "offset", "session"),
        *("expected", "found", "cause", "time_left_seconds", "next"),
    ]
    assert (told["offset"], told["partition"], told["session"], told["found"]) == (0, 0, None, None)


def test_findings_outside_the_table_are_our_bug() -> None:
    """A kind nobody knows could be neither judged nor told."""
    with pytest.raises(BrokenPromiseError, match="unknown finding"):
        Finding(finding="oddity")
    assert set(FINDING_ADVICE) >= set(FINDING_TITLES)


@pytest.mark.parametrize(
    "kind",
    ["sequence gap", "repeat", "disorder", "moved session", "precondition", "raised", "poison"],
)
def test_of_a_session_a_snapshot_is_the_first_advice(kind: str) -> None:
    """To fold the same messages again gives the same finding, unless something else was changed."""
    finding = Finding(finding=kind, topic="a", partition=0, offset=3, session="s")
    advice = finding.advice("orders")
    assert advice.startswith("ask the producer for a snapshot of the session")
    before_repair, _, _ = advice.partition("seriatim repair ")
    assert any(
        word in before_repair
        for word in (
            "if the machine was wrong",
            "if the decoder",
            "unless tier",
            "release",
            "finds the same",
        )
    )


def test_the_failure_counts_and_names_places() -> None:
    """However many partitions are hurt, the headline stays one line."""
    findings = [
        Finding(finding="gap", topic="a", partition=number, offset=1) for number in range(8)
    ]
    error = pickle.loads(pickle.dumps(new_findings_error("orders", findings)))
    assert error.message == "orders: 8 new findings in a/0, a/1, a/2, a/3, a/4 and 3 more"
    assert error.exit_code == 3


def test_long_and_odd_text_is_shown_safely() -> None:
    """A ten megabyte key or a terminal escape does not reach the screen."""
    assert shorten("\x1b[31mred") == "\\x1b[31mred"
    assert len(shorten("x" * 10_000_000)) < 450
