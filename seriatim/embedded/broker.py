"""The embedded broker: a real Apache Kafka, one KRaft process, on 127.0.0.1, with its data under our home.

There is no pid file that could be stale. A running broker is found in the process table by a marker on
its command line, and its address in the settings file that was written before it was started. So
`kill -9` of the broker or of whoever started it, at any moment, leaves nothing that has to be cleaned up.

Next room: properties.py has its settings; jars.py its program.
"""

from __future__ import annotations

import base64
import difflib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource

from seriatim import config
from seriatim.client import made
from seriatim.core.errors import ConfigError, PlatformError
from seriatim.embedded import jars, java, properties
from seriatim.embedded.alone import alone

HEAP = "512m"
READY_SECONDS = 300
STOP_SECONDS = 60
TOLD_EVERY_SECONDS = 5.0
PORT_TRIES = 5
PORT_PATIENCE_SECONDS = 2.0
MARKER = "-Dseriatim.broker="

Say = Callable[[str], None]


class BrokerInfo(msgspec.Struct, frozen=True):
    """A running broker: what clients, people and scripts need to know of it."""

    bootstrap_servers: str
    pid: int
    data: Path


class Program(msgspec.Struct, frozen=True):
    """How to start Java with Kafka in it."""

    java: Path
    jars: Sequence[Path]

    def command(self, folder: Path, main: str, *arguments: str) -> list[str]:
        """A command line; the marker says whose process it is."""
        options = [f"-Xmx{HEAP}", "-XX:+ExitOnOutOfMemoryError", f"{MARKER}{folder}"]
        log = ["-Dorg.slf4j.simpleLogger.showDateTime=true"]
        log += ["-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss,SSS"]
        path = ":".join(str(jar) for jar in self.jars)
        return [str(self.java), *options, *log, "-cp", path, main, *arguments]


def program_of(settings: config.Settings, say: Say) -> Program:
    """Java and Kafka's JARs on this machine, fetched if need be."""
    return Program(java.find(config.environment()), jars.ensure("kafka", settings, say))


def start(
    home: Path,
    port: int | None = None,
    overrides: Mapping[str, str] | None = None,
    *,
    program: Program,
    say: Say,
) -> BrokerInfo:
    """Start the broker of this home and return when it answers; one that runs already is left as it is."""
    folder = _folder(home)
    wanted = dict(overrides or {})
    with alone(folder / "lock", say, "waiting: another start or stop of this broker is under way"):
        running = _find(folder)
        if running:
            _refuse_other_settings(folder, port, wanted)
            say(f"already running (pid {running.pid})")
            _comes_up(folder, running, say)
        else:
            _format_once(folder, program)
            running = _launch(folder, port, wanted, program, say)
        return _info(folder, running)


def stop(home: Path, say: Say) -> bool:
    """Stop the broker of this home cleanly; False if none was running."""
    folder = _folder(home)
    with alone(folder / "lock", say, "waiting: another start or stop of this broker is under way"):
        running = _find(folder)
        if running:
            _end(running, say)
        return running is not None


def status(home: Path) -> BrokerInfo | None:
    """The broker of this home, if it runs."""
    folder = _folder(home)
    running = _find(folder)
    return _info(folder, running) if running else None


def log_file(home: Path) -> Path:
    """What the broker says."""
    return _folder(home) / "broker.log"


def _folder(home: Path) -> Path:
    folder = (home / "kafka").resolve()
    if "," in str(folder) or ":" in str(folder):
        raise ConfigError(f"Kafka cannot live in {folder}: a comma or colon", next="choose another SERIATIM_HOME")
    return folder


def _info(folder: Path, process: psutil.Process) -> BrokerInfo:
    port = properties.port_of(properties.read(folder / "server.properties"))
    return BrokerInfo(f"{properties.HOST}:{port}", process.pid, folder / "data")


def _find(folder: Path) -> psutil.Process | None:
    """The live process that carries our marker. A zombie has no command line, so it is not found."""
    marker = f"{MARKER}{folder}"
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if marker in command and "kafka.Kafka" in command:
            return process
    return None


def _refuse_other_settings(folder: Path, port: int | None, overrides: Mapping[str, str]) -> None:
    """Whoever asks for something else than what runs must not believe that they got it."""
    now = properties.read(folder / "server.properties")
    asked = dict(overrides) | ({"--port": str(port)} if port else {})
    given = now | {"--port": str(properties.port_of(now))}
    other = [f"{key}={value}" for key, value in asked.items() if given.get(key) != value]
    if other:
        raise ConfigError(
            f"the broker is already running without {', '.join(other)}",
            next="seriatim kafka stop, then start it again",
        )


def _format_once(folder: Path, program: Program) -> None:
    """Give a new broker its cluster id. Done aside and moved into place, so there is no half-made folder."""
    if (folder / "data" / "meta.properties").exists():
        return
    scratch = folder / "data.new"
    shutil.rmtree(scratch, ignore_errors=True)
    settings = folder / "format.properties"
    properties.write(settings, properties.of_broker(scratch, 1, 2, {}))
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
    command = program.command(folder, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings))
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        cause = _last_error(done.stdout + done.stderr)
        raise PlatformError("the broker's data folder could not be made", cause=cause)
    scratch.replace(folder / "data")
    settings.unlink()


def _launch(folder: Path, port: int | None, overrides: Mapping[str, str], program: Program, say: Say) -> psutil.Process:
    """Start Kafka. Without a given port somebody may be quicker at the one we found: then try another."""
    for _ in range(PORT_TRIES):
        _write_settings(folder, port, overrides)
        process = _spawn(folder, program)
        if _comes_up_or_is_unwanted(folder, process, say):
            _refuse_unknown_settings(folder, process, overrides, say)
            return process
        if port is not None or "Address already in use" not in _log(folder):
            break
    cause = _last_error(_log(folder))
    kind = ConfigError if "ConfigException" in cause else PlatformError
    raise kind("the broker ended while starting", cause=cause, next=f"read {folder / 'broker.log'}")


def _write_settings(folder: Path, port: int | None, overrides: Mapping[str, str]) -> None:
    path = folder / "server.properties"
    chosen = port or _last_port(path) or properties.free_port()
    if port and not _becomes_free(port):
        raise ConfigError(f"port {port} is taken by another program", next="choose another --port, or none")
    settings = properties.of_broker(folder / "data", chosen, properties.free_port(), overrides)
    properties.write(path, settings)


def _last_port(settings: Path) -> int | None:
    """The port of the start before, if it is to be had: clients then find the broker again."""
    port = properties.port_of(properties.read(settings))
    return port if port and _becomes_free(port) else None


def _becomes_free(port: int) -> bool:
    """Whether the port is free, or soon: a broker that was just killed takes a moment to let go of it."""
    patience = time.monotonic() + PORT_PATIENCE_SECONDS
    while not properties.is_free(port):
        if time.monotonic() > patience:
            return False
        time.sleep(0.1)
    return True


def _spawn(folder: Path, program: Program) -> psutil.Process:
    """Its own session, so that Ctrl-C at the terminal of the starter does not reach it."""
    log = folder / "broker.log"
    if log.exists():
        log.replace(folder / "broker.log.1")
    command = program.command(folder, "kafka.Kafka", str(folder / "server.properties"))
    opened: list[tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_OPEN, 2, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
    ]
    pid = os.posix_spawn(command[0], command, config.environment(), file_actions=opened, setsid=True)
    return psutil.Process(pid)


def _comes_up_or_is_unwanted(folder: Path, process: psutil.Process, say: Say) -> bool:
    """Whoever presses Ctrl-C while it starts does not want it."""
    try:
        return _comes_up(folder, process, say)
    except KeyboardInterrupt:
        _end(process, say)
        raise


def _comes_up(folder: Path, process: psutil.Process, say: Say) -> bool:
    """Wait until the broker answers a metadata request; False if it ended first."""
    info = _info(folder, process)
    cluster = properties.read(folder / "data" / "meta.properties").get("cluster.id", "")
    began = told_at = time.monotonic()
    while time.monotonic() - began < READY_SECONDS:
        if not _lives(process):
            return False
        if cluster_id(info.bootstrap_servers) == cluster:
            return True
        if time.monotonic() - told_at >= TOLD_EVERY_SECONDS:
            told_at = time.monotonic()
            say(f"waiting for the broker: {told_at - began:.0f} s")
    raise PlatformError(
        f"the broker does not answer after {READY_SECONDS} s, but it is still at work",
        next=f"read {folder / 'broker.log'}; seriatim kafka start goes on waiting, kafka stop ends it",
    )


def cluster_id(
    bootstrap_servers: str, timeout_seconds: float = 1.0, client_settings: Mapping[str, str] | None = None
) -> str | None:
    """The id of the cluster at this address, by a real metadata request; None if none answers."""
    fixed = {"bootstrap.servers": bootstrap_servers, "log_level": 0}
    client = made(AdminClient, {**(client_settings or {}), **fixed})
    try:
        answer: str | None = client.list_topics(timeout=timeout_seconds).cluster_id
    except KafkaException:
        return None
    return answer


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _end(process: psutil.Process, say: Say) -> None:
    """Ask; wait; insist."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except psutil.TimeoutExpired:
        say(f"the broker did not stop in {STOP_SECONDS} s: killing it; the next start recovers its data")
        process.kill()
        process.wait()


def _refuse_unknown_settings(folder: Path, process: psutil.Process, overrides: Mapping[str, str], say: Say) -> None:
    """Kafka ignores a setting it does not know; a person who mistyped one must hear of it."""
    if not overrides:
        return
    known = _known_settings(_info(folder, process).bootstrap_servers)
    unknown = [key for key in overrides if key not in known]
    if unknown:
        _end(process, say)
        alike = difflib.get_close_matches(unknown[0], known, n=1)
        raise ConfigError(
            f"--set {unknown[0]}: Kafka has no such setting",
            next=f"did you mean {alike[0]}?" if alike else "see the broker settings in Kafka's documentation",
        )


def _known_settings(bootstrap_servers: str) -> list[str]:
    """The settings Kafka knows. It lists unknown ones too, but keeps their value secret, like a password."""
    broker = ConfigResource(ConfigResource.Type.BROKER, "1")
    client = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    answer = client.describe_configs([broker])[broker].result(timeout=10)
    return [key for key, entry in answer.items() if not entry.is_sensitive]


def _log(folder: Path) -> str:
    return (folder / "broker.log").read_text(errors="replace")


def _last_error(log: str) -> str:
    """The line that says why: Kafka's last error, else its last words."""
    lines = log.splitlines()
    errors = [line for line in lines if " ERROR " in line or "Exception" in line or "Error:" in line]
    return (errors or lines or [""])[-1][:500]
