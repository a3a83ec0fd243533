"""An embedded PostgreSQL with logical decoding: a source of changes for the demo and for tests, on
127.0.0.1. Its program is not ours: it comes with the operating system.

PostgreSQL refuses to run as root. If root starts it, it runs as the user `postgres`, and its data are
in a temporary folder of that user, because that user cannot enter root's folders.

Next: embedded/connect.py sends its changes to Kafka; embedded/server_process.py starts the process.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import msgspec
import psutil

from seriatim import config
from seriatim.embedded import server_process
from seriatim.embedded.jars import PrintNotice
from seriatim.embedded.server_process import HOST, EmbeddedServer
from seriatim.errors import ConfigError, PlatformError

DEBIAN_PROGRAMS = Path("/usr/lib/postgresql")
"""Debian keeps the programs of each version here, and not on the path."""
ROOT_RUNS_AS = "postgres"
USER = "seriatim"
DATABASE = "postgres"
"""The database that every new server has."""
INSTALL_ADVICE = "install PostgreSQL 15 or later, on Debian by `apt-get install postgresql`"
SETTINGS = {
    "wal_level": "logical",
    "listen_addresses": HOST,
    # A socket would need a folder with a short path.
    "unix_socket_directories": "",
    "max_connections": "30",
    # It serves tests only: after a power cut its data may be damaged, and nobody needs them then.
    "fsync": "off",
}


class PostgresInfo(msgspec.Struct, frozen=True):
    """How clients reach a running server."""

    port: int
    pid: int
    password: str

    def __repr__(self) -> str:
        return f"PostgresInfo(port={self.port}, pid={self.pid})"

    def client_environment(self) -> dict[str, str]:
        """The variables with which psql and other clients find it."""
        return {
            "PGHOST": HOST,
            "PGPORT": str(self.port),
            "PGUSER": USER,
            "PGPASSWORD": self.password,
            "PGDATABASE": DATABASE,
        }


def find_programs() -> Path | None:
    """The folder of PostgreSQL's programs, of the newest version; None if it is not installed."""
    on_path = shutil.which("initdb")
    if on_path:
        return Path(on_path).resolve().parent
    versions = []
    for folder in DEBIAN_PROGRAMS.glob("*/bin"):
        if re.fullmatch(r"\d+", folder.parent.name) and (folder / "initdb").exists():
            versions.append((int(folder.parent.name), folder))
    return max(versions)[1] if versions else None


def require_programs() -> Path:
    """The folder of PostgreSQL's programs. Says what to install if there is none."""
    programs = find_programs()
    if programs is None:
        raise ConfigError("PostgreSQL is not installed here", next=INSTALL_ADVICE)
    return programs


def start_postgres(home: Path, print_notice: PrintNotice) -> PostgresInfo:
    """Start the server of this home, and return when it takes connections. One that runs already is
    left as it is.
    """
    programs = require_programs()
    folder = _folder(home)
    folder.mkdir(parents=True, exist_ok=True)
    with _server(home).lock(print_notice):
        _make_data_once(folder, programs)
        server = _server(home)
        process = server.find_process()
        if process is None:
            process = server.launch(
                [*_run_as_other_user(), str(programs / "postgres"), "-D", server.marker],
                lambda: _write_settings(folder),
                lambda _: _answers(_port(folder)),
                print_notice,
                has_fixed_port=False,
            )
            if process is None:
                raise PlatformError("PostgreSQL ended while starting", next=f"read {server.log}")
        else:
            server.wait_until_ready(process, lambda _: _answers(_port(folder)), print_notice)
        return _server_info(folder, process)


def stop_postgres(home: Path, print_notice: PrintNotice) -> bool:
    """Stop the server of this home, and break its connections; False if none was running."""
    if not _data(_folder(home)).exists():
        return False
    return _server(home).stop(print_notice)


def remove_postgres(home: Path, print_notice: PrintNotice) -> None:
    """Stop the server of this home, and delete its data."""
    stop_postgres(home, print_notice)
    shutil.rmtree(_data(_folder(home)).resolve().parent, ignore_errors=True)
    shutil.rmtree(_folder(home), ignore_errors=True)


def run_sql(server: PostgresInfo, text: str) -> list[str]:
    """Run statements as one client, and return the lines that they give: columns separated by |."""
    process = subprocess.run(
        [str(require_programs() / "psql"), "-qAtX", "-v", "ON_ERROR_STOP=1"],
        input=text,
        env={**config.child_environment(), **server.client_environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise PlatformError("PostgreSQL refused a statement", cause=process.stderr[-500:])
    return process.stdout.splitlines()


def _folder(home: Path) -> Path:
    return (home / "postgres").resolve()


def _data(folder: Path) -> Path:
    """The data folder: a link to where the data are."""
    return folder / "data"


def _server(home: Path) -> EmbeddedServer:
    folder = _folder(home)
    marker = str(_data(folder).resolve())
    return EmbeddedServer(
        "PostgreSQL",
        "make demo-cdc",
        folder,
        marker,
        "-D",
        folder / "server.log",
        # It would wait for clients to leave after SIGTERM.
        stop_signal=signal.SIGINT,
    )


def _run_as_other_user() -> list[str]:
    """What is put before a command if this process is root's."""
    if os.geteuid() != 0:
        return []
    user = pwd.getpwnam(ROOT_RUNS_AS)
    setpriv = shutil.which("setpriv") or "setpriv"
    return [setpriv, f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--"]


def _make_data_once(folder: Path, programs: Path) -> None:
    """Make the data folder with a user and a password. It is made aside and then linked, so that a
    start never finds a half one.
    """
    if _data(folder).exists():
        return
    if os.geteuid() == 0:
        scratch = Path(tempfile.mkdtemp(prefix="seriatim-postgres-"))
    else:
        scratch = Path(tempfile.mkdtemp(prefix="data-", dir=folder))
    password = secrets.token_hex(20)
    password_file = scratch / "password"
    password_file.touch(mode=0o600)
    password_file.write_text(f"{password}\n")
    if os.geteuid() == 0:
        user = pwd.getpwnam(ROOT_RUNS_AS)
        for path in (scratch, password_file):
            os.chown(path, user.pw_uid, user.pw_gid)
    data = scratch / "data"
    command = [*_run_as_other_user(), str(programs / "initdb"), "-D", str(data), "-U", USER]
    command += ["--encoding=UTF8", "--locale=C", "--no-sync"]
    command += ["--auth=scram-sha-256", f"--pwfile={password_file}"]
    process = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd="/", check=False
    )
    if process.returncode:
        shutil.rmtree(scratch)
        raise PlatformError(
            "PostgreSQL's data folder could not be made", cause=process.stderr[-500:]
        )
    server_process.write_properties(
        folder / "client.properties", {"password": password}, is_private=True
    )
    _data(folder).unlink(missing_ok=True)  # a link to data that somebody deleted
    _data(folder).symlink_to(data)


def _write_settings(folder: Path) -> None:
    """Write the settings of one start. The port is that of the start before, if it is free."""
    port = _port(folder)
    if port is None or not server_process.wait_until_free(port):
        port = server_process.free_port()
    lines = [f"{name} = '{value}'" for name, value in {**SETTINGS, "port": str(port)}.items()]
    # The last file that PostgreSQL reads; initdb leaves it empty.
    path = _data(folder) / "postgresql.auto.conf"
    path.write_text("\n".join(lines) + "\n")
    client = server_process.read_properties(folder / "client.properties")
    server_process.write_properties(
        folder / "client.properties", {**client, "port": str(port)}, is_private=True
    )


def _port(folder: Path) -> int | None:
    port = server_process.read_properties(folder / "client.properties").get("port")
    return int(port) if port else None


def _answers(port: int | None) -> bool:
    """Whether the server takes connections, by its answer to a request for TLS. Before it is ready it
    closes the connection.
    """
    ssl_request = (8).to_bytes(4, "big") + (80877103).to_bytes(4, "big")
    try:
        with socket.create_connection((HOST, port or 0), timeout=5) as connection:
            connection.sendall(ssl_request)
            return connection.recv(1) in (b"N", b"S")
    except OSError:
        return False


def _server_info(folder: Path, process: psutil.Process) -> PostgresInfo:
    client = server_process.read_properties(folder / "client.properties")
    return PostgresInfo(int(client["port"]), process.pid, client["password"])
