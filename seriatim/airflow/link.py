"""Link: a button on a task that leads to what its run did: entries, findings, report, behind
Airflow's login.

Next room: web/app.py shows it.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseOperatorLink

from seriatim.airflow import environment
from seriatim.web import address


class RunPage(BaseOperatorLink):
    """To the page of the task's run."""

    name = "Seriatim: what this run did"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002  # Airflow's signature
        """The run's page."""
        return address.run_url(environment.airflow_base_url(), ti_key.dag_id, ti_key.run_id)
