"""The web app: a page for each address, for users who may see the DAG of that name. It only reads,
and asks neither Kafka nor Spark.

The *gate* says who is asking, and what that person may see: it is a FastAPI dependency that refuses
users who are not logged in, and returns a `Visitor` for the others. Addresses name a stream by its
name and an entry by its number, and nothing else: no part of an address is ever a path on the disk.

Next: plugins/seriatim_page.py passes a gate with Airflow's login; web/read.py reads what is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from msgspec import Struct

from seriatim.errors import ConfigError, SeriatimError
from seriatim.ledger.manifests import OtherStreamError
from seriatim.web import views
from seriatim.web.read import PageReader
from seriatim.web.render import runbook_text, static_file

SOURCE_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'"
)
FRAME_POLICY = "; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
CONTENT_POLICY = SOURCE_POLICY + FRAME_POLICY
# A report is one file that can be mailed, so its style is inside of it.
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'" + FRAME_POLICY
RESPONSE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATIC_FILES = {
    "report.css": "text/css",
    "look.css": "text/css",
    "refresh.js": "text/javascript",
    "mark.svg": "image/svg+xml",
}
"""The files that all pages share, with their types. No other file is ever served."""
NUMBER_DIGITS_MAX = 12
"""Digits of an entry's number in an address, at most."""
LOGIN_STATUS_CODES = (401, 403)
"""The user is not logged in, or has a token that has expired."""


class Visitor(Protocol):
    """The user who asks for a page."""

    def may_see(self, dag_id: str) -> bool:
        """Whether the user may see a DAG. A stream has the name of its DAG."""
        ...

    def may_see_of(self, names: list[str]) -> list[str]:
        """The names whose DAG the user may see."""
        ...


class RunSpan(Struct, frozen=True):
    """When a run of the scheduler began and ended, and its state."""

    began_seconds: float
    ended_seconds: float
    state: str


FindRun = Callable[[str, str], RunSpan | None]
"""Finds a run by its DAG and run id; None: there is none."""


class PageMissingError(Exception):
    """There is no such page, or the user may not see it. It becomes a page with code 404."""


def create_app(reader: PageReader, gate: Callable[..., Any], find_run: FindRun) -> FastAPI:
    """The app. `gate` is the dependency that returns the visitor."""
    app = FastAPI(title="Seriatim", docs_url=None, redoc_url=None, openapi_url=None)
    visitor_dependency = Depends(gate)
    _add_stream_pages(app, reader, visitor_dependency)
    _add_dag_tabs(app, reader, visitor_dependency, find_run)

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        """Files that all pages share. They need no login: nothing of a stream is in them."""
        if name not in STATIC_FILES:
            return Response(
                "there is no such file",
                status_code=404,
                media_type="text/plain",
                headers=RESPONSE_HEADERS,
            )
        headers = {**RESPONSE_HEADERS, "Cache-Control": "max-age=3600"}
        return Response(static_file(name), media_type=STATIC_FILES[name], headers=headers)

    # Added last: it matches every address that no route above it does.
    @app.get("/{rest:path}")
    def unknown_page(rest: str, visitor: Visitor = visitor_dependency) -> Response:  # noqa: ARG001  # the gate comes first
        raise PageMissingError(f"there is no page {rest!r}")

    _add_error_pages(app)
    return app


def _add_stream_pages(app: FastAPI, reader: PageReader, visitor_dependency: Any) -> None:
    """The pages of all streams, of one stream, of one entry, of one report."""

    @app.get("/")
    def all_streams(request: Request, visitor: Visitor = visitor_dependency) -> Response:
        names = visitor.may_see_of(reader.stream_names())
        statuses = reader.stream_statuses(names)
        page = views.render_streams_page(_mount_path(request), statuses, reader.clock())
        return _html_response(page)

    @app.get("/runbook")
    def runbook(request: Request, visitor: Visitor = visitor_dependency) -> Response:  # noqa: ARG001  # the gate comes first
        return _html_response(views.render_runbook_page(_mount_path(request), runbook_text()))

    @app.get("/stream/{name}")
    def one_stream(request: Request, name: str, visitor: Visitor = visitor_dependency) -> Response:
        # Before anything is read, also of a stream that does not exist.
        _refuse_invisible(visitor, name)
        stream_history = reader.stream_history(name)
        page = views.render_stream_page(_mount_path(request), stream_history, reader.clock())
        return _html_response(page)

    @app.get("/stream/{name}/entry/{number}")
    def one_entry(
        request: Request, name: str, number: str, visitor: Visitor = visitor_dependency
    ) -> Response:
        _refuse_invisible(visitor, name)
        slice_row = reader.slice_row(name, _parse_sequence(number))
        page = views.render_entry_page(_mount_path(request), name, slice_row)
        return _html_response(page)

    @app.get("/stream/{name}/reports/{number}")
    def one_report(name: str, number: str, visitor: Visitor = visitor_dependency) -> Response:
        _refuse_invisible(visitor, name)
        report = reader.read_report(name, _parse_sequence(number))
        return _html_response(report, policy=REPORT_POLICY)


def _add_dag_tabs(
    app: FastAPI, reader: PageReader, visitor_dependency: Any, find_run: FindRun
) -> None:
    """The pages that Airflow shows as tabs of a DAG and of a run."""

    @app.get("/dag/{dag_id}")
    def dag(request: Request, dag_id: str, visitor: Visitor = visitor_dependency) -> Response:
        """The tab of a DAG. Airflow shows it on every DAG, also on those that are no streams."""
        _refuse_other_dags(reader, visitor, dag_id)
        stream_history = reader.stream_history(dag_id)
        page = views.render_stream_page(_mount_path(request), stream_history, reader.clock())
        return _html_response(page)

    @app.get("/dag/{dag_id}/run")
    def run(
        request: Request, dag_id: str, run_id: str = "", visitor: Visitor = visitor_dependency
    ) -> Response:
        """The tab of a run: what was committed while it lasted."""
        _refuse_other_dags(reader, visitor, dag_id)
        span = find_run(dag_id, run_id)
        if span is None:
            raise PageMissingError(f"{dag_id} has no run {run_id!r}")
        manifests, count = reader.entries_between(dag_id, span.began_seconds, span.ended_seconds)
        base = _mount_path(request)
        page = views.render_run_page(base, dag_id, run_id, manifests, span.state, count)
        return _html_response(page)


def _add_error_pages(app: FastAPI) -> None:
    """The pages of errors. A user who is not logged in is sent to Airflow's login instead."""

    @app.exception_handler(PageMissingError)
    def missing(request: Request, error: PageMissingError) -> Response:
        return _error_page(request, "Not there", str(error), 404)

    @app.exception_handler(SeriatimError)
    def trouble(request: Request, error: SeriatimError) -> Response:
        if isinstance(error, ConfigError) and not isinstance(error, OtherStreamError):
            return _error_page(request, "Not there", error.render(), 404)
        return _error_page(request, "It cannot be read", error.render(), 503)

    @app.exception_handler(OSError)
    def unreadable(request: Request, error: OSError) -> Response:
        message = f"{error}\nnext: look at the disk and at who may read there"
        return _error_page(request, "It cannot be read", message, 503)

    @app.exception_handler(HTTPException)
    def refused(request: Request, error: HTTPException) -> Response:
        if error.status_code not in LOGIN_STATUS_CODES:
            return _error_page(request, "Refused", str(error.detail), error.status_code)
        # Only a browser that loads a page is redirected; the script of a page gets the error.
        if "text/html" in request.headers.get("accept", ""):
            return _login_redirect(request)
        return _error_page(request, "Log in to Airflow first", str(error.detail), error.status_code)


def _login_redirect(request: Request) -> Response:
    """To Airflow's login, and from there back to the page."""
    airflow_path = _mount_path(request).rpartition("/")[0]
    page = request.url.path
    if request.url.query:
        page += f"?{request.url.query}"
    address = f"{airflow_path}/api/v2/auth/login?next={quote(page, safe='')}"
    return RedirectResponse(address, headers=RESPONSE_HEADERS)


def _mount_path(request: Request) -> str:
    """The path below which the app is mounted, with that of a proxy in front of it."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _html_response(
    content: str | bytes, status: int = 200, policy: str = CONTENT_POLICY
) -> Response:
    # Names may hold lone surrogates, which UTF-8 cannot encode.
    body = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    return HTMLResponse(body, status, {**RESPONSE_HEADERS, "Content-Security-Policy": policy})


def _error_page(request: Request, title: str, message: str, status: int) -> Response:
    page = views.render_error_page(_mount_path(request), title, message)
    return _html_response(page, status)


def _refuse_invisible(visitor: Visitor, name: str) -> None:
    """Raise the same error for a stream that the user may not see as for one that does not exist."""
    if not visitor.may_see(name):
        raise PageMissingError(f"there is no stream {name!r}, or you may not see it")


def _refuse_other_dags(reader: PageReader, visitor: Visitor, dag_id: str) -> None:
    """Raise an error for a DAG that the user may not see, or that is no stream."""
    _refuse_invisible(visitor, dag_id)
    if dag_id not in reader.stream_names():
        raise PageMissingError(
            f"the DAG {dag_id!r} is no stream: streams have a file in streams/, and a DAG of that name"
        )


def _parse_sequence(digits: str) -> int:
    """An entry's number from an address."""
    if not (digits.isascii() and digits.isdigit() and len(digits) <= NUMBER_DIGITS_MAX):
        raise PageMissingError(f"an entry is a number, not {digits!r}")
    return int(digits)
