"""Plan, check and publish as tasks; fold is in a room of its own.

Check and publish run whatever became of the tasks before them (`all_done`): what was committed is judged and published
also when a partition halted, and publish has its asset tell of it. A leaf that is green makes a run green, so the leaf
is another one, `done`, which nobody executes: it succeeds if fold, check and publish did, and fails the run otherwise.

Next room: airflow/command.py runs them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from airflow.sdk import Asset
from airflow.sdk.exceptions import AirflowSkipException

from seriatim.airflow import place
from seriatim.airflow.command import Command
from seriatim.airflow.link import RunPage
from seriatim.core.request import is_plain, parse, plan_words


class Plan(Command):
    """Says what fold is about to do, and refuses what the form may not ask."""

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        super().__init__(words=["plan", stream], stream=stream, **kwargs)

    def words_for(self, context: Any) -> list[str]:
        """A plan of the places that the form names; of a backfill its dry run, which says all that it replaces."""
        return plan_words(parse(dict(context["params"])), self.stream)

    def is_asked(self, context: Any) -> bool:
        """Of a run by hand whose form is not left as it is."""
        by_hand = getattr(context["dag_run"], "run_type", "") == "manual"
        return by_hand and not is_plain(dict(context["params"]))


class Check(Command):
    """Judges what was committed and not judged yet."""

    operator_extra_links = (RunPage(),)

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        super().__init__(words=["check", stream], stream=stream, after_run=True, **kwargs)

    def execute(self, context: Any) -> None:
        """Judge, unless nothing is to be changed."""
        skip_rehearsal(self.stream, context)
        super().execute(context)


class Publish(Command):
    """Publishes what is checked, whatever failed before it."""

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        words, outlets = ["publish", stream, "--if-keyed", "--json"], [asset(stream)]
        super().__init__(words=words, stream=stream, after_run=True, outlets=outlets, **kwargs)

    def execute(self, context: Any) -> None:
        """Publish; the asset says what of it is new. Where nothing was ever published, no asset tells of it."""
        skip_rehearsal(self.stream, context)
        printed = self.printed(context)
        if not printed:
            raise AirflowSkipException(f"{self.stream}: nothing is published")
        context["outlet_events"][asset(self.stream)].extra = msgspec.json.decode(printed)


def skip_rehearsal(stream: str, context: Any) -> None:
    """A dry run and a replay leave the ledger and `current` alone, and no asset tells of them."""
    if place.is_rehearsal(context):
        raise AirflowSkipException(
            f"{stream}: a dry run or a replay changes nothing, so nothing is judged or published"
        )


def asset(stream: str) -> Asset:
    """What other DAGs may wait for: the stream's table `current`."""
    return Asset(name=f"{stream}_current", uri=f"x-seriatim://streams/{stream}/current")
