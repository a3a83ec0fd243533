"""`seriatim diff`: compare two outputs by offset, of streams or of replays.

Next: operations/inspect/diff.py compares; cli/replay_range.py writes the output of a replay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Struct

from seriatim import config, context, stream_files
from seriatim.cli import print_json, print_notice
from seriatim.cli.lookback import render_value
from seriatim.cli.options import Json, require_run_head
from seriatim.cli.output import RunProgress
from seriatim.engine.findings import shell_quote
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ConfigError, IntegrityError
from seriatim.operations.inspect.diff import DiffResult, RecordDifference, diff_records
from seriatim.storage import scratch
from seriatim.storage.record_query import RecordQuery
from seriatim.storage.store import open_store

OUTPUT_HELP = "A stream, or a folder that `seriatim replay … --to` wrote."
LeftOutput = Annotated[str, typer.Argument(metavar="LEFT", help=OUTPUT_HELP)]
RightOutput = Annotated[str, typer.Argument(metavar="RIGHT", help=OUTPUT_HELP)]
DIFFERENCES_SHOWN = 5


class ComparedOutput(Struct):
    """One of the two outputs that are compared."""

    records: RecordQuery
    folded_ranges: dict[tuple[Partition, str], OffsetRange]
    """The offsets that were folded, by partition and topic id."""
    stream: str
    """The stream whose messages these are; empty if a replay's folder does not say it."""


def diff(left_output: LeftOutput, right_output: RightOutput, json: Json = False) -> None:
    """Compare the records of two outputs, offset by offset.

    The differences are counted, and the first ones are printed. Only what both outputs have folded
    is compared. Partitions, offsets and columns that only one of them has are named. The exit code
    is 0 if nothing differs, and 3 if something does.

    Example: seriatim diff demo /tmp/again
    """
    left = _open_output(left_output)
    right = _open_output(right_output)
    progress = RunProgress("diff", "offsets")
    try:
        result = diff_records(
            left.records, right.records, left.folded_ranges, right.folded_ranges, progress
        )
    finally:
        progress.close()
    other_tables = sorted({*left.records.other_tables, *right.records.other_tables})
    result.not_compared += [f"table {name}: only records are" for name in other_tables]
    if not result.ranges:
        raise ConfigError(
            f"{left_output} and {right_output} have no offset in common",
            cause="; ".join(result.not_compared[:5]),
            next="compare outputs of the same topics",
        )
    _print_result(left_output, right_output, left.stream or right.stream, result, json=json)


def _open_output(name: str) -> ComparedOutput:
    """Open the folder of a replay, or the output of a stream."""
    folder = config.expand_user(Path(name), name, "give the name of a stream, or a folder")
    store = open_store(str(folder))
    if store.size(scratch.MANIFEST_FILE) is not None:
        manifest = scratch.read_manifest(store)
        _warn_missing_messages(name, manifest)
        return ComparedOutput(
            records=RecordQuery(store, None),
            folded_ranges=scratch.folded_ranges(store),
            stream=str(manifest.get("replay") or ""),
        )
    is_path = "/" in name or folder.is_absolute()
    if folder.is_dir() and is_path and not name.endswith(".toml"):
        # Surely meant as a folder: reading its missing manifest raises the error that says so.
        scratch.read_manifest(store)
    return _open_stream_output(name)


def _open_stream_output(name: str) -> ComparedOutput:

    file = stream_files.load_stream(name, config.load_settings().streams)
    stream = file.stream
    head = require_run_head(context.ledger(file), stream.name)
    folded_ranges = {}
    for partition_name, account in head.ledger.partitions.items():
        life = (Partition.parse(partition_name), account.topic_id)
        start = min(account.initial_frontier, account.frontier)
        folded_ranges[life] = OffsetRange(start, account.frontier)
    store = open_store(stream.output.path)
    records = RecordQuery(store, stream.name, version=head.token.version())
    return ComparedOutput(records, folded_ranges, name)


def _warn_missing_messages(name: str, manifest: dict[str, Any]) -> None:
    """Warn of messages that Kafka did not have any more when a replay was made.

    The outputs differ by them. A damaged manifest is not reported here: reading the records
    reports it.
    """
    partitions = manifest.get("partitions")
    if not isinstance(partitions, list):
        return
    for values in partitions:
        if isinstance(values, dict) and values.get("missing"):
            partition = f"{values.get('topic')}/{values.get('partition')}"
            print_notice(
                f"{name} was folded without {values['missing']} messages of {partition}:"
                " Kafka did not have them any more"
            )


def _print_result(
    left_name: str, right_name: str, stream: str, result: DiffResult, *, json: bool
) -> None:
    """Print what differs; any difference raises."""
    if json:
        print_json(_result_values(left_name, right_name, result))
    else:
        for note in result.not_compared:
            print_notice(f"not compared: {note}")
        for (partition, _), offset_range in result.ranges.items():
            typer.echo(f"{partition} {offset_range} compared")
        for difference in result.differences[:DIFFERENCES_SHOWN]:
            _print_difference(left_name, right_name, difference)
    if result.count:
        _raise_for_differences(left_name, right_name, stream, result)
    if not json:
        typer.echo(f"{left_name} and {right_name} do not differ: {result.records} records")


def _raise_for_differences(
    left_name: str, right_name: str, stream: str, result: DiffResult
) -> None:
    difference = result.differences[0]
    record = difference.left or difference.right or {}
    session = shell_quote(str(record.get("session")))
    raise IntegrityError(
        f"{left_name} and {right_name} differ, first at {difference.partition},"
        f" offset {difference.offset}, index {difference.index}",
        count=f"{result.differing} records differ, {result.only_left} only in {left_name},"
        f" {result.only_right} only in {right_name}",
        next=f"seriatim trace {shell_quote(stream or left_name)} {session}"
        f" --partition {difference.partition} --from {max(0, difference.offset - 5)}"
        f" --until {difference.offset + 1}",
    )


def _result_values(left_name: str, right_name: str, result: DiffResult) -> dict[str, Any]:
    compared = [
        {
            "topic": partition.topic,
            "partition": partition.number,
            "topic_id": topic_id,
            "from": offset_range.start,
            "until": offset_range.end,
        }
        for (partition, topic_id), offset_range in result.ranges.items()
    ]
    differences = [_difference_values(difference) for difference in result.differences]
    return {
        "left": left_name,
        "right": right_name,
        "compared": compared,
        "records": result.records,
        "count": result.count,
        "differing": result.differing,
        "only_left": result.only_left,
        "only_right": result.only_right,
        "first": differences[0] if differences else None,
        "partings": differences,
        "not_compared": result.not_compared,
    }


def _difference_values(difference: RecordDifference) -> dict[str, Any]:
    return {
        "topic": difference.partition.topic,
        "partition": difference.partition.number,
        "offset": difference.offset,
        "index": difference.index,
        "columns": difference.columns,
        "left": difference.left,
        "right": difference.right,
    }


def _print_difference(left_name: str, right_name: str, difference: RecordDifference) -> None:
    record = difference.left or difference.right or {}
    typer.secho(
        f"{difference.partition} offset {difference.offset} index {difference.index}"
        f"  session {render_value(record.get('session'))}",
        bold=True,
    )
    if difference.columns and difference.left and difference.right:
        for column in difference.columns:
            left_value = render_value(difference.left[column])
            right_value = render_value(difference.right[column])
            typer.echo(f"    {column:<12} {left_value} → {right_value}")
    else:
        output_name = left_name if difference.left else right_name
        typer.echo(f"    only in {output_name}: {render_value(record)}")
