"""`seriatim s3` as a user types it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from seriatim import config
from seriatim.embedded import jars, s3
from seriatim.storage.object_store import ObjectStore, store_options


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose JAR is there already, copied from the real cache."""
    (tmp_path / "jars").mkdir()
    for file in jars.ensure_jars("s3", config.load_settings(), print):
        shutil.copy(file, tmp_path / "jars")
    yield tmp_path
    s3.stop_s3_server(tmp_path, print)


def _s3(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "seriatim", "s3", *arguments],
        env=os.environ | {"SERIATIM_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def _store(home: Path) -> ObjectStore:
    """The store that a shell finds by the printed variables."""
    exports = _s3(home, "env").stdout.splitlines()
    assert all(line.startswith("export AWS_") for line in exports)
    variables = [shlex.split(line)[1].split("=", 1) for line in exports]
    return ObjectStore("s3://seriatim/x", store_options(dict(variables)))


def test_start_status_env_stop(home: Path) -> None:
    """A session at the terminal. Objects stay, and the next start has the same port and secret."""
    started = _s3(home, "start", "--json")
    assert started.returncode == 0, started.stderr
    server = json.loads(started.stdout)
    assert set(server) == {"endpoint", "bucket", "pid"}
    assert json.loads(_s3(home, "status", "--json").stdout) == server
    store = _store(home)
    store.create("kept", b"1")
    secret = s3.s3_environment(home)["AWS_SECRET_ACCESS_KEY"]
    assert secret not in Path(f"/proc/{server['pid']}/cmdline").read_text()
    assert (home / "s3" / "server.properties").stat().st_mode & 0o777 == 0o600
    assert _s3(home, "start", "--port", "1").returncode == 2

    assert _s3(home, "stop").stdout == "stopped\n"
    assert _s3(home, "stop").stdout == "no S3 server was running\n"
    assert _s3(home, "env").returncode == 4
    status = _s3(home, "status", "--json")
    assert status.returncode == 4
    assert json.loads(status.stdout) == {"endpoint": None, "bucket": None, "pid": None}

    assert json.loads(_s3(home, "start", "--json").stdout)["endpoint"] == server["endpoint"]
    assert _store(home).read("kept") == b"1"
