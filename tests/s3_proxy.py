"""A proxy before an S3 server: it counts requests, and makes trouble that a test asks for.

`S3Proxy` runs in a thread of the test. Delta's library keeps Python's lock while it waits for some
answers, so for tests with it there is `troubled_proxy`, which runs in a process of its own.
"""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

STALL_SECONDS = 5
TROUBLES = "lost,503,reset"
HOP_HEADERS = ("transfer-encoding", "connection", "content-length")
Trouble = Callable[[str, str], str]
"""What happens to a request, by its method and path: "lost" (its answer), "503", "reset" (before the
server sees it), "stall", or "" for nothing.
"""


def no_trouble(_: str, __: str) -> str:
    """Everything is passed on."""
    return ""


class S3Proxy:
    """A proxy on a port of its own. It runs within a `with` block."""

    def __init__(
        self, endpoint: str, trouble: Trouble = no_trouble, delay_seconds: float = 0.0
    ) -> None:
        self.backend = endpoint.removeprefix("http://")
        self.trouble = trouble
        self.delay_seconds = delay_seconds
        self.requests: list[tuple[str, str]] = []
        self.statuses: list[int] = []
        """What was answered, without requests that had trouble."""
        self.arrivals: list[float] = []
        """When each request came, on the monotonic clock."""
        self._server = _ProxyServer(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> S3Proxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def count(self, method: str = "", part: str = "") -> int:
        """How many requests had this method, and this text in their path."""
        return sum(method in seen and part in path for seen, path in self.requests)


class _ProxyServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    proxy: S3Proxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the trouble."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _ProxyServer

    def handle_request(self) -> None:
        """Pass one request on, unless there is trouble."""
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy.requests.append((self.command, self.path))
        proxy.arrivals.append(time.monotonic())
        trouble = proxy.trouble(self.command, self.path)
        time.sleep(proxy.delay_seconds)
        if trouble == "503":
            self._answer(503, [], b"")
            return
        if trouble == "reset":
            self._hang_up()
            return
        if trouble == "stall":
            time.sleep(STALL_SECONDS)
        backend = http.client.HTTPConnection(proxy.backend, timeout=60)
        backend.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            backend.putheader(name, value)
        backend.endheaders(body or None)
        answer = backend.getresponse()
        content = answer.read()
        headers = answer.getheaders()
        backend.close()
        if trouble == "lost":
            self._hang_up()
            return
        proxy.statuses.append(answer.status)
        self._answer(answer.status, headers, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request  # noqa: N815

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response(status)
        length = str(len(content))
        for name, value in headers:
            if name.lower() not in HOP_HEADERS:
                self.send_header(name, value)
            elif name.lower() == "content-length" and self.command == "HEAD":
                length = value
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


class ProxyProcess:
    """A proxy in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], endpoint: str) -> None:
        self._process = process
        self.endpoint = endpoint
        self.arrivals: list[float] = []
        """When the requests came that were taken last."""

    def take_requests(self) -> list[tuple[str, str]]:
        """Method and path of the requests since the last call. A listing has the method LIST."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        taken = json.loads(self._process.stdout.readline())
        self.arrivals = taken["arrivals"]
        return [(method, path) for method, path in taken["requests"]]


@contextmanager
def proxy_process(
    endpoint: str,
    trouble_share: float = 0.0,
    seed: int = 0,
    *,
    stalls: bool = False,
    delay_seconds: float = 0.0,
) -> Iterator[ProxyProcess]:
    """A proxy in a process of its own, in which this share of requests has trouble. With `stalls` some
    take five seconds. Every request takes `delay_seconds` longer.
    """
    kinds = f"{TROUBLES},stall" if stalls else TROUBLES
    arguments = ["-m", "tests.s3_proxy", endpoint]
    arguments += [str(trouble_share), str(seed), kinds, str(delay_seconds)]
    root = Path(__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield ProxyProcess(process, process.stdout.readline().strip())
        finally:
            # Its input ends.
            process.communicate()


@contextmanager
def troubled_proxy(endpoint: str, trouble_share: float, seed: int) -> Iterator[str]:
    """A proxy in a process of its own, in which this share of requests has trouble; its endpoint."""
    with proxy_process(endpoint, trouble_share, seed) as proxy:
        yield proxy.endpoint


def _serve(
    endpoint: str, trouble_share: float, seed: int, kinds: str, delay_seconds: float
) -> None:
    """Be a proxy until the input ends. For each line of it, write the requests since the last one."""
    dice = random.Random(seed)

    def make_trouble(_: str, __: str) -> str:
        if dice.random() >= trouble_share:
            return ""
        return dice.choice(kinds.split(","))

    with S3Proxy(endpoint, make_trouble, delay_seconds) as proxy:
        sys.stdout.write(f"{proxy.endpoint}\n")
        sys.stdout.flush()
        for _ in sys.stdin:
            requests, arrivals = proxy.requests, proxy.arrivals
            proxy.requests, proxy.arrivals = [], []
            named = [(_request_kind(method, path), path) for method, path in requests]
            sys.stdout.write(f"{json.dumps({'requests': named, 'arrivals': arrivals})}\n")
            sys.stdout.flush()


def _request_kind(method: str, path: str) -> str:
    return "LIST" if method == "GET" and "list-type=2" in path else method


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
