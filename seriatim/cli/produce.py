"""`seriatim produce`: send messages to Kafka, from a file of JSON lines or made up for the demo.

Next: kafka/sending.py sends; demo/generator.py makes sample messages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import typer
from msgspec import Struct
from typer.core import TyperGroup

from seriatim import config, context
from seriatim.cli import CommandResult, print_notice
from seriatim.cli.options import Json
from seriatim.cli.output import RunProgress
from seriatim.demo.generator import CollectionPoints, DemoFault, inject_faults
from seriatim.demo.producer import SnapshotRequestListener, send_messages
from seriatim.engine.findings import count_of
from seriatim.engine.offsets import TOPIC_NAME
from seriatim.errors import ConfigError, SeriatimError
from seriatim.kafka import sending

STDIN = "-"
FILE_COMMAND = "FILE"
SILENT_SECONDS = 2.0


class FileOrDemo(TyperGroup):
    """The group `produce`. Its first word is the name of a file, unless it is one of its commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the command that sends files before the words of a person."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = [FILE_COMMAND, *args]
        return list(super().parse_args(ctx, args))


produce = typer.Typer(
    cls=FileOrDemo,
    help="Send a file of JSON lines, or sample data, to Kafka.",
    no_args_is_help=True,
)


class MessageLine(Struct, frozen=True):
    """A line of a file, as a message."""

    number: int
    key: str | None
    value: bytes


class SentLines(CommandResult):
    """How many lines the broker has acknowledged."""

    topic: str
    acknowledged: int

    def render(self) -> str:
        """One line."""
        return f"{count_of(self.acknowledged, 'message')} acknowledged by topic {self.topic}"


@produce.command(FILE_COMMAND)
def send_file(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file of JSON lines, or - for standard input.")
    ],
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="The topic to send to.")],
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="The field that becomes the Kafka key. For a key of several fields give the option"
            " several times; their values are joined by /. Default: messages have no key.",
        ),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the topic if it does not exist.")
    ] = False,
    partitions: Annotated[
        int, typer.Option(min=1, help="Partitions of a topic that is created.")
    ] = 1,
    _json: Json = False,
) -> SentLines:
    """Send each line of a file as one message.

    A line is one JSON value, and is sent as it is. Empty lines are passed over. All lines of a file
    are checked before the first is sent. Lines of standard input are checked one by one, each
    before it is sent. A topic that does not exist is refused, unless --create is given. If a
    message does not arrive, no later one is sent, and the error says how many were acknowledged. A
    file whose name is demo needs the word FILE before it.

    Example: seriatim produce orders.jsonl --topic orders --key id --create

    Example: seriatim produce FILE demo --topic orders
    """
    if not TOPIC_NAME.fullmatch(topic):
        raise ConfigError(
            f"--topic {topic!r} cannot name a topic", next="use letters, digits, . _ and -"
        )
    key_fields = key or []
    total = _count_lines(Path(file), key_fields) if file != STDIN else 0
    settings = config.load_settings()
    client = context.kafka_client(settings)
    if create:
        sending.create_topics(client, {topic: partitions})
    # The broker itself would refuse each message, and much later.
    elif not context.log(None, settings).bounds(re.escape(topic)):
        raise ConfigError(
            f"there is no topic {topic}",
            next="`seriatim topics` lists those that are there; --create makes it",
        )
    with ExitStack() as stack:
        progress = stack.enter_context(RunProgress(topic, silent_seconds=SILENT_SECONDS))
        stream: BinaryIO = sys.stdin.buffer
        if file != STDIN:
            stream = stack.enter_context(Path(file).open("rb"))
        sender = sending.MessageSender(client)
        try:
            for line in read_lines(stream, file, key_fields):
                sender.send(topic, line.key, line.value, f"line {line.number}")
                if total:
                    progress(sender.sent_count, total)
        except KeyboardInterrupt:
            print_notice("stopped")
        except ConfigError as error:
            # A wrong line of standard input. What was sent before it is on its way.
            error.fields["acknowledged"] = sender.finish()
            raise
        return SentLines(topic, sender.finish())


def _count_lines(path: Path, key_fields: Sequence[str]) -> int:
    """How many messages a file has. A wrong line is refused."""
    try:
        with path.open("rb") as stream:
            return sum(1 for _ in read_lines(stream, path.name, key_fields))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", next="give a file of JSON lines, or - for standard input"
        ) from None


def read_lines(stream: BinaryIO, name: str, key_fields: Sequence[str]) -> Iterator[MessageLine]:
    """The lines of a file as messages. A line that cannot be one is refused by its number."""
    for number, text in enumerate(stream, 1):
        value = text.strip()
        if not value:
            continue
        try:
            content = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise _line_error(name, number, f"not JSON: {error}") from None
        key = None
        if key_fields:
            parts = [_key_part(content, field, name, number) for field in key_fields]
            key = "/".join(parts)
        yield MessageLine(number, key, value)


def _key_part(content: Any, field: str, name: str, number: int) -> str:
    """The value of a field as a part of the Kafka key."""
    if not isinstance(content, dict):
        raise _line_error(name, number, f"not an object, so it has no field {field!r} for the key")
    if field not in content:
        raise _line_error(name, number, f"there is no field {field!r} for the key")
    value = content[field]
    if isinstance(value, str):
        return value
    # True and false are numbers to Python.
    if isinstance(value, int | float):
        return msgspec.json.encode(value).decode()
    raise _line_error(name, number, f"{field!r} is {value!r:.60}, which cannot be a key")


def _line_error(name: str, number: int, problem: str) -> SeriatimError:
    place = "standard input" if name == STDIN else name
    advice = "fix the line, then send again"
    if name == STDIN:
        advice = f"fix the line, then send from line {number} on: those before it are in Kafka"
    return ConfigError(f"{place}: line {number}: {problem}", next=advice)


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
            help="What is done to the message with this number, by default 1000: drop, swap,"
            " repeat, poison or contradict. The option may be given several times.",
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
        sending.create_topics(client, {answer: 1})
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
    typer.echo(f"{count_of(sent_count, 'message')} sent to {', '.join(topic_names)}")
