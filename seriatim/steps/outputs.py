"""Outputs: the tables of a machine's further kinds of records, brought up to the ledger. They follow it entry by entry.

The ledger's commit, on `records/`, has decided everything: it names their files, and nothing is visible before it. Each
commit of theirs names the entry that it reaches, so what is in is not put in again, and a crash in between is caught
up with next time.

Next room: steps/derive.py asks for this after runs; adapters/outputs.py has the tables.
"""

from __future__ import annotations

from msgspec.structs import replace

from seriatim.core.crash import crash_point
from seriatim.core.errors import PlatformError
from seriatim.core.ledger import Entry, File, Ledger
from seriatim.core.offsets import Partition
from seriatim.core.outputs import room, table_in
from seriatim.ports import Conflict, LedgerStore, OutputStore, Reached
from seriatim.steps.commit import TRIES_MAX

Placed = list[tuple[Partition, File]]


def catch_up_outputs(store: LedgerStore, outputs: OutputStore, head: Ledger, *, whole: bool = False) -> None:
    """Bring every table up to the ledger, or make it again as a `whole`."""
    for table in outputs.tables:
        _catch_up(store, outputs, table, head, whole=whole)


def _catch_up(store: LedgerStore, outputs: OutputStore, table: str, head: Ledger, *, whole: bool) -> None:
    for _ in range(TRIES_MAX):
        at = trusted(store, outputs.reached(table), head)
        if whole:
            at = replace(at, sequence=-1)
        if at.sequence >= head.sequence:
            return
        try:
            if at.sequence < 0:
                outputs.put(table, at, head, _everything(store, table, head), [])
            else:
                _follow(store, outputs, table, at, head)
        except Conflict as conflict:  # another run does the same, or the disk is full
            trouble = conflict
            continue
        return
    raise PlatformError(
        f"{head.stream}: the table {room(table)} could not be written, {TRIES_MAX} times",
        cause=str(trouble)[:400],
        next="check that the output path can be written and has room: the next run catches up",
    )


def trusted(store: LedgerStore, at: Reached, head: Ledger) -> Reached:
    """How far a table is, by this ledger: one that has seen entries that are not in it begins anew."""
    known = at.sequence >= 0 and (at.sha256 == head.sha256 or store.has(at.sha256, at.sequence - 1))
    return at if known else replace(at, sequence=-1)


def _follow(store: LedgerStore, outputs: OutputStore, table: str, at: Reached, head: Ledger) -> None:
    """One commit for each entry that has something for it; the last one says how far the ledger is."""
    for manifest in store.entries(head.stream, at.sequence):
        added, removed = _of(manifest.entry, table)
        last = manifest.ledger.sequence >= head.sequence
        if added or removed or last:
            outputs.put(table, at, manifest.ledger, added, removed)
            crash_point("output-half")
            at = outputs.reached(table)
        if last:
            return


def _everything(store: LedgerStore, table: str, head: Ledger) -> Placed:
    """The table's files as of the ledger."""
    found: dict[str, tuple[Partition, File]] = {}
    for manifest in store.entries(head.stream, -1):
        added, removed = _of(manifest.entry, table)
        found = {path: placed for path, placed in found.items() if path not in removed} if removed else found
        found |= {file.path: (partition, file) for partition, file in added}
        if manifest.ledger.sequence >= head.sequence:
            break
    return list(found.values())


def _of(entry: Entry, table: str) -> tuple[Placed, list[str]]:
    """The files that an entry adds to a table, and takes out of it."""
    added = [(change.partition, file) for change in entry.changes for file in change.others.get(table, ())]
    return added, [path for path in entry.removed if table_in(path) == table]
