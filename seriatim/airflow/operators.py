"""The tasks `plan`, `check` and `publish` of a stream's DAG, and the task `watch` of all streams. `fold`
is in airflow/fold.py.

`check` and `publish` run even if `fold` failed: what was committed is checked and published also when
a partition halted, and DAGs that wait for the asset are triggered. They do not run if `plan` failed or
was skipped: nothing was folded then. Airflow takes a run as successful if its last task is, so there
is another last task, `done`. It executes nothing, succeeds if fold, check and publish did, and fails
the run otherwise.

`watch` also notices failed runs for which Airflow called no callback: it calls none when a person
marks a run as failed. The run's tasks may have left notes, which wait for the end of their run. A
task has no access to Airflow's database, but it may ask the API server how many runs are in a state.

Next: airflow/command.py runs the commands.
"""

from __future__ import annotations

import time
from typing import Any, NoReturn

import msgspec
from airflow.sdk import Asset, DagRunState
from airflow.sdk.exceptions import AirflowSkipException

from seriatim.airflow import environment
from seriatim.airflow.command import CommandOperator, RunPage
from seriatim.alerts.incidents import NO_CALLBACK, Note, runs_without_an_end
from seriatim.errors import MissingTopicsError, SeriatimError
from seriatim.operations.run_request import is_default_form, parse_run_request, plan_arguments

AFTER_FOLD = "all_done_min_one_success"
"""The rule of a task that has `plan` before it, and another task that may fail: both have ended, and
`plan` succeeded, since without it the other one does not run. If one was skipped, so is the task.
"""


class PlanOperator(CommandOperator):
    """Shows what `fold` is about to do, and refuses a form that asks for the impossible. If no topic of
    the stream is there yet, it is skipped, and so is the run.
    """

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        super().__init__(arguments=["plan", stream], stream=stream, **kwargs)

    def build_arguments(self, context: Any) -> list[str]:
        """A plan of the partitions that the form names. Of a backfill it is the dry run, which
        shows everything that it replaces.
        """
        request = parse_run_request(dict(context["params"]))
        return plan_arguments(request, self.stream)

    def raise_failure(self, context: Any, error: SeriatimError) -> NoReturn:
        """Skip the run while the stream waits for its topics; otherwise fail."""
        if isinstance(error, MissingTopicsError):
            raise AirflowSkipException(error.message)
        super().raise_failure(context, error)

    def is_requested_by_form(self, context: Any) -> bool:
        """Whether the run was started by hand, with a form that is not the default."""
        is_manual = getattr(context["dag_run"], "run_type", "") == "manual"
        return is_manual and not is_default_form(dict(context["params"]))


class CheckOperator(CommandOperator):
    """Checks the entries that were committed and not checked yet."""

    operator_extra_links = (RunPage(),)

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        super().__init__(arguments=["check", stream], stream=stream, requires_ledger=True, **kwargs)

    def execute(self, context: Any) -> None:
        """Check; skipped in a run that changes nothing."""
        skip_read_only_run(self.stream, context)
        super().execute(context)


class PublishOperator(CommandOperator):
    """Publishes what is checked, even if a task before it failed."""

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        super().__init__(
            arguments=["publish", stream, "--if-keyed", "--json"],
            stream=stream,
            requires_ledger=True,
            outlets=[current_asset(stream)],
            **kwargs,
        )

    def execute(self, context: Any) -> None:
        """Publish, and tell the asset's followers what is new; skipped if nothing is published."""
        skip_read_only_run(self.stream, context)
        printed = self.run_command(context)
        # A task that succeeds would trigger the DAGs that wait for its asset.
        if not printed:
            raise AirflowSkipException(f"{self.stream}: nothing is published")
        asset_update = context["outlet_events"][current_asset(self.stream)]
        asset_update.extra = msgspec.json.decode(printed)


def skip_read_only_run(stream: str, context: Any) -> None:
    """Skip the task in a dry run or a replay: they change no table."""
    if environment.is_read_only_run(context):
        raise AirflowSkipException(
            f"{stream}: a dry run or a replay changes nothing, so nothing is judged or published"
        )


def current_asset(stream: str) -> Asset:
    """The stream's table `current` as an asset that other DAGs may wait for."""
    return Asset(name=f"{stream}_current", uri=f"x-seriatim://streams/{stream}/current")


class WatchOperator(CommandOperator):
    """Runs `seriatim watch` for all streams, after it has noted runs that failed without a callback."""

    def execute(self, context: Any) -> None:
        """Note the failed runs, then run the command.

        An error in the first step is logged and does not prevent the second.
        """
        for stream in environment.stream_names(self.folder):
            try:
                self._note_failed_runs(stream, context)
            except Exception as error:  # noqa: BLE001  # Airflow's client raises many kinds; the next watch asks again
                self.log.warning(
                    "%s: whether its runs are over cannot be learned: %s", stream, error
                )
        super().execute(context)

    def _has_failed(self, stream: str, dag: str, run: str, context: Any) -> bool:
        """Whether Airflow says that a run failed. If it cannot be asked, the next watch asks."""
        failed_state = DagRunState.FAILED.value
        try:
            count = context["ti"].get_dr_count(dag_id=dag, run_ids=[run], states=[failed_state])
        except Exception as error:  # noqa: BLE001  # of one run; the others are still asked about
            self.log.warning("%s: whether run %s is over cannot be learned: %s", stream, run, error)
            return False
        return bool(count)

    def _note_failed_runs(self, stream: str, context: Any) -> None:
        notes = environment.open_outbox(self.folder, stream).notes()
        for dag, run in runs_without_an_end(notes.values()):
            if self._has_failed(stream, dag, run, context):
                note = Note(
                    kind="failed",
                    at_seconds=time.time(),
                    dag=dag,
                    run=run,
                    text=f"the run failed, and {NO_CALLBACK}",
                    inferred=True,
                )
                environment.add_note(self.folder, stream, note, self.log)
