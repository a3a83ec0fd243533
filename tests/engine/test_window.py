"""Tier window: what comes late within the window is healed, whatever the slices; beyond it, it is
counted.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

import pytest

from seriatim.engine.findings import GapMark
from seriatim.engine.fold import Fold, Limits
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import Partition
from seriatim.engine.rules import WindowSize
from seriatim.engine.session import Session
from seriatim.engine.table import TableMachine
from tests.engine.test_fold import Folder, encode_message, machine

P = Partition("a", 0)


class Sliced:
    """Folds messages (key, value, milliseconds) in slices; sessions go through bytes in between."""

    def __init__(self, size: WindowSize, runner: TableMachine | None = None) -> None:
        self.limits, self.runner = Limits(window=size), runner or machine(sequence="seq")
        self.saved: dict[str, Session] = {}
        self.records: list[tuple[Any, ...]] = []
        self.kept: list[tuple[int, str]] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.findings: list[tuple[str, int, str]] = []
        self.marks: list[GapMark] = []
        self.headless = 0

    def fold(self, messages: list[tuple[bytes, bytes, int]], cut: int) -> Sliced:
        """All messages, `cut` in a slice."""
        for start in range(0, len(messages), cut):
            self._slice(start, messages[start : start + cut])
        return self

    def _slice(self, start: int, part: list[tuple[bytes, bytes, int]]) -> None:
        fold = Fold(P, self.runner, "window", "quarantine", self._load, limits=self.limits)
        keys, values, times = zip(*part, strict=True)
        stretch = MessageBatch(start, times, keys, values)
        out = fold.fold_batch(stretch)
        for row, (position, name) in enumerate(zip(out.positions, out.sessions, strict=True)):
            source = (
                out.source_messages[row].offset if row in out.source_messages else start + position
            )
            own = (start + position, out.indexes[row], source, name, out.sequences[row])
            self.records.append((*own, *out.rows[row]))
        self.kept += [
            (kept.to_row(stretch)["offset"], kept.finding) for kept in out.quarantined_messages
        ]
        for name, session in fold.touched_sessions().items():
            self.saved[name] = Session(
                **{
                    field: getattr(session, field)
                    for field in Session.__struct_fields__
                    if field not in ("state", "is_active", "is_touched", "is_undoable")
                }
            )
        for kind, number in fold.counts.findings.items():
            self.counts[kind] += number
        self.findings += [(f.finding, f.offset, f.level) for f in fold.tally.findings]
        self.marks += fold.tally.marks
        self.headless += fold.counts.headless

    def _load(self, names: list[str]) -> dict[str, Session]:
        held = {name: self.saved[name] for name in names if name in self.saved}
        return {
            name: Session(**{field: getattr(one, field) for field in Session.__struct_fields__})
            for name, one in held.items()
        }

    def states(self) -> dict[str, Any]:
        """Rows by session."""
        return {
            n: self.runner.load(s.state_bytes, s.state_version)
            for n, s in self.saved.items()
            if s.state_bytes is not None
        }

    def outcome(self) -> tuple[Any, ...]:
        """All that must not depend on slicing."""
        return (
            self.records,
            self.saved,
            self.kept,
            dict(self.counts),
            self.findings,
            self.marks,
            self.headless,
        )


def session_messages(
    name: str, count: int, chance: random.Random, snapshot_every: int
) -> list[tuple[str, int, bytes]]:
    """One session in its right order: (name, sequence, value)."""
    made: list[tuple[str, int, bytes]] = []
    rows = ["r0", "r1", "r2"]
    for seq in range(1, count + 1):
        if seq % snapshot_every == 1:
            rows = [f"r{i}" for i in range(chance.randrange(1, 6))]
            _, value = encode_message("snapshot", name, "", 0, seq, rows)
        else:
            _, value = encode_message("update", name, chance.choice(rows), seq, seq, [])
        made.append((name, seq, value or b""))
    return made


def shuffled(messages: list[Any], reach: int, chance: random.Random) -> list[Any]:
    """No message more than `reach` places from its own."""
    keyed = sorted((i + chance.uniform(0, reach), i) for i in range(len(messages)))
    return [messages[i] for _, i in keyed]


def straight(messages: list[tuple[str, int, bytes]]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The sorted messages under tier strict: records by session, and the rows."""
    folder = Folder(machine(sequence="seq"), "strict")
    folder.slice([(name.encode(), value) for name, _, value in messages])
    assert not folder.findings
    records: dict[str, list[Any]] = defaultdict(list)
    for _, _, session, sequence, *row in folder.records:
        records[session].append((sequence, *row))
    return dict(records), {
        n: folder.runner.load(s.state_bytes or b"", s.state_version)
        for n, s in folder.saved.items()
    }


@pytest.mark.parametrize("seed", range(30))
def test_shuffled_within_the_window_is_as_if_sorted(seed: int) -> None:
    """Records of each session, and its rows, equal the straight fold; nothing is found; slices do
    not matter.
    """
    chance = random.Random(seed)
    sessions = [
        session_messages(f"s{n}", chance.randrange(5, 80), chance, chance.choice([7, 40, 1000]))
        for n in range(4)
    ]
    moved = [shuffled(one, chance.choice([1, 3, 12]), chance) for one in sessions]
    mixed = []
    while any(moved):
        mixed.append(chance.choice([one for one in moved if one]).pop(0))
    given = [(name.encode(), value, 1000 * i) for i, (name, _, value) in enumerate(mixed)]
    one, many = (
        Sliced(WindowSize(100, 10**6)).fold(given, cut)
        for cut in (10**6, chance.choice([1, 2, 7, 50]))
    )
    records, rows = straight([message for session in sessions for message in session])
    found: dict[str, list[Any]] = defaultdict(list)
    for _, _, _, session, sequence, *row in one.records:
        found[session].append((sequence, *row))
    assert dict(found) == records
    assert one.states() == rows
    assert (dict(one.counts), one.findings, one.marks, one.headless, one.kept) == (
        {},
        [],
        [],
        0,
        [],
    )
    assert many.outcome() == one.outcome()
    assert [record[:2] for record in one.records] == sorted(record[:2] for record in one.records)


def numbers(*sequences: int, step: int = 1000) -> list[tuple[bytes, bytes, int]]:
    """Messages of one session: sequence 1 is a snapshot of row a, the others are updates of it."""
    made = []
    for i, seq in enumerate(sequences):
        _, value = encode_message("snapshot" if seq == 1 else "update", "s", "a", seq, seq, ["a"])
        made.append((b"s", value or b"", i * step))
    return made


def test_a_released_message_says_who_released_it() -> None:
    """Offset of the releasing message, source offset of its own, index in the order of release."""
    done = Sliced(WindowSize(10, 60)).fold(numbers(1, 4, 3, 2), 100)
    assert [record[:5] for record in done.records] == [
        (0, 0, 0, "s", 1),
        (3, 0, 3, "s", 2),
        (3, 1, 2, "s", 3),
        (3, 2, 1, "s", 4),
    ]


@pytest.mark.parametrize("cut", [1, 2, 3, 100])
def test_beyond_the_window_by_messages(cut: int) -> None:
    """Two may wait: the third gives up on sequence 2; when that comes at last, it is dropped and
    told by offset.
    """
    done = Sliced(WindowSize(2, 10**6)).fold(numbers(1, 3, 4, 5, 6, 2, 7), cut)
    assert [record[4] for record in done.records] == [1, 3, 4, 5, 6, 7]
    assert dict(done.counts) == {"sequence gap": 1, "disorder": 1}
    assert done.findings == [("sequence gap", 1, "warning"), ("disorder", 5, "warning")]
    assert [(mark.offset, mark.session, mark.closed_by) for mark in done.marks] == [
        (3, "s", "")
    ]  # who released it


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_beyond_the_window_by_message_time(cut: int) -> None:
    """Sixty seconds of the session's own messages, not of any clock."""
    done = Sliced(WindowSize(100, 60)).fold(numbers(1, 3, 4, 5, 2, step=25_000), cut)
    assert [record[4] for record in done.records] == [1, 3, 4, 5]
    assert dict(done.counts) == {"sequence gap": 1, "disorder": 1}


def test_twice_is_dropped_wherever_the_first_one_is() -> None:
    """One that was folded, one that waits, and the snapshot itself."""
    done = Sliced(WindowSize(10, 60)).fold(numbers(1, 3, 3, 1, 2, 2, 4), 2)
    assert [record[4] for record in done.records] == [1, 2, 3, 4]
    assert dict(done.counts) == {"repeat": 3}


def test_a_snapshot_with_a_smaller_number_is_a_new_life() -> None:
    """What waited of the old life is let through first, as a gap."""
    again = json.dumps({"type": "snapshot", "rows": [{"id": "z", "v": 9}], "seq": 1}).encode()
    done = Sliced(WindowSize(10, 60)).fold([*numbers(1, 2, 5), (b"s", again, 9000), *numbers(2)], 2)
    assert [record[4] for record in done.records[:3]] == [1, 2, 5]
    assert dict(done.counts)["sequence gap"] == 1
    assert [record[4] for record in done.records[3:]] == [1, 1]  # row a vanishes, row z is there
    assert done.counts["precondition"] == 1  # the new life has no row a
    assert [mark.closed_by for mark in done.marks] == ["", "snapshot", ""]


def test_messages_before_the_first_snapshot_wait_for_it() -> None:
    """Within the window they belong to it; beyond it they are headless."""
    early = Sliced(WindowSize(10, 60)).fold(numbers(3, 2, 1, 4), 1)
    assert ([record[4] for record in early.records], early.headless) == ([1, 2, 3, 4], 0)
    late = Sliced(WindowSize(2, 60)).fold(numbers(2, 3, 4, 5, 6), 1)
    assert ([record[4] for record in late.records], late.headless) == ([], 3)


def test_a_session_set_aside_keeps_what_waited() -> None:
    """Nothing is lost: poison sets the session aside, and all that waits goes with it."""
    poison = (b"s", b"{", 3000)
    done = Sliced(WindowSize(10, 60)).fold([*numbers(1, 4, 3), poison], 2)
    assert sorted(done.kept) == [(1, "poison"), (2, "poison"), (3, "poison")]
    assert done.saved["s"].waiting_messages == []


def test_wrong_records_are_within_their_gap() -> None:
    """They come out at the releasing message's offset; a snapshot released by the same message
    closes after it.
    """
    whole = [
        encode_message("snapshot", "s", "", 0, 1, ["a"]),
        encode_message("update", "s", "a", 3, 3, []),
        encode_message("update", "s", "a", 4, 4, []),
    ]
    whole.append(encode_message("snapshot", "s", "", 0, 5, ["a"]))
    done = Sliced(WindowSize(2, 10**6)).fold([(b"s", value or b"", 0) for _, value in whole], 100)
    assert [(record[0], record[4]) for record in done.records] == [(0, 1), (3, 3), (3, 4), (3, 5)]
    assert [(mark.offset, mark.closed_by) for mark in done.marks] == [(3, ""), (4, "snapshot")]


def test_a_dropped_message_touches_its_session_in_any_slice() -> None:
    """Expiry goes by it, so it must not depend on slices."""
    one, many = (Sliced(WindowSize(10, 60)).fold(numbers(1, 2, 2), cut) for cut in (100, 1))
    assert one.saved == many.saved
    assert one.saved["s"].last_offset == 2


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_a_contradiction_is_told_at_its_own_offset(cut: int) -> None:
    """The finding names the message that waited, not the one that released it; the output ends at
    the latter.
    """
    _, unknown_row = encode_message("update", "s", "z", 1, 3, [])
    waits = (b"s", unknown_row or b"", 1000)
    done = Sliced(WindowSize(10, 60)).fold([*numbers(1), waits, *numbers(2)], cut)
    assert done.findings == [("precondition", 1, "error")]
    assert [(mark.finding, mark.offset) for mark in done.marks] == [("precondition", 2)]
    assert done.kept == [(1, "precondition")]
