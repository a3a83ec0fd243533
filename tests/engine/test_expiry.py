"""Expiry and the loss bound: by message time, at the session's own messages, whatever the slices."""

from __future__ import annotations

import random
from typing import Any

import pytest

from seriatim.engine.fold import Fold, Limits
from seriatim.engine.messages import MessageBatch
from seriatim.engine.session import Session
from tests.engine.test_fold import P, encode_message, machine

HOUR = 3_600_000
Sent = tuple[str, str, str, int]
"""Kind, session, row, hour."""


class Timed:
    """Folds messages with times, in slices; message time and sessions go on in between."""

    def __init__(self, **limits: int) -> None:
        self.limits, self.runner = Limits(**limits), machine()
        self.saved: dict[str, Session] = {}
        self.time, self.at = -1, 0
        self.records: list[tuple[Any, ...]] = []
        self.ended = self.headless = self.distance_messages = self.distance_ms = 0
        self.findings: list[tuple[str, int, str | None, str]] = []
        self.causes: list[str] = []

    def fold(self, messages: list[Sent], cut: int = 1000) -> Timed:
        """All messages, `cut` in a slice."""
        for start in range(0, len(messages), cut):
            self._slice(messages[start : start + cut])
        return self

    def _slice(self, part: list[Sent]) -> None:
        fold = Fold(
            P,
            self.runner,
            "strict",
            "quarantine",
            self._load,
            limits=self.limits,
            message_time_ms=self.time,
        )
        both = [
            encode_message(kind, name, row, 7, None, row.split()) for kind, name, row, _ in part
        ]
        times = [hour * HOUR for *_, hour in part]
        out = fold.fold_batch(
            MessageBatch(self.at, times, [key for key, _ in both], [value for _, value in both])
        )
        for row, position in enumerate(out.positions):
            self.records.append(
                (self.at + position, out.indexes[row], out.sessions[row], *out.rows[row])
            )
        for name, session in fold.touched_sessions().items():
            session.state, session.is_active, session.is_touched = None, False, False
            self.saved[name] = session
        self.time = fold.expiry.message_time_ms if fold.expiry else -1
        self.at += len(part)
        self.ended += fold.counts.ended
        self.headless += fold.counts.headless
        self.distance_messages = max(self.distance_messages, fold.counts.distance_messages)
        self.distance_ms = max(self.distance_ms, fold.counts.distance_ms)
        self.findings += [(f.finding, f.offset, f.session, f.level) for f in fold.tally.findings]
        self.causes += [f"{f.expected}, {f.found}: {f.cause}" for f in fold.tally.findings]

    def _load(self, names: list[str]) -> dict[str, Session]:
        return {
            name: Session(
                **{field: getattr(self.saved[name], field) for field in Session.__struct_fields__}
            )
            for name in names
            if name in self.saved
        }

    def rows(self, session: str) -> dict[str, Any]:
        """A session's rows."""
        saved = self.saved[session].state_bytes
        return {} if saved is None else self.runner.load(saved, 1)


SILENT = [
    ("snapshot", "s", "a b", 0),
    ("snapshot", "t", "x", 1),
    ("update", "t", "x", 30),
    ("update", "t", "x", 50),
]


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_nothing_ends_before_its_own_message_comes(cut: int) -> None:
    """Session s is silent for 50 hours with a timeout of 24: it is still there."""
    done = Timed(timeout_ms=31 * HOUR).fold(SILENT, cut)
    assert (done.ended, set(done.rows("s"))) == (0, {"a", "b"})


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_a_silent_session_ends_when_it_is_next_touched(cut: int) -> None:
    """Deletes for its rows at the message that touches it; without a snapshot that message is
    headless.
    """
    done = Timed(timeout_ms=31 * HOUR).fold([*SILENT, ("update", "s", "a", 51)], cut)
    assert [record for record in done.records if record[0] == 4] == [
        (4, 0, "s", "delete", "a", None),
        (4, 1, "s", "delete", "b", None),
    ]
    assert (done.ended, done.headless, done.rows("s")) == (1, 1, {})


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_a_snapshot_begins_it_again(cut: int) -> None:
    """First the deletes, then the rows."""
    done = Timed(timeout_ms=31 * HOUR).fold(
        [*SILENT, ("snapshot", "s", "a c", 51), ("update", "s", "c", 52)], cut
    )
    assert [record[3:5] for record in done.records if record[0] == 4] == [
        ("delete", "a"),
        ("delete", "b"),
        ("snapshot", "a"),
        ("snapshot", "c"),
    ]
    assert (done.ended, set(done.rows("s"))) == (1, {"a", "c"})


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_the_partitions_message_time_decides(cut: int) -> None:
    """Its largest timestamp so far, though the session's own message claims to be early."""
    done = Timed(timeout_ms=31 * HOUR).fold([*SILENT, ("update", "s", "a", 2)], cut)
    assert done.ended == 1


@pytest.mark.parametrize("seed", range(40))
def test_slices_change_nothing(seed: int) -> None:
    """Any mix of sessions, times and snapshots. The order of findings within a slice is free, because
    some rules look at each message and some at a whole batch.
    """
    chance = random.Random(seed)
    sent: list[Sent] = []
    hour = 0
    for _ in range(60):
        hour += chance.choice([0, 0, 1, 5, 20])
        kind = chance.choice(["snapshot", "update", "update", "update"])
        sent.append((kind, f"s{chance.randrange(4)}", "a", max(0, hour - chance.choice([0, 0, 3]))))
    limits = {
        "timeout_ms": chance.choice([0, 10, 40]) * HOUR,
        "distance_ms": chance.choice([0, 15]) * HOUR,
    }
    whole, parts = Timed(**limits).fold(sent), Timed(**limits).fold(sent, chance.choice([1, 2, 7]))
    for timed in (whole, parts):
        timed.findings.sort(key=lambda finding: (finding[1], finding[0]))
        timed.causes.sort()
    assert vars(whole) | {"runner": 0} == vars(parts) | {"runner": 0}


def test_the_distance_between_snapshots() -> None:
    """The most messages and the longest time after a snapshot, of any session."""
    sent = [
        ("snapshot", "s", "a", 0),
        ("update", "s", "a", 1),
        ("update", "s", "a", 5),
        ("snapshot", "s", "a", 6),
    ]
    done = Timed().fold(
        [*sent, ("update", "s", "a", 7), ("snapshot", "t", "x", 8), ("update", "t", "x", 9)]
    )
    assert (done.distance_messages, done.distance_ms) == (2, 5 * HOUR)


@pytest.mark.parametrize("cut", [1, 3, 100])
def test_past_the_agreed_distance_is_told_once(cut: int) -> None:
    """A warning at the first message past it, and again only after the next snapshot; it names the
    one before.
    """
    hours = [0, 1, 3, 4, 9, 20]
    sent = [("snapshot" if hour == 0 else "update", "s", "a", hour) for hour in hours]
    done = Timed(distance_ms=3 * HOUR).fold(
        [*sent, ("snapshot", "s", "a", 21), ("update", "s", "a", 25)], cut
    )
    assert done.findings == [
        ("snapshot distance", 3, "s", "warning"),
        ("snapshot distance", 7, "s", "warning"),
    ]
    assert [cause.partition(": ")[2] for cause in done.causes] == [
        "the last one is at offset 0",
        "the last one is at offset 6",
    ]
