"""`seriatim kafka`: start, stop and look at the embedded broker.

Next: embedded/broker.py does it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from seriatim import config
from seriatim.cli import print_notice
from seriatim.embedded import broker
from seriatim.errors import PlatformError

kafka = typer.Typer(help="Start and stop the embedded Kafka broker.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@kafka.command()
def start(
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="The port on 127.0.0.1. Default: the port of the last start, else a free one.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A broker setting. It may be repeated."),
    ] = None,
    json: Json = False,
) -> None:
    """Start the broker, and leave it running.

    It is one real broker on 127.0.0.1. If it is running already, it is left as it is. The command
    returns when the broker answers. The broker does not create topics by itself; --set
    auto.create.topics.enable=true changes that. Settings are valid for this start only.

    Example: seriatim kafka start --port 9092 --set log.retention.hours=1
    """
    overrides = broker.parse_overrides(settings or [])
    home = config.load_settings().home
    program = broker.find_kafka_program(config.load_settings(), print_notice)
    running_broker = broker.start_broker(
        home, port, overrides, program=program, print_notice=print_notice
    )
    _print_broker(running_broker, json=json)


@kafka.command()
def stop() -> None:
    """Stop the broker cleanly. Its data stays.

    Example: seriatim kafka stop
    """
    has_stopped = broker.stop_broker(config.load_settings().home, print_notice)
    typer.echo("stopped" if has_stopped else "no broker was running")


@kafka.command()
def status(json: Json = False) -> None:
    """Print the broker's address, process and data folder.

    The exit code is 4 if no broker is running.

    Example: seriatim kafka status --json
    """
    home = config.load_settings().home
    running_broker = broker.broker_status(home)
    if running_broker is None:
        # Scripts get the usual object, with nulls; the exit code says that none is running.
        if json:
            typer.echo(msgspec.json.encode(dict.fromkeys(("bootstrap_servers", "pid", "data"))))
        raise PlatformError(
            "no embedded broker is running", home=str(home), next="seriatim kafka start"
        )
    _print_broker(running_broker, json=json)


def _print_broker(running_broker: msgspec.Struct, *, json: bool) -> None:
    if json:
        typer.echo(msgspec.json.encode(running_broker, enc_hook=str))
        return
    for field, value in msgspec.structs.asdict(running_broker).items():
        typer.echo(f"{field:<17} {value}")
