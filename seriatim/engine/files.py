"""Files of a task: what is known of a file, the certificate of a range, the ports through which a task
reads and writes, and when state files are merged.

Nothing that is written through these ports counts until a commit names it.

Next: engine/task.py works with them; storage/record_files.py and storage/state_files.py implement
them, and so do the fakes in memory/.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from msgspec import Struct, field

from seriatim.engine.holes import ExplainedRange
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import (
    BoundsByPartition,
    OffsetByPartition,
    OffsetRange,
    Partition,
    Ranges,
)
from seriatim.engine.records import MAIN_TABLE
from seriatim.engine.session import (
    Counts,
    FoldOutput,
    QuarantinedMessage,
    Session,
    SessionEndRecords,
    SessionsByName,
)
from seriatim.errors import ensure

Explain = Callable[[Partition, OffsetRange], list[ExplainedRange]]
"""Explains why the offsets of a hole are missing: ranges that cover it, each with its cause."""
STATE_FILES_MAX = 24
"""Opening more state files than this would cost more than merging them."""


class File(
    Struct,
    frozen=True,
    rename={"size_bytes": "bytes", "first_offset": "first", "last_offset": "last"},
):
    """A file named by an entry."""

    path: str
    """Below the stream's output path."""
    size_bytes: int
    rows: int
    """State files: how many sessions, and how many rows of sessions that are stored row by row."""
    digest: str
    """XXH3-128 of the whole file."""
    first_offset: int = -1
    """Record files: the lowest offset of its rows."""
    last_offset: int = -1
    """Record files: the highest offset of its rows."""
    sha256: str = ""
    """SHA-256 of the whole file, for auditors; empty for files of formats before 4."""


Files = tuple[File, ...]
FilesByTable = dict[str, Files]
"""Record files by the table they belong to, oldest first."""
FilesByPartition = dict[str, list[File]]
"""Record files by the name of their partition, in order of their offsets."""


def file_paths(files: Iterable[File]) -> tuple[str, ...]:
    """The paths of files, in their order."""
    return tuple(file.path for file in files)


def partition_name_of_path(path: str) -> str:
    """The partition in the path of a file, which is FOLDER/TOPIC/NUMBER/NAME."""
    return path.partition("/")[2].rpartition("/")[0]


def group_by_partition(
    files: Iterable[File], partition_names: Collection[str]
) -> tuple[FilesByPartition, list[File]]:
    """Record files by the partition in their path; and files that another program made of ours
    (OPTIMIZE), which chooses folders of its own.
    """
    own_files: FilesByPartition = {}
    foreign_files: list[File] = []
    for file in files:
        partition_name = partition_name_of_path(file.path)
        if partition_name in partition_names:
            own_files.setdefault(partition_name, []).append(file)
        else:
            foreign_files.append(file)
    # Whoever follows the records of a partition reads its files by offset.
    for partition_files in own_files.values():
        partition_files.sort(key=lambda file: file.first_offset)
    return own_files, foreign_files


class Certificate(Struct, frozen=True, kw_only=True, rename={"message_time_ms": "time"}):
    """Proof for one partition and slice: every offset from `start` to `until` is accounted for."""

    partition: Partition
    epoch: int
    start: int
    until: int
    counts: Counts
    holes: dict[str, int] = field(default_factory=dict)
    """Missing offsets by cause."""
    digests: dict[str, str] = field(default_factory=dict)
    first_timestamp: int | None = None
    last_timestamp: int | None = None
    sessions: int = 0
    message_time_ms: int = -1
    """The partition's message time, where sessions expire by it."""

    def __post_init__(self) -> None:
        accounted = self.counts.messages + sum(self.holes.values())
        ensure(
            accounted == self.until - self.start,
            "a certificate accounts for every offset",
            partition=str(self.partition),
            start=self.start,
            until=self.until,
            found=accounted,
        )


class SourceFailedError(Exception):  # not a SeriatimError: discovery decides what it means
    """Reading failed: lost data, a lost broker or executor. Discovery finds out which."""


def ranges_to_log_ends(starts: OffsetByPartition, bounds: BoundsByPartition) -> Ranges:
    """The ranges from these starts to the present log ends. Raises `SourceFailedError` if a start is
    not in its log.
    """
    ranges = {}
    for partition, start in starts.items():
        log = bounds.get(partition)
        extent = "gone" if log is None else f"[{log.log_start}, {log.log_end})"
        if log is None or not log.log_start <= start <= log.log_end:
            raise SourceFailedError(
                f"{partition}: offset {start} was to be read, and the log is {extent}"
            )
        ranges[partition] = OffsetRange(start, log.log_end)
    return ranges


class FileWriter(Protocol):
    """A file being written. When it is large enough, it is finished, and the next one is begun."""

    @property
    def full_files(self) -> Sequence[File]:
        """The files that were finished so far, in order."""
        ...

    def close(self) -> File | None:
        """Finish the last file; None if nothing was written since the one before."""
        ...


def finish_files(writer: FileWriter) -> Files:
    """Finish what is being written; all files of the writer, in order."""
    last_file = writer.close()
    if last_file is None:
        return tuple(writer.full_files)
    return (*writer.full_files, last_file)


class RecordWriter(FileWriter, Protocol):
    """A record file of one partition and slice."""

    def write(self, batch: MessageBatch, output: FoldOutput) -> None: ...
    def write_end_records(self, offset: int, end_records: SessionEndRecords) -> None:
        """Write the records that end sessions, all at one offset."""
        ...


class QuarantineWriter(FileWriter, Protocol):
    """A file of quarantined messages."""

    def write(self, batch: MessageBatch, messages: list[QuarantinedMessage]) -> None: ...


class UnfitRecordsError(Exception):  # becomes the finding `raised`
    """Values of records do not fit their columns. `rows` are positions in the `FoldOutput`."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(rows)
        self.rows = rows


class TaskRecords(Protocol):
    """Makes the record and quarantine files of a task."""

    def record_writer(
        self, partition: Partition, topic_id: str, stem: str, table: str = MAIN_TABLE
    ) -> RecordWriter: ...
    def quarantine_writer(
        self, partition: Partition, topic_id: str, stem: str
    ) -> QuarantineWriter: ...


class StateStore(Protocol):
    """Stores the state of sessions. Files are checked against their digest before use."""

    def load(self, files: Iterable[File], names: Iterable[str]) -> SessionsByName:
        """The named sessions, with all that is stored of them."""

    def open_sessions(self, files: Iterable[File], names: Iterable[str]) -> SessionsByName:
        """The named sessions. The rows of those that are stored row by row stay where they are."""

    def find_names(self, files: Iterable[File], names: Iterable[str]) -> set[str]:
        """Which of these sessions are in the files. Only the names are read, so it is cheap."""

    def save(
        self,
        partition: Partition,
        stem: str,
        sessions: SessionsByName,
        files_to_merge: Iterable[File],
    ) -> Files:
        """Write these sessions and those of `files_to_merge` (oldest first); newer ones win. It is one
        file, or several of which each session is in one, if one would be too large.
        """

    def all_sessions(
        self, files: Iterable[File], *, with_rows: bool = True
    ) -> Iterable[tuple[str, Session]]:
        """Every session, one by one. Without `with_rows` the rows of those that are stored row by row
        stay where they are.
        """

    def quarantined_sessions(self, files: Iterable[File]) -> SessionsByName:
        """The sessions in quarantine, as `open_sessions` gives them."""


class Digests(Protocol):
    """Digests of offsets, keys and values. They do not depend on how messages are cut into batches."""

    def update(self, batch: MessageBatch) -> None: ...
    def finish(self) -> dict[str, str]: ...


def save_state(
    store: StateStore,
    partition: Partition,
    stem: str,
    sessions: SessionsByName,
    present_files: Sequence[File],
) -> Files:
    """Save sessions into a new state file on top of the present ones. Returns all state files of the
    partition, newest last.

    The state is log-structured. The newest files are merged into the new one as long as they are no
    larger than what is written anyway. So each session, and each row that is stored by itself, is
    rewritten a logarithmic number of times, and a slice that touches few of them writes few.
    """
    rows_per_file = [file.rows for file in present_files]
    new_rows = sum(_rows_to_write(session) for session in sessions.values())
    unmerged_count = len(present_files) - merge_count(rows_per_file, new_rows)
    files_to_merge = present_files[unmerged_count:]
    new_files = store.save(partition, stem, sessions, files_to_merge)
    return (*present_files[:unmerged_count], *new_files)


def _rows_to_write(session: Session) -> int:
    """A session is one row, and one more for each of its rows that is stored by itself."""
    changes = session.row_changes
    return 1 if changes is None else 1 + changes.size


def merge_count(rows_per_file: Sequence[int], new_rows: int) -> int:
    """How many of the newest files to merge into a file of `new_rows` rows. `rows_per_file` is in the
    order of the files, oldest first.
    """
    ensure(new_rows > 0, "nothing to write")
    count = 0
    rows_to_write = new_rows
    for rows in reversed(rows_per_file):
        if rows > rows_to_write:
            break
        rows_to_write += rows
        count += 1
    files_too_many = len(rows_per_file) + 1 - STATE_FILES_MAX
    return max(count, files_too_many)
