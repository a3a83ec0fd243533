"""Ports: what the steps need of the outside world, on one page. Adapters implement them.

Real ones: adapters/kafka.py, spark.py, batches.py, parquet.py, delta.py, clock.py. Fakes for all of them:
adapters/memory.py, held to the same contract tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from seriatim.core.ask import SnapshotRequest
from seriatim.core.chain import Commit
from seriatim.core.compact import Intent
from seriatim.core.current import Catch, Keyed, Lives, Standing, Tabled, Written
from seriatim.core.gaps import Aside, Gap
from seriatim.core.holes import Piece
from seriatim.core.integrity import Finding
from seriatim.core.ledger import Entry, File, Ledger, Manifest
from seriatim.core.message import Stretch
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.outputs import MAIN
from seriatim.core.retention import Retained
from seriatim.core.scope import Replaced
from seriatim.core.session import Ended, Folded, Kept, Session
from seriatim.core.slice import Bounds, Ranges
from seriatim.core.verify import Outline

Task = Callable[[Partition, Iterable[Stretch]], bytes]
"""Runs where the messages of one partition are; what it returns reaches the driver."""
Explain = Callable[[Partition, OffsetRange], list[Piece]]
"""Why the offsets of a hole are missing: pieces that tile it, each with its cause."""


class Log(Protocol):
    """Kafka, as discovery sees it."""

    def bounds(self, pattern: str) -> dict[Partition, Bounds]:
        """Every partition of every topic whose whole name matches."""

    def offsets_for_time(self, partitions: list[Partition], timestamp: int) -> dict[Partition, int]:
        """The first offset at or after a time (milliseconds since 1970); -1 where there is none."""
        ...

    def unreadable(self, ranges: Ranges) -> dict[Partition, tuple[int, str]]:
        """The first message of each range that the reader cannot take, by offset, and why; for each that has one."""

    def message_bytes(self, ranges: Ranges) -> dict[Partition, int]:
        """How large the first messages of a few of these ranges are, on average: keys and values."""

    def retained(
        self, bounds: Mapping[Partition, Bounds], frontiers: Mapping[Partition, int]
    ) -> dict[Partition, Retained]:
        """What Kafka holds of partitions with these bounds, seen from these frontiers, and for how long."""


class Source(Protocol):
    """The messages of a slice, one task per partition."""

    def map(self, task: Task, *, small: bool = False) -> list[bytes]:
        """The task's answers. `small`: messages are known to be, and need not be weighed one by one."""
        ...


class Wish(Struct, frozen=True):
    """What the fold asks of a reading, beyond the messages."""

    headers: bool = False
    """Only messages that are set aside need them, and they cost a tenth of the reading."""
    message_bytes: int = 0
    """How large messages were so far, on average, in the partition where they are largest; 0: not known."""


NO_WISH = Wish()
OnSlice = Callable[[Ranges, Source], bool]
"""Called with each slice; False ends the reading."""


class Reader(Protocol):
    """Kafka, as the fold reads it. Raises `SourceFailed` when reading broke."""

    def follow(
        self, starts: Mapping[Partition, int], messages_max: int, on_slice: OnSlice, wish: Wish = NO_WISH
    ) -> None:
        """From `starts` to the log ends of now, in slices of at most `messages_max`."""

    def exactly(self, ranges: Ranges, wish: Wish = NO_WISH) -> Source:
        """These ranges and no others."""


class SourceFailed(Exception):  # noqa: N818  # not an error of ours: discovery decides what it means
    """Reading broke: data loss, a lost broker or executor. Discovery is asked what it means."""


class UnreadableMessage(SourceFailed):
    """The reader met a message that it cannot take. The log is asked which."""


class Writer(Protocol):
    """A file being written."""

    def close(self) -> File | None:
        """Finish it; None if nothing was written."""
        ...


class RecordWriter(Writer, Protocol):
    """A record file of one partition and slice."""

    def write(self, stretch: Stretch, folded: Folded) -> None: ...
    def end(self, offset: int, ended: Ended) -> None:
        """Add records that end sessions, all at one offset."""
        ...


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

    def records(self, partition: Partition, topic_id: str, stem: str, table: str = MAIN) -> RecordWriter: ...
    def kept(self, partition: Partition, topic_id: str, stem: str) -> KeptWriter: ...
    def sweep(self, partition: Partition, stem_prefix: str, keep: set[str]) -> list[str]:
        """Delete a partition's files whose stem begins so and whose paths are not in `keep`."""

    def paths(self, partition: Partition) -> list[str]:
        """All files of a partition: records, state and quarantine."""

    def delete(self, paths: Iterable[str]) -> list[str]:
        """Delete files; those that are gone already are no error."""

    def intents(self, partition: Partition) -> list[Intent]:
        """What compactions are about to replace, or have replaced, as far as the files are still there."""

    def put_intent(self, intent: Intent) -> None: ...
    def drop_intent(self, intent: Intent) -> None: ...
    def swept(self) -> tuple[int, str]:
        """The oldest entry whose files are all there, as far as sweeping goes, and its SHA-256; -1: all are."""

    def put_swept(self, sequence: int, sha256: str) -> None: ...


class Rewriter(Protocol):
    """Record files made of others, with the same records."""

    def concatenate(self, partition: Partition, topic_id: str, stem: str, files: Sequence[File]) -> File:
        """One file of several, in this order; each is proved by its digest before a record of it is copied."""
        ...


class Joiner(Protocol):
    """Committed files looked at again, and record files made of others: what a refold replaces and what stays."""

    def damaged(self, files: Iterable[File], *, thorough: bool = True) -> dict[str, str]:
        """Files that are not as committed, by path, and why; by their digest, or by their size alone."""
        ...

    def touches(self, file: File, replaced: Replaced) -> bool:
        """Whether a file has a record that is replaced."""
        ...

    def any_within(self, files: Iterable[File], within: OffsetRange, of: tuple[Partition, str] | None = None) -> bool:
        """Whether any of these files has a record at these offsets; of one partition and topic id, if that is asked."""
        ...

    def tables(self, partition: Partition, topic_id: str, files: Sequence[File], keyed: Keyed) -> Iterable[Tabled]:
        """What a partition's records make of each session, each file proved first; `IntegrityError` if one is not."""
        ...

    def parts_at(
        self, olds: Sequence[File], replaced: Replaced, news: Sequence[File], within: OffsetRange
    ) -> int | None:
        """The first offset at which what is replaced in `olds` is not what `news` have at these offsets; None: none."""
        ...

    def join(
        self,
        partition: Partition,
        stem: str,
        olds: Sequence[File],
        replaced: Replaced,
        news: Sequence[File],
        within: OffsetRange,
    ) -> File | None:
        """One file, by offset and index, of what is not replaced in `olds` and what `news` have at these offsets."""
        ...


class StateStore(Protocol):
    """Where sessions' state is. Files are checked against their digest before use."""

    def load(self, files: Iterable[File], names: Iterable[str]) -> dict[str, Session]: ...
    def holds(self, files: Iterable[File], names: Iterable[str]) -> set[str]:
        """Which of these names are in the files: a cheap look, without proof."""

    def save(self, partition: Partition, stem: str, sessions: Mapping[str, Session], merge: Iterable[File]) -> File:
        """Write sessions, over those of the files to be merged (oldest first)."""

    def each(self, files: Iterable[File]) -> Iterable[tuple[str, Session]]:
        """Every session, one by one."""

    def quarantined(self, files: Iterable[File]) -> dict[str, Session]:
        """Sessions in quarantine."""


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

    def at(self, stream: str, sequence: int) -> Ledger:
        """The ledger as of an earlier entry."""

    def manifest(self, stream: str, sequence: int) -> Manifest:
        """An earlier entry, and the ledger as of it."""

    def entries(self, stream: str, after: int) -> Iterator[Manifest]:
        """The entries later than sequence `after`, oldest first."""

    def active_paths(self, head: Head) -> set[str]:
        """The record files of the table as of `head`."""

    def active_files(self, head: Head) -> list[File]:
        """The same, with bytes, rows, first and last offset; digests are in the entries that added them."""

    def files_at(self, stream: str, sequence: int) -> list[File]:
        """The record files of the table as of an earlier entry, as `active_files` has them."""

    def sweep(self, head: Head) -> list[str]:
        """Delete manifests of entries up to `head` that never came to be, and drafts; their paths."""

    def put_manifest(self, sequence: int, content: bytes) -> tuple[str, str]:
        """Store a manifest; its path and SHA-256."""

    def compare_and_set(self, head: Head | None, entry: Entry, manifest: str, sha256: str) -> None:
        """Commit on top of exactly `head` (None: create), or raise `Conflict`."""

    def has(self, sha256: str, after: int) -> bool:
        """Whether an entry later than sequence `after` names this manifest."""

    def differs(self) -> list[str]:
        """Files that verify last found to differ."""

    def told(self) -> int:
        """The last entry whose findings a person was told; -1: none yet."""

    def put_told(self, sequence: int) -> None: ...
    def witness(self) -> tuple[int, str] | None: ...
    def put_witness(self, sequence: int, sha256: str) -> None: ...
    def set_witness_aside(self, reason: str) -> str:
        """Move the witness away, with the reason in it: a person decided to begin again. Its new path."""


Derived = Literal["gaps", "quarantine"]
"""The tables that are made of the ledger alone, and can be made again."""


class Reached(Struct, frozen=True):
    """The entry up to which a derived table is, and what the store needs to compare-and-set on exactly that."""

    sequence: int = -1
    sha256: str = ""
    token: Any = None


Placed = Sequence[tuple[Partition, File]]


class OutputStore(Protocol):
    """Tables of a machine's further kinds of records: each put is one commit on exactly `at`, or raises `Conflict`."""

    tables: Sequence[str]

    def reached(self, table: str) -> Reached: ...
    def put(self, table: str, at: Reached, to: Ledger, added: Placed, removed: Sequence[str]) -> None: ...


class DerivedStore(Protocol):
    """The derived tables. A put on a table that reached nothing (-1) makes it as a whole."""

    beside: OutputStore | None

    def reached(self, table: Derived) -> Reached:
        """How far a table is; -1: it is not there, or not to be relied on."""

    def gaps(self, at: Reached) -> list[Gap]:
        """The table `gaps` as of `at`."""

    def put_gaps(self, at: Reached, to: Ledger, gaps: Sequence[Gap]) -> None:
        """Replace all gaps, in one commit on exactly `at`, or raise `Conflict`."""

    def put_quarantine(self, at: Reached, to: Ledger, asides: Sequence[Aside], released: Sequence[Gap]) -> None:
        """Add messages set aside and say of whom was released how, in one commit on exactly `at`, or `Conflict`."""

    def note(self, to: Ledger) -> None:
        """Remember that both tables are as of `to`, where nothing had to be put."""


class CurrentStore(Protocol):
    """The table `current`. A put on a table that reached nothing (-1) makes it as a whole."""

    def reached(self) -> Standing:
        """How far it is; -1: it is not there, or not to be relied on."""
        ...

    def put(
        self, at: Standing, to: Ledger, lives: Lives, catches: Sequence[Catch], progress: Callable[[int], None]
    ) -> Written:
        """Bring these partitions up, in one commit on exactly `at`, or raise `Conflict`. Tells records read so far."""
        ...


class Unreadable(Exception):  # noqa: N818  # an answer: verify tells what it means
    """A file that is missing, or that its own format contradicts."""


class Audit(Protocol):
    """A stream's output read anew for verify, as bytes and as what they say. Raises `Unreadable`."""

    def commits(self) -> list[Commit]: ...
    def readers_see(self, version: int) -> set[str]: ...
    def others(self) -> dict[str, tuple[int, set[str]]]: ...
    def witness(self) -> bytes | None: ...
    def signed(self) -> bytes | None: ...
    def put_signed(self, content: bytes) -> None: ...
    def put_differs(self, path: str) -> None:
        """Note the file that differs, for repair; none: an empty path."""
        ...

    def manifest(self, path: str) -> tuple[str, bytes]: ...
    def paths(self) -> list[str]: ...
    def size(self, path: str) -> int | None: ...
    def digest(self, path: str) -> str: ...
    def outline(self, path: str) -> Outline: ...
    def last_rows(
        self, path: str, key: Sequence[str], columns: Sequence[str], gone: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any, tuple[Any, ...] | None, int]]: ...
    def rows(self, path: str, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]: ...


class Reread(Protocol):
    """Messages of the past, read again from Kafka."""

    def read(self, partition: Partition, whole: OffsetRange) -> Iterator[Stretch]:
        """The messages of a range that are there, in stretches without a hole."""
        ...

    def compacts(self, topic: str) -> bool:
        """Whether a topic may lose messages in the middle."""


class Requests(Protocol):
    """Where producers are asked for snapshots, and the entry (its sequence and SHA-256) up to which they were."""

    def asked(self) -> tuple[int, str]: ...
    def put_asked(self, sequence: int, sha256: str) -> None: ...
    def send(self, requests: Sequence[SnapshotRequest]) -> None:
        """Send them all, and know that they arrived; else raise `PlatformError`."""


class Clock(Protocol):
    """Time. It paces and informs; it never decides."""

    def now_seconds(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...
