"""`seriatim publish`: the table `current`, brought to an entry of the ledger.

Next room: steps/publish.py does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app, say
from seriatim.cli.accept import DryRun
from seriatim.cli.run import Json, StreamName
from seriatim.core.errors import ConfigError

if TYPE_CHECKING:
    from seriatim.core.current import Catch
    from seriatim.ports import LedgerStore
    from seriatim.steps.publish import Published
    from seriatim.streams import StreamFile

COLUMNS = ["topic", "partition", "from", "until", "epoch", "records", "anew"]


@app.command()
def publish(
    stream: StreamName,
    sequence: Annotated[int | None, typer.Option(min=0, help="A ledger entry. Default: the last checked one.")] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="The last ledger entry, whether it was checked or not.")
    ] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make the table again, from all records.")] = False,
    if_keyed: Annotated[
        bool, typer.Option("--if-keyed", help="Nothing to do, not an error, where records name no key.")
    ] = False,
    since: Annotated[
        int | None, typer.Option(min=0, help="Tell what is new since this entry, whoever published it.")
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Bring the table `current` (each session's rows as they are now) to the last checked entry, in one commit.

    So who reads it never sees what no check has judged; --unchecked and --sequence go further. Reads only the records
    since the entry that is published; partitions that were repaired are made anew. The table never goes back by
    itself: `--rebuild --sequence N` makes it as of an earlier entry.

    Example: seriatim publish demo
    """
    from seriatim import streams

    Options.json = json
    settings = config.load()
    config.arm_crash_point(settings.crash_point)
    if unchecked and sequence is not None:
        raise ConfigError("--unchecked and --sequence are two answers", next="give one of them")
    file = streams.load(stream, settings.streams)
    if if_keyed and streams.runner(file).keyed is None:
        say(f"{file.stream.name}: its records name no key, so there is no table `current` to bring up", changed=False)
        return
    asked = {"unchecked": unchecked, "rebuild": rebuild, "dry_run": dry_run, "json": json}
    bring(file, sequence=sequence, since=since, **asked)


def bring(
    file: StreamFile,
    *,
    sequence: int | None = None,
    since: int | None = None,
    unchecked: bool = False,
    rebuild: bool = False,
    dry_run: bool = False,
    json: bool,
) -> None:
    """Publish a stream, and tell what was done."""
    from seriatim import streams, wiring
    from seriatim.cli import show
    from seriatim.steps.publish import counted_from
    from seriatim.steps.publish import publish as publishing

    name, store = file.stream.name, wiring.ledger(file, with_schema=True)
    if not dry_run:
        streams.refuse_unwritable_output(file)
        _follow(file, store)
    current, progress = wiring.current(file), show.Progress(name, "records")
    wanted = sequence if unchecked or sequence is not None else _checked(store, name)
    try:
        done = publishing(name, store, current, sequence=wanted, rebuild=rebuild, dry_run=dry_run, progress=progress)
    finally:
        progress.close()
    if sequence is not None and done.sequence > sequence:
        raise ConfigError(
            f"{name}: current is as of entry {done.sequence} already, past {sequence}",
            next=f"`seriatim publish {name} --rebuild --sequence {sequence}` makes it as of an earlier entry",
        )
    if since is not None:
        done = counted_from(name, store, since, done)
    if json:
        typer.echo(msgspec.json.encode(_values(name, done, dry_run=dry_run)).decode())
    else:
        _tell(name, done, dry_run=dry_run)


def _follow(file: StreamFile, store: LedgerStore) -> None:
    """Bring the tables of further kinds of records up to the ledger, where a crash left them behind."""
    from seriatim import wiring
    from seriatim.steps.commit import read_head
    from seriatim.steps.outputs import catch_up_outputs

    beside, head = wiring.derived(file).beside, read_head(store, file.stream.name)
    if beside is not None and head is not None:
        catch_up_outputs(store, beside, head.ledger)


def _checked(store: LedgerStore, stream: str) -> int | None:
    """The last checked entry; what is past it is said, and waits."""
    from seriatim.steps.commit import read_head

    head = read_head(store, stream)
    if head is None:
        return None
    ledger = head.ledger
    if ledger.judged < ledger.sequence and not ledger.failed:
        way = f"seriatim check {stream}"
        text = f"{stream}: entries after {ledger.judged} are not checked yet and stay out of current"
        say(f"{text}; next: {way}", checked=ledger.checked, sequence=ledger.sequence, next=way)
    elif ledger.failed:
        from seriatim.cli.check import open_circuit

        open_circuit(ledger)
    return ledger.checked


def _values(stream: str, done: Published, *, dry_run: bool) -> dict[str, Any]:
    return {
        "stream": stream,
        "sequence": done.sequence,
        "before": done.before if done.before >= 0 else None,
        "changed": done.changed and not dry_run,
        "partitions": [_part(catch) for catch in done.catches],
        "rows_written": done.written.rows,
        "files_written": done.written.files,
    }


def _part(catch: Catch) -> dict[str, Any]:
    return {
        "topic": catch.partition.topic,
        "partition": catch.partition.number,
        "from": None if catch.whole else catch.since,
        "until": catch.until,
        "epoch": catch.epoch,
        "records": catch.reads(),
        "anew": catch.whole,
    }


def _tell(stream: str, done: Published, *, dry_run: bool) -> None:
    from seriatim.cli import show

    if not done.changed:
        typer.echo(f"{stream}: current is as of entry {done.sequence} already")
        return
    if dry_run and done.catches:
        show.table(COLUMNS, [_part(catch) for catch in done.catches])
    was = f" (was {done.before})" if done.before >= 0 else ""
    anew = sum(catch.whole for catch in done.catches)
    counted = f"{len(done.catches)} partition{'s' * (len(done.catches) != 1)}" + (f", {anew} anew" if anew else "")
    if dry_run:
        typer.echo(f"{stream}: would bring current to entry {done.sequence}{was}: {counted}, {done.reads()} records")
    else:
        typer.echo(
            f"{stream}: current is as of entry {done.sequence}{was}: {counted}, "
            f"{done.written.rows} rows in {done.written.files} files written"
        )
