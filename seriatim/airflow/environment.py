"""Where tasks find things: settings as of the project's folder, Airflow's address, its mail server,
and the outbox.

Next room: airflow/command.py runs commands with this; airflow/failure_callback.py leaves notes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from airflow.sdk import BaseHook
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowNotFoundException

from seriatim import config, stream_files
from seriatim import context as wiring
from seriatim.airflow.outcome import extract_error_screen
from seriatim.alerts.alert import Outbox
from seriatim.alerts.incidents import Note
from seriatim.errors import SeriatimError
from seriatim.failure import Failure

SMTP_CONNECTION = "smtp_default"


def open_outbox(folder: str, stream: str) -> Outbox:
    """The stream's desk."""
    return wiring.outbox(stream, config.load_settings(folder=Path(folder)))


def add_note(folder: str, stream: str, note: Note, log: Any) -> None:
    """Leave a note. Where there is no room or right, that is said, and whoever leaves it goes on as
    without it.
    """
    try:
        open_outbox(folder, stream).add_note(note)
    except SeriatimError as error:
        log.warning("%s", error.render())


def stream_names(folder: str) -> tuple[str, ...]:
    """All streams."""
    return tuple(stream_files.list_streams(config.load_settings(folder=Path(folder)).streams))


def has_ledger(folder: str, stream: str) -> bool:
    """Whether a stream was ever run: a look at the disk, without reading it."""
    file = stream_files.load_stream(stream, config.load_settings(folder=Path(folder)).streams)
    return (Path(file.stream.output.path) / "records" / "_delta_log").exists()


def command_environment(folder: str) -> dict[str, str]:
    """The environment of a command: ours, Airflow's address, and its mail server unless another is
    set.
    """
    settings, ours = config.load_settings(folder=Path(folder)), config.child_environment()
    if not settings.airflow_url:
        ours["SERIATIM_AIRFLOW_URL"] = airflow_base_url()
    return ours if settings.smtp else {**ours, **_mail_server_environment()}


def _mail_server_environment() -> dict[str, str]:
    """Airflow's own mail connection, if one names a host, by the environment: a password is in no
    command line.
    """
    try:
        found = BaseHook.get_connection(SMTP_CONNECTION)
    except AirflowNotFoundException:
        return {}
    if not found.host:
        return {}
    extra = found.extra_dejson
    tls = "none" if _is_true(extra.get("disable_tls")) else "starttls"
    tls = tls if _is_true(extra.get("disable_ssl")) else "tls"
    port = found.port or (465 if tls == "tls" else 25)
    given = {
        "SMTP": f"{found.host}:{port}",
        "SMTP_USER": found.login,
        "SMTP_PASSWORD": found.password,
        "SMTP_FROM": extra.get("from_email"),
        "SMTP_TLS": tls,
    }
    return {
        f"{config.ENVIRONMENT_PREFIX}{name}": str(value) for name, value in given.items() if value
    }


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def is_read_only_run(context: Mapping[str, Any]) -> bool:
    """Whether the form asks for a run that changes nothing."""
    form = context.get("params") or {}
    return form.get("dry_run") is True or form.get("action") == "replay"


def airflow_base_url() -> str:
    """Where Airflow's pages are."""
    return str(conf.get("api", "base_url", fallback="http://localhost:8080/"))


def run_links(context: Mapping[str, Any]) -> dict[str, str]:
    """The pages of a run and of its task's log."""
    dag_id, run = context["dag"].dag_id, context.get("run_id") or context["dag_run"].run_id
    found = {"run": f"{airflow_base_url().rstrip('/')}/dags/{quote(dag_id)}/runs/{quote(run)}"}
    task = context.get("ti")
    return found if task is None else {**found, "log": task.log_url}


def task_note(context: Mapping[str, Any], task: str, error: SeriatimError) -> Note:
    """What a task that failed has to say."""
    return Note(
        kind="task",
        at_seconds=time.time(),
        dag=context["dag"].dag_id,
        run=context["run_id"],
        task=task,
        exit_code=error.exit_code,
        error=Failure.of(error).error,
        text=extract_error_screen(error),
        next=error.next,
        links=run_links(context),
    )
