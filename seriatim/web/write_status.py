"""Writes the status file at the end of a run or of a watch, for the pages.

Neither fails if the file cannot be written: the reason is returned instead.

Next: operations/stream_status.py has the content of the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from seriatim.engine.files import StateStore
from seriatim.errors import SeriatimError
from seriatim.operations.status_file import build_saved_status
from seriatim.operations.stream_status import SavedStatus
from seriatim.operations.watch import WatchInput, WatchResult, assess_watch_input, read_watch_input
from seriatim.ports import Clock, LedgerStore, Log
from seriatim.storage.status_file import StatusFiles
from seriatim.storage.store import open_store

if TYPE_CHECKING:
    from seriatim.stream_files import StreamFile


def write_status_after_run(
    file: StreamFile, log: Log, store: LedgerStore, state: StateStore, clock: Clock
) -> str:
    """Observe the stream at the end of a run, and write the status file.

    The text that comes back says why that failed; it is empty if it did not.
    """
    try:
        watch_input = read_watch_input(file.stream, log, store, state, clock)
        watch_result = assess_watch_input(file.stream, watch_input)
        write_status_file(file, watch_input, watch_result, store, is_after_run=True)
    except (OSError, SeriatimError) as error:
        # The run is committed already: a page that is not up to date must not fail it.
        return str(error)
    return ""


def write_status_file(
    file: StreamFile,
    watch_input: WatchInput,
    watch_result: WatchResult,
    store: LedgerStore,
    *,
    is_after_run: bool = False,
) -> SavedStatus:
    """Write the status file from an observation of the stream, and return its content."""
    files = StatusFiles(open_store(file.stream.output.path))
    status = build_saved_status(
        file.stream, watch_input, watch_result, has_run=is_after_run, previous=files.read_status()
    )
    status = replace(status, gaps_open=_count_open_gaps(file, store, watch_input))
    # A stream that was never run has no output folder for the file.
    if watch_input.ledger.sequence >= 0:
        files.write_status(status)
    return status


def _count_open_gaps(file: StreamFile, store: LedgerStore, watch_input: WatchInput) -> int | None:
    """How many ranges of the output are not to be trusted; None: the table cannot be read."""
    from seriatim.operations.followers import read_gaps
    from seriatim.storage.derived_tables import DeltaDerived
    from seriatim.storage.store import open_store

    if watch_input.ledger.sequence < 0:
        return 0
    derived = DeltaDerived(open_store(file.stream.output.path))
    try:
        gaps = read_gaps(store, derived, watch_input.ledger)
        return sum(gap.closed is None for gap in gaps)
    except SeriatimError:
        # A run or `seriatim rebuild` repairs the table. The rest of the status is still right.
        return None
