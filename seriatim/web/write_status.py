"""Looks at a stream as every run and watch does, and writes what it saw to the status file, for the
pages.

Next: operations/status.py says what is in the file; storage/status_file.py reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from seriatim.engine.files import StateStore
from seriatim.errors import SeriatimError
from seriatim.ledger.manifests import LedgerHead
from seriatim.operations.missing_messages import MissingMessageSearch
from seriatim.operations.status import StreamStatus
from seriatim.operations.watch import watch_stream
from seriatim.ports import Clock, DerivedStore, LedgerStore, Log
from seriatim.storage.derived_tables import DeltaDerived
from seriatim.storage.status_file import StatusFiles
from seriatim.storage.store import open_store

if TYPE_CHECKING:
    from seriatim.stream_files import StreamFile


def watch_stream_file(
    file: StreamFile,
    log: Log,
    store: LedgerStore,
    state: StateStore,
    clock: Clock,
    derived: DerivedStore | None = None,
    head: LedgerHead | None = None,
    search: MissingMessageSearch | None = None,
) -> StreamStatus:
    """The status of a stream, with its open gaps and with what needs a person. `derived` and `head`
    are the stream's, if they are open already. With `search`, messages that sessions wait for are
    looked for, from where the status file says that the last look ended.
    """
    output = open_store(file.stream.output.path)
    # Only sessions in quarantine wait for messages. Without one, an earlier look says nothing more, and
    # in a bucket it would be one request more for every run.
    previous = None
    if head is None or any(account.quarantined for account in head.ledger.partitions.values()):
        previous = StatusFiles(output, file.stream.name).read_status()
    if derived is None:
        derived = DeltaDerived(output)
    return watch_stream(
        file.stream, log, store, state, clock, derived, head, search=search, previous=previous
    )


def write_status_after_run(
    file: StreamFile,
    log: Log,
    store: LedgerStore,
    state: StateStore,
    clock: Clock,
    derived: DerivedStore | None = None,
    head: LedgerHead | None = None,
) -> str:
    """Look at the stream at the end of a run, and write the status file.

    The text that comes back says why that failed; it is empty if it did not.
    """
    try:
        status = watch_stream_file(file, log, store, state, clock, derived, head)
        write_status_file(file, status, is_after_run=True)
    except (OSError, SeriatimError) as error:
        # The run is committed already: a page that is not up to date must not fail it.
        return str(error)
    return ""


def write_status_file(
    file: StreamFile, status: StreamStatus, *, is_after_run: bool = False
) -> StreamStatus:
    """Write the status file, and return its content."""
    files = StatusFiles(open_store(file.stream.output.path))
    if is_after_run:
        status = replace(status, last_run_seconds=status.at_seconds)
    else:
        previous = files.read_status()
        if previous is not None and previous.last_run_seconds is not None:
            # A run that committed nothing is known only from the file.
            last_run_seconds = max(previous.last_run_seconds, status.last_run_seconds or 0.0)
            status = replace(status, last_run_seconds=last_run_seconds)
    # A stream that was never run has no output folder for the file.
    if status.sequence >= 0:
        files.write_status(status)
    return status
