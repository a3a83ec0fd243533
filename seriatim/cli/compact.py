"""`seriatim compact`: join small files and delete outdated ones. No record changes.

Next: operations/compact.py does it.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from seriatim import config, context, stream_files
from seriatim.cli import output, print_json, print_notice
from seriatim.cli.options import DryRun, Json, StreamName
from seriatim.cli.output import RunProgress
from seriatim.engine.offsets import Partition
from seriatim.errors import IntegrityError
from seriatim.operations.compact import CompactionPiece, CompactResult, compact_stream

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
DAMAGED_FILES_SHOWN = 10


def compact(
    stream: StreamName,
    partition: Annotated[
        str, typer.Option(metavar="TOPIC/NUMBER", help="Compact this partition only.")
    ] = "",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Join small files, and delete outdated ones.

    No record changes. State files are merged. Record files are joined up to about
    `file_bytes_target`. The command may run beside folds and repairs and stops neither: if one of
    them commits first, the compaction of that partition is dropped, and the output says so.
    Partitions under repair are left out. A file that an entry replaced is deleted
    `keep_versions_days` after that entry; until then older versions can be read. A damaged file is
    named and refused (exit code 3), never copied.

    Example: seriatim compact demo --dry-run
    """
    settings = config.load_settings()
    file = stream_files.load_stream(stream, settings.streams)
    config.arm_crash_point(settings.crash_point)
    # A dry run only reads, so a user without the right to write may see the plan.
    if not dry_run:
        stream_files.refuse_unwritable_output(file)
    only_partition = Partition.parse(partition) if partition else None
    progress = RunProgress(file.stream.name, "bytes")
    try:
        result = compact_stream(
            context.ConnectedStream(file, settings),
            only_partition,
            dry_run=dry_run,
            progress=progress,
        )
    finally:
        progress.close()
    _print_result(file.stream.name, result, dry_run=dry_run, json=json)
    _raise_for_damage(file.stream.name, result)


def _piece_row(piece: CompactionPiece, *, dry_run: bool) -> dict[str, Any]:
    if piece.drop_reason:
        files_after = 0
    elif dry_run:
        files_after = len(piece.groups) or 1  # a merge of state has no groups, and gives one file
    else:
        files_after = piece.files_after
    return {
        "topic": piece.partition.topic,
        "partition": piece.partition.number,
        "what": "records" if piece.groups else "state",
        "files": len(piece.inputs),
        "bytes": piece.bytes_before,
        "into": files_after,
        "bytes_after": None if dry_run else piece.bytes_after,
        "entry": None if piece.sequence < 0 else piece.sequence,
        "dropped": piece.drop_reason,
        "refused": piece.damaged_inputs,
    }


def _print_result(stream: str, result: CompactResult, *, dry_run: bool, json: bool) -> None:

    rows = [_piece_row(piece, dry_run=dry_run) for piece in result.pieces]
    held_partitions = [str(partition) for partition in result.held_partitions]
    if json:
        values = {
            "stream": stream,
            "sequence": result.sequence,
            "pieces": rows,
            "held": held_partitions,
            "dry_run": dry_run,
            "swept": {"replaced": result.swept_replaced_files, "orphans": result.swept_orphans},
        }
        print_json(values)
    else:
        _print_summary(stream, result, rows, dry_run=dry_run)
    for partition in held_partitions:
        print_notice(f"{stream} {partition}: left out, a repair holds it", held=partition)
    if result.derived_error:
        output.print_derived_error(stream, result.derived_error, json=json)


def _print_summary(
    stream: str, result: CompactResult, rows: list[dict[str, Any]], *, dry_run: bool
) -> None:

    if rows:
        output.print_table(COLUMNS, rows)
    joined_rows = [row for row in rows if not row["dropped"]]
    files_before = sum(row["files"] for row in joined_rows)
    files_after = sum(row["into"] for row in joined_rows)
    facts = ["no files are worth joining"]
    if files_before:
        verb = "would become" if dry_run else "became"
        facts = [f"{files_before} files {verb} {files_after}"]
    if result.swept_replaced_files:
        verb = "would go" if dry_run else "went"
        facts.append(f"{result.swept_replaced_files} replaced files {verb}")
    if result.swept_orphans:
        facts.append(f"{result.swept_orphans} orphans went")
    typer.echo(f"{stream}: {', '.join(facts)}; ledger at entry {result.sequence}")


def _raise_for_damage(stream: str, result: CompactResult) -> None:
    """Raise if files are damaged: the error names them and the command that repairs them."""
    damaged_partitions = []
    damages_by_path = {}
    for piece in result.pieces:
        if piece.damaged_inputs:
            damaged_partitions.append(piece.partition)
            damages_by_path.update(piece.damaged_inputs)
    if not damages_by_path:
        return
    damages = list(damages_by_path.values())[:DAMAGED_FILES_SHOWN]
    raise IntegrityError(
        f"{stream}: {len(damages_by_path)} damaged files were not touched,"
        " and neither were their neighbours",
        files="\n".join(str(damage) for damage in damages),
        next=f"seriatim repair {stream} --partition {damaged_partitions[0]}",
    )
