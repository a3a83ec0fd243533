"""Snapshot requests: who needs a snapshot, out of the ledger's entries alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seriatim.engine.findings import GapMark
from seriatim.engine.offsets import Partition
from seriatim.ledger.entries import ENTRY_TYPES, Entry
from seriatim.ledger.gaps import collect_snapshot_requests
from seriatim.ledger.model import Change
from tests.ledger.test_gaps import change, closes, opens


def entry(*changes: Change, kind: Any = "slice") -> Entry:
    """One commit."""
    return ENTRY_TYPES[kind](attempt="a", changes=changes)


def asked(*entries: Entry) -> list[tuple[str, str, int]]:
    """Session, reason and offset of each request."""
    return [
        (one.session, one.reason, one.offset) for one in collect_snapshot_requests("s", entries)
    ]


ASIDE = opens(3, quarantined=True)
HEADLESS = opens(4, "t", finding="gap")


def test_who_is_set_aside_and_who_is_headless_after_a_loss() -> None:
    """With all that a producer needs to know, under the session's own key."""
    assert asked(entry(change(ASIDE, HEADLESS))) == [("s", "raised", 3), ("t", "gap", 4)]
    (request,) = collect_snapshot_requests("orders", [entry(change(ASIDE))])
    assert json.loads(request.to_json()) == {
        "stream": "orders",
        "topic": "in-a",
        "partition": 0,
        "session": "s",
        "reason": "raised",
        "offset": 3,
    }
    assert request.key == b"s"


@pytest.mark.parametrize(
    "mark",
    [
        opens(3, finding="sequence gap"),
        opens(3, None, finding="gap"),
        opens(3, finding="gap", until=5),
        closes(3),
    ],
)
def test_nobody_else(mark: GapMark) -> None:
    """Not who goes on damaged, nor for what was lost of all sessions, nor for a gap that a snapshot
    closed.
    """
    assert asked(entry(change(mark))) == []


@pytest.mark.parametrize("how", ["snapshot", "hand", "repair", "end"])
def test_who_is_right_again_is_not_asked_for(how: str) -> None:
    """Whatever made it so, in the same entry or a later one."""
    assert asked(entry(change(ASIDE, closes(5, how)))) == []
    assert asked(entry(change(ASIDE, HEADLESS)), entry(change(closes(5, how)), kind="accept")) == [
        ("t", "gap", 4)
    ]


def test_one_request_a_session() -> None:
    """The first incident that is open; another one after it was right is another one."""
    assert asked(entry(change(ASIDE, opens(6, quarantined=True)))) == [("s", "raised", 3)]
    again = entry(change(closes(5), opens(7, quarantined=True)))
    assert asked(entry(change(ASIDE)), again) == [("s", "raised", 7)]


def test_partitions_are_apart() -> None:
    """The same name elsewhere is another session."""
    other = change(ASIDE, partition=Partition("in-a", 1))
    assert (
        len(collect_snapshot_requests("s", [entry(change(ASIDE), other), entry(change(closes(9)))]))
        == 1
    )


def test_a_repair_asks_for_nobody_anew() -> None:
    """It meets the incidents of before again: they were asked for then."""
    assert asked(entry(change(ASIDE), kind="repair")) == []


def test_a_new_life_has_none_of_the_old_sessions() -> None:
    """Whoever waited in the old one is over."""
    assert (
        asked(entry(change(ASIDE)), entry(change(topic_id="two", start=10, until=0), kind="accept"))
        == []
    )
