"""The page in Airflow: an entry in the navigation, a tab on each DAG, a tab on each run. Wiring
only.

Airflow loads plugins in all its processes, so the page itself is made with its first request, in
the API server alone. Who may see a stream is whoever may see its DAG.

Next room: seriatim/web/app.py has the pages.
"""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin

from seriatim.web.address import MOUNT

FOLDER = Path(__file__).resolve().parent.parent
MOUNT_PATH = urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/") + MOUNT


class LazyPageApp:
    """The app, made when it is first asked for."""

    app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if self.app is None:
            self.app = create_page_app()
            Thread(
                target=import_module, args=("pyarrow",), daemon=True
            ).start()  # so that no page waits for it
        await self.app(scope, receive, send)


def create_page_app() -> Any:
    """The pages, behind Airflow's login and DAG permissions."""
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.models.resource_details import DagDetails
    from airflow.api_fastapi.core_api.security import get_user
    from airflow.models.dag import DagModel
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from fastapi import Depends
    from sqlalchemy import select

    from seriatim import config
    from seriatim.web.app import RunSpan, create_app
    from seriatim.web.read import PageReader

    class User:
        """Somebody who is logged in."""

        def __init__(self, user: Any) -> None:
            self.user = user

        def may_see(self, dag_id: str) -> bool:
            """As Airflow decides for the DAG's own page."""
            details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
            return bool(
                get_auth_manager().is_authorized_dag(method="GET", details=details, user=self.user)
            )

        def may_see_of(self, names: list[str]) -> list[str]:
            """Those whose DAG Airflow would list."""
            known = get_auth_manager().get_authorized_dag_ids(user=self.user, method="GET")
            return [name for name in names if name in known]

    here = Depends(get_user)

    def gate(user: Any = here) -> User:
        return User(user)

    def span(dag_id: str, run_id: str) -> RunSpan | None:
        wanted = select(DagRun).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
        with create_session() as session:
            run = session.scalar(wanted)
            if run is None:
                return None
            began = run.start_date or run.queued_at
            ended = run.end_date.timestamp() if run.end_date else time.time()
            return RunSpan(began.timestamp() if began else time.time(), ended, str(run.state))

    return create_app(
        PageReader(config.load_settings(folder=FOLDER).streams, time.time), gate, span
    )


class SeriatimPage(AirflowPlugin):  # type: ignore[misc]  # Airflow is Any to us
    """What Airflow shows of it."""

    name = "seriatim"
    fastapi_apps = [{"app": LazyPageApp(), "url_prefix": MOUNT, "name": "Seriatim"}]  # noqa: RUF012  # Airflow's own shape
    external_views = [  # noqa: RUF012
        {
            "name": "Seriatim",
            "href": f"{MOUNT_PATH}/",
            "destination": "nav",
            "url_route": "seriatim",
            "icon": f"{MOUNT_PATH}/static/mark.svg",
            "nav_top_level": True,
        },
        {
            "name": "Seriatim",
            "href": f"{MOUNT_PATH}/dag/{{DAG_ID}}",
            "destination": "dag",
            "url_route": "seriatim-stream",
            "icon": f"{MOUNT_PATH}/static/mark.svg",
        },
        {
            "name": "Seriatim",
            "href": f"{MOUNT_PATH}/dag/{{DAG_ID}}/run?run_id={{RUN_ID}}",
            "destination": "dag_run",
            "url_route": "seriatim-run",
            "icon": f"{MOUNT_PATH}/static/mark.svg",
        },
    ]
