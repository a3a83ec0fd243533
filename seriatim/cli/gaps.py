"""`seriatim gaps`, `rebuild` and `quarantine release`: what not to trust, the tables that say so,
and a person's word.

Next room: operations/derived_tables.py and operations/release.py do it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app, print_notice
from seriatim.cli.accept import Because, DryRun
from seriatim.cli.run import Json, StreamName
from seriatim.errors import ConfigError

if TYPE_CHECKING:
    from seriatim.ledger.model import Ledger
    from seriatim.ports import LedgerStore

COLUMNS = ["topic", "partition", "session", "from", "until", "finding", "cause"]
COLUMNS += ["opened", "closed", "closed_how", "mended"]
Topic = Annotated[
    str | None,
    typer.Option(help="TOPIC or TOPIC/N, where a session of this name waits in several places."),
]

quarantine = typer.Typer(
    name="quarantine", help="Sessions that were set aside.", no_args_is_help=True
)
app.add_typer(quarantine)


@app.command()
def gaps(
    stream: StreamName,
    only_open: Annotated[
        bool, typer.Option("--open", help="Only those that are not over yet.")
    ] = False,
    json: Json = False,
) -> None:
    """List the stretches of output not to trust: offsets, session (none: all), finding, what closed
    them.

    As of the ledger. The same is in the Delta table `gaps` below the output path, for queries.

    Example: seriatim gaps demo --open
    """
    from seriatim import context, stream_files
    from seriatim.cli import output
    from seriatim.operations.derived_tables import read_gaps

    Options.json = json
    file = stream_files.load_stream(stream, config.load_settings().streams)
    name, store = file.stream.name, context.ledger(file)
    ledger = _load_ledger(store, name)
    found = [
        gap.to_row()
        for gap in read_gaps(store, context.derived_tables(file), ledger)
        if not only_open or gap.closed is None
    ]
    if json:
        return _print_json({"stream": name, "sequence": ledger.sequence, "gaps": found})
    if found:
        output.print_table(
            COLUMNS, [{**row, "session": _render_session(row["session"])} for row in found]
        )
    still = sum(row["closed"] is None for row in found)
    typer.echo(
        f"{name}: {len(found)} gap{'s' * (len(found) != 1)}, {still} open, as of entry {ledger.sequence}"
    )
    return None


@app.command()
def rebuild(stream: StreamName, json: Json = False) -> None:
    """Make the tables `gaps` and `quarantine` again, from the ledger's first entry on.

    Runs keep them up by themselves; this is for tables that were deleted or changed by hand.
    Readers see the old table until the new one is there.

    Example: seriatim rebuild demo
    """
    from seriatim import context, stream_files
    from seriatim.operations.derived_tables import catch_up_derived

    Options.json = json
    file = stream_files.load_stream(stream, config.load_settings().streams)
    name, store = file.stream.name, context.ledger(file)
    ledger = _load_ledger(store, name)
    print_notice(f"{name}: reading {ledger.sequence + 1} entries", entries=ledger.sequence + 1)
    catch_up_derived(store, context.derived_tables(file), ledger, rebuild=True)
    if json:
        _print_json({"stream": name, "sequence": ledger.sequence})
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
    """Take a session out of quarantine by hand: its next messages apply again, to its last good
    state.

    The messages that were set aside stay in the table `quarantine`. Usually the session's next
    snapshot does all this; by hand it is for sessions without snapshots, or whose producer was
    mended.

    Example: seriatim quarantine release demo session-00007 --because "the producer sends the row
    again"
    """
    from seriatim import context, stream_files
    from seriatim.operations.derived_tables import catch_up_after_run
    from seriatim.operations.release import release_session as decide

    Options.json = json
    settings = config.load_settings()
    config.arm_crash_point(settings.crash_point)
    if not because.strip() and not dry_run:
        raise ConfigError(
            "a decision needs its reason: --because is missing",
            next='add --because "…"; --dry-run needs none',
        )
    file = stream_files.load_stream(stream, settings.streams)
    name, means = file.stream.name, context.decision_context(file, settings)
    made = decide(means, session, because, topic, dry_run=dry_run)
    if not dry_run and (
        trouble := catch_up_after_run(
            means.ledger, context.derived_tables(file), _load_ledger(means.ledger, name)
        )
    ):
        print_notice(
            f"{name}: the tables gaps and quarantine are behind; the next run catches up\n{trouble}",
            behind=trouble,
        )
    told = {**msgspec.to_builtins(made), "partition": str(made.partition), "stream": name}
    if json:
        return _print_json({**told, "sequence": None if dry_run else made.sequence})
    done = "would be released" if dry_run else f"released by entry {made.sequence}"
    typer.echo(
        f"{name}: {session} {done}: in {made.partition} since offset {made.offset} ({made.finding}); "
        f"messages from offset {made.frontier} on apply to it again"
    )
    return None


def _load_ledger(store: LedgerStore, stream: str) -> Ledger:
    from seriatim.ledger.commit import read_head

    head = read_head(store, stream)
    if head is None:
        raise ConfigError(f"{stream}: it was never run", next=f"seriatim run {stream}")
    return head.ledger


def _render_session(session: str | None) -> str:
    return "(all)" if session is None else session


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(msgspec.json.encode(value).decode())
