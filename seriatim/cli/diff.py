"""`seriatim diff`: two outputs compared by offset: of streams, or of replays.

Next room: operations/inspect/diff.py compares; cli/replay_range.py writes what is compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seriatim import config
from seriatim.cli import Options, app, print_notice
from seriatim.cli.lookback import print_json, render_value
from seriatim.cli.run import Json
from seriatim.engine.findings import shell_quote
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from seriatim.operations.inspect.diff import DiffResult, RecordDifference
    from seriatim.storage.record_query import RecordQuery

RangesByPartition = dict[tuple[Partition, str], OffsetRange]
OutputArgument = Annotated[
    str, typer.Argument(help="A stream, or a folder that `seriatim replay … --to` wrote.")
]
DIFFERENCES_SHOWN = 5


@app.command()
def diff(left: OutputArgument, right: OutputArgument, json: Json = False) -> None:
    """Compare the records of two outputs, offset by offset: print the first differences and count
    them.

    Compared is what both have folded: partitions, offsets and columns that only one of them has are
    named. Exit code 0 if nothing differs, 3 if something does.

    Example: seriatim diff demo /tmp/again
    """
    from seriatim.cli.output import RunProgress
    from seriatim.operations.inspect.diff import diff_records

    Options.json = json
    (one, ones, stream), (other, others, other_stream) = _open_output(left), _open_output(right)
    tables = sorted({*one.other_tables, *other.other_tables})
    progress = RunProgress("diff", "offsets")
    try:
        done = diff_records(one, other, ones, others, progress)
    finally:
        progress.close()
    done.not_compared += [f"table {name}: only records are" for name in tables]
    if not done.ranges:
        raise ConfigError(
            f"{left} and {right} have no offset in common",
            cause="; ".join(done.not_compared[:5]),
            next="compare outputs of the same topics",
        )
    _print_result(left, right, stream or other_stream, done, json=json)


def _open_output(name: str) -> tuple[RecordQuery, RangesByPartition, str]:
    """An output, which offsets it has folded, and the stream whose messages they are; empty: it
    does not say.
    """
    from seriatim import context, stream_files
    from seriatim.ledger.commit import read_head
    from seriatim.storage import scratch
    from seriatim.storage.record_query import RecordQuery

    folder = config.expand_user(Path(name), name, "give the name of a stream, or a folder")
    if folder.is_dir() and (folder / scratch.MANIFEST_FILE).exists():
        manifest = scratch.read_manifest(folder)
        _warn_missing_messages(name, manifest)
        return (
            RecordQuery(folder, None),
            scratch.folded_ranges(folder),
            str(manifest.get("replay") or ""),
        )
    if folder.is_dir() and not name.endswith(".toml") and ("/" in name or folder.is_absolute()):
        scratch.read_manifest(folder)
    file = stream_files.load_stream(name, config.load_settings().streams)
    head = read_head(context.ledger(file), file.stream.name)
    if head is None:
        raise ConfigError(
            f"{file.stream.name}: it was never run", next=f"seriatim run {file.stream.name}"
        )
    accounts = head.ledger.partitions.items()
    folded = {
        (Partition.parse(p), a.topic_id): OffsetRange(
            min(a.initial_frontier, a.frontier), a.frontier
        )
        for p, a in accounts
    }
    root = Path(file.stream.output.path)
    return RecordQuery(root, file.stream.name, version=head.token.version()), folded, name


def _warn_missing_messages(name: str, manifest: dict[str, Any]) -> None:
    """A replay over messages that were gone differs by them; what is damaged is told by whoever
    reads it whole.
    """
    parts = manifest.get("partitions")
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and part.get("missing"):
            place = f"{part.get('topic')}/{part.get('partition')}"
            print_notice(
                f"{name} was folded without {part['missing']} messages of {place}: Kafka did not have them any more"
            )


def _print_result(left: str, right: str, stream: str, result: DiffResult, *, json: bool) -> None:
    if json:
        print_json(_result_values(left, right, result))
    else:
        for note in result.not_compared:
            print_notice(f"not compared: {note}")
        for place, whole in result.ranges.items():
            typer.echo(f"{place[0]} {whole} compared")
        for parting in result.differences[:DIFFERENCES_SHOWN]:
            _print_difference(left, right, parting)
    if not result.count:
        if not json:
            typer.echo(f"{left} and {right} do not differ: {result.records} records")
        return
    first = result.differences[0]
    session = shell_quote(str((first.left or first.right or {}).get("session")))
    counted = f"{result.differing} records differ, {result.only_left} only in {left}, {result.only_right} only in {right}"
    raise IntegrityError(
        f"{left} and {right} differ, first at {first.partition}, offset {first.offset}, index {first.index}",
        count=counted,
        next=f"seriatim trace {shell_quote(stream or left)} {session} --partition {first.partition}"
        f" --from {max(0, first.offset - 5)} --until {first.offset + 1}",
    )


def _result_values(left: str, right: str, result: DiffResult) -> dict[str, Any]:
    return {
        "left": left,
        "right": right,
        "compared": [
            {
                "topic": p.topic,
                "partition": p.number,
                "topic_id": life,
                "from": whole.start,
                "until": whole.end,
            }
            for (p, life), whole in result.ranges.items()
        ],
        "records": result.records,
        "count": result.count,
        "differing": result.differing,
        "only_left": result.only_left,
        "only_right": result.only_right,
        "first": _difference_values(result.differences[0]) if result.differences else None,
        "partings": [_difference_values(one) for one in result.differences],
        "not_compared": result.not_compared,
    }


def _difference_values(difference: RecordDifference) -> dict[str, Any]:
    place = {"topic": difference.partition.topic, "partition": difference.partition.number}
    return {
        **place,
        "offset": difference.offset,
        "index": difference.index,
        "columns": difference.columns,
        "left": difference.left,
        "right": difference.right,
    }


def _print_difference(left: str, right: str, difference: RecordDifference) -> None:
    there = difference.left or difference.right or {}
    typer.secho(
        f"{difference.partition} offset {difference.offset} index {difference.index}  session {render_value(there.get('session'))}",
        bold=True,
    )
    if difference.columns and difference.left and difference.right:
        for name in difference.columns:
            typer.echo(
                f"    {name:<12} {render_value(difference.left[name])} → {render_value(difference.right[name])}"
            )
    else:
        typer.echo(f"    only in {left if difference.left else right}: {render_value(there)}")
