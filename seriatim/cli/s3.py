"""`seriatim s3`: start, stop and look at the embedded S3 server.

Next: embedded/s3.py does it.
"""

from __future__ import annotations

from shlex import quote
from typing import Annotated

import typer

from seriatim import config
from seriatim.cli import print_notice
from seriatim.cli.options import Json
from seriatim.cli.output import RunningServer, require_running
from seriatim.embedded.s3 import (
    S3ServerInfo,
    s3_environment,
    s3_server_status,
    start_s3_server,
    stop_s3_server,
)

s3 = typer.Typer(help="Start and stop the embedded S3 server.", no_args_is_help=True)


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
    _json: Json = False,
) -> RunningServer:
    """Start the S3 server, and leave it running.

    It is one process on 127.0.0.1, with a bucket named seriatim, for trying and for tests. If it is
    running already, it is left as it is. Its JAR of 55 MB is fetched first, if it is not there.

    Example: seriatim s3 start --port 9000
    """
    settings = config.load_settings()
    return RunningServer(start_s3_server(settings, settings.home, port, print_notice))


@s3.command()
def stop() -> None:
    """Stop the S3 server. Its objects stay.

    Example: seriatim s3 stop
    """
    has_stopped = stop_s3_server(config.load_settings().home, print_notice)
    typer.echo("stopped" if has_stopped else "no S3 server was running")


@s3.command()
def status(_json: Json = False) -> RunningServer:
    """Print the server's address, bucket and process.

    The exit code is 4 if no server is running.

    Example: seriatim s3 status --json
    """
    home = config.load_settings().home
    return require_running(
        s3_server_status(home), S3ServerInfo, "S3 server", "seriatim s3 start", home
    )


@s3.command()
def env() -> None:
    """Print the variables with which a shell finds the server, its secret among them.

    A shell takes them by eval "$(seriatim s3 env)".

    Example: seriatim s3 env
    """
    for name, value in s3_environment(config.load_settings().home).items():
        typer.echo(f"export {name}={quote(value)}")
