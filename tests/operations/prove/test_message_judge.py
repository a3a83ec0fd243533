"""The validator: one judge for messages anywhere; the first place of each wrong, and where two
views part.
"""

from __future__ import annotations

from typing import Any

import pytest

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.operations.prove.verify_at import (
    MessageJudge,
    ObservedMessage,
    PartitionView,
    first_difference,
)

P = Partition("a", 0)


def seen(
    offset: int,
    sequence: int | None,
    *,
    snapshot: bool | None = False,
    session: str = "s",
    **more: Any,
) -> ObservedMessage:
    """A message."""
    return ObservedMessage(
        offset=offset, sequence=sequence, is_snapshot=snapshot, session=session, **more
    )


def judged(*sightings: ObservedMessage, **how: Any) -> MessageJudge:
    """A view after all its messages."""
    judge = MessageJudge(**{"is_contiguous": True, **how})
    list(judge.validate(P, sightings))
    return judge


def kinds(judge: MessageJudge) -> dict[tuple[str, str], tuple[int, int]]:
    """What is wrong: where first, and how often."""
    return {name: (wrong.offset, wrong.count) for name, wrong in judge.faults.items()}


def test_a_session_as_it_should_be_has_nothing_wrong() -> None:
    """A snapshot, updates in sequence, a snapshot that begins anew."""
    judge = judged(
        seen(0, 1, snapshot=True), seen(1, 2), seen(2, 3), seen(3, 1, snapshot=True), seen(4, 2)
    )
    assert judge.faults == {}
    assert judge.messages == 5


@pytest.mark.parametrize(
    ("sequences", "wrong"),
    [
        ([1, 2, 5, 6, 9], {("sequence gap", "error"): (2, 2)}),
        ([1, 2, 2, 3, 3], {("repeat", "error"): (2, 2)}),
        ([1, 3, 2, 4], {("sequence gap", "error"): (1, 1), ("disorder", "error"): (2, 1)}),
        ([5, 6, 4], {("disorder", "error"): (2, 1)}),
        (
            [1, 4, 2, 3, 3],
            {
                ("sequence gap", "error"): (1, 1),
                ("disorder", "error"): (2, 2),
                ("repeat", "error"): (4, 1),
            },
        ),
    ],
)
def test_the_first_place_of_each_wrong_is_named(
    sequences: list[int], wrong: dict[tuple[str, str], tuple[int, int]]
) -> None:
    """Holes, repeats and disorder of the producer's own counter, told apart and counted."""
    first, *rest = sequences
    judge = judged(seen(0, first, snapshot=True), *(seen(i, n) for i, n in enumerate(rest, 1)))
    assert kinds(judge) == wrong


def test_a_hole_closed_by_a_snapshot_is_a_warning() -> None:
    """The session is right again."""
    judge = judged(seen(0, 1, snapshot=True), seen(1, 5, snapshot=True), seen(2, 6))
    assert kinds(judge) == {("sequence gap", "warning"): (1, 1)}


@pytest.mark.parametrize(("start", "level"), [(0, "error"), (7, "warning")])
def test_a_session_that_does_not_begin_by_a_snapshot_is_named(start: int, level: str) -> None:
    """An error where the view begins with the partition itself; else it may have begun before."""
    judge = judged(seen(start, 3), seen(start + 1, 4))
    assert kinds(judge) == {("headless", level): (start, 1)}
    assert judged(seen(start, 3), has_snapshots=False).faults == {}


def test_offsets_are_contiguous_or_named() -> None:
    """A hole, one that certificates explain, and an offset that comes again."""
    messages = [
        seen(0, None, snapshot=True),
        seen(2, None),
        seen(3, None),
        seen(3, None),
        seen(6, None),
    ]
    assert kinds(judged(*messages)) == {("gap", "error"): (2, 2), ("offset again", "error"): (3, 1)}
    explained = judged(*messages, is_explained=lambda _, hole: hole == OffsetRange(1, 2))
    assert kinds(explained)["gap", "warning"] == (2, 1)
    assert kinds(explained)["gap", "error"] == (6, 1)
    assert judged(*messages[:3], is_contiguous=False).faults == {}


def test_messages_that_cannot_be_read_are_named() -> None:
    """By offset; the session goes on."""
    bad = ObservedMessage(offset=1, session="s", poison="not JSON")
    judge = judged(seen(0, 1, snapshot=True), bad, seen(2, 2))
    assert kinds(judge) == {("poison", "error"): (1, 1)}


def test_the_effect_of_a_message_is_known() -> None:
    """Headless ones, repeats and what comes too late have none."""
    judge = MessageJudge(is_contiguous=True)
    messages = [
        seen(0, 1),
        seen(1, 2, snapshot=True),
        seen(2, 3),
        seen(3, 3),
        seen(4, 1),
        seen(5, 4),
    ]
    assert [counts for _, counts in judge.validate(P, messages)] == [
        False,
        True,
        True,
        False,
        False,
        True,
    ]


def test_the_end_of_a_session_has_a_number_of_its_own() -> None:
    """Records that take rows back are no repeat, whatever sequence they carry."""
    assert (
        judged(
            seen(0, 5, snapshot=True),
            seen(1, 6),
            seen(2, 6, is_session_end=True),
            seen(3, 5, is_session_end=True),
        ).faults
        == {}
    )


def test_what_cannot_be_told_a_snapshot_is_only_warned_of() -> None:
    """Records of users' machines do not say whether they come of a snapshot."""
    judge = judged(seen(0, 1, snapshot=None), seen(1, 5, snapshot=None), seen(2, 1, snapshot=None))
    assert set(judge.faults) == {("sequence gap", "warning"), ("repeat", "warning")}


def view(name: str, *messages: ObservedMessage, **more: Any) -> PartitionView:
    """A view of offsets 0 to 9."""
    by_offset = {message.offset: message for message in messages}
    return PartitionView(
        **{
            "name": name,
            "offset_range": OffsetRange(0, 10),
            "messages": by_offset,
            "effective_offsets": set(by_offset),
            **more,
        }
    )


def test_two_inputs_part_at_the_first_offset_that_differs() -> None:
    """One lacks a message, or has another; outside of what both cover nothing is asked."""
    same = [seen(n, n, content_hash=n) for n in range(10)]
    assert (
        first_difference(P, [view("raw", *same), view("kafka", *same)], must_give_records=True)
        is None
    )
    lacks = first_difference(
        P, [view("raw", *same), view("kafka", *same[:4], *same[5:])], must_give_records=True
    )
    assert lacks is not None
    assert (lacks.offset, lacks.views["kafka"]) == (4, "nothing")
    other = first_difference(
        P,
        [view("raw", *same), view("kafka", *same[:6], seen(6, 6, content_hash=99))],
        must_give_records=True,
    )
    assert other is not None
    assert (other.offset, other.description) == (6, "another key or value")
    short = view("raw", *same[3:5], offset_range=OffsetRange(3, 5))
    assert first_difference(P, [short, view("kafka", *same)], must_give_records=True) is None


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (None, "no record"),
        (seen(1, 2, session="other"), "another session"),
        (seen(1, 7), "another sequence"),
        (seen(1, 2, snapshot=True), "a snapshot only in one"),
        (seen(1, 2), ""),
        (seen(1, 7, is_session_end=True), ""),
    ],
)
def test_the_output_parts_where_a_record_is_missing_or_of_another_message(
    record: ObservedMessage | None, what: str
) -> None:
    """Compared by session, sequence and kind; ends of sessions have a sequence of their own."""
    given = view("kafka", seen(0, 1, snapshot=True), seen(1, 2))
    output = view(
        "output", seen(0, 1, snapshot=True), *([record] if record else []), is_complete=False
    )
    for views in ([given, output], [output, given]):
        found = first_difference(P, views, must_give_records=True)
        assert (found.description if found else "").find(what) >= 0
        assert bool(found) == bool(what)


def test_messages_that_need_not_leave_a_record_are_no_parting() -> None:
    """Set aside, without effect, empty snapshots, machines that may give nothing."""
    message = seen(1, 2)
    for given, output, must_give in [
        (view("raw", message), view("output", is_complete=False, quarantined_offsets={1}), True),
        (view("raw", message, effective_offsets=set()), view("output", is_complete=False), True),
        (view("raw", seen(1, 2, must_give_record=False)), view("output", is_complete=False), True),
        (view("raw", message), view("output", is_complete=False), False),
    ]:
        assert first_difference(P, [given, output], must_give_records=must_give) is None


def test_a_record_of_no_message_is_a_parting() -> None:
    """The output has an offset that the input has not."""
    found = first_difference(
        P,
        [view("raw", seen(0, 1)), view("output", seen(3, 4), is_complete=False)],
        must_give_records=False,
    )
    assert found is not None
    assert (found.offset, found.views["raw"]) == (3, "nothing")


def test_a_fault_says_what_was_expected_and_what_is_there() -> None:
    """A hole that certificates explain, and one that a snapshot closes, are warnings and say so."""
    judge = judged(
        seen(0, 1),
        seen(2, 2, poison="no JSON"),
        seen(3, 5, snapshot=True),
        is_explained=lambda _partition, _hole: True,
    )
    texts = {kind: (fault.expected, fault.found) for (kind, _), fault in judge.faults.items()}
    assert texts == {
        "headless": ("a snapshot first", "another message"),
        "gap": ("offset 1", "offset 2 (explained when it was folded)"),
        "poison": ("a message that can be read", "no JSON"),
        "sequence gap": ("sequence 2", "sequence 5, closed by this snapshot"),
    }
    assert {fault.level for fault in judge.faults.values()} == {"error", "warning"}
