"""The whole demo, as `make demo` runs it: ready when Airflow answers, gone when it ends, however it
ends. Long, so for `make test-full`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from seriatim import config
from seriatim.demo import processes, stage
from seriatim.demo.processes import DemoPorts, read_record
from seriatim.embedded import broker
from seriatim.embedded.server_process import is_port_free

pytestmark = pytest.mark.full
END_SECONDS = 600.0
"""A demo that has not ended after this time will not end any more."""


class Demo:
    """A demo with a home and ports of its own."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "demo"
        self.ports = three_free_ports()
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AIRFLOW", "SERIATIM"))
        }
        self.environment["SERIATIM_HOME"] = str(home)
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> str:
        """Start it, and read what it prints until it is ready, or has ended."""
        command = [sys.executable, "-m", "seriatim.demo.stage", "up"]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.ports.airflow)],
            env=self.environment,
            cwd=self.folder.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if "the next `make demo` goes on from here" in line:
                break
        return "".join(lines)

    def end(self, number: int) -> int:
        """Send the demo a signal; how it ended."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(END_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def three_free_ports() -> DemoPorts:
    """Three ports in a row that are free now."""
    while True:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        if first < 65_000 and all(map(is_port_free, range(first, first + 3))):
            return DemoPorts.beginning_at(first)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    """A demo; all of it is ended after the test."""
    (tmp_path / "jars").symlink_to(config.load_settings().home / "jars")
    made = Demo(tmp_path)
    try:
        yield made
    finally:
        if made.process is not None:
            made.process.kill()
            made.process.wait()
        processes.end_leftovers(made.folder, lambda _: None)


def test_it_is_ready_when_it_says_so_and_nothing_is_left_of_it(demo: Demo) -> None:
    """First it is killed, and the next start ends what was left; then its terminal is closed."""
    told = demo.start()
    assert "ready after" in told
    assert f"streams   {demo.folder / 'streams'}" in told
    assert stage.is_airflow_ready(demo.ports)
    first = read_record(demo.folder)
    assert first is not None
    assert processes.marked_processes(first.mark)

    assert demo.end(signal.SIGKILL) == -signal.SIGKILL
    assert "ready after" in demo.start()
    assert processes.marked_processes(first.mark) == []
    second = read_record(demo.folder)
    assert second is not None
    assert processes.marked_processes(second.mark)

    assert demo.end(signal.SIGHUP) == 0
    assert processes.marked_processes(second.mark) == []
    assert broker.broker_status(demo.folder) is None
    assert is_port_free(demo.ports.airflow)
    assert not processes.end_leftovers(demo.folder, print)
