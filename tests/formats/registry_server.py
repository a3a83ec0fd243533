"""A schema registry for tests: a real HTTP server in this process, with schemas in memory, that can be
told to fail.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class RegistryServer:
    """Answers as Confluent's registry does, for the questions that we ask."""

    def __init__(self, port: int = 0) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        """What is at each path."""
        self.paths_asked: list[str] = []
        self.authorizations: list[str | None] = []
        self.statuses: list[int] = []
        """The statuses of the next answers, before it answers as it should."""
        self.is_cut_off = False
        """Whether an answer ends before the length that it announces."""
        self.content: bytes | None = None
        """What is answered in place of a schema."""
        handler = type("Handler", (_Handler,), {"registry": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def put(self, schema_id: int, schema: Any, **more: Any) -> None:
        """Register a schema under an id."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        self.answers[f"/schemas/ids/{schema_id}"] = {"schema": text, **more}

    def put_version(self, subject: str, version: int, schema: Any, **more: Any) -> None:
        """Register a schema that others refer to."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        path = f"/subjects/{subject}/versions/{version}"
        self.answers[path] = {"schema": text, "subject": subject, "version": version, **more}

    @contextmanager
    def running(self) -> Iterator[RegistryServer]:
        """The server while it serves."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    registry: RegistryServer

    def do_GET(self) -> None:
        """Answer a question for a schema."""
        registry = self.registry
        registry.paths_asked.append(self.path)
        registry.authorizations.append(self.headers.get("Authorization"))
        status = registry.statuses.pop(0) if registry.statuses else 200
        answer = registry.answers.get(self.path)
        if status == 200 and answer is None:
            status = 404
        content = b'{"error_code":40403,"message":"Schema not found"}'
        if status == 200:
            content = registry.content or json.dumps(answer).encode()
        self.send_response(status)
        if status in (301, 302):
            self.send_header("Location", f"{registry.url}/elsewhere")
        if registry.is_cut_off:
            # In chunks: the client cannot know where a text ends that announces its length wrongly.
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n" % len(content) + content[:5])
            return
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""
