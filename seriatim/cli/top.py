"""`seriatim top`: all streams at a glance in a terminal, live. Airflow's page shows the same.

Next: operations/status.py has the values; web/read.py gathers them; web/views.py renders
them as HTML.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Annotated, Literal

import msgspec
import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from seriatim import clock, config, context
from seriatim.cli import JsonObject, print_json
from seriatim.cli.options import Json, stream_names
from seriatim.config import Settings
from seriatim.engine.findings import shorten
from seriatim.errors import KafkaSilentError, SeriatimError
from seriatim.operations.missing_messages import MissingMessageSearch
from seriatim.operations.status import (
    StreamStatus,
    Tone,
    time_tone,
    to_json_values,
    urgent_first,
)
from seriatim.web.read import PageReader
from seriatim.web.render import render_age, render_time_left
from seriatim.web.write_status import watch_stream_file, write_status_file

Look = Callable[..., list[StreamStatus]]
"""Reads the status of all streams; `ask_kafka` may be given."""

COLUMNS = [
    "stream",
    "tier",
    "verdict",
    "partitions",
    "lag",
    "time left",
    "last run",
    "messages/s",
    "quarantined",
    "gaps",
    "circuit",
    "Kafka as of",
]
NUMBER_COLUMNS = ("lag", "time left", "last run", "messages/s", "quarantined", "gaps")
OPTIONAL_COLUMNS = (
    "Kafka as of",
    "circuit",
    "tier",
    "partitions",
    "messages/s",
    "gaps",
    "last run",
    "quarantined",
)
"""Columns that a narrow terminal leaves out, in this order. The name of a stream always stays."""
STYLES: dict[Tone, str] = {"": "dim", "good": "green", "warn": "yellow", "bad": "bold red"}
WRAPPED_COLUMNS = ("stream", "verdict")
"""Columns with texts: in a very narrow terminal they are wrapped, and not cut."""
PADDING = 3
"""The width that rich adds to a column."""
PARTITIONS_SHOWN_MAX = 24
CONCERNS_SHOWN_MAX = 12
ADVICE_LINES_MAX = 6
JSON_KEYS = (
    "stream",
    "tier",
    "verdict",
    "circuit",
    "sequence",
    "checked",
    "partitions",
    "ran_seconds",
    "rate",
    "gaps_open",
    "concerns",
    "trouble",
)
HIDDEN_PARTITION_KEYS = ("topic_id", "unread", "headless", "counts")
WAIT_SECONDS = 0.05
"""The time between two looks at whether a thread has finished."""


def top(
    stream: Annotated[
        str | None, typer.Argument(metavar="STREAM", help="A name in streams/. Default: all.")
    ] = None,
    every: Annotated[
        float, typer.Option(min=0.5, metavar="SECONDS", help="The time between two looks.")
    ] = 5.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Look once and exit. Without a terminal this is always the case."
        ),
    ] = False,
    ask: Annotated[
        bool,
        typer.Option(
            help="Ask Kafka at each look. Without it the ledger is shown,"
            " and what a run or watch saw last."
        ),
    ] = True,
    json: Json = False,
) -> None:
    """Show all streams at a glance, live.

    Each stream has a line with tier, verdict, lag, time left, rate, quarantine and gaps. Ctrl-C
    ends it. What needs a person comes first, with the command to type. A stream that cannot
    be asked about is shown as it was last seen, with the age of that look. With --json it prints
    one object for each stream, once.

    Example: seriatim top

    Example: seriatim top --once --no-ask
    """
    settings = config.load_settings()
    reader = PageReader(settings.streams, _now_seconds)
    names = stream_names(stream)
    if stream:
        reader.stream_file(stream)  # refuse a stream that does not exist
    if json:
        for stream_status in _read_statuses(names, settings, reader, ask_kafka=ask):
            print_json(_json_values(stream_status))
        return

    def look(*, ask_kafka: bool = ask) -> list[StreamStatus]:
        return _read_statuses(names, settings, reader, ask_kafka=ask_kafka)

    if once or not sys.stdout.isatty():
        _print_once(look)
    else:
        _print_live(look, every)


def _now_seconds() -> float:
    # The clock by which Kafka is asked as well, so that both are of one time.
    return clock.WallClock().now_seconds()


def _json_values(stream_status: StreamStatus) -> JsonObject:
    """A stream's status as plain values, for scripts."""
    nearest = stream_status.nearest
    return {
        **to_json_values(stream_status, JSON_KEYS, HIDDEN_PARTITION_KEYS),
        "lag": stream_status.lag,
        "as_of_seconds": stream_status.at_seconds,
        "quarantined": stream_status.quarantined_count,
        "sessions": msgspec.to_builtins(stream_status.quarantined),
        "time_left_seconds": nearest and nearest.time_left_seconds,
        "nearest": nearest and nearest.partition_name,
    }


def _print_once(look: Look) -> None:
    """Print the screen once."""
    # In a log or a pipe rich would cut at 80 characters.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(render_streams_screen(look(), _now_seconds(), console.width))


def _print_live(look: Look, every_seconds: float) -> None:
    """Show the screen until Ctrl-C. The first one comes at once, without asking Kafka."""
    console = Console(highlight=False)

    def show(stream_statuses: list[StreamStatus]) -> None:
        screen = render_streams_screen(stream_statuses, _now_seconds(), console.width)
        live.update(screen, refresh=True)

    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            # What the ledger and the status files have is shown at once; Kafka may take seconds.
            show(look(ask_kafka=False))
            while True:
                show(run_in_thread(look))
                time.sleep(every_seconds)
    except KeyboardInterrupt:
        return


def run_in_thread(read_statuses: Callable[[], list[StreamStatus]]) -> list[StreamStatus]:
    """Read the statuses in a thread of its own, and wait for the result.

    A Kafka client that waits for a broker holds the main thread in C code, where Ctrl-C has no
    effect. This wait can be interrupted.
    """
    answers: SimpleQueue[tuple[list[StreamStatus], BaseException | None]] = SimpleQueue()

    def read() -> None:
        try:
            answers.put((read_statuses(), None))
        except BaseException as error:  # noqa: BLE001  # raised again in the waiting thread
            answers.put(([], error))

    Thread(target=read, daemon=True).start()
    while answers.empty():
        time.sleep(WAIT_SECONDS)
    stream_statuses, error = answers.get()
    if error is not None:
        raise error
    return stream_statuses


def _read_statuses(
    names: list[str], settings: Settings, reader: PageReader, *, ask_kafka: bool
) -> list[StreamStatus]:
    """The status of every stream; streams that need a person come first."""
    troubles: dict[str, str] = {}
    if ask_kafka:
        troubles = _refresh_all(names, settings, reader)
    stream_statuses = []
    for name in names:
        stream_status = reader.stream_status(name)
        trouble = stream_status.trouble or troubles.get(stream_status.stream, "")
        stream_statuses.append(msgspec.structs.replace(stream_status, trouble=trouble))
    return urgent_first(stream_statuses)


def _refresh_all(names: list[str], settings: Settings, reader: PageReader) -> dict[str, str]:
    """Ask Kafka about each stream; return what went wrong, by stream.

    All streams have the same broker. If it did not answer once, the other streams do not wait.
    """
    troubles: dict[str, str] = {}
    broker_silence = ""
    for name in names:
        if broker_silence:
            troubles[name] = broker_silence
            continue
        try:
            troubles[name] = _refresh_status_file(name, settings, reader)
        except KafkaSilentError as error:
            broker_silence = error.message
            troubles[name] = broker_silence
    return troubles


def _refresh_status_file(name: str, settings: Settings, reader: PageReader) -> str:
    """Ask Kafka, and write the answer to the status file, where every reader looks.

    Returns why that was not possible; empty if it was. A silent broker raises `KafkaSilentError`.
    """
    try:
        file = reader.stream_file(name)
        stream_status = watch_stream_file(
            file,
            context.log(file, settings),
            context.ledger(file),
            context.state(file),
            clock.WallClock(),
            search=MissingMessageSearch(context.ConnectedStream(file, settings)),
        )
        write_status_file(file, stream_status)
    except KafkaSilentError:
        raise
    except SeriatimError as error:
        return error.message
    except OSError as error:
        return f"the status file could not be written: {error.strerror}"
    return ""


def render_streams_screen(
    stream_statuses: list[StreamStatus], now_seconds: float, width: int = 200
) -> Group:
    """Render a table of streams, and below it what needs a person."""
    rows = []
    for stream_status in stream_statuses:
        cells = _render_row(stream_status, now_seconds)
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    columns = _columns_that_fit(rows, width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in NUMBER_COLUMNS else "left"
        table.add_column(column, justify=justify, no_wrap=column not in WRAPPED_COLUMNS)
    for row in rows:
        table.add_row(*[row[column] for column in columns])
    return Group(table, *_render_concerns(stream_statuses))


def _render_concerns(stream_statuses: list[StreamStatus]) -> list[Text]:
    """The lines below the table: concerns with the next command, then trouble of looking."""
    lines: list[Text] = []
    concern_count = 0
    for stream_status in stream_statuses:
        for concern in stream_status.concerns:
            if concern.kind == "swapped":
                continue  # The line about quarantine has the same command.
            concern_count += 1
            if concern_count > CONCERNS_SHOWN_MAX:
                continue
            text = _single_line(f"{stream_status.stream} {concern.key}: {concern.text}")
            # Folded and not cut: a command that is cut cannot be pasted.
            lines.append(Text(text, style="red", overflow="fold"))
            for advice_line in concern.next.splitlines()[:ADVICE_LINES_MAX]:
                lines.append(Text(f"  → {_single_line(advice_line)}", overflow="fold"))
    for stream_status in stream_statuses:
        if stream_status.trouble:
            text = _single_line(f"{stream_status.stream}: {stream_status.trouble}")
            lines.append(Text(text, style="yellow"))
    hidden_count = concern_count - CONCERNS_SHOWN_MAX
    if hidden_count > 0:
        lines.append(Text(f"… and {hidden_count} more", style="dim"))
    return lines


def _columns_that_fit(rows: list[dict[str, Text]], width: int) -> list[str]:
    """The columns for which the terminal is wide enough."""
    widths = {}
    for column in COLUMNS:
        cell_widths = [row[column].cell_len for row in rows]
        widths[column] = max([len(column), *cell_widths]) + PADDING
    columns = list(COLUMNS)
    for column in OPTIONAL_COLUMNS:
        if sum(widths[shown_column] for shown_column in columns) <= width:
            break
        columns.remove(column)
    return columns


def _render_row(stream_status: StreamStatus, now_seconds: float) -> list[Text]:
    """The cells of a stream, in the order of COLUMNS."""
    lag = "–" if stream_status.lag is None else f"{stream_status.lag:,}"
    rate = "–" if stream_status.rate is None else f"{stream_status.rate:,.0f}"
    circuit_style = "bold red" if stream_status.circuit == "open" else ""
    return [
        Text(_single_line(stream_status.stream), style="bold"),
        Text(stream_status.tier),
        Text(stream_status.verdict_text, style=STYLES[stream_status.tone]),
        _render_partitions(stream_status),
        Text(lag),
        _render_time_left(stream_status),
        Text(render_age(stream_status.last_run_seconds, now_seconds)),
        Text(rate),
        _render_count(stream_status.quarantined_count),
        _render_count(stream_status.gaps_open),
        Text(stream_status.circuit, style=circuit_style),
        Text(render_age(stream_status.at_seconds, now_seconds), style="dim"),
    ]


def _render_time_left(stream_status: StreamStatus) -> Text:
    """The time left of the partition that has the least."""
    nearest = stream_status.nearest
    if not nearest:
        return Text(render_time_left(None))
    tone: Tone = time_tone(nearest)
    style = STYLES[tone] if tone else ""
    return Text(render_time_left(nearest.time_left_seconds), style=style)


def _render_partitions(stream_status: StreamStatus) -> Text:
    """A coloured block for each partition; only the worst ones if there are too many."""
    partitions = stream_status.partitions
    has_too_many = len(partitions) > PARTITIONS_SHOWN_MAX
    shown_partitions = partitions
    if has_too_many:
        worst_first = sorted(
            partitions, key=lambda partition: (partition.tone != "bad", partition.tone != "warn")
        )
        shown_partitions = worst_first[:PARTITIONS_SHOWN_MAX]
    text = Text()
    for partition in shown_partitions:
        text.append("■", style=STYLES[partition.tone])
    if has_too_many:
        text.append(f" of {len(partitions)}", style="dim")
    return text


def _render_count(number: int | None) -> Text:
    """A count; a dash if it is not known."""
    text = "–" if number is None else f"{number:,}"
    return Text(text, style="bold red" if number else "dim")


def _single_line(text: str) -> str:
    """A text on one line, with characters that a terminal would act on made visible."""
    return shorten(" ".join(text.splitlines()), 300)
