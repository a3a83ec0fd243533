"""`seriatim kafka` as a user types it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from seriatim import config
from seriatim.embedded import broker as embedded
from seriatim.embedded import jars


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose JARs are there already, copied from the real cache."""
    settings = config.load_settings()
    (tmp_path / "jars").mkdir()
    for file in jars.ensure_jars("kafka", settings, print):
        shutil.copy(file, tmp_path / "jars")
    yield tmp_path
    embedded.stop_broker(tmp_path, print)


def _kafka(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "seriatim", "kafka", *arguments],
        env=os.environ | {"SERIATIM_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_start_status_stop(home: Path) -> None:
    """A session at the terminal: started, found, found again, stopped, gone."""
    started = _kafka(home, "start", "--json", "--set", "log.retention.hours=1")
    assert started.returncode == 0, started.stderr
    info = json.loads(started.stdout)
    assert set(info) == {"bootstrap_servers", "pid", "data"}
    assert json.loads(_kafka(home, "status", "--json").stdout) == info
    assert f"bootstrap_servers {info['bootstrap_servers']}" in _kafka(home, "status").stdout
    again = _kafka(home, "start", "--json")
    assert json.loads(again.stdout) == info
    assert "already running" in again.stderr
    assert _kafka(home, "stop").stdout == "stopped\n"
    assert _kafka(home, "status").returncode == 4
