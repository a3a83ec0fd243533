"""The embedded broker: a real Apache Kafka, one KRaft process, on 127.0.0.1, with its data under
our home.

There is no pid file that could be stale. A running broker is found in the process table by a marker
on its command line, and its address in the settings file that was written before it was started. So
`kill -9` of the broker or of whoever started it, at any moment, leaves nothing that has to be
cleaned up.

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
from seriatim.embedded import jars, java, properties
from seriatim.embedded.file_lock import file_lock
from seriatim.errors import ConfigError, PlatformError
from seriatim.kafka.client import create_client

HEAP_SIZE = "512m"
START_TIMEOUT_SECONDS = 300
STOP_SECONDS = 60
NOTICE_EVERY_SECONDS = 5.0
PORT_TRIES = 5
PORT_WAIT_SECONDS_MAX = 2.0
PROCESS_MARKER = "-Dseriatim.broker="

PrintNotice = Callable[[str], None]


class BrokerInfo(msgspec.Struct, frozen=True):
    """A running broker: what clients, people and scripts need to know of it."""

    bootstrap_servers: str
    pid: int
    data: Path


class KafkaProgram(msgspec.Struct, frozen=True):
    """How to start Java with Kafka in it."""

    java: Path
    jars: Sequence[Path]

    def command(self, folder: Path, main: str, *arguments: str) -> list[str]:
        """A command line; the marker says whose process it is."""
        options = [f"-Xmx{HEAP_SIZE}", "-XX:+ExitOnOutOfMemoryError", f"{PROCESS_MARKER}{folder}"]
        log = ["-Dorg.slf4j.simpleLogger.showDateTime=true"]
        log += ["-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss,SSS"]
        path = ":".join(str(jar) for jar in self.jars)
        return [str(self.java), *options, *log, "-cp", path, main, *arguments]


def find_kafka_program(settings: config.Settings, print_notice: PrintNotice) -> KafkaProgram:
    """Java and Kafka's JARs on this machine, fetched if need be."""
    return KafkaProgram(
        java.find_java(config.child_environment()),
        jars.ensure_jars("kafka", settings, print_notice),
    )


def start_broker(
    home: Path,
    port: int | None = None,
    overrides: Mapping[str, str] | None = None,
    *,
    program: KafkaProgram,
    print_notice: PrintNotice,
) -> BrokerInfo:
    """Start the broker of this home and return when it answers; one that runs already is left as it
    is.
    """
    folder = _broker_folder(home)
    wanted = dict(overrides or {})
    with file_lock(
        folder / "lock", print_notice, "waiting: another start or stop of this broker is under way"
    ):
        running = _find_process(folder)
        if running:
            _refuse_other_settings(folder, port, wanted)
            print_notice(f"already running (pid {running.pid})")
            _wait_until_ready(folder, running, print_notice)
        else:
            _format_once(folder, program)
            running = _launch(folder, port, wanted, program, print_notice)
        return _broker_info(folder, running)


def stop_broker(home: Path, print_notice: PrintNotice) -> bool:
    """Stop the broker of this home cleanly; False if none was running."""
    folder = _broker_folder(home)
    with file_lock(
        folder / "lock", print_notice, "waiting: another start or stop of this broker is under way"
    ):
        running = _find_process(folder)
        if running:
            _terminate(running, print_notice)
        return running is not None


def broker_status(home: Path) -> BrokerInfo | None:
    """The broker of this home, if it runs."""
    folder = _broker_folder(home)
    running = _find_process(folder)
    return _broker_info(folder, running) if running else None


def broker_log_file(home: Path) -> Path:
    """What the broker says."""
    return _broker_folder(home) / "broker.log"


def _broker_folder(home: Path) -> Path:
    folder = (home / "kafka").resolve()
    if "," in str(folder) or ":" in str(folder):
        raise ConfigError(
            f"Kafka cannot live in {folder}: a comma or colon", next="choose another SERIATIM_HOME"
        )
    return folder


def _broker_info(folder: Path, process: psutil.Process) -> BrokerInfo:
    port = properties.client_port(properties.read_properties(folder / "server.properties"))
    return BrokerInfo(f"{properties.HOST}:{port}", process.pid, folder / "data")


def _find_process(folder: Path) -> psutil.Process | None:
    """The live process that carries our marker. A zombie has no command line, so it is not found."""
    marker = f"{PROCESS_MARKER}{folder}"
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if marker in command and "kafka.Kafka" in command:
            return process
    return None


def _refuse_other_settings(folder: Path, port: int | None, overrides: Mapping[str, str]) -> None:
    """Whoever asks for something else than what runs must not believe that they got it."""
    now = properties.read_properties(folder / "server.properties")
    asked = dict(overrides) | ({"--port": str(port)} if port else {})
    given = now | {"--port": str(properties.client_port(now))}
    other = [f"{key}={value}" for key, value in asked.items() if given.get(key) != value]
    if other:
        raise ConfigError(
            f"the broker is already running without {', '.join(other)}",
            next="seriatim kafka stop, then start it again",
        )


def _format_once(folder: Path, program: KafkaProgram) -> None:
    """Give a new broker its cluster id. Done aside and moved into place, so there is no half-made
    folder.
    """
    if (folder / "data" / "meta.properties").exists():
        return
    scratch = folder / "data.new"
    shutil.rmtree(scratch, ignore_errors=True)
    settings = folder / "format.properties"
    properties.write_properties(settings, properties.broker_settings(scratch, 1, 2, {}))
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
    command = program.command(
        folder, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings)
    )
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        cause = _last_error(done.stdout + done.stderr)
        raise PlatformError("the broker's data folder could not be made", cause=cause)
    scratch.replace(folder / "data")
    settings.unlink()


def _launch(
    folder: Path,
    port: int | None,
    overrides: Mapping[str, str],
    program: KafkaProgram,
    print_notice: PrintNotice,
) -> psutil.Process:
    """Start Kafka. Without a given port somebody may be quicker at the one we found: then try
    another.
    """
    for _ in range(PORT_TRIES):
        _write_settings(folder, port, overrides)
        process = _spawn(folder, program)
        if _wait_until_ready_or_interrupted(folder, process, print_notice):
            _refuse_unknown_settings(folder, process, overrides, print_notice)
            return process
        if port is not None or "Address already in use" not in _read_log(folder):
            break
    cause = _last_error(_read_log(folder))
    kind = ConfigError if "ConfigException" in cause else PlatformError
    raise kind("the broker ended while starting", cause=cause, next=f"read {folder / 'broker.log'}")


def _write_settings(folder: Path, port: int | None, overrides: Mapping[str, str]) -> None:
    path = folder / "server.properties"
    chosen = port or _previous_port(path) or properties.free_port()
    if port and not _wait_until_free(port):
        raise ConfigError(
            f"port {port} is taken by another program", next="choose another --port, or none"
        )
    settings = properties.broker_settings(
        folder / "data", chosen, properties.free_port(), overrides
    )
    properties.write_properties(path, settings)


def _previous_port(settings: Path) -> int | None:
    """The port of the start before, if it is to be had: clients then find the broker again."""
    port = properties.client_port(properties.read_properties(settings))
    return port if port and _wait_until_free(port) else None


def _wait_until_free(port: int) -> bool:
    """Whether the port is free, or soon: a broker that was just killed takes a moment to let go of
    it.
    """
    patience = time.monotonic() + PORT_WAIT_SECONDS_MAX
    while not properties.is_port_free(port):
        if time.monotonic() > patience:
            return False
        time.sleep(0.1)
    return True


def _spawn(folder: Path, program: KafkaProgram) -> psutil.Process:
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
    pid = os.posix_spawn(
        command[0], command, config.child_environment(), file_actions=opened, setsid=True
    )
    return psutil.Process(pid)


def _wait_until_ready_or_interrupted(
    folder: Path, process: psutil.Process, print_notice: PrintNotice
) -> bool:
    """Whoever presses Ctrl-C while it starts does not want it."""
    try:
        return _wait_until_ready(folder, process, print_notice)
    except KeyboardInterrupt:
        _terminate(process, print_notice)
        raise


def _wait_until_ready(folder: Path, process: psutil.Process, print_notice: PrintNotice) -> bool:
    """Wait until the broker answers a metadata request; False if it ended first."""
    info = _broker_info(folder, process)
    cluster = properties.read_properties(folder / "data" / "meta.properties").get("cluster.id", "")
    began = told_at = time.monotonic()
    while time.monotonic() - began < START_TIMEOUT_SECONDS:
        if not _is_running(process):
            return False
        if cluster_id(info.bootstrap_servers) == cluster:
            return True
        if time.monotonic() - told_at >= NOTICE_EVERY_SECONDS:
            told_at = time.monotonic()
            print_notice(f"waiting for the broker: {told_at - began:.0f} s")
    raise PlatformError(
        f"the broker does not answer after {START_TIMEOUT_SECONDS} s, but it is still at work",
        next=f"read {folder / 'broker.log'}; seriatim kafka start goes on waiting, kafka stop ends it",
    )


def cluster_id(
    bootstrap_servers: str,
    timeout_seconds: float = 1.0,
    client_settings: Mapping[str, str] | None = None,
) -> str | None:
    """The id of the cluster at this address, by a real metadata request; None if none answers."""
    fixed = {"bootstrap.servers": bootstrap_servers, "log_level": 0}
    client = create_client(AdminClient, {**(client_settings or {}), **fixed})
    try:
        answer: str | None = client.list_topics(timeout=timeout_seconds).cluster_id
    except KafkaException:
        return None
    return answer


def _is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _terminate(process: psutil.Process, print_notice: PrintNotice) -> None:
    """Ask; wait; insist."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except psutil.TimeoutExpired:
        print_notice(
            f"the broker did not stop in {STOP_SECONDS} s: killing it; the next start recovers its data"
        )
        process.kill()
        process.wait()


def _refuse_unknown_settings(
    folder: Path, process: psutil.Process, overrides: Mapping[str, str], print_notice: PrintNotice
) -> None:
    """Kafka ignores a setting it does not know; a person who mistyped one must hear of it."""
    if not overrides:
        return
    known = _known_settings(_broker_info(folder, process).bootstrap_servers)
    unknown = [key for key in overrides if key not in known]
    if unknown:
        _terminate(process, print_notice)
        alike = difflib.get_close_matches(unknown[0], known, n=1)
        raise ConfigError(
            f"--set {unknown[0]}: Kafka has no such setting",
            next=f"did you mean {alike[0]}?"
            if alike
            else "see the broker settings in Kafka's documentation",
        )


def _known_settings(bootstrap_servers: str) -> list[str]:
    """The settings Kafka knows. It lists unknown ones too, but keeps their value secret, like a
    password.
    """
    broker = ConfigResource(ConfigResource.Type.BROKER, "1")
    client = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    answer = client.describe_configs([broker])[broker].result(timeout=10)
    return [key for key, entry in answer.items() if not entry.is_sensitive]


def _read_log(folder: Path) -> str:
    return (folder / "broker.log").read_text(errors="replace")


def _last_error(log: str) -> str:
    """The line that says why: Kafka's last error, else its last words."""
    lines = log.splitlines()
    errors = [
        line for line in lines if " ERROR " in line or "Exception" in line or "Error:" in line
    ]
    return (errors or lines or [""])[-1][:500]
