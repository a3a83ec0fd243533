"""A session that is well again without a repair: the plan says since when, and changes nothing."""

from __future__ import annotations

import pytest

from seriatim.errors import ConfigError
from seriatim.operations.release import release_session
from seriatim.operations.repair.damage import RepairPlan, RepairRequest, plan_repair
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0, create_filled_stream, send
from tests.operations.repair_helper import repair


def quarantined_stream() -> MemoryStream:
    """The session s is in quarantine since offset 3, because of a message that is no JSON."""
    memory_stream = create_filled_stream()
    send(memory_stream, A0, b"no JSON")
    memory_stream.run()
    return memory_stream


def plan(memory_stream: MemoryStream, **request: str) -> RepairPlan:
    """The plan of a repair."""
    return plan_repair(memory_stream.open(), RepairRequest(**request))


def described(repair_plan: RepairPlan) -> list[str]:
    """What the plan says of sessions that are well; it does nothing else."""
    assert not repair_plan.actions
    assert not repair_plan.notes
    return [well.describe() for well in repair_plan.well_sessions]


@pytest.mark.parametrize("request_names_session", [True, False])
def test_a_snapshot_that_came_meanwhile_leaves_nothing_to_repair(
    request_names_session: bool,
) -> None:
    """The plan says since which offset the session is well, as the mail asked for or by its
    partition alone.
    """
    memory_stream = quarantined_stream()
    request = {"partition": "in-a/0"}
    if request_names_session:
        request["session"] = "s"
    assert plan(memory_stream, **request).actions
    send(memory_stream, A0, ["a"])
    memory_stream.run()
    assert described(plan(memory_stream, **request)) == [
        "session s in in-a/0 is already well since offset 4, by its snapshot"
    ]


def test_a_session_that_a_person_released_is_well_too() -> None:
    """Its messages count again from the frontier of then on."""
    memory_stream = quarantined_stream()
    release_session(memory_stream.open(), "s", "it is right as it is")
    assert described(plan(memory_stream, session="s")) == [
        "session s in in-a/0 is already well since offset 4, released by hand"
    ]


def test_the_last_damage_counts() -> None:
    """A session that is damaged again is repaired."""
    memory_stream = quarantined_stream()
    send(memory_stream, A0, ["a"], b"no JSON")
    memory_stream.run()
    assert plan(memory_stream, session="s").actions


def test_a_session_that_was_never_damaged_is_a_slip() -> None:
    """Nothing is known of it, so a person has to say from where on."""
    memory_stream = create_filled_stream()
    memory_stream.run()
    with pytest.raises(ConfigError, match="nothing is known to be wrong"):
        plan(memory_stream, session="s")


def test_from_folds_again_what_is_well() -> None:
    """A person may insist."""
    memory_stream = quarantined_stream()
    send(memory_stream, A0, ["a"])
    memory_stream.run()
    assert repair(memory_stream, session="s", start=0).sequence > 0
