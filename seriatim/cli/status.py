"""`seriatim status` and `seriatim version`: look at a stream without changing it.

Next: operations/status.py gathers the values; cli/state.py shows sessions.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from seriatim import clock, config, context, stream_files
from seriatim.cli import output, print_error, print_json
from seriatim.cli.options import Json, StreamName, require_run_head
from seriatim.config import Settings
from seriatim.engine.findings import format_duration
from seriatim.errors import ConfigError, IntegrityError
from seriatim.operations.status import read_status
from seriatim.operations.sweep import refuse_swept

PARTITION_COLUMNS = [
    "topic",
    "partition",
    "frontier",
    "log_end",
    "lag",
    "time_left",
    "catches_up",
    "headless",
    "topic_state",
    "waits",
]
BUFFER_COLUMNS = ["session", "topic", "partition", "offset", "messages", "expects"]
QUARANTINE_COLUMNS = ["session", "topic", "partition", "offset", "finding"]


def status(
    stream: Annotated[
        str | None,
        typer.Argument(metavar="[STREAM]", help="A name in streams/, or a path. Default: all."),
    ] = None,
    json: Json = False,
) -> None:
    """Show partitions, lag, time left, halts and quarantine.

    Without STREAM all streams are shown. A stream with a wrong file, or with a ledger that is
    refused, is reported and does not hide the others.

    Example: seriatim status demo --json
    """
    settings = config.load_settings()
    names = [stream] if stream else stream_files.list_streams(settings.streams)
    if not names:
        raise ConfigError(
            f"there are no stream files in {settings.streams}",
            next="make one, or set SERIATIM_STREAMS",
        )
    exit_codes = set()
    for name in names:
        try:
            values = _read_status(name, settings)
        except (ConfigError, IntegrityError) as error:
            print_error(error)
            exit_codes.add(error.exit_code)
            continue
        if json:
            print_json(values)
        else:
            _print_status(values)
    if exit_codes:
        raise typer.Exit(max(exit_codes))


def _read_status(name: str, settings: Settings) -> dict[str, Any]:
    """The status of one stream, with the entries that its other tables are as of."""
    file = stream_files.load_stream(name, settings.streams)
    values = read_status(
        file.stream,
        context.log(file, settings),
        context.ledger(file),
        context.state(file),
        clock.WallClock().now_seconds(),
    )
    return values | context.table_sequences(file)


def version(
    stream: StreamName,
    sequence: Annotated[
        int | None, typer.Option(min=0, help="The ledger entry. Default: the last.")
    ] = None,
    checked: Annotated[
        bool,
        typer.Option(
            "--checked",
            help="The last entry up to which everything is checked and good, or accepted.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Print the Delta version that a ledger entry made.

    It is a version of the records table. Use it to read the table as of that entry. Who reads the
    table at its checked version never sees records that no check has judged.

    Example: seriatim version demo --sequence 12

    Example: seriatim version demo --checked
    """
    file = stream_files.load_stream(stream, config.load_settings().streams)
    name = file.stream.name
    ledger_store = context.ledger(file)
    head = require_run_head(ledger_store, name)
    if checked and sequence is not None:
        raise ConfigError("--checked and --sequence are two answers", next="give one of them")
    last_entry = head.ledger.checked if checked else head.ledger.sequence
    entry = last_entry if sequence is None else sequence
    delta_version = ledger_store.delta_version(name, entry)
    # The version exists in the table's log, but its files may be deleted: then say so here.
    refuse_swept(ledger_store, context.record_files(file), head.ledger, entry, "records")
    if json:
        print_json({"stream": name, "sequence": entry, "version": delta_version})
    else:
        typer.echo(delta_version)


def _print_status(values: dict[str, Any]) -> None:

    typer.secho(
        f"{values['stream']}: {values['verdict']}, tier {values['tier']},"
        f" entry {values['sequence']}, checked up to entry {values['checked']}",
        bold=True,
    )
    rows = [_partition_row(partition) for partition in values["partitions"]]
    output.print_table(PARTITION_COLUMNS, rows)
    _print_table_entries(values)
    if values["buffers"]:
        typer.echo("Messages that wait in the window for those before them:")
        output.print_table(BUFFER_COLUMNS, values["buffers"])
    _print_loss_bound(values["snapshot_distance"])
    if values["failed"]:
        typer.echo("The circuit is open, publishing waits. What a check called bad:")
        for failed in values["failed"]:
            typer.echo(f"  {failed['says']}")
        typer.echo(f"  next: {values['closes']}")
    if values["quarantined"]:
        typer.echo("In quarantine until their next snapshot:")
        output.print_table(QUARANTINE_COLUMNS, values["quarantined"])


def _print_table_entries(values: dict[str, Any]) -> None:
    """Print the entry that each table is as of; a table without one is left out."""
    entries = {"current": values["published"]}
    for output_name, entry in values["outputs"].items():
        entries[f"records-{output_name}"] = entry
    texts = [
        f"{table} is as of entry {entry}" for table, entry in entries.items() if entry is not None
    ]
    if texts:
        typer.echo(", ".join(texts))


def _print_loss_bound(snapshot_distance: dict[str, Any]) -> None:
    if not snapshot_distance["messages"]:
        return
    agreed_minutes = snapshot_distance["agreed_minutes"]
    agreed = f", agreed {agreed_minutes} minutes" if agreed_minutes else ""
    typer.echo(
        f"Loss bound: {snapshot_distance['messages']} messages"
        f" or {snapshot_distance['seconds'] / 60:.1f} minutes to a snapshot{agreed}"
    )


def _partition_row(partition: dict[str, Any]) -> dict[str, Any]:
    """A partition with the columns that are rendered for people."""
    seconds = partition["time_left_seconds"]
    catches_up = ""
    if partition["lag"] and partition["catches_up"] is not None:
        catches_up = "yes" if partition["catches_up"] else "no"
    return {
        **partition,
        "waits": _describe_wait(partition),
        # Empty if nothing waits, or if Kafka drops nothing.
        "time_left": "" if seconds is None else format_duration(seconds),
        "catches_up": catches_up,
    }


def _describe_wait(partition: dict[str, Any]) -> str:
    halt = partition["halted"]
    if halt is not None:
        return f"{halt['finding']} at {halt['offset']}: {halt['cause']}"
    if partition["held"]:
        return f"held by {partition['held']}"
    return ""
