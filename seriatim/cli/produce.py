"""`seriatim produce demo`: send sample data to a real broker, at a rate, with faults on request.

Next: demo/generator.py makes the messages; demo/producer.py sends them.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from seriatim import config, context
from seriatim.cli import print_notice
from seriatim.demo.generator import CollectionPoints, DemoFault, inject_faults
from seriatim.demo.producer import SnapshotRequestListener, create_topics, send_messages

produce = typer.Typer(help="Send sample data to Kafka.", no_args_is_help=True)


@produce.command()
def demo(
    messages: Annotated[
        int, typer.Option(min=0, help="How many messages to send. 0: until you stop it.")
    ] = 100_000,
    rate: Annotated[
        float, typer.Option(min=0, help="Messages per second. 0: as fast as possible.")
    ] = 0,
    prefix: Annotated[str, typer.Option(help="The topics are PREFIX-a, PREFIX-b, …")] = "demo",
    topics: Annotated[int, typer.Option(min=1, max=26, help="How many topics.")] = 3,
    partitions: Annotated[
        int, typer.Option(min=1, help="Partitions of each topic that must be created.")
    ] = 4,
    sessions: Annotated[int, typer.Option(min=1, help="How many sessions send.")] = 200,
    seed: Annotated[int, typer.Option(help="The same seed sends the same messages.")] = 1,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND[:MESSAGE]",
            help="drop, swap, repeat, poison or contradict. It may be repeated.",
        ),
    ] = None,
    answer: Annotated[
        str,
        typer.Option(
            metavar="TOPIC",
            help="Send the snapshots that Seriatim requests on this topic.",
        ),
    ] = "",
) -> None:
    """Send snapshots and updates of sample tables.

    These are the messages that streams/demo.toml folds. Topics that do not exist are created. A
    fault happens at the given message of this run. With --answer, and with snapshot_requests in the
    stream file, a session in quarantine gets the snapshot that releases it without a person.

    Example: seriatim produce demo --messages 50000 --fault drop:1000 --fault poison:2000
    """
    topic_names = [f"{prefix}-{chr(ord('a') + i)}" for i in range(topics)]
    faults = [DemoFault.parse(text) for text in fault or []]
    client = context.kafka_client(config.load_settings())
    listener: SnapshotRequestListener | None = None
    if answer:
        create_topics(client, {answer: 1})
        listener = SnapshotRequestListener(client, answer)
    generator = CollectionPoints(topic_names, sessions, seed)
    # `tuple` is a listener that never has a request: called without arguments, it is empty.
    generated = inject_faults(generator.messages(listener or tuple), faults)
    if messages:
        generated = islice(generated, messages)
    try:
        sent_count = send_messages(
            client,
            dict.fromkeys(topic_names, partitions),
            generated,
            rate,
            messages or None,
            print_notice,
        )
    finally:
        if listener is not None:
            listener.close()
    typer.echo(f"{sent_count} messages sent to {', '.join(topic_names)}")
