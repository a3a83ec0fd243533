"""`seriatim top`: all streams at a glance in a terminal, live; what the page in Airflow shows.

Next room: core/status.py has the values; page/read.py gathers them; page/streams.py is the same as HTML.
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
from seriatim.core.errors import ConfigError, KafkaSilentError, SeriatimError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from seriatim.config import Settings
    from seriatim.core.status import Glance, Tone
    from seriatim.page.read import Reader

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
NUMBERS = ("lag", "time left", "last run", "messages/s", "quarantined", "gaps")
STYLES: dict[Tone, str] = {"": "dim", "good": "green", "warn": "yellow", "bad": "bold red"}
SPARED = ("Kafka as of", "circuit", "tier", "partitions", "messages/s", "gaps", "last run", "quarantined")
"""Columns that a narrow terminal does without, the first of them first. The name of a stream is never one."""
PADDING = 3
CELLS_MAX = 24
NEEDS_MAX = 12
WAIT_SECONDS = 0.05


@app.command()
def top(
    stream: Annotated[str | None, typer.Argument(metavar="[STREAM]", help="A name in streams/. Default: all.")] = None,
    every: Annotated[float, typer.Option(min=0.5, metavar="SECONDS", help="Between two looks.")] = 5.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once and exit. So it is where there is no terminal.")
    ] = False,
    ask: Annotated[
        bool, typer.Option(help="Ask Kafka at each look. Without: from the ledger and the last look of a run or watch.")
    ] = True,
    json: Json = False,
) -> None:
    """Show all streams at a glance, live: tier, verdict, lag, time left, rate, quarantine, gaps; Ctrl-C ends it.

    What needs a person comes first, with what to type. A stream that cannot be asked about is shown as it was last
    seen, with how long ago that is. With --json one object for each stream, once.

    Example: seriatim top
    Example: seriatim top --once --no-ask
    """
    from seriatim.page.read import Reader

    Options.json = json
    settings = config.load()
    reader = Reader(settings.streams, time.time)
    names = [stream] if stream else reader.names()
    if not names:
        raise ConfigError(f"there are no stream files in {settings.streams}", next="make one, or set SERIATIM_STREAMS")
    if stream:
        reader.file(stream)
    if json:
        for one in _look(names, settings, reader, ask=ask):
            typer.echo(msgspec.json.encode(told(one)).decode())
        return
    _show(names, settings, reader, ask=ask, every=0.0 if once or not sys.stdout.isatty() else every)


def told(one: Glance) -> dict[str, Any]:
    """A stream for scripts."""
    nearest = one.nearest
    left = nearest.time_left_seconds if nearest else None
    return {**msgspec.to_builtins(one), "time_left_seconds": left, "nearest": nearest.place if nearest else None}


def _show(names: list[str], settings: Settings, reader: Reader, *, ask: bool, every: float) -> None:
    """On the terminal, again and again; once if `every` is 0."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    if not every:
        console.print(screen(_look(names, settings, reader, ask=ask), time.time(), console.width))
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            live.update(screen(_look(names, settings, reader, ask=False), time.time(), console.width), refresh=True)
            while True:
                seen = aside(lambda: _look(names, settings, reader, ask=ask))
                live.update(screen(seen, time.time(), console.width), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        return


def aside(look: Callable[[], list[Glance]]) -> list[Glance]:
    """A look in a thread of its own: a client that waits for a silent broker would not let Ctrl-C through."""
    answers: SimpleQueue[tuple[list[Glance], BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((look(), None))
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            answers.put(([], error))

    Thread(target=run, daemon=True).start()
    while answers.empty():
        time.sleep(WAIT_SECONDS)
    seen, error = answers.get()
    if error is not None:
        raise error
    return seen


def _look(names: list[str], settings: Settings, reader: Reader, *, ask: bool) -> list[Glance]:
    """Every stream, what needs a person first."""
    from seriatim.core.status import urgent_first

    troubles = _ask_all(names, settings, reader) if ask else {}
    found = [reader.glance(name) for name in names]
    return urgent_first(
        msgspec.structs.replace(one, trouble=one.trouble or troubles.get(one.stream, "")) for one in found
    )


def _ask_all(names: list[str], settings: Settings, reader: Reader) -> dict[str, str]:
    """Ask about each. A broker that did not answer once is not waited for again, a stream after the other."""
    troubles: dict[str, str] = {}
    broker_silence = ""
    for name in names:
        if broker_silence:
            troubles[name] = broker_silence
            continue
        try:
            troubles[name] = _ask(name, settings, reader)
        except KafkaSilentError as error:
            troubles[name] = broker_silence = error.message
    return troubles


def _ask(name: str, settings: Settings, reader: Reader) -> str:
    """Ask Kafka, and leave what it says for all who look; why that was not possible. Raises `KafkaSilentError`."""
    from seriatim import wiring
    from seriatim.adapters.clock import WallClock
    from seriatim.page.leave import leave
    from seriatim.steps.watch import gather, judge

    try:
        file = reader.file(name)
        store = wiring.ledger(file)
        seen = gather(file.stream, wiring.log(file, settings), store, wiring.state(file), WallClock())
        leave(file, seen, judge(file.stream, seen), store)
    except KafkaSilentError:
        raise
    except SeriatimError as error:
        return error.message
    except OSError as error:
        return f"the status file could not be written: {error.strerror}"
    return ""


def screen(glances: list[Glance], now_seconds: float, width: int = 200) -> Group:
    """A table of streams, and below it what needs a person."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = [dict(zip(COLUMNS, _row(one, now_seconds), strict=True)) for one in glances]
    shown = _fitting(rows, width)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for name in shown:
        drawn.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=name != "stream")
    for row in rows:
        drawn.add_row(*(row[name] for name in shown))
    needs = [(one.stream, need) for one in glances for need in one.concerns]
    lines: list[Text] = []
    for stream, need in needs[:NEEDS_MAX]:
        lines.append(Text(_plain(f"{stream} {need.key}: {need.text}"), style="red", no_wrap=True, overflow="ellipsis"))
        command, _, _ = need.next.partition("\n")
        lines.append(Text(f"  → {_plain(command)}", no_wrap=True, overflow="ellipsis"))
    lines += [Text(_plain(f"{one.stream}: {one.trouble}"), style="yellow") for one in glances if one.trouble]
    if len(needs) > NEEDS_MAX:
        lines.append(Text(f"… and {len(needs) - NEEDS_MAX} more", style="dim"))
    return Group(drawn, *lines)


def _fitting(rows: list[dict[str, Text]], width: int) -> list[str]:
    """The columns that there is room for."""
    widths = {name: max(len(name), *(row[name].cell_len for row in rows)) + PADDING for name in COLUMNS}
    shown = list(COLUMNS)
    for name in SPARED:
        if sum(widths[one] for one in shown) <= width:
            break
        shown.remove(name)
    return shown


def _row(one: Glance, now_seconds: float) -> list[Text]:
    from rich.text import Text

    from seriatim.core.status import time_tone
    from seriatim.page.draw import ago, time_left

    nearest = one.nearest
    left: Tone = time_tone(nearest) if nearest else ""
    return [
        Text(_plain(one.stream), style="bold"),
        Text(one.tier),
        Text(one.verdict, style=STYLES[one.tone]),
        _cells(one),
        Text("–" if one.lag is None else f"{one.lag:,}"),
        Text(time_left(nearest.time_left_seconds if nearest else None), style=STYLES[left] if left else ""),
        Text(ago(one.ran_seconds, now_seconds)),
        Text("–" if one.rate is None else f"{one.rate:,.0f}"),
        _count(one.quarantined),
        _count(one.gaps_open),
        Text(one.circuit, style="bold red" if one.circuit == "open" else ""),
        Text(ago(one.as_of_seconds, now_seconds), style="dim"),
    ]


def _cells(one: Glance) -> Text:
    """A block for each partition, by colour; the worst of them where there are too many."""
    from rich.text import Text

    order = sorted(one.partitions, key=lambda place: (place.tone != "bad", place.tone != "warn"))
    shown = one.partitions if len(one.partitions) <= CELLS_MAX else order[:CELLS_MAX]
    drawn = Text()
    for place in shown:
        drawn.append("■", style=STYLES[place.tone])
    return drawn if len(shown) == len(one.partitions) else drawn.append(f" of {len(one.partitions)}", style="dim")


def _count(number: int | None) -> Text:
    from rich.text import Text

    return Text("–" if number is None or number < 0 else f"{number:,}", style="bold red" if number else "dim")


def _plain(words: str) -> str:
    """One line; what a terminal would obey is made visible."""
    from seriatim.core.integrity import shortened

    return shortened(" ".join(words.splitlines()), 300)
