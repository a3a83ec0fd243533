"""Plan, check and publish as tasks; fold is in a room of its own.

Check and publish run whatever became of the tasks before them (`all_done`): what was committed is
judged and published also when a partition halted, and publish has its asset tell of it. A leaf that
is green makes a run green, so the leaf is another one, `done`, which nobody executes: it succeeds
if fold, check and publish did, and fails the run otherwise.

Next room: airflow/command.py runs them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from airflow.sdk import Asset
from airflow.sdk.exceptions import AirflowSkipException

from seriatim.airflow import environment
from seriatim.airflow.command import CommandOperator
from seriatim.airflow.link import RunPage
from seriatim.airflow.run_request import is_default_form, parse_run_request, plan_arguments


class PlanOperator(CommandOperator):
    """Says what fold is about to do, and refuses what the form may not ask."""

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        super().__init__(arguments=["plan", stream], stream=stream, **kwargs)

    def build_arguments(self, context: Any) -> list[str]:
        """A plan of the places that the form names; of a backfill its dry run, which says all that
        it replaces.
        """
        return plan_arguments(parse_run_request(dict(context["params"])), self.stream)

    def is_requested_by_form(self, context: Any) -> bool:
        """Of a run by hand whose form is not left as it is."""
        by_hand = getattr(context["dag_run"], "run_type", "") == "manual"
        return by_hand and not is_default_form(dict(context["params"]))


class CheckOperator(CommandOperator):
    """Judges what was committed and not judged yet."""

    operator_extra_links = (RunPage(),)

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        super().__init__(arguments=["check", stream], stream=stream, requires_ledger=True, **kwargs)

    def execute(self, context: Any) -> None:
        """Judge, unless nothing is to be changed."""
        skip_read_only_run(self.stream, context)
        super().execute(context)


class PublishOperator(CommandOperator):
    """Publishes what is checked, whatever failed before it."""

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        words, outlets = ["publish", stream, "--if-keyed", "--json"], [current_asset(stream)]
        super().__init__(
            arguments=words, stream=stream, requires_ledger=True, outlets=outlets, **kwargs
        )

    def execute(self, context: Any) -> None:
        """Publish; the asset says what of it is new. Where nothing was ever published, no asset
        tells of it.
        """
        skip_read_only_run(self.stream, context)
        printed = self.run_command(context)
        if not printed:
            raise AirflowSkipException(f"{self.stream}: nothing is published")
        context["outlet_events"][current_asset(self.stream)].extra = msgspec.json.decode(printed)


def skip_read_only_run(stream: str, context: Any) -> None:
    """A dry run and a replay leave the ledger and `current` alone, and no asset tells of them."""
    if environment.is_read_only_run(context):
        raise AirflowSkipException(
            f"{stream}: a dry run or a replay changes nothing, so nothing is judged or published"
        )


def current_asset(stream: str) -> Asset:
    """What other DAGs may wait for: the stream's table `current`."""
    return Asset(name=f"{stream}_current", uri=f"x-seriatim://streams/{stream}/current")
