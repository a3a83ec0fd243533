"""Watch as a task: it also notices runs that failed and of which Airflow told nobody.

Airflow calls no callback when a person marks a run failed. Its tasks may have left notes, which
wait for the end of their run. A task has no access to Airflow's database, but it may ask the API
server how many runs are in a state.

Next room: cli/watch.py is what it runs; airflow/failure_callback.py is the callback.
"""

from __future__ import annotations

import time
from typing import Any

from airflow.sdk import DagRunState

from seriatim.airflow import environment
from seriatim.airflow.command import CommandOperator
from seriatim.alerts.incidents import Note, runs_without_an_end
from seriatim.alerts.mail import NO_CALLBACK


class Watch(CommandOperator):
    """Looks at all streams, after it has noted which runs failed in silence."""

    def execute(self, context: Any) -> None:
        """Note what ended, then look and tell. A note that cannot be made keeps no stream from
        being looked at.
        """
        for stream in environment.stream_names(self.folder):
            try:
                self._note_failed_runs(stream, context)
            except Exception as error:  # noqa: BLE001  # Airflow's client raises many kinds; the next watch asks again
                self.log.warning(
                    "%s: whether its runs are over cannot be learned: %s", stream, error
                )
        super().execute(context)

    def _note_failed_runs(self, stream: str, context: Any) -> None:
        notes = environment.open_outbox(self.folder, stream).notes()
        for dag, run in runs_without_an_end(notes.values()):
            try:
                failed = context["ti"].get_dr_count(
                    dag_id=dag, run_ids=[run], states=[DagRunState.FAILED.value]
                )
            except Exception as error:  # noqa: BLE001  # of one run; the others are asked about
                self.log.warning(
                    "%s: whether run %s is over cannot be learned: %s", stream, run, error
                )
                continue
            if failed:
                text = f"the run failed, and {NO_CALLBACK}"
                note = Note(
                    kind="failed",
                    at_seconds=time.time(),
                    dag=dag,
                    run=run,
                    text=text,
                    inferred=True,
                )
                environment.add_note(self.folder, stream, note, self.log)
