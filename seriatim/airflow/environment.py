"""What tasks take from their surroundings: the project's settings, Airflow's address and mail
server, and the stream's outbox.

Next: airflow/command.py runs commands with this; airflow/failure_callback.py leaves notes.
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

from seriatim import config, context, stream_files
from seriatim.airflow.outcome import extract_error_screen
from seriatim.alerts.alert import Outbox
from seriatim.alerts.incidents import Note
from seriatim.engine.failure import Failure
from seriatim.errors import SeriatimError

SMTP_CONNECTION = "smtp_default"


def open_outbox(folder: str, stream: str) -> Outbox:
    """The stream's outbox: its notes and its alert state."""
    return context.outbox(stream, config.load_settings(folder=Path(folder)))


def add_note(folder: str, stream: str, note: Note, log: Any) -> None:
    """Leave a note for the next watch.

    If it cannot be written, that is logged and nothing is raised: the caller's own error matters
    more.
    """
    try:
        open_outbox(folder, stream).add_note(note)
    except SeriatimError as error:
        log.warning("%s", error.render())


def stream_names(folder: str) -> tuple[str, ...]:
    """The names of all streams."""
    settings = config.load_settings(folder=Path(folder))
    return tuple(stream_files.list_streams(settings.streams))


def has_ledger(folder: str, stream: str) -> bool:
    """Whether a stream was ever run: whether its ledger exists. The ledger itself is not read."""
    settings = config.load_settings(folder=Path(folder))
    file = stream_files.load_stream(stream, settings.streams)
    return context.has_ledger(file)


def command_environment(folder: str) -> dict[str, str]:
    """The environment of a command: that of this process, Airflow's address, and a mail server.

    The mail server is Airflow's unless the settings have another.
    """
    settings = config.load_settings(folder=Path(folder))
    variables = config.child_environment()
    # What the settings name wins over what Airflow knows.
    if not settings.airflow_url:
        variables["SERIATIM_AIRFLOW_URL"] = airflow_base_url()
    if not settings.smtp:
        variables.update(_mail_server_environment())
    return variables


def _mail_server_environment() -> dict[str, str]:
    """Airflow's own mail connection as our settings; empty if there is none that names a host.

    It goes by the environment, so that no password is in a command line.
    """
    try:
        connection = BaseHook.get_connection(SMTP_CONNECTION)
    except AirflowNotFoundException:
        return {}
    if not connection.host:
        return {}
    extra = connection.extra_dejson
    tls = _tls_mode(extra)
    default_port = 465 if tls == "tls" else 25
    settings = {
        "SMTP": f"{connection.host}:{connection.port or default_port}",
        "SMTP_USER": connection.login,
        "SMTP_PASSWORD": connection.password,
        "SMTP_FROM": extra.get("from_email"),
        "SMTP_TLS": tls,
    }
    variables = {}
    for name, value in settings.items():
        if value:
            variables[f"{config.ENVIRONMENT_PREFIX}{name}"] = str(value)
    return variables


def _tls_mode(extra: Mapping[str, Any]) -> str:
    """How to encrypt, by the flags of Airflow's SMTP connection: TLS unless they disable it."""
    if not _is_true(extra.get("disable_ssl")):
        return "tls"
    if not _is_true(extra.get("disable_tls")):
        return "starttls"
    return "none"


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def is_read_only_run(task_context: Mapping[str, Any]) -> bool:
    """Whether the form asks for a run that changes nothing: a dry run or a replay."""
    form = task_context.get("params") or {}
    return form.get("dry_run") is True or form.get("action") == "replay"


def airflow_base_url() -> str:
    """The address of Airflow's pages."""
    return str(conf.get("api", "base_url", fallback="http://localhost:8080/"))


def run_links(task_context: Mapping[str, Any]) -> dict[str, str]:
    """The addresses of a run's page and of its task's log."""
    dag_id = task_context["dag"].dag_id
    run_id = task_context.get("run_id") or task_context["dag_run"].run_id
    base_url = airflow_base_url().rstrip("/")
    links = {"run": f"{base_url}/dags/{quote(dag_id)}/runs/{quote(run_id)}"}
    task_instance = task_context.get("ti")
    if task_instance is not None:
        links["log"] = task_instance.log_url
    return links


def task_note(task_context: Mapping[str, Any], task: str, error: SeriatimError) -> Note:
    """The note about a task that failed."""
    return Note(
        kind="task",
        at_seconds=time.time(),
        dag=task_context["dag"].dag_id,
        run=task_context["run_id"],
        task=task,
        exit_code=error.exit_code,
        error=Failure.of(error).error,
        text=extract_error_screen(error),
        headline=error.headline(),
        next=error.next,
        links=run_links(task_context),
    )
