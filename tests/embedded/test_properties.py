"""The broker's settings."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from seriatim.embedded import broker, server_process
from seriatim.errors import ConfigError


def test_the_port_survives_the_file(tmp_path: Path) -> None:
    """Whoever finds the process finds its address in the file."""
    path = tmp_path / "server.properties"
    server_process.write_properties(
        path, broker.broker_settings(tmp_path, 9092, 9093, {"log.retention.hours": "1"})
    )
    read = server_process.read_properties(path)
    assert broker.client_port(read) == 9092
    assert read["log.retention.hours"] == "1"


def test_it_listens_on_this_machine_only(tmp_path: Path) -> None:
    """No listener is reachable from outside."""
    settings = broker.broker_settings(tmp_path, 9092, 9093, {})
    assert settings["listeners"] == "BROKER://127.0.0.1:9092,CONTROLLER://127.0.0.1:9093"


def test_what_java_would_misread_is_escaped(tmp_path: Path) -> None:
    """Java reads the file as Latin-1, so other characters are written as their codes."""
    path = tmp_path / "server.properties"
    server_process.write_properties(path, {"log.dirs": "/für/家/🏠/a\\b"})
    assert path.read_text() == "log.dirs=/f\\u00fcr/\\u5bb6/\\ud83c\\udfe0/a\\u005cb\n"


def test_no_file_is_no_settings(tmp_path: Path) -> None:
    """A broker that was never started has no port."""
    assert (
        broker.client_port(server_process.read_properties(tmp_path / "server.properties")) is None
    )


def test_a_default_can_be_overridden(tmp_path: Path) -> None:
    """What a user sets wins over our defaults."""
    settings = broker.broker_settings(tmp_path, 1, 2, {"auto.create.topics.enable": "true"})
    assert settings["auto.create.topics.enable"] == "true"


@pytest.mark.parametrize("key", ["listeners", "advertised.listeners", "log.dirs", "node.id"])
def test_its_place_cannot_be_overridden(tmp_path: Path, key: str) -> None:
    """Settings that tie the broker to its address and folder are ours."""
    with pytest.raises(ConfigError, match="sets this itself"):
        broker.broker_settings(tmp_path, 1, 2, {key: "elsewhere"})


@pytest.mark.parametrize(
    ("key", "value"), [("", "1"), ("a b", "1"), ("a", "1\nlisteners=x"), ("a", "x\\"), ("!a", "1")]
)
def test_no_second_setting_can_be_smuggled_in(tmp_path: Path, key: str, value: str) -> None:
    """A key or value that would change the file's meaning is refused."""
    with pytest.raises(ConfigError, match="is not a Kafka setting"):
        broker.broker_settings(tmp_path, 1, 2, {key: value})


def test_key_value_texts() -> None:
    """Only the first equals sign divides."""
    assert broker.parse_overrides(["a.b=1", "c= d=e "]) == {"a.b": "1", "c": "d=e"}
    with pytest.raises(ConfigError, match="is not KEY=VALUE"):
        broker.parse_overrides(["retention"])


def test_a_port_somebody_listens_on_is_not_free() -> None:
    """Taken is seen, and free is seen."""
    with socket.socket() as listener:
        listener.bind((broker.HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not server_process.is_port_free(port)
    assert server_process.is_port_free(port)
