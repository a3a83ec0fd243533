"""Ports: what the steps need of the outside world, on one page. Adapters implement them.

Real ones: adapters/kafka.py, spark.py, parquet.py, delta.py, clock.py. Fakes for all of them:
adapters/memory.py, held to the same contract tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from seriatim.core.integrity import Finding
from seriatim.core.ledger import Entry, File, Ledger, Manifest
from seriatim.core.message import Stretch
from seriatim.core.offsets import Partition
from seriatim.core.session import Folded, Kept, Session
from seriatim.core.slice import Bounds, Ranges

Task = Callable[[Partition, Iterable[Stretch]], bytes]
"""Runs where the messages of one partition are; what it returns reaches the driver."""


class Log(Protocol):
    """Kafka, as discovery sees it."""

    def bounds(self, pattern: str) -> dict[Partition, Bounds]:
        """Every partition of every topic whose whole name matches."""
        ...


class Source(Protocol):
    """The messages of a slice, one task per partition."""

    def map(self, task: Task, *, small: bool = False) -> list[bytes]:
        """The task's answers. `small`: messages are known to be, and need not be weighed one by one."""
        ...


class Wish(Struct, frozen=True):
    """What the fold asks of a reading, beyond the messages."""

    headers: bool = False
    """Only messages that are set aside need them, and they cost a tenth of the reading."""


NO_WISH = Wish()
OnSlice = Callable[[Ranges, Source], bool]
"""Called with each slice; False ends the reading."""


class Reader(Protocol):
    """Kafka, as the fold reads it. Raises `SourceFailed` when reading broke."""

    def follow(
        self, starts: Mapping[Partition, int], messages_max: int, on_slice: OnSlice, wish: Wish = NO_WISH
    ) -> None:
        """From `starts` to the log ends of now, in slices of at most `messages_max`."""
        ...

    def exactly(self, ranges: Ranges, wish: Wish = NO_WISH) -> Source:
        """These ranges and no others."""
        ...


class SourceFailed(Exception):  # noqa: N818  # not an error of ours: discovery decides what it means
    """Reading broke: data loss, a lost broker or executor. Discovery is asked what it means."""


class Writer(Protocol):
    """A file being written."""

    def close(self) -> File | None:
        """Finish it; None if nothing was written."""
        ...


class RecordWriter(Writer, Protocol):
    """A record file of one partition and slice."""

    def write(self, stretch: Stretch, folded: Folded) -> None: ...


class KeptWriter(Writer, Protocol):
    """A file of messages set aside."""

    def write(self, stretch: Stretch, kept: list[Kept]) -> None: ...


class UnfitRecords(Exception):  # noqa: N818  # becomes the finding `raised`
    """Records whose values do not fit their columns, by their row in `Folded`."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(rows)
        self.rows = rows


class RecordStore(Protocol):
    """Where record files go. Invisible until a commit names them."""

    def records(self, partition: Partition, topic_id: str, stem: str) -> RecordWriter: ...
    def kept(self, partition: Partition, topic_id: str, stem: str) -> KeptWriter: ...
    def sweep(self, partition: Partition, stem_prefix: str, keep: set[str]) -> list[str]:
        """Delete a partition's files whose stem begins so and whose paths are not in `keep`."""
        ...

    def paths(self, partition: Partition) -> list[str]:
        """All files of a partition: records, state and quarantine."""
        ...

    def delete(self, paths: Iterable[str]) -> list[str]:
        """Delete files; those that are gone already are no error."""
        ...


class StateStore(Protocol):
    """Where sessions' state is. Files are checked against their digest before use."""

    def load(self, files: Iterable[File], names: Iterable[str]) -> dict[str, Session]: ...
    def save(self, partition: Partition, stem: str, sessions: Mapping[str, Session], merge: Iterable[File]) -> File:
        """Write sessions, over those of the files to be merged (oldest first)."""
        ...

    def quarantined(self, files: Iterable[File]) -> dict[str, Session]:
        """Sessions in quarantine."""
        ...


class Digests(Protocol):
    """Digests of offsets, keys and values, however the messages were cut."""

    def update(self, stretch: Stretch) -> None: ...
    def finish(self) -> dict[str, str]: ...


class Head(Struct):
    """The ledger as last read, and what the store needs to compare-and-set on exactly that."""

    ledger: Ledger
    token: Any = None
    foreign: list[Finding] = []
    """Commits by others since the last entry that changed data."""


class Conflict(Exception):  # noqa: N818  # an answer, not an error: the commit rule decides
    """The compare-and-set was not confirmed. It may have happened all the same."""


class LedgerStore(Protocol):
    """The ledger's commits. `put_manifest` then `compare_and_set`; both refuse to overwrite."""

    def head(self, stream: str) -> Head | None:
        """The last entry; None if there is no ledger."""
        ...

    def at(self, stream: str, sequence: int) -> Ledger:
        """The ledger as of an earlier entry."""
        ...

    def manifest(self, stream: str, sequence: int) -> Manifest:
        """An earlier entry, and the ledger as of it."""
        ...

    def active_paths(self, head: Head) -> set[str]:
        """The record files of the table as of `head`."""
        ...

    def sweep(self, head: Head) -> list[str]:
        """Delete manifests of entries up to `head` that never came to be, and drafts; their paths."""
        ...

    def put_manifest(self, sequence: int, content: bytes) -> tuple[str, str]:
        """Store a manifest; its path and SHA-256."""
        ...

    def compare_and_set(self, head: Head | None, entry: Entry, manifest: str, sha256: str) -> None:
        """Commit on top of exactly `head` (None: create), or raise `Conflict`."""
        ...

    def has(self, sha256: str, after: int) -> bool:
        """Whether an entry later than sequence `after` names this manifest."""
        ...

    def told(self) -> int:
        """The last entry whose findings a person was told; -1: none yet."""
        ...

    def put_told(self, sequence: int) -> None: ...
    def witness(self) -> tuple[int, str] | None: ...
    def put_witness(self, sequence: int, sha256: str) -> None: ...


class Clock(Protocol):
    """Time. It paces and informs; it never decides."""

    def now_seconds(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...
