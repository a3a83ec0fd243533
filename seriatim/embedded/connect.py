"""Embedded Kafka Connect with Debezium's connector for PostgreSQL: it sends the changes of tables to
Kafka. One process on 127.0.0.1, for the demo and for tests.

A file in its folder has the position in the source's log, so that a later start goes on from there.

Next: embedded/postgres.py is its source; embedded/server_process.py starts the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib import request as http

import msgspec

from seriatim import config
from seriatim.embedded import jars, java, server_process
from seriatim.embedded.jars import PrintNotice
from seriatim.embedded.postgres import DATABASE, USER, PostgresInfo
from seriatim.embedded.server_process import HOST, EmbeddedServer, java_command
from seriatim.errors import PlatformError

MAIN_CLASS = "org.apache.kafka.connect.cli.ConnectStandalone"
PROCESS_MARKER = "-Dseriatim.connect="
CONNECTOR = "source"
AVRO_CONVERTER = "io.apicurio.registry.utils.converter.AvroConverter"
ANSWER_SECONDS = 5


class ConnectInfo(msgspec.Struct, frozen=True):
    """A running Kafka Connect."""

    url: str
    pid: int


def debezium_settings(
    source: PostgresInfo, topic_prefix: str, tables: str, *, partitions: int = 1
) -> dict[str, str]:
    """The settings of a connector that captures these tables of PostgreSQL, separated by commas, into
    topics like `PREFIX.public.TABLE`. No kind of change is left out, so TRUNCATE is captured, too.
    """
    # PostgreSQL takes small letters, digits and _, at most 63.
    slot = "seriatim_" + re.sub(r"[^a-z0-9]", "_", topic_prefix.lower())[:50]
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": HOST,
        "database.port": str(source.port),
        "database.user": USER,
        "database.password": source.password,
        "database.dbname": DATABASE,
        "topic.prefix": topic_prefix,
        "table.include.list": tables,
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": slot,
        "publication.autocreate.mode": "filtered",
        "skipped.operations": "none",
        "decimal.handling.mode": "string",
        # Topics may have names like a-b. Avro has no such names, and registries refuse them.
        "schema.name.adjustment.mode": "avro",
        "topic.creation.default.partitions": str(partitions),
        "topic.creation.default.replication.factor": "1",
        # The slot of a killed connector stays taken until PostgreSQL notices.
        "slot.max.retries": "60",
        "slot.retry.delay.ms": "1000",
    }


def avro_converter(registry_url: str) -> dict[str, str]:
    """The settings with which values are Avro, in the wire format of Confluent, with schemas in this
    registry (Apicurio's). Keys stay JSON: an Avro key changes with the id of its schema.
    """
    settings = {
        "apicurio.registry.url": f"{registry_url}/apis/registry/v2",
        "apicurio.registry.auto-register": "true",
        "apicurio.registry.find-latest": "false",
        "apicurio.registry.as-confluent": "true",
        # Registries are asked by this id. By default the messages would have another one.
        "apicurio.registry.use-id": "contentId",
        "apicurio.registry.headers.enabled": "false",
    }
    prefixed = {f"value.converter.{name}": value for name, value in settings.items()}
    return {"value.converter": AVRO_CONVERTER, **prefixed}


def start_connect(
    home: Path,
    connector: Mapping[str, str],
    bootstrap_servers: str,
    settings: config.Settings,
    print_notice: PrintNotice,
    *,
    converter: Mapping[str, str] | None = None,
) -> ConnectInfo:
    """Start Kafka Connect of this home with one connector, and return when the connector works. One
    that runs already is left as it is. `settings` say where the cache of JARs is; `converter` has
    settings like `value.converter`, if messages are not to be JSON without schemas (`avro_converter`
    has those of Avro).
    """
    plugins = ["debezium"]
    if AVRO_CONVERTER in (converter or {}).values():
        plugins.append("avro-converter")
    server = _server(home)
    folder = server.folder
    folder.mkdir(parents=True, exist_ok=True)
    with server.lock(print_notice):
        process = server.find_process()
        if process is None:
            process = server.launch(
                _command(folder, plugins, settings, print_notice),
                lambda: _write_settings(folder, connector, bootstrap_servers, converter or {}),
                lambda _: _is_working(folder) or _has_failed(folder),
                print_notice,
                has_fixed_port=False,
            )
        else:
            server.wait_until_ready(process, lambda _: _states(folder) != [], print_notice)
        if process is None:
            raise PlatformError("Kafka Connect ended while starting", next=f"read {server.log}")
        if _has_failed(folder):
            server.terminate(process, print_notice)
            raise PlatformError("the connector could not start", next=f"read {server.log}")
        return ConnectInfo(_url(folder), process.pid)


def stop_connect(home: Path, print_notice: PrintNotice) -> bool:
    """Stop Kafka Connect of this home; False if none was running."""
    return _server(home).stop(print_notice)


def _server(home: Path) -> EmbeddedServer:
    folder = (home / "connect").resolve()
    marker = f"{PROCESS_MARKER}{folder}"
    return EmbeddedServer(
        "Kafka Connect", "make demo-cdc", folder, marker, MAIN_CLASS, folder / "connect.log"
    )


def _command(
    folder: Path, plugins: Sequence[str], settings: config.Settings, print_notice: PrintNotice
) -> list[str]:
    """The command line. The password of the source is in a file that only its owner can read."""
    java_program = java.find_java(config.child_environment())
    connect_jars = jars.ensure_jars("connect", settings, print_notice)
    for plugin in plugins:
        _link_plugin(folder, plugin, jars.ensure_jars(plugin, settings, print_notice))
    files = [str(_worker_file(folder)), str(_connector_file(folder))]
    marker = f"{PROCESS_MARKER}{folder}"
    return java_command(java_program, marker, connect_jars, MAIN_CLASS, files)


def _link_plugin(folder: Path, name: str, plugin_jars: list[Path]) -> None:
    """Make the folder of the connector or of a converter. A plugin has JARs of its own, apart from
    those of Connect.
    """
    plugin = folder / "plugins" / name
    plugin.mkdir(parents=True, exist_ok=True)
    for outdated in plugin.iterdir():
        outdated.unlink()
    for jar in plugin_jars:
        (plugin / jar.name).symlink_to(jar)


def _write_settings(
    folder: Path,
    connector: Mapping[str, str],
    bootstrap_servers: str,
    converter: Mapping[str, str],
) -> None:
    worker = {
        "bootstrap.servers": bootstrap_servers,
        "key.converter": "org.apache.kafka.connect.json.JsonConverter",
        "key.converter.schemas.enable": "false",
        "value.converter": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter.schemas.enable": "false",
        "offset.storage.file.filename": str(folder / "offsets"),
        "offset.flush.interval.ms": "1000",
        "plugin.path": str(folder / "plugins"),
        "listeners": f"http://{HOST}:{server_process.free_port()}",
        **converter,
    }
    server_process.write_properties(_worker_file(folder), worker)
    server_process.write_properties(
        _connector_file(folder), {**connector, "name": CONNECTOR}, is_private=True
    )


def _worker_file(folder: Path) -> Path:
    return folder / "worker.properties"


def _connector_file(folder: Path) -> Path:
    return folder / "connector.properties"


def _url(folder: Path) -> str:
    return server_process.read_properties(_worker_file(folder))["listeners"]


def _is_working(folder: Path) -> bool:
    """Whether the connector and its task run."""
    states = _states(folder)
    return len(states) > 1 and set(states) == {"RUNNING"}


def _has_failed(folder: Path) -> bool:
    """Whether the connector or its task has failed. Neither starts again by itself."""
    return "FAILED" in _states(folder)


def _states(folder: Path) -> list[str]:
    """The states of the connector and of its task; empty if Connect does not answer yet."""
    url = f"{_url(folder)}/connectors/{CONNECTOR}/status"
    try:
        with http.urlopen(url, timeout=ANSWER_SECONDS) as answer:  # noqa: S310  # our own address
            status = json.loads(answer.read())
    except OSError:
        return []
    return [status["connector"]["state"], *(task["state"] for task in status["tasks"])]
