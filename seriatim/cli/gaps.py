"""`seriatim gaps`, `seriatim rebuild` and `seriatim quarantine release`.

They list output that must not be trusted, make the derived tables again, and take a session out of
quarantine by hand.

Next: operations/followers.py and operations/release.py do it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from seriatim import config, context, stream_files
from seriatim.cli import output, print_json, print_notice
from seriatim.cli.accept import require_reason
from seriatim.cli.options import Because, DryRun, Json, StreamName, require_run_head
from seriatim.operations.followers import catch_up_after_run, catch_up_derived, read_gaps
from seriatim.operations.release import SessionRelease, release_session
from seriatim.ports import OpenStream

COLUMNS = [
    "topic",
    "partition",
    "session",
    "from",
    "until",
    "finding",
    "cause",
    "opened",
    "closed",
    "closed_how",
    "mended",
]
Topic = Annotated[
    str | None,
    typer.Option(
        help="TOPIC or TOPIC/N, if sessions of this name are in quarantine in several partitions."
    ),
]

quarantine = typer.Typer(
    name="quarantine", help="Take sessions out of quarantine by hand.", no_args_is_help=True
)


def gaps(
    stream: StreamName,
    only_open: Annotated[
        bool, typer.Option("--open", help="List only gaps that are not closed yet.")
    ] = False,
    json: Json = False,
) -> None:
    """List the gaps: output that must not be trusted.

    Each gap has its offsets, its session (none means all sessions), its finding, and how it was
    closed. The list is as of the ledger. The Delta table `gaps` below the output path has the same
    rows, for queries.

    Example: seriatim gaps demo --open
    """
    file = stream_files.load_stream(stream, config.load_settings().streams)
    name = file.stream.name
    ledger_store = context.ledger(file)
    derived_store = context.derived_tables(file)
    ledger = require_run_head(ledger_store, name).ledger
    # The table `gaps` may be behind the ledger; `read_gaps` adds what it does not have yet.
    gap_rows = [gap.to_row() for gap in read_gaps(ledger_store, derived_store, ledger)]
    open_rows = [row for row in gap_rows if row["closed"] is None]
    rows = open_rows if only_open else gap_rows
    if json:
        print_json({"stream": name, "sequence": ledger.sequence, "gaps": rows})
        return
    _print_gaps(rows)
    counts = _describe_counts(len(rows), len(open_rows))
    typer.echo(f"{name}: {counts}, as of entry {ledger.sequence}")


def rebuild(stream: StreamName, json: Json = False) -> None:
    """Make the tables `gaps` and `quarantine` again.

    They are made from the first entry of the ledger on. Runs keep these tables up to date by
    themselves. Use this command if a table was deleted or changed by hand. Readers see the old
    table until the new one is complete.

    Example: seriatim rebuild demo
    """
    file = stream_files.load_stream(stream, config.load_settings().streams)
    name = file.stream.name
    ledger_store = context.ledger(file)
    ledger = require_run_head(ledger_store, name).ledger
    entry_count = ledger.sequence + 1
    print_notice(f"{name}: reading {entry_count} entries", entries=entry_count)
    catch_up_derived(ledger_store, context.derived_tables(file), ledger, rebuild=True)
    if json:
        print_json({"stream": name, "sequence": ledger.sequence})
    else:
        typer.echo(f"{name}: gaps and quarantine are as of entry {ledger.sequence}")


@quarantine.command()
def release(
    stream: StreamName,
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The session's name.")],
    because: Because = "",
    topic: Topic = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Take a session out of quarantine by hand.

    The next messages of the session apply to its last good state. The messages that came during
    the quarantine are not applied: the session goes on without them, and they stay in the table
    `quarantine`. If they are to be applied, fix the machine that failed on them, and repair the
    session instead of releasing it: seriatim repair STREAM --session NAME. Usually the next
    snapshot of the session releases it. Do it by hand for sessions without snapshots, or after the
    producer was repaired.

    Example: seriatim quarantine release demo session-00007 --because "the producer sends the row
    again"
    """
    settings = config.load_settings()
    config.arm_crash_point(settings.crash_point)
    require_reason(because, dry_run=dry_run)
    file = stream_files.load_stream(stream, settings.streams)
    name = file.stream.name
    open_stream = context.ConnectedStream(file, settings, writes_records=True)
    decision = release_session(open_stream, session, because, topic, dry_run=dry_run)
    if not dry_run:
        _catch_up_derived(open_stream, json=json)
    if json:
        print_json(_released_values(name, decision, dry_run=dry_run))
    else:
        _print_released(name, session, decision, dry_run=dry_run)


def _catch_up_derived(open_stream: OpenStream, *, json: bool) -> None:
    """Bring the derived tables up to the decision. Trouble with that is printed only."""
    name = open_stream.stream.name
    ledger = require_run_head(open_stream.ledger, name).ledger
    trouble = catch_up_after_run(open_stream.ledger, open_stream.derived, ledger)
    if trouble:
        output.print_derived_error(name, trouble, json=json)


def _released_values(stream: str, decision: SessionRelease, *, dry_run: bool) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(decision),
        "partition": str(decision.partition),
        "stream": stream,
        "sequence": None if dry_run else decision.sequence,
    }


def _print_released(stream: str, session: str, decision: SessionRelease, *, dry_run: bool) -> None:
    effect = "would be released" if dry_run else f"released by entry {decision.sequence}"
    typer.echo(
        f"{stream}: {session} {effect}: in {decision.partition} since offset {decision.offset}"
        f" ({decision.finding}); messages from offset {decision.frontier} on apply to it again,"
        " those that came during the quarantine do not"
    )


def _describe_counts(gap_count: int, open_count: int) -> str:
    plural = "" if gap_count == 1 else "s"
    return f"{gap_count} gap{plural}, {open_count} open"


def _print_gaps(rows: list[dict[str, Any]]) -> None:

    if not rows:
        return
    shown_rows = []
    for row in rows:
        # A gap without a session concerns all sessions of its partition.
        session = "(all)" if row["session"] is None else row["session"]
        shown_rows.append({**row, "session": session})
    output.print_table(COLUMNS, shown_rows)
