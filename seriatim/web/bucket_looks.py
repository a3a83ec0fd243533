"""What the pages know of streams in buckets, and when they ask a bucket again.

Each look at a bucket is a request, and the list of streams is refreshed every few seconds. So a
refresh has a budget: it makes at most one request for each stream that it shows (`RequestBudget`). One
listing tells whether a stream is as before. What changed is read while the budget lasts; the streams
that waited longest come first, and the others are shown as they were at their last look.

Next: web/read.py, which gives the budget.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from threading import Lock

from msgspec import Struct
from msgspec.structs import replace

from seriatim.errors import SeriatimError
from seriatim.ledger.manifests import WITNESS_KEY
from seriatim.ledger.model import EntryMark, Ledger
from seriatim.operations.status import StreamStatus
from seriatim.storage.status_file import STATUS_FILE, StatusFiles

LEDGER_REQUESTS = 2
"""A ledger is in one manifest, or in one and the whole one before it."""
LOOKS_MAX = 2_000
"""So many streams are remembered, at most."""


class RequestBudget:
    """How many requests may still be made."""

    def __init__(self, requests_max: int | None = None) -> None:
        self._left = requests_max

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit at all."""
        return self._left is not None

    def take(self, requests: int) -> bool:
        """Whether so many requests may be made now. They are taken from what is left."""
        if self._left is None:
            return True
        if self._left < requests:
            return False
        self._left -= requests
        return True


class BucketLook(Struct, frozen=True):
    """What is known of a stream."""

    status: StreamStatus | None = None
    status_stamp: str | None = None
    """What the bucket called this status file; None: that is not known."""
    witness: EntryMark | None = None
    witness_stamp: str | None = None
    ledger: Ledger | None = None
    """The ledger that was read last; None: it was not needed."""
    number: int = 0
    """The number of the last look that was complete; 0: none was."""
    error: OSError | SeriatimError | None = None
    """Why the last look failed. It is raised again until another look is made."""

    @property
    def is_status_current(self) -> bool:
        """Whether the status was written after the last entry."""
        if self.witness is None:
            return True
        return self.status is not None and self.status.sequence == self.witness.sequence

    @property
    def is_ledger_missing(self) -> bool:
        """Whether entries were committed since the status was written, and their ledger is not read."""
        if self.is_status_current or self.witness is None:
            return False
        return self.ledger is None or self.ledger.sha256 != self.witness.sha256

    def shown_ledger(self) -> Ledger | None:
        """The ledger, if it is newer than the status."""
        if self.ledger is None or not self.is_ledger_missing:
            return None if self.is_status_current else self.ledger
        # It is that of an earlier look, and the status may have been read since.
        is_outdated = self.status is not None and self.status.sequence >= self.ledger.sequence
        return None if is_outdated else self.ledger


class BucketLooks:
    """The last looks at all streams of a page."""

    def __init__(self) -> None:
        self._looks = OrderedDict[str, BucketLook]()
        """By output address and stream."""
        self._numbers = count(1)
        self._lock = Lock()

    def waiting_rank(self, files: StatusFiles) -> tuple[bool, int]:
        """Sorts streams: those of which nothing is known, then those whose last look is longest ago."""
        look = self._looks.get(_look_key(files))
        if look is None:
            return False, 0
        return True, look.number

    def look(
        self, files: StatusFiles, budget: RequestBudget
    ) -> tuple[StreamStatus | None, Ledger | None]:
        """The status of a stream at the last look of a run, and its ledger if that is newer.

        1. Where requests are limited and nothing is known of the stream, its status file is all that is
           read.
        2. One listing tells which of status file and witness changed. They are read.
        3. If the witness is not the entry of the status, the ledger is read.

        Without enough requests left a step waits for a later refresh.
        """
        earlier_look = self._looks.get(_look_key(files))
        number = next(self._numbers)
        try:
            if earlier_look is None and budget.is_limited:
                # 1. The pages that call this see to it that a new stream has a request left.
                budget.take(1)
                look = BucketLook(status=files.read_status())
            else:
                look = _look_again(files, earlier_look or BucketLook(), budget, number)
        except (OSError, SeriatimError) as error:
            look = replace(earlier_look or BucketLook(), number=number, error=error)
        self._keep(files, look)
        if look.error is not None:
            # Raised again and again, it would gather tracebacks.
            raise look.error.with_traceback(None)
        return look.status, look.shown_ledger()

    def _keep(self, files: StatusFiles, look: BucketLook) -> None:
        with self._lock:
            self._looks[_look_key(files)] = look
            while len(self._looks) > LOOKS_MAX:
                self._looks.popitem(last=False)


def _look_again(
    files: StatusFiles, earlier_look: BucketLook, budget: RequestBudget, number: int
) -> BucketLook:
    if not budget.take(1):
        return earlier_look
    # 2. What changed.
    look = replace(earlier_look, error=None)
    stamps = files.store.stamps("")
    status_stamp = stamps.get(STATUS_FILE, "")
    witness_stamp = stamps.get(WITNESS_KEY, "")
    is_new_status = status_stamp != look.status_stamp
    is_new_witness = witness_stamp != look.witness_stamp
    if not budget.take(is_new_status + is_new_witness):
        return earlier_look
    if is_new_status:
        look = replace(look, status=files.read_status(), status_stamp=status_stamp)
    if is_new_witness:
        look = replace(look, witness=files.witness(), witness_stamp=witness_stamp)
    # 3. The ledger.
    if look.is_ledger_missing and look.witness is not None:
        if not budget.take(LEDGER_REQUESTS):
            return look
        look = replace(look, ledger=files.ledger_at(look.witness))
    return replace(look, number=number)


def _look_key(files: StatusFiles) -> str:
    return f"{files.store.url}#{files.stream}"
