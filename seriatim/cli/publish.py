"""`seriatim publish`: bring the table `current` to an entry of the ledger.

Next: operations/publish.py does it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from seriatim import config, context, stream_files
from seriatim.cli import CommandResult, JsonObject, print_notice
from seriatim.cli.check import print_open_circuit
from seriatim.cli.options import DryRun, Json, StreamName, load_stream
from seriatim.cli.output import RunProgress, render_table, sequence_or_none
from seriatim.engine.findings import count_of
from seriatim.errors import ConfigError
from seriatim.ledger.commit import read_head
from seriatim.operations.followers import catch_up_outputs
from seriatim.operations.publish import PublishResult, changes_since, publish_current
from seriatim.ports import LedgerStore
from seriatim.stream_files import StreamFile

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
    _json: Json = False,
) -> PublishedEntry | None:
    """Bring the table `current` to the last checked entry.

    This is one commit. `current` has the rows of each session as they are now. Its readers never
    see records that no check has judged; --unchecked and --sequence go further. The command reads
    only records since the published entry. Partitions that were repaired are made again. The table
    never goes back by itself: `--rebuild --sequence N` makes it as of an earlier entry.

    Example: seriatim publish demo
    """
    if unchecked and sequence is not None:
        raise ConfigError(
            "--unchecked and --sequence cannot be given together", next="give one of them"
        )
    file = load_stream(stream)
    if if_keyed and stream_files.load_runner(file).row_key_spec is None:
        print_notice(
            f"{file.stream.name}: its records name no key,"
            " so there is no table `current` to bring up",
            changed=False,
        )
        return None
    return publish_stream(
        file,
        sequence=sequence,
        since=since,
        unchecked=unchecked,
        rebuild=rebuild,
        dry_run=dry_run,
    )


def publish_stream(
    file: StreamFile,
    *,
    sequence: int | None = None,
    since: int | None = None,
    unchecked: bool = False,
    rebuild: bool = False,
    dry_run: bool = False,
) -> PublishedEntry:
    """Publish a stream. Going back to an earlier entry is refused."""
    name = file.stream.name
    ledger_store = context.ledger(file, with_schema=True)
    if not dry_run:
        stream_files.refuse_unwritable_output(file)
        # First the tables beside `current`: a reader of the new entry must find them complete.
        _catch_up_output_tables(file, ledger_store)
    target_sequence = sequence
    if sequence is None and not unchecked:
        target_sequence = _last_checked_sequence(ledger_store, name)
    with (
        RunProgress(name, "records") as progress,
        context.choose_workers(file, config.load_settings(), print_notice) as choose,
    ):
        result = publish_current(
            name,
            ledger_store,
            context.current_table(file, choose),
            sequence=target_sequence,
            rebuild=rebuild,
            dry_run=dry_run,
            progress=progress,
        )
    # Not an error without --sequence: another run may have published further meanwhile.
    if sequence is not None and result.sequence > sequence:
        raise ConfigError(
            f"{name}: current is as of entry {result.sequence} already, past {sequence}",
            next=f"`seriatim publish {name} --rebuild --sequence {sequence}`"
            " makes it as of an earlier entry",
        )
    if since is not None:
        result = changes_since(name, ledger_store, since, result)
    return PublishedEntry(name, result, dry_run)


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


class PublishedEntry(CommandResult):
    """The entry to which the table `current` was brought, or would be."""

    stream: str
    result: PublishResult
    dry_run: bool

    def to_json(self) -> JsonObject:
        """What was written, with one object for each partition."""
        result = self.result
        return {
            "stream": self.stream,
            "sequence": result.sequence,
            "before": sequence_or_none(result.previous_sequence),
            "changed": result.has_changed and not self.dry_run,
            "partitions": self._rows(),
            "rows_written": result.written.written_rows,
            "files_written": result.written.written_files,
        }

    def _rows(self) -> list[JsonObject]:
        return [
            {
                "topic": catch_up.partition.topic,
                "partition": catch_up.partition.number,
                "from": None if catch_up.is_full_rebuild else catch_up.first_new_offset,
                "until": catch_up.until,
                "epoch": catch_up.epoch,
                "records": catch_up.record_count(),
                "anew": catch_up.is_full_rebuild,
            }
            for catch_up in self.result.catch_ups
        ]

    def render(self) -> str:
        """One line; a dry run also shows a table of the partitions."""
        result = self.result
        if not result.has_changed:
            return f"{self.stream}: current is as of entry {result.sequence} already"
        entry = f"entry {result.sequence}"
        if result.previous_sequence >= 0:
            entry += f" (was {result.previous_sequence})"
        partitions = count_of(len(result.catch_ups), "partition")
        rebuilt_count = sum(catch_up.is_full_rebuild for catch_up in result.catch_ups)
        if rebuilt_count:
            partitions += f", {rebuilt_count} anew"
        if not self.dry_run:
            return (
                f"{self.stream}: current is as of {entry}: {partitions},"
                f" {count_of(result.written.written_rows, 'row')}"
                f" in {count_of(result.written.written_files, 'file')} written"
            )
        summary = (
            f"{self.stream}: would bring current to {entry}: {partitions},"
            f" {count_of(result.records_to_read(), 'record')}"
        )
        return f"{render_table(self._rows())}\n{summary}" if result.catch_ups else summary
