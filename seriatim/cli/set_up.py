"""The commands that set up a host: `doctor`, `jars` and `kafka`.

Next: embedded/doctor.py, embedded/jars.py and embedded/broker.py do the work.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from seriatim import clock, config, context, stream_files
from seriatim.cli import CommandResult, Options, print_notice, print_result
from seriatim.cli.options import Json
from seriatim.cli.output import RunningServer, require_running
from seriatim.config import Settings
from seriatim.embedded import broker
from seriatim.embedded import jars as jar_cache
from seriatim.embedded.doctor import DoctorCheck, run_checks
from seriatim.errors import SeriatimError
from seriatim.ledger.model import Ledger
from seriatim.operations.retention import short_retention

NAME_WIDTH = 14

jars = typer.Typer(
    help="Fetch the JARs that Spark and the embedded broker need.", no_args_is_help=True
)
kafka = typer.Typer(help="Start and stop the embedded Kafka broker.", no_args_is_help=True)


def doctor(
    _json: Json = False,
) -> None:
    """Check what Seriatim needs on this host.

    Each problem is shown with the way to fix it. ✓ means good. ✗ means that something required is
    missing or does not work. – means that something optional is not set up, or that a setting
    could be better. The exit code is 0 if nothing required is missing, else 2.

    Example: seriatim doctor
    """
    settings = config.load_settings()
    is_missing = False
    # Each check is printed as soon as it is made, since some of them take seconds.
    host_checks = run_checks(settings, _print_activity)
    for check in chain(host_checks, check_buckets(settings), check_retention(settings)):
        _print_activity("")
        print_result(CheckedHost(check))
        if check.is_required and not check.is_good:
            is_missing = True
    _print_activity("")
    if is_missing:
        raise typer.Exit(2)


def _print_activity(activity: str) -> None:
    """Say on stderr what is being done. On a terminal the next line takes its place; "" clears it."""
    if Options.json:
        return
    line = f"… {activity}" if activity else ""
    if sys.stderr.isatty():
        typer.echo(f"\r\033[K{line}", err=True, nl=False)
    elif line:
        typer.echo(line, err=True)


def check_buckets(settings: Settings) -> Iterator[DoctorCheck]:
    """Try the bucket of every stream that has its output in one: writing, and whether its server
    refuses to overwrite.
    """
    files, _ = stream_files.load_all_streams(settings.streams)
    for file in files:
        if not stream_files.is_in_bucket(file.stream):
            continue
        _print_activity(f"trying the bucket of {file.stream.name}")
        try:
            context.output_store(file).refuse_if_unsafe()
        except SeriatimError as error:
            yield DoctorCheck("bucket", False, True, error.message, error.next)
        else:
            yield DoctorCheck("bucket", True, True, file.stream.output.path)


def check_retention(settings: Settings) -> Iterator[DoctorCheck]:
    """Check whether the topics of every stream keep messages long enough.

    There is one result for each topic that does not, or one good result if all do.
    """
    has_warned = False
    checked_streams = 0
    for name in stream_files.list_streams(settings.streams):
        _print_activity(f"asking Kafka how long it keeps the messages of {name}")
        try:
            file = stream_files.load_stream(name, settings.streams)
        except SeriatimError as error:
            yield _failed_retention_check(name, error)
            continue
        try:
            short_topics = short_retention(
                file.stream, context.log(file, settings), Ledger(stream=name), clock.WallClock()
            )
        except SeriatimError as error:
            yield _failed_retention_check(name, error)
            return  # all streams have the same broker: the next one would wait for it as long
        checked_streams += 1
        for topic in short_topics:
            has_warned = True
            yield DoctorCheck("retention", False, False, f"{name}: {topic.text}", topic.next)
    if checked_streams and not has_warned:
        yield DoctorCheck("retention", True, True, "72 h or more in every topic")


def _failed_retention_check(stream: str, error: SeriatimError) -> DoctorCheck:
    description = f"{stream}: not looked at: {error.message}"
    return DoctorCheck("retention", False, False, description, error.next)


class CheckedHost(CommandResult):
    """What one check of this host found."""

    check: DoctorCheck

    def to_json(self) -> DoctorCheck:
        """The check as it is."""
        return self.check

    def render(self) -> str:
        """A mark, the description, and how to fix it."""
        check = self.check
        if check.is_good:
            mark = "✓"
        elif check.is_required:
            mark = "✗"
        else:
            mark = "–"
        text = f"{mark} {check.name:<{NAME_WIDTH}} {check.description}"
        if check.fix:
            text += f"\n  {'':<{NAME_WIDTH}} → {check.fix}"
        return text


@jars.command()
def fetch(
    group: Annotated[
        list[str] | None,
        typer.Option(
            help="spark, kafka, s3, bench or bench-streams. It may be repeated. Default: spark and kafka."
        ),
    ] = None,
) -> None:
    """Fetch JARs that are missing or damaged.

    Every file is verified by its SHA-256. SERIATIM_IVY_SETTINGS names your own Ivy settings file,
    for a mirror or for credentials.

    Example: seriatim jars fetch --group spark
    """
    settings = config.load_settings()
    groups = group
    if not groups:
        # Whoever needs another group fetches it when it is first used.
        groups = ["kafka", "spark"]
    for name in groups:
        files = jar_cache.ensure_jars(name, settings, print_notice)
        typer.echo(f"{name}: {len(files)} JARs in {settings.home / 'jars'}")


@jars.command()
def lock(
    output: Annotated[
        Path | None, typer.Option(help="The file to write. Default: the one in the package.")
    ] = None,
) -> None:
    """Make jars.lock again from jars.toml. This command is for developers.

    Example: seriatim jars lock
    """
    text = jar_cache.make_lock(config.load_settings(), print_notice)
    path = output or jar_cache.LOCK_FILE
    path.write_text(text)
    typer.echo(f"wrote {path}")


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
    _json: Json = False,
) -> RunningServer:
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
    return RunningServer(running_broker)


@kafka.command()
def stop() -> None:
    """Stop the broker cleanly. Its data stays.

    Example: seriatim kafka stop
    """
    has_stopped = broker.stop_broker(config.load_settings().home, print_notice)
    typer.echo("stopped" if has_stopped else "no broker was running")


@kafka.command()
def status(_json: Json = False) -> RunningServer:
    """Print the broker's address, process and data folder.

    The exit code is 4 if no broker is running.

    Example: seriatim kafka status --json
    """
    home = config.load_settings().home
    return require_running(
        broker.broker_status(home), broker.BrokerInfo, "broker", "seriatim kafka start", home
    )
