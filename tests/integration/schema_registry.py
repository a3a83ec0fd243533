"""A real schema registry for tests: Apicurio, one Java process on 127.0.0.1. It keeps its schemas on
disk, so that it can be stopped, or killed, and started again. Its log counts the requests.

Next: formats/registry.py is its client; embedded/connect.py has a converter that registers schemas.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib import request as http
from urllib.error import HTTPError

from seriatim import config
from seriatim.embedded import jars, java, server_process
from seriatim.embedded.server_process import HOST, EmbeddedServer

GROUP = "registry"
PROGRAM = "apicurio-registry-app-3.0.9-runner.jar"
PROCESS_MARKER = "-Dseriatim.registry="
LOOK_UP = re.compile(r'method="GET" path="/apis/ccompat/v7(/[^"]*)"')


def silent(_: str) -> None:
    """Print nothing."""


class SchemaRegistryServer:
    """A registry whose files are below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.port = server_process.free_port()
        marker = f"{PROCESS_MARKER}{self.folder}"
        self._server = EmbeddedServer(
            "schema registry", "no command", self.folder, marker, PROGRAM, self.folder / "log"
        )
        self._looked_up: list[str] = []
        """What was looked up before the last start: each start has a log of its own."""

    @property
    def address(self) -> str:
        """The address of the server."""
        return f"http://{HOST}:{self.port}"

    @property
    def url(self) -> str:
        """The address of its interface like Confluent's."""
        return f"{self.address}/apis/ccompat/v7"

    def start(self) -> None:
        """Start it, at the same port as before."""
        program = unpacked_program() / PROGRAM
        options = [
            "-Xmx512m",
            self._server.marker,
            f"-Dquarkus.http.host={HOST}",
            f"-Dquarkus.http.port={self.port}",
            f"-Dapicurio.datasource.url=jdbc:h2:file:{self.folder / 'schemas'}",
            # It would open twenty connections, and give up after five seconds on a busy machine.
            "-Dapicurio.datasource.jdbc.initial-size=1",
            "-Dapicurio.datasource.jdbc.min-size=1",
            "-Dquarkus.datasource.h2.jdbc.acquisition-timeout=120S",
        ]
        java_program = java.find_java(config.child_environment())
        self.folder.mkdir(parents=True, exist_ok=True)
        # The main class of an EmbeddedServer is an argument of its own, which a path is not.
        command = [str(java_program), *options, "-jar", str(program), PROGRAM]
        process = self._server.launch(
            command, lambda: None, lambda _: self._answers(), silent, has_fixed_port=True
        )
        assert process is not None, self._server.read_log()[-2000:]

    def stop(self) -> None:
        """Stop it; its schemas stay."""
        if self._server.find_process() is not None:
            self._looked_up = self.looked_up()
            self._server.stop(silent)

    def register(
        self,
        subject: str,
        schema: Any,
        schema_type: str = "AVRO",
        references: Iterable[Mapping[str, Any]] = (),
    ) -> int:
        """Register a schema, and return its id."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        question = {"schema": text, "schemaType": schema_type, "references": list(references)}
        request = http.Request(
            f"{self.url}/subjects/{subject}/versions",
            data=json.dumps(question).encode(),
            headers={"Content-Type": "application/vnd.schemaregistry.v1+json"},
        )
        with http.urlopen(request, timeout=60) as answer:
            return int(json.loads(answer.read())["id"])

    def looked_up(self) -> list[str]:
        """The paths below `url` that were asked for, in order."""
        return self._looked_up + LOOK_UP.findall(self._server.read_log())

    def _answers(self) -> bool:
        with suppress(OSError):
            try:
                # Not a path that tests count.
                with http.urlopen(f"{self.address}/health/ready", timeout=5):
                    return True
            except HTTPError as error:
                error.close()
        return False


def unpacked_program() -> Path:
    """The folder of the program, unpacked once into the home of this host."""
    settings = config.load_settings()
    (archive,) = jars.ensure_jars(GROUP, settings, silent)
    folder = settings.home / "registry-program"
    with jars.file_lock(settings.home / "registry-program.lock", silent, "waiting"):
        if not (folder / PROGRAM).exists():
            draft = settings.home / "registry-program.new"
            with tarfile.open(archive) as content:
                content.extractall(draft, filter="data")
            draft.rename(folder)
    return folder
