"""`seriatim diff`: compare two outputs by offset, of streams or of replays.

Next: operations/inspect/diff.py compares; cli/replay.py writes the output of a replay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from seriatim import config, context
from seriatim.cli import CommandResult, JsonObject, Options, print_notice
from seriatim.cli.lookback import render_value
from seriatim.cli.options import Json, load_stream
from seriatim.cli.output import RunProgress
from seriatim.engine.findings import count_of, shell_quote
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ConfigError, IntegrityError, SeriatimError
from seriatim.ledger.commit import require_head
from seriatim.operations.inspect.diff import DiffResult, RecordDifference, diff_records
from seriatim.storage import scratch
from seriatim.storage.record_query import RecordQuery
from seriatim.storage.store import open_store

OUTPUT_HELP = "A stream, or what `seriatim replay … --to` wrote: a folder, or s3://BUCKET/PREFIX."
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


def diff(
    left_output: LeftOutput, right_output: RightOutput, _json: Json = False
) -> ComparedRecords:
    """Compare the records of two outputs, offset by offset.

    The differences are counted, and the first ones are printed. Only what both outputs have folded
    is compared. Partitions, offsets and columns that only one of them has are named. The exit code
    is 0 if nothing differs, and 3 if something does.

    Example: seriatim diff demo /tmp/again
    """
    left = _open_output(left_output)
    right = _open_output(right_output)
    with RunProgress("diff", "offsets") as progress:
        result = diff_records(
            left.records, right.records, left.folded_ranges, right.folded_ranges, progress
        )
    other_tables = sorted({*left.records.other_tables, *right.records.other_tables})
    result.not_compared += [f"table {name}: only records are" for name in other_tables]
    if not result.ranges:
        raise ConfigError(
            f"{left_output} and {right_output} have no offset in common",
            cause="; ".join(result.not_compared[:5]),
            next="compare outputs of the same topics",
        )
    if not Options.json:
        for note in result.not_compared:
            print_notice(f"not compared: {note}")
    return ComparedRecords(left_output, right_output, left.stream or right.stream, result)


def _open_output(name: str) -> ComparedOutput:
    """Open what a replay wrote, or the output of a stream."""
    is_address = "://" in name
    folder = config.expand_user(Path(name), name, "give the name of a stream, or a folder")
    store = open_store(name if is_address else str(folder))
    if store.size(scratch.MANIFEST_FILE) is not None:
        manifest = scratch.read_manifest(store)
        _warn_missing_messages(name, manifest)
        return ComparedOutput(
            records=RecordQuery(store, None),
            folded_ranges=scratch.folded_ranges(store),
            stream=str(manifest.get("replay") or ""),
        )
    is_path = "/" in name or folder.is_absolute()
    if is_address or (folder.is_dir() and is_path and not name.endswith(".toml")):
        # Surely meant as a replay: reading its missing manifest raises the error that says so.
        scratch.read_manifest(store)
    return _open_stream_output(name)


def _open_stream_output(name: str) -> ComparedOutput:

    file = load_stream(name)
    stream = file.stream
    head = require_head(context.ledger(file), stream.name)
    folded_ranges = {}
    for partition_name, account in head.ledger.partitions.items():
        life = (Partition.parse(partition_name), account.topic_id)
        start = min(account.initial_frontier, account.frontier)
        folded_ranges[life] = OffsetRange(start, account.frontier)
    store = open_store(stream.output.path)
    records = RecordQuery(store, stream.name, version=head.token.version())
    return ComparedOutput(records, folded_ranges, name)


def _warn_missing_messages(name: str, manifest: JsonObject) -> None:
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
                f"{name} was folded without {count_of(values['missing'], 'message')} of {partition}:"
                " Kafka did not have them any more"
            )


class ComparedRecords(CommandResult):
    """What differs between the records of two outputs."""

    left_name: str
    right_name: str
    stream: str
    result: DiffResult

    def to_json(self) -> JsonObject:
        """What was compared, the counts, and the first differences."""
        result = self.result
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
        differences = [
            {
                "topic": difference.partition.topic,
                "partition": difference.partition.number,
                "offset": difference.offset,
                "index": difference.index,
                "columns": difference.columns,
                "left": difference.left,
                "right": difference.right,
            }
            for difference in result.differences
        ]
        first_difference = None
        if differences:
            first_difference = differences[0]
        return {
            "left": self.left_name,
            "right": self.right_name,
            "compared": compared,
            "records": result.records,
            "count": result.count,
            "differing": result.differing,
            "only_left": result.only_left,
            "only_right": result.only_right,
            "first": first_difference,
            "partings": differences,
            "not_compared": result.not_compared,
        }

    def render(self) -> str:
        """The ranges that were compared, and the first differences."""
        result = self.result
        lines = [
            f"{partition} {offset_range} compared"
            for (partition, _), offset_range in result.ranges.items()
        ]
        for difference in result.differences[:DIFFERENCES_SHOWN]:
            lines += self._render_difference(difference)
        if not result.count:
            lines.append(
                f"{self.left_name} and {self.right_name} do not differ: {count_of(result.records, 'record')}"
            )
        return "\n".join(lines)

    def _render_difference(self, difference: RecordDifference) -> list[str]:
        record = difference.left or difference.right or {}
        headline = (
            f"{difference.partition} offset {difference.offset} index {difference.index}"
            f"  session {render_value(record.get('session'))}"
        )
        lines = [typer.style(headline, bold=True)]
        if difference.columns and difference.left and difference.right:
            for column in difference.columns:
                left_value = render_value(difference.left[column])
                right_value = render_value(difference.right[column])
                lines.append(f"    {column:<12} {left_value} → {right_value}")
        else:
            output_name = self.left_name if difference.left else self.right_name
            lines.append(f"    only in {output_name}: {render_value(record)}")
        return lines

    def error(self) -> SeriatimError | None:
        """The first difference, and how to look at it."""
        result = self.result
        if not result.count:
            return None
        difference = result.differences[0]
        record = difference.left or difference.right or {}
        session = shell_quote(str(record.get("session")))
        position = f"{difference.partition}, offset {difference.offset}, index {difference.index}"
        counts = [
            count_of(result.differing, "differing record"),
            f"{result.only_left} only in {self.left_name}",
            f"{result.only_right} only in {self.right_name}",
        ]
        # The trace begins a few offsets before the difference, so that it shows what led to it.
        traced_stream = shell_quote(self.stream or self.left_name)
        start = max(0, difference.offset - 5)
        until = difference.offset + 1
        return IntegrityError(
            f"{self.left_name} and {self.right_name} differ, first at {position}",
            count=", ".join(counts),
            next=f"seriatim trace {traced_stream} {session} --partition {difference.partition}"
            f" --from {start} --until {until}",
        )
