"""Holes: every missing offset gets the one cause that is true of it, and losses are what the tier
says.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seriatim.engine.findings import TIERS, Tier, tier_action
from seriatim.engine.holes import (
    ExplainedRange,
    HolePassage,
    KafkaRecordBatch,
    LogView,
    explain_hole,
    mark_aborted_batches,
)
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import BrokenPromiseError

P = Partition("t", 0)
ISOLATIONS = ("read_committed", "read_uncommitted")


def view(*batches: KafkaRecordBatch, end: int = 100, **fields: Any) -> LogView:
    """A log from 0 to `end`, not compacted, all of it stable."""
    return LogView(
        **{
            "start": 0,
            "end": end,
            "log_start": 0,
            "stable_end": end,
            "is_compacted": False,
            **fields,
        },
        batches=batches,
    )


def told(pieces: list[ExplainedRange]) -> list[tuple[int, int, str]]:
    """Pieces as plain numbers."""
    return [(whole.start, whole.end, cause) for whole, cause in pieces]


def test_a_marker_is_a_marker_under_both_isolations() -> None:
    """No reader ever gets one."""
    log = view(
        KafkaRecordBatch(0, 4),
        KafkaRecordBatch(5, 5, is_control=True),
        KafkaRecordBatch(6, 9),
        end=10,
    )
    for isolation in ISOLATIONS:
        assert told(explain_hole(OffsetRange(5, 6), log, isolation)) == [(5, 6, "marker")]


def test_aborted_records_are_missing_under_read_committed_alone() -> None:
    """Whoever reads uncommitted gets them, so there their absence is a loss."""
    log = view(
        KafkaRecordBatch(0, 4, is_aborted=True), KafkaRecordBatch(5, 5, is_control=True), end=6
    )
    assert told(explain_hole(OffsetRange(0, 6), log, "read_committed")) == [
        (0, 5, "aborted"),
        (5, 6, "marker"),
    ]
    assert told(explain_hole(OffsetRange(0, 6), log, "read_uncommitted")) == [
        (0, 5, "unexplained"),
        (5, 6, "marker"),
    ]


def test_a_record_that_is_there_should_have_been_read() -> None:
    """The reader dropped it: on a compacted topic too."""
    for compacted in (False, True):
        log = view(KafkaRecordBatch(0, 9), end=10, is_compacted=compacted)
        assert told(explain_hole(OffsetRange(3, 5), log, "read_committed")) == [
            (3, 5, "unexplained")
        ]


def test_what_the_log_lacks_is_compacted_where_the_topic_is() -> None:
    """Records gone from a batch, batches without records, and batches gone altogether; elsewhere it
    is a loss.
    """
    batches = (
        KafkaRecordBatch(0, 9, record_offsets=(2, 7)),
        KafkaRecordBatch(10, 14, record_offsets=()),
        KafkaRecordBatch(20, 29),
    )
    hole = OffsetRange(0, 20)
    pieces = [
        (0, 2, "compacted"),
        (2, 3, "unexplained"),
        (3, 7, "compacted"),
        (7, 8, "unexplained"),
        (8, 20, "compacted"),
    ]
    assert (
        told(explain_hole(hole, view(*batches, end=30, is_compacted=True), "read_committed"))
        == pieces
    )
    assert told(explain_hole(hole, view(*batches, end=30), "read_committed")) == [
        (0, 20, "unexplained")
    ]


def test_what_lies_below_the_log_start_has_expired() -> None:
    """Whatever it was, nobody can tell any more; what is at the log start and after can be told."""
    log = view(KafkaRecordBatch(5, 5, is_control=True), start=5, end=6, log_start=5)
    assert told(explain_hole(OffsetRange(2, 6), log, "read_committed")) == [
        (2, 5, "expired"),
        (5, 6, "marker"),
    ]
    assert told(explain_hole(OffsetRange(2, 4), log, "read_committed")) == [(2, 4, "expired")]


def test_nothing_from_the_stable_end_on_is_explained() -> None:
    """An open transaction may still be committed, and compaction never reaches that far."""
    log = view(
        KafkaRecordBatch(0, 3),
        KafkaRecordBatch(4, 4, is_control=True),
        end=5,
        stable_end=5,
        is_compacted=True,
    )
    assert told(explain_hole(OffsetRange(4, 8), log, "read_committed")) == [
        (4, 5, "marker"),
        (5, 8, "unexplained"),
    ]
    assert told(explain_hole(OffsetRange(6, 8), log, "read_committed")) == [(6, 8, "unexplained")]


def test_a_view_that_does_not_cover_the_hole_is_refused() -> None:
    """What was not looked at cannot be called absent."""
    log = view(KafkaRecordBatch(10, 19), start=10, end=20, stable_end=100, is_compacted=True)
    for hole in (OffsetRange(9, 12), OffsetRange(15, 21)):
        with pytest.raises(BrokenPromiseError, match="covers"):
            explain_hole(hole, log, "read_committed")


@st.composite
def logs(draw: st.DrawFn) -> tuple[LogView, list[str]]:
    """A log, and for each offset what is true of it: record, aborted, marker or absent."""
    batches, truth = [], []
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["record", "aborted", "marker", "absent"]))
        span = 1 if kind == "marker" else draw(st.integers(1, 6))
        base = len(truth)
        there = draw(st.lists(st.booleans(), min_size=span, max_size=span))
        if kind == "marker":
            batches.append(
                KafkaRecordBatch(
                    base, base, is_control=True, record_offsets=draw(st.sampled_from([None, ()]))
                )
            )
            truth.append("marker")
        elif kind == "absent":
            truth += ["absent"] * span
        else:
            records = None if all(there) else tuple(base + i for i in range(span) if there[i])
            batches.append(
                KafkaRecordBatch(
                    base, base + span - 1, is_aborted=kind == "aborted", record_offsets=records
                )
            )
            truth += [kind if one else "absent" for one in there]
    start, stable = sorted(draw(st.tuples(st.integers(0, len(truth)), st.integers(0, len(truth)))))
    compacted = draw(st.booleans())
    kept = tuple(
        batch for batch in batches if batch.last_offset >= start and batch.first_offset < stable
    )
    return LogView(start, stable, start, stable, compacted, kept), truth


@given(logs(), st.data(), st.sampled_from(ISOLATIONS))
def test_every_offset_has_the_cause_that_is_true_of_it(
    drawn: tuple[LogView, list[str]], data: st.DataObject, isolation: str
) -> None:
    """Pieces tile the hole, no two neighbours have one cause, and each offset is what it is in the
    log.
    """
    log, truth = drawn
    start, end = sorted(
        data.draw(st.tuples(st.integers(0, len(truth) + 3), st.integers(0, len(truth) + 3)))
    )
    pieces = explain_hole(OffsetRange(start, end), log, isolation)

    assert [offset for whole, _ in pieces for offset in range(whole.start, whole.end)] == list(
        range(start, end)
    )
    assert all(a[1] != b[1] for a, b in pairwise(pieces))
    causes = {offset: cause for whole, cause in pieces for offset in range(whole.start, whole.end)}
    absent = "compacted" if log.is_compacted else "unexplained"
    aborted = "aborted" if isolation == "read_committed" else "unexplained"
    means = {"record": "unexplained", "aborted": aborted, "marker": "marker", "absent": absent}
    for offset, cause in causes.items():
        if offset < log.log_start:
            assert cause == "expired"
        elif offset >= log.stable_end:
            assert cause == "unexplained"
        else:
            assert cause == means[truth[offset]]


@st.composite
def transactions(
    draw: st.DrawFn,
) -> tuple[list[KafkaRecordBatch], list[tuple[int, int, int]], set[int]]:
    """Batches of producers that interleave; aborted transactions (producer, first, marker); bases
    that are void.
    """
    batches: list[KafkaRecordBatch] = []
    ended: list[tuple[int, int, int]] = []
    void: set[int] = set()
    open_since: dict[int, list[int]] = {}
    at = 0
    for _ in range(draw(st.integers(0, 25))):
        producer = draw(st.integers(0, 3))
        deed = draw(st.sampled_from(["send", "send", "commit", "abort", "plain"]))
        span = draw(st.integers(1, 3))
        if deed == "plain":
            batches.append(KafkaRecordBatch(at, at + span - 1, producer_id=producer + 10))
        elif deed == "send":
            open_since.setdefault(producer, []).append(at)
            batches.append(
                KafkaRecordBatch(at, at + span - 1, producer_id=producer, is_transactional=True)
            )
        elif producer in open_since:
            span, sent = 1, open_since.pop(producer)
            batches.append(
                KafkaRecordBatch(
                    at,
                    at,
                    is_control=True,
                    is_abort_marker=deed == "abort",
                    producer_id=producer,
                    is_transactional=True,
                )
            )
            if deed == "abort":
                ended.append((producer, sent[0], at))
                void |= set(sent)
        else:
            continue
        at += span
    return batches, ended, void


@given(transactions(), st.data())
def test_a_transaction_is_void_wherever_a_fetch_begins_and_ends(
    drawn: tuple[list[KafkaRecordBatch], list[tuple[int, int, int]], set[int]], data: st.DataObject
) -> None:
    """Begun before the fetch, ended after it, several by one producer: the aborted batches and no
    others.
    """
    batches, ended, void = drawn
    first, until = sorted(
        data.draw(st.tuples(st.integers(0, len(batches)), st.integers(0, len(batches))))
    )
    fetched = batches[first:until]
    if not fetched:
        return
    start, end = fetched[0].first_offset, fetched[-1].last_offset + 1
    listed = [
        (producer, since) for producer, since, marker in ended if marker >= start and since < end
    ]
    found = list(mark_aborted_batches(fetched, data.draw(st.permutations(listed))))
    assert [(batch.first_offset, batch.is_aborted) for batch in found] == [
        (batch.first_offset, batch.first_offset in void) for batch in fetched
    ]


def passage(pieces: list[tuple[int, int, str]], tier: Tier) -> HolePassage:
    """A way over one hole."""
    way = HolePassage(P, tier, 0)
    way.pass_hole(
        OffsetRange(pieces[0][0], pieces[-1][1]), [(OffsetRange(a, b), c) for a, b, c in pieces]
    )  # type: ignore[misc]
    return way


@pytest.mark.parametrize("tier", TIERS)
def test_explained_offsets_are_passed_over_in_every_tier(tier: Tier) -> None:
    """They are counted by cause, and are no finding and no gap."""
    way = passage(
        [(3, 4, "marker"), (4, 9, "aborted"), (9, 10, "marker"), (10, 30, "compacted")], tier
    )
    assert (way.until, way.halt, way.marks) == (30, None, [])
    assert way.counts == {"marker": 2, "aborted": 5, "compacted": 20}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("cause", "finding"), [("unexplained", "gap"), ("expired", "expired")])
def test_a_loss_is_what_the_tier_says(tier: Tier, cause: str, finding: str) -> None:
    """It halts at its first offset, with what is explained before it passed; or it is counted, and
    marked.
    """
    way = passage([(3, 5, "marker"), (5, 9, cause), (9, 10, "marker")], tier)
    if tier_action(finding, tier) == "halt":
        assert way.halt is not None
        assert (way.halt.finding, way.halt.offset, way.until, way.counts) == (
            finding,
            5,
            5,
            {"marker": 2},
        )
        assert "[5, 9)" in way.halt.cause
        assert way.marks == []
    else:
        assert (way.halt, way.until, way.counts) == (None, 10, {"marker": 3, cause: 4})
        assert [(mark.finding, mark.offset, mark.until) for mark in way.marks] == [(finding, 5, 9)]


def test_pieces_that_do_not_tile_their_hole_are_refused() -> None:
    """An offset without a cause would be an offset lost."""
    for pieces in ([(0, 2, "marker"), (3, 5, "marker")], [(0, 2, "marker"), (1, 5, "marker")]):
        with pytest.raises(BrokenPromiseError, match="tile"):
            passage(pieces, "strict")
    with pytest.raises(BrokenPromiseError, match="tile"):
        HolePassage(P, "strict", 0).pass_hole(OffsetRange(0, 5), [(OffsetRange(0, 4), "marker")])


def test_holes_come_in_order() -> None:
    """What was passed over is counted once."""
    way = passage([(3, 5, "marker")], "strict")
    assert way.pass_hole(OffsetRange(7, 8), [(OffsetRange(7, 8), "marker")])
    assert (way.counts, way.until) == ({"marker": 3}, 8)
    with pytest.raises(BrokenPromiseError, match="in order"):
        way.pass_hole(OffsetRange(6, 7), [(OffsetRange(6, 7), "marker")])
