"""A test run that is killed leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.leftovers import RUN_VARIABLE, dismiss_guard, start_guard

ROOT = Path(__file__).parent.parent
WAIT_SECONDS = 120
SLEEPER = "import time; time.sleep(600)"
TEST = f"""
import subprocess, sys, time
from pathlib import Path

def test_that_never_ends():
    sleeper = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
    Path(__file__).with_name("pid").write_text(str(sleeper.pid))
    time.sleep(600)
"""


def start_sleeper(run_id: str) -> subprocess.Popen[bytes]:
    """A process of a run."""
    return subprocess.Popen(
        [sys.executable, "-c", SLEEPER], env=os.environ | {RUN_VARIABLE: run_id}
    )


def test_the_guard_kills_the_processes_of_its_run_alone(tmp_path: Path) -> None:
    """And deletes the folder of the run. A run that is done is left in peace."""
    sleeper, stranger = start_sleeper("this run"), start_sleeper("another run")
    try:
        folder = tmp_path / "home"
        folder.mkdir()
        dismiss_guard(start_guard("this run", str(folder)))
        assert sleeper.poll() is None
        assert folder.exists()
        guard = start_guard("this run", str(folder))
        assert guard.stdin
        guard.stdin.close()
        assert guard.wait(WAIT_SECONDS) == 0
        assert sleeper.wait(WAIT_SECONDS) == -signal.SIGKILL
        assert stranger.poll() is None
        assert not folder.exists()
    finally:
        for process in (sleeper, stranger):
            process.kill()
            process.wait()


def test_what_a_killed_pytest_started_ends_with_it(tmp_path: Path) -> None:
    """Also a process in a session of its own, as embedded servers are."""
    (tmp_path / "test_endless.py").write_text(TEST)
    arguments = ["-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=tmp_path,
        env=environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    try:
        pid_file = tmp_path / "pid"
        deadline = time.monotonic() + WAIT_SECONDS
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < deadline, "the test has not begun"
            time.sleep(0.1)
        sleeper = psutil.Process(int(pid_file.read_text()))
    finally:
        run.kill()
        run.wait()
    try:
        sleeper.wait(WAIT_SECONDS)
    finally:
        with suppress(psutil.NoSuchProcess):
            sleeper.kill()
