"""Derive: the tables `gaps` and `quarantine`, brought up to the ledger. Made of entries alone, so never lost.

Each table says up to which entry it is, in the very commit that took it there: what is in is not put in again,
and a crash in between is caught up with next time. A table that another ledger wrote is made again as a whole.

Next room: core/gaps.py is the fold; adapters/derived.py has the tables.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from seriatim.core.crash import crash_point
from seriatim.core.errors import PlatformError, SeriatimError
from seriatim.core.gaps import Aside, Gap, GapsFold, asides, released
from seriatim.core.ledger import Ledger
from seriatim.ports import Conflict, DerivedStore, LedgerStore, Reached
from seriatim.steps.commit import TRIES_MAX
from seriatim.steps.outputs import catch_up_outputs, trusted

NOTHING = Reached()


class Caught(Struct):
    """What the tables should say as of an entry."""

    ledger: Ledger
    before: list[Gap]
    gaps: list[Gap]
    asides: list[Aside]


def keep_up(store: LedgerStore, derived: DerivedStore, head: Ledger) -> str:
    """Catch up, after a run. What is committed is safe without these tables: trouble is told, and fails nothing."""
    try:
        catch_up(store, derived, head)
    except SeriatimError as trouble:
        return trouble.render()
    return ""


def catch_up(store: LedgerStore, derived: DerivedStore, head: Ledger, *, whole: bool = False) -> None:
    """Bring the tables up to the ledger, or make them again as a `whole`. No commit where nothing changed."""
    _catch_up_both(store, derived, head, whole=whole)
    if derived.beside is not None:
        catch_up_outputs(store, derived.beside, head, whole=whole)


def _catch_up_both(store: LedgerStore, derived: DerivedStore, head: Ledger, *, whole: bool) -> None:
    for _ in range(TRIES_MAX):
        gaps_at, quarantine_at = (trusted(store, derived.reached(name), head) for name in ("gaps", "quarantine"))
        if whole:
            gaps_at, quarantine_at = replace(gaps_at, sequence=-1), replace(quarantine_at, sequence=-1)
        if min(gaps_at.sequence, quarantine_at.sequence) >= head.sequence:
            return
        try:
            _put(derived, gaps_at, quarantine_at, _catch(store, derived, gaps_at, quarantine_at, head))
        except Conflict as conflict:  # another run does the same, or the disk is full
            trouble = conflict
            continue
        return
    raise PlatformError(
        f"{head.stream}: the tables gaps and quarantine could not be written, {TRIES_MAX} times",
        cause=str(trouble)[:400],
        next="check that the output path can be written and has room: the next run catches up",
    )


def gaps_now(store: LedgerStore, derived: DerivedStore, head: Ledger) -> list[Gap]:
    """The gaps as of the ledger, however far the table is."""
    at = trusted(store, derived.reached("gaps"), head)
    return _catch(store, derived, at, replace(at, sequence=max(at.sequence, head.sequence)), head).gaps


def _catch(store: LedgerStore, derived: DerivedStore, gaps_at: Reached, quarantine_at: Reached, head: Ledger) -> Caught:
    """Walk the entries that a table has not seen."""
    before = derived.gaps(gaps_at) if gaps_at.sequence >= 0 else []
    walk, files, last = GapsFold(before), list[Aside](), head
    for manifest in store.entries(head.stream, min(gaps_at.sequence, quarantine_at.sequence)):
        last = manifest.ledger
        if last.sequence > gaps_at.sequence:
            walk.take(manifest)
        if last.sequence > quarantine_at.sequence:
            files += asides(manifest.entry)
    return Caught(last, before, walk.gaps, files)


def _put(derived: DerivedStore, gaps_at: Reached, quarantine_at: Reached, caught: Caught) -> None:
    """Put what changed; a table that is not there is made even if it is empty: people query it."""
    if gaps_at.sequence < 0 or caught.gaps != caught.before:
        derived.put_gaps(gaps_at, caught.ledger, caught.gaps)
    crash_point("derived-half")
    ended = released(caught.gaps, quarantine_at.sequence)
    if quarantine_at.sequence < 0 or caught.asides or ended:
        derived.put_quarantine(quarantine_at, caught.ledger, caught.asides, ended)
    derived.note(caught.ledger)
    crash_point("derived")
