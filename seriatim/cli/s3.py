"""`seriatim s3`: start, stop and look at the embedded S3 server.

Next: embedded/s3.py does it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from seriatim import config
from seriatim.cli import print_notice
from seriatim.embedded.s3 import (
    S3ServerInfo,
    s3_environment,
    s3_server_status,
    start_s3_server,
    stop_s3_server,
)
from seriatim.errors import PlatformError

s3 = typer.Typer(help="Start and stop the embedded S3 server.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@s3.command()
def start(
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="The port on 127.0.0.1. Default: the port of the last start, else a free one.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Start the S3 server, and leave it running.

    It is one process on 127.0.0.1, with a bucket named seriatim, for trying and for tests. If it is
    running already, it is left as it is. Its JAR of 55 MB is fetched first, if it is not there.

    Example: seriatim s3 start --port 9000
    """
    settings = config.load_settings()
    _print_server(start_s3_server(settings, settings.home, port, print_notice), json=json)


@s3.command()
def stop() -> None:
    """Stop the S3 server. Its objects stay.

    Example: seriatim s3 stop
    """
    has_stopped = stop_s3_server(config.load_settings().home, print_notice)
    typer.echo("stopped" if has_stopped else "no S3 server was running")


@s3.command()
def status(json: Json = False) -> None:
    """Print the server's address, bucket and process.

    The exit code is 4 if no server is running.

    Example: seriatim s3 status --json
    """
    home = config.load_settings().home
    server = s3_server_status(home)
    if server is None:
        # Scripts get the usual object, with nulls; the exit code says that none is running.
        if json:
            typer.echo(msgspec.json.encode(dict.fromkeys(("endpoint", "bucket", "pid"))))
        raise PlatformError(
            "no embedded S3 server is running", home=str(home), next="seriatim s3 start"
        )
    _print_server(server, json=json)


@s3.command()
def env() -> None:
    """Print the variables with which a shell finds the server, its secret among them.

    A shell takes them by eval "$(seriatim s3 env)".

    Example: seriatim s3 env
    """
    from shlex import quote

    for name, value in s3_environment(config.load_settings().home).items():
        typer.echo(f"export {name}={quote(value)}")


def _print_server(server: S3ServerInfo, *, json: bool) -> None:
    if json:
        typer.echo(msgspec.json.encode(server))
        return
    for field, value in msgspec.structs.asdict(server).items():
        typer.echo(f"{field:<9} {value}")
