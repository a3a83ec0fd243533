"""The app: pages by address, for whoever may see the DAG of that name. Read-only; asks neither
Kafka nor Spark.

Who is asking, and what that person may see, is told by a *gate*: a dependency that refuses who is
not logged in and answers with a `Visitor`. Addresses name a stream by its name and an entry by its
number, and nothing else: no part of an address is ever a path on the disk.

Next room: plugins/seriatim_page.py gives it Airflow's login; read.py finds what is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from msgspec import Struct

from seriatim.errors import ConfigError, SeriatimError
from seriatim.operations.report_page import COLOURS, PAGE_STYLE, safe_text
from seriatim.web import entry, stream, streams
from seriatim.web.assets import ICON_SVG, REFRESH_SCRIPT, STYLE_SHEET
from seriatim.web.draw import element, page_shell
from seriatim.web.read import PageReader

SOURCE_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'"
)
FRAME_POLICY = "; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
CONTENT_POLICY = SOURCE_POLICY + FRAME_POLICY
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'" + FRAME_POLICY
RESPONSE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATIC_FILES = {
    "look.css": ("text/css", f"{COLOURS}{PAGE_STYLE}{STYLE_SHEET}"),
    "refresh.js": ("text/javascript", REFRESH_SCRIPT),
    "mark.svg": ("image/svg+xml", ICON_SVG.strip()),
}
NUMBER_DIGITS_MAX = 12
LOGIN_STATUS_CODES = (401, 403)
"""Nobody is logged in; or by a token of another time, which is no good any more."""


class Visitor(Protocol):
    """Who is asking."""

    def may_see(self, dag_id: str) -> bool:
        """Whether this person may see a DAG; streams have the names of their DAGs."""
        ...

    def may_see_of(self, names: list[str]) -> list[str]:
        """Those of many that this person may see."""
        ...


class RunSpan(Struct, frozen=True):
    """When a run of the scheduler was, and how it ended."""

    began_seconds: float
    ended_seconds: float
    state: str


FindRun = Callable[[str, str], RunSpan | None]
"""A run by DAG and run id."""


class PageMissingError(Exception):  # an answer: 404, in words
    """There is no such thing, or it is not this person's to see."""


def create_app(reader: PageReader, gate: Callable[..., Any], find_run: FindRun) -> FastAPI:
    """The app, behind a gate."""
    app = FastAPI(title="Seriatim", docs_url=None, redoc_url=None, openapi_url=None)
    here = Depends(gate)
    _add_stream_pages(app, reader, here)
    _add_dag_tabs(app, reader, here, find_run)

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        """What all pages share; it says nothing about anybody's streams."""
        if name not in STATIC_FILES:
            return Response(
                "there is no such file",
                status_code=404,
                media_type="text/plain",
                headers=RESPONSE_HEADERS,
            )
        kept = {**RESPONSE_HEADERS, "Cache-Control": "max-age=3600"}
        kind, content = STATIC_FILES[name]
        return Response(content, media_type=kind, headers=kept)

    @app.get("/{rest:path}")
    def other(rest: str, visitor: Visitor = here) -> Response:  # noqa: ARG001  # the gate comes first
        raise PageMissingError(f"there is no page {rest!r}")

    _add_error_pages(app)
    return app


def _add_stream_pages(app: FastAPI, reader: PageReader, visitor_dependency: Any) -> None:
    """All streams, one stream, one entry, one report."""

    @app.get("/")
    def all_streams(request: Request, visitor: Visitor = visitor_dependency) -> Response:
        names = visitor.may_see_of(reader.stream_names())
        return _html_response(
            streams.render_streams_page(
                _mount_path(request), [reader.stream_status(name) for name in names], reader.clock()
            )
        )

    @app.get("/stream/{name}")
    def one_stream(request: Request, name: str, visitor: Visitor = visitor_dependency) -> Response:
        _refuse_invisible(visitor, name)
        return _html_response(
            stream.render_stream_page(
                _mount_path(request), reader.stream_history(name), reader.clock()
            )
        )

    @app.get("/stream/{name}/entry/{number}")
    def one_entry(
        request: Request, name: str, number: str, visitor: Visitor = visitor_dependency
    ) -> Response:
        _refuse_invisible(visitor, name)
        return _html_response(
            entry.render_entry_page(
                _mount_path(request), name, reader.slice_row(name, _parse_sequence(number))
            )
        )

    @app.get("/stream/{name}/reports/{number}")
    def one_report(name: str, number: str, visitor: Visitor = visitor_dependency) -> Response:
        _refuse_invisible(visitor, name)
        return _html_response(
            reader.read_report(name, _parse_sequence(number)), policy=REPORT_POLICY
        )


def _add_dag_tabs(
    app: FastAPI, reader: PageReader, visitor_dependency: Any, find_run: FindRun
) -> None:
    """What Airflow shows beside a DAG and beside a run."""

    @app.get("/dag/{dag_id}")
    def dag(request: Request, dag_id: str, visitor: Visitor = visitor_dependency) -> Response:
        """The tab on a DAG. Airflow shows it on every DAG; those that are no streams are told."""
        _refuse_other_dags(reader, visitor, dag_id)
        return _html_response(
            stream.render_stream_page(
                _mount_path(request), reader.stream_history(dag_id), reader.clock()
            )
        )

    @app.get("/dag/{dag_id}/run")
    def run(
        request: Request, dag_id: str, run_id: str = "", visitor: Visitor = visitor_dependency
    ) -> Response:
        """The tab on a run: what was committed while it lasted."""
        _refuse_other_dags(reader, visitor, dag_id)
        span = find_run(dag_id, run_id)
        if span is None:
            raise PageMissingError(f"{dag_id} has no run {run_id!r}")
        found, count = reader.entries_between(dag_id, span.began_seconds, span.ended_seconds)
        return _html_response(
            entry.render_run_page(_mount_path(request), dag_id, run_id, found, span.state, count)
        )


def _add_error_pages(app: FastAPI) -> None:
    """What goes wrong, as a page; who is not logged in goes to Airflow's login and comes back."""

    @app.exception_handler(PageMissingError)
    def missing(request: Request, error: PageMissingError) -> Response:
        return _error_page(request, "Not there", str(error), 404)

    @app.exception_handler(SeriatimError)
    def trouble(request: Request, error: SeriatimError) -> Response:
        code = 404 if isinstance(error, ConfigError) else 503
        return _error_page(
            request, "Not there" if code == 404 else "It cannot be read", error.render(), code
        )

    @app.exception_handler(OSError)
    def unreadable(request: Request, error: OSError) -> Response:
        return _error_page(
            request,
            "It cannot be read",
            f"{error}\nnext: look at the disk and at who may read there",
            503,
        )

    @app.exception_handler(HTTPException)
    def refused(request: Request, error: HTTPException) -> Response:
        if error.status_code in LOGIN_STATUS_CODES and "text/html" in request.headers.get(
            "accept", ""
        ):
            outer = _mount_path(request).rpartition("/")[0]
            back = quote(
                f"{request.url.path}{f'?{request.url.query}' if request.url.query else ''}", safe=""
            )
            return RedirectResponse(
                f"{outer}/api/v2/auth/login?next={back}", headers=RESPONSE_HEADERS
            )
        title = "Log in to Airflow first" if error.status_code in LOGIN_STATUS_CODES else "Refused"
        return _error_page(request, title, str(error.detail), error.status_code)


def _mount_path(request: Request) -> str:
    """Where the app is mounted, whatever is in front of it."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _html_response(
    content: str | bytes, status: int = 200, policy: str = CONTENT_POLICY
) -> Response:
    body = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    return HTMLResponse(body, status, {**RESPONSE_HEADERS, "Content-Security-Policy": policy})


def _error_page(request: Request, title: str, message: str, status: int) -> Response:
    body = [element("pre", "\n".join(safe_text(line) for line in message.splitlines()[:40]))]
    return _html_response(
        page_shell(_mount_path(request), title, [("Streams", "/")], "", body), status
    )


def _refuse_invisible(visitor: Visitor, name: str) -> None:
    """Who may not see a stream is told the same as if there were none."""
    if not visitor.may_see(name):
        raise PageMissingError(f"there is no stream {name!r}, or you may not see it")


def _refuse_other_dags(reader: PageReader, visitor: Visitor, dag_id: str) -> None:
    _refuse_invisible(visitor, dag_id)
    if dag_id not in reader.stream_names():
        raise PageMissingError(
            f"the DAG {dag_id!r} is no stream: streams have a file in streams/, and a DAG of that name"
        )


def _parse_sequence(digits: str) -> int:
    """An entry's number."""
    if not (digits.isascii() and digits.isdigit() and len(digits) <= NUMBER_DIGITS_MAX):
        raise PageMissingError(f"an entry is a number, not {digits!r}")
    return int(digits)
