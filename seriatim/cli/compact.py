"""`seriatim compact`: small files become few, old ones go. No record changes.

Next room: operations/compact.py does it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from seriatim import config
from seriatim.cli import Options, app, print_notice
from seriatim.cli.accept import DryRun
from seriatim.cli.run import Json, StreamName
from seriatim.errors import IntegrityError

if TYPE_CHECKING:
    from seriatim.operations.compact import CompactContext, CompactionPiece, CompactResult
    from seriatim.stream_files import StreamFile

COLUMNS = [
    "topic",
    "partition",
    "what",
    "files",
    "bytes",
    "into",
    "bytes_after",
    "entry",
    "dropped",
]


@app.command()
def compact(
    stream: StreamName,
    partition: Annotated[
        str, typer.Option(metavar="TOPIC/NUMBER", help="Only this partition.")
    ] = "",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Join small record files to files near `file_bytes_target`, merge state files, delete what is
    outdated.

    No record changes. Runs beside folds and repairs and stops neither: where one of them was
    faster, this one gives way and says so; partitions under repair are left out. What an entry
    replaced is deleted `keep_versions_days` after it: up to then older versions can be read. A
    damaged file is refused by name (exit code 3), never copied.

    Example: seriatim compact demo --dry-run
    """
    from seriatim import stream_files
    from seriatim.cli.output import RunProgress
    from seriatim.engine.offsets import Partition
    from seriatim.operations.compact import compact_stream as do

    Options.json = json
    settings = config.load_settings()
    file = stream_files.load_stream(stream, settings.streams)
    config.arm_crash_point(settings.crash_point)
    if not dry_run:
        stream_files.refuse_unwritable_output(file)
    only, progress = (
        Partition.parse(partition) if partition else None,
        RunProgress(file.stream.name, "bytes"),
    )
    try:
        done = do(_compact_context(file), only, dry_run=dry_run, progress=progress)
    finally:
        progress.close()
    _print_result(file.stream.name, done, dry_run=dry_run, json=json)
    _raise_for_damage(file.stream.name, done)


def _compact_context(file: StreamFile) -> CompactContext:
    from seriatim import context
    from seriatim.clock import WallClock
    from seriatim.operations.compact import CompactContext
    from seriatim.storage.rewrite import ParquetRewriter

    output = file.stream.output
    return CompactContext(
        stream=file.stream.name,
        bytes_target=output.file_bytes_target,
        keep_versions_days=output.keep_versions_days,
        ledger=context.ledger(file),
        records=context.record_files(file),
        rewriter=ParquetRewriter(Path(output.path), file.stream.name, output.compression),
        open_state=lambda: context.state(file),
        derived=context.derived_tables(file),
        clock=WallClock(),
        new_attempt=context.new_attempt,
    )


def _piece_row(piece: CompactionPiece, *, dry_run: bool) -> dict[str, Any]:
    into = 0 if piece.drop_reason else (len(piece.groups) or 1) if dry_run else piece.files_after
    return {
        "topic": piece.partition.topic,
        "partition": piece.partition.number,
        "what": "records" if piece.groups else "state",
        "files": len(piece.inputs),
        "bytes": piece.bytes_before,
        "into": into,
        "bytes_after": None if dry_run else piece.bytes_after,
        "entry": None if piece.sequence < 0 else piece.sequence,
        "dropped": piece.drop_reason,
        "refused": piece.damaged_inputs,
    }


def _print_result(stream: str, result: CompactResult, *, dry_run: bool, json: bool) -> None:
    rows = [_piece_row(piece, dry_run=dry_run) for piece in result.pieces]
    held = [str(partition) for partition in result.held_partitions]
    if json:
        told = {
            "stream": stream,
            "sequence": result.sequence,
            "pieces": rows,
            "held": held,
            "dry_run": dry_run,
        }
        swept = {"replaced": result.swept_replaced_files, "orphans": result.swept_orphans}
        typer.echo(msgspec.json.encode({**told, "swept": swept}).decode())
    else:
        _print_summary(stream, result, rows, dry_run=dry_run)
    for place in held:
        print_notice(f"{stream} {place}: left out, a repair holds it", held=place)
    if result.derived_error:
        what = f"{stream}: the tables gaps and quarantine are behind; the next run catches up. Records are complete."
        print_notice(
            what if json else f"{what}\n{result.derived_error}", behind=result.derived_error
        )


def _print_summary(
    stream: str, result: CompactResult, rows: list[dict[str, Any]], *, dry_run: bool
) -> None:
    from seriatim.cli import output as show

    if rows:
        show.print_table(
            COLUMNS,
            [{name: "" if row[name] is None else row[name] for name in COLUMNS} for row in rows],
        )
    files, into = (
        sum(row[name] for row in rows if not row["dropped"]) for name in ("files", "into")
    )
    would, swept = ("would become", "would go") if dry_run else ("became", "went")
    joined = f"{files} files {would} {into}" if files else "no files are worth joining"
    gone = (
        [f"{result.swept_replaced_files} replaced files {swept}"]
        if result.swept_replaced_files
        else []
    )
    gone += [f"{result.swept_orphans} orphans went"] if result.swept_orphans else []
    typer.echo(f"{stream}: {', '.join([joined, *gone])}; ledger at entry {result.sequence}")


def _raise_for_damage(stream: str, result: CompactResult) -> None:
    """Damaged files are told by name, with the way out."""
    hurt = {
        path: (piece.partition, why)
        for piece in result.pieces
        for path, why in piece.damaged_inputs.items()
    }
    if hurt:
        partition = next(iter(hurt.values()))[0]
        raise IntegrityError(
            f"{stream}: {len(hurt)} damaged files were not touched, and neither were their neighbours",
            files="\n".join(f"{why}" for _, why in list(hurt.values())[:10]),
            next=f"seriatim repair {stream} --partition {partition}",
        )
