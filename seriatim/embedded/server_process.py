"""The process of an embedded server: how it is started, found again and ended; its settings file and
its port.

There is no pid file that could be stale. A running server is found in the process table by a marker
on its command line. So `kill -9` of the server, or of the process that started it, leaves nothing to
clean up.

Next: embedded/broker.py and embedded/s3.py have the servers.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from seriatim import config

HOST = "127.0.0.1"
STOP_SECONDS = 60
PORT_WAIT_SECONDS_MAX = 2.0

PrintNotice = Callable[[str], None]


def spawn(command: list[str], log: Path) -> psutil.Process:
    """Start a server in a session of its own, so that Ctrl-C in this terminal does not reach it. Its
    output goes to `log`; the log of the start before is kept beside it.
    """
    if log.exists():
        log.replace(log.with_name(f"{log.name}.1"))
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    file_actions: list[tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644),
        (os.POSIX_SPAWN_OPEN, 2, str(log), append, 0o644),
    ]
    pid = os.posix_spawn(
        command[0], command, config.child_environment(), file_actions=file_actions, setsid=True
    )
    return psutil.Process(pid)


def find(marker: str, main: str) -> psutil.Process | None:
    """The running process with this marker and main class on its command line. A zombie has no
    command line, so it is not found.
    """
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if marker in command and main in command:
            return process
    return None


def is_running(process: psutil.Process) -> bool:
    """Whether a process is still at work."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def terminate(process: psutil.Process, name: str, print_notice: PrintNotice) -> None:
    """End a server with SIGTERM; kill it if it does not end in time."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except psutil.TimeoutExpired:
        print_notice(
            f"the {name} did not stop in {STOP_SECONDS} s: killing it; the next start recovers its data"
        )
        process.kill()
        process.wait()


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
