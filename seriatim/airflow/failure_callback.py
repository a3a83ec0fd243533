"""The callback of a DAG: a person hears of a run that failed, in whatever way it failed.

It is the DAG's callback and not a task's, since only that one is called in all the ways in which a
run can fail.

1. Leave a note in the stream's outbox, on disk.
2. Run `seriatim watch`, which mails it with the findings, the time left, and the task's error.

If the watch takes too long, or the mail server is down, the next watch mails it.

Next: alerts/incidents.py decides what is new; cli/watch.py sends the mail.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from seriatim.airflow import environment
from seriatim.alerts.incidents import RUN, Note
from seriatim.errors import SeriatimError

WAIT_SECONDS = 25.0
"""Airflow ends a callback after 50 seconds. A watch that takes longer goes on by itself."""
log = logging.getLogger(__name__)


class FailureCallback:
    """Called with Airflow's context when a run has failed, or has succeeded.

    The streams that are concerned, of a DAG with several streams: those whose task left a note, or
    else the one whose task was the last. Of a DAG that names no stream: the one that its form
    named. If none of that is known, all streams are: somebody must hear of it.
    """

    def __init__(self, streams: Sequence[str], folder: str, *, run_succeeded: bool = False) -> None:
        self.streams = tuple(streams)
        self.folder = folder
        self.run_succeeded = run_succeeded

    def __call__(self, context: Mapping[str, Any]) -> None:
        """Leave a note for each stream that is concerned, then run the watch for each."""
        # A dry run or a replay that succeeded does not show that runs work again.
        if self.run_succeeded and environment.is_read_only_run(context):
            return
        note = self._build_note(context)
        streams = self._affected_streams(context)
        if self.run_succeeded:
            streams = [stream for stream in streams if self._ends_incident(stream)]
        # 1. All notes first: a watch may take all the time that a callback has.
        for stream in streams:
            environment.add_note(self.folder, stream, note, log)
        # 2. The watches.
        for stream in streams:
            self._run_watch(stream)

    def _build_note(self, context: Mapping[str, Any]) -> Note:
        note = Note(
            kind="good",
            at_seconds=time.time(),
            dag=context["dag"].dag_id,
            run=context.get("run_id") or "",
            links=environment.run_links(context),
        )
        if self.run_succeeded:
            return note
        reason = context.get("reason") or "no reason given"
        return replace(note, kind="failed", text=f"the run failed: {reason}")

    def _ends_incident(self, stream: str) -> bool:
        """Whether a run that succeeded ends an incident, or may: notes are not read yet."""
        outbox = environment.open_outbox(self.folder, stream)
        return RUN in outbox.alert_state().open_incidents or bool(outbox.notes())

    def _affected_streams(self, context: Mapping[str, Any]) -> list[str]:
        if len(self.streams) == 1:
            return list(self.streams)
        form = context.get("params") or {}
        if not self.streams and form.get("stream"):
            return [str(form["stream"])]
        names = self.streams or environment.stream_names(self.folder)
        run_id = context.get("run_id")
        streams_with_notes = [name for name in names if self._has_task_note(name, run_id)]
        if streams_with_notes:
            return streams_with_notes
        # Where a DAG has one task for each stream, the task's id is the stream's name.
        last_task = getattr(context.get("ti"), "task_id", "")
        if last_task in names:
            return [last_task]
        return list(names)

    def _has_task_note(self, stream: str, run_id: str | None) -> bool:
        """Whether a task of this run left a note. An outbox that cannot be read may have one."""
        try:
            notes = environment.open_outbox(self.folder, stream).notes().values()
        except (OSError, SeriatimError) as error:
            log.warning("%s: its notes cannot be read: %s", stream, error)
            return True
        return any(note.kind == "task" and note.run == run_id for note in notes)

    def _run_watch(self, stream: str) -> None:
        """Run one watch, and wait for it for at most WAIT_SECONDS."""
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
            # In a session of its own, so that it outlives the callback.
            start_new_session=True,
        )
        try:
            _, error_output = process.communicate(timeout=WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("%s: watch takes longer than %s s and goes on", stream, WAIT_SECONDS)
            return
        for line in error_output.splitlines():
            log.info("%s", line)
