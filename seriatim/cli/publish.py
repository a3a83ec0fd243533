"""`seriatim publish`: bring the table `current` to an entry of the ledger.

Next: operations/publish.py does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from seriatim import config, context, stream_files
from seriatim.cli import output, print_json, print_notice
from seriatim.cli.check import print_open_circuit
from seriatim.cli.options import DryRun, Json, StreamName
from seriatim.errors import ConfigError
from seriatim.ledger.commit import read_head
from seriatim.operations.followers import catch_up_outputs
from seriatim.operations.publish import PublishResult, changes_since, publish_current
from seriatim.ports import LedgerStore
from seriatim.storage.current_rows import PartitionCatchUp
from seriatim.stream_files import StreamFile

COLUMNS = ["topic", "partition", "from", "until", "epoch", "records", "anew"]
SinceEntry = Annotated[
    int | None,
    typer.Option(
        min=0, help="Report what is new since this entry, also if another run published it."
    ),
]


def publish(
    stream: StreamName,
    sequence: Annotated[
        int | None,
        typer.Option(min=0, help="Publish this ledger entry. Default: the last checked one."),
    ] = None,
    unchecked: Annotated[
        bool,
        typer.Option(
            "--unchecked", help="Publish the last ledger entry, whether it was checked or not."
        ),
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make the table again from all records.")
    ] = False,
    if_keyed: Annotated[
        bool,
        typer.Option(
            "--if-keyed", help="Do nothing, without an error, if the records have no row key."
        ),
    ] = False,
    since: SinceEntry = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Bring the table `current` to the last checked entry.

    This is one commit. `current` has the rows of each session as they are now. Its readers never
    see records that no check has judged; --unchecked and --sequence go further. The command reads
    only records since the published entry. Partitions that were repaired are made again. The table
    never goes back by itself: `--rebuild --sequence N` makes it as of an earlier entry.

    Example: seriatim publish demo
    """
    settings = config.load_settings()
    config.arm_crash_point(settings.crash_point)
    if unchecked and sequence is not None:
        raise ConfigError("--unchecked and --sequence are two answers", next="give one of them")
    file = stream_files.load_stream(stream, settings.streams)
    if if_keyed and stream_files.load_runner(file).row_key_spec is None:
        _print_without_key(file.stream.name)
        return
    publish_stream(
        file,
        sequence=sequence,
        since=since,
        unchecked=unchecked,
        rebuild=rebuild,
        dry_run=dry_run,
        json=json,
    )


def _print_without_key(stream: str) -> None:
    print_notice(
        f"{stream}: its records name no key, so there is no table `current` to bring up",
        changed=False,
    )


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
    """Publish a stream and print what was done. Going back to an earlier entry is refused."""
    name = file.stream.name
    ledger_store = context.ledger(file, with_schema=True)
    if not dry_run:
        stream_files.refuse_unwritable_output(file)
        # First the tables beside `current`: a reader of the new entry must find them complete.
        _catch_up_output_tables(file, ledger_store)
    target_sequence = sequence
    if sequence is None and not unchecked:
        target_sequence = _last_checked_sequence(ledger_store, name)
    progress = output.RunProgress(name, "records")
    try:
        result = publish_current(
            name,
            ledger_store,
            context.current_table(file),
            sequence=target_sequence,
            rebuild=rebuild,
            dry_run=dry_run,
            progress=progress,
        )
    finally:
        progress.close()
    # Not an error without --sequence: another run may have published further meanwhile.
    if sequence is not None and result.sequence > sequence:
        raise _earlier_entry_error(name, sequence, result.sequence)
    if since is not None:
        result = changes_since(name, ledger_store, since, result)
    if json:
        print_json(_result_values(name, result, dry_run=dry_run))
    else:
        _print_result(name, result, dry_run=dry_run)


def _earlier_entry_error(stream: str, sequence: int, published_sequence: int) -> ConfigError:
    return ConfigError(
        f"{stream}: current is as of entry {published_sequence} already, past {sequence}",
        next=f"`seriatim publish {stream} --rebuild --sequence {sequence}`"
        " makes it as of an earlier entry",
    )


def _catch_up_output_tables(file: StreamFile, store: LedgerStore) -> None:
    """Bring the tables `records-NAME` up to the ledger, in case a crash left them behind."""
    output_store = context.derived_tables(file).output_store
    head = read_head(store, file.stream.name)
    if output_store is not None and head is not None:
        catch_up_outputs(store, output_store, head.ledger)


def _last_checked_sequence(store: LedgerStore, stream: str) -> int | None:
    """The last checked entry; None if the stream was never run.

    If there are entries after it, a notice says why they are not published.
    """
    head = read_head(store, stream)
    if head is None:
        return None
    ledger = head.ledger
    if ledger.failed_ranges:
        print_open_circuit(ledger)
    elif ledger.judged_until < ledger.sequence:
        check_command = f"seriatim check {stream}"
        print_notice(
            f"{stream}: entries after {ledger.judged_until} are not checked yet"
            f" and stay out of current; next: {check_command}",
            checked=ledger.checked,
            sequence=ledger.sequence,
            next=check_command,
        )
    return ledger.checked


def _result_values(stream: str, result: PublishResult, *, dry_run: bool) -> dict[str, Any]:
    return {
        "stream": stream,
        "sequence": result.sequence,
        "before": result.previous_sequence if result.previous_sequence >= 0 else None,
        "changed": result.has_changed and not dry_run,
        "partitions": [_partition_values(catch_up) for catch_up in result.catch_ups],
        "rows_written": result.written.written_rows,
        "files_written": result.written.written_files,
    }


def _partition_values(catch_up: PartitionCatchUp) -> dict[str, Any]:
    return {
        "topic": catch_up.partition.topic,
        "partition": catch_up.partition.number,
        "from": None if catch_up.is_full_rebuild else catch_up.first_new_offset,
        "until": catch_up.until,
        "epoch": catch_up.epoch,
        "records": catch_up.record_count(),
        "anew": catch_up.is_full_rebuild,
    }


def _print_result(stream: str, result: PublishResult, *, dry_run: bool) -> None:

    if not result.has_changed:
        typer.echo(f"{stream}: current is as of entry {result.sequence} already")
        return
    if dry_run and result.catch_ups:
        output.print_table(COLUMNS, [_partition_values(catch_up) for catch_up in result.catch_ups])
    partitions = _describe_partitions(result.catch_ups)
    entry = f"entry {result.sequence}"
    if result.previous_sequence >= 0:
        entry += f" (was {result.previous_sequence})"
    if dry_run:
        typer.echo(
            f"{stream}: would bring current to {entry}: {partitions},"
            f" {result.records_to_read()} records"
        )
    else:
        typer.echo(
            f"{stream}: current is as of {entry}: {partitions},"
            f" {result.written.written_rows} rows in {result.written.written_files} files written"
        )


def _describe_partitions(catch_ups: Sequence[PartitionCatchUp]) -> str:
    plural = "" if len(catch_ups) == 1 else "s"
    text = f"{len(catch_ups)} partition{plural}"
    rebuilt_count = sum(catch_up.is_full_rebuild for catch_up in catch_ups)
    if rebuilt_count:
        text += f", {rebuilt_count} anew"
    return text
