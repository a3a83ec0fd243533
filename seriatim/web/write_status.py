"""Leave: the status file, written where a run or a watch ends. That it cannot be written fails
neither: it is said.

Next room: operations/stream_status.py says what is in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from seriatim.errors import SeriatimError
from seriatim.operations.status_file import build_saved_status
from seriatim.operations.stream_status import SavedStatus
from seriatim.operations.watch import WatchInput, WatchResult, assess_watch_input, read_watch_input
from seriatim.ports import Clock, LedgerStore, Log, StateStore
from seriatim.storage.status_file import StatusFiles

if TYPE_CHECKING:
    from seriatim.stream_files import StreamFile


def write_status_after_run(
    file: StreamFile, log: Log, store: LedgerStore, state: StateStore, clock: Clock
) -> str:
    """Look once more, at the end of a run, and leave what is seen. What went wrong with it, if
    anything did.
    """
    try:
        seen = read_watch_input(file.stream, log, store, state, clock)
        write_status_file(
            file, seen, assess_watch_input(file.stream, seen), store, is_after_run=True
        )
    except (
        OSError,
        SeriatimError,
    ) as trouble:  # the run is done and committed: this does not undo it
        return str(trouble)
    return ""


def write_status_file(
    file: StreamFile,
    watch_input: WatchInput,
    watch_result: WatchResult,
    store: LedgerStore,
    *,
    is_after_run: bool = False,
) -> SavedStatus:
    """Keep a look for pages."""
    files = StatusFiles(Path(file.stream.output.path))
    made = build_saved_status(
        file.stream, watch_input, watch_result, has_run=is_after_run, previous=files.read_status()
    )
    made = replace(made, gaps_open=_count_open_gaps(file, store, watch_input))
    if watch_input.ledger.sequence >= 0:  # a stream that was never run has no folder to keep it in
        files.write_status(made)
    return made


def _count_open_gaps(file: StreamFile, store: LedgerStore, watch_input: WatchInput) -> int | None:
    """How many stretches of output are not to be trusted, as of the ledger; None: the table cannot
    be read.
    """
    from seriatim.operations.derived_tables import read_gaps
    from seriatim.storage.derived_tables import DeltaDerived

    if watch_input.ledger.sequence < 0:
        return 0
    derived = DeltaDerived(Path(file.stream.output.path), file.stream.output.compression)
    try:
        return sum(gap.closed is None for gap in read_gaps(store, derived, watch_input.ledger))
    except SeriatimError:  # a run or `seriatim rebuild` mends it; whoever looks is not kept from it
        return None
