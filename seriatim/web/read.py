"""Reads what pages show from the disk: stream files, status files and manifests. It asks neither
Kafka nor Spark, and changes nothing.

What does not change (a manifest, a stream file until it is edited) is read once.

Next: storage/status_file.py reads the files; web/views.py shows it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import TypeVar

from msgspec import Struct

from seriatim import stream_files
from seriatim.errors import ConfigError, IntegrityError, SeriatimError
from seriatim.ledger.entries import VerdictEntry
from seriatim.ledger.manifests import WITNESS_KEY, Manifest
from seriatim.ledger.model import EntryMark, Ledger
from seriatim.operations.report import report_key
from seriatim.operations.status import StreamStatus, stream_status_now
from seriatim.storage.status_file import STATUS_FILE, StatusFiles
from seriatim.storage.store import Store, open_store
from seriatim.stream import STREAM_NAME
from seriatim.stream_files import StreamFile

HISTORY = 40
"""How many entries a stream's page shows."""
VERDICT_SEARCH_ENTRIES = 50
"""How many entries after a slice are searched for its verdict."""
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


class PageReader:
    """Reads all streams of one folder of stream files."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.clock = clock
        self._files = OrderedDict[str, tuple[bytes, StreamFile]]()
        """By stream: the content of its file, and what was loaded from it."""
        self._ledgers = OrderedDict[str, tuple[str, Ledger | None]]()
        """By output folder and stream: the hash of the last manifest, and its ledger."""
        self._looks = OrderedDict[
            str, tuple[tuple[str, str], tuple[StreamStatus | None, EntryMark | None]]
        ]()
        """By output folder and stream, of streams in a bucket: the stamps of status file and witness,
        and what is in them.
        """
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
            file = self.stream_file(name)
            files = self._status_files(file)
            status, witness = self._status_and_witness(files)
            ledger = None
            # The manifest is only read if entries were committed since the status was written.
            if witness is not None and (status is None or status.sequence != witness.sequence):
                ledger = self._last_ledger(files)
        except (OSError, SeriatimError) as error:
            trouble = str(error)
            if isinstance(error, SeriatimError) and error.next:
                trouble = f"{trouble}. Next: {error.next}"
            return StreamStatus(stream=name, verdict="unknown", trouble=trouble)
        return stream_status_now(name, file.stream.tier, status, ledger, self.clock())

    def stream_history(self, name: str) -> StreamHistory:
        """One stream and its last entries."""
        file = self.stream_file(name)
        files = self._status_files(file)
        ledger = self._last_ledger(files)
        saved_status = files.read_status()
        status = stream_status_now(name, file.stream.tier, saved_status, ledger, self.clock())
        manifests: list[Manifest] = []
        trouble = ""
        try:
            # `extend` keeps the manifests that came before an error.
            manifests.extend(files.manifests_backward(HISTORY))
        except IntegrityError as error:
            trouble = error.render()
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

    def _status_and_witness(
        self, files: StatusFiles
    ) -> tuple[StreamStatus | None, EntryMark | None]:
        """The status at the last look, and the last entry. In a bucket one request tells whether they
        are still those that were read before.
        """
        if not files.store.is_remote:
            return files.read_status(), files.witness()
        stamps = files.store.stamps("")
        stamp = (stamps.get(STATUS_FILE, ""), stamps.get(WITNESS_KEY, ""))
        cache_key = f"{files.store.url}#{files.stream}"
        return self._cached(
            self._looks, cache_key, stamp, lambda: (files.read_status(), files.witness())
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

    @staticmethod
    def _status_files(file: StreamFile) -> StatusFiles:
        return StatusFiles(open_store(file.stream.output.path), file.stream.name)

    def _store(self, name: str) -> Store:
        return open_store(self.stream_file(name).stream.output.path)
