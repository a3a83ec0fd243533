"""`seriatim watch`: look at streams again and again, and say what needs a person.

Next room: steps/watch.py looks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app, say, unforeseen
from seriatim.cli.run import Json
from seriatim.core.errors import ConfigError, IntegrityError, PlatformError, SeriatimError
from seriatim.core.retention import duration

if TYPE_CHECKING:
    from seriatim.config import Settings
    from seriatim.core.alert import Seen
    from seriatim.steps.alert import Notifier, Outbox, Sent
    from seriatim.steps.watch import Look
    from seriatim.streams import StreamFile

INTERRUPTED = 130
LONG_SECONDS, HURRIED_SECONDS = 10.0, 3.0
"""A broker that kept one look waiting for so long, in vain, is given so long by the other looks of the round."""


@app.command()
def watch(
    stream: Annotated[
        str | None, typer.Argument(metavar="[STREAM]", help="A name in streams/, or a path. Default: all.")
    ] = None,
    every: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Between two looks.")] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and exit: for cron.")] = False,
    mail: Annotated[bool, typer.Option(help="Tell whom the stream files name, by mail; each thing once.")] = True,
    json: Json = False,
) -> None:
    """Say lag, time left, and what needs a person: halts, quarantine, runs that do not come, data about to expire.

    Looks until Ctrl-C; a stream that cannot be looked at is said and looked at again. With --once the exit code
    says it: 0 all is well, 3 something needs a person; 1, 2 and 4, which come first, that a stream could not be
    looked at, or that mails wait.
    What is new is mailed to alerts.to, again after alerts.remind_hours, and once when it is over.

    Example: seriatim watch --once --json
    """
    Options.json = json
    settings = config.load()
    if once:
        if code := _round(stream, settings, mail=mail, json=json):
            raise typer.Exit(code)
        return
    try:
        while True:
            _round(stream, settings, mail=mail, json=json)
            sleep(every)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _round(stream: str | None, settings: Settings, *, mail: bool, json: bool) -> int:
    """Look at every stream; the exit code that says how they are."""
    from seriatim import streams

    names = [stream] if stream else streams.names(settings.streams)
    if not names:
        raise ConfigError(f"there are no stream files in {settings.streams}", next="make one, or set SERIATIM_STREAMS")
    round_, codes = Round(settings, json=json), []
    for name in names if mail else ():
        with suppress(Exception):  # the look says it
            codes.append(round_.send_waiting(name))
    for name in names:
        try:
            codes.append(round_.one(name, mail=mail))
        except Exception as error:  # one stream's trouble, foreseen or not, hides no other
            if Options.debug:
                raise
            known = error if isinstance(error, SeriatimError) else unforeseen(error)
            _say_trouble(name, known, json=json)
            codes.append(known.exit_code)
    return gravest(codes)


def gravest(codes: Sequence[int]) -> int:
    """One exit code for all. What needs a person was mailed: what keeps a look or a mail from its work comes first."""
    trouble = set(codes) - {0, IntegrityError.exit_code}
    return min(trouble) if trouble else max(codes)


class Round:
    """A look at each stream, one after the other: a broker or a mail server that is away keeps all waiting once."""

    def __init__(self, settings: Settings, *, json: bool) -> None:
        self.settings, self.json, self.hurried = settings, json, False

    @cached_property
    def notifier(self) -> Notifier | None:
        from seriatim import wiring

        return wiring.notifier(self.settings)

    def send_waiting(self, name: str) -> int:
        """What waits since earlier, before anybody is looked at: a look may take long. 4: some was put aside."""
        from seriatim import streams, wiring
        from seriatim.adapters.clock import WallClock
        from seriatim.steps.alert import send_waiting

        outbox, to = wiring.outbox(name, self.settings), None
        if not outbox.desk().mails:
            return 0
        with suppress(SeriatimError):
            to = streams.load(name, self.settings.streams).stream.alerts.to
        with outbox.alone():
            told = send_waiting(to, WallClock().now_seconds(), outbox, self.notifier)
        _say_sent(name, told, last=False)
        return PlatformError.exit_code if told.aside else 0

    def one(self, name: str, *, mail: bool) -> int:
        """Look at one stream, say it, and tell whom it concerns. What cannot be looked at is told as well."""
        from seriatim import streams, wiring
        from seriatim.adapters.clock import WallClock
        from seriatim.steps.alert import seen, unseen

        settings = self.settings
        if not mail:
            look = self._look(streams.load(name, settings.streams))
            _say(look, json=self.json)
            return IntegrityError.exit_code if look.concerns else 0
        outbox, file = wiring.outbox(name, settings), None
        with outbox.alone():
            try:
                file = streams.load(name, settings.streams)
                look = self._look(file)
                found = seen(file.stream, look, wiring.ledger(file), outbox.desk())
            except SeriatimError as error:
                self._tell(name, file, unseen(error, WallClock().now_seconds()), outbox)
                raise
            _say(look, json=self.json)
            unsent = self._tell(name, file, found, outbox)
        return PlatformError.exit_code if unsent else IntegrityError.exit_code if look.concerns else 0

    def _look(self, file: StreamFile) -> Look:
        from seriatim import wiring
        from seriatim.adapters.clock import WallClock
        from seriatim.page.leave import leave
        from seriatim.steps.watch import gather, judge

        store, began = wiring.ledger(file), time.monotonic()
        hurry = (HURRIED_SECONDS,) if self.hurried else ()
        try:
            log = wiring.log(file, self.settings, *hurry)
            seen = gather(file.stream, log, store, wiring.state(file), WallClock())
        except PlatformError:
            self.hurried = self.hurried or time.monotonic() - began >= LONG_SECONDS
            raise
        look = judge(file.stream, seen)
        try:
            leave(file, seen, look, store)
        except OSError as error:  # whoever only watches may not write there
            say(f"{file.stream.name}: the status file could not be written: {error}", status=None)
        return look

    def _tell(self, name: str, file: StreamFile | None, found: Seen, outbox: Outbox) -> bool:
        """Mail what is new, and what waits since earlier; whether any of it was not taken."""
        from seriatim.core.mail import Place
        from seriatim.core.stream import Alerts
        from seriatim.steps.alert import alert

        alerts = file.stream.alerts if file else Alerts()
        place = Place(
            stream=file.stream.name if file else name,
            to=alerts.to if file else None,
            airflow_url=self.settings.airflow_url,
            report=_last_report(file, self.settings) if file else "",
        )
        told = alert(place, alerts.remind_hours, found, outbox, self.notifier)
        _say_sent(name, told)
        return bool(told.waiting or told.aside)


def _say_sent(name: str, told: Sent, *, last: bool = True) -> None:
    """What was mailed, what was put aside, and, of the last try, what waits."""
    for one in told.sent:
        say(f"{name}: mailed to {', '.join(one.to)}: {one.subject}", mailed=one.subject)
    for where in told.aside:
        say(f"{name}: a mail was refused for two days and is not tried any more; it is {where}", aside=where)
    if told.trouble and last:
        what = f"{len(told.waiting)} mails wait in the outbox" if told.waiting else "not all were told"
        say(f"{name}: {what}: {told.trouble}; the next look tries again", waiting=len(told.waiting))


def _last_report(file: StreamFile, settings: Settings) -> str:
    """The report of the last run: behind Airflow's login if there is one, else as a file of this machine."""
    from seriatim.page import address

    found = sorted((Path(file.stream.output.path) / "reports").glob("[0-9]*.html"))
    if not found:
        return ""
    if settings.airflow_url and Path(file.folder) == settings.streams:
        return address.report(settings.airflow_url, file.stream.name, int(found[-1].stem))
    return found[-1].absolute().as_uri()


def _say(seen: Look, *, json: bool) -> None:
    """A line for the stream, and two for each thing that needs a person. Colours only on a terminal."""
    if json:
        _print(msgspec.to_builtins(seen))
        return
    left = "no message is in danger"
    if seen.time_left_seconds is not None:
        left = f"time left {duration(seen.time_left_seconds)} ({seen.nearest})"
        left += {True: ", catches up", False: ", would not catch up", None: ""}[seen.catches_up]
    facts = f"{seen.verdict} · {seen.partitions} partitions · lag {seen.lag} · {left}"
    line = f"{_when(seen.at_seconds)} {seen.stream}: {facts}"
    typer.secho(line, fg=typer.colors.GREEN if not seen.concerns else typer.colors.YELLOW)
    for concern in seen.concerns:
        place = f" {concern.place}" if concern.place else ""
        typer.secho(f"  {concern.concern}{place}: {concern.text}", fg=typer.colors.RED)
        for line in concern.next.splitlines():
            typer.echo(f"    → {line}")


def _say_trouble(name: str, error: SeriatimError, *, json: bool) -> None:
    if json:
        _print({"stream": name, "error": error.title, "message": error.message, "next": error.next})
        return
    typer.secho(f"{_when(time.time())} {name}: {error.title}: {error.message}", fg=typer.colors.RED)
    for line in error.next.splitlines():
        typer.echo(f"    → {line}")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _print(value: dict[str, Any]) -> None:
    typer.echo(msgspec.json.encode(value).decode())
