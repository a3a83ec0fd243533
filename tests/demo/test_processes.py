"""What a demo started is found again and ended, and nothing else is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from seriatim.demo import processes, stage
from seriatim.demo.processes import MARK_VARIABLE, DemoPorts, DemoRecord
from seriatim.errors import ConfigError

# A test run that was started in the background by a script ignores SIGINT, and so would its children.
SLEEP = (
    "import time, signal; signal.signal(signal.SIGINT, signal.SIG_DFL);"
    " print('up', flush=True); time.sleep(600)"
)
STUBBORN = SLEEP.replace("SIG_DFL", "SIG_IGN")
CHILD_SURVIVES = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    " start_new_session=True); print('up', flush=True)"
)
HOLDS_LOCK = """
import signal, sys, time
from pathlib import Path
from seriatim.demo.processes import DemoPorts, DemoRecord, demo_lock, write_record
folder = Path(sys.argv[1])
with demo_lock(folder):
    write_record(folder, DemoRecord.of_this_process("mark", DemoPorts()))
    print("up", flush=True)
    time.sleep(600)
"""
UNDER_MAKE = """
import time
from seriatim.demo import stage
stage.catch_signals()
try:
    print("up", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("ends in good order", flush=True)
"""
TEST_MARK_VARIABLE = "TEST_OF_DEMO_PROCESSES"
"""The environment variable by which a test finds everything that it has started."""
WAIT_SECONDS = 120.0
"""How long a test waits for a process to end before it fails."""
MAKEFILE = """
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
demo:
	@{python} {program}
"""


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that a test starts. All of them, and all that they started, are killed after it."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(TEST_MARK_VARIABLE, mark)
    started: list[subprocess.Popen[bytes]] = []
    yield started
    # What outlives its parent is no child of ours any more, so it is found by what it inherited.
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(TEST_MARK_VARIABLE) == mark and process.pid != os.getpid():
                process.kill()
    for process in started:
        process.wait(WAIT_SECONDS)
        if process.stdout is not None:
            process.stdout.close()


def start(
    children: list[subprocess.Popen[bytes]], code: str, mark: str = "", *arguments: str
) -> subprocess.Popen[bytes]:
    """A Python process with a mark, as soon as it is up."""
    environ = {**os.environ, MARK_VARIABLE: mark}
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)
    children.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def record(pid: int, started_seconds: float, mark: str) -> DemoRecord:
    """A demo of which one process is known."""
    return DemoRecord(pid=pid, started_seconds=started_seconds, mark=mark)


def test_only_what_has_the_mark_is_ended(
    children: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also what ignores SIGINT, and what outlived its parent in a session of its own. A process of
    another demo stays.
    """
    monkeypatch.setattr(processes, "GRACE_SECONDS", 1.0)
    mark = f"test-{os.getpid()}"
    ours = [start(children, SLEEP, mark), start(children, STUBBORN, mark)]
    start(children, CHILD_SURVIVES, mark).wait(WAIT_SECONDS)
    other = start(children, SLEEP, "another")
    assert len(processes.marked_processes(mark)) == 3
    processes.end_marked_processes(mark)
    assert processes.marked_processes(mark) == []
    assert [process.wait(WAIT_SECONDS) for process in ours] == [-signal.SIGINT, -signal.SIGKILL]
    assert other.poll() is None


def test_an_id_that_was_used_again_is_not_the_demo(children: list[subprocess.Popen[bytes]]) -> None:
    """The start time says whether it is the same process."""
    process = start(children, SLEEP)
    created = psutil.Process(process.pid).create_time()
    assert record(process.pid, created, "m").process() is not None
    assert record(process.pid, created - 60, "m").process() is None
    process.kill()
    process.wait(WAIT_SECONDS)
    assert record(process.pid, created, "m").process() is None


def test_a_demo_that_was_killed_leaves_nothing_after_the_next_start(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    """Its record has the mark of what it left; each of them is named with id and command."""
    mark = f"left-{os.getpid()}"
    left = start(children, SLEEP, mark)
    processes.write_record(tmp_path, record(1, 0.0, mark))
    lines: list[str] = []
    assert processes.end_leftovers(tmp_path, lines.append)
    assert left.wait(WAIT_SECONDS) == -signal.SIGINT
    assert any(f"pid {left.pid} (" in line and "import time" in line for line in lines)
    assert not processes.end_leftovers(tmp_path, lines.append)


def test_a_command_is_shown_without_the_folder_of_its_program(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    """A long path of the interpreter does not push the arguments out of what is shown."""
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    program = folder / "python"
    program.symlink_to(sys.executable)
    process = subprocess.Popen([str(program), "-c", SLEEP], stdout=subprocess.PIPE)
    children.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    description = processes.describe_process(psutil.Process(process.pid))
    assert description.startswith(f"pid {process.pid} (python -c import time, signal;")


def test_a_title_is_shown_without_the_spaces_behind_it(
    children: list[subprocess.Popen[bytes]],
) -> None:
    """Airflow's processes change their titles, and fill what is left of the old one with spaces."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEP, "worker --" + " " * 300, ""], stdout=subprocess.PIPE
    )
    children.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    description = processes.describe_process(psutil.Process(process.pid))
    assert "  " not in description
    assert description.endswith(("worker --)", "…)"))


def test_a_second_demo_is_refused_with_the_first_ones_id_and_command(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    """And `make demo-stop` ends that one: what it started, it ends by itself."""
    first = start(children, HOLDS_LOCK, "", str(tmp_path))
    with pytest.raises(ConfigError) as refused, processes.demo_lock(tmp_path):
        pass
    assert f"pid {first.pid} (" in refused.value.message
    assert "make demo-stop" in refused.value.next
    assert stage.stop_demo(tmp_path) == 0
    assert first.wait(WAIT_SECONDS) == -signal.SIGTERM
    assert not processes.is_demo_running(tmp_path)


def test_stop_without_a_demo_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the folder in which it looked; also when the record of one cannot be read."""
    assert stage.stop_demo(tmp_path) == 0
    assert f"no demo runs in {tmp_path}" in capsys.readouterr().out
    (tmp_path / processes.RECORD_FILE).write_text("{")
    assert stage.stop_demo(tmp_path) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the signals of a process")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_make_alone_ends_the_demo(
    tmp_path: Path, children: list[subprocess.Popen[bytes]], number: int
) -> None:
    """GNU make passes SIGTERM on, but at SIGHUP it only waits for its children."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        pytest.skip("this test run ignores SIGHUP (nohup), and so would the demo")
    program = tmp_path / "program.py"
    program.write_text(UNDER_MAKE)
    makefile = tmp_path / "Makefile"
    makefile.write_text(MAKEFILE.format(python=sys.executable, program=program))
    # `make test` hands its own level and flags down, and then this make would print its folder, too.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", "-f", str(makefile)]
    make = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)
    children.append(make)
    assert make.stdout is not None
    assert make.stdout.readline() == b"up\n"
    make.send_signal(number)
    rest, _ = make.communicate(timeout=WAIT_SECONDS)
    assert rest == b"ends in good order\n"


def test_a_port_that_is_taken_is_named_with_who_has_it() -> None:
    """And how to choose others."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            processes.refuse_taken_ports(DemoPorts(port, port, port))
    assert f"port {port} of 127.0.0.1 is taken by pid {os.getpid()} (" in refused.value.message
    assert "make demo PORT=" in refused.value.next


def test_a_record_survives_a_restart(tmp_path: Path) -> None:
    """It is read as it was written."""
    written = DemoRecord.of_this_process("mark", DemoPorts.beginning_at(9000))
    processes.write_record(tmp_path, written)
    assert processes.read_record(tmp_path) == written
    assert (written.ports.airflow, written.ports.mail, written.ports.page) == (9000, 9001, 9002)
    assert (
        msgspec.json.decode((tmp_path / processes.RECORD_FILE).read_bytes())["pid"] == os.getpid()
    )
