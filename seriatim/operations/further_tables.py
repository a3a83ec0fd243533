"""Further tables: bring the tables of a machine's further kinds of records up to the ledger.

They follow the ledger entry by entry. The commit on `records/` has decided everything: it names
their files, and nothing is visible before it. Each commit on a further table names the entry that
it reaches: nothing is put in twice, and after a crash the next run catches up.

Next: operations/derived_tables.py calls this after runs; storage/further_tables.py is the tables.
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
    """Bring every table up to the ledger; with `rebuild`, build it again from nothing."""
    for table in outputs.tables:
        _catch_up_table(store, outputs, table, head, rebuild=rebuild)


def _catch_up_table(
    store: LedgerStore, outputs: OutputStore, table: str, head: Ledger, *, rebuild: bool
) -> None:
    for _ in range(TRIES_MAX):
        applied = reset_if_unknown(store, outputs.applied_version(table), head)
        if rebuild:
            applied = replace(applied, sequence=-1)
        if applied.sequence >= head.sequence:
            return
        try:
            if applied.sequence < 0:
                outputs.put_files(table, applied, head, _files_as_of(store, table, head), [])
            else:
                _apply_entries(store, outputs, table, applied, head)
        except CommitConflictError as error:
            # Another run does the same at this moment, or the disk is full.
            conflict = error
            continue
        return
    raise PlatformError(
        f"{head.stream}: the table {table_directory(table)} could not be written, {TRIES_MAX} times",
        cause=str(conflict)[:400],
        next="check that the output path can be written and has room: the next run catches up",
    )


def reset_if_unknown(store: LedgerStore, applied: AppliedVersion, head: Ledger) -> AppliedVersion:
    """How far a table is. A table that shows an entry of another ledger starts over."""
    if applied.sequence >= 0:
        if applied.sha256 == head.sha256:
            return applied
        if store.has_manifest(applied.sha256, applied.sequence - 1):
            return applied
    return replace(applied, sequence=-1)


def _apply_entries(
    store: LedgerStore, outputs: OutputStore, table: str, applied: AppliedVersion, head: Ledger
) -> None:
    """One commit for each entry that has files for the table, and one for the newest entry."""
    for manifest in store.entries(head.stream, applied.sequence):
        added, removed = _file_changes_of(manifest.entry, table)
        is_newest = manifest.ledger.sequence >= head.sequence
        if added or removed or is_newest:
            outputs.put_files(table, applied, manifest.ledger, added, removed)
            crash_point("output-half")
            applied = outputs.applied_version(table)
        if is_newest:
            return


def _files_as_of(store: LedgerStore, table: str, head: Ledger) -> PartitionFileList:
    """The table's files as of the ledger."""
    files_by_path: dict[str, tuple[Partition, File]] = {}
    for manifest in store.entries(head.stream, -1):
        added, removed = _file_changes_of(manifest.entry, table)
        for path in removed:
            files_by_path.pop(path, None)
        for partition, file in added:
            files_by_path[file.path] = (partition, file)
        if manifest.ledger.sequence >= head.sequence:
            break
    return list(files_by_path.values())


def _file_changes_of(entry: Entry, table: str) -> tuple[PartitionFileList, list[str]]:
    """The files that an entry adds to a table, and the paths that it removes from it."""
    added: PartitionFileList = []
    for change in entry.changes:
        added += [(change.partition, file) for file in change.other_records.get(table, ())]
    removed = [path for path in entry.removed_paths if table_of_path(path) == table]
    return added, removed
