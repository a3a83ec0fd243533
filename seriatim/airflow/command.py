"""Command: an Airflow task that runs one `seriatim` command. Task id = command = verb.

The command runs in a process of its own, as a list of words: nothing goes through a shell or a
template. What it says is in the task's log line by line; the outcome it leaves in a file becomes a
typed error, and a note for the alert.

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
from seriatim.airflow import environment
from seriatim.airflow.outcome import build_error, outcome_file, read_outcome
from seriatim.errors import (
    BrokenPromiseError,
    ConfigError,
    IntegrityError,
    PlatformError,
    SeriatimError,
)
from seriatim.failure import CommandOutcome

START_DATE = datetime(2026, 1, 1)  # noqa: DTZ001  # Airflow takes it as UTC
TERMINATE_GRACE_SECONDS = 5.0
PR_SET_PDEATHSIG = 1
NO_RETRY_REASON = "nothing that a retry could mend: a person decides"


def retry_policy() -> ExceptionRetryPolicy:
    """Trouble of the platform is tried again; hurt data, wrong files and our own bugs are not."""
    kinds = [IntegrityError, ConfigError, BrokenPromiseError]
    return ExceptionRetryPolicy(
        rules=[
            RetryRule(exception=list(kinds), action=RetryAction.FAIL, reason=NO_RETRY_REASON),
            RetryRule(exception=PlatformError, action=RetryAction.RETRY, reason="platform trouble"),
        ]
    )


def common_task_arguments(folder: Path) -> dict[str, Any]:
    """What all our tasks have in common."""
    return {
        "folder": str(folder),
        "owner": "seriatim",
        "retries": 2,
        "retry_delay": timedelta(minutes=1),
        "retry_policy": retry_policy(),
    }


def schedule_arguments(cron: str) -> dict[str, Any]:
    """What our DAGs that run by themselves have in common; without a cron line they wait for a
    person.
    """
    return {
        "schedule": CronDataIntervalTimetable(cron, timezone="UTC") if cron else None,
        "start_date": START_DATE,
        "catchup": False,
        "max_active_runs": 1,
    }


class CommandOperator(BaseOperator):
    """Runs `seriatim VERB STREAM …` and says what it says."""

    def __init__(
        self,
        *,
        arguments: Sequence[str],
        folder: str,
        stream: str = "",
        accepted_exit_codes: Sequence[int] = (0,),
        requires_ledger: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.requires_ledger = requires_ledger
        self.arguments, self.folder, self.stream, self.accepted_exit_codes = (
            list(arguments),
            folder,
            stream,
            tuple(accepted_exit_codes),
        )
        self._process: subprocess.Popen[str] | None = None

    def build_arguments(self, context: Any) -> list[str]:  # noqa: ARG002  # subclasses read the form
        """The command, word by word."""
        return self.arguments

    def execute(self, context: Any) -> Any:
        """Run it. What it printed is in the log, and in no XCom."""
        self.run_command(context)

    def run_command(self, context: Any) -> str:
        """Run it; what it printed. Nothing, where it needs a first run that never was."""
        words = self._build_arguments_or_report(context)
        if self.requires_ledger and not environment.has_ledger(self.folder, self.stream):
            self.log.info("%s: it was never run, so there is nothing to do yet", self.stream)
            return ""
        self.log.info("seriatim %s", " ".join(words))
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            code, outcome = self._run_process(words, output)
            output.seek(0)
            printed = output.read()
        for line in printed.splitlines():
            self.log.info("%s", line)
        if not self.is_success(code, printed):
            error = build_error(f"seriatim {words[0]}", code, outcome)
            self._add_note(context, error)
            raise error
        return printed

    def _build_arguments_or_report(self, context: Any) -> list[str]:
        """What the form asks, or why it may not, as any other error is told."""
        try:
            return self.build_arguments(context)
        except ConfigError as error:
            raise self.report_error(context, error) from None

    def is_success(self, code: int, stdout: str) -> bool:  # noqa: ARG002  # subclasses look at it
        """Whether it ended as it should."""
        return code in self.accepted_exit_codes

    def report_error(self, context: Any, error: SeriatimError) -> SeriatimError:
        """An error that no command said, in the log and on the desk like any other."""
        for line in error.render().splitlines():
            self.log.info("%s", line)
        self._add_note(context, error)
        return error

    def _run_process(
        self, arguments: list[str], output: IO[str]
    ) -> tuple[int, CommandOutcome | None]:
        """The process to its end: what it prints goes to `output`, what it says to the log as it
        comes.
        """
        with outcome_file() as path:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "seriatim", *arguments],
                cwd=self.folder,
                env={**environment.command_environment(self.folder), config.OUTCOME: str(path)},
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

    def is_requested_by_form(self, context: Any) -> bool:  # noqa: ARG002  # subclasses read the form
        """Whether a person's form asks for something of its own: what is wrong with that is no
        incident.
        """
        return False

    def _add_note(self, context: Any, error: SeriatimError) -> None:
        """A note for the alert, where there is a stream that it concerns."""
        if self.stream:
            note = environment.task_note(context, self.task_id, error)
            asked = isinstance(error, ConfigError) and self.is_requested_by_form(context)
            environment.add_note(
                self.folder, self.stream, replace(note, is_form_error=asked), self.log
            )

    def on_kill(self) -> None:
        """End the process and all that it started."""
        if self._process is not None:
            terminate_process_tree(self._process.pid)


def die_with_parent() -> None:
    """In a new process: end when the task that started it is killed, also by a signal that nobody
    can catch.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def terminate_process_tree(pid: int) -> None:
    """Ask a process and its children to end; kill those that do not. Whoever started it waits for
    it, not we.
    """
    try:
        whole = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in whole:
        _send_signal(process, signal.SIGTERM)
    until = time.monotonic() + TERMINATE_GRACE_SECONDS
    while any(map(_is_running, whole)) and time.monotonic() < until:
        time.sleep(0.1)
    for process in filter(_is_running, whole):
        _send_signal(process, signal.SIGKILL)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send_signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
