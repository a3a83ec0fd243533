"""Leave: the status file, written where a run or a watch ends. That it cannot be written fails neither: it is said.

Next room: core/status.py says what is in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from seriatim.adapters.status import StatusFiles
from seriatim.core.errors import SeriatimError
from seriatim.core.status import Status
from seriatim.ports import Clock, LedgerStore, Log, StateStore
from seriatim.steps.glance import status_of
from seriatim.steps.watch import Gathered, Look, gather, judge

if TYPE_CHECKING:
    from seriatim.streams import StreamFile


def after_run(file: StreamFile, log: Log, store: LedgerStore, state: StateStore, clock: Clock) -> str:
    """Look once more, at the end of a run, and leave what is seen. What went wrong with it, if anything did."""
    try:
        seen = gather(file.stream, log, store, state, clock)
        leave(file, seen, judge(file.stream, seen), store, ran=True)
    except (OSError, SeriatimError) as trouble:  # the run is done and committed: this does not undo it
        return str(trouble)
    return ""


def leave(file: StreamFile, seen: Gathered, look: Look, store: LedgerStore, *, ran: bool = False) -> Status:
    """Keep a look for pages."""
    files = StatusFiles(Path(file.stream.output.path))
    made = status_of(file.stream, seen, look, ran=ran, before=files.status())
    made = replace(made, gaps_open=_gaps_open(file, store, seen))
    if seen.ledger.sequence >= 0:  # a stream that was never run has no folder to keep it in
        files.put_status(made)
    return made


def _gaps_open(file: StreamFile, store: LedgerStore, seen: Gathered) -> int | None:
    """How many stretches of output are not to be trusted, as of the ledger; None: the table cannot be read."""
    from seriatim.adapters.derived import DeltaDerived
    from seriatim.steps.derive import gaps_now

    if seen.ledger.sequence < 0:
        return 0
    derived = DeltaDerived(Path(file.stream.output.path), file.stream.output.compression)
    try:
        return sum(gap.closed is None for gap in gaps_now(store, derived, seen.ledger))
    except SeriatimError:  # a run or `seriatim rebuild` mends it; whoever looks is not kept from it
        return None
