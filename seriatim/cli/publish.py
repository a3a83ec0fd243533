"""`seriatim publish`: the table `current`, brought to an entry of the ledger.

Next room: operations/publish.py does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app, print_notice
from seriatim.cli.accept import DryRun
from seriatim.cli.run import Json, StreamName
from seriatim.errors import ConfigError

if TYPE_CHECKING:
    from seriatim.operations.publish import PublishResult
    from seriatim.ports import LedgerStore
    from seriatim.storage.current_rows import PartitionCatchUp
    from seriatim.stream_files import StreamFile

COLUMNS = ["topic", "partition", "from", "until", "epoch", "records", "anew"]


@app.command()
def publish(
    stream: StreamName,
    sequence: Annotated[
        int | None, typer.Option(min=0, help="A ledger entry. Default: the last checked one.")
    ] = None,
    unchecked: Annotated[
        bool,
        typer.Option("--unchecked", help="The last ledger entry, whether it was checked or not."),
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make the table again, from all records.")
    ] = False,
    if_keyed: Annotated[
        bool,
        typer.Option("--if-keyed", help="Nothing to do, not an error, where records name no key."),
    ] = False,
    since: Annotated[
        int | None,
        typer.Option(min=0, help="Tell what is new since this entry, whoever published it."),
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Bring the table `current` (each session's rows as they are now) to the last checked entry, in
    one commit.

    So who reads it never sees what no check has judged; --unchecked and --sequence go further.
    Reads only the records since the entry that is published; partitions that were repaired are made
    anew. The table never goes back by itself: `--rebuild --sequence N` makes it as of an earlier
    entry.

    Example: seriatim publish demo
    """
    from seriatim import stream_files

    Options.json = json
    settings = config.load_settings()
    config.arm_crash_point(settings.crash_point)
    if unchecked and sequence is not None:
        raise ConfigError("--unchecked and --sequence are two answers", next="give one of them")
    file = stream_files.load_stream(stream, settings.streams)
    if if_keyed and stream_files.load_runner(file).row_key_spec is None:
        print_notice(
            f"{file.stream.name}: its records name no key, so there is no table `current` to bring up",
            changed=False,
        )
        return
    asked = {"unchecked": unchecked, "rebuild": rebuild, "dry_run": dry_run, "json": json}
    publish_stream(file, sequence=sequence, since=since, **asked)


def publish_stream(
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
    from seriatim import context, stream_files
    from seriatim.cli import output
    from seriatim.operations.publish import changes_since
    from seriatim.operations.publish import publish_current as publishing

    name, store = file.stream.name, context.ledger(file, with_schema=True)
    if not dry_run:
        stream_files.refuse_unwritable_output(file)
        _catch_up_output_tables(file, store)
    current, progress = context.current_table(file), output.RunProgress(name, "records")
    wanted = sequence if unchecked or sequence is not None else _last_checked_sequence(store, name)
    try:
        done = publishing(
            name,
            store,
            current,
            sequence=wanted,
            rebuild=rebuild,
            dry_run=dry_run,
            progress=progress,
        )
    finally:
        progress.close()
    if sequence is not None and done.sequence > sequence:
        raise ConfigError(
            f"{name}: current is as of entry {done.sequence} already, past {sequence}",
            next=f"`seriatim publish {name} --rebuild --sequence {sequence}` makes it as of an earlier entry",
        )
    if since is not None:
        done = changes_since(name, store, since, done)
    if json:
        typer.echo(msgspec.json.encode(_result_values(name, done, dry_run=dry_run)).decode())
    else:
        _print_result(name, done, dry_run=dry_run)


def _catch_up_output_tables(file: StreamFile, store: LedgerStore) -> None:
    """Bring the tables of further kinds of records up to the ledger, where a crash left them
    behind.
    """
    from seriatim import context
    from seriatim.ledger.commit import read_head
    from seriatim.operations.further_tables import catch_up_outputs

    beside, head = context.derived_tables(file).output_store, read_head(store, file.stream.name)
    if beside is not None and head is not None:
        catch_up_outputs(store, beside, head.ledger)


def _last_checked_sequence(store: LedgerStore, stream: str) -> int | None:
    """The last checked entry; what is past it is said, and waits."""
    from seriatim.ledger.commit import read_head

    head = read_head(store, stream)
    if head is None:
        return None
    ledger = head.ledger
    if ledger.judged_until < ledger.sequence and not ledger.failed_ranges:
        way = f"seriatim check {stream}"
        text = f"{stream}: entries after {ledger.judged_until} are not checked yet and stay out of current"
        print_notice(
            f"{text}; next: {way}", checked=ledger.checked, sequence=ledger.sequence, next=way
        )
    elif ledger.failed_ranges:
        from seriatim.cli.check import print_open_circuit

        print_open_circuit(ledger)
    return ledger.checked


def _result_values(stream: str, result: PublishResult, *, dry_run: bool) -> dict[str, Any]:
    return {
        "stream": stream,
        "sequence": result.sequence,
        "before": result.previous_sequence if result.previous_sequence >= 0 else None,
        "changed": result.has_changed and not dry_run,
        "partitions": [_partition_values(catch) for catch in result.catch_ups],
        "rows_written": result.written.written_rows,
        "files_written": result.written.written_files,
    }


def _partition_values(catch_up_derived: PartitionCatchUp) -> dict[str, Any]:
    return {
        "topic": catch_up_derived.partition.topic,
        "partition": catch_up_derived.partition.number,
        "from": None if catch_up_derived.is_full_rebuild else catch_up_derived.first_new_offset,
        "until": catch_up_derived.until,
        "epoch": catch_up_derived.epoch,
        "records": catch_up_derived.record_count(),
        "anew": catch_up_derived.is_full_rebuild,
    }


def _print_result(stream: str, result: PublishResult, *, dry_run: bool) -> None:
    from seriatim.cli import output

    if not result.has_changed:
        typer.echo(f"{stream}: current is as of entry {result.sequence} already")
        return
    if dry_run and result.catch_ups:
        output.print_table(COLUMNS, [_partition_values(catch) for catch in result.catch_ups])
    was = f" (was {result.previous_sequence})" if result.previous_sequence >= 0 else ""
    anew = sum(catch.is_full_rebuild for catch in result.catch_ups)
    counted = f"{len(result.catch_ups)} partition{'s' * (len(result.catch_ups) != 1)}" + (
        f", {anew} anew" if anew else ""
    )
    if dry_run:
        typer.echo(
            f"{stream}: would bring current to entry {result.sequence}{was}: {counted}, {result.records_to_read()} records"
        )
    else:
        typer.echo(
            f"{stream}: current is as of entry {result.sequence}{was}: {counted}, "
            f"{result.written.written_rows} rows in {result.written.written_files} files written"
        )
