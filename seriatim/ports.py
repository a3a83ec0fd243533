"""Ports: what the steps need of the outside world, on one page. Adapters implement them.

Real ones: kafka/log.py, spark.py, batches.py, parquet.py, delta.py, clock.py. Fakes for all of
them: memory.py, held to the same contract tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from seriatim.engine.findings import Finding
from seriatim.engine.holes import ExplainedRange
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.record_kinds import MAIN_TABLE
from seriatim.engine.session import FoldOutput, QuarantinedMessage, Session, SessionEndRecords
from seriatim.engine.session_filter import ReplacedRecords
from seriatim.kafka.retention import RetainedLog
from seriatim.ledger.gaps import Gap, QuarantineFile
from seriatim.ledger.model import Entry, File, Ledger, Manifest
from seriatim.ledger.snapshot_needs import SnapshotRequest
from seriatim.operations.compaction_rules import Intent
from seriatim.operations.prove.chain import Commit
from seriatim.operations.prove.rules import FileOutline
from seriatim.operations.slicing import Bounds, Ranges
from seriatim.storage.current_rows import (
    CurrentWriteResult,
    Lives,
    PartitionCatchUp,
    PublishedVersion,
    RowKeySpec,
    SessionTable,
)

Task = Callable[[Partition, Iterable[MessageBatch]], bytes]
"""Runs where the messages of one partition are; what it returns reaches the driver."""
Explain = Callable[[Partition, OffsetRange], list[ExplainedRange]]
"""Why the offsets of a hole are missing: pieces that tile it, each with its cause."""


class Log(Protocol):
    """Kafka, as discovery sees it."""

    def bounds(self, pattern: str) -> dict[Partition, Bounds]:
        """Every partition of every topic whose whole name matches."""

    def offsets_for_time(self, partitions: list[Partition], timestamp: int) -> dict[Partition, int]:
        """The first offset at or after a time (milliseconds since 1970); -1 where there is none."""
        ...

    def first_unreadable_messages(self, ranges: Ranges) -> dict[Partition, tuple[int, str]]:
        """The first message of each range that the reader cannot take, by offset, and why; for each
        that has one.
        """

    def sample_message_bytes(self, ranges: Ranges) -> dict[Partition, int]:
        """How large the first messages of a few of these ranges are, on average: keys and values."""

    def read_retention(
        self, bounds: Mapping[Partition, Bounds], frontiers: Mapping[Partition, int]
    ) -> dict[Partition, RetainedLog]:
        """What Kafka holds of partitions with these bounds, seen from these frontiers, and for how
        long.
        """


class Source(Protocol):
    """The messages of a slice, one task per partition."""

    def map(self, task: Task, *, has_small_messages: bool = False) -> list[bytes]:
        """The task's answers. `small`: messages are known to be, and need not be weighed one by
        one.
        """
        ...


class ReadOptions(Struct, frozen=True):
    """What the fold asks of a reading, beyond the messages."""

    with_headers: bool = False
    """Only messages that are set aside need them, and they cost a tenth of the reading."""
    average_message_bytes: int = 0
    """How large messages were so far, on average, in the partition where they are largest; 0: not
    known.
    """


DEFAULT_READ_OPTIONS = ReadOptions()
OnSlice = Callable[[Ranges, Source], bool]
"""Called with each slice; False ends the reading."""


class Reader(Protocol):
    """Kafka, as the fold reads it. Raises `SourceFailedError` when reading broke."""

    def read_slices(
        self,
        starts: Mapping[Partition, int],
        messages_max: int,
        on_slice: OnSlice,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        """From `starts` to the log ends of now, in slices of at most `messages_max`."""

    def read_ranges(self, ranges: Ranges, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Source:
        """These ranges and no others."""


class SourceFailedError(Exception):  # not an error of ours: discovery decides what it means
    """Reading broke: data loss, a lost broker or executor. Discovery is asked what it means."""


class UnreadableMessageError(SourceFailedError):
    """The reader met a message that it cannot take. The log is asked which."""


class FileWriter(Protocol):
    """A file being written."""

    def close(self) -> File | None:
        """Finish it; None if nothing was written."""
        ...


class RecordWriter(FileWriter, Protocol):
    """A record file of one partition and slice."""

    def write(self, batch: MessageBatch, output: FoldOutput) -> None: ...
    def write_end_records(self, offset: int, end_records: SessionEndRecords) -> None:
        """Add records that end sessions, all at one offset."""
        ...


class QuarantineWriter(FileWriter, Protocol):
    """A file of messages set aside."""

    def write(self, batch: MessageBatch, messages: list[QuarantinedMessage]) -> None: ...


class UnfitRecordsError(Exception):  # becomes the finding `raised`
    """Records whose values do not fit their columns, by their row in `Folded`."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(rows)
        self.rows = rows


class RecordStore(Protocol):
    """Where record files go. Invisible until a commit names them."""

    def record_writer(
        self, partition: Partition, topic_id: str, stem: str, table: str = MAIN_TABLE
    ) -> RecordWriter: ...
    def quarantine_writer(
        self, partition: Partition, topic_id: str, stem: str
    ) -> QuarantineWriter: ...
    def sweep(self, partition: Partition, stem_prefix: str, keep: set[str]) -> list[str]:
        """Delete a partition's files whose stem begins so and whose paths are not in `keep`."""

    def paths(self, partition: Partition) -> list[str]:
        """All files of a partition: records, state and quarantine."""

    def delete(self, paths: Iterable[str]) -> list[str]:
        """Delete files; those that are gone already are no error."""

    def intents(self, partition: Partition) -> list[Intent]:
        """What compactions are about to replace, or have replaced, as far as the files are still
        there.
        """

    def put_intent(self, intent: Intent) -> None: ...
    def drop_intent(self, intent: Intent) -> None: ...
    def oldest_complete_entry(self) -> tuple[int, str]:
        """The oldest entry whose files are all there, as far as sweeping goes, and its SHA-256; -1:
        all are.
        """

    def put_oldest_complete_entry(self, sequence: int, sha256: str) -> None: ...


class Rewriter(Protocol):
    """Record files made of others, with the same records."""

    def concatenate(
        self, partition: Partition, topic_id: str, stem: str, files: Sequence[File]
    ) -> File:
        """One file of several, in this order; each is proved by its digest before a record of it is
        copied.
        """
        ...


class Joiner(Protocol):
    """Committed files looked at again, and record files made of others: what a refold replaces and
    what stays.
    """

    def find_damaged_files(
        self, files: Iterable[File], *, check_digests: bool = True
    ) -> dict[str, str]:
        """Files that are not as committed, by path, and why; by their digest, or by their size
        alone.
        """
        ...

    def has_replaced_records(self, file: File, replaced: ReplacedRecords) -> bool:
        """Whether a file has a record that is replaced."""
        ...

    def has_records_in(
        self,
        files: Iterable[File],
        offset_range: OffsetRange,
        partition_life: tuple[Partition, str] | None = None,
    ) -> bool:
        """Whether any of these files has a record at these offsets; of one partition and topic id,
        if that is asked.
        """
        ...

    def session_tables(
        self, partition: Partition, topic_id: str, files: Sequence[File], keyed: RowKeySpec
    ) -> Iterable[SessionTable]:
        """What a partition's records make of each session, each file proved first; `IntegrityError`
        if one is not.
        """
        ...

    def first_difference_offset(
        self,
        old_files: Sequence[File],
        replaced: ReplacedRecords,
        new_files: Sequence[File],
        offset_range: OffsetRange,
    ) -> int | None:
        """The first offset at which what is replaced in `olds` is not what `news` have at these
        offsets; None: none.
        """
        ...

    def join_files(
        self,
        partition: Partition,
        stem: str,
        old_files: Sequence[File],
        replaced: ReplacedRecords,
        new_files: Sequence[File],
        offset_range: OffsetRange,
    ) -> File | None:
        """One file, by offset and index, of what is not replaced in `olds` and what `news` have at
        these offsets.
        """
        ...


class StateStore(Protocol):
    """Where sessions' state is. Files are checked against their digest before use."""

    def load(self, files: Iterable[File], names: Iterable[str]) -> dict[str, Session]: ...
    def find_names(self, files: Iterable[File], names: Iterable[str]) -> set[str]:
        """Which of these names are in the files: a cheap look, without proof."""

    def save(
        self,
        partition: Partition,
        stem: str,
        sessions: Mapping[str, Session],
        files_to_merge: Iterable[File],
    ) -> File:
        """Write sessions, over those of the files to be merged (oldest first)."""

    def all_sessions(self, files: Iterable[File]) -> Iterable[tuple[str, Session]]:
        """Every session, one by one."""

    def quarantined_sessions(self, files: Iterable[File]) -> dict[str, Session]:
        """Sessions in quarantine."""


class Digests(Protocol):
    """Digests of offsets, keys and values, however the messages were cut."""

    def update(self, batch: MessageBatch) -> None: ...
    def finish(self) -> dict[str, str]: ...


class LedgerHead(Struct):
    """The ledger as last read, and what the store needs to compare-and-set on exactly that."""

    ledger: Ledger
    token: Any = None
    foreign_findings: list[Finding] = []
    """Commits by others since the last entry that changed data."""


class CommitConflictError(Exception):  # an answer, not an error: the commit rule decides
    """The compare-and-set was not confirmed. It may have happened all the same."""


class LedgerStore(Protocol):
    """The ledger's commits. `put_manifest` then `compare_and_set`; both refuse to overwrite."""

    def head(self, stream: str) -> LedgerHead | None:
        """The last entry; None if there is no ledger."""

    def ledger_at(self, stream: str, sequence: int) -> Ledger:
        """The ledger as of an earlier entry."""

    def manifest_at(self, stream: str, sequence: int) -> Manifest:
        """An earlier entry, and the ledger as of it."""

    def entries(self, stream: str, after: int) -> Iterator[Manifest]:
        """The entries later than sequence `after`, oldest first."""

    def active_paths(self, head: LedgerHead) -> set[str]:
        """The record files of the table as of `head`."""

    def active_files(self, head: LedgerHead) -> list[File]:
        """The same, with bytes, rows, first and last offset; digests are in the entries that added
        them.
        """

    def files_at(self, stream: str, sequence: int) -> list[File]:
        """The record files of the table as of an earlier entry, as `active_files` has them."""

    def sweep(self, head: LedgerHead) -> list[str]:
        """Delete manifests of entries up to `head` that never came to be, and drafts; their paths."""

    def put_manifest(self, sequence: int, content: bytes) -> tuple[str, str]:
        """Store a manifest; its path and SHA-256."""

    def compare_and_set(
        self, head: LedgerHead | None, entry: Entry, manifest: str, sha256: str
    ) -> None:
        """Commit on top of exactly `head` (None: create), or raise `CommitConflictError`."""

    def has_manifest(self, sha256: str, after: int) -> bool:
        """Whether an entry later than sequence `after` names this manifest."""

    def differing_files(self) -> list[str]:
        """Files that verify last found to differ."""

    def reported_sequence(self) -> int:
        """The last entry whose findings a person was told; -1: none yet."""

    def put_reported_sequence(self, sequence: int) -> None: ...
    def witness(self) -> tuple[int, str] | None: ...
    def put_witness(self, sequence: int, sha256: str) -> None: ...
    def archive_witness(self, reason: str) -> str:
        """Move the witness away, with the reason in it: a person decided to begin again. Its new
        path.
        """


DerivedTableName = Literal["gaps", "quarantine"]
"""The tables that are made of the ledger alone, and can be made again."""


class AppliedVersion(Struct, frozen=True):
    """The entry up to which a derived table is, and what the store needs to compare-and-set on
    exactly that.
    """

    sequence: int = -1
    sha256: str = ""
    token: Any = None


PartitionFiles = Sequence[tuple[Partition, File]]


class OutputStore(Protocol):
    """Tables of a machine's further kinds of records: each put is one commit on exactly `at`, or
    raises `CommitConflictError`.
    """

    tables: Sequence[str]

    def applied_version(self, table: str) -> AppliedVersion: ...
    def put_files(
        self,
        table: str,
        expected: AppliedVersion,
        ledger: Ledger,
        added: PartitionFiles,
        removed: Sequence[str],
    ) -> None: ...


class DerivedStore(Protocol):
    """The derived tables. A put on a table that reached nothing (-1) makes it as a whole."""

    output_store: OutputStore | None

    def applied_version(self, table: DerivedTableName) -> AppliedVersion:
        """How far a table is; -1: it is not there, or not to be relied on."""

    def gaps(self, applied: AppliedVersion) -> list[Gap]:
        """The table `gaps` as of `at`."""

    def put_gaps(self, expected: AppliedVersion, ledger: Ledger, gaps: Sequence[Gap]) -> None:
        """Replace all gaps, in one commit on exactly `at`, or raise `CommitConflictError`."""

    def put_quarantine(
        self,
        expected: AppliedVersion,
        ledger: Ledger,
        quarantine_files: Sequence[QuarantineFile],
        released_gaps: Sequence[Gap],
    ) -> None:
        """Add messages set aside and say of whom was released how, in one commit on exactly `at`,
        or `CommitConflictError`.
        """

    def note_up_to_date(self, ledger: Ledger) -> None:
        """Remember that both tables are as of `to`, where nothing had to be put."""


class CurrentStore(Protocol):
    """The table `current`. A put on a table that reached nothing (-1) makes it as a whole."""

    def published_version(self) -> PublishedVersion:
        """How far it is; -1: it is not there, or not to be relied on."""
        ...

    def put_rows(
        self,
        expected: PublishedVersion,
        ledger: Ledger,
        lives: Lives,
        catch_ups: Sequence[PartitionCatchUp],
        progress: Callable[[int], None],
    ) -> CurrentWriteResult:
        """Bring these partitions up, in one commit on exactly `at`, or raise `CommitConflictError`.
        Tells records read so far.
        """
        ...


class UnreadableFileError(Exception):  # an answer: verify tells what it means
    """A file that is missing, or that its own format contradicts."""


class Audit(Protocol):
    """A stream's output read anew for verify, as bytes and as what they say. Raises
    `UnreadableFileError`.
    """

    def commits(self) -> list[Commit]: ...
    def paths_readers_see(self, version: int) -> set[str]: ...
    def other_tables(self) -> dict[str, tuple[int, set[str]]]: ...
    def witness(self) -> bytes | None: ...
    def sign_off(self) -> bytes | None: ...
    def put_sign_off(self, content: bytes) -> None: ...
    def put_differing_file(self, path: str) -> None:
        """Note the file that differs, for repair; none: an empty path."""
        ...

    def manifest(self, path: str) -> tuple[str, bytes]: ...
    def paths(self) -> list[str]: ...
    def size(self, path: str) -> int | None: ...
    def digest(self, path: str) -> str: ...
    def outline(self, path: str) -> FileOutline: ...
    def last_rows(
        self, path: str, key: Sequence[str], columns: Sequence[str], gone: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any, tuple[Any, ...] | None, int]]: ...
    def rows(self, path: str, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]: ...


class PastMessageReader(Protocol):
    """Messages of the past, read again from Kafka."""

    def read(self, partition: Partition, offset_range: OffsetRange) -> Iterator[MessageBatch]:
        """The messages of a range that are there, in stretches without a hole."""
        ...

    def is_compacted(self, topic: str) -> bool:
        """Whether a topic may lose messages in the middle."""


class SnapshotRequester(Protocol):
    """Where producers are asked for snapshots, and the entry (its sequence and SHA-256) up to which
    they were.
    """

    def last_requested_entry(self) -> tuple[int, str]: ...
    def put_last_requested_entry(self, sequence: int, sha256: str) -> None: ...
    def send(self, requests: Sequence[SnapshotRequest]) -> None:
        """Send them all, and know that they arrived; else raise `PlatformError`."""


class Clock(Protocol):
    """Time. It paces and informs; it never decides."""

    def now_seconds(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...
