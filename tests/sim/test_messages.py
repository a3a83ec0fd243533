"""`verify --at` judges messages by the fold at tier none. The rules that message_rules.py has
independently of the fold find the same, whatever the messages are.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct

from seriatim.engine.offsets import Partition
from seriatim.operations.prove.verify_at import MessageJudge, ObservedMessage
from tests.sim.message_rules import BrokenRule, RuleOptions, judge_messages

PARTITIONS = (Partition("in-a", 0), Partition("in-a", 1))
KINDS = {"gap", "offset again", "poison", "headless", "sequence gap", "repeat", "disorder"}


class DrawnSession(Struct):
    """A session as its producer counts it."""

    sequence: int = 0


class MessageDraw:
    """Draws the messages of one view: mostly right, and wrong in every way."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.shows_snapshots = self.random.random() < 0.8
        self.has_sequence = self.random.random() < 0.9
        self.is_output = self.random.random() < 0.3
        self.fault_rate = self.random.choice((0.0, 0.05, 0.3))
        self.ignored_rate = self.random.choice((0.0, 0.0, 0.2))
        """How many messages concern no session, as tombstones."""
        self.sessions: dict[str, DrawnSession] = {}

    def messages(self) -> list[ObservedMessage]:
        """The messages of one partition."""
        self.sessions = {}
        offset = self.random.choice((0, 0, 7))
        messages = []
        for _ in range(self.random.randrange(1, 60)):
            messages.append(self._message(offset))
            offset += 1
            if self.random.random() < self.fault_rate / 3:
                offset = max(0, offset + self.random.choice((-2, -1, 1, 3)))
        return messages

    def _message(self, offset: int) -> ObservedMessage:
        name = self.random.choice("xyz")
        if self.random.random() < self.ignored_rate:
            session = self.random.choice((name, None))
            return ObservedMessage(offset=offset, session=session, has_no_effect=True)
        if self._is_faulty(3):
            poison = self.random.choice(("", "no JSON"))
            return ObservedMessage(offset=offset, session=name if poison else None, poison=poison)
        is_new = name not in self.sessions
        session = self.sessions.setdefault(name, DrawnSession(self.random.choice((0, 4))))
        is_snapshot = self.random.random() < (0.05 if self._is_faulty() or not is_new else 0.95)
        sequence = self._next_sequence(session, is_snapshot=is_snapshot)
        is_end = self.is_output and not is_snapshot and self.random.random() < 0.1
        return ObservedMessage(
            offset=offset,
            session=name,
            sequence=sequence if self.has_sequence else None,
            is_snapshot=is_snapshot if self.shows_snapshots else None,
            is_session_end=is_end,
        )

    def _next_sequence(self, session: DrawnSession, *, is_snapshot: bool) -> int:
        if is_snapshot and self.random.random() < 0.3:
            session.sequence = self.random.choice((0, 1, session.sequence + 3))
            return session.sequence
        if self._is_faulty():
            sequence = max(0, session.sequence + self.random.choice((-5, -2, -1, 0, 2, 3, 6)))
            # A producer goes on after what it sent last, or after what it sent most.
            session.sequence = max(sequence, self.random.choice((sequence, session.sequence)))
            return sequence
        session.sequence += 1
        return session.sequence

    def _is_faulty(self, rarer: int = 1) -> bool:
        return self.random.random() < self.fault_rate / rarer


def is_explained(hole: range) -> bool:
    """Some of the holes with one offset are no fault."""
    return len(hole) == 1 and hole.start != 1


def test_the_fold_and_independent_rules_find_the_same_in_messages(seeds: range) -> None:
    """The same faults: kind, level, first place and count; and the same messages have an effect."""
    kinds: set[str] = set()
    for seed in seeds:
        draw = MessageDraw(seed)
        options = RuleOptions(not draw.is_output, draw.random.random() < 0.8, is_explained)
        judge = MessageJudge(
            is_contiguous=options.is_contiguous,
            has_snapshots=options.has_snapshots,
            is_explained=lambda _, hole: is_explained(range(hole.start, hole.end)),
        )
        faults: dict[BrokenRule, list[tuple[Partition, ObservedMessage]]] = {}
        message_count = 0
        for partition in PARTITIONS:
            messages = draw.messages()
            message_count += len(messages)
            effects = [has_effect for _, has_effect in judge.validate(partition, messages)]
            judged = list(judge_messages(messages, options))
            assert effects == [message.has_effect for message in judged], f"seed={seed}"
            for message, judged_message in zip(messages, judged, strict=True):
                for rule in judged_message.broken_rules:
                    faults.setdefault(rule, []).append((partition, message))
        expected = [
            (rule, places[0][0], places[0][1].offset, places[0][1].session, len(places))
            for rule, places in faults.items()
        ]
        found = [
            ((fault.kind, fault.level), fault.partition, fault.offset, fault.session, fault.count)
            for fault in judge.faults.values()
        ]
        assert found == expected, f"seed={seed}"
        assert judge.messages == message_count
        kinds |= {kind for kind, _ in faults}
    assert kinds == KINDS
