"""The alert callback of a DAG: a run that failed reaches a person, however it died.

Only a DAG's own callback is called in all the ways a run can die; a task's is not. It leaves a note on the stream's
desk first, on disk, and then has `seriatim watch` tell it: with the findings, the time left, what the task said. If
that does not come to an end in time, or the mail server is down, the next watch tells it.

Next room: core/alert.py decides what is news; cli/watch.py sends it.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from seriatim.airflow import place
from seriatim.core.alert import RUN, Note
from seriatim.core.errors import SeriatimError

WAIT_SECONDS = 25.0
"""Airflow ends a callback after 50 seconds; a watch that takes longer goes on without us."""
log = logging.getLogger(__name__)


class Alert:
    """Called with Airflow's context when a run of `stream` has failed, or has gone well."""

    def __init__(self, stream: str, folder: str, *, good: bool = False) -> None:
        self.stream, self.folder, self.good = stream, folder, good

    def __call__(self, context: Mapping[str, Any]) -> None:
        """Leave a note, then have it told."""
        outbox = place.outbox(self.folder, self.stream)
        if self.good and not (RUN in outbox.desk().open or outbox.notes()):
            return
        reason = "" if self.good else f"the run failed: {context.get('reason') or 'no reason given'}"
        note = Note(
            kind="good" if self.good else "failed",
            at_seconds=time.time(),
            run=context.get("run_id") or "",
            text=reason,
            links=place.links(context),
        )
        outbox.leave(note)
        self._tell()

    def _tell(self) -> None:
        command = [sys.executable, "-m", "seriatim", "watch", self.stream, "--once"]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, said = process.communicate(timeout=WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("%s: watch takes longer than %s s and goes on", self.stream, WAIT_SECONDS)
            return
        for line in said.splitlines():
            log.info("%s", line)

    def _environment(self) -> dict[str, str]:
        try:
            return place.environment(self.folder)
        except SeriatimError as error:
            log.error("%s", error.render())
            raise
