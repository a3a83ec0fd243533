"""What is said not to be trusted is what is wrong, no more and no less: tier order after messages
were lost.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from seriatim.engine.findings import GapMark, Tier
from seriatim.engine.fold import Fold
from seriatim.engine.messages import MessageBatch
from tests.engine.test_fold import Folder, P, encode_message, machine

Sent = tuple[str, int, bool]
"""Session, sequence, whether it is a snapshot."""


class Marking(Folder):
    """Keeps the marks."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(machine(sequence="seq", lenient=True), tier)
        self.marks: list[GapMark] = []
        self.offsets: list[int] = []

    def fold_what_came(self, came: list[tuple[int, Sent]], cut: int) -> None:
        """Messages with their offsets, `cut` of them in a slice: a stretch wherever one is missing."""
        for begin in range(0, len(came), cut):
            fold = Fold(P, self.runner, self.tier, self.on_poison, self._load)
            for offset, (session, seq, snapshot) in came[begin : begin + cut]:
                key, value = encode_message(
                    "snapshot" if snapshot else "update", session, "a", seq, seq, ["a"]
                )
                out = fold.fold_batch(MessageBatch(offset, [offset], [key], [value]))
                self.offsets += [offset] * len(out.rows)
            for name, session_after in fold.touched_sessions().items():
                session_after.state, session_after.is_active, session_after.is_touched = (
                    None,
                    False,
                    False,
                )
                self.saved[name] = session_after
            self.marks += fold.tally.marks


def reported(marks: Iterable[GapMark], end: int) -> set[tuple[str, int]]:
    """The (session, offset) pairs that marks say are not to be trusted."""
    open_since: dict[str, int] = {}
    bad: set[tuple[str, int]] = set()
    for mark in marks:
        name = mark.session or ""
        if mark.closed_by:
            bad |= {(name, offset) for offset in range(open_since.pop(name), mark.offset)}
        elif mark.until < 0:
            open_since.setdefault(name, mark.offset)
    for name, start in open_since.items():
        bad |= {(name, offset) for offset in range(start, end)}
    return bad


@pytest.mark.long
@pytest.mark.parametrize("seed", range(50))
def test_reported_damage_is_the_true_damage(seed: int) -> None:
    """After a loss that cannot be mended: the output of a session from its first message after it
    to a snapshot.
    """
    chance = random.Random(seed)
    sent: list[Sent] = []
    numbers: dict[str, int] = {}
    for _ in range(chance.randrange(50, 300)):
        name = f"s{chance.randrange(5)}"
        numbers[name] = numbers.get(name, 0) + 1
        sent.append((name, numbers[name], numbers[name] == 1 or chance.random() < 0.1))
    lost = {offset for _ in range(chance.randrange(1, 4)) for offset in _stretch(chance, len(sent))}
    came = [(offset, message) for offset, message in enumerate(sent) if offset not in lost]
    truth: set[tuple[str, int]] = set()
    begun: set[str] = set()
    hurt: set[str] = set()
    for offset, (name, _, snapshot) in enumerate(sent):
        if offset in lost:
            hurt.add(name)
        elif snapshot:
            begun.add(name)
            hurt.discard(name)
        elif name in hurt and name in begun:
            truth.add((name, offset))
    done, sliced = Marking("order"), Marking("order")
    done.fold_what_came(came, len(sent))
    sliced.fold_what_came(came, chance.choice([1, 3, 17]))
    told_offsets = {(name, offset) for offset, (name, _, _) in came} & reported(
        done.marks, len(sent)
    )
    assert told_offsets == truth
    assert sliced.marks == done.marks


def _stretch(chance: random.Random, end: int) -> range:
    start = chance.randrange(5, end)
    return range(start, min(end, start + chance.randrange(1, 6)))
