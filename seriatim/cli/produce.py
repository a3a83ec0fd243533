"""`seriatim produce demo`: sample data on a real broker, at a rate, with faults on request.

Next room: seriatim/demo/generator.py makes the messages.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from seriatim import config
from seriatim.cli import app, print_notice

produce = typer.Typer(help="Sample data.", no_args_is_help=True)
app.add_typer(produce, name="produce")


@produce.command()
def demo(
    messages: Annotated[
        int, typer.Option(min=0, help="How many to send; 0: until stopped.")
    ] = 100_000,
    rate: Annotated[
        float, typer.Option(min=0, help="Messages per second; 0: as fast as it goes.")
    ] = 0,
    prefix: Annotated[str, typer.Option(help="Topics are PREFIX-a, PREFIX-b, …")] = "demo",
    topics: Annotated[int, typer.Option(min=1, max=26, help="How many topics.")] = 3,
    partitions: Annotated[
        int, typer.Option(min=1, help="Partitions per topic, where it must be made.")
    ] = 4,
    sessions: Annotated[int, typer.Option(min=1, help="How many tables are captured.")] = 200,
    seed: Annotated[int, typer.Option(help="The same seed sends the same messages.")] = 1,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND[:MESSAGE]",
            help="drop, swap, repeat, poison or contradict; may be repeated.",
        ),
    ] = None,
    answer: Annotated[
        str,
        typer.Option(
            metavar="TOPIC",
            help="Send the snapshots that are asked for on this topic, as they are.",
        ),
    ] = "",
) -> None:
    """Send tables as snapshot, then updates: the messages that streams/demo.toml folds.

    Topics are made if they are not there. Faults happen at the given message of this run. With
    --answer and snapshot_requests in the stream file, a session that was set aside is right again
    by itself.

    Example: seriatim produce demo --messages 50000 --fault drop:1000 --fault poison:2000
    """
    from seriatim import context
    from seriatim.demo.generator import CollectionPoints, DemoFault, inject_faults
    from seriatim.demo.producer import SnapshotRequestListener, create_topics, send_messages

    names = [f"{prefix}-{chr(ord('a') + i)}" for i in range(topics)]
    faults = [DemoFault.parse(text) for text in fault or []]
    client, asked = context.kafka_client(config.load_settings()), None
    if answer:
        create_topics(client, {answer: 1})
        asked = SnapshotRequestListener(client, answer)
    stream = inject_faults(CollectionPoints(names, sessions, seed).messages(asked or tuple), faults)
    wanted = islice(stream, messages) if messages else stream
    try:
        sent = send_messages(
            client, dict.fromkeys(names, partitions), wanted, rate, messages or None, print_notice
        )
    finally:
        if asked is not None:
            asked.close()
    typer.echo(f"{sent} messages sent to {', '.join(names)}")
