"""Ends what a test run has started, if the run itself is killed.

A killed pytest stops nothing: its broker, S3 server and Spark would go on for ever. So the run
starts this module as a process of its own, and holds a pipe to it. When the pipe closes and the run
has not said that it is done, every process of the run is killed. They are known by a variable of
their environment, which each process hands down to those that it starts.

Next: conftest.py starts and ends it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import psutil

RUN_VARIABLE = "SERIATIM_TESTS_RUN"
DONE = b"done"
ROUNDS = 3
"""A process may start another one while the others are killed."""


def start_guard(run_id: str, folder: str) -> subprocess.Popen[bytes]:
    """Start the guard of a run. `folder` is deleted, too."""
    environ = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
    return subprocess.Popen(
        [sys.executable, __file__, run_id, folder],
        stdin=subprocess.PIPE,
        env=environ,
        # What kills the run by its process group must not reach the guard.
        start_new_session=True,
    )


def dismiss_guard(guard: subprocess.Popen[bytes]) -> None:
    """End the guard: the run has stopped everything by itself."""
    guard.communicate(DONE)


def processes_of_run(run_id: str) -> list[psutil.Process]:
    """The living processes that a run has started."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) == run_id:
                processes.append(process)
        except (psutil.Error, OSError):
            continue  # it has just ended, or is somebody else's
    return processes


def main() -> None:
    """Wait for the end of the run; kill what is left of a run that did not say goodbye."""
    run_id, folder = sys.argv[1:]
    if sys.stdin.buffer.read() == DONE:
        return
    for _ in range(ROUNDS):
        for process in processes_of_run(run_id):
            process.kill()
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
