"""`seriatim gaps`, `seriatim rebuild` and `seriatim quarantine release`.

They list output that must not be trusted, make the derived tables again, and take a session out of
quarantine by hand.

Next: operations/followers.py and operations/release.py do it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from seriatim import config, context
from seriatim.cli import CommandResult, JsonObject, print_notice
from seriatim.cli.options import (
    Because,
    DryRun,
    Json,
    StreamName,
    load_stream,
    require_reason,
)
from seriatim.cli.output import print_derived_error, render_table
from seriatim.engine.findings import count_of
from seriatim.ledger.commit import require_head
from seriatim.operations.followers import catch_up_after_run, catch_up_derived, read_gaps
from seriatim.operations.release import SessionRelease, release_session

HEADINGS = {
    "topic": "topic",
    "partition": "partition",
    "session": "session",
    "from": "from offset",
    "until": "until offset",
    "finding": "finding",
    "cause": "cause",
    "opened": "opened by entry",
    "closed": "closed by entry",
    "closed_how": "closed how",
    "mended": "repaired by entry",
}
"""The columns of a gap, with their headings for people."""
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
    _json: Json = False,
) -> CommandResult:
    """List the gaps: output that must not be trusted.

    Each gap has its offsets, its session (none means all sessions), its finding, and how it was
    closed. The list is made of the ledger. The Delta table `gaps` below the output path has the same
    rows, for queries.

    Example: seriatim gaps demo --open
    """
    file = load_stream(stream)
    name = file.stream.name
    ledger_store = context.ledger(file)
    ledger = require_head(ledger_store, name).ledger
    # The table `gaps` may be behind the ledger; `read_gaps` adds what it does not have yet.
    gap_rows = [
        gap.to_row() for gap in read_gaps(ledger_store, context.derived_tables(file), ledger)
    ]
    open_rows = [row for row in gap_rows if row["closed"] is None]
    rows = open_rows if only_open else gap_rows
    return GapList(name, ledger.sequence, rows)


class GapList(CommandResult):
    """The gaps of a stream, as of an entry of the ledger."""

    stream: str
    sequence: int
    gaps: list[JsonObject]

    def render(self) -> str:
        """A table of the gaps, and how many are open."""
        open_count = 0
        rows = []
        for gap in self.gaps:
            open_count += gap["closed"] is None
            # A gap without a session concerns all sessions of its partition.
            session = "(all)" if gap["session"] is None else gap["session"]
            printed_gap = {**gap, "session": session}
            rows.append({heading: printed_gap[column] for column, heading in HEADINGS.items()})
        counts = f"{count_of(len(rows), 'gap')}, {open_count} open"
        summary = f"{self.stream}: {counts}, as of entry {self.sequence}"
        return f"{render_table(rows)}\n{summary}" if rows else summary


def rebuild(stream: StreamName, _json: Json = False) -> CommandResult:
    """Make the tables `gaps` and `quarantine` again.

    They are made from the first entry of the ledger on. Runs keep these tables up to date by
    themselves. Use this command if a table was deleted or changed by hand. Readers see the old
    table until the new one is complete.

    Example: seriatim rebuild demo
    """
    file = load_stream(stream)
    name = file.stream.name
    ledger_store = context.ledger(file)
    ledger = require_head(ledger_store, name).ledger
    entry_count = ledger.sequence + 1
    print_notice(f"{name}: reading {count_of(entry_count, 'entry')}", entries=entry_count)
    catch_up_derived(ledger_store, context.derived_tables(file), ledger, rebuild=True)
    return RebuiltTables(name, ledger.sequence)


class RebuiltTables(CommandResult):
    """The tables `gaps` and `quarantine` were made again."""

    stream: str
    sequence: int

    def render(self) -> str:
        """The entry that they are as of."""
        return f"{self.stream}: gaps and quarantine are as of entry {self.sequence}"


@quarantine.command()
def release(
    stream: StreamName,
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The session's name.")],
    because: Because = "",
    topic: Topic = None,
    dry_run: DryRun = False,
    _json: Json = False,
) -> CommandResult:
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
    require_reason(because, dry_run=dry_run)
    file = load_stream(stream)
    name = file.stream.name
    open_stream = context.ConnectedStream(file, config.load_settings(), writes_records=True)
    decision = release_session(open_stream, session, because, topic, dry_run=dry_run)
    if not dry_run:
        ledger = require_head(open_stream.ledger, name).ledger
        print_derived_error(
            name, catch_up_after_run(open_stream.ledger, open_stream.derived, ledger)
        )
    return ReleasedSession(name, decision, dry_run)


class ReleasedSession(CommandResult):
    """A session was taken out of quarantine, or would be."""

    stream: str
    decision: SessionRelease
    dry_run: bool

    def to_json(self) -> JsonObject:
        """The decision."""
        return {
            **msgspec.to_builtins(self.decision),
            "partition": str(self.decision.partition),
            "stream": self.stream,
            "sequence": None if self.dry_run else self.decision.sequence,
        }

    def render(self) -> str:
        """What was released, and which messages apply from now on."""
        decision = self.decision
        effect = "would be released"
        if not self.dry_run:
            effect = f"was released by entry {decision.sequence}"
        return (
            f"{self.stream}: {decision.session} waited in {decision.partition} since offset"
            f" {decision.offset} ({decision.finding}), and {effect}; its messages from offset"
            f" {decision.frontier} on are applied, those that came while it waited are not"
        )
