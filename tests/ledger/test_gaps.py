"""Gaps: what not to trust, out of the ledger's entries alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seriatim.engine.files import Certificate, File
from seriatim.engine.findings import GapMark
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Counts
from seriatim.ledger.entries import ENTRY_TYPES
from seriatim.ledger.gaps import (
    Gap,
    GapsFold,
    ended_quarantines,
    quarantine_files,
    quarantine_release_finder,
)
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Account, Change, Halt, Ledger

P, OTHER = Partition("in-a", 0), Partition("in-a", 1)


def gaps_after(gaps: list[Gap], manifest: Manifest) -> list[Gap]:
    """The gaps after one more entry."""
    fold = GapsFold(gaps)
    fold.add_entry(manifest)
    return fold.gaps


def change(*marks: GapMark, start: int = 0, until: int = 10, **fields: Any) -> Change:
    """What happened to a partition."""
    given = {"partition": P, "epoch": 0, "topic_id": "one", "initial_frontier": 0, **fields}
    return Change(frontier=start, until=until, marks=marks, **given)


def manifest(
    sequence: int, *changes: Change, kind: Any = "slice", halt: Halt | None = None
) -> Manifest:
    """An entry, and the ledger after it: every changed partition with this halt."""
    accounts = {
        str(one.partition): Account(
            topic_id=one.topic_id, frontier=one.until, initial_frontier=0, halt=halt
        )
        for one in changes
    }
    entry = ENTRY_TYPES[kind](attempt="a", sequence=sequence, changes=changes)
    return Manifest(entry=entry, ledger=Ledger(stream="s", sequence=sequence, partitions=accounts))


def folded(*manifests: Manifest) -> list[Gap]:
    """The gaps after these entries."""
    walk = GapsFold()
    for one in manifests:
        walk.add_entry(one)
    return walk.gaps


def opens(offset: int, session: str | None = "s", **fields: Any) -> GapMark:
    """A mark that opens."""
    return GapMark(
        **{"finding": "raised", "offset": offset, "session": session, "cause": "c", **fields}
    )


def closes(offset: int, how: str = "snapshot", session: str | None = "s") -> GapMark:
    """A mark that closes."""
    return GapMark(finding="", offset=offset, session=session, closed_by=how)


def test_a_gap_is_open_until_it_is_closed() -> None:
    """It names the entries of both, and the offsets between which nothing is to be trusted."""
    first = manifest(4, change(opens(3, quarantined=True)))
    (gap,) = folded(first)
    assert gap == Gap(
        topic="in-a",
        topic_id="one",
        partition=0,
        session="s",
        start=3,
        finding="raised",
        cause="c",
        opened=4,
        quarantined=True,
    )
    (gap,) = folded(first, manifest(5, change(closes(17), start=10, until=20)))
    assert (gap.start, gap.until, gap.opened, gap.closed, gap.closed_how) == (
        3,
        17,
        4,
        5,
        "snapshot",
    )


def test_only_the_session_that_is_right_again_is_closed() -> None:
    """Others of the partition, and the same name in another partition, stay as they are."""
    found = folded(
        manifest(0, change(opens(1), opens(2, "t")), change(opens(1), partition=OTHER)),
        manifest(1, change(closes(5))),
    )
    assert [(gap.session, gap.partition, gap.until) for gap in found] == [
        ("s", 0, 5),
        ("t", 0, None),
        ("s", 1, None),
    ]


def test_what_is_not_trusted_already_is_not_opened_twice() -> None:
    """But a session that is set aside later is: its messages are elsewhere from there on."""
    found = folded(
        manifest(
            0,
            change(
                opens(1), opens(3), opens(5, quarantined=True), opens(6, quarantined=True), opens(7)
            ),
        )
    )
    assert [(gap.start, gap.quarantined) for gap in found] == [(1, False), (5, True)]
    closed = gaps_after(found, manifest(1, change(closes(9))))
    assert [gap.until for gap in closed] == [9, 9]


@pytest.mark.parametrize(("session", "how"), [("s", "snapshot"), (None, None)])
def test_a_gap_that_has_its_end_is_opened_and_closed_at_once(
    session: str | None, how: str | None
) -> None:
    """Missing offsets, and messages missing before a snapshot. It neither hides nor ends another."""
    found = folded(manifest(0, change(opens(1))), manifest(1, change(opens(4, session, until=6))))
    assert found[0].closed is None
    assert (found[1].start, found[1].until, found[1].opened, found[1].closed) == (4, 6, 1, 1)
    assert (found[1].session, found[1].closed_how) == (session, how)


def test_a_halt_is_an_open_gap_of_all_sessions() -> None:
    """As long as the ledger has it; an entry about something else changes nothing."""
    halt = Halt("gap", 10, "4 missing")
    found = folded(manifest(0, change(), halt=halt), manifest(1, change(start=10), halt=halt))
    assert [(gap.session, gap.start, gap.until, gap.finding, gap.cause) for gap in found] == [
        (None, 10, None, "gap", "4 missing")
    ]


@pytest.mark.parametrize(
    ("kind", "start", "until", "ends", "how"),
    [
        ("slice", 10, 30, 11, "skip"),
        ("repair", 25, 25, 25, "repair"),
        ("accept", 10, 10, 10, "accept"),
    ],
)
def test_a_halt_that_is_over_is_closed(
    kind: str, start: int, until: int, ends: int, how: str
) -> None:
    """By whatever took it away; a slice can only have passed over one message."""
    first = manifest(0, change(), halt=Halt("poison", 10, "c"))
    (gap,) = folded(first, manifest(1, change(start=start, until=until), kind=kind))
    assert (gap.start, gap.until, gap.closed, gap.closed_how) == (10, ends, 1, how)


def test_a_halt_after_a_halt_is_another() -> None:
    """The first poison was passed over, and the next one halts."""
    first = manifest(0, change(), halt=Halt("poison", 10, "c"))
    found = folded(first, manifest(1, change(start=10, until=15), halt=Halt("poison", 15, "d")))
    assert [(gap.start, gap.until) for gap in found] == [(10, 11), (15, None)]


def test_a_halt_that_gives_way_to_another_stays_until_the_partition_goes_on() -> None:
    """The topic of a halted partition was made again: nothing of before was mended."""
    found = folded(
        manifest(0, change(), halt=Halt("gap", 10, "c")),
        manifest(1, change(start=10), halt=Halt("re-created", 10, "d")),
        manifest(2, change(start=10, until=0, topic_id="two"), kind="accept"),
    )
    assert [(gap.finding, gap.topic_id, gap.closed, gap.closed_how) for gap in found] == [
        ("gap", "one", 2, "accept"),
        ("re-created", "one", 2, "accept"),
    ]


def test_a_new_life_ends_what_was_wrong_with_the_old_one() -> None:
    """At the frontier of the old life; what the new one opens has its own id."""
    found = folded(
        manifest(0, change(opens(3))),
        manifest(1, change(opens(2, "t"), start=10, until=0, topic_id="two"), kind="accept"),
    )
    assert [(gap.topic_id, gap.until, gap.closed_how) for gap in found] == [
        ("one", 10, "accept"),
        ("two", None, None),
    ]


def test_an_accept_of_the_same_life_leaves_its_sessions_as_they_are() -> None:
    """They are still set aside: only what it lifts, or closes by a mark, is closed."""
    found = folded(
        manifest(0, change(opens(3), opens(4, "t"))),
        manifest(1, change(closes(10, "hand"), start=10), kind="accept"),
    )
    assert [(gap.session, gap.closed_how) for gap in found] == [("s", "hand"), ("t", None)]


def test_a_mark_of_an_earlier_life_has_its_id() -> None:
    """Messages that the old topic had and nobody read."""
    (gap,) = folded(manifest(0, change(opens(3, None, until=9, topic_id="old")), kind="accept"))
    assert gap.topic_id == "old"


@pytest.mark.parametrize("told", [True, False])
def test_expired_offsets_are_a_gap_whether_a_mark_tells_or_the_certificate_alone(
    told: bool,
) -> None:
    """And one gap, not two."""
    certificate = Certificate(
        partition=P, epoch=0, start=5, until=9, counts=Counts(), holes={"expired": 4}
    )
    marks = [opens(5, None, until=9, finding="expired")] if told else []
    (gap,) = folded(manifest(0, change(*marks, start=5, until=9, certificate=certificate)))
    assert (gap.finding, gap.session, gap.start, gap.until, gap.closed) == (
        "expired",
        None,
        5,
        9,
        0,
    )


def test_a_mark_for_all_sessions_closes_all_of_the_partition() -> None:
    """Such as a person's word."""
    found = folded(
        manifest(0, change(opens(1), opens(2, "t"))), manifest(1, change(closes(9, "hand", None)))
    )
    assert [(gap.until, gap.closed_how) for gap in found] == [(9, "hand")] * 2


def test_a_repair_mends_the_gaps_that_it_names_open_or_closed() -> None:
    """By session and beginning; the others stay as they are."""
    found = folded(
        manifest(0, change(opens(1), opens(2, "t"), opens(3, "u"))),
        manifest(1, change(closes(5, "snapshot", "t"))),
        manifest(
            2,
            change(closes(1, "repair"), closes(2, "repair", "t"), start=8, until=9),
            kind="repair",
        ),
    )
    assert [(gap.until, gap.closed_how) for gap in found] == [
        (9, "repair"),
        (5, "snapshot"),
        (None, None),
    ]
    assert [gap.mended for gap in found] == [2, 2, None]


offsets = st.integers(0, 40)
sessions = st.sampled_from(["s", "t", None])
marks = st.one_of(
    st.builds(opens, offsets, st.sampled_from(["s", "t"]), quarantined=st.booleans()),
    st.builds(closes, offsets, st.sampled_from(["snapshot", "hand"]), sessions),
    st.builds(lambda at, session: opens(at, session, until=at + 2), offsets, sessions),
)
changes = st.builds(
    lambda some, start, more, place, life: change(
        *some, start=start, until=start + more, partition=place, topic_id=life
    ),
    st.lists(marks, max_size=4),
    offsets,
    offsets,
    st.sampled_from([P, OTHER]),
    st.sampled_from(["one", "one", "two"]),
)
halts = st.one_of(
    st.none(), st.builds(Halt, st.sampled_from(["gap", "poison"]), offsets, st.just("c"))
)
kinds = st.sampled_from(["slice", "slice", "accept", "repair", "compact"])
histories = st.lists(st.tuples(st.lists(changes, max_size=2), kinds, halts), max_size=12).map(
    lambda drawn: [
        manifest(n, *some, kind=kind, halt=halt) for n, (some, kind, halt) in enumerate(drawn)
    ]
)


@given(histories, st.integers(0, 12))
def test_entries_may_be_taken_in_anywhere_cut(history: list[Manifest], cut: int) -> None:
    """One by one, or some, then a table, then the rest: the same gaps as from the first entry."""
    whole = folded(*history)
    part = GapsFold(folded(*history[:cut]))
    for one in history[cut:]:
        part.add_entry(one)
    single: list[Gap] = []
    for one in history:
        single = gaps_after(single, one)
    assert part.gaps == single == whole


@given(histories)
def test_a_gap_is_closed_with_all_that_belongs_to_it_or_open_with_none(
    history: list[Manifest],
) -> None:
    """No half-closed gaps, none that ends before it begins, and one stay in quarantine at a time
    for a session.
    """
    found = folded(*history)
    for gap in found:
        assert (gap.until is None) == (gap.closed is None)
        assert gap.until is None or gap.until >= gap.start
        assert gap.closed is None or gap.closed >= gap.opened
    stays = [
        (gap.topic_partition, gap.session)
        for gap in found
        if gap.quarantined and gap.closed is None
    ]
    assert len(set(stays)) == len(stays)


def test_messages_set_aside_belong_to_the_first_stay_that_ends_after_them() -> None:
    """Also one that waited in a window since before its session was set aside."""
    gaps = folded(
        manifest(
            0,
            change(opens(5, quarantined=True), closes(8), opens(20, quarantined=True), closes(25)),
        ),
        manifest(1, change(opens(30, quarantined=True))),
    )
    find = quarantine_release_finder(ended_quarantines(gaps, -1))

    def at(offset: int, **fields: Any) -> int | None:
        row = {"topic_id": "one", "partition": 0, "session": "s", "offset": offset, **fields}
        return gap.until if (gap := find(row)) else None

    assert [at(n) for n in (4, 7, 8, 24, 25, 30)] == [8, 8, 25, 25, None, None]
    assert [at(6, session="t"), at(6, partition=1), at(6, topic_id="two")] == [None] * 3
    assert ended_quarantines(gaps, 0) == []


def test_files_of_messages_set_aside_are_named_with_their_entry() -> None:
    """In the order of the changes."""
    files = [File(f"kept/{n}", 1, 1, "d") for n in range(3)]
    entry = manifest(
        7,
        change(quarantine_files=(files[0], files[1])),
        change(quarantine_files=(files[2],), partition=OTHER),
    ).entry
    assert [(one.file, one.sequence) for one in quarantine_files(entry)] == [
        (file, 7) for file in files
    ]
