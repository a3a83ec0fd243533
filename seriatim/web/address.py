"""Addresses: where pages are. Each part of one is made safe here.

Next room: app.py answers them; mails and tasks link to them.
"""

from __future__ import annotations

from urllib.parse import quote, urlencode

MOUNT = "/seriatim"
"""Where Airflow's API server has the pages."""


def page_path(*parts: str | int) -> str:
    """A path below the mount."""
    return "".join(f"/{quote(str(part), safe='')}" for part in parts)


def report_url(airflow_url: str, stream: str, sequence: int) -> str:
    """A report, as an address for mails."""
    return f"{airflow_url.rstrip('/')}{MOUNT}{page_path('stream', stream, 'reports', sequence)}"


def run_url(airflow_url: str, dag_id: str, run_id: str) -> str:
    """What a run did, as an address for tasks."""
    return f"{airflow_url.rstrip('/')}{MOUNT}{page_path('dag', dag_id, 'run')}?{urlencode({'run_id': run_id})}"
