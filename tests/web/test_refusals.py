"""Refused trigger forms are explained in a sentence, and every other answer passes as it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from seriatim.web.refusals import REQUEST_BYTES_MAX, ExplainedRefusals, explain_refusal

SCHEMA_DUMP = (
    b'{"detail":"Invalid input for param from: ... Failed validating \'pattern\' in schema"}'
)
TRIGGER = "/api/v2/dags/orders/dagRuns"


STREAMS = ["orders"]


class Answers:
    """An application that reads the request and gives one answer, in two parts."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.read = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while True:
            message = await receive()
            self.read += message["body"]
            if not message.get("more_body"):
                break
        headers = [(b"content-type", b"application/json"), (b"Content-Length", b"90")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        half = len(SCHEMA_DUMP) // 2
        for part, more in ((SCHEMA_DUMP[:half], True), (SCHEMA_DUMP[half:], False)):
            await send({"type": "http.response.body", "body": part, "more_body": more})


def ask(
    body: bytes,
    status: int = 400,
    path: str = TRIGGER,
    method: str = "POST",
    kind: str = "http",
) -> tuple[Answers, list[Any]]:
    """Send a request in two parts through the middleware; the application, and what was sent back."""
    application, sent = Answers(status), list[Any]()
    parts = [
        {"type": "http.request", "body": body[:5], "more_body": True},
        {"type": "http.request", "body": body[5:]},
    ]

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "method": method, "path": path}
    middleware = ExplainedRefusals(application, list_streams=lambda: STREAMS)
    asyncio.run(middleware(scope, receive, send))
    return application, sent


def body_of(sent: list[Any]) -> bytes:
    """The body of an answer."""
    return b"".join(message.get("body", b"") for message in sent)


def test_a_refused_form_is_a_sentence() -> None:
    """It names the field, what was found, and what is allowed; the length of the answer is right."""
    request = json.dumps({"logical_date": None, "conf": {"from": "-1"}}).encode()
    application, sent = ask(request)
    assert application.read == request
    detail = json.loads(body_of(sent))["detail"]
    assert detail == (
        "from: found '-1'. Allowed: an offset like 41000, or a time in UTC like 2026-11-16T08:00:00Z."
    )
    start = sent[0]
    assert start["status"] == 400
    lengths = [value for name, value in start["headers"] if name.lower() == b"content-length"]
    assert lengths == [str(len(body_of(sent))).encode()]


@pytest.mark.parametrize(
    "form",
    [
        {"action": "rm"},
        {"topics": ["$(id)"]},
        {"partitions": ["no"]},
        {"until": "yesterday"},
        {"messages_max": 0},
        {"trace": [7]},
        {"dry_run": "maybe"},
        {"nothing": 1},
    ],
)
def test_every_field_is_explained(form: dict[str, Any]) -> None:
    """By its name, in one line, without a schema."""
    (field,) = form
    sentence = explain_refusal("orders", form, STREAMS)
    assert sentence.startswith(f"{field}: ")
    assert " Allowed: " in sentence
    assert "\n" not in sentence
    assert "schema" not in sentence


def test_a_repair_of_no_stream_is_explained() -> None:
    """With the streams that there are; its other fields as those of a run."""
    for form, begins in (
        ({"stream": "order"}, "stream: there is no stream 'order'. Allowed: orders."),
        ({}, "stream: there is no stream None. Allowed: orders."),
        ({"stream": "orders", "partition": "x"}, "partition: found 'x'. Allowed: a place like"),
    ):
        assert explain_refusal("seriatim_repair", form, STREAMS).startswith(begins)


@pytest.mark.parametrize(
    "case",
    [
        {"path": "/api/v2/dags/of_others/dagRuns"},
        {"path": "/api/v2/dags/orders/dagRuns/r1/clear"},
        {"path": "/api/v2/connections"},
        {"method": "PATCH"},
        {"status": 200},
        {"status": 404},
        {"status": 422},
        {"body": b'{"conf": {"messages_max": 5}}'},
        {"body": b'{"conf": null}'},
        {"body": b"[]"},
        {"body": b"no JSON"},
        {"body": b" " * REQUEST_BYTES_MAX + b'{"conf": {"from": "-1"}}' + b" " * 9},
    ],
)
def test_everything_else_passes_as_it_is(case: dict[str, Any]) -> None:
    """Other addresses, other methods, other answers, and refusals about which we know nothing."""
    body = case.pop("body", b'{"conf": {"from": "-1"}}')
    application, sent = ask(body, **case)
    assert application.read == body
    assert body_of(sent) == SCHEMA_DUMP
    assert dict(sent[0]["headers"])[b"Content-Length"] == b"90"


def test_what_is_no_request_passes_as_well() -> None:
    """The start of the server, and web sockets."""
    assert ask(b"", kind="lifespan")[1] == []
