"""`seriatim top`: all streams at a glance in a terminal, live; what the page in Airflow shows.

Next room: operations/stream_status.py has the values; web/read.py gathers them; web/streams.py is
the same as HTML.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app
from seriatim.cli.run import Json
from seriatim.errors import ConfigError, KafkaSilentError, SeriatimError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from seriatim.config import Settings
    from seriatim.operations.stream_status import StreamStatus, Tone
    from seriatim.web.read import PageReader

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
]
COLUMNS += ["circuit", "Kafka as of"]
NUMBER_COLUMNS = ("lag", "time left", "last run", "messages/s", "quarantined", "gaps")
STYLES: dict[Tone, str] = {"": "dim", "good": "green", "warn": "yellow", "bad": "bold red"}
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
"""Columns that a narrow terminal does without, the first of them first. The name of a stream is
never one.
"""
PADDING = 3
PARTITIONS_SHOWN_MAX = 24
CONCERNS_SHOWN_MAX = 12
WAIT_SECONDS = 0.05


@app.command()
def top(
    stream: Annotated[
        str | None, typer.Argument(metavar="[STREAM]", help="A name in streams/. Default: all.")
    ] = None,
    every: Annotated[
        float, typer.Option(min=0.5, metavar="SECONDS", help="Between two looks.")
    ] = 5.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Look once and exit. So it is where there is no terminal."),
    ] = False,
    ask: Annotated[
        bool,
        typer.Option(
            help="Ask Kafka at each look. Without: from the ledger and the last look of a run or watch."
        ),
    ] = True,
    json: Json = False,
) -> None:
    """Show all streams at a glance, live: tier, verdict, lag, time left, rate, quarantine, gaps;
    Ctrl-C ends it.

    What needs a person comes first, with what to type. A stream that cannot be asked about is shown
    as it was last seen, with how long ago that is. With --json one object for each stream, once.

    Example: seriatim top Example: seriatim top --once --no-ask
    """
    from seriatim.web.read import PageReader

    Options.json = json
    settings = config.load_settings()
    reader = PageReader(settings.streams, time.time)
    names = [stream] if stream else reader.stream_names()
    if not names:
        raise ConfigError(
            f"there are no stream files in {settings.streams}",
            next="make one, or set SERIATIM_STREAMS",
        )
    if stream:
        reader.stream_file(stream)
    if json:
        for one in _read_statuses(names, settings, reader, ask_kafka=ask):
            typer.echo(msgspec.json.encode(status_values(one)).decode())
        return
    _print_live(
        names,
        settings,
        reader,
        ask_kafka=ask,
        every_seconds=0.0 if once or not sys.stdout.isatty() else every,
    )


def status_values(stream_status: StreamStatus) -> dict[str, Any]:
    """A stream for scripts."""
    nearest = stream_status.nearest
    left = nearest.time_left_seconds if nearest else None
    return {
        **msgspec.to_builtins(stream_status),
        "time_left_seconds": left,
        "nearest": nearest.partition_name if nearest else None,
    }


def _print_live(
    names: list[str],
    settings: Settings,
    reader: PageReader,
    *,
    ask_kafka: bool,
    every_seconds: float,
) -> None:
    """On the terminal, again and again; once if `every` is 0."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    if not every_seconds:
        console.print(
            render_streams_screen(
                _read_statuses(names, settings, reader, ask_kafka=ask_kafka),
                time.time(),
                console.width,
            )
        )
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            live.update(
                render_streams_screen(
                    _read_statuses(names, settings, reader, ask_kafka=False),
                    time.time(),
                    console.width,
                ),
                refresh=True,
            )
            while True:
                seen = run_in_thread(
                    lambda: _read_statuses(names, settings, reader, ask_kafka=ask_kafka)
                )
                live.update(render_streams_screen(seen, time.time(), console.width), refresh=True)
                time.sleep(every_seconds)
    except KeyboardInterrupt:
        return


def run_in_thread(read_statuses: Callable[[], list[StreamStatus]]) -> list[StreamStatus]:
    """A look in a thread of its own: a client that waits for a silent broker would not let Ctrl-C
    through.
    """
    answers: SimpleQueue[tuple[list[StreamStatus], BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((read_statuses(), None))
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            answers.put(([], error))

    Thread(target=run, daemon=True).start()
    while answers.empty():
        time.sleep(WAIT_SECONDS)
    seen, error = answers.get()
    if error is not None:
        raise error
    return seen


def _read_statuses(
    names: list[str], settings: Settings, reader: PageReader, *, ask_kafka: bool
) -> list[StreamStatus]:
    """Every stream, what needs a person first."""
    from seriatim.operations.stream_status import urgent_first

    troubles = _refresh_all(names, settings, reader) if ask_kafka else {}
    found = [reader.stream_status(name) for name in names]
    return urgent_first(
        msgspec.structs.replace(one, trouble=one.trouble or troubles.get(one.stream, ""))
        for one in found
    )


def _refresh_all(names: list[str], settings: Settings, reader: PageReader) -> dict[str, str]:
    """Ask about each. A broker that did not answer once is not waited for again, a stream after the
    other.
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
            troubles[name] = broker_silence = error.message
    return troubles


def _refresh_status_file(name: str, settings: Settings, reader: PageReader) -> str:
    """Ask Kafka, and leave what it says for all who look; why that was not possible. Raises
    `KafkaSilentError`.
    """
    from seriatim import context
    from seriatim.clock import WallClock
    from seriatim.operations.watch import assess_watch_input, read_watch_input
    from seriatim.web.write_status import write_status_file

    try:
        file = reader.stream_file(name)
        store = context.ledger(file)
        seen = read_watch_input(
            file.stream, context.log(file, settings), store, context.state(file), WallClock()
        )
        write_status_file(file, seen, assess_watch_input(file.stream, seen), store)
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
    """A table of streams, and below it what needs a person."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = [
        dict(zip(COLUMNS, _render_row(one, now_seconds), strict=True)) for one in stream_statuses
    ]
    shown = _columns_that_fit(rows, width)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for name in shown:
        drawn.add_column(
            name, justify="right" if name in NUMBER_COLUMNS else "left", no_wrap=name != "stream"
        )
    for row in rows:
        drawn.add_row(*(row[name] for name in shown))
    needs = [(one.stream, need) for one in stream_statuses for need in one.concerns]
    lines: list[Text] = []
    for stream, need in needs[:CONCERNS_SHOWN_MAX]:
        lines.append(
            Text(
                _single_line(f"{stream} {need.key}: {need.text}"),
                style="red",
                no_wrap=True,
                overflow="ellipsis",
            )
        )
        command, _, _ = need.next.partition("\n")
        lines.append(Text(f"  → {_single_line(command)}", no_wrap=True, overflow="ellipsis"))
    lines += [
        Text(_single_line(f"{one.stream}: {one.trouble}"), style="yellow")
        for one in stream_statuses
        if one.trouble
    ]
    if len(needs) > CONCERNS_SHOWN_MAX:
        lines.append(Text(f"… and {len(needs) - CONCERNS_SHOWN_MAX} more", style="dim"))
    return Group(drawn, *lines)


def _columns_that_fit(rows: list[dict[str, Text]], width: int) -> list[str]:
    """The columns that there is room for."""
    widths = {
        name: max(len(name), *(row[name].cell_len for row in rows)) + PADDING for name in COLUMNS
    }
    shown = list(COLUMNS)
    for name in OPTIONAL_COLUMNS:
        if sum(widths[one] for one in shown) <= width:
            break
        shown.remove(name)
    return shown


def _render_row(stream_status: StreamStatus, now_seconds: float) -> list[Text]:
    from rich.text import Text

    from seriatim.operations.stream_status import time_tone
    from seriatim.web.draw import render_age, render_time_left

    nearest = stream_status.nearest
    left: Tone = time_tone(nearest) if nearest else ""
    return [
        Text(_single_line(stream_status.stream), style="bold"),
        Text(stream_status.tier),
        Text(stream_status.verdict, style=STYLES[stream_status.tone]),
        _render_partitions(stream_status),
        Text("–" if stream_status.lag is None else f"{stream_status.lag:,}"),
        Text(
            render_time_left(nearest.time_left_seconds if nearest else None),
            style=STYLES[left] if left else "",
        ),
        Text(render_age(stream_status.last_run_seconds, now_seconds)),
        Text("–" if stream_status.rate is None else f"{stream_status.rate:,.0f}"),
        _render_count(stream_status.quarantined),
        _render_count(stream_status.gaps_open),
        Text(stream_status.circuit, style="bold red" if stream_status.circuit == "open" else ""),
        Text(render_age(stream_status.as_of_seconds, now_seconds), style="dim"),
    ]


def _render_partitions(stream_status: StreamStatus) -> Text:
    """A block for each partition, by colour; the worst of them where there are too many."""
    from rich.text import Text

    order = sorted(
        stream_status.partitions, key=lambda place: (place.tone != "bad", place.tone != "warn")
    )
    shown = (
        stream_status.partitions
        if len(stream_status.partitions) <= PARTITIONS_SHOWN_MAX
        else order[:PARTITIONS_SHOWN_MAX]
    )
    drawn = Text()
    for place in shown:
        drawn.append("■", style=STYLES[place.tone])
    return (
        drawn
        if len(shown) == len(stream_status.partitions)
        else drawn.append(f" of {len(stream_status.partitions)}", style="dim")
    )


def _render_count(number: int | None) -> Text:
    from rich.text import Text

    return Text(
        "–" if number is None or number < 0 else f"{number:,}",
        style="bold red" if number else "dim",
    )


def _single_line(text: str) -> str:
    """One line; what a terminal would obey is made visible."""
    from seriatim.engine.findings import shorten

    return shorten(" ".join(text.splitlines()), 300)
