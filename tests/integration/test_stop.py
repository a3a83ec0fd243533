"""Ctrl-C and SIGTERM in mid-run, and a state that is newer than the code. Real processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.integration.lab import Lab
from tests.integration.test_slices import tables


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_one_line(
    lab: Lab, topic: Callable[..., str], number: signal.Signals
) -> None:
    """No stack traces and no noise of Java's: what happened, and the exit code that shells expect."""
    name = topic(2)
    lab.send(tables({name: 2}, 50, 60_000))
    stream = lab.stream("stopped", name)
    process = lab.start("run", stream, "--messages-max", "1000")
    until = time.monotonic() + 300
    store = lab.store(stream)
    while not any(key.endswith(".parquet") for key, _ in store.keys("records/")):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(number)
    output, errors = process.communicate(timeout=600)

    assert (process.returncode, output) == (128 + number, "")
    *notices, last_line = errors.splitlines()
    assert last_line == "stopped: stopped; run again goes on from the last commit"
    assert all(notice.startswith("stopped: Kafka is read by the tasks") for notice in notices)
    assert len(notices) <= 1


@pytest.mark.parametrize("command", [("plan",), ("state",)])
def test_another_machine_may_not_look(
    lab: Lab, topic: Callable[..., str], command: tuple[str]
) -> None:
    """`plan` and `state` refuse what `run` would refuse: exit 2, and what to do."""
    name = topic(1)
    lab.send(tables({name: 1}, 2, 20))
    stream = lab.stream("looked", name)
    lab.fold(stream)
    (lab.folder / "streams" / "mine.py").write_text(MACHINE)
    lab.stream("looked", name, {"machine": "mine:Mine"})

    ended = lab.command(*command, stream, *(["s0"] if command == ("state",) else []))

    assert ended.returncode == 2, ended.stderr
    assert "was written by machine 'table'" in ended.stderr


MACHINE = """
from msgspec import Struct
from seriatim import Machine

class Any(Struct):
    pass

class Mine(Machine[Any, Any, Any]):
    def start(self, session): return Any()
    def is_snapshot(self, message): return True
    def apply(self, state, message): return ()
"""
