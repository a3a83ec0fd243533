"""`seriatim cluster` as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from seriatim.cli import cluster as cluster_command
from seriatim.embedded import cluster
from seriatim.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose cluster is stopped at the end."""
    yield tmp_path
    cluster.stop_cluster(tmp_path, print)


def _cluster(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "seriatim", "cluster", *arguments],
        env=os.environ | {"SERIATIM_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_start_status_stop(home: Path) -> None:
    """A session at the terminal: a killed worker is started again, fewer workers than run are
    refused, and nothing is left after stop.
    """
    started = _cluster(home, "start", "--workers", "2", "--memory", "1g", "--json")
    assert started.returncode == 0, started.stderr
    running = json.loads(started.stdout)
    assert running["master"].startswith("spark://127.0.0.1:")
    assert [worker["host"] for worker in running["workers"]] == ["127.0.0.1", "127.0.0.1"]
    assert json.loads(_cluster(home, "status", "--json").stdout) == running

    killed, kept = [psutil.Process(worker["pid"]) for worker in running["workers"]]
    killed.kill()
    killed.wait(120)
    left = json.loads(_cluster(home, "status", "--json").stdout)
    assert [worker["pid"] for worker in left["workers"]] == [kept.pid]
    again = json.loads(_cluster(home, "start", "--json").stdout)
    assert again["master"] == running["master"]
    assert len(again["workers"]) == 2
    refused = _cluster(home, "start", "--workers", "1")
    assert refused.returncode == 2
    assert "already running with 2 workers" in refused.stderr

    assert _cluster(home, "stop").stdout == "stopped\n"
    assert not kept.is_running()
    assert _cluster(home, "stop").stdout == "no Spark cluster was running\n"
    status = _cluster(home, "status", "--json")
    assert status.returncode == 4
    assert json.loads(status.stdout) == {"master": None, "workers": None}


@pytest.mark.parametrize("memory", ["1024", "lots", "0g", "2 g", "1.5g", ""])
def test_a_memory_that_is_no_size_starts_nothing(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would start the master, and then refuse each worker."""

    def start_cluster(*_: object) -> None:
        raise AssertionError("the master was started")

    monkeypatch.setattr(cluster_command, "start_cluster", start_cluster)
    with pytest.raises(ConfigError, match="is no size") as refused:
        cluster_command.start(workers=1, cores=1, memory=memory)
    assert refused.value.next == "like 2g or 1500m"
    with pytest.raises(AssertionError, match="started"):
        cluster_command.start(workers=1, cores=1, memory="1500m")
