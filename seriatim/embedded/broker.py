"""The embedded broker: a real Apache Kafka, one KRaft process, on 127.0.0.1, with its data under
SERIATIM_HOME.

There is no pid file that could be stale. A running broker is found in the process table by a marker
on its command line, and its address is in the settings file that was written before it was started.
So `kill -9` of the broker, or of the process that started it, leaves nothing to clean up.

Next: embedded/jars.py has its program.
"""

from __future__ import annotations

import base64
import difflib
import re
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource

from seriatim import config
from seriatim.embedded import jars, java, server_process
from seriatim.embedded.jars import PrintNotice
from seriatim.embedded.server_process import (
    HOST,
    EmbeddedServer,
    free_port,
    java_command,
    read_properties,
    write_properties,
)
from seriatim.errors import ConfigError, PlatformError
from seriatim.kafka.client import create_client

MAIN_CLASS = "kafka.Kafka"
PROCESS_MARKER = "-Dseriatim.broker="

# One broker that is its own controller; small enough for a laptop.
DEFAULTS = {
    "auto.create.topics.enable": "false",
    # After kill -9 the broker's old self must time out before the new one is let in.
    "broker.heartbeat.interval.ms": "1000",
    "broker.session.timeout.ms": "5000",
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.dedupe.buffer.size": "33554432",
    "num.partitions": "1",
    "offsets.topic.num.partitions": "5",
    "offsets.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "5",
    "share.coordinator.state.topic.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "5",
    "transaction.state.log.replication.factor": "1",
}


class BrokerInfo(msgspec.Struct, frozen=True):
    """What clients, people and scripts need to know about a running broker."""

    bootstrap_servers: str
    pid: int
    data: Path


class KafkaProgram(msgspec.Struct, frozen=True):
    """The Java program and the JARs with which Kafka is started."""

    java: Path
    jars: Sequence[Path]

    def command(self, folder: Path, main: str, *arguments: str) -> list[str]:
        """The command line for a main class of Kafka. The marker in it identifies our process."""
        log = ["-Dorg.slf4j.simpleLogger.showDateTime=true"]
        log += ["-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss,SSS"]
        marker = f"{PROCESS_MARKER}{folder}"
        return java_command(self.java, marker, self.jars, main, arguments, log)


def find_kafka_program(settings: config.Settings, print_notice: PrintNotice) -> KafkaProgram:
    """Java and the JARs of Kafka on this host. Missing JARs are fetched."""
    java_program = java.find_java(config.child_environment())
    kafka_jars = jars.ensure_jars("kafka", settings, print_notice)
    return KafkaProgram(java_program, kafka_jars)


def start_broker(
    home: Path,
    port: int | None = None,
    overrides: Mapping[str, str] | None = None,
    *,
    program: KafkaProgram,
    print_notice: PrintNotice,
) -> BrokerInfo:
    """Start the broker of this home, and return when it answers. One that runs already is left as it
    is; it is refused if it has other settings.
    """
    server = _server(home)
    folder = server.folder
    overrides = overrides or {}
    with server.lock(print_notice):
        process = server.find_process()
        if process is not None:
            _refuse_other_settings(folder, port, overrides)
            print_notice(f"already running (pid {process.pid})")
            server.wait_until_ready(process, lambda _: _answers(folder), print_notice)
        else:
            _format_once(folder, program)
            process = _launch(server, port, overrides, program, print_notice)
        return _broker_info(folder, process)


def stop_broker(home: Path, print_notice: PrintNotice) -> bool:
    """Stop the broker of this home cleanly; False if none was running."""
    return _server(home).stop(print_notice)


def broker_status(home: Path) -> BrokerInfo | None:
    """The broker of this home, if it runs."""
    server = _server(home)
    process = server.find_process()
    return _broker_info(server.folder, process) if process else None


def _server(home: Path) -> EmbeddedServer:
    folder = (home / "kafka").resolve()
    if "," in str(folder) or ":" in str(folder):
        raise ConfigError(
            f"Kafka cannot live in {folder}: a comma or colon", next="choose another SERIATIM_HOME"
        )
    marker = f"{PROCESS_MARKER}{folder}"
    log = folder / "broker.log"
    return EmbeddedServer("broker", "seriatim kafka", folder, marker, MAIN_CLASS, log)


def _broker_info(folder: Path, process: psutil.Process) -> BrokerInfo:
    return BrokerInfo(_bootstrap_servers(folder), process.pid, folder / "data")


def _bootstrap_servers(folder: Path) -> str:
    port = client_port(read_properties(folder / "server.properties"))
    return f"{HOST}:{port}"


def _refuse_other_settings(folder: Path, port: int | None, overrides: Mapping[str, str]) -> None:
    """Refuse a start with other settings than those of the running broker: the caller would believe
    that they are in force.
    """
    settings = read_properties(folder / "server.properties")
    differences = []
    for key, value in overrides.items():
        if settings.get(key) != value:
            differences.append(f"{key}={value}")
    if port and port != client_port(settings):
        differences.append(f"--port={port}")
    if differences:
        raise ConfigError(
            f"the broker is already running without {', '.join(differences)}",
            next="seriatim kafka stop, then start it again",
        )


def _format_once(folder: Path, program: KafkaProgram) -> None:
    """Give a new broker its data folder with a cluster id. The folder is made aside and moved into
    place, so that it is never half made.
    """
    if (folder / "data" / "meta.properties").exists():
        return
    scratch = folder / "data.new"
    shutil.rmtree(scratch, ignore_errors=True)
    settings = folder / "format.properties"
    write_properties(settings, broker_settings(scratch, 1, 2, {}))
    # Kafka's tool takes an id that begins with a hyphen for an option.
    new_cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    new_cluster_id = new_cluster_id.replace("-", "A")
    arguments = ("format", "-t", new_cluster_id, "-c", str(settings))
    command = program.command(folder, "kafka.tools.StorageTool", *arguments)
    process = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if process.returncode:
        cause = _last_error(process.stdout + process.stderr)
        raise PlatformError("the broker's data folder could not be made", cause=cause)
    scratch.replace(folder / "data")
    settings.unlink()


def _launch(
    server: EmbeddedServer,
    port: int | None,
    overrides: Mapping[str, str],
    program: KafkaProgram,
    print_notice: PrintNotice,
) -> psutil.Process:
    folder = server.folder
    process = server.launch(
        program.command(folder, MAIN_CLASS, str(folder / "server.properties")),
        lambda: _write_settings(folder, port, overrides),
        lambda _: _answers(folder),
        print_notice,
        has_fixed_port=port is not None,
    )
    if process is not None:
        _refuse_unknown_settings(server, process, overrides, print_notice)
        return process
    cause = _last_error(server.read_log())
    error_class = ConfigError if "ConfigException" in cause else PlatformError
    raise error_class("the broker ended while starting", cause=cause, next=f"read {server.log}")


def _write_settings(folder: Path, port: int | None, overrides: Mapping[str, str]) -> None:
    path = folder / "server.properties"
    chosen_port = port or _previous_port(path) or free_port()
    if port and not server_process.wait_until_free(port):
        raise ConfigError(
            f"port {port} is taken by another program", next="choose another --port, or none"
        )
    settings = broker_settings(folder / "data", chosen_port, free_port(), overrides)
    write_properties(path, settings)


def _previous_port(settings: Path) -> int | None:
    """The port of the previous start, if it is free, so that clients find the broker again."""
    port = client_port(read_properties(settings))
    return port if port and server_process.wait_until_free(port) else None


def _answers(folder: Path) -> bool:
    """Whether the broker answers a metadata request. The id is compared, because another broker may
    answer at this address.
    """
    metadata = read_properties(folder / "data" / "meta.properties")
    return cluster_id(_bootstrap_servers(folder)) == metadata.get("cluster.id", "")


def cluster_id(
    bootstrap_servers: str,
    timeout_seconds: float = 1.0,
    client_settings: Mapping[str, str] | None = None,
) -> str | None:
    """The id of the cluster at this address, by a real metadata request; None if none answers."""
    settings = {
        **(client_settings or {}),
        "bootstrap.servers": bootstrap_servers,
        "log_level": 0,
    }
    client = create_client(AdminClient, settings)
    try:
        answer: str | None = client.list_topics(timeout=timeout_seconds).cluster_id
    except KafkaException:
        return None
    return answer


def _refuse_unknown_settings(
    server: EmbeddedServer,
    process: psutil.Process,
    overrides: Mapping[str, str],
    print_notice: PrintNotice,
) -> None:
    """Refuse settings that Kafka does not know. Kafka itself ignores them, and a mistyped one would go
    unnoticed.
    """
    if not overrides:
        return
    known_settings = _known_settings(_bootstrap_servers(server.folder))
    unknown = [key for key in overrides if key not in known_settings]
    if unknown:
        server.terminate(process, print_notice)
        advice = "see the broker settings in Kafka's documentation"
        similar = difflib.get_close_matches(unknown[0], known_settings, n=1)
        if similar:
            advice = f"did you mean {similar[0]}?"
        raise ConfigError(f"--set {unknown[0]}: Kafka has no such setting", next=advice)


def _known_settings(bootstrap_servers: str) -> list[str]:
    """The settings that Kafka knows. It lists unknown ones as well, but marks them as sensitive, like
    passwords.
    """
    broker = ConfigResource(ConfigResource.Type.BROKER, "1")
    client = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    answer = client.describe_configs([broker])[broker].result(timeout=10)
    return [key for key, entry in answer.items() if not entry.is_sensitive]


def _last_error(log: str) -> str:
    """The line of a log that says why Kafka ended: its last error, or else its last line."""
    lines = log.splitlines()
    errors = [
        line for line in lines if " ERROR " in line or "Exception" in line or "Error:" in line
    ]
    return (errors or lines or [""])[-1][:500]


def broker_settings(
    data: Path, port: int, controller_port: int, overrides: Mapping[str, str]
) -> dict[str, str]:
    """All settings of one start. Ports, paths and roles cannot be overridden."""
    fixed_settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"BROKER://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"BROKER://{HOST}:{port}",
        "inter.broker.listener.name": "BROKER",
        "listener.security.protocol.map": "BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(data),
    }
    for key, value in overrides.items():
        _check_override(key, value, fixed_settings)
    return DEFAULTS | dict(overrides) | fixed_settings


def parse_overrides(texts: list[str]) -> dict[str, str]:
    """Parse the KEY=VALUE texts of a command line."""
    overrides = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {text!r} is not KEY=VALUE", next="like --set log.retention.hours=1"
            )
        overrides[key.strip()] = value.strip()
    return overrides


def client_port(properties: Mapping[str, str]) -> int | None:
    """The port that clients use, if these settings name one."""
    match = re.search(r"BROKER://[^:]+:(\d+)", properties.get("listeners", ""))
    return int(match[1]) if match else None


def _is_plain_text(value: str) -> bool:
    return value.isascii() and value.isprintable() and "\\" not in value


def _check_override(key: str, value: str, fixed_settings: Mapping[str, str]) -> None:
    if not re.fullmatch(r"[a-z0-9][A-Za-z0-9._-]*", key) or not _is_plain_text(value):
        raise ConfigError(
            f"--set {key}={value!r} is not a Kafka setting", next="write KEY=VALUE, one line"
        )
    if key in fixed_settings:
        advice = "use --port" if "listeners" in key else "leave it out"
        raise ConfigError(f"--set {key}: the embedded broker sets this itself", next=advice)
