"""The process of an embedded server: how it is started, waited for, found again and ended; its
settings file and its port.

There is no pid file that could be stale. A running server is found in the process table by a marker
on its command line. So `kill -9` of the server, or of the process that started it, leaves nothing to
clean up.

Next: embedded/broker.py and embedded/s3.py have the servers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
from msgspec import Struct

from seriatim import config
from seriatim.embedded.jars import PrintNotice, file_lock
from seriatim.errors import PlatformError

HOST = "127.0.0.1"
HEAP_SIZE = "512m"
"""Of a Java program that asks for no other. Folding is Spark's work, in a process of its own."""
START_TIMEOUT_SECONDS = 300
NOTICE_EVERY_SECONDS = 5.0
POLL_SECONDS = 0.1
PORT_TRIES = 5
STOP_SECONDS = 60
PORT_WAIT_SECONDS_MAX = 2.0
PR_SET_PDEATHSIG = 1
"""The number of this option in Linux' prctl.h."""


class EmbeddedServer(Struct, frozen=True):
    """A server of one home, running or not."""

    name: str
    """What people call it: `broker`."""
    command: str
    """The command that starts and stops it: `seriatim kafka`."""
    folder: Path
    marker: str
    """What is on the command line of its process, and on no other."""
    main_class: str
    log: Path
    """What its process writes."""
    stop_signal: int = signal.SIGTERM
    """What ends it cleanly."""

    def lock(self, print_notice: PrintNotice) -> AbstractContextManager[None]:
        """Held while the server is started or stopped."""
        notice = f"waiting: another start or stop of this {self.name} is under way"
        return file_lock(self.folder / "lock", print_notice, notice)

    def find_process(self) -> psutil.Process | None:
        """The running process. A zombie has no command line, so it is not found."""
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if self.marker in command and self.main_class in command:
                return process
        return None

    def stop(self, print_notice: PrintNotice) -> bool:
        """Stop it cleanly; False if none was running."""
        with self.lock(print_notice):
            process = self.find_process()
            if process is None:
                return False
            self.terminate(process, print_notice)
            return True

    def launch(
        self,
        command: list[str],
        write_settings: Callable[[], None],
        is_ready: Callable[[psutil.Process], bool],
        print_notice: PrintNotice,
        *,
        has_fixed_port: bool,
        environment: Mapping[str, str] | None = None,
    ) -> psutil.Process | None:
        """Start it, and wait until it is ready; None if it ended while starting. `environment` has
        further variables for it.

        If no port is given, another process may take the free port that we chose before the server
        does; then another one is tried.
        """
        for _ in range(PORT_TRIES):
            write_settings()
            process = spawn(command, self.log, environment)
            try:
                if self.wait_until_ready(process, is_ready, print_notice):
                    return process
            except KeyboardInterrupt:
                self.terminate(process, print_notice)
                raise
            if has_fixed_port or "Address already in use" not in self.read_log():
                break
        return None

    def wait_until_ready(
        self,
        process: psutil.Process,
        is_ready: Callable[[psutil.Process], bool],
        print_notice: PrintNotice,
    ) -> bool:
        """Wait until the process answers. Returns False if it ended first."""
        start_seconds = time.monotonic()
        notice_seconds = start_seconds
        while time.monotonic() - start_seconds < START_TIMEOUT_SECONDS:
            if not is_running(process):
                return False
            if is_ready(process):
                return True
            now_seconds = time.monotonic()
            if now_seconds - notice_seconds >= NOTICE_EVERY_SECONDS:
                notice_seconds = now_seconds
                print_notice(f"waiting for the {self.name}: {now_seconds - start_seconds:.0f} s")
            time.sleep(POLL_SECONDS)
        raise PlatformError(
            f"the {self.name} does not answer after {START_TIMEOUT_SECONDS} s, but it is still at work",
            next=f"read {self.log}; {self.command} start goes on waiting, {self.command} stop ends it",
        )

    def read_log(self) -> str:
        """What its process has written since it was started."""
        return self.log.read_text(errors="replace")

    def terminate(self, process: psutil.Process, print_notice: PrintNotice) -> None:
        """End it by its signal; kill it if it does not end in time."""
        process.send_signal(self.stop_signal)
        try:
            process.wait(STOP_SECONDS)
        except psutil.TimeoutExpired:
            print_notice(
                f"the {self.name} did not stop in {STOP_SECONDS} s: killing it;"
                " the next start recovers its data"
            )
            process.kill()
            process.wait()


def java_command(
    java: Path,
    marker: str,
    class_path: Iterable[Path],
    main_class: str,
    arguments: Iterable[str],
    options: Iterable[str] = (),
    heap_size: str = HEAP_SIZE,
) -> list[str]:
    """The command line of a Java program. `marker` identifies our process."""
    path = ":".join(str(jar) for jar in class_path)
    memory = [f"-Xmx{heap_size}", "-XX:+ExitOnOutOfMemoryError"]
    return [str(java), *memory, marker, *options, "-cp", path, main_class, *arguments]


def spawn(
    command: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> psutil.Process:
    """Start a server in a session of its own, so that Ctrl-C in this terminal does not reach it. Its
    output goes to `log`; the log of the start before is kept beside it. `environment` has further
    variables for it.
    """
    if log.exists():
        log.replace(log.with_name(f"{log.name}.1"))
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    file_actions: list[tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644),
        (os.POSIX_SPAWN_OPEN, 2, str(log), append, 0o644),
    ]
    variables = {**config.child_environment(), **(environment or {})}
    pid = os.posix_spawn(command[0], command, variables, file_actions=file_actions, setsid=True)
    return psutil.Process(pid)


def is_running(process: psutil.Process) -> bool:
    """Whether a process is still at work."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def signal_when_parent_ends(number: int) -> None:
    """Called in a child: Linux sends it this signal when its parent ends, even by SIGKILL. Elsewhere
    nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def wait_until_free(port: int) -> bool:
    """Whether the port is free, or becomes free soon: it takes a moment after a server was killed."""
    deadline = time.monotonic() + PORT_WAIT_SECONDS_MAX
    while not is_port_free(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def write_properties(
    path: Path, properties: Mapping[str, str], *, is_private: bool = False
) -> None:
    """Write a Java properties file. A reader sees the old file or the new one, never a half one.
    A private file can be read by its owner alone.
    """
    lines = [f"{key}={_escape_for_java(value)}" for key, value in sorted(properties.items())]
    scratch = path.with_suffix(".new")
    if is_private:
        scratch.unlink(missing_ok=True)
        scratch.touch(mode=0o600)
    scratch.write_text("\n".join(lines) + "\n")
    scratch.replace(path)


def read_properties(path: Path) -> dict[str, str]:
    """Read what `write_properties` wrote; empty if there is no file."""
    if not path.exists():
        return {}
    properties = {}
    for line in path.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals:
            properties[key] = value
    return properties


def is_port_free(port: int) -> bool:
    """Whether the port can be listened on now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that is free now. Another process may still take it before we do."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def _escape_for_java(value: str) -> str:
    r"""Escape a value. Java reads these files as Latin-1, so everything but printable ASCII is
    written as \uXXXX.
    """
    encoded = value.encode("utf-16-be")
    escaped = ""
    for i in range(0, len(encoded), 2):
        code = int.from_bytes(encoded[i : i + 2], "big")
        is_plain = 32 <= code < 127 and code != ord("\\")
        escaped += chr(code) if is_plain else f"\\u{code:04x}"
    return escaped
