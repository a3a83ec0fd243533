"""Refused trigger forms, explained: Airflow answers a value that does not fit with the whole JSON
schema of its field; a person gets a sentence instead.

It stands before Airflow's own API, and touches only one kind of answer: that a run of one of our DAGs
was refused with code 400. Everything else passes as it is, byte for byte. The sentence is made from
the values that were sent, by the same check that the task `plan` makes.

Next: operations/run_request.py checks the values; plugins/seriatim_page.py puts this into Airflow.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

import msgspec

from seriatim.operations.run_request import (
    RefusedValueError,
    parse_run_request,
    repair_arguments,
)

TRIGGER_PATH = re.compile(r".*/api/v2/dags/([^/]+)/dagRuns/?")
REPAIR_DAG = "seriatim_repair"
REFUSED_STATUS = 400
REQUEST_BYTES_MAX = 1_000_000
"""A longer request is not explained."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def explain_refusal(dag_id: str, form_values: Any, stream_names: list[str]) -> str:
    """Why the form of a run is refused, as a sentence; empty: nothing is known against it, or it is no
    form of ours.
    """
    if not isinstance(form_values, dict):
        return ""
    try:
        if dag_id == REPAIR_DAG:
            stream = form_values.get("stream")
            if stream not in stream_names:
                listed = ", ".join(stream_names) or "none"
                return f"stream: there is no stream {stream!r}. Allowed: {listed}."
            repair_arguments(form_values)
        elif dag_id in stream_names:
            parse_run_request(form_values)
    except RefusedValueError as error:
        return f"{error.key}: {error.problem}. Allowed: {error.allowed}."
    return ""


class ExplainedRefusals:
    """The middleware. Its interface is that of ASGI."""

    def __init__(self, app: Any, list_streams: Callable[[], list[str]]) -> None:
        self.app = app
        self.list_streams = list_streams
        """Returns the names of the streams that there are now."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on; explain the answer if it is the refusal of a form of ours."""
        dag_id = _triggered_dag(scope)
        if dag_id is None:
            await self.app(scope, receive, send)
            return
        request = bytearray()

        async def receive_and_copy() -> Message:
            message = await receive()
            if len(request) <= REQUEST_BYTES_MAX:
                request.extend(message.get("body", b""))
            return message

        answer = _RefusalExplainer(send, lambda: self._explain(dag_id, bytes(request)))
        await self.app(scope, receive_and_copy, answer.send)

    def _explain(self, dag_id: str, request: bytes) -> str:
        if len(request) > REQUEST_BYTES_MAX:
            return ""
        try:
            body = msgspec.json.decode(request)
        except msgspec.DecodeError:
            return ""
        form_values = body.get("conf") if isinstance(body, dict) else None
        return explain_refusal(dag_id, form_values, self.list_streams())


class _RefusalExplainer:
    """Sends an answer on. One with code 400 is held back until it is complete, and its text is
    replaced if there is an explanation.
    """

    def __init__(self, send: Send, explain: Callable[[], str]) -> None:
        self._send = send
        self._explain = explain
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        """One message of the answer."""
        is_start = message["type"] == "http.response.start"
        if is_start and message["status"] == REFUSED_STATUS:
            self._start = message
            return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if not message.get("more_body"):
            await self._send_explained(self._start)

    async def _send_explained(self, start: Message) -> None:
        explanation = self._explain()
        if explanation:
            self._body = msgspec.json.encode({"detail": explanation})
            headers = [item for item in start["headers"] if item[0].lower() != b"content-length"]
            headers.append((b"content-length", str(len(self._body)).encode()))
            start = {**start, "headers": headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": self._body})


def _triggered_dag(scope: Message) -> str | None:
    """The DAG of which a request starts a run; None: it does something else."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    match = TRIGGER_PATH.fullmatch(scope["path"])
    return unquote(match[1]) if match else None
