"""A bucket that cannot be used, as a user meets it: one clear sentence with what to do, the right exit
code, and the secret nowhere.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from seriatim import context, stream_files
from seriatim.context import SparkFoldTask, WorkTable
from seriatim.web.read import PageReader

CANARY = "canary0secret0of0a0bucket"
STREAM = """
topics = "in-.*"
machine = "table"
table = {key = ["id"], columns = {id = "string"}}
output = {path = "ADDRESS"}
"""


class _Denying(BaseHTTPRequestHandler):
    """A server that knows who asks, and does not allow it."""

    def answer(self) -> None:
        """Refuse anything."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b"<Error><Code>AccessDenied</Code></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


@pytest.fixture
def denying_endpoint() -> Iterator[str]:
    """The address of a server that allows nothing."""
    server = HTTPServer(("127.0.0.1", 0), _Denying)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def _write_stream(folder: Path, address: str) -> None:
    (folder / "streams").mkdir()
    (folder / "streams" / "s.toml").write_text(STREAM.replace("ADDRESS", address))


def _command(
    folder: Path, variables: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "SERIATIM_STORE_"))
    }
    environment |= variables
    environment["SERIATIM_STREAMS"] = str(folder / "streams")
    # Nobody listens there: a command that asked Kafka first would say so.
    environment["SERIATIM_KAFKA_BOOTSTRAP_SERVERS"] = "127.0.0.1:1"
    return subprocess.run(
        [sys.executable, "-m", "seriatim", *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def _expect(
    ended: subprocess.CompletedProcess[str], exit_code: int, message: str, advice: str
) -> None:
    printed = ended.stdout + ended.stderr
    assert ended.returncode == exit_code, printed
    assert "Traceback" not in printed
    assert CANARY not in printed
    told = json.loads(ended.stderr.splitlines()[-1])
    assert message in json.dumps(told)
    assert advice in json.dumps(told)


def test_a_wrong_secret_is_said_before_anything_is_read(
    tmp_path: Path, s3_url: str, s3_variables: dict[str, str]
) -> None:
    """Exit code 2, whichever command meets it first."""
    _write_stream(tmp_path, s3_url)
    variables = {**s3_variables, "AWS_SECRET_ACCESS_KEY": CANARY}
    for command in (("run", "s"), ("verify", "s")):
        ended = _command(tmp_path, variables, *command, "--json")
        _expect(ended, 2, "does not accept the credentials", "AWS_SECRET_ACCESS_KEY")


def test_a_missing_bucket_is_said(tmp_path: Path, s3_variables: dict[str, str]) -> None:
    """Exit code 2: it is not an empty one."""
    _write_stream(tmp_path, "s3://no-such-bucket/x")
    ended = _command(tmp_path, s3_variables, "run", "s", "--json")
    _expect(ended, 2, "there is no such bucket", "create the bucket")


def test_missing_rights_are_said(tmp_path: Path, denying_endpoint: str) -> None:
    """Exit code 2, with the actions that are needed."""
    _write_stream(tmp_path, "s3://bucket/x")
    variables = {
        "AWS_ENDPOINT_URL": denying_endpoint,
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": CANARY,
    }
    ended = _command(tmp_path, variables, "run", "s", "--json")
    _expect(ended, 2, "do not allow this", "s3:PutObject")


@pytest.mark.full
def test_a_dead_endpoint_is_platform_trouble(tmp_path: Path) -> None:
    """Exit code 4, after some tries: it may be there again soon."""
    _write_stream(tmp_path, "s3://bucket/x")
    variables = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": CANARY,
    }
    ended = _command(tmp_path, variables, "run", "s", "--json")
    _expect(ended, 4, "cannot be reached", "AWS_ENDPOINT_URL")


def test_the_secret_is_in_no_page_task_or_text(
    tmp_path: Path, denying_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent to workers, what the page shows of a stream that cannot be read, and how a store
    is written in a log.
    """
    monkeypatch.setenv("AWS_ENDPOINT_URL", denying_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    _write_stream(tmp_path, "s3://bucket/x")
    file = stream_files.load_stream("s", tmp_path / "streams")
    task = SparkFoldTask(file, WorkTable.of_works({}), {"bootstrap.servers": "x"})
    assert CANARY.encode() not in pickle.dumps(task)
    store = context.output_store(file)
    assert CANARY.encode() not in pickle.dumps(store)
    assert CANARY not in repr(store)
    status = PageReader(tmp_path / "streams", lambda: 0.0).stream_status("s")
    assert "do not allow this" in status.trouble
    assert CANARY not in repr(status)
