"""Holds: a repair reserves its partitions, can die anywhere, and is gone on with or given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from seriatim.engine.crash_points import CRASH_POINTS, REPAIR_POINTS, arm
from seriatim.errors import ConfigError, FencedError, IntegrityError
from seriatim.operations.repair.damage import RepairRequest, plan_repair, request_of_hold
from seriatim.operations.repair.refold import RepairRun, abandon_repair
from tests.operations.adding_machines import (
    Adder,
    BuggyAdder,
    create_adding_stream,
    deploy,
    expected_outcome,
    send_numbers,
    session_states,
)
from tests.operations.memory_streams import A0, A1, kinds
from tests.operations.repair_helper import (
    assert_equals_clean_fold,
    create_sliced_stream,
    records_in_order,
    remove_file,
    repair,
    send_random_messages,
)


def test_a_hold_that_was_left_is_resumed_by_the_same_command() -> None:
    """Whoever died in between left a hold: others wait, status knows, and repair goes on."""
    made = create_sliced_stream(partitions=2)
    remove_file(made, made.accounts()[A0].state[-1].path)
    tools = made.open()
    made_plan = plan_repair(tools, RepairRequest())
    RepairRun(tools).place_hold(
        made.ledger.head("s"), made_plan.partitions, made_plan.request.to_json()
    )
    first = made.accounts()[A0].hold
    assert first is not None
    assert request_of_hold(tools, first) == RepairRequest()
    send_random_messages(made, 5, A0, seed=2)
    send_random_messages(made, 5, A1, seed=2)
    outcome = made.run()
    assert outcome.messages == 5
    assert made.accounts()[A0].frontier == 60
    repair(made)
    assert made.accounts()[A0].hold is None
    made.run()
    assert_equals_clean_fold(made)
    assert_equals_clean_fold(made, A1)


def test_two_resumes_at_once_have_one_winner() -> None:
    """The second finds another hold than it wants to take over, and has changed nothing."""
    made = create_sliced_stream()
    remove_file(made, made.accounts()[A0].state[-1].path)
    tools = made.open()
    before = plan_repair(tools, RepairRequest())
    RepairRun(tools).place_hold(made.ledger.head("s"), before.partitions, before.request.to_json())
    one, other = (
        plan_repair(made.open(), RepairRequest()),
        plan_repair(made.open(), RepairRequest()),
    )
    assert one.resumed_hold == other.resumed_hold is not None
    RepairRun(made.open()).apply(one, 100)
    with pytest.raises(FencedError, match="another repair was faster"):
        RepairRun(made.open()).apply(other, 100)
    assert_equals_clean_fold(made)


def test_a_zombie_repair_is_refused_at_its_commit() -> None:
    """Its hold was taken over while it slept: nothing of its work counts."""
    made = create_sliced_stream()
    remove_file(made, made.accounts()[A0].state[-1].path)
    zombie = RepairRun(made.open())

    def meanwhile(name: str) -> None:
        if name == "refolded":
            arm(None)
            repair(made)

    arm(meanwhile)
    try:
        with pytest.raises(FencedError):
            zombie.apply(plan_repair(made.open(), RepairRequest()), 100)
    finally:
        arm(None)
    assert kinds(made).count("repair") == 1
    assert_equals_clean_fold(made)


def test_an_abandoned_repair_gives_its_partitions_back() -> None:
    """As they were; unknown ids are refused by name."""
    made = create_sliced_stream()
    before = records_in_order(made, A0)
    tools = made.open()
    RepairRun(tools).place_hold(
        made.ledger.head("s"), [A0], RepairRequest(partition=str(A0), start=3).to_json()
    )
    hold = made.accounts()[A0].hold or ""
    with pytest.raises(ConfigError, match="no partition is held by 'x'"):
        abandon_repair(tools, "x")
    assert abandon_repair(tools, hold) == [A0]
    assert (made.accounts()[A0].hold, records_in_order(made, A0)) == (None, before)
    send_random_messages(made, 5, seed=4)
    made.run()
    assert_equals_clean_fold(made)


def test_an_approval_is_void_after_an_epoch_moved_and_not_after_slices() -> None:
    """Ten more slices only widen what was approved; another repair makes it another plan."""
    made = create_adding_stream(BuggyAdder)
    made.kafka.create("in-a")
    send_numbers(made, 60, 1)
    made.run(10)
    request = RepairRequest(partition=str(A0), start=0)
    approved = plan_repair(made.open(), request).approval
    send_numbers(made, 60, 2)
    made.run(6)
    deploy(made, Adder)
    RepairRun(made.open()).apply(plan_repair(made.open(), request), 1000, approved)
    assert (records_in_order(made, A0), session_states(made)) == expected_outcome(made)
    with pytest.raises(IntegrityError, match="not the one of now"):
        RepairRun(made.open()).apply(plan_repair(made.open(), request), 1000, approved)


NOT_OF_A_REPAIR = ("plan-made", "table-created", "slice-folded", "ledger-read")


@pytest.mark.long
@pytest.mark.parametrize(
    "point", [p for p in (*CRASH_POINTS, *REPAIR_POINTS) if p not in NOT_OF_A_REPAIR]
)
def test_killed_anywhere_and_again(point: str) -> None:
    """The same command finishes it, at every crash point, at its first and at a later passing."""
    for passing in (1, 2, 5):
        made = create_adding_stream(BuggyAdder)
        made.kafka.create("in-a", 2)
        for partition in (A0, A1):
            send_numbers(made, 80, 7, partition)
        made.run(20)
        deploy(made, Adder)
        with crashing(point, passing) as deaths:
            repair(made, 15, partition=str(A0), start=0)
        assert deaths or passing > 1
        made.run()
        repair(made, 15, partition=str(A0), start=0)
        send_numbers(made, 20, 8)
        made.run()
        assert (records_in_order(made, A0), session_states(made)) == expected_outcome(made), (
            point,
            passing,
        )
        assert made.accounts()[A0].hold is None


class Killed(BaseException):
    """The process is gone."""


@contextmanager
def crashing(point: str, passing: int) -> Iterator[list[str]]:
    """Ends at the given passing of a crash point, if it is passed so often."""
    seen, deaths = 0, list[str]()

    def hook(name: str) -> None:
        nonlocal seen
        seen += name == point
        if name == point and seen == passing:
            raise Killed(name)

    arm(hook)
    try:
        yield deaths
    except Killed as killed:
        deaths.append(str(killed))
    finally:
        arm(None)


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_goes_on_when_a_repair_comes_between(finished: bool) -> None:
    """Its other partitions are folded to the end; the repaired one by itself afterwards, without a
    word of trouble.
    """
    made = create_sliced_stream(partitions=2)
    before = made.accounts()[A1].frontier
    send_random_messages(made, 40, A0, seed=3)
    send_random_messages(made, 40, A1, seed=3)

    def meanwhile(name: str) -> None:
        if name == "slice-folded":
            arm(None)
            if finished:
                repair(made, partition=str(A0), start=3)
            else:
                tools = made.open()
                RepairRun(tools).place_hold(
                    made.ledger.head("s"), [A0], RepairRequest(partition=str(A0), start=3).to_json()
                )

    arm(meanwhile)
    try:
        outcome = made.run(10)
    finally:
        arm(None)
    assert outcome.findings == []
    assert made.accounts()[A1].frontier == before + 40
    if not finished:
        assert made.accounts()[A0].frontier == 60
        repair(made, partition=str(A0), start=3)
        made.run()
    assert_equals_clean_fold(made)
    assert_equals_clean_fold(made, A1)
