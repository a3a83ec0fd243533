"""The pages in Airflow: an entry in the navigation, a tab on each DAG, a tab on each run.

Airflow loads plugins in all its processes. So the app is made by its first request, which only the
API server gets. A user who may see a DAG may see the pages of its stream. A stream file that is broken
has no DAG: it is shown to users who may see Airflow's import errors, of which it is one.

The plugin also explains refused trigger forms: Airflow would answer with the whole schema of a field.

Next: seriatim/web/app.py has the pages; seriatim/web/refusals.py explains refused forms.
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

from seriatim import config, stream_files
from seriatim.web.address import MOUNT
from seriatim.web.refusals import ExplainedRefusals

FOLDER = Path(__file__).resolve().parent.parent
MOUNT_PATH = urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/") + MOUNT


class LazyPageApp:
    """The app, made by its first request."""

    app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if self.app is None:
            self.app = create_page_app()
            # The import takes long: no page should wait for it.
            importer = Thread(target=import_module, args=("pyarrow",), daemon=True)
            importer.start()
        await self.app(scope, receive, send)


def create_page_app() -> Any:
    """The pages, behind Airflow's login and DAG permissions."""
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagDetails
    from airflow.api_fastapi.core_api.security import get_user
    from airflow.models.dag import DagModel
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from fastapi import Depends
    from sqlalchemy import select

    from seriatim.web.app import RunSpan, create_app
    from seriatim.web.read import PageReader

    class User:
        """A user who is logged in."""

        def __init__(self, user: Any) -> None:
            self.user = user

        def may_see(self, dag_id: str) -> bool:
            """Whether Airflow would show the DAG's own page."""
            details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
            manager = get_auth_manager()
            return bool(manager.is_authorized_dag(method="GET", details=details, user=self.user))

        def may_see_of(self, names: list[str]) -> list[str]:
            """The names whose DAG Airflow would list, and those of broken files, if the user may see
            import errors.
            """
            manager = get_auth_manager()
            visible = set(manager.get_authorized_dag_ids(user=self.user, method="GET"))
            view = AccessView.IMPORT_ERRORS
            if manager.is_authorized_view(access_view=view, user=self.user):
                query = select(DagModel.dag_id).where(DagModel.dag_id.in_(names))
                with create_session() as session:
                    names_with_dag = set(session.scalars(query))
                visible |= set(names) - names_with_dag
            return [name for name in names if name in visible]

    logged_in_user = Depends(get_user)

    def gate(user: Any = logged_in_user) -> User:
        return User(user)

    def span(dag_id: str, run_id: str) -> RunSpan | None:
        query = select(DagRun).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
        with create_session() as session:
            run = session.scalar(query)
            if run is None:
                return None
            current_time = time.time()
            start = run.start_date or run.queued_at
            start_seconds = start.timestamp() if start else current_time
            end_seconds = run.end_date.timestamp() if run.end_date else current_time
            return RunSpan(start_seconds, end_seconds, str(run.state))

    settings = config.load_settings(folder=FOLDER)
    return create_app(PageReader(settings.streams, time.time), gate, span)


def list_streams() -> list[str]:
    """The names of all streams."""
    return stream_files.list_streams(config.load_settings(folder=FOLDER).streams)


class SeriatimPage(AirflowPlugin):  # type: ignore[misc]  # Airflow is Any to us
    """What the plugin adds to Airflow."""

    name = "seriatim"
    fastapi_apps = [{"app": LazyPageApp(), "url_prefix": MOUNT, "name": "Seriatim"}]  # noqa: RUF012  # Airflow's own shape
    fastapi_root_middlewares = [  # noqa: RUF012
        {
            "middleware": ExplainedRefusals,
            "kwargs": {"list_streams": list_streams},
            "name": "Seriatim",
        }
    ]
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
