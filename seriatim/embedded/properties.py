"""The broker's settings: what we fix, what a user may override, and the file they are written to.

The file is also our memory of the port: it is written before the broker is started, so whoever
finds the process finds its address here.

Next room: broker.py starts Kafka with them.
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
    """All settings of one start. What ties the broker to its place cannot be overridden."""
    ours = {
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
        _check_override(key, value, ours)
    return DEFAULTS | dict(overrides) | ours


def parse_overrides(texts: list[str]) -> dict[str, str]:
    """From the KEY=VALUE texts of a command line."""
    overrides = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {text!r} is not KEY=VALUE", next="like --set log.retention.hours=1"
            )
        overrides[key.strip()] = value.strip()
    return overrides


def write_properties(path: Path, properties: Mapping[str, str]) -> None:
    """As a Java properties file, in one step."""
    lines = [f"{key}={_escape_for_java(value)}" for key, value in sorted(properties.items())]
    scratch = path.with_suffix(".new")
    scratch.write_text("\n".join(lines) + "\n")
    scratch.replace(path)


def read_properties(path: Path) -> dict[str, str]:
    """What `write` wrote; nothing if it never did."""
    if not path.exists():
        return {}
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)


def client_port(properties: Mapping[str, str]) -> int | None:
    """The port that clients use, if these settings name one."""
    found = re.search(r"BROKER://[^:]+:(\d+)", properties.get("listeners", ""))
    return int(found[1]) if found else None


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
    """A port that nobody listens on now; somebody else may still be quicker."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def _is_plain_text(value: str) -> bool:
    return value.isascii() and value.isprintable() and "\\" not in value


def _escape_for_java(value: str) -> str:
    r"""Java reads these files as Latin-1: anything else is written as \uXXXX."""
    units = value.encode("utf-16-be")
    codes = [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]
    return "".join(
        chr(code) if 32 <= code < 127 and code != ord("\\") else f"\\u{code:04x}" for code in codes
    )


def _check_override(key: str, value: str, fixed_settings: Mapping[str, str]) -> None:
    if not re.fullmatch(r"[a-z0-9][A-Za-z0-9._-]*", key) or not _is_plain_text(value):
        raise ConfigError(
            f"--set {key}={value!r} is not a Kafka setting", next="write KEY=VALUE, one line"
        )
    if key in fixed_settings:
        advice = "use --port" if "listeners" in key else "leave it out"
        raise ConfigError(f"--set {key}: the embedded broker sets this itself", next=advice)
