"""Outputs: the tables of a machine's further kinds of records, brought up to the ledger. They
follow it entry by entry.

The ledger's commit, on `records/`, has decided everything: it names their files, and nothing is
visible before it. Each commit of theirs names the entry that it reaches, so what is in is not put
in again, and a crash in between is caught up with next time.

Next room: operations/derived_tables.py asks for this after runs; storage/further_tables.py has the
tables.
"""

from __future__ import annotations

from msgspec.structs import replace

from seriatim.engine.crash_points import crash_point
from seriatim.engine.offsets import Partition
from seriatim.engine.record_kinds import table_directory, table_of_path
from seriatim.errors import PlatformError
from seriatim.ledger.commit import TRIES_MAX
from seriatim.ledger.model import Entry, File, Ledger
from seriatim.ports import AppliedVersion, CommitConflictError, LedgerStore, OutputStore

PartitionFileList = list[tuple[Partition, File]]


def catch_up_outputs(
    store: LedgerStore, outputs: OutputStore, head: Ledger, *, rebuild: bool = False
) -> None:
    """Bring every table up to the ledger, or make it again as a `whole`."""
    for table in outputs.tables:
        _catch_up_table(store, outputs, table, head, rebuild=rebuild)


def _catch_up_table(
    store: LedgerStore, outputs: OutputStore, table: str, head: Ledger, *, rebuild: bool
) -> None:
    for _ in range(TRIES_MAX):
        at = reset_if_unknown(store, outputs.applied_version(table), head)
        if rebuild:
            at = replace(at, sequence=-1)
        if at.sequence >= head.sequence:
            return
        try:
            if at.sequence < 0:
                outputs.put_files(table, at, head, _files_as_of(store, table, head), [])
            else:
                _apply_entries(store, outputs, table, at, head)
        except CommitConflictError as conflict:  # another run does the same, or the disk is full
            trouble = conflict
            continue
        return
    raise PlatformError(
        f"{head.stream}: the table {table_directory(table)} could not be written, {TRIES_MAX} times",
        cause=str(trouble)[:400],
        next="check that the output path can be written and has room: the next run catches up",
    )


def reset_if_unknown(store: LedgerStore, applied: AppliedVersion, head: Ledger) -> AppliedVersion:
    """How far a table is, by this ledger: one that has seen entries that are not in it begins anew."""
    known = applied.sequence >= 0 and (
        applied.sha256 == head.sha256 or store.has_manifest(applied.sha256, applied.sequence - 1)
    )
    return applied if known else replace(applied, sequence=-1)


def _apply_entries(
    store: LedgerStore, outputs: OutputStore, table: str, applied: AppliedVersion, head: Ledger
) -> None:
    """One commit for each entry that has something for it; the last one says how far the ledger is."""
    for manifest in store.entries(head.stream, applied.sequence):
        added, removed = _file_changes_of(manifest.entry, table)
        last = manifest.ledger.sequence >= head.sequence
        if added or removed or last:
            outputs.put_files(table, applied, manifest.ledger, added, removed)
            crash_point("output-half")
            applied = outputs.applied_version(table)
        if last:
            return


def _files_as_of(store: LedgerStore, table: str, head: Ledger) -> PartitionFileList:
    """The table's files as of the ledger."""
    found: dict[str, tuple[Partition, File]] = {}
    for manifest in store.entries(head.stream, -1):
        added, removed = _file_changes_of(manifest.entry, table)
        found = (
            {path: placed for path, placed in found.items() if path not in removed}
            if removed
            else found
        )
        found |= {file.path: (partition, file) for partition, file in added}
        if manifest.ledger.sequence >= head.sequence:
            break
    return list(found.values())


def _file_changes_of(entry: Entry, table: str) -> tuple[PartitionFileList, list[str]]:
    """The files that an entry adds to a table, and takes out of it."""
    added = [
        (change.partition, file)
        for change in entry.changes
        for file in change.other_records.get(table, ())
    ]
    return added, [path for path in entry.removed_paths if table_of_path(path) == table]
