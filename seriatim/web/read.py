"""Read: what pages show, gathered from the disk: stream files, status files, manifests. Asks
nobody, changes nothing.

What does not change (a manifest, a stream file until it is edited) is read once.

Next room: storage/status_file.py reads the files; streams.py, stream.py and entry.py draw.
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
from seriatim.ledger.model import Ledger, Manifest
from seriatim.operations.stream_status import StreamStatus, stream_status_now
from seriatim.storage.status_file import StatusFiles
from seriatim.stream import STREAM_NAME
from seriatim.stream_files import StreamFile

HISTORY = 40
"""Entries that a stream's page goes back."""
VERDICT_SEARCH_ENTRIES = 50
"""Entries after a slice among which its verdict is sought."""
CACHED_VALUES_MAX = 2_000
Stamp = TypeVar("Stamp")
Value = TypeVar("Value")


class StreamHistory(Struct, frozen=True):
    """A stream, with its last entries, newest first."""

    stream_status: StreamStatus
    file: StreamFile
    ledger: Ledger | None
    manifests: list[Manifest]
    trouble: str = ""
    """Why it goes back no further."""


class SliceRow(Struct, frozen=True):
    """One entry, the ledger before it, and those that judged it later."""

    manifest: Manifest
    ledger_before: Ledger
    verdicts: list[Manifest]
    last_sequence: int
    has_report: bool


class PageReader:
    """Everything below one folder of stream files."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self.folder, self.clock = folder, clock
        self._files = OrderedDict[str, tuple[int, StreamFile]]()
        self._ledgers = OrderedDict[str, tuple[str, Ledger]]()
        self._lock = Lock()

    def stream_names(self) -> list[str]:
        """All streams."""
        return stream_files.list_streams(self.folder)

    def stream_status(self, name: str) -> StreamStatus:
        """One stream, or why nothing can be said of it: one that is broken does not hide the
        others.
        """
        try:
            file = self.stream_file(name)
            files = self._status_files(file)
            status, seen = files.read_status(), files.witness()
            newer = seen is not None and (status is None or status.sequence != seen[0])
            ledger = self._last_ledger(files) if newer else None
        except (OSError, SeriatimError) as error:
            return StreamStatus(stream=name, verdict="unknown", trouble=str(error))
        return stream_status_now(name, file.stream.tier, status, ledger, self.clock())

    def stream_history(self, name: str) -> StreamHistory:
        """One stream with its last entries."""
        file = self.stream_file(name)
        files = self._status_files(file)
        ledger = self._last_ledger(files)
        now = stream_status_now(name, file.stream.tier, files.read_status(), ledger, self.clock())
        manifests: list[Manifest] = []
        try:
            manifests.extend(files.manifests_backward(HISTORY))
        except (
            IntegrityError
        ) as error:  # one damaged entry of the past does not hide how the stream is
            return StreamHistory(now, file, ledger, manifests, error.render())
        return StreamHistory(now, file, ledger, manifests)

    def entries_between(
        self, name: str, began_seconds: float, ended_seconds: float
    ) -> tuple[list[Manifest], int]:
        """The last entries made in a stretch of time, oldest first, and how many were made in all."""
        files = self._status_files(self.stream_file(name))
        last = (files.witness() or (-1, ""))[0]

        def made(number: int) -> float:
            return files.manifest(number).entry.at_seconds

        first, end = (
            bisect_left(range(last + 1), began_seconds, key=made),
            bisect_right(range(last + 1), ended_seconds, key=made),
        )
        return [files.manifest(number) for number in range(max(first, end - HISTORY), end)], max(
            0, end - first
        )

    def slice_row(self, name: str, sequence: int) -> SliceRow:
        """One entry, and who judged it."""
        files = self._status_files(self.stream_file(name))
        manifest = files.manifest(sequence)
        before = files.manifest(sequence - 1).ledger if sequence else Ledger(stream=name)
        last = (files.witness() or (sequence, ""))[0]
        later = range(sequence + 1, min(last, sequence + VERDICT_SEARCH_ENTRIES) + 1)
        verdicts = [
            one
            for one in map(files.manifest, later)
            if one.entry.judged_after < sequence <= one.entry.judged_until
        ]
        return SliceRow(
            manifest, before, verdicts, last, self._report_path(files.root, sequence).is_file()
        )

    def read_report(self, name: str, sequence: int) -> bytes:
        """A report as a run or a check wrote it; else the same made of the entry alone."""
        files = self._status_files(self.stream_file(name))
        files.manifest(sequence)  # an entry that is not there has no report
        try:
            return self._report_path(files.root, sequence).read_bytes()
        except FileNotFoundError:
            from seriatim.operations.report import build_report_page
            from seriatim.operations.report_page import render_page

            found = self.slice_row(name, sequence)
            return render_page(
                build_report_page(name, found.ledger_before, [found.manifest])
            ).encode("utf-8", "backslashreplace")

    def stream_file(self, name: str) -> StreamFile:
        """A stream of this folder, by its name alone."""
        path = self.folder / f"{name}.toml"
        if not STREAM_NAME.fullmatch(name) or not path.is_file():
            raise ConfigError(
                f"there is no stream {name!r}", next="the list of streams has those that there are"
            )
        changed = path.stat().st_mtime_ns
        return self._cached(
            self._files, name, changed, lambda: stream_files.load_stream(name, self.folder)
        )

    def _last_ledger(self, files: StatusFiles) -> Ledger | None:
        seen = files.witness()
        if seen is None:
            return None
        return self._cached(
            self._ledgers,
            f"{files.root}#{files.stream}",
            seen[1],
            lambda: files.manifest(seen[0]).ledger,
        )

    def _cached(
        self,
        cache: OrderedDict[str, tuple[Stamp, Value]],
        key: str,
        stamp: Stamp,
        read: Callable[[], Value],
    ) -> Value:
        """What was read before, if it is that still: of each place the last alone is remembered."""
        with self._lock:
            if key in cache and cache[key][0] == stamp:
                cache.move_to_end(key)
                return cache[key][1]
        value = read()
        with self._lock:
            cache[key] = stamp, value
            cache.move_to_end(key)
            while len(cache) > CACHED_VALUES_MAX:
                cache.popitem(last=False)
        return value

    @staticmethod
    def _status_files(file: StreamFile) -> StatusFiles:
        return StatusFiles(Path(file.stream.output.path), file.stream.name)

    @staticmethod
    def _report_path(root: Path, sequence: int) -> Path:
        return root / "reports" / f"{sequence:010d}.html"
