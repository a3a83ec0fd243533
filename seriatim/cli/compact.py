"""`seriatim compact`: join small files and delete outdated ones. No record changes.

Next: operations/compact.py does it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from seriatim import config, context, stream_files
from seriatim.cli import CommandResult, JsonObject, print_notice
from seriatim.cli.options import DryRun, Json, StreamName, load_stream
from seriatim.cli.output import RunProgress, print_derived_error, render_table, sequence_or_none
from seriatim.engine.findings import count_of
from seriatim.engine.offsets import Partition
from seriatim.errors import IntegrityError, SeriatimError
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
    _json: Json = False,
) -> CompactedStream:
    """Join small files, and delete outdated ones.

    No record changes. State files are merged. Record files are joined up to about
    `file_bytes_target`. The command may run beside folds and repairs and stops neither: if one of
    them commits first, the compaction of that partition is dropped, and the output says so.
    Partitions under repair are left out. A file that an entry replaced is deleted
    `keep_versions_days` after that entry; until then older versions can be read. A damaged file is
    named and refused (exit code 3), never copied.

    Example: seriatim compact demo --dry-run
    """
    file = load_stream(stream)
    name = file.stream.name
    # A dry run only reads, so a user without the right to write may see the plan.
    if not dry_run:
        stream_files.refuse_unwritable_output(file)
    settings = config.load_settings()
    with (
        RunProgress(name, "bytes") as progress,
        context.choose_workers(file, settings, print_notice) as choose,
    ):
        result = compact_stream(
            context.ConnectedStream(file, settings),
            Partition.parse(partition) if partition else None,
            dry_run=dry_run,
            progress=progress,
            choose_workers=choose,
        )
    for held_partition in map(str, result.held_partitions):
        print_notice(f"{name} {held_partition}: left out, a repair holds it", held=held_partition)
    print_derived_error(name, result.derived_error)
    return CompactedStream(name, result, dry_run)


class CompactedStream(CommandResult):
    """The files that were joined and deleted, or would be."""

    stream: str
    result: CompactResult
    dry_run: bool

    def to_json(self) -> JsonObject:
        """The counts, with one object for each piece of work."""
        result = self.result
        return {
            "stream": self.stream,
            "sequence": result.sequence,
            "pieces": self._rows(),
            "held": [str(partition) for partition in result.held_partitions],
            "dry_run": self.dry_run,
            "swept": {"replaced": result.swept_replaced_files, "orphans": result.swept_orphans},
        }

    def _rows(self) -> list[JsonObject]:
        return [
            {
                "topic": piece.partition.topic,
                "partition": piece.partition.number,
                "what": "records" if piece.groups else "state",
                "files": len(piece.inputs),
                "bytes": piece.bytes_before,
                "into": self._files_after(piece),
                "bytes_after": None if self.dry_run else piece.bytes_after,
                "entry": sequence_or_none(piece.sequence),
                "dropped": piece.drop_reason,
                "refused": piece.damaged_inputs,
            }
            for piece in self.result.pieces
        ]

    def _files_after(self, piece: CompactionPiece) -> int:
        if piece.drop_reason:
            return 0
        if self.dry_run:
            return len(piece.groups) or 1  # a merge of state has no groups, and gives one file
        return piece.files_after

    def render(self) -> str:
        """A table of the pieces, and the counts on one line."""
        result = self.result
        rows = self._rows()
        joined_rows = [row for row in rows if not row["dropped"]]
        files_before = sum(row["files"] for row in joined_rows)
        files_after = sum(row["into"] for row in joined_rows)
        facts = ["no files are worth joining"]
        if files_before:
            verb = "would become" if self.dry_run else "became"
            facts = [f"{count_of(files_before, 'file')} {verb} {files_after}"]
        if result.swept_replaced_files:
            verb = "would go" if self.dry_run else "went"
            facts.append(f"{result.swept_replaced_files} replaced files {verb}")
        if result.swept_orphans:
            facts.append(f"{count_of(result.swept_orphans, 'orphan')} went")
        summary = f"{self.stream}: {', '.join(facts)}; ledger at entry {result.sequence}"
        return f"{render_table(rows, COLUMNS)}\n{summary}" if rows else summary

    def error(self) -> SeriatimError | None:
        """Damaged files: the error names them and the command that repairs them."""
        damaged_partitions = []
        damages_by_path = {}
        for piece in self.result.pieces:
            if piece.damaged_inputs:
                damaged_partitions.append(piece.partition)
                damages_by_path.update(piece.damaged_inputs)
        if not damages_by_path:
            return None
        damages = list(damages_by_path.values())[:DAMAGED_FILES_SHOWN]
        return IntegrityError(
            f"{self.stream}: {len(damages_by_path)} damaged files were not touched,"
            " and neither were their neighbours",
            files="\n".join(str(damage) for damage in damages),
            next=f"seriatim repair {self.stream} --partition {damaged_partitions[0]}",
        )
