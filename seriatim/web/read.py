"""Reads what pages show from the disk: stream files, status files and manifests. It asks neither
Kafka nor Spark, and changes nothing.

What does not change (a manifest, a stream file until it is edited) is read once.

Next: storage/status_file.py reads the files; web/bucket_looks.py spares requests of buckets; web/views.py
shows it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

from msgspec import Struct

from seriatim import stream_files
from seriatim.errors import ConfigError, IntegrityError, SeriatimError
from seriatim.ledger.entries import VerdictEntry
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Ledger
from seriatim.operations.report import report_key
from seriatim.operations.status import (
    HoldStatus,
    StreamStatus,
    find_holds,
    stream_status_now,
)
from seriatim.storage.status_file import StatusFiles
from seriatim.storage.store import Store, open_store
from seriatim.stream import STREAM_NAME
from seriatim.stream_files import StreamFile
from seriatim.web.bucket_looks import BucketLooks, RequestBudget

HISTORY = 40
"""How many entries a stream's page shows."""
VERDICT_SEARCH_ENTRIES = 50
"""How many entries after a slice are searched for its verdict."""
LIST_REQUESTS_MIN = 20
"""So many requests a refresh of the list may always make, also with few streams."""
CACHED_VALUES_MAX = 2_000
"""Values of each cache, at most."""
Stamp = TypeVar("Stamp")
Value = TypeVar("Value")


class StreamHistory(Struct, frozen=True):
    """A stream and its last entries, newest first."""

    stream_status: StreamStatus
    file: StreamFile
    ledger: Ledger | None
    manifests: list[Manifest]
    trouble: str = ""
    """Why there are not more entries: one of the past is damaged."""


class SliceRow(Struct, frozen=True):
    """One entry, the ledger before it, and the verdicts about it."""

    manifest: Manifest
    ledger_before: Ledger
    verdicts: list[Manifest]
    last_sequence: int
    has_report: bool


class _Output(NamedTuple):
    """A stream file, and what is read of its output."""

    file: StreamFile
    files: StatusFiles


class PageReader:
    """Reads all streams of one folder of stream files."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.clock = clock
        self._files = OrderedDict[str, tuple[bytes, StreamFile]]()
        """By stream: the content of its file, and what was loaded from it."""
        self._ledgers = OrderedDict[str, tuple[str, Ledger | None]]()
        """By output folder and stream: the hash of the last manifest, and its ledger."""
        self._bucket_looks = BucketLooks()
        self._lock = Lock()
        """Guards the caches: the web server answers requests in several threads."""

    def stream_names(self) -> list[str]:
        """The names of all streams."""
        return stream_files.list_streams(self.folder)

    def stream_status(self, name: str) -> StreamStatus:
        """The status of one stream. If it cannot be read, the status says why.

        It never raises for a broken stream, so that the list shows the others.
        """
        try:
            output = self._output(name)
        except (OSError, SeriatimError) as error:
            return _unreadable_status(name, error)
        return self._status_of_output(name, output, RequestBudget())

    def stream_statuses(self, names: Sequence[str]) -> list[StreamStatus]:
        """The status of each stream, for a list that is refreshed all the time.

        It makes at most one request for each stream in a bucket. So where much is new, some streams
        are shown as they were at an earlier call. The next calls begin with these.
        """
        in_buckets: list[tuple[tuple[bool, int], str, _Output]] = []
        status_by_name = {}
        for name in names:
            try:
                output = self._output(name)
            except (OSError, SeriatimError) as error:
                status_by_name[name] = _unreadable_status(name, error)
                continue
            if output.files.store.is_remote:
                rank = self._bucket_looks.waiting_rank(output.files)
                in_buckets.append((rank, name, output))
            else:
                status_by_name[name] = self._status_of_output(name, output, RequestBudget())
        budget = RequestBudget(max(len(in_buckets), LIST_REQUESTS_MIN))
        for _, name, output in sorted(in_buckets, key=itemgetter(0)):
            status_by_name[name] = self._status_of_output(name, output, budget)
        return [status_by_name[name] for name in names]

    def _status_of_output(self, name: str, output: _Output, budget: RequestBudget) -> StreamStatus:
        try:
            if output.files.store.is_remote:
                status, ledger = self._bucket_looks.look(output.files, budget)
            else:
                status, ledger = self._look_on_disk(output.files)
        except (OSError, SeriatimError) as error:
            return _unreadable_status(name, error)
        tier = output.file.stream.tier
        holds: list[HoldStatus] = []
        # In a bucket each manifest is a request. The page of the stream itself names the repair.
        if ledger is not None and not output.files.store.is_remote:
            holds = _find_holds(ledger, output.files)
        return stream_status_now(name, tier, status, ledger, self.clock(), holds)

    def _look_on_disk(self, files: StatusFiles) -> tuple[StreamStatus | None, Ledger | None]:
        """The status at the last look of a run, and the ledger if that is newer."""
        status, witness = files.read_status(), files.witness()
        # The manifest is only read if entries were committed since the status was written.
        if witness is None or (status is not None and status.sequence == witness.sequence):
            return status, None
        return status, self._last_ledger(files)

    def stream_history(self, name: str) -> StreamHistory:
        """One stream and its last entries."""
        file = self.stream_file(name)
        files = self._status_files(file)
        ledger = self._last_ledger(files)
        saved_status = files.read_status()
        manifests: list[Manifest] = []
        trouble = ""
        try:
            # `extend` keeps the manifests that came before an error.
            manifests.extend(files.manifests_backward(HISTORY))
        except IntegrityError as error:
            trouble = error.render()
        holds = find_holds(ledger, manifests) if ledger is not None else []
        tier = file.stream.tier
        status = stream_status_now(name, tier, saved_status, ledger, self.clock(), holds)
        return StreamHistory(status, file, ledger, manifests, trouble)

    def entries_between(
        self, name: str, began_seconds: float, ended_seconds: float
    ) -> tuple[list[Manifest], int]:
        """The last entries of a period of time, oldest first, and how many there are in all."""
        files = self._status_files(self.stream_file(name))
        sequences = range(self._last_sequence(files) + 1)

        def commit_time(sequence: int) -> float:
            return files.manifest(sequence).entry.at_seconds

        # By halves: a ledger may have a million entries, and few of them are read.
        start = bisect_left(sequences, began_seconds, key=commit_time)
        end = bisect_right(sequences, ended_seconds, key=commit_time)
        shown_start = max(start, end - HISTORY)
        manifests = [files.manifest(sequence) for sequence in range(shown_start, end)]
        return manifests, max(0, end - start)

    def slice_row(self, name: str, sequence: int) -> SliceRow:
        """One entry, and the verdicts about it."""
        files = self._status_files(self.stream_file(name))
        manifest = files.manifest(sequence)
        ledger_before = Ledger(stream=name)
        if sequence > 0:
            ledger_before = files.manifest(sequence - 1).ledger
        last_sequence = self._last_sequence(files, default=sequence)
        search_end = min(last_sequence, sequence + VERDICT_SEARCH_ENTRIES)
        verdicts = []
        for later_sequence in range(sequence + 1, search_end + 1):
            later_manifest = files.manifest(later_sequence)
            entry = later_manifest.entry
            if not isinstance(entry, VerdictEntry):
                continue
            if entry.judged_after < sequence <= entry.judged_until:
                verdicts.append(later_manifest)
        has_report = self._store(name).size(report_key(sequence)) is not None
        return SliceRow(manifest, ledger_before, verdicts, last_sequence, has_report)

    def read_report(self, name: str, sequence: int) -> bytes:
        """A report as a run or a check wrote it. If there is none, it is made from the entry."""
        files = self._status_files(self.stream_file(name))
        # Raises for an entry that does not exist, even if a file of that name does.
        files.manifest(sequence)
        try:
            return self._store(name).read(report_key(sequence))
        except FileNotFoundError:
            return self._build_report(name, sequence)

    def _build_report(self, name: str, sequence: int) -> bytes:
        from seriatim.operations.report import build_report_page
        from seriatim.web.views import render_report

        slice_row = self.slice_row(name, sequence)
        report = build_report_page(name, slice_row.ledger_before, [slice_row.manifest])
        return render_report(report).encode("utf-8", "backslashreplace")

    def stream_file(self, name: str) -> StreamFile:
        """The file of a stream, by its name. A ConfigError refuses names of other files."""
        # The pattern has no slash and no dot, so a name never leads out of the folder.
        path = self.folder / f"{name}.toml"
        if not STREAM_NAME.fullmatch(name) or not path.is_file():
            raise ConfigError(
                f"there is no stream {name!r}", next="the list of streams has those that there are"
            )
        content = path.read_bytes()
        return self._cached(
            self._files, name, content, lambda: stream_files.load_stream(name, self.folder)
        )

    @staticmethod
    def _last_sequence(files: StatusFiles, default: int = -1) -> int:
        """The number of the last entry, as the witness has it."""
        witness = files.witness()
        if witness is None:
            return default
        return witness.sequence

    def _last_ledger(self, files: StatusFiles) -> Ledger | None:
        """The ledger as of the last entry; None: there is no entry."""
        witness = files.witness()
        if witness is None:
            return None
        cache_key = f"{files.store.url}#{files.stream}"
        return self._cached(self._ledgers, cache_key, witness.sha256, files.last_ledger)

    def _cached(
        self,
        cache: OrderedDict[str, tuple[Stamp, Value]],
        key: str,
        stamp: Stamp,
        read: Callable[[], Value],
    ) -> Value:
        """The value that was read before, if its stamp is still the same; else it is read anew.

        Reading happens outside the lock: two threads may read the same value, and neither waits.
        """
        with self._lock:
            if key in cache and cache[key][0] == stamp:
                cache.move_to_end(key)
                return cache[key][1]
        value = read()
        with self._lock:
            cache[key] = stamp, value
            cache.move_to_end(key)
            # The value that was not used for the longest time goes first.
            while len(cache) > CACHED_VALUES_MAX:
                cache.popitem(last=False)
        return value

    def _output(self, name: str) -> _Output:
        file = self.stream_file(name)
        return _Output(file, self._status_files(file))

    @staticmethod
    def _status_files(file: StreamFile) -> StatusFiles:
        return StatusFiles(open_store(file.stream.output.path), file.stream.name)

    def _store(self, name: str) -> Store:
        return open_store(self.stream_file(name).stream.output.path)


def _find_holds(ledger: Ledger, files: StatusFiles) -> list[HoldStatus]:
    """The repairs that hold partitions. Without those whose entry cannot be read, or is very old: the
    id of a hold is enough to end it.
    """
    with suppress(OSError, SeriatimError):
        return find_holds(ledger, files.manifests_backward(HISTORY))
    return []


def _unreadable_status(name: str, error: OSError | SeriatimError) -> StreamStatus:
    """What is shown of a stream that cannot be read."""
    trouble = str(error)
    if isinstance(error, SeriatimError) and error.next:
        trouble = f"{trouble}. Next: {error.next}"
    return StreamStatus(stream=name, verdict="unknown", trouble=trouble)
