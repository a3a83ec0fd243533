"""Sessions in doubt: what was lost may have been theirs. A snapshot or their sequence says, and
nothing else.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from seriatim.engine.findings import TIERS, GapMark, Tier
from seriatim.engine.fold import Fold, Limits
from seriatim.engine.messages import MessageBatch
from seriatim.engine.rules import WindowSize, tier_doubts_after_loss
from seriatim.engine.session import Counts, Session
from tests.engine.test_fold import Message, P, encode_message, machine

BORDER = 100
"""Messages before this offset were lost; what was folded before has offsets from 0 on."""
SUMMED = ("messages", "records", "headless", "snapshots", "quarantined", "released", "ended")


class Forwarded:
    """Folds messages before and after a loss, in slices; between them the sessions go through
    bytes.
    """

    def __init__(
        self, tier: Tier = "strict", *, sequenced: bool = True, timeout_ms: int = 0
    ) -> None:
        self.runner = machine(sequence="seq" if sequenced else None)
        self.tier, self.saved = tier, dict[str, Session]()
        window = WindowSize(2, 1000) if tier == "window" else None
        self.limits, self.time = Limits(timeout_ms=timeout_ms, window=window), -1
        self.records: list[tuple[Any, ...]] = []
        self.marks: list[GapMark] = []
        self.findings: list[Any] = []
        self.counts = dict.fromkeys(SUMMED, 0)
        self.widest = 0

    def fold(
        self, start: int, messages: list[Message], cuts: list[int] | None = None, *, times: int = 1
    ) -> Forwarded:
        """All messages from an offset on, a slice up to each cut; timestamps are `times` the
        offset.
        """
        edges = sorted({0, len(messages), *(cut for cut in cuts or [] if 0 < cut < len(messages))})
        for a, b in itertools.pairwise(edges):
            self._slice(start + a, messages[a:b], times)
        return self

    def _slice(self, start: int, messages: list[Message], times: int) -> None:
        since = BORDER if start >= BORDER else -1
        fold = Fold(
            P,
            self.runner,
            self.tier,
            "quarantine",
            self._load,
            limits=self.limits,
            message_time_ms=self.time,
            headless_since=since,
        )
        stamps = [times * (start + i) for i in range(len(messages))]
        out = fold.fold_batch(
            MessageBatch(
                start, stamps, [key for key, _ in messages], [value for _, value in messages]
            )
        )
        whole = zip(out.positions, out.indexes, out.sessions, out.rows, strict=True)
        self.records += [
            (start + position, index, session, *row) for position, index, session, row in whole
        ]
        for name, session in fold.touched_sessions().items():
            self.saved[name] = replace(session, state=None, is_active=False, is_touched=False)
        self.time = fold.expiry.message_time_ms if fold.expiry else -1
        self.marks += fold.tally.marks
        self.findings += fold.tally.findings
        self._count(fold.counts)

    def _load(self, names: list[str]) -> dict[str, Session]:
        return {name: replace(self.saved[name]) for name in names if name in self.saved}

    def _count(self, counts: Counts) -> None:
        for name in SUMMED:
            self.counts[name] += getattr(counts, name)
        self.widest = max(self.widest, counts.distance_messages)

    def outcome(self) -> tuple[Any, ...]:
        """All that must not depend on slicing."""
        return (
            self.records,
            self.saved,
            self.marks,
            self.findings,
            self.counts,
            self.widest,
            self.time,
        )

    def rows(self, name: str = "s") -> dict[str, int]:
        """A session's rows, by its state."""
        saved = self.saved[name].state_bytes
        return (
            {} if saved is None else {row[0]: row[1] for row in self.runner.load(saved, 1).values()}
        )

    def opened(self) -> list[tuple[str | None, int, str]]:
        """Marks in short: session, offset, what closed it."""
        return [(mark.session, mark.offset, mark.closed_by) for mark in self.marks]


def snapshot(seq: int | None, *rows: str, session: str = "s") -> Message:
    """A snapshot of rows."""
    return encode_message("snapshot", session, "", seq or 0, seq, list(rows) or ["a"])


def update(seq: int | None, v: int, session: str = "s") -> Message:
    """An update of row a."""
    return encode_message("update", session, "a", v, seq, [])


def before(tier: Tier = "strict", *, sequenced: bool = True) -> Forwarded:
    """Session s at sequence 2, then a loss."""
    first, second = (1, 2) if sequenced else (None, None)
    return Forwarded(tier, sequenced=sequenced).fold(0, [snapshot(first), update(second, 5)])


@pytest.mark.parametrize("tier", ["once", "strict"])
def test_a_sequence_that_follows_proves_that_nothing_was_lost(tier: Tier) -> None:
    """The session resumes at once, and nothing is said of it."""
    done = before(tier).fold(BORDER, [update(3, 7), update(4, 8)], [1])
    assert (done.rows(), done.counts["headless"], done.marks, done.findings) == (
        {"a": 8},
        0,
        [],
        [],
    )


def test_any_other_sequence_makes_it_headless_until_its_snapshot() -> None:
    """No finding, no effect; its output is not to be trusted from there to the snapshot, which is
    no jump.
    """
    done = before().fold(
        BORDER,
        [
            update(5, 7),
            update(6, 8),
            snapshot(9, "b"),
            encode_message("delete", "s", "b", 0, 10, []),
        ],
    )
    assert (done.rows(), done.counts["headless"], done.findings) == ({}, 2, [])
    assert done.opened() == [("s", BORDER, ""), ("s", BORDER + 2, "snapshot")]
    assert [record[3:5] for record in done.records[2:]] == [
        ("snapshot", "b"),
        ("delete", "a"),
        ("delete", "b"),
    ]


def test_nothing_is_proved_once_a_message_was_set_aside() -> None:
    """Sequence 3 comes after 4 was set aside: going on from there would lose 4 without a word."""
    done = before().fold(BORDER, [update(4, 7), update(3, 8), update(4, 9)])
    assert (done.rows(), done.counts["headless"]) == ({"a": 5}, 3)
    assert done.opened() == [("s", BORDER, "")]


def test_without_sequences_only_a_snapshot_helps() -> None:
    """Nothing can prove that a session lost nothing."""
    done = before(sequenced=False).fold(
        BORDER, [update(None, 7), snapshot(None, "a"), update(None, 9)], [1, 2]
    )
    assert (done.rows(), done.counts["headless"]) == ({"a": 9}, 1)


def test_a_snapshot_after_the_loss_is_no_closed_gap() -> None:
    """What was lost is published for all sessions: nobody is warned of each."""
    done = before().fold(BORDER, [snapshot(90), update(91, 3)])
    assert (done.rows(), done.findings, done.marks) == ({"a": 3}, [], [])


def test_one_who_proved_it_is_in_no_doubt_later() -> None:
    """From its first message after the loss on the usual rules hold: a jump is a finding."""
    done = before().fold(BORDER, [update(3, 7), update(9, 8)], [1])
    assert [(finding.finding, finding.offset) for finding in done.findings] == [
        ("sequence gap", BORDER + 1)
    ]


def test_new_sessions_are_headless_as_ever() -> None:
    """One without a state begins with its snapshot, and no mark is made of it."""
    done = before().fold(BORDER, [update(3, 7, "n"), snapshot(4, session="n"), update(5, 2, "n")])
    assert (done.rows("n"), done.counts["headless"], done.marks) == ({"a": 2}, 1, [])


def test_one_in_quarantine_stays_there_until_its_snapshot() -> None:
    """A sequence that follows is no proof for it."""
    hurt = before().fold(2, [update(7, 1)])
    assert hurt.saved["s"].finding == "sequence gap"
    done = hurt.fold(BORDER, [update(3, 7), update(8, 7), snapshot(9)])
    assert (done.saved["s"].finding, done.counts["headless"], done.counts["released"]) == (
        None,
        0,
        1,
    )
    assert done.opened() == [("s", 2, ""), ("s", BORDER + 2, "snapshot")]


def test_poison_sets_one_in_doubt_aside() -> None:
    """A finding as anywhere."""
    done = before().fold(BORDER, [update(5, 7), (b"s", b"?"), update(6, 1), snapshot(7)], [1, 2, 3])
    assert [(finding.finding, finding.offset) for finding in done.findings] == [
        ("poison", BORDER + 1)
    ]
    assert (done.counts["headless"], done.saved["s"].finding, done.rows()) == (1, None, {"a": 7})


@pytest.mark.parametrize("cut", [[], [10], [10, 20]])
def test_one_in_doubt_that_was_silent_for_too_long_ends(cut: list[int]) -> None:
    """Its output is taken back, its damage with it; messages set aside keep it from being silent."""
    made = Forwarded(timeout_ms=110).fold(0, [snapshot(1), update(2, 5)])
    kept = made.fold(BORDER, [update(5 + i, 7) for i in range(30)], cut)
    assert (kept.counts["ended"], kept.rows()) == (0, {"a": 5})
    ended = kept.fold(BORDER + 500, [update(8, 7)])
    assert (ended.counts["ended"], ended.counts["headless"], ended.rows()) == (1, 31, {})
    assert ended.opened() == [("s", BORDER, ""), ("s", BORDER + 500, "end")]


def test_which_tiers_doubt() -> None:
    """Those that set a session aside when its sequence has a gap; the others count, or wait in the
    window.
    """
    assert [tier for tier in TIERS if tier_doubts_after_loss(tier)] == ["once", "strict"]


@pytest.mark.parametrize(
    ("tier", "expected"), [("none", {"a": 7}), ("order", {"a": 7}), ("window", {"a": 5})]
)
def test_the_other_tiers_go_on_by_their_own_rules(tier: Tier, expected: dict[str, int]) -> None:
    """A jump is counted, or waits in the window; nobody is headless."""
    done = before(tier).fold(BORDER, [update(5, 7)])
    assert (done.rows(), done.counts["headless"]) == (expected, 0)


@st.composite
def lives(draw: Any) -> tuple[bool, list[Message], list[Message]]:
    """Messages of a few sessions before and after a loss."""
    sequenced, numbers = draw(st.booleans()), dict.fromkeys("stu", 0)
    kinds = st.sampled_from(
        ["snapshot", "update", "update", "update", "insert", "delete", "poison"]
    )
    steps = st.sampled_from([1, 1, 1, 1, 2, 0])

    def some(least: int) -> list[Message]:
        made = []
        for _ in range(draw(st.integers(least, 20))):
            name = draw(st.sampled_from("stu"))
            numbers[name] += draw(steps)
            rows = draw(st.lists(st.sampled_from("abc"), max_size=3, unique=True))
            kind, key, v = draw(kinds), draw(st.sampled_from("abc")), draw(st.integers(0, 9))
            made.append(
                encode_message(kind, name, key, v, numbers[name] if sequenced else None, rows)
            )
        return made

    first = some(3)
    for name in "stu":
        numbers[name] += draw(st.sampled_from([0, 0, 3]))
    return sequenced, first, some(1)


@given(
    lives(),
    st.sampled_from(TIERS),
    st.lists(st.integers(1, 20), max_size=6),
    st.sampled_from([0, 0, 40, 90]),
)
def test_slices_change_nothing(
    drawn: tuple[bool, list[Message], list[Message]], tier: Tier, cuts: list[int], timeout_ms: int
) -> None:
    """Records, sessions, marks, findings, counts: however the messages after a loss are sliced."""
    sequenced, first, second = drawn
    if not sequenced and tier in ("once", "order", "window"):
        tier = "strict"
    whole, parts = (
        Forwarded(tier, sequenced=sequenced, timeout_ms=timeout_ms).fold(0, first) for _ in range(2)
    )
    assert (
        parts.fold(BORDER, second, cuts, times=2).outcome()
        == whole.fold(BORDER, second, times=2).outcome()
    )


@given(lives(), st.sampled_from(["once", "strict"]), st.sampled_from([0, 0, 40]))
def test_records_folded_give_the_state(
    drawn: tuple[bool, list[Message], list[Message]], tier: Tier, timeout_ms: int
) -> None:
    """For every session, in doubt or not."""
    sequenced, first, second = drawn
    made = Forwarded(tier if sequenced else "strict", sequenced=sequenced, timeout_ms=timeout_ms)
    made.fold(0, first).fold(BORDER, second, times=2)
    tables: dict[str, dict[str, int]] = {}
    for _, _, session, op, key, v in made.records:
        table = tables.setdefault(session, {})
        table[key] = v
        if op == "delete":
            del table[key]
    for name in made.saved:
        assert tables.get(name, {}) == made.rows(name)
