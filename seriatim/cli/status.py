"""`seriatim status` and `seriatim version`: look at a stream without changing it.

Next: operations/status.py gathers the values; cli/state.py shows sessions.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from seriatim import clock, config, context, stream_files
from seriatim.cli import JsonObject, output, print_error, print_json
from seriatim.cli.options import Json, StreamName, stream_names
from seriatim.engine.findings import count_of, format_duration, printable_session
from seriatim.errors import ConfigError, IntegrityError
from seriatim.ledger.commit import require_head
from seriatim.operations.missing_messages import MissingMessageSearch
from seriatim.operations.status import (
    LossBound,
    PartitionStatus,
    QuarantinedSession,
    StreamStatus,
    describe_hold,
    describe_quarantined_count,
    group_quarantined,
    to_json_values,
)
from seriatim.operations.sweep import refuse_swept
from seriatim.web.write_status import watch_stream_file

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
SESSIONS_SHOWN_MAX = 3
"""Sessions of each group that are listed without --all."""
ADVISED_CONCERNS = ("halted", "held")
"""What waits beside the sessions in quarantine, with what to type."""
JSON_KEYS = (
    "stream",
    "tier",
    "sequence",
    "circuit",
    "verdict",
    "partitions",
    "buffers",
    "snapshot_distance",
    "checked",
    "failed",
    "closes",
    "quarantined",
)
HIDDEN_PARTITION_KEYS = ("unread", "limit_seconds")


def status(
    stream: Annotated[
        str | None,
        typer.Argument(metavar="STREAM", help="A name in streams/, or a path. Default: all."),
    ] = None,
    list_all: Annotated[
        bool,
        typer.Option(
            "--all", help="List every session in quarantine. Without it they are put into groups."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Show partitions, lag, time left, halts and quarantine.

    Without STREAM all streams are listed. Sessions in quarantine are put into groups by finding and
    cause, each with what to type. A stream with a wrong file, or with a ledger that is
    refused, is reported and does not hide the others.

    Example: seriatim status demo --json
    """
    settings = config.load_settings()
    names = stream_names(stream)
    exit_codes = set()
    for name in names:
        try:
            file = stream_files.load_stream(name, settings.streams)
            stream_status = watch_stream_file(
                file,
                context.log(file, settings),
                context.ledger(file),
                context.state(file),
                clock.WallClock(),
                search=MissingMessageSearch(context.ConnectedStream(file, settings)),
            )
            tables = context.table_sequences(file)
        except (ConfigError, IntegrityError) as error:
            print_error(error)
            exit_codes.add(error.exit_code)
            continue
        if json:
            print_json(to_json_values(stream_status, JSON_KEYS, HIDDEN_PARTITION_KEYS) | tables)
        else:
            _print_status(stream_status, tables, list_all=list_all)
    if exit_codes:
        raise typer.Exit(max(exit_codes))


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
    head = require_head(ledger_store, name)
    if checked and sequence is not None:
        raise ConfigError(
            "--checked and --sequence cannot be given together", next="give one of them"
        )
    last_entry = head.ledger.checked if checked else head.ledger.sequence
    entry = last_entry if sequence is None else sequence
    delta_version = ledger_store.delta_version(name, entry)
    # The version exists in the table's log, but its files may be deleted: then say so here.
    refuse_swept(ledger_store, head.ledger, entry, "records")
    if json:
        print_json({"stream": name, "sequence": entry, "version": delta_version})
    else:
        typer.echo(delta_version)


def _print_status(stream_status: StreamStatus, tables: JsonObject, *, list_all: bool) -> None:
    """Print a status for people. `tables` has the entries that the other tables are as of."""
    typer.secho(
        f"{stream_status.stream}: {stream_status.verdict_text}, tier {stream_status.tier},"
        f" entry {stream_status.sequence}, checked up to entry {stream_status.checked}",
        bold=True,
    )
    rows = [_partition_row(stream_status, partition) for partition in stream_status.partitions]
    output.print_table(PARTITION_COLUMNS, rows)
    _print_table_entries(tables)
    if stream_status.buffers:
        typer.echo("Messages that wait in the window for those before them:")
        output.print_table(BUFFER_COLUMNS, msgspec.to_builtins(stream_status.buffers))
    _print_loss_bound(stream_status.snapshot_distance)
    if stream_status.failed_ranges:
        typer.echo("The circuit is open, publishing waits. What a check called bad:")
        for failed_range in stream_status.failed_ranges:
            typer.echo(f"  {failed_range.text}")
        typer.echo(f"  next: {stream_status.circuit_advice}")
    if stream_status.quarantined:
        _print_quarantine(stream_status, list_all=list_all)
    for concern in stream_status.concerns:
        if concern.kind in ADVISED_CONCERNS:
            typer.secho(f"{concern.key}: {concern.text}", bold=True)
            _print_indented(concern.next)


def _print_quarantine(stream_status: StreamStatus, *, list_all: bool) -> None:
    """Print the sessions in quarantine, in groups, with what to type for each group."""
    count = describe_quarantined_count(stream_status)
    typer.echo(f"In quarantine until their next snapshot, {count}:")
    for group in group_quarantined(stream_status.quarantined):
        sessions = count_of(len(group.sessions), "session")
        typer.secho(f"  {group.title}: {sessions}", bold=True)
        listed_sessions = group.sessions if list_all else group.sessions[:SESSIONS_SHOWN_MAX]
        for session in listed_sessions:
            _print_session(session)
        hidden = len(group.sessions) - len(listed_sessions)
        if hidden:
            typer.echo(f"    … and {hidden} more: seriatim status {stream_status.stream} --all")
        _print_indented(group.advice(stream_status))


def _print_session(session: QuarantinedSession) -> None:
    text = f"{printable_session(session.session)} in {session.partition_name} at offset {session.offset}"
    if session.missing is not None:
        text += f": {session.missing.describe()}"
    typer.echo(f"    {text}")


def _print_indented(advice: str) -> None:
    """Print what to type, each line indented."""
    margin = "  next:"
    for line in advice.splitlines():
        typer.echo(f"  {margin} {line}")
        margin = " " * len(margin)


def _print_table_entries(tables: JsonObject) -> None:
    """Print the entry that each table is as of; a table without one is left out."""
    entries = {"current": tables["published"]}
    for output_name, entry in tables["outputs"].items():
        entries[f"records-{output_name}"] = entry
    texts = [
        f"{table} is as of entry {entry}" for table, entry in entries.items() if entry is not None
    ]
    if texts:
        typer.echo(", ".join(texts))


def _print_loss_bound(distance: LossBound) -> None:
    if not distance.messages:
        return
    agreed = f", agreed {distance.agreed_minutes} minutes" if distance.agreed_minutes else ""
    typer.echo(
        "Largest distance between two snapshots of a session:"
        f" {count_of(distance.messages, 'message')}, {distance.seconds / 60:.1f} minutes{agreed}"
        " (one lost message can damage up to this much)"
    )


def _partition_row(stream_status: StreamStatus, partition: PartitionStatus) -> JsonObject:
    """A partition with the columns that are rendered for people."""
    row = msgspec.to_builtins(partition)
    seconds = partition.time_left_seconds
    # Empty if nothing waits, or if Kafka drops nothing.
    row["time_left"] = "" if seconds is None else format_duration(seconds)
    row["catches_up"] = ""
    if partition.lag and partition.catches_up is not None:
        row["catches_up"] = "yes" if partition.catches_up else "no"
    row["waits"] = ""
    if partition.halt is not None:
        halt = partition.halt
        row["waits"] = f"{halt.finding} at {halt.offset}: {halt.cause}"
    elif partition.hold:
        row["waits"] = describe_hold(stream_status, partition.hold)
    return row
