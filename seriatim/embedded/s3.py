"""The embedded S3 server: s3proxy, one Java process on 127.0.0.1, with its data under SERIATIM_HOME. It is
for trying, for the demo and for tests, not for production.

It holds put-if-absent in races, which is all that Seriatim asks for. Its If-Match does not hold.

In a container `python -m seriatim.embedded.s3 FOLDER` is the server itself: see `serve_in_container`.

Next: embedded/server_process.py starts and finds the process; storage/object_store.py is its client.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil

from seriatim import config
from seriatim.embedded import jars, java, server_process
from seriatim.embedded.jars import PrintNotice
from seriatim.embedded.server_process import EmbeddedServer, java_command
from seriatim.errors import ConfigError, PlatformError, SeriatimError

MAIN_CLASS = "org.gaul.s3proxy.Main"
PROCESS_MARKER = "-Dseriatim.s3="
BUCKET = "seriatim"
REGION = "us-east-1"
CONTAINER_PORT = 9000
SIGNED_BYTES_MAX = 1 << 30
"""The largest object that it takes in one put. Its own default is 128 MB."""
HEAP_SIZE = "3g"
"""It keeps the content of a signed put in memory twice until it has proved the signature, and tasks put
files of 128 MB at the same time. The process takes this only if that happens.
"""


class S3ServerInfo(msgspec.Struct, frozen=True):
    """What people and scripts need to know about a running server. Its credentials are not in it."""

    endpoint: str
    bucket: str
    pid: int


def start_s3_server(
    settings: config.Settings, home: Path, port: int | None, print_notice: PrintNotice
) -> S3ServerInfo:
    """Start the server of this home, and return when it listens. One that runs already is left as it
    is; it is refused if it has another port. `settings` say where the cache of JARs is.
    """
    server = _server(home)
    folder = server.folder
    with server.lock(print_notice):
        process = server.find_process()
        if process is None:
            process = server.launch(
                _command(folder, settings, print_notice),
                lambda: _write_settings(folder, port),
                lambda process: _is_listening(process, _port(folder)),
                print_notice,
                has_fixed_port=port is not None,
            )
            if process is None:
                raise PlatformError("the S3 server ended while starting", next=f"read {server.log}")
        else:
            if port and port != _port(folder):
                raise ConfigError(
                    f"the S3 server is already running at port {_port(folder)}",
                    next="seriatim s3 stop, then start it again",
                )
            print_notice(f"already running (pid {process.pid})")
            server.wait_until_ready(
                process, lambda process: _is_listening(process, _port(folder)), print_notice
            )
        return _server_info(folder, process)


def stop_s3_server(home: Path, print_notice: PrintNotice) -> bool:
    """Stop the server of this home; False if none was running."""
    return _server(home).stop(print_notice)


def s3_server_status(home: Path) -> S3ServerInfo | None:
    """The server of this home, if it runs."""
    server = _server(home)
    process = server.find_process()
    return _server_info(server.folder, process) if process else None


def s3_environment(home: Path) -> dict[str, str]:
    """The variables with which clients find the running server of this home. They have its secret."""
    server = s3_server_status(home)
    if server is None:
        raise PlatformError(
            "no embedded S3 server is running", home=str(home), next="seriatim s3 start"
        )
    server_settings = server_process.read_properties(_settings_file(_server(home).folder))
    return {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": server_settings["s3proxy.identity"],
        "AWS_SECRET_ACCESS_KEY": server_settings["s3proxy.credential"],
        "AWS_REGION": REGION,
        # Seriatim sees it by the endpoint; other clients of the same library must be told.
        "AWS_ALLOW_HTTP": "true",
    }


def _server(home: Path) -> EmbeddedServer:
    folder = (home / "s3").resolve()
    marker = f"{PROCESS_MARKER}{folder}"
    log = folder / "server.log"
    return EmbeddedServer("S3 server", "seriatim s3", folder, marker, MAIN_CLASS, log)


def _settings_file(folder: Path) -> Path:
    return folder / "server.properties"


def _server_info(folder: Path, process: psutil.Process) -> S3ServerInfo:
    return S3ServerInfo(f"http://{server_process.HOST}:{_port(folder)}", BUCKET, process.pid)


def _port(folder: Path) -> int | None:
    endpoint = server_process.read_properties(_settings_file(folder)).get("s3proxy.endpoint", "")
    port = endpoint.rpartition(":")[2]
    return int(port) if port else None


def _command(folder: Path, settings: config.Settings, print_notice: PrintNotice) -> list[str]:
    """The command line. Its credentials are in the settings file, which only its owner can read."""
    java_program = java.find_java(config.child_environment())
    server_jars = jars.ensure_jars("s3", settings, print_notice)
    marker = f"{PROCESS_MARKER}{folder}"
    options = ["-DLOG_LEVEL=warn", "-DJETTY_LOG_LEVEL=warn"]
    arguments = ["--properties", str(_settings_file(folder))]
    return java_command(
        java_program, marker, server_jars, MAIN_CLASS, arguments, options, HEAP_SIZE
    )


def _write_settings(folder: Path, port: int | None) -> None:
    """Write the settings of one start. Port and credentials are those of the start before, so that
    clients find the server again.
    """
    if port and not server_process.wait_until_free(port):
        raise ConfigError(
            f"port {port} is taken by another program", next="choose another --port, or none"
        )
    previous = server_process.read_properties(_settings_file(folder))
    chosen_port = port or _port(folder)
    if chosen_port is None or not server_process.wait_until_free(chosen_port):
        chosen_port = server_process.free_port()
    identity = previous.get("s3proxy.identity") or secrets.token_hex(10)
    credential = previous.get("s3proxy.credential") or secrets.token_hex(20)
    _write_server_settings(folder, f"{server_process.HOST}:{chosen_port}", identity, credential)


def _write_server_settings(folder: Path, address: str, identity: str, credential: str) -> None:
    data = folder / "data"
    # A bucket is a folder of its data.
    (data / BUCKET).mkdir(parents=True, exist_ok=True)
    server_settings = {
        "s3proxy.endpoint": f"http://{address}",
        "s3proxy.authorization": "aws-v4",
        "s3proxy.identity": identity,
        "s3proxy.credential": credential,
        "s3proxy.v4-max-non-chunked-request-size": str(SIGNED_BYTES_MAX),
        "jclouds.provider": "filesystem-nio2",
        "jclouds.filesystem.basedir": str(data),
        # Of the provider, which needs none but wants to be given some.
        "jclouds.identity": "none",
        "jclouds.credential": "none",
    }
    server_process.write_properties(_settings_file(folder), server_settings, is_private=True)


def _is_listening(process: psutil.Process, port: int | None) -> bool:
    """Whether this process listens at the port. Another one may have taken it."""
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            return True
    return False


def serve_in_container(settings: config.Settings, folder: Path) -> NoReturn:
    """Become the server of docker-compose.yaml: it listens for the other containers, and takes the
    credentials that they are given, too. Its bucket is below `folder`.
    """
    variables = config.store_environment()
    identity = variables.get("AWS_ACCESS_KEY_ID")
    credential = variables.get("AWS_SECRET_ACCESS_KEY")
    if not identity or not credential:
        raise ConfigError(
            "the S3 server has no credentials",
            next="put AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY into .env",
        )
    command = _command(folder, settings, _print_line)
    _write_server_settings(folder, f"0.0.0.0:{CONTAINER_PORT}", identity, credential)
    os.execv(command[0], command)  # noqa: S606  # a fixed program, and no shell is wanted


def _print_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    try:
        serve_in_container(config.load_settings(), Path(sys.argv[1]))
    except SeriatimError as error:
        _print_line(error.render())
        sys.exit(error.exit_code)
