"""The app: pages by address, for whoever may see the DAG of that name. Read-only; asks neither Kafka nor Spark.

Who is asking, and what that person may see, is told by a *gate*: a dependency that refuses who is not logged in and
answers with a `Visitor`. Addresses name a stream by its name and an entry by its number, and nothing else: no part of
an address is ever a path on the disk.

Next room: plugins/seriatim_page.py gives it Airflow's login; read.py finds what is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from msgspec import Struct

from seriatim.core.errors import ConfigError, SeriatimError
from seriatim.core.page import COLOURS, STYLE, text
from seriatim.page import entry, stream, streams
from seriatim.page.draw import element, shell
from seriatim.page.look import CSS, MARK, SCRIPT
from seriatim.page.read import Reader

OWN = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'"
ONLY = "; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
POLICY = OWN + ONLY
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'" + ONLY
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATIC = {
    "look.css": ("text/css", f"{COLOURS}{STYLE}{CSS}"),
    "refresh.js": ("text/javascript", SCRIPT),
    "mark.svg": ("image/svg+xml", MARK.strip()),
}
NUMBER_DIGITS_MAX = 12
LOGIN_HELPS = (401, 403)
"""Nobody is logged in; or by a token of another time, which is no good any more."""


class Visitor(Protocol):
    """Who is asking."""

    def may_see(self, dag_id: str) -> bool:
        """Whether this person may see a DAG; streams have the names of their DAGs."""
        ...

    def may_see_of(self, names: list[str]) -> list[str]:
        """Those of many that this person may see."""
        ...


class Span(Struct, frozen=True):
    """When a run of the scheduler was, and how it ended."""

    began_seconds: float
    ended_seconds: float
    state: str


Runs = Callable[[str, str], Span | None]
"""A run by DAG and run id."""


class Missing(Exception):  # noqa: N818  # an answer: 404, in words
    """There is no such thing, or it is not this person's to see."""


def create(reader: Reader, gate: Callable[..., Any], runs: Runs) -> FastAPI:
    """The app, behind a gate."""
    app = FastAPI(title="Seriatim", docs_url=None, redoc_url=None, openapi_url=None)
    here = Depends(gate)
    _streams(app, reader, here)
    _tabs(app, reader, here, runs)

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        """What all pages share; it says nothing about anybody's streams."""
        if name not in STATIC:
            return Response("there is no such file", status_code=404, media_type="text/plain", headers=HEADERS)
        kept = {**HEADERS, "Cache-Control": "max-age=3600"}
        kind, content = STATIC[name]
        return Response(content, media_type=kind, headers=kept)

    @app.get("/{rest:path}")
    def other(rest: str, visitor: Visitor = here) -> Response:  # noqa: ARG001  # the gate comes first
        raise Missing(f"there is no page {rest!r}")

    _tell_in_words(app)
    return app


def _streams(app: FastAPI, reader: Reader, here: Any) -> None:
    """All streams, one stream, one entry, one report."""

    @app.get("/")
    def all_streams(request: Request, visitor: Visitor = here) -> Response:
        names = visitor.may_see_of(reader.names())
        return _answer(streams.page(_base(request), [reader.glance(name) for name in names], reader.clock()))

    @app.get("/stream/{name}")
    def one_stream(request: Request, name: str, visitor: Visitor = here) -> Response:
        _refuse(visitor, name)
        return _answer(stream.page(_base(request), reader.stream(name), reader.clock()))

    @app.get("/stream/{name}/entry/{number}")
    def one_entry(request: Request, name: str, number: str, visitor: Visitor = here) -> Response:
        _refuse(visitor, name)
        return _answer(entry.page(_base(request), name, reader.entry(name, _number(number))))

    @app.get("/stream/{name}/reports/{number}")
    def one_report(name: str, number: str, visitor: Visitor = here) -> Response:
        _refuse(visitor, name)
        return _answer(reader.report(name, _number(number)), policy=REPORT_POLICY)


def _tabs(app: FastAPI, reader: Reader, here: Any, runs: Runs) -> None:
    """What Airflow shows beside a DAG and beside a run."""

    @app.get("/dag/{dag_id}")
    def dag(request: Request, dag_id: str, visitor: Visitor = here) -> Response:
        """The tab on a DAG. Airflow shows it on every DAG; those that are no streams are told."""
        _refuse_other_dags(reader, visitor, dag_id)
        return _answer(stream.page(_base(request), reader.stream(dag_id), reader.clock()))

    @app.get("/dag/{dag_id}/run")
    def run(request: Request, dag_id: str, run_id: str = "", visitor: Visitor = here) -> Response:
        """The tab on a run: what was committed while it lasted."""
        _refuse_other_dags(reader, visitor, dag_id)
        span = runs(dag_id, run_id)
        if span is None:
            raise Missing(f"{dag_id} has no run {run_id!r}")
        found, count = reader.between(dag_id, span.began_seconds, span.ended_seconds)
        return _answer(entry.run(_base(request), dag_id, run_id, found, span.state, count))


def _tell_in_words(app: FastAPI) -> None:
    """What goes wrong, as a page; who is not logged in goes to Airflow's login and comes back."""

    @app.exception_handler(Missing)
    def missing(request: Request, error: Missing) -> Response:
        return _said(request, "Not there", str(error), 404)

    @app.exception_handler(SeriatimError)
    def trouble(request: Request, error: SeriatimError) -> Response:
        code = 404 if isinstance(error, ConfigError) else 503
        return _said(request, "Not there" if code == 404 else "It cannot be read", error.render(), code)

    @app.exception_handler(OSError)
    def unreadable(request: Request, error: OSError) -> Response:
        return _said(request, "It cannot be read", f"{error}\nnext: look at the disk and at who may read there", 503)

    @app.exception_handler(HTTPException)
    def refused(request: Request, error: HTTPException) -> Response:
        if error.status_code in LOGIN_HELPS and "text/html" in request.headers.get("accept", ""):
            outer = _base(request).rpartition("/")[0]
            back = quote(f"{request.url.path}{f'?{request.url.query}' if request.url.query else ''}", safe="")
            return RedirectResponse(f"{outer}/api/v2/auth/login?next={back}", headers=HEADERS)
        title = "Log in to Airflow first" if error.status_code in LOGIN_HELPS else "Refused"
        return _said(request, title, str(error.detail), error.status_code)


def _base(request: Request) -> str:
    """Where the app is mounted, whatever is in front of it."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _answer(content: str | bytes, status: int = 200, policy: str = POLICY) -> Response:
    body = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    return HTMLResponse(body, status, {**HEADERS, "Content-Security-Policy": policy})


def _said(request: Request, title: str, words: str, status: int) -> Response:
    body = [element("pre", "\n".join(text(line) for line in words.splitlines()[:40]))]
    return _answer(shell(_base(request), title, [("Streams", "/")], "", body), status)


def _refuse(visitor: Visitor, name: str) -> None:
    """Who may not see a stream is told the same as if there were none."""
    if not visitor.may_see(name):
        raise Missing(f"there is no stream {name!r}, or you may not see it")


def _refuse_other_dags(reader: Reader, visitor: Visitor, dag_id: str) -> None:
    _refuse(visitor, dag_id)
    if dag_id not in reader.names():
        raise Missing(f"the DAG {dag_id!r} is no stream: streams have a file in streams/, and a DAG of that name")


def _number(digits: str) -> int:
    """An entry's number."""
    if not (digits.isascii() and digits.isdigit() and len(digits) <= NUMBER_DIGITS_MAX):
        raise Missing(f"an entry is a number, not {digits!r}")
    return int(digits)
