"""Plans of repairs as people see them, and the order in which they are applied: repairs that died come first."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

import seriatim.cli.repair  # noqa: F401  # its commands
from seriatim.cli import app
from seriatim.cli.mend import mend
from seriatim.core.errors import ConfigError, IntegrityError
from seriatim.core.repair import Request
from seriatim.steps.repair import Repairing, plan
from seriatim.testing import MemoryStream
from tests.steps.adders import Adder, Buggy, add, adding, deploy, fixed, states
from tests.steps.mending import lose, mending, repair, table
from tests.steps.worlds import A0, A1, kinds

FROM_0 = Request(partition=str(A0), start=0)


class NoSpark:
    """Spark, where there is none."""

    stopped = 0

    def stop(self) -> None:
        """Count it."""
        self.stopped += 1

    def kill(self) -> None:
        """Nothing is there."""


def command(made: MemoryStream, *, apply: bool = False, json: bool = False, approval: str = "", **asked: Any) -> None:
    """`seriatim repair`, of a world in memory."""
    spark: Any = NoSpark()
    file: Any = SimpleNamespace(stream=made.stream)
    try:
        given = {"apply": apply, "approval": approval, "messages_max": None, "json": json}
        mend(file, mending(made), spark, Request(**asked), **given)
    finally:
        assert spark.stopped == 1


def killed() -> MemoryStream:
    """A fixed machine was to fold all of in-a/0 again, and the repair died right after its hold."""
    made = adding(Buggy)
    made.kafka.create("in-a", 2)
    for partition in (A0, A1):
        add(made, 60, 3, partition)
    made.run(14)
    deploy(made, Adder)
    tools = mending(made)
    Repairing(tools).refolding.hold(made.ledger.head("s"), plan(tools, FROM_0).partitions, FROM_0.encoded())
    return made


def test_a_plan_names_every_hold_and_what_to_do_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Its id, what it was asked, and the commands that go on with it or give it up."""
    made = killed()
    hold = made.accounts()[A0].hold
    command(made)
    shown = capsys.readouterr().out
    assert f"held by repair {hold}" in shown
    for text in ("repair s --partition in-a/0 --from 0", f"--resume {hold}", f"--abandon {hold}", "goes on with it"):
        assert text in shown
    assert "folds again [0, " in shown
    command(made, json=True)
    values = json.loads(capsys.readouterr().out)
    assert (values["resumes"], [one["id"] for one in values["holds"]]) == (hold, [hold])
    assert values["parts"][0]["from"] == 0


def test_a_plain_repair_goes_on_with_what_died_and_then_with_what_is_hurt() -> None:
    """Each by its own commit; the range of the one that died is its own."""
    made = killed()
    lose(made, made.accounts()[A0].state[-1].path)
    lose(made, made.accounts()[A1].state[-1].path)
    command(made, apply=True)
    assert (table(made, A0), states(made)) == fixed(made)
    assert [kind for kind in kinds(made) if kind in ("hold", "repair")][-4:] == ["hold", "repair", "hold", "repair"]
    assert [account.hold for account in made.accounts().values()] == [None, None]
    assert not made.files.damaged(made.accounts()[A1].state)


def test_an_approval_is_of_one_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """What is hurt besides waits for an approval of its own."""
    made = killed()
    lose(made, made.accounts()[A1].state[-1].path)
    command(made, apply=True, approval=plan(mending(made), Request()).approval)
    assert made.accounts()[A0].hold is None
    assert made.files.damaged(made.accounts()[A1].state)
    assert "what else is hurt: seriatim repair s" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [{"start": 30, "partition": "in-a/0"}, {"ranges": {"in-a/0": (3, 9)}}])
def test_another_request_replaces_no_repair_that_died(asked: dict[str, Any]) -> None:
    """It is refused, with the way to go on with the other one or to give it up."""
    made = killed()
    before = kinds(made)
    with pytest.raises(ConfigError, match="held by repair") as refused:
        repair(made, **asked)
    hold = made.accounts()[A0].hold
    assert f"--abandon {hold}" in refused.value.next
    assert f"--resume {hold}" in refused.value.next
    assert kinds(made) == before


def test_a_repair_that_died_and_cannot_be_done_any_more_says_how_to_give_it_up() -> None:
    """Kafka dropped what it needs meanwhile."""
    made = killed()
    made.kafka.delete_records(A0, 20)
    with pytest.raises(IntegrityError, match="gone") as refused:
        plan(mending(made), Request())
    assert f"--abandon {made.accounts()[A0].hold}" in refused.value.next


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--from", "5"], "--from: an offset is of one partition"),
        (["--partitions", "in-a/0", "--from", "9", "--until", "4"], "--until: 4 is not after from"),
        (["--partitions", "in-a/0", "--machine", "old"], "--machine: found 'old'"),
    ],
)
def test_a_backfill_says_what_is_wrong_in_the_words_of_the_command(words: list[str], says: str) -> None:
    """Not in those of a form that nobody filled in."""
    with pytest.raises(ConfigError, match=says) as refused:
        app(["backfill", "demo", *words], standalone_mode=False)
    assert "trigger" not in refused.value.render()
