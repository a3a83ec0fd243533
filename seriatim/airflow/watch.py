"""The task `watch`: it also notices failed runs for which Airflow called no callback.

Airflow calls no callback when a person marks a run as failed. The run's tasks may have left notes,
which wait for the end of their run. A task has no access to Airflow's database, but it may ask the
API server how many runs are in a state.

Next: cli/watch.py is the command that it runs; airflow/failure_callback.py is the callback.
"""

from __future__ import annotations

import time
from typing import Any

from airflow.sdk import DagRunState

from seriatim.airflow import environment
from seriatim.airflow.command import CommandOperator
from seriatim.alerts.incidents import Note, runs_without_an_end
from seriatim.alerts.mail import NO_CALLBACK


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
