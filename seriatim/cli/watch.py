"""`seriatim watch`: look at streams again and again, and say what needs a person.

Next room: operations/watch.py looks.
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
from seriatim.cli import Options, app, print_notice, unexpected_error
from seriatim.cli.run import Json
from seriatim.engine.findings import format_duration
from seriatim.errors import ConfigError, IntegrityError, PlatformError, SeriatimError

if TYPE_CHECKING:
    from seriatim.alerts.alert import Notifier, Outbox, SendResult
    from seriatim.alerts.incidents import Observation
    from seriatim.config import Settings
    from seriatim.operations.watch import WatchResult
    from seriatim.stream_files import StreamFile

INTERRUPTED = 130
LONG_SECONDS, HURRIED_SECONDS = 10.0, 3.0
"""A broker that kept one look waiting for so long, in vain, is given so long by the other looks of
the round.
"""


@app.command()
def watch(
    stream: Annotated[
        str | None,
        typer.Argument(metavar="[STREAM]", help="A name in streams/, or a path. Default: all."),
    ] = None,
    every: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Between two looks.")
    ] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and exit: for cron.")] = False,
    mail: Annotated[
        bool, typer.Option(help="Tell whom the stream files name, by mail; each thing once.")
    ] = True,
    json: Json = False,
) -> None:
    """Say lag, time left, and what needs a person: halts, quarantine, runs that do not come, data
    about to expire.

    Looks until Ctrl-C; a stream that cannot be looked at is said and looked at again. With --once
    the exit code says it: 0 all is well, 3 something needs a person; 1, 2 and 4, which come first,
    that a stream could not be looked at, or that mails wait. What is new is mailed to alerts.to,
    again after alerts.remind_hours, and once when it is over.

    Example: seriatim watch --once --json
    """
    Options.json = json
    settings = config.load_settings()
    if once:
        if code := _watch_all(stream, settings, mail=mail, json=json):
            raise typer.Exit(code)
        return
    try:
        while True:
            _watch_all(stream, settings, mail=mail, json=json)
            sleep(every)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _watch_all(stream: str | None, settings: Settings, *, mail: bool, json: bool) -> int:
    """Look at every stream; the exit code that says how they are."""
    from seriatim import stream_files

    names = [stream] if stream else stream_files.list_streams(settings.streams)
    if not names:
        raise ConfigError(
            f"there are no stream files in {settings.streams}",
            next="make one, or set SERIATIM_STREAMS",
        )
    round_, codes = WatchRound(settings, json=json), []
    for name in names if mail else ():
        with suppress(Exception):  # the look says it
            codes.append(round_.send_waiting_mails(name))
    for name in names:
        try:
            codes.append(round_.watch_stream(name, mail=mail))
        except Exception as error:  # one stream's trouble, foreseen or not, hides no other
            if Options.debug:
                raise
            known = error if isinstance(error, SeriatimError) else unexpected_error(error)
            _print_stream_error(name, known, json=json)
            codes.append(known.exit_code)
    return gravest_exit_code(codes)


def gravest_exit_code(codes: Sequence[int]) -> int:
    """One exit code for all. What needs a person was mailed: what keeps a look or a mail from its
    work comes first.
    """
    trouble = set(codes) - {0, IntegrityError.exit_code}
    return min(trouble) if trouble else max(codes)


class WatchRound:
    """A look at each stream, one after the other: a broker or a mail server that is away keeps all
    waiting once.
    """

    def __init__(self, settings: Settings, *, json: bool) -> None:
        self.settings, self.json, self.is_hurried = settings, json, False

    @cached_property
    def notifier(self) -> Notifier | None:
        from seriatim import context

        return context.notifier(self.settings)

    def send_waiting_mails(self, name: str) -> int:
        """What waits since earlier, before anybody is looked at: a look may take long. 4: some was
        put aside.
        """
        from seriatim import context, stream_files
        from seriatim.alerts.alert import send_waiting_mails
        from seriatim.clock import WallClock

        outbox, to = context.outbox(name, self.settings), None
        if not outbox.alert_state().mails:
            return 0
        with suppress(SeriatimError):
            to = stream_files.load_stream(name, self.settings.streams).stream.alerts.to
        with outbox.lock():
            told = send_waiting_mails(to, WallClock().now_seconds(), outbox, self.notifier)
        _print_sent(name, told, is_last_try=False)
        return PlatformError.exit_code if told.refused_mail_paths else 0

    def watch_stream(self, name: str, *, mail: bool) -> int:
        """Look at one stream, say it, and tell whom it concerns. What cannot be looked at is told
        as well.
        """
        from seriatim import context, stream_files
        from seriatim.alerts.alert import observe_failure, observe_stream
        from seriatim.clock import WallClock

        settings = self.settings
        if not mail:
            look = self._observe(stream_files.load_stream(name, settings.streams))
            _print_watch_result(look, json=self.json)
            return IntegrityError.exit_code if look.concerns else 0
        outbox, file = context.outbox(name, settings), None
        with outbox.lock():
            try:
                file = stream_files.load_stream(name, settings.streams)
                look = self._observe(file)
                found = observe_stream(
                    file.stream, look, context.ledger(file), outbox.alert_state()
                )
            except SeriatimError as error:
                self._send_alerts(
                    name, file, observe_failure(error, WallClock().now_seconds()), outbox
                )
                raise
            _print_watch_result(look, json=self.json)
            unsent = self._send_alerts(name, file, found, outbox)
        return (
            PlatformError.exit_code if unsent else IntegrityError.exit_code if look.concerns else 0
        )

    def _observe(self, file: StreamFile) -> WatchResult:
        from seriatim import context
        from seriatim.clock import WallClock
        from seriatim.operations.watch import assess_watch_input, read_watch_input
        from seriatim.web.write_status import write_status_file

        store, began = context.ledger(file), time.monotonic()
        hurry = (HURRIED_SECONDS,) if self.is_hurried else ()
        try:
            log = context.log(file, self.settings, *hurry)
            seen = read_watch_input(file.stream, log, store, context.state(file), WallClock())
        except PlatformError:
            self.is_hurried = self.is_hurried or time.monotonic() - began >= LONG_SECONDS
            raise
        look = assess_watch_input(file.stream, seen)
        try:
            write_status_file(file, seen, look, store)
        except OSError as error:  # whoever only watches may not write there
            print_notice(
                f"{file.stream.name}: the status file could not be written: {error}", status=None
            )
        return look

    def _send_alerts(
        self, name: str, file: StreamFile | None, observation: Observation, outbox: Outbox
    ) -> bool:
        """Mail what is new, and what waits since earlier; whether any of it was not taken."""
        from seriatim.alerts.alert import send_alerts
        from seriatim.alerts.mail import MailContext
        from seriatim.stream import AlertSettings

        alerts = file.stream.alerts if file else AlertSettings()
        place = MailContext(
            stream=file.stream.name if file else name,
            to=alerts.to if file else None,
            airflow_url=self.settings.airflow_url,
            report_url=_last_report(file, self.settings) if file else "",
        )
        told = send_alerts(place, alerts.remind_hours, observation, outbox, self.notifier)
        _print_sent(name, told)
        return bool(told.waiting_mails or told.refused_mail_paths)


def _print_sent(name: str, send_result: SendResult, *, is_last_try: bool = True) -> None:
    """What was mailed, what was put aside, and, of the last try, what waits."""
    for one in send_result.sent_mails:
        print_notice(f"{name}: mailed to {', '.join(one.to)}: {one.subject}", mailed=one.subject)
    for where in send_result.refused_mail_paths:
        print_notice(
            f"{name}: a mail was refused for two days and is not tried any more; it is {where}",
            aside=where,
        )
    if send_result.trouble and is_last_try:
        what = (
            f"{len(send_result.waiting_mails)} mails wait in the outbox"
            if send_result.waiting_mails
            else "not all were told"
        )
        print_notice(
            f"{name}: {what}: {send_result.trouble}; the next look tries again",
            waiting=len(send_result.waiting_mails),
        )


def _last_report(file: StreamFile, settings: Settings) -> str:
    """The report of the last run: behind Airflow's login if there is one, else as a file of this
    machine.
    """
    from seriatim.web import address

    found = sorted((Path(file.stream.output.path) / "reports").glob("[0-9]*.html"))
    if not found:
        return ""
    if settings.airflow_url and Path(file.folder) == settings.streams:
        return address.report_url(settings.airflow_url, file.stream.name, int(found[-1].stem))
    return found[-1].absolute().as_uri()


def _print_watch_result(watch_result: WatchResult, *, json: bool) -> None:
    """A line for the stream, and two for each thing that needs a person. Colours only on a
    terminal.
    """
    if json:
        _print_json(msgspec.to_builtins(watch_result))
        return
    left = "no message is in danger"
    if watch_result.time_left_seconds is not None:
        left = f"time left {format_duration(watch_result.time_left_seconds)} ({watch_result.nearest_partition})"
        left += {True: ", catches up", False: ", would not catch up", None: ""}[
            watch_result.will_catch_up
        ]
    facts = f"{watch_result.verdict} · {watch_result.partitions} partitions · lag {watch_result.lag} · {left}"
    line = f"{_render_time(watch_result.at_seconds)} {watch_result.stream}: {facts}"
    typer.secho(line, fg=typer.colors.GREEN if not watch_result.concerns else typer.colors.YELLOW)
    for concern in watch_result.concerns:
        place = f" {concern.location}" if concern.location else ""
        typer.secho(f"  {concern.kind}{place}: {concern.text}", fg=typer.colors.RED)
        for line in concern.next.splitlines():
            typer.echo(f"    → {line}")


def _print_stream_error(name: str, error: SeriatimError, *, json: bool) -> None:
    if json:
        _print_json(
            {"stream": name, "error": error.title, "message": error.message, "next": error.next}
        )
        return
    typer.secho(
        f"{_render_time(time.time())} {name}: {error.title}: {error.message}", fg=typer.colors.RED
    )
    for line in error.next.splitlines():
        typer.echo(f"    → {line}")


def _render_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(msgspec.json.encode(value).decode())
