"""Ports: what the operations need of the outside world, as protocols.

Implemented in kafka/, storage/, ledger/delta_store.py and clock.py. The fakes in memory/ implement
all of them, and both are held to the same contract tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol
from zlib import crc32

from msgspec import Struct, field

from seriatim.engine.files import Explain, File, SourceFailedError, StateStore, TaskRecords
from seriatim.engine.machine import Runner
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import (
    Bounds,
    BoundsByPartition,
    OffsetByPartition,
    OffsetRange,
    Partition,
    Ranges,
)
from seriatim.engine.records import Record, RowImage, RowKeySpec, SessionTable
from seriatim.engine.retention import RetainedLog
from seriatim.engine.session import ReplacedRecords, Session
from seriatim.engine.task import PartitionWork
from seriatim.ledger.current_rows import CurrentWriteResult, PartitionCatchUp, TopicIdsByPartition
from seriatim.ledger.entries import Entry
from seriatim.ledger.gaps import Gap, QuarantineFile, SnapshotRequest
from seriatim.ledger.manifests import LedgerHead, Manifest, ManifestReference
from seriatim.ledger.model import EntryMark, Ledger
from seriatim.ledger.replaced_files import Intent
from seriatim.stream import Stream
from seriatim.workers import Workers

Task = Callable[[Partition, OffsetRange, Iterable[MessageBatch]], bytes]
"""Runs in the worker that has the messages of one range. Its result is sent to the driver."""
ProgressCallback = Callable[[int, int], None]
"""Takes how much is done, and how much there is in all."""


class Log(Protocol):
    """Kafka, as discovery sees it."""

    cluster_id: str
    """The id of the cluster, known after a call of `bounds`; empty: the cluster does not say it."""

    def bounds(self, pattern: str) -> dict[Partition, Bounds]:
        """The bounds of every partition of every topic whose whole name matches."""

    def offsets_for_time(self, partitions: list[Partition], timestamp: int) -> dict[Partition, int]:
        """The first offset at or after a time (milliseconds since 1970); -1 where there is none."""
        ...

    def first_unreadable_messages(self, ranges: Ranges) -> dict[Partition, tuple[int, str]]:
        """The first message of each range that the reader cannot read: its offset, and the reason.
        Ranges without one are left out.
        """

    def sample_message_bytes(self, ranges: Ranges) -> dict[Partition, int]:
        """The average size (key and value) of the first messages of a few of these ranges."""

    def read_retention(
        self, bounds: BoundsByPartition, frontiers: OffsetByPartition
    ) -> dict[Partition, RetainedLog]:
        """What Kafka holds of partitions with these bounds, seen from these frontiers, and for how
        long.
        """


class Source(Protocol):
    """The messages of a slice, for one task per partition."""

    def map(self, task: Task, *, has_small_messages: bool = False) -> list[bytes]:
        """Run the task on every partition; the results. `has_small_messages`: batches need not be
        bounded by bytes, which is faster.
        """
        ...


class ReadOptions(Struct, frozen=True):
    """How the fold wants messages to be read."""

    with_headers: bool = False
    """Whether message headers are read. Only quarantined messages need them, and they make reading a
    tenth slower.
    """
    average_message_bytes: int = 0
    """The average size of the messages so far, in the partition where they are largest; 0: not
    known.
    """


DEFAULT_READ_OPTIONS = ReadOptions()
OnSlice = Callable[[Ranges, Source], bool]
"""Called with the ranges and the messages of each slice. False ends the reading."""


class Reader(Protocol):
    """Reads Kafka for the fold. Raises `SourceFailedError` when reading fails."""

    def read_slices(
        self,
        starts: OffsetByPartition,
        messages_max: int,
        on_slice: OnSlice,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        """Read from `starts` to the present log ends, in slices of at most `messages_max`."""

    def read_ranges(self, ranges: Ranges, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Source:
        """Read exactly these ranges."""


class UnreadableMessageError(SourceFailedError):
    """The reader met a message that it cannot read. The log is asked which one."""


class RecordStore(TaskRecords, Protocol):
    """Writes, lists and deletes record files. A file is invisible until a commit names it."""

    lists_cheaply: bool
    """Whether a run may list files after every slice. In a bucket each listing is a request, so there
    orphans stay until the next compaction.
    """

    def paths(self, partition: Partition) -> list[str]:
        """The paths of all files of a partition: records, state and quarantine. Those that a killed
        process did not finish are among them.
        """

    def has_files(self, paths: Iterable[str]) -> bool:
        """Whether all of these files are there. They are asked for one by one, not listed."""

    def delete(self, paths: Iterable[str]) -> list[str]:
        """Delete files; the deleted paths. A file that is gone already is no error."""

    def intents(self, partition: Partition) -> list[Intent]:
        """What compactions will replace or have replaced, as long as the files still exist."""

    def put_intent(self, intent: Intent) -> None: ...
    def drop_intent(self, intent: Intent) -> None: ...


class Rewriter(Protocol):
    """Makes record files of other record files, with the same records."""

    def concatenate(
        self, partition: Partition, topic_id: str, stem: str, files: Sequence[File]
    ) -> File:
        """Make one file of several, in this order. The digest of each is checked before its records
        are copied.
        """
        ...


class Joiner(Protocol):
    """Checks committed files, and joins old record files with those of a refold."""

    def find_damaged_files(
        self, files: Iterable[File], *, check_digests: bool = True
    ) -> dict[str, str]:
        """The files that are not as committed, by path, each with the reason. Without
        `check_digests` only their sizes are compared.
        """
        ...

    def has_replaced_records(self, file: File, replaced: ReplacedRecords) -> bool:
        """Whether a file has a record that the refold replaces."""
        ...

    def has_records_in(
        self,
        files: Iterable[File],
        offset_range: OffsetRange,
        partition_and_topic_id: tuple[Partition, str] | None = None,
    ) -> bool:
        """Whether any of these files has a record at these offsets; with `partition_life`, of this
        partition and topic id only.
        """
        ...

    def session_tables(
        self, partition: Partition, topic_id: str, files: Sequence[File], row_key_spec: RowKeySpec
    ) -> Iterable[SessionTable]:
        """The rows of each session, folded from a partition's records. Each file is checked first;
        `IntegrityError` if one is damaged.
        """
        ...

    def first_difference_offset(
        self,
        old_files: Sequence[File],
        replaced: ReplacedRecords,
        new_files: Sequence[File],
        offset_range: OffsetRange,
    ) -> int | None:
        """The first offset in the range at which the replaced records of the old files differ from
        the records of the new files; None: they are equal.
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
        """Make one file, sorted by offset and index, of the old records that are not replaced and the
        new records in this range; None if there are no records.
        """
        ...


class CommitConflictError(Exception):  # not a SeriatimError: the commit rule decides
    """The compare-and-set was not confirmed. It may have succeeded all the same."""


class LedgerStore(Protocol):
    """Stores the ledger. A commit is `put_manifest`, then `compare_and_set`; neither overwrites."""

    def head(self, stream: str) -> LedgerHead | None:
        """The ledger as of its last entry; None if there is no ledger."""

    def ledger_at(self, stream: str, sequence: int) -> Ledger:
        """The ledger as of an earlier entry."""

    def manifest_at(self, stream: str, sequence: int) -> Manifest:
        """An earlier entry, and the ledger as of it."""

    def entries(self, stream: str, after: int) -> Iterator[Manifest]:
        """The entries later than sequence `after`, oldest first."""

    def active_paths(self, head: LedgerHead) -> set[str]:
        """The record files of the table as of `head`."""

    def active_files(self, head: LedgerHead) -> list[File]:
        """The record files of the table as of `head`, with their sizes and offsets. Digests are in the
        entries that added them.
        """

    def files_at(self, stream: str, sequence: int) -> list[File]:
        """The record files of the table as of an earlier entry, as in `active_files`."""

    def sweep(self, head: LedgerHead) -> list[str]:
        """Delete drafts, and manifests up to `head` that no entry names; the deleted paths."""

    def put_manifest(self, manifest: Manifest) -> ManifestReference:
        """Store the manifest of an entry that is to be committed."""
        ...

    def compare_and_set(
        self, head: LedgerHead | None, entry: Entry, manifest: ManifestReference
    ) -> None:
        """Commit on top of exactly `head` (None: create), or raise `CommitConflictError`."""

    def has_manifest(self, sha256: str, after: int) -> bool:
        """Whether an entry later than sequence `after` names this manifest."""

    def differing_files(self) -> list[str]:
        """The files that differed in the last verify."""

    def note(self, key: str) -> EntryMark:
        """The entry that a note names (`REPORTED_NOTE` and others in ledger/manifests.py); sequence -1
        if there is no note, or none that can be read.
        """

    def put_note(self, key: str, entry: EntryMark) -> None: ...
    def witness(self) -> EntryMark | None: ...
    def put_witness(self, entry: EntryMark) -> None: ...
    def archive_witness(self, reason: str) -> str:
        """Move the witness away, with the reason in it, because a person decided to begin anew; its
        new path.
        """


DerivedTableName = Literal["gaps", "quarantine"]
"""Tables that are derived from the ledger alone and can be rebuilt at any time."""


class AppliedVersion(EntryMark, frozen=True):
    """The ledger entry that a table has reached, and the token with which the store commits on
    exactly that version.
    """

    token: Any = None


class PublishedVersion(AppliedVersion, frozen=True):
    """The same of the table `current`, with what it knows about topics that were created again."""

    topic_ids: TopicIdsByPartition = field(default_factory=dict)


PartitionFiles = Sequence[tuple[Partition, File]]


class OutputStore(Protocol):
    """The tables of a machine's further record kinds. Each put is one commit on exactly the
    `expected` version, or raises `CommitConflictError`.
    """

    tables: Sequence[str]

    def applied_version(self, table: str) -> AppliedVersion: ...
    def put_files(
        self,
        table: str,
        expected: AppliedVersion,
        entry: EntryMark,
        added: PartitionFiles,
        removed: Sequence[str],
    ) -> None: ...


class DerivedStore(Protocol):
    """The derived tables. A put on a table without a version (-1) creates all of it."""

    output_store: OutputStore | None

    def applied_version(self, table: DerivedTableName) -> AppliedVersion:
        """The version of a table; -1: it does not exist, or cannot be trusted."""

    def gaps(self, applied: AppliedVersion) -> list[Gap]:
        """The rows of the table `gaps` as of a version."""

    def put_gaps(self, expected: AppliedVersion, entry: EntryMark, gaps: Sequence[Gap]) -> None:
        """Replace all gaps, in one commit on exactly `expected`, or raise `CommitConflictError`."""

    def put_quarantine(
        self,
        expected: AppliedVersion,
        entry: EntryMark,
        quarantine_files: Sequence[QuarantineFile],
        released_gaps: Sequence[Gap],
    ) -> None:
        """Add quarantined messages and mark those that were released, in one commit on exactly
        `expected`, or raise `CommitConflictError`.
        """

    def note_up_to_date(self, entry: EntryMark, open_gaps: int) -> None:
        """Store that both tables are up to date with this entry, where nothing had to be put, and how
        many gaps are open.
        """

    def noted_open_gaps(self, applied: AppliedVersion) -> int | None:
        """How many gaps were open when a version of the table `gaps` was noted; None: not known."""


class CurrentStore(Protocol):
    """The table `current`. A put on a table without a version (-1) creates all of it."""

    def published_version(self) -> PublishedVersion:
        """The version of the table; -1: it does not exist, or cannot be trusted."""
        ...

    def put_rows(
        self,
        expected: PublishedVersion,
        entry: EntryMark,
        topic_ids: TopicIdsByPartition,
        catch_ups: Sequence[PartitionCatchUp],
        progress: Callable[[int], None],
    ) -> CurrentWriteResult:
        """Bring these partitions up to date, in one commit on exactly `expected`, or raise
        `CommitConflictError`. `progress` is called with the records read so far.
        """
        ...


class UnreadableFileError(Exception):  # not a SeriatimError: verify reports what it means
    """A file is missing, or is not valid in its own format."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class AddedFile(Struct, frozen=True, kw_only=True):
    """A file as a Delta commit adds it."""

    path: str
    size: int = -1
    rows: int = -1
    first_offset: int = -1
    last_offset: int = -1


class CommitSignature(Struct, frozen=True):
    """What a Delta commit says of the entry that it belongs to."""

    sequence: int
    previous: str
    """The hash of the manifest of the entry before."""
    manifest: str
    """The path of the manifest."""
    sha256: str
    """The hash of the manifest."""


class Commit(Struct, frozen=True, kw_only=True):
    """One Delta commit, as its JSON file has it."""

    version: int
    signature: CommitSignature | None = None
    """None: it is not of an entry of the ledger."""
    transaction: int | None = None
    adds: tuple[AddedFile, ...] = ()
    removes: tuple[str, ...] = ()
    is_rewrite: bool = False
    """It says that it changed no data: an OPTIMIZE by another program."""
    read_error: str = ""
    """Why it cannot be read; empty: it can."""
    log_sha256: str = ""
    """SHA-256 over the bytes of all commits up to and including this one."""


class FileOutline(Struct, kw_only=True):
    """What a file of records, or of quarantined messages, contains, without its rows."""

    rows: int = 0
    first_offset: int = -1
    last_offset: int = -1
    first_disorder: tuple[int, int] | None = None
    """Offset and index of the first row that does not come after the one before it."""
    early_offset: int = -1
    """The offset of the first record that is older than the message it was made of."""
    topics: set[str] = field(default_factory=set)
    partitions: set[int] = field(default_factory=set)
    """None of these two if the column is the name of a folder."""
    offsets_by_topic_id: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The first and the last offset of each topic id."""
    session_count: int = 0
    """How many different sessions there are. Their names would take memory for each file."""
    distinct_offsets: int = 0
    """How many different offsets there are."""
    value_ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The least and the largest value of each column of `RISING_COLUMN_NAMES`; of `timestamp` in
    milliseconds since 1970. A column is missing if the file does not have it, or has no value in it,
    or does not state its range, as a file that another program wrote.
    """


class FileReading(Struct, kw_only=True):
    """A committed file as it is now."""

    size_bytes: int | None = None
    """None: there is no such file."""
    digests: tuple[str, str] = ("", "")
    """XXH3-128 and SHA-256; the second is empty if the entry does not have it."""
    outline: FileOutline | None = None
    """Of a file of records or quarantined messages that has the size and digests of its entry."""
    read_error: str = ""
    """Why a file that has them is not valid in its own format."""


class ScanRequest(Struct, frozen=True, kw_only=True):
    """What is to be read of the record files of a partition."""

    first_offsets: dict[str, int] | None = None
    """By topic id: the first offset that counts as new. Records of other topic ids are left out.
    None: every record counts.
    """
    row_key_spec: RowKeySpec | None = None
    """How records become rows; None: no rows are returned."""
    bucket: tuple[int, int] | None = None
    """Number and count: only rows of sessions whose name falls into this bucket. None: of all."""
    with_outlines: bool = True
    """Whether the files are outlined."""

    def includes_session(self, name: str) -> bool:
        """Whether the name of a session falls into the bucket, if there is one."""
        if self.bucket is None:
            return True
        number, count = self.bucket
        # A name may have lone surrogates, which plain UTF-8 refuses.
        return crc32(name.encode("utf-8", "surrogatepass")) % count == number


class ScannedRecords(Struct, kw_only=True):
    """The record files of a partition, as far as the promises about it need them."""

    outlines: list[FileOutline] = field(default_factory=list)
    """Of whole files, in their order; empty if they were not asked for."""
    new_rows: int = 0
    """Records that count, of all sessions."""
    first_rows: Iterable[RowImage] = ()
    """Each row of each session as it was before its first record, by what that record says."""
    last_rows: Iterable[RowImage] = ()
    """Each row of each session as its last record leaves it."""
    unlinked_rows: int = 0
    """Records whose before-image is not what the record before them left of the row."""
    unlinked_offset: int = -1
    """The offset of the first of them."""
    unlinked_files: list[str] = field(default_factory=list)
    """The files that have them."""


class RecordScanner(Protocol):
    """Reads committed record files again. Raises `UnreadableFileError`."""

    def scan(self, files: Sequence[File], request: ScanRequest) -> ScannedRecords:
        """What record files of one partition contain. They must be in the order of their offsets."""
        ...


class Audit(Protocol):
    """Reads a stream's output again for verify, independently of the code that wrote it. Raises
    `UnreadableFileError`.
    """

    workers: Workers
    """Who reads the files."""

    def commits(self) -> list[Commit]: ...
    def paths_readers_see(self, version: int) -> set[str]: ...
    def other_tables(self) -> dict[str, tuple[int, set[str]]]: ...
    def witness(self) -> bytes | None: ...
    def sign_off(self) -> bytes | None: ...
    def put_sign_off(self, content: bytes) -> None: ...
    def put_differing_file(self, path: str) -> None:
        """Store the path of the file that differs, for repair; empty: none does."""
        ...

    def manifest(self, reference: ManifestReference) -> Manifest:
        """The manifest of an entry, or raise `UnreadableManifestError`."""
        ...

    def paths(self) -> list[str]: ...
    def size(self, path: str) -> int | None: ...
    def read_files(self, files: Iterable[File]) -> Iterator[FileReading]:
        """Each file as it is now, in the order of the files."""
        ...

    def rows(self, path: str, columns: Sequence[str] | None = None) -> Iterator[Record]: ...
    def sessions(self, path: str) -> Iterator[tuple[str, Session]]:
        """The sessions of a state file."""
        ...

    def record_scanner(self) -> RecordScanner: ...
    def state(self, stream: str) -> StateStore:
        """The state files. `stream` is for errors."""
        ...


class PastMessageReader(Protocol):
    """Reads messages of the past again from Kafka."""

    def read(self, partition: Partition, offset_range: OffsetRange) -> Iterator[MessageBatch]:
        """The messages of a range, in batches without a hole."""
        ...

    def is_compacted(self, topic: str) -> bool:
        """Whether a topic is compacted, so that messages may be missing in the middle."""


class SnapshotRequester(Protocol):
    """Asks producers for snapshots."""

    def send(self, requests: Sequence[SnapshotRequest]) -> None:
        """Send all requests, and wait until they arrived; else raise `PlatformError`."""


class Clock(Protocol):
    """Time. It is used for waiting and for information; no decision about data depends on it."""

    def now_seconds(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class OpenStream(Protocol):
    """One stream with everything outside that a command touches for it. Each port is opened when it
    is first used. `ConnectedStream` in context.py has the real ones, and `OpenMemoryStream` in
    memory/stream.py the fakes.
    """

    @property
    def stream(self) -> Stream: ...
    @property
    def runner(self) -> Runner:
        """The stream's machine."""

    @property
    def log(self) -> Log: ...
    @property
    def reader(self) -> Reader: ...
    @property
    def past_reader(self) -> PastMessageReader: ...
    @property
    def explain(self) -> Explain: ...
    @property
    def ledger(self) -> LedgerStore: ...
    @property
    def records(self) -> RecordStore: ...
    @property
    def state(self) -> StateStore:
        """The state files. This store keeps the files that it read open."""

    def open_state(self) -> StateStore:
        """The state files, opened anew, for a process that lives longer than the files do."""

    @property
    def joiner(self) -> Joiner: ...
    @property
    def rewriter(self) -> Rewriter: ...
    @property
    def derived(self) -> DerivedStore: ...
    @property
    def snapshot_requester(self) -> SnapshotRequester | None:
        """Asks producers for snapshots; None if the stream does not want that."""

    @property
    def clock(self) -> Clock: ...
    def make_task(self, works: dict[Partition, PartitionWork]) -> Task:
        """The task that folds these works. It runs where the messages are."""

    def new_attempt(self) -> str:
        """A unique name for one attempt to write and commit something."""

    def peak_memory_bytes(self) -> int:
        """The most memory that this process had so far."""
