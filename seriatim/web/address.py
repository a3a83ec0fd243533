"""Addresses of pages. Each part of an address is escaped here.

Next: web/app.py answers them; mails and tasks link to them.
"""

from __future__ import annotations

from urllib.parse import quote, urlencode

MOUNT = "/seriatim"
"""The path below which Airflow's API server has the pages."""


def page_path(*segments: str | int) -> str:
    """The path of a page, below the mount."""
    return "".join(f"/{quote(str(segment), safe='')}" for segment in segments)


def report_url(airflow_url: str, stream: str, sequence: int) -> str:
    """The address of a report, for mails."""
    path = page_path("stream", stream, "reports", sequence)
    return f"{airflow_url.rstrip('/')}{MOUNT}{path}"


def runbook_url(airflow_url: str) -> str:
    """The address of the runbook, for mails."""
    return f"{airflow_url.rstrip('/')}{MOUNT}/runbook"


def run_url(airflow_url: str, dag_id: str, run_id: str) -> str:
    """The address of a run's page, for tasks."""
    path = page_path("dag", dag_id, "run")
    query = urlencode({"run_id": run_id})
    return f"{airflow_url.rstrip('/')}{MOUNT}{path}?{query}"
