"""Derive: the tables `gaps` and `quarantine`, brought up to the ledger. Made of entries alone, so
never lost.

Each table says up to which entry it is, in the very commit that took it there: what is in is not
put in again, and a crash in between is caught up with next time. A table that another ledger wrote
is made again as a whole.

Next room: ledger/gaps.py is the fold; storage/derived_tables.py has the tables.
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

NOT_APPLIED = AppliedVersion()


class DerivedUpdate(Struct):
    """What the tables should say as of an entry."""

    ledger: Ledger
    previous_gaps: list[Gap]
    gaps: list[Gap]
    quarantine_files: list[QuarantineFile]


def catch_up_after_run(store: LedgerStore, derived: DerivedStore, head: Ledger) -> str:
    """Catch up, after a run. What is committed is safe without these tables: trouble is told, and
    fails nothing.
    """
    try:
        catch_up_derived(store, derived, head)
    except SeriatimError as trouble:
        return trouble.render()
    return ""


def catch_up_derived(
    store: LedgerStore, derived: DerivedStore, head: Ledger, *, rebuild: bool = False
) -> None:
    """Bring the tables up to the ledger, or make them again as a `whole`. No commit where nothing
    changed.
    """
    _catch_up_gaps_and_quarantine(store, derived, head, rebuild=rebuild)
    if derived.output_store is not None:
        catch_up_outputs(store, derived.output_store, head, rebuild=rebuild)


def _catch_up_gaps_and_quarantine(
    store: LedgerStore, derived: DerivedStore, head: Ledger, *, rebuild: bool
) -> None:
    for _ in range(TRIES_MAX):
        gaps_at, quarantine_at = (
            reset_if_unknown(store, derived.applied_version(name), head)
            for name in ("gaps", "quarantine")
        )
        if rebuild:
            gaps_at, quarantine_at = (
                replace(gaps_at, sequence=-1),
                replace(quarantine_at, sequence=-1),
            )
        if min(gaps_at.sequence, quarantine_at.sequence) >= head.sequence:
            return
        try:
            _write_update(
                derived,
                gaps_at,
                quarantine_at,
                _read_update(store, derived, gaps_at, quarantine_at, head),
            )
        except CommitConflictError as conflict:  # another run does the same, or the disk is full
            trouble = conflict
            continue
        return
    raise PlatformError(
        f"{head.stream}: the tables gaps and quarantine could not be written, {TRIES_MAX} times",
        cause=str(trouble)[:400],
        next="check that the output path can be written and has room: the next run catches up",
    )


def read_gaps(store: LedgerStore, derived: DerivedStore, head: Ledger) -> list[Gap]:
    """The gaps as of the ledger, however far the table is."""
    at = reset_if_unknown(store, derived.applied_version("gaps"), head)
    return _read_update(
        store, derived, at, replace(at, sequence=max(at.sequence, head.sequence)), head
    ).gaps


def _read_update(
    store: LedgerStore,
    derived: DerivedStore,
    gaps_entry: AppliedVersion,
    quarantine_entry: AppliedVersion,
    head: Ledger,
) -> DerivedUpdate:
    """Walk the entries that a table has not seen."""
    before = derived.gaps(gaps_entry) if gaps_entry.sequence >= 0 else []
    walk, files, last = GapsFold(before), list[QuarantineFile](), head
    for manifest in store.entries(head.stream, min(gaps_entry.sequence, quarantine_entry.sequence)):
        last = manifest.ledger
        if last.sequence > gaps_entry.sequence:
            walk.add_entry(manifest)
        if last.sequence > quarantine_entry.sequence:
            files += quarantine_files(manifest.entry)
    return DerivedUpdate(last, before, walk.gaps, files)


def _write_update(
    derived: DerivedStore,
    gaps_entry: AppliedVersion,
    quarantine_entry: AppliedVersion,
    update: DerivedUpdate,
) -> None:
    """Put what changed; a table that is not there is made even if it is empty: people query it."""
    if gaps_entry.sequence < 0 or update.gaps != update.previous_gaps:
        derived.put_gaps(gaps_entry, update.ledger, update.gaps)
    crash_point("derived-half")
    ended = ended_quarantines(update.gaps, quarantine_entry.sequence)
    if quarantine_entry.sequence < 0 or update.quarantine_files or ended:
        derived.put_quarantine(quarantine_entry, update.ledger, update.quarantine_files, ended)
    derived.note_up_to_date(update.ledger)
    crash_point("derived")
