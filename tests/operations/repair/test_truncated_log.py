"""After a log was cut: the time behind the cut is over, and no later repair goes by it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from seriatim.errors import IntegrityError
from seriatim.operations.accept import accept_topic
from seriatim.operations.release import release_session
from seriatim.testing import MemoryStream
from tests.operations.adding_machines import (
    Adder,
    RaisingAdder,
    create_adding_stream,
    deploy,
    expected_outcome,
    send_numbers,
    session_states,
)
from tests.operations.memory_streams import A0, create_stream, send
from tests.operations.repair_helper import (
    assert_equals_clean_fold,
    create_sliced_stream,
    gaps_of,
    records_in_order,
    remove_file,
    repair,
    send_random_messages,
)

POISON = b"{"


def cut(made: MemoryStream, offset: int) -> None:
    """The log loses its end, and repair follows it back."""
    made.kafka.truncate(A0, offset)
    assert [one.finding for one in made.run().findings] == ["truncated"]
    repair(made)
    assert made.accounts()[A0].frontier == offset


@pytest.mark.long
@pytest.mark.parametrize("where", [38, 40, 45])
def test_no_state_from_behind_a_cut_begins_a_refold(where: int) -> None:
    """Its offset is reached again by other messages: the states of before it are those of messages
    that are gone.
    """
    made = create_stream()
    made.kafka.create("in-a")
    for number in range(40):
        send(made, A0, ["a"], session=f"k{number}")
    made.run()
    for number in range(20):
        send(made, A0, 1000 + number, session=f"k{number % 2}")
        made.run()
    cut(made, where)
    for number in range(20):
        send(made, A0, number, session=f"k{5 + number % 2}")
        made.run()
    assert_equals_clean_fold(made)
    remove_file(made, made.accounts()[A0].state[0].path)
    repair(made)
    assert_equals_clean_fold(made)


@pytest.mark.parametrize("size", [5, 7])
def test_what_a_forward_passed_over_behind_a_cut_is_not_passed_over_again(size: int) -> None:
    """Other messages have these offsets now: their records stay, and the gap of then counts no
    more.
    """
    given: dict[str, Any] = {"on_poison": "halt"}
    made = create_sliced_stream(50, 10, **given)
    send(made, A0, POISON, session=None)
    send_random_messages(made, 5, seed=4)
    made.run()
    repair(made, forward=True)
    made.run()
    assert [(gap.start, gap.mended is None) for gap in gaps_of(made)] == [(50, True)]
    cut(made, 45)
    assert [
        (gap.start, gap.mended is None) for gap in gaps_of(made) if gap.finding == "poison"
    ] == [(50, False)]
    send_random_messages(made, 30, seed=9)
    made.run(size)
    assert_equals_clean_fold(made, **given)
    repair(made, partition=str(A0), start=46)
    assert_equals_clean_fold(made, **given)


def test_whom_a_person_released_behind_a_cut_is_not_released_again() -> None:
    """They spoke of messages that are gone: what hurts the session now, they never saw."""
    made = create_stream()
    made.kafka.create("in-a")
    for number in range(5):
        send(made, A0, ["a"], session=f"k{number}")
    made.run()
    send(made, A0, POISON, session="k0")
    send(made, A0, 1, 1, 1, 1, session="k1")
    made.run()
    release_session(made.open(), "k0", "fine")
    send(made, A0, 7, session="k0")
    made.run()
    cut(made, 5)
    send(made, A0, ["a"], POISON, session="k0")
    send(made, A0, 1, 2, 3, session="k1")
    made.run()
    send(made, A0, 9, session="k0")
    made.run()
    before = records_in_order(made, A0), made.sessions(A0)
    repair(made)
    assert (records_in_order(made, A0), made.sessions(A0)) == before
    assert made.sessions(A0)["k0"].finding == "poison"


@pytest.mark.parametrize("how", ["cut", "made again"])
def test_a_finding_at_an_offset_that_is_used_again_is_told(how: str) -> None:
    """It is of another message than the one that a person was told of."""
    made = create_adding_stream(RaisingAdder)
    made.kafka.create("in-a")
    say(made, (1, True), (5, False), (99, False))
    assert [one.finding for one in made.run().findings] == ["raised"]
    if how == "cut":
        cut(made, 2)
        say(made, (99, False))
    else:
        made.kafka.delete("in-a")
        made.kafka.create("in-a")
        made.run()
        accept_topic(made.open(), "in-a", "its new life")
        say(made, (1, True), (5, False), (99, False))
    deploy(made, Adder)
    assert made.run().findings == []
    deploy(made, RaisingAdder)
    done = repair(made, partition=str(A0), start=0)
    assert ([one.offset for one in done.new_findings], done.repeated_findings) == ([2], [])


def say(made: MemoryStream, *values: tuple[int, bool]) -> None:
    """Messages of an adder's session s."""
    for value, start in values:
        made.kafka.produce("in-a", "s", json.dumps({"v": value, "start": start}).encode())


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_cuts_among_repairs(seed: int) -> None:
    """Any mix of slices, cuts, lost files and refolds ends as a straight fold of what the log has."""
    chance = random.Random(seed)
    made = create_adding_stream(Adder)
    made.kafka.create("in-a")
    send_numbers(made, 60, seed * 100, sessions=40)
    made.run()
    for number in range(chance.randint(4, 9)):
        send_numbers(made, chance.randint(5, 60), seed * 100 + number, sessions=2)
        made.run(chance.randint(1, 5))
        kind, account = (
            "cut" if number % 2 == 0 else chance.choice(("state", "record", "from")),
            made.accounts()[A0],
        )
        if kind == "cut":
            made.kafka.truncate(A0, chance.randint(20, account.frontier - 1))
            made.run()
        elif kind == "state":
            remove_file(made, account.state[0].path)
        elif kind == "record":
            remove_file(made, chance.choice(made.ledger.files_now()).path)
        start = chance.randrange(account.frontier)
        repair(
            made,
            chance.randint(3, 50),
            **({"partition": str(A0), "start": start} if kind == "from" else {}),
        )
        assert (records_in_order(made, A0), session_states(made)) == expected_outcome(made), (
            number,
            kind,
        )


def test_a_cut_is_told_by_where_it_was() -> None:
    """The log has grown past the frontier since: that is not where it was cut."""
    made = create_sliced_stream()
    made.kafka.truncate(A0, 45)
    made.run()
    send_random_messages(made, 30, seed=9)
    with pytest.raises(IntegrityError, match="cut at offset 45, and it was folded up to 60"):
        repair(made, partition=str(A0), start=46)
