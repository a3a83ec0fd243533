"""Command: an Airflow task that runs one `seriatim` command. Task id = command = verb.

The command runs in a process of its own, as a list of words: nothing goes through a shell or a template. What it says
is in the task's log line by line; the outcome it leaves in a file becomes a typed error, and a note for the alert.

Next room: airflow/fold.py does the same through spark-submit; airflow/outcome.py has the errors.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any

import psutil
from airflow.sdk import BaseOperator, CronDataIntervalTimetable
from airflow.sdk.definitions.retry_policy import ExceptionRetryPolicy, RetryAction, RetryRule
from msgspec.structs import replace

from seriatim import config
from seriatim.airflow import place
from seriatim.airflow.outcome import error_of, outcome_file, read_outcome
from seriatim.core.errors import BrokenPromiseError, ConfigError, IntegrityError, PlatformError, SeriatimError
from seriatim.core.failure import CommandOutcome

BEGINNING = datetime(2026, 1, 1)  # noqa: DTZ001  # Airflow takes it as UTC
GRACE_SECONDS = 5.0
PR_SET_PDEATHSIG = 1
FINDINGS = "nothing that a retry could mend: a person decides"


def retry_policy() -> ExceptionRetryPolicy:
    """Trouble of the platform is tried again; hurt data, wrong files and our own bugs are not."""
    kinds = [IntegrityError, ConfigError, BrokenPromiseError]
    return ExceptionRetryPolicy(
        rules=[
            RetryRule(exception=list(kinds), action=RetryAction.FAIL, reason=FINDINGS),
            RetryRule(exception=PlatformError, action=RetryAction.RETRY, reason="platform trouble"),
        ]
    )


def common(folder: Path) -> dict[str, Any]:
    """What all our tasks have in common."""
    return {
        "folder": str(folder),
        "owner": "seriatim",
        "retries": 2,
        "retry_delay": timedelta(minutes=1),
        "retry_policy": retry_policy(),
    }


def every(cron: str) -> dict[str, Any]:
    """What our DAGs that run by themselves have in common; without a cron line they wait for a person."""
    return {
        "schedule": CronDataIntervalTimetable(cron, timezone="UTC") if cron else None,
        "start_date": BEGINNING,
        "catchup": False,
        "max_active_runs": 1,
    }


class Command(BaseOperator):
    """Runs `seriatim VERB STREAM …` and says what it says."""

    def __init__(
        self,
        *,
        words: Sequence[str],
        folder: str,
        stream: str = "",
        fine: Sequence[int] = (0,),
        after_run: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.after_run = after_run
        self.words, self.folder, self.stream, self.fine = list(words), folder, stream, tuple(fine)
        self._process: subprocess.Popen[str] | None = None

    def words_for(self, context: Any) -> list[str]:  # noqa: ARG002  # subclasses read the form
        """The command, word by word."""
        return self.words

    def execute(self, context: Any) -> Any:
        """Run it. What it printed is in the log, and in no XCom."""
        self.printed(context)

    def printed(self, context: Any) -> str:
        """Run it; what it printed. Nothing, where it needs a first run that never was."""
        words = self._words(context)
        if self.after_run and not place.has_ledger(self.folder, self.stream):
            self.log.info("%s: it was never run, so there is nothing to do yet", self.stream)
            return ""
        self.log.info("seriatim %s", " ".join(words))
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            code, outcome = self._run(words, output)
            output.seek(0)
            printed = output.read()
        for line in printed.splitlines():
            self.log.info("%s", line)
        if not self.is_fine(code, printed):
            error = error_of(f"seriatim {words[0]}", code, outcome)
            self._leave(context, error)
            raise error
        return printed

    def _words(self, context: Any) -> list[str]:
        """What the form asks, or why it may not, as any other error is told."""
        try:
            return self.words_for(context)
        except ConfigError as error:
            raise self.told(context, error) from None

    def is_fine(self, code: int, printed: str) -> bool:  # noqa: ARG002  # subclasses look at it
        """Whether it ended as it should."""
        return code in self.fine

    def told(self, context: Any, error: SeriatimError) -> SeriatimError:
        """An error that no command said, in the log and on the desk like any other."""
        for line in error.render().splitlines():
            self.log.info("%s", line)
        self._leave(context, error)
        return error

    def _run(self, words: list[str], output: IO[str]) -> tuple[int, CommandOutcome | None]:
        """The process to its end: what it prints goes to `output`, what it says to the log as it comes."""
        with outcome_file() as path:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "seriatim", *words],
                cwd=self.folder,
                env={**place.environment(self.folder), config.OUTCOME: str(path)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                preexec_fn=die_with_parent,  # noqa: PLW1509  # a task has one thread
            )
            for line in self._process.stderr or ():
                self.log.info("%s", line.rstrip("\n"))
            return self._process.wait(), read_outcome(path)

    def is_asked(self, context: Any) -> bool:  # noqa: ARG002  # subclasses read the form
        """Whether a person's form asks for something of its own: what is wrong with that is no incident."""
        return False

    def _leave(self, context: Any, error: SeriatimError) -> None:
        """A note for the alert, where there is a stream that it concerns."""
        if self.stream:
            note = place.note_of_task(context, self.task_id, error)
            asked = isinstance(error, ConfigError) and self.is_asked(context)
            place.leave(self.folder, self.stream, replace(note, asked=asked), self.log)

    def on_kill(self) -> None:
        """End the process and all that it started."""
        if self._process is not None:
            end_all(self._process.pid)


def die_with_parent() -> None:
    """In a new process: end when the task that started it is killed, also by a signal that nobody can catch."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def end_all(pid: int) -> None:
    """Ask a process and its children to end; kill those that do not. Whoever started it waits for it, not we."""
    try:
        whole = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in whole:
        _tell(process, signal.SIGTERM)
    until = time.monotonic() + GRACE_SECONDS
    while any(map(_lives, whole)) and time.monotonic() < until:
        time.sleep(0.1)
    for process in filter(_lives, whole):
        _tell(process, signal.SIGKILL)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _tell(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
