"""`seriatim status` and `version`: looking at a stream without changing it.

Next room: operations/status.py gathers what is shown; cli/state.py shows sessions.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app, print_error
from seriatim.cli.run import Json, StreamName
from seriatim.errors import ConfigError, IntegrityError

PARTITION_COLUMNS = [
    *("topic", "partition", "frontier", "log_end", "lag", "time_left", "catches_up"),
    *("headless", "topic_state", "waits"),
]


@app.command()
def status(
    stream: Annotated[
        str | None,
        typer.Argument(metavar="[STREAM]", help="A name in streams/, or a path. Default: all."),
    ] = None,
    json: Json = False,
) -> None:
    """Show partitions, frontier, lag, time left, what waits and who is in quarantine.

    Of all streams: one whose file is wrong, or whose ledger is refused, is told and does not hide
    the others.

    Example: seriatim status demo --json
    """
    from seriatim import context, follower_tables, stream_files
    from seriatim.clock import WallClock
    from seriatim.operations.status import read_status as gather

    Options.json = json
    settings, failed = config.load_settings(), set[int]()
    names = [stream] if stream else stream_files.list_streams(settings.streams)
    if not names:
        raise ConfigError(
            f"there are no stream files in {settings.streams}",
            next="make one, or set SERIATIM_STREAMS",
        )
    for name in names:
        try:
            file = stream_files.load_stream(name, settings.streams)
            now = WallClock().now_seconds()
            found = gather(
                file.stream,
                context.log(file, settings),
                context.ledger(file),
                context.state(file),
                now,
            )
            found |= follower_tables.table_sequences(file)
        except (ConfigError, IntegrityError) as error:
            print_error(error)
            failed.add(error.exit_code)
            continue
        _print_json(found) if json else _print_status(found)
    if failed:
        raise typer.Exit(max(failed))


@app.command()
def version(
    stream: StreamName,
    sequence: Annotated[
        int | None, typer.Option(min=0, help="A ledger entry. Default: the last.")
    ] = None,
    checked: Annotated[
        bool,
        typer.Option(
            "--checked", help="The last entry up to which all is checked and good, or accepted."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Print the Delta version of the records table that a ledger entry made, to read the table as
    of it.

    Who reads the table at its checked version never sees what no check has judged.

    Example: seriatim version demo --sequence 12 Example: seriatim version demo --checked
    """
    from seriatim import context, stream_files
    from seriatim.ledger.commit import read_head
    from seriatim.operations.sweep import refuse_swept

    Options.json = json
    file = stream_files.load_stream(stream, config.load_settings().streams)
    name, store = file.stream.name, context.ledger(file)
    head = read_head(store, name)
    if head is None:
        raise ConfigError(f"{name}: it was never run", next=f"seriatim run {name}")
    if checked and sequence is not None:
        raise ConfigError("--checked and --sequence are two answers", next="give one of them")
    last = head.ledger.checked if checked else head.ledger.sequence
    entry = last if sequence is None else sequence
    found = store.delta_version(name, entry)
    refuse_swept(store, context.record_files(file), head.ledger, entry, "records")
    _print_json({"stream": name, "sequence": entry, "version": found}) if json else typer.echo(
        found
    )


def _print_status(values: dict[str, Any]) -> None:
    from seriatim.cli import output

    headline = f"{values['stream']}: {values['verdict']}, tier {values['tier']}, entry {values['sequence']}"
    typer.secho(f"{headline}, checked up to entry {values['checked']}", bold=True)
    rows = [
        {**part, "waits": _describe_wait(part), **_time_left_columns(part)}
        for part in values["partitions"]
    ]
    output.print_table(PARTITION_COLUMNS, rows)
    followers = {
        "current": values["published"],
        **{f"records-{name}": at for name, at in values["outputs"].items()},
    }
    if told := [f"{name} is as of entry {at}" for name, at in followers.items() if at is not None]:
        typer.echo(", ".join(told))
    if values["buffers"]:
        typer.echo("Messages that wait in the window for those before them:")
        output.print_table(
            ["session", "topic", "partition", "offset", "messages", "expects"], values["buffers"]
        )
    if (far := values["snapshot_distance"])["messages"]:
        agreed = f", agreed {far['agreed_minutes']} minutes" if far["agreed_minutes"] else ""
        typer.echo(
            f"Loss bound: {far['messages']} messages or {far['seconds'] / 60:.1f} minutes to a snapshot{agreed}"
        )
    if values["failed"]:
        typer.echo("The circuit is open, publishing waits. What a check called bad:")
        for one in values["failed"]:
            typer.echo(f"  {one['says']}")
        typer.echo(f"  next: {values['closes']}")
    if values["quarantined"]:
        typer.echo("In quarantine until their next snapshot:")
        output.print_table(
            ["session", "topic", "partition", "offset", "finding"], values["quarantined"]
        )


def _time_left_columns(partition: dict[str, Any]) -> dict[str, str]:
    """Hours and minutes until Kafka drops what waits; nothing where nothing waits, or nothing is
    dropped.
    """
    from seriatim.engine.findings import format_duration

    seconds, known = partition["time_left_seconds"], {True: "yes", False: "no", None: ""}
    return {
        "time_left": "" if seconds is None else format_duration(seconds),
        "catches_up": known[partition["catches_up"]] if partition["lag"] else "",
    }


def _describe_wait(partition: dict[str, Any]) -> str:
    halt = partition["halted"]
    if halt is None:
        return f"held by {partition['held']}" if partition["held"] else ""
    return f"{halt['finding']} at {halt['offset']}: {halt['cause']}"


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(msgspec.json.encode(value).decode())
