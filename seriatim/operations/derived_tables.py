"""Derived tables: bring the tables `gaps` and `quarantine` up to the ledger.

They are made of ledger entries alone, so they can always be built again. Each commit of such a
table names the entry that it reaches: nothing is put in twice, and after a crash the next run
catches up. A table that another ledger wrote is built again from nothing.

Next: ledger/gaps.py turns entries into gaps; storage/derived_tables.py is the tables.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.crash_points import crash_point
from seriatim.errors import PlatformError, SeriatimError
from seriatim.ledger.commit import TRIES_MAX
from seriatim.ledger.gaps import Gap, GapsFold, QuarantineFile, ended_quarantines, quarantine_files
from seriatim.ledger.model import Ledger
from seriatim.operations.further_tables import catch_up_outputs, reset_if_unknown
from seriatim.ports import AppliedVersion, CommitConflictError, DerivedStore, LedgerStore


class DerivedUpdate(Struct):
    """What the tables have to show as of an entry, and what `gaps` showed before."""

    ledger: Ledger
    previous_gaps: list[Gap]
    gaps: list[Gap]
    quarantine_files: list[QuarantineFile]
    has_files_of_repair: bool = False
    """A repair quarantined messages again; their sessions may have been released long ago."""


def catch_up_after_run(store: LedgerStore, derived: DerivedStore, head: Ledger) -> str:
    """Catch up after a run. Returns the error as a text for people, or "".

    What is committed is safe without these tables, so an error here does not fail the run.
    """
    try:
        catch_up_derived(store, derived, head)
    except SeriatimError as error:
        return error.render()
    return ""


def catch_up_derived(
    store: LedgerStore, derived: DerivedStore, head: Ledger, *, rebuild: bool = False
) -> None:
    """Bring the tables up to the ledger; with `rebuild`, build them again from nothing. A table in
    which nothing changes gets no commit.
    """
    _catch_up_gaps_and_quarantine(store, derived, head, rebuild=rebuild)
    if derived.output_store is not None:
        catch_up_outputs(store, derived.output_store, head, rebuild=rebuild)


def _catch_up_gaps_and_quarantine(
    store: LedgerStore, derived: DerivedStore, head: Ledger, *, rebuild: bool
) -> None:
    for _ in range(TRIES_MAX):
        gaps_version = reset_if_unknown(store, derived.applied_version("gaps"), head)
        quarantine_version = reset_if_unknown(store, derived.applied_version("quarantine"), head)
        if rebuild:
            gaps_version = replace(gaps_version, sequence=-1)
            quarantine_version = replace(quarantine_version, sequence=-1)
        if min(gaps_version.sequence, quarantine_version.sequence) >= head.sequence:
            return
        update = _read_update(store, derived, gaps_version, quarantine_version, head)
        try:
            _write_update(derived, gaps_version, quarantine_version, update)
        except CommitConflictError as error:
            # Another run does the same at this moment, or the disk is full.
            conflict = error
            continue
        return
    raise PlatformError(
        f"{head.stream}: the tables gaps and quarantine could not be written, {TRIES_MAX} times",
        cause=str(conflict)[:400],
        next="check that the output path can be written and has room: the next run catches up",
    )


def read_gaps(store: LedgerStore, derived: DerivedStore, head: Ledger) -> list[Gap]:
    """The gaps as of the ledger, however far behind the table is."""
    gaps_version = reset_if_unknown(store, derived.applied_version("gaps"), head)
    # The table quarantine counts as up to date here, so that nothing is collected for it.
    up_to_date = replace(gaps_version, sequence=max(gaps_version.sequence, head.sequence))
    return _read_update(store, derived, gaps_version, up_to_date, head).gaps


def _read_update(
    store: LedgerStore,
    derived: DerivedStore,
    gaps_version: AppliedVersion,
    quarantine_version: AppliedVersion,
    head: Ledger,
) -> DerivedUpdate:
    """Read the entries that one of the tables does not have yet."""
    previous_gaps = derived.gaps(gaps_version) if gaps_version.sequence >= 0 else []
    gaps_fold = GapsFold(previous_gaps)
    new_files: list[QuarantineFile] = []
    has_files_of_repair = False
    ledger = head
    oldest_sequence = min(gaps_version.sequence, quarantine_version.sequence)
    for manifest in store.entries(head.stream, oldest_sequence):
        ledger = manifest.ledger
        if ledger.sequence > gaps_version.sequence:
            gaps_fold.add_entry(manifest)
        if ledger.sequence > quarantine_version.sequence:
            files = quarantine_files(manifest.entry)
            new_files += files
            if files and manifest.entry.kind == "repair":
                has_files_of_repair = True
    return DerivedUpdate(ledger, previous_gaps, gaps_fold.gaps, new_files, has_files_of_repair)


def _write_update(
    derived: DerivedStore,
    gaps_version: AppliedVersion,
    quarantine_version: AppliedVersion,
    update: DerivedUpdate,
) -> None:
    """Write the tables that changed. A missing table is created even if it is empty, because people
    query it.
    """
    if gaps_version.sequence < 0 or update.gaps != update.previous_gaps:
        derived.put_gaps(gaps_version, update.ledger, update.gaps)
    crash_point("derived-half")
    # Messages of a slice can only be released by later entries. A repair reads the past again: the
    # snapshot that released a session may have been committed long before it.
    after_sequence = -1 if update.has_files_of_repair else quarantine_version.sequence
    ended = ended_quarantines(update.gaps, after_sequence)
    if quarantine_version.sequence < 0 or update.quarantine_files or ended:
        derived.put_quarantine(quarantine_version, update.ledger, update.quarantine_files, ended)
    derived.note_up_to_date(update.ledger)
    crash_point("derived")
