"""The rules about messages, written once more without the fold: a session begins by a snapshot, its
sequence has no hole, repeat or disorder, and no offset is missing.

Only the rules: which messages break which rule, and which of them have an effect. It shares nothing with
the product but the message itself, so that a mistake there shows as a difference here.

Next: test_messages.py holds both against each other; operations/prove/verify_at.py is the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct, field

from seriatim.operations.prove.verify_at import ObservedMessage

BrokenRule = tuple[str, str]
"""The kind of a fault, and its level."""


class JudgedMessage(NamedTuple):
    """What the rules say of one message."""

    broken_rules: list[BrokenRule]
    has_effect: bool


class RuleOptions(NamedTuple):
    """What is known about a view."""

    is_contiguous: bool
    has_snapshots: bool
    is_explained: Callable[[range], bool]
    """Whether it is known why these offsets are missing."""


class JudgedSession(Struct):
    """A session up to the present message."""

    last_sequence: int | None = None
    first_sequence: int | None = None
    """The sequence of its first message, or of its last snapshot."""
    has_snapshot: bool = False
    passed_over: set[int] = field(default_factory=set)
    """Sequences that were left out so far."""


def judge_messages(
    messages: Iterable[ObservedMessage], options: RuleOptions
) -> Iterator[JudgedMessage]:
    """Judge the messages of one partition, in the order of the view."""
    sessions: dict[str, JudgedSession] = {}
    expected_offset: int | None = None
    from_birth = False
    for message in messages:
        broken_rules: list[BrokenRule] = []
        if expected_offset is None:
            from_birth = message.offset == 0
            expected_offset = message.offset
        if options.is_contiguous and message.offset < expected_offset:
            broken_rules.append(("offset again", "error"))
        elif options.is_contiguous and message.offset > expected_offset:
            is_explained = options.is_explained(range(expected_offset, message.offset))
            broken_rules.append(("gap", "warning" if is_explained else "error"))
        expected_offset = max(expected_offset, message.offset + 1)
        has_effect = False
        if message.has_no_effect:
            pass
        elif message.poison or message.session is None:
            broken_rules.append(("poison", "error"))
        else:
            needs_snapshot = options.has_snapshots and message.is_snapshot is False
            is_first = message.session not in sessions
            session = sessions.setdefault(message.session, JudgedSession())
            if is_first:
                session.first_sequence = message.sequence
                if needs_snapshot and not message.is_session_end:
                    broken_rules.append(("headless", "error" if from_birth else "warning"))
            is_in_order, sequence_rules = judge_sequence(session, message)
            broken_rules += sequence_rules
            has_effect = is_in_order and (session.has_snapshot or not needs_snapshot)
        yield JudgedMessage(broken_rules, has_effect)


def judge_sequence(
    session: JudgedSession, message: ObservedMessage
) -> tuple[bool, list[BrokenRule]]:
    """Whether a message comes in order, and the rules that it breaks."""
    sequence = message.sequence
    last_sequence = session.last_sequence
    if message.is_snapshot:
        broken_rules: list[BrokenRule] = []
        if sequence is not None and last_sequence is not None:
            if sequence in session.passed_over:
                broken_rules.append(("disorder", "error"))
            if sequence > last_sequence + 1:
                # The snapshot closes the hole before it.
                broken_rules.append(("sequence gap", "warning"))
        session.last_sequence = session.first_sequence = sequence
        session.has_snapshot = True
        session.passed_over = set()
        return True, broken_rules
    # Where snapshots do not show, a snapshot may have closed the hole.
    level = "warning" if message.is_snapshot is None else "error"
    if sequence is None or last_sequence is None or sequence == last_sequence + 1:
        session.last_sequence = sequence
        return True, []
    if sequence > last_sequence:
        session.passed_over.update(range(last_sequence + 1, sequence))
        session.last_sequence = sequence
        return True, [("sequence gap", level)]
    if message.is_session_end:
        return True, []
    first_sequence = session.first_sequence
    is_before_first = first_sequence is not None and sequence < first_sequence
    kind = "disorder" if sequence in session.passed_over or is_before_first else "repeat"
    session.passed_over.discard(sequence)
    return False, [(kind, level)]
