"""`seriatim kafka`: the embedded broker, started, stopped and looked at.

Next room: seriatim/embedded/broker.py does it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from seriatim import config
from seriatim.cli import app, print_notice
from seriatim.errors import PlatformError

kafka = typer.Typer(
    help="The embedded Kafka broker: real, single, on 127.0.0.1.", no_args_is_help=True
)
app.add_typer(kafka, name="kafka")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@kafka.command()
def start(
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port on 127.0.0.1. Default: the last one, else a free one."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A broker setting; may be repeated."),
    ] = None,
    json: Json = False,
) -> None:
    """Start the broker, or find it running; return when it answers, and leave it running.

    Topics are not created by themselves; --set auto.create.topics.enable=true changes that.
    Settings hold for this start alone.

    Example: seriatim kafka start --port 9092 --set log.retention.hours=1
    """
    from seriatim.embedded import broker, properties

    overrides = properties.parse_overrides(settings or [])
    home = config.load_settings().home
    program = broker.find_kafka_program(config.load_settings(), print_notice)
    _print_broker(
        broker.start_broker(home, port, overrides, program=program, print_notice=print_notice),
        json=json,
    )


@kafka.command()
def stop() -> None:
    """Stop the broker cleanly. Its data stays.

    Example: seriatim kafka stop
    """
    from seriatim.embedded import broker

    stopped = broker.stop_broker(config.load_settings().home, print_notice)
    typer.echo("stopped" if stopped else "no broker was running")


@kafka.command()
def status(json: Json = False) -> None:
    """Tell the broker's address, process and data folder; exit 4 if it is not running.

    Example: seriatim kafka status --json
    """
    from seriatim.embedded import broker

    home = config.load_settings().home
    running = broker.broker_status(home)
    if running is None:
        if json:
            typer.echo(msgspec.json.encode(dict.fromkeys(("bootstrap_servers", "pid", "data"))))
        raise PlatformError(
            "no embedded broker is running", home=str(home), next="seriatim kafka start"
        )
    _print_broker(running, json=json)


def _print_broker(broker: msgspec.Struct, *, json: bool) -> None:
    if json:
        typer.echo(msgspec.json.encode(broker, enc_hook=str))
        return
    for field, value in msgspec.structs.asdict(broker).items():
        typer.echo(f"{field:<17} {value}")
