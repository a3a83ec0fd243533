"""What a repair says of findings that it met again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from seriatim.cli.repair_screen import _print_plan, describe_remaining_finding
from seriatim.engine.findings import Finding
from seriatim.operations.repair.plan import RepairPlan, RepairRequest


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


def test_a_plan_says_of_a_damaged_file_that_nothing_needs_what_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is not deleted yet, there is no commit to come, and nothing has to be done about it."""
    path = "records/a/0/old.parquet"
    _print_plan(
        RepairPlan(
            stream="demo", request=RepairRequest(), sequence=7, approval="t", deleted_files=(path,)
        ),
        "seriatim repair demo --apply",
        json=False,
    )
    said = capsys.readouterr().out
    assert said.splitlines() == [
        f"demo: {path} is damaged, and nothing needs it any more: newer files took its place",
        "  only a look at the past would read it (trace, replay); runs and readers go on, nothing has to be done",
        "  with --apply it is deleted, and verify does not report it again",
        "demo: nothing else is damaged, as of entry 7",
        "",
        "nothing was changed. To delete it: seriatim repair demo --apply",
    ]
