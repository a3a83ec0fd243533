"""The settings of the embedded broker: what we fix, what a user may override, and the file they are
written to.

The file also remembers the port. It is written before the broker is started, so that the address of
every running broker can be read from it.

Next: embedded/broker.py starts Kafka with them.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path

from seriatim.errors import ConfigError

HOST = "127.0.0.1"

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


def client_port(properties: Mapping[str, str]) -> int | None:
    """The port that clients use, if these settings name one."""
    match = re.search(r"BROKER://[^:]+:(\d+)", properties.get("listeners", ""))
    return int(match[1]) if match else None


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


def _is_plain_text(value: str) -> bool:
    return value.isascii() and value.isprintable() and "\\" not in value


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


def _check_override(key: str, value: str, fixed_settings: Mapping[str, str]) -> None:
    if not re.fullmatch(r"[a-z0-9][A-Za-z0-9._-]*", key) or not _is_plain_text(value):
        raise ConfigError(
            f"--set {key}={value!r} is not a Kafka setting", next="write KEY=VALUE, one line"
        )
    if key in fixed_settings:
        advice = "use --port" if "listeners" in key else "leave it out"
        raise ConfigError(f"--set {key}: the embedded broker sets this itself", next=advice)
