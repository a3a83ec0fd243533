"""An Airflow task that runs one `seriatim` command. The task id is the command's verb.

The command runs in a process of its own and gets a list of arguments: nothing goes through a shell
or a template. What it prints is in the task's log, line by line.
The outcome that it writes to a file becomes a typed error and a note for the alert.

Next: airflow/fold.py does the same through spark-submit; airflow/outcome.py makes the errors.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil
from airflow.sdk import BaseOperator, BaseOperatorLink, CronTriggerTimetable
from airflow.sdk.definitions.retry_policy import ExceptionRetryPolicy, RetryAction, RetryRule
from msgspec.structs import replace

from seriatim import config
from seriatim.airflow import environment
from seriatim.airflow.outcome import build_error, outcome_file, read_outcome
from seriatim.embedded.server_process import signal_when_parent_ends
from seriatim.engine.failure import CommandOutcome
from seriatim.errors import (
    BrokenPromiseError,
    ConfigError,
    IntegrityError,
    PlatformError,
    SeriatimError,
)
from seriatim.web import address

START_DATE = datetime(2026, 1, 1)  # noqa: DTZ001  # Airflow takes it as UTC
TERMINATE_GRACE_SECONDS = 5.0
"""How long processes may take to end before they are killed."""
NO_RETRY_REASON = "a retry cannot help: a person has to decide"


def retry_policy() -> ExceptionRetryPolicy:
    """Errors of the platform are retried; damaged data, wrong files and our own bugs are not."""
    final_errors: list[Any] = [IntegrityError, ConfigError, BrokenPromiseError]
    fail = RetryRule(exception=final_errors, action=RetryAction.FAIL, reason=NO_RETRY_REASON)
    retry = RetryRule(exception=PlatformError, action=RetryAction.RETRY, reason="platform trouble")
    return ExceptionRetryPolicy(rules=[fail, retry])


def common_task_arguments(folder: Path) -> dict[str, Any]:
    """The operator arguments that all our tasks share."""
    return {
        "folder": str(folder),
        "owner": "seriatim",
        "retries": 2,
        "retry_delay": timedelta(minutes=1),
        "retry_policy": retry_policy(),
    }


def schedule_arguments(cron: str, timezone: str = "UTC") -> dict[str, Any]:
    """The DAG arguments that our scheduled DAGs share. Without `cron` a DAG is started by hand.

    The timetable is the one without data intervals. The one with them can lose the run that falls into
    the hour that the clock skips: it takes the hour after as the begin of the next interval.
    """
    timetable = None
    if cron:
        timetable = CronTriggerTimetable(cron, timezone=timezone)
    return {
        "schedule": timetable,
        "start_date": START_DATE,
        "catchup": False,
        "max_active_runs": 1,
    }


class RunPage(BaseOperatorLink):
    """The link to the page of the task's run."""

    name = "Seriatim: what this run did"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002  # Airflow's signature
        """The address of the run's page."""
        return address.run_url(environment.airflow_base_url(), ti_key.dag_id, ti_key.run_id)


class CommandOperator(BaseOperator):
    """Runs `seriatim VERB STREAM …`, and logs what it prints."""

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
        self.arguments = list(arguments)
        self.folder = folder
        self.stream = stream
        self.accepted_exit_codes = tuple(accepted_exit_codes)
        self._process: subprocess.Popen[str] | None = None

    def build_arguments(self, context: Any) -> list[str]:  # noqa: ARG002  # subclasses read the form
        """The arguments of the command."""
        return self.arguments

    def execute(self, context: Any) -> Any:
        """Run the command. What it printed is in the log; nothing is passed on as an XCom."""
        self.run_command(context)

    def run_command(self, context: Any) -> str:
        """Run the command, and return what it printed.

        If it needs a ledger and the stream was never run, nothing is run and "" comes back.
        """
        arguments = self._build_arguments_or_report(context)
        if self.requires_ledger and not environment.has_ledger(self.folder, self.stream):
            self.log.info("%s: it was never run, so there is nothing to do yet", self.stream)
            return ""
        self.log.info("seriatim %s", " ".join(arguments))
        # A file and not a second pipe: while one pipe is read, the other could fill up and block.
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            code, outcome = self._run_process(arguments, output)
            output.seek(0)
            printed = output.read()
        for line in printed.splitlines():
            self.log.info("%s", line)
        if not self.is_success(code, printed):
            self.raise_failure(context, build_error(f"seriatim {arguments[0]}", code, outcome))
        return printed

    def raise_failure(self, context: Any, error: SeriatimError) -> NoReturn:
        """Leave a note for the alert, and raise the error of a command that failed."""
        self._add_note(context, error)
        raise error

    def _build_arguments_or_report(self, context: Any) -> list[str]:
        """The arguments. A form that is refused is reported like any other error."""
        try:
            return self.build_arguments(context)
        except ConfigError as error:
            raise self.report_error(context, error) from None

    def is_success(self, code: int, stdout: str) -> bool:  # noqa: ARG002  # subclasses look at it
        """Whether the command succeeded."""
        return code in self.accepted_exit_codes

    def report_error(self, context: Any, error: SeriatimError) -> SeriatimError:
        """Log an error that no command printed, leave a note for the alert, and return the error."""
        for line in error.render().splitlines():
            self.log.info("%s", line)
        self._add_note(context, error)
        return error

    def _run_process(
        self, arguments: list[str], output: IO[str]
    ) -> tuple[int, CommandOutcome | None]:
        """Run the process to its end, and return its exit code and its outcome.

        Its standard output goes to `output`, its standard error to the log as it comes.
        """
        with outcome_file() as path:
            variables = environment.command_environment(self.folder)
            variables[config.OUTCOME] = str(path)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "seriatim", *arguments],
                cwd=self.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                preexec_fn=die_with_parent,  # noqa: PLW1509  # a task has one thread
            )
            for line in self._process.stderr or ():
                self.log.info("%s", line.rstrip("\n"))
            code = self._process.wait()
            return code, read_outcome(path)

    def is_requested_by_form(self, context: Any) -> bool:  # noqa: ARG002  # subclasses read the form
        """Whether a person's form asks for more than the default.

        An error in such a form is the person's own, and no incident.
        """
        return False

    def _add_note(self, context: Any, error: SeriatimError) -> None:
        """Leave a note for the alert, if the task is about one stream."""
        if not self.stream:
            return
        is_form_error = isinstance(error, ConfigError) and self.is_requested_by_form(context)
        note = environment.task_note(context, self.task_id, error)
        note = replace(note, is_form_error=is_form_error)
        environment.add_note(self.folder, self.stream, note, self.log)

    def on_kill(self) -> None:
        """End the process and all processes that it started."""
        if self._process is not None:
            terminate_process_tree(self._process.pid)


def die_with_parent() -> None:
    """Called in a new process: it ends when the task that started it ends, even by SIGKILL."""
    signal_when_parent_ends(signal.SIGTERM)


def terminate_process_tree(pid: int) -> None:
    """Ask a process and its children to end, and kill those that do not.

    The process is not waited for: that is for the thread that started it.
    """
    try:
        parent = psutil.Process(pid)
        processes = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        _send_signal(process, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_GRACE_SECONDS
    while any(map(_is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in processes:
        if _is_running(process):
            _send_signal(process, signal.SIGKILL)


def _is_running(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie does not: it only waits for its parent to read its code."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send_signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
