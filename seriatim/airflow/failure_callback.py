"""The alert callback of a DAG: a run that failed reaches a person, however it died.

Only a DAG's own callback is called in all the ways a run can die; a task's is not. It leaves a note
on the stream's desk first, on disk, and then has `seriatim watch` tell it: with the findings, the
time left, what the task said. If that does not come to an end in time, or the mail server is down,
the next watch tells it.

Next room: alerts/incidents.py decides what is news; cli/watch.py sends it.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from seriatim.airflow import environment
from seriatim.alerts.incidents import RUN, Note

WAIT_SECONDS = 25.0
"""Airflow ends a callback after 50 seconds; a watch that takes longer goes on without us."""
log = logging.getLogger(__name__)


class FailureCallback:
    """Called with Airflow's context when a run has failed, or has gone well.

    Of a DAG over many streams those are told whose task left a word, else the one whose task was
    the last; of a DAG that names none, the one that its form named. Where Airflow says neither, all
    are: somebody must be told.
    """

    def __init__(self, streams: Sequence[str], folder: str, *, run_succeeded: bool = False) -> None:
        self.streams, self.folder, self.run_succeeded = tuple(streams), folder, run_succeeded

    def __call__(self, context: Mapping[str, Any]) -> None:
        """Leave a note, then have it told. A rehearsal that went well says nothing of runs."""
        if self.run_succeeded and environment.is_read_only_run(context):
            return
        note = Note(
            kind="good" if self.run_succeeded else "failed",
            at_seconds=time.time(),
            dag=context["dag"].dag_id,
            run=context.get("run_id") or "",
            text=""
            if self.run_succeeded
            else f"the run failed: {context.get('reason') or 'no reason given'}",
            links=environment.run_links(context),
        )
        concerned = [
            stream
            for stream in self._affected_streams(context)
            if not self.run_succeeded or self._ends_incident(stream)
        ]
        for stream in concerned:
            environment.add_note(self.folder, stream, note, log)
        for stream in concerned:
            self._run_watch(stream)

    def _ends_incident(self, stream: str) -> bool:
        """Whether a run that went well ends anything."""
        outbox = environment.open_outbox(self.folder, stream)
        return RUN in outbox.alert_state().open_incidents or bool(outbox.notes())

    def _affected_streams(self, context: Mapping[str, Any]) -> list[str]:
        if len(self.streams) == 1:
            return list(self.streams)
        last = getattr(context.get("ti"), "task_id", "")
        if not self.streams and (asked := (context.get("params") or {}).get("stream")):
            return [str(asked)]
        names = self.streams or environment.stream_names(self.folder)
        said = [name for name in names if self._has_task_note(name, context.get("run_id"))]
        return said or [name for name in names if name == last] or list(names)

    def _has_task_note(self, stream: str, run_id: str | None) -> bool:
        """Whether a task of this run left a word; a desk that cannot be read may have one."""
        try:
            notes = environment.open_outbox(self.folder, stream).notes().values()
        except OSError as error:
            log.warning("%s: its notes cannot be read: %s", stream, error)
            return True
        return any(note.kind == "task" and note.run == run_id for note in notes)

    def _run_watch(self, stream: str) -> None:
        command = [sys.executable, "-m", "seriatim", "watch", stream, "--once"]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment.command_environment(self.folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, said = process.communicate(timeout=WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("%s: watch takes longer than %s s and goes on", stream, WAIT_SECONDS)
            return
        for line in said.splitlines():
            log.info("%s", line)
