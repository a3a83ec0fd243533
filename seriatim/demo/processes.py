"""What a demo has started: how it is recorded, found again, and ended.

A demo writes down its process and a mark of its own before it starts anything. Everything that Airflow
starts inherits the mark in its environment, so it is found also after the demo itself was killed. The
broker and the S3 server have data folders that only the demo uses. Nothing is ever found by its name,
and nothing is ended that the demo did not start.

Next: demo/stage.py starts the processes; embedded/broker.py and embedded/s3.py find and end them.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from seriatim.embedded import broker, s3, server_process
from seriatim.errors import ConfigError, PlatformError

LOCK_FILE = "lock"
RECORD_FILE = "started.json"
MARK_VARIABLE = "DEMO_OF_SERIATIM"
"""The environment variable with the mark of the demo that a process belongs to."""
GRACE_SECONDS = 20.0
"""How long Airflow may take to end before its processes are killed."""
STOP_SECONDS = 120.0
"""How long `make demo-stop` waits for a demo that ends by itself."""
COMMAND_SHOWN_MAX = 80
MAKE_PROGRAMS = ("make", "gmake")
MAKE_LOOKED_AT_EVERY_SECONDS = 0.5
START_TOLERANCE_SECONDS = 1.0
"""The start time of a process is known to about a hundredth of a second."""

PrintLine = Callable[[str], None]


class DemoPorts(Struct, frozen=True):
    """Where the parts of a demo listen, on 127.0.0.1."""

    airflow: int = 8080
    mail: int = 8025
    page: int = 8026

    @classmethod
    def beginning_at(cls, port: int) -> DemoPorts:
        """Three ports in a row."""
        return cls(port, port + 1, port + 2)


class DemoRecord(Struct, frozen=True, kw_only=True):
    """A demo that was started."""

    pid: int
    started_seconds: float
    """When the process began. Its id alone does not identify it: ids are used again."""
    mark: str
    ports: DemoPorts = DemoPorts()

    @classmethod
    def of_this_process(cls, mark: str, ports: DemoPorts) -> DemoRecord:
        """The record of a demo that this process runs."""
        process = psutil.Process()
        return cls(pid=process.pid, started_seconds=process.create_time(), mark=mark, ports=ports)

    def process(self) -> psutil.Process | None:
        """The process of the demo; None if it has ended."""
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.started_seconds) < START_TOLERANCE_SECONDS
        except psutil.Error:
            return None
        return process if is_same and _is_running(process) else None


def write_record(folder: Path, record: DemoRecord) -> None:
    """Write down a demo that is about to start its processes."""
    scratch = folder / f"{RECORD_FILE}.new"
    scratch.write_bytes(msgspec.json.encode(record))
    scratch.replace(folder / RECORD_FILE)


def read_record(folder: Path) -> DemoRecord | None:
    """The last demo that was started in this folder; None if there was none."""
    try:
        return msgspec.json.decode((folder / RECORD_FILE).read_bytes(), type=DemoRecord)
    except (OSError, msgspec.MsgspecError):
        return None


@contextmanager
def demo_lock(
    folder: Path, next: str = "make demo-stop ends it; then make demo again"
) -> Iterator[None]:
    """Hold a lock while the demo runs. The operating system releases it, however the demo ends. `next`
    is said to whoever starts a second one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _already_running_error(folder, next) from None
        yield


def _already_running_error(folder: Path, next: str) -> ConfigError:
    record = read_record(folder)
    process = record.process() if record else None
    runner = f", {describe_process(process)}" if process else ""
    return ConfigError(
        f"a demo runs here already{runner}",
        folder=str(folder),
        next=next,
    )


def is_demo_running(folder: Path) -> bool:
    """Whether a demo runs in this folder."""
    try:
        with (folder / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def stop_running_demo(folder: Path, print_line: PrintLine) -> bool:
    """Ask a demo that runs to end, and wait until it has. Returns whether there was one."""
    if not is_demo_running(folder):
        return False
    record = read_record(folder)
    process = record.process() if record else None
    if process is None:
        raise PlatformError(
            f"a demo runs, but {folder / RECORD_FILE} does not say which process it is",
            next="Ctrl-C in its terminal",
        )
    print_line(f"ending the demo, {describe_process(process)} …")
    process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    while is_demo_running(folder):
        if time.monotonic() > deadline:
            raise PlatformError(
                f"the demo does not end: {describe_process(process)}",
                next=f"kill -9 {process.pid}, then make demo-stop, which ends what it left",
            )
        time.sleep(0.2)
    return True


def marked_processes(mark: str) -> list[psutil.Process]:
    """All processes that were started below a demo, by the mark in their environment."""
    processes = []
    for process in psutil.process_iter():
        # Processes of other users do not show their environment. None of them is ours.
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK_VARIABLE) == mark and _is_running(process):
                processes.append(process)
    return processes


def end_marked_processes(mark: str) -> None:
    """End all processes of a demo: with SIGINT first, with SIGKILL if that does not help.

    SIGINT, because Airflow passes it on to its parts, and ends without a word at SIGTERM.
    """
    _send_to_all(marked_processes(mark), signal.SIGINT)
    deadline = time.monotonic() + GRACE_SECONDS
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    # A process may start another one while it ends, so it is looked again after each round.
    while remaining := marked_processes(mark):
        _send_to_all(remaining, signal.SIGKILL)
        time.sleep(0.1)


def end_leftovers(folder: Path, print_line: PrintLine) -> bool:
    """End what a demo that was killed has left running. Returns whether there was anything.

    The caller holds the lock, or knows that no demo runs.
    """
    record = read_record(folder)
    leftovers = marked_processes(record.mark) if record else []
    if leftovers:
        print_line("a demo that was killed left these running; ending them:")
        for process in leftovers:
            print_line(f"  {describe_process(process)}")
        end_marked_processes(record.mark if record else "")
    running_broker = broker.broker_status(folder)
    if running_broker is not None:
        print_line(f"ending the demo's broker, pid {running_broker.pid}")
        broker.stop_broker(folder, print_line)
    running_s3_server = s3.s3_server_status(folder)
    if running_s3_server is not None:
        print_line(f"ending the demo's S3 server, pid {running_s3_server.pid}")
        s3.stop_s3_server(folder, print_line)
    has_servers = running_broker is not None or running_s3_server is not None
    return bool(leftovers) or has_servers


def describe_process(process: psutil.Process) -> str:
    """The id and the command line of a process, for people."""
    try:
        words = process.cmdline() or [process.name()]
    except psutil.Error:
        return f"pid {process.pid}"
    # The folder of the program would take the room of the arguments, which tell more. A process that
    # changed its title has filled the rest of it with spaces.
    command = " ".join(" ".join([Path(words[0]).name, *words[1:]]).split())
    if len(command) > COMMAND_SHOWN_MAX:
        command = f"{command[:COMMAND_SHOWN_MAX]}…"
    return f"pid {process.pid} ({command})"


def refuse_taken_ports(ports: DemoPorts) -> None:
    """Refuse to start if a port is taken, and say by which process, if this user may know that."""
    for port in (ports.airflow, ports.mail, ports.page):
        if server_process.is_port_free(port):
            continue
        holder = _port_holder(port)
        by_whom = f" by {describe_process(holder)}" if holder else ""
        raise ConfigError(
            f"port {port} of 127.0.0.1 is taken{by_whom}",
            next="end what listens there, or choose three ports in a row: make demo PORT=18080",
        )


def _port_holder(port: int) -> psutil.Process | None:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return process
    return None


def _send_to_all(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        # psutil refuses to signal another process that got the same id meanwhile.
        with suppress(psutil.Error):
            process.send_signal(number)


def _is_running(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie does not: it only waits for its parent to read its code."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def die_with_parent_process() -> None:
    """Ask for SIGTERM when the parent (`make`, or a shell) ends, even by SIGKILL, and when it is
    `make` and was told to end.
    """
    parent_id = os.getppid()
    if parent_id <= 1:
        return
    server_process.signal_when_parent_ends(signal.SIGTERM)
    with suppress(psutil.Error):
        is_make = psutil.Process(parent_id).name() in MAKE_PROGRAMS
        if is_make and _catches_signal(parent_id, signal.SIGHUP):
            arguments = (parent_id,)
            threading.Thread(target=_end_when_make_is_told_to, args=arguments, daemon=True).start()


def _end_when_make_is_told_to(make_id: int) -> None:
    """Send SIGTERM to this process as soon as `make` has got a SIGHUP.

    GNU make does not pass SIGHUP on. It only waits for its children, because a terminal that is closed
    sends the signal to them as well. Somebody who sends it to `make` alone would wait for ever.
    """
    # Before it waits, make gives the signal its default handling back. That can be seen from outside.
    while _catches_signal(make_id, signal.SIGHUP):
        time.sleep(MAKE_LOOKED_AT_EVERY_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _catches_signal(pid: int, number: int) -> bool:
    """Whether a process catches a signal, as Linux shows it. True where that is not known."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    for line in status.splitlines():
        label, _, mask = line.partition(":")
        if label == "SigCgt":
            return bool(int(mask, 16) >> (number - 1) & 1)
    return True
