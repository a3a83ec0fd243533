"""The link on a task to the page of its run: entries, findings and report, behind Airflow's login.

Next: web/app.py shows the page.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseOperatorLink

from seriatim.airflow import environment
from seriatim.web import address


class RunPage(BaseOperatorLink):
    """The link to the page of the task's run."""

    name = "Seriatim: what this run did"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002  # Airflow's signature
        """The address of the run's page."""
        return address.run_url(environment.airflow_base_url(), ti_key.dag_id, ti_key.run_id)
