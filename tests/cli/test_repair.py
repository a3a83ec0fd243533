"""What a repair prints: its plan, the command that applies it, and findings that are still there."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from seriatim.cli.repair import (
    AppliedRepair,
    PlannedRepair,
    _backfill_command,
    describe_remaining_finding,
    run_repair,
)
from seriatim.engine.findings import Finding
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.ledger.model import Halt
from seriatim.operations.repair.damage import (
    LiftHaltAction,
    RepairPlan,
    RepairRequest,
    plan_repair,
)
from seriatim.operations.repair.refold import RefoldResult
from seriatim.operations.run_request import parse_run_request
from tests.operations.repair.test_swapped_messages import stream_of, tell
from tests.operations.repair_helper import create_sliced_stream


@pytest.mark.parametrize(
    ("cause", "why"),
    [("", "expected sequence 78, found sequence 79"), ("unexplained", "unexplained")],
)
def test_a_finding_that_is_still_there_says_why(cause: str, why: str) -> None:
    """A message that a producer never sent has no cause of Kafka's: what was expected and found
    says it.
    """
    finding = Finding(finding="sequence gap", topic="a", partition=0, offset=337, cause=cause)
    finding = replace(finding, expected="sequence 78", found="sequence 79")
    assert (
        describe_remaining_finding("demo", finding)
        == f"demo a/0: sequence gap at offset 337 is still there: {why}"
    )


def test_a_plan_says_of_a_damaged_file_that_nothing_needs_what_it_is() -> None:
    """It is not deleted yet, there is no commit to come, and nothing has to be done about it."""
    path = "records/a/0/old.parquet"
    plan = RepairPlan(
        stream="demo", request=RepairRequest(), sequence=7, approval="t", deleted_files=(path,)
    )
    said = PlannedRepair(plan, "seriatim repair demo --apply").render()
    assert said.splitlines() == [
        f"demo: {path} is damaged, and nothing needs it any more: newer files took its place",
        "  only a look at the past would read it (trace, replay); runs and readers go on, nothing has to be done",
        "  with --apply it is deleted, and verify does not report it again",
        "demo: nothing else is damaged, as of entry 7",
        "",
        "nothing was changed. To delete it: seriatim repair demo --apply",
    ]


@pytest.mark.parametrize(
    ("resumed_hold", "command"),
    [(None, "seriatim repair demo --apply"), ("ab12", "seriatim repair demo --resume ab12")],
)
def test_a_plan_ends_with_the_command_that_applies_it(
    resumed_hold: str | None, command: str
) -> None:
    """A repair that was killed is resumed by its id: the same command would only plan again."""
    action = LiftHaltAction(Partition("a", 0), Halt("poison", 3, "{"), "it is tried again")
    plan = RepairPlan(
        stream="demo",
        request=RepairRequest(ranges={"a/0": (0, 3)}),
        sequence=7,
        approval="t",
        actions=(action,),
        resumed_hold=resumed_hold,
    )
    last_line = PlannedRepair(plan, "seriatim repair demo --apply").render().splitlines()[-1]
    assert last_line == f"nothing was changed. To do it: {command}"


@pytest.mark.parametrize(
    ("resumed_hold", "outlook"),
    [(None, "this repair would change nothing"), ("ab12", "this would be done in one commit")],
)
def test_a_plan_with_notes_alone_changes_nothing(resumed_hold: str | None, outlook: str) -> None:
    """Unless it goes on with a repair that was killed: then it gives the partitions back."""
    plan = RepairPlan(
        stream="demo",
        request=RepairRequest(),
        sequence=7,
        approval="t",
        notes=("b/1 waits",),
        resumed_hold=resumed_hold,
    )
    first_line = PlannedRepair(plan, "seriatim repair demo --apply").render().splitlines()[0]
    assert first_line == f"demo: as of entry 7, {outlook}"


@pytest.mark.parametrize(
    ("count", "said"),
    [(1, ", only session s0\n"), (7, ", only sessions s0, s1, s2, s3, s4 and 2 more\n")],
)
def test_a_plan_names_the_sessions_that_are_folded_again(count: int, said: str) -> None:
    """Who approves the plan has to know about whom it is."""
    made = stream_of()
    sessions = [f"s{number}" for number in range(count)]
    for session in sessions:
        for sequence in (1, 3, 2):
            tell(made, sequence, rows=["a"] if sequence == 1 else None, session=session)
    made.run()
    plan = plan_repair(made.open(), RepairRequest())
    assert said in PlannedRepair(plan, "seriatim repair s --apply").render()


@pytest.mark.parametrize("is_approved", [False, True])
def test_an_approved_repair_does_not_fail_because_of_other_damage(*, is_approved: bool) -> None:
    """It was in the plan that the person read. An alarm would be about a repair that did all that it
    was asked for. If nothing could be done, the damage is told: nobody else tells it.
    """
    plan = RepairPlan(
        stream="s", request=RepairRequest(), sequence=7, approval="t", notes=("b/1 waits",)
    )
    applied = AppliedRepair(plan, RefoldResult(sequence=8), [], is_approved)
    assert (applied.error() is None) == is_approved
    assert PlannedRepair(plan, "").error() is not None
    finding = Finding(finding="gap", topic="a", partition=0, offset=3)
    assert AppliedRepair(plan, RefoldResult(sequence=8), [finding], is_approved).error() is not None


def test_the_command_of_a_backfill_can_be_pasted() -> None:
    """With all that was asked for except the dry run, quoted for the shell."""
    form = {
        "action": "backfill",
        "partitions": ["in-a/1", "in-b/1"],
        "from": "2026-11-16T08:00:00Z",
        "messages_max": 5,
        "dry_run": True,
    }
    assert _backfill_command("my streams/s.toml", parse_run_request(form), "unchanged") == (
        "seriatim backfill 'my streams/s.toml' --partition in-a/1 --partition in-b/1 "
        "--from 2026-11-16T08:00:00Z --machine unchanged --messages-max 5"
    )


@pytest.mark.parametrize("name", ["zz", "in-a/7"])
def test_a_partition_that_is_not_known_is_refused_before_it_is_announced(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing says that its files are checked."""
    made = create_sliced_stream()
    context = made.open()
    with pytest.raises(ConfigError):
        run_repair(
            context,  # type: ignore[arg-type]  # it is refused before Spark is needed
            RepairRequest(partition=name),
            apply=False,
            apply_command="",
            approval="",
            messages_max=None,
        )
    assert capsys.readouterr() == ("", "")


def test_a_plan_that_repairs_nothing_announces_no_commit() -> None:
    """What cannot be repaired follows, each with what helps."""
    plan = RepairPlan(
        stream="demo",
        request=RepairRequest(),
        sequence=7,
        approval="t",
        notes=("demo: session a waits for a message that never came",),
    )
    said = PlannedRepair(plan, "seriatim repair demo --apply").render()
    assert said.startswith("demo: as of entry 7, this repair would change nothing\n")
    assert "session a waits for a message that never came" in said
    assert "commit" not in said
    assert "--apply" not in said
