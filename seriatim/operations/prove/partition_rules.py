"""The rules about one partition: what the ledger promises of it, compared with its files.

- dense: certificates account for every offset from the frontier before to the frontier after, and
  each account follows from the one before it.
- counted: files have as many records, messages and sessions as the ledger says.
- unique: each record is there once, in order, in a file of its own partition.
- folded: folding the records over the state as it was before them gives the present state.
- linked: each before-image is the row as it was.

`verify` and `check` apply the same rules. They differ in the entries, the files and the state that
they begin with, and in what they make of a broken promise: a difference that ends a verify, or
evidence for a verdict.

`PartitionProver` reads the files of a partition. It, its work (`PartitionClaims`) and its answer
(`PartitionProof`) can be sent to other processes (workers.py). Everything else here is pure.

Next: operations/prove/verify.py and operations/prove/check.py say what is to be proved;
operations/prove/stream_rules.py has the rules about a stream as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import Certificate, File, Files, StateStore
from seriatim.engine.machine import Runner, UserMachine
from seriatim.engine.offsets import Partition
from seriatim.engine.records import (
    MAIN_TABLE,
    RowImage,
    RowKeySpec,
    normalize_row,
    same_rows,
    table_of_record,
)
from seriatim.engine.row_parts import summarize_state_bytes
from seriatim.engine.session import Row, Session
from seriatim.engine.table import TableMachine
from seriatim.errors import IntegrityError, ensure, raise_broken_promise
from seriatim.ledger.entries import (
    AcceptEntry,
    ColumnsEntry,
    CompactEntry,
    Entry,
    HoldEntry,
    ReleaseEntry,
    RepairEntry,
    RetireEntry,
    SliceEntry,
    StartEntry,
    VerdictEntry,
)
from seriatim.ledger.manifests import RESTORE_LOG_ADVICE
from seriatim.ledger.model import Account, Change, state_files_after
from seriatim.ports import (
    FileOutline,
    RecordScanner,
    ScannedRecords,
    ScanRequest,
    UnreadableFileError,
)

RESTORE_ADVICE = (
    "restore {file} from a backup; `seriatim verify {stream} --all` then looks at everything again"
)
REPAIR_ADVICE = (
    "`seriatim repair {stream}` shows how it is made again from Kafka, and does it with --apply;"
    " or restore {file} from a backup"
)
WRITTEN_WRONG_ADVICE = (
    "keep this file and report this as a bug: its digest is right, so it was written like this"
)
UNMOVING_ENTRIES = (
    ColumnsEntry,
    HoldEntry,
    ReleaseEntry,
    RetireEntry,
    VerdictEntry,
    CompactEntry,
)
"""Types of entries that do not move a partition."""
ROW_CHARACTERS_MAX = 400
"""How much of a row a difference shows."""
SESSIONS_AT_ONCE = 4_096
"""Sessions whose state is loaded together."""
Promise = Literal["", "dense", "counted", "unique", "folded", "linked"]
RowsByKey = Mapping[Any, Row]
Item = TypeVar("Item")
TopicSession = tuple[str, str]
"""The topic id and the name of a session."""


class Difference(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that is not as it must be, and where. An error means that something is lost, changed
    or invented.
    """

    description: str
    """One line, for people."""
    promise: Promise = ""
    """The promise that it breaks; empty: none about a single partition."""
    file: str = ""
    partition: str = ""
    offset: int = -1
    sequence: int = -1
    """The ledger entry."""
    session: str | None = None
    expected: str = ""
    found: str = ""
    cause: str = ""
    next: str = ""
    """What a person can do. `{stream}` and `{file}` in it are replaced by their names."""
    level: Literal["error", "warning"] = "error"

    def facts(self, stream: str) -> dict[str, Any]:
        """What is known, for a screen or for scripts."""
        facts = {
            "file": self.file,
            "partition": self.partition,
            "offset": self.offset if self.offset >= 0 else None,
            "entry": self.sequence if self.sequence >= 0 else None,
            "session": self.session,
            "expected": self.expected,
            "found": self.found,
            "cause": self.cause,
            "next": self.next.replace("{stream}", stream).replace("{file}", self.file),
        }
        return {name: value for name, value in facts.items() if value not in ("", None)}

    def to_error(self, stream: str) -> IntegrityError:
        """The difference as the error that ends a verify."""
        facts = self.facts(stream)
        advice = facts.pop("next", "")
        return IntegrityError(f"{stream}: {self.description}", next=advice, **facts)


class DifferenceError(Exception):
    """The first difference that is an error. It ends the verification, which reports it."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.description)
        self.difference = difference


class Evidence(Struct, frozen=True, kw_only=True):
    """One promise about one partition: whether it holds, and where it does not."""

    partition: Partition
    promise: str
    broken_count: int = 0
    """How often it does not hold."""
    offset: int = -1
    """The first offset where it does not."""
    expected: str = ""
    found: str = ""
    files: tuple[str, ...] = ()
    """Record files that break it; none: not known."""
    difference: Difference | None = None
    """The first place where it does not hold."""

    @property
    def holds(self) -> bool:
        """Whether the promise holds."""
        return not self.broken_count

    def to_row(self) -> dict[str, Any]:
        """The evidence as a row of the frame that suites check."""
        return {
            "topic": self.partition.topic,
            "partition": self.partition.number,
            "promise": self.promise,
            "holds": self.holds,
            "broken": self.broken_count,
            "offset": self.offset,
        }


class EvidenceTally:
    """Counts how often one promise is broken, and keeps the first place."""

    def __init__(self, partition: Partition, promise: Promise) -> None:
        self.evidence = Evidence(partition=partition, promise=promise)

    def add(
        self, difference: Difference, *, count: int = 1, offset: int = -1, files: Sequence[str] = ()
    ) -> None:
        """Add a place where the promise is broken `count` times.

        `offset` is where to look, if the difference does not say it.
        """
        evidence = self.evidence
        offset = max(offset, difference.offset)
        first = evidence
        is_earlier = 0 <= offset < evidence.offset
        # A row that no new record touched has no offset, and says less than one that has.
        says_more = evidence.offset < 0 <= offset
        if evidence.difference is None or is_earlier or says_more:
            found = f"{difference.description}: {difference.found}"
            if difference.session is not None:
                found = f"{difference.found} in session {difference.session[:100]!r}"
            first = replace(
                evidence,
                offset=offset,
                expected=difference.expected,
                found=found,
                difference=difference,
            )
        # A state file that breaks a promise does not say which records are bad.
        paths = [path for path in (difference.file, *files) if path.startswith("records")]
        self.evidence = replace(
            first,
            broken_count=evidence.broken_count + count,
            files=tuple(dict.fromkeys([*evidence.files, *paths])),
        )


# Dense: what entries make of the account of a partition.


class RuleCheck(NamedTuple):
    """One rule about the ledger, with the two values that must be equal."""

    description: str
    """What is wrong if they are not."""
    expected: object
    actual: object
    offset: int = -1
    """Where to look in the partition, if that is known."""

    def to_difference(self, partition_name: str, sequence: int) -> Difference:
        """The rule as a difference in the account of a partition."""
        return Difference(
            description=self.description,
            promise="dense",
            partition=partition_name,
            sequence=sequence,
            expected=str(self.expected),
            found=str(self.actual),
            cause="the ledger's account of this partition does not add up",
            next=f"report this as a bug, with the manifest of entry {sequence}",
        )


def check_step(
    entry: Entry,
    change: Change | None,
    account_before: Account | None,
    account_after: Account | None,
) -> Iterator[RuleCheck]:
    """The rules that one entry breaks in the account of one partition. `change` is the entry's change
    of that partition; None if there is none.
    """
    for check in _account_rules(entry, change, account_before, account_after):
        if check.expected != check.actual:
            yield check


def _account_rules(
    entry: Entry,
    change: Change | None,
    account_before: Account | None,
    account_after: Account | None,
) -> Iterator[RuleCheck]:
    """What one entry may do to the account of one partition."""
    if account_after is None:
        yield RuleCheck("a partition has left the ledger", "an account", "none")
    elif change is None or isinstance(entry, UNMOVING_ENTRIES):
        yield from _unmoving_rules(entry, change, account_before, account_after)
    elif isinstance(entry, AcceptEntry):
        yield from _accept_rules(change, account_before, account_after)
    elif isinstance(entry, RepairEntry):
        yield from _moving_rules(change, account_before, account_after, epochs_raised=1)
        state = change.state
        if state is None:
            state = account_before.state if account_before is not None else ()
        yield RuleCheck(
            "a partition's state files are not those of its last change",
            state,
            account_after.state,
        )
    else:
        yield from _moving_rules(change, account_before, account_after, epochs_raised=0)
        state = change.state or ()
        if account_before is not None:
            state = state_files_after(change, account_before)
        yield RuleCheck(
            "a partition's state files are not those of its last change",
            state,
            account_after.state,
        )
        yield from _slice_rules(change, account_before, account_after)


def _moving_rules(
    change: Change, account_before: Account | None, account_after: Account, *, epochs_raised: int
) -> Iterator[RuleCheck]:
    """A slice and a repair move the frontier to where their change ends."""
    epoch = account_before.epoch if account_before is not None else 0
    yield RuleCheck("a change is of another epoch", epoch, change.epoch)
    yield RuleCheck("a partition's epoch", epoch + epochs_raised, account_after.epoch)
    yield RuleCheck(
        "a partition's frontier is not where its change ends",
        change.until,
        account_after.frontier,
        change.until,
    )


def _unmoving_rules(
    entry: Entry, change: Change | None, account_before: Account | None, account_after: Account
) -> Iterator[RuleCheck]:
    """A partition without a change, or in an entry that moves nothing, stays where it was."""
    position_before = None
    state_before = None
    if account_before is not None:
        position_before = (account_before.topic_id, account_before.frontier, account_before.epoch)
        state_before = account_before.state
    position_after = (account_after.topic_id, account_after.frontier, account_after.epoch)
    yield RuleCheck(
        "a partition moved without a change (topic id, frontier, epoch)",
        position_before,
        position_after,
    )
    if change is None:
        yield RuleCheck(
            "a partition's state changed without a change", state_before, account_after.state
        )
    elif isinstance(entry, CompactEntry) and account_before is not None:
        yield from _compaction_rules(change, account_before, account_after)


def _compaction_rules(
    change: Change, account_before: Account, account_after: Account
) -> Iterator[RuleCheck]:
    """A compaction merges the oldest state files, and nothing else of the account changes."""
    merged_count = len(change.merged_state_paths)
    oldest_paths = tuple(file.path for file in account_before.state[:merged_count])
    yield RuleCheck(
        "a compaction merged other state files than the oldest",
        oldest_paths,
        change.merged_state_paths,
    )
    state = account_before.state
    if change.state is not None:
        state = (*change.state, *account_before.state[merged_count:])
    yield RuleCheck(
        "a compaction changed more than the state files it merged",
        replace(account_before, state=state),
        account_after,
    )


def _accept_rules(
    change: Change, account_before: Account | None, account_after: Account
) -> Iterator[RuleCheck]:
    """A topic that was created again begins without state where the change says. A known topic goes
    on where it was.
    """
    position_after = (account_after.topic_id, account_after.frontier, account_after.state)
    if account_before is None or change.topic_id != account_before.topic_id:
        yield RuleCheck(
            "a new life does not begin where it was accepted",
            (change.topic_id, change.until, ()),
            position_after,
        )
    else:
        state = state_files_after(change, account_before)
        yield RuleCheck(
            "an accept moved a partition",
            (account_before.topic_id, account_before.frontier, state),
            position_after,
        )
    if account_before is not None:
        epoch = account_before.epoch + 1
        yield RuleCheck("an accept raises the epoch", epoch, account_after.epoch)


def _slice_rules(
    change: Change, account_before: Account | None, account_after: Account
) -> Iterator[RuleCheck]:
    """A slice begins where the partition was, and accounts for all that it adds."""
    frontier = change.initial_frontier
    topic_id = change.topic_id
    initial_frontier = change.initial_frontier
    if account_before is not None:
        frontier = account_before.frontier
        topic_id = account_before.topic_id
        initial_frontier = account_before.initial_frontier
    yield RuleCheck("a slice does not begin at the frontier", frontier, change.frontier, frontier)
    yield RuleCheck("a partition's topic id changed in a slice", topic_id, account_after.topic_id)
    yield RuleCheck(
        "a partition was born elsewhere", initial_frontier, account_after.initial_frontier
    )
    if change.certificate is None:
        yield RuleCheck("the frontier moved without a certificate", change.frontier, change.until)
        yield RuleCheck("records without a certificate", 0, _row_count(change.records))
        return
    yield from _certificate_rules(change, change.certificate)
    for name in ("messages", "records", "headless"):
        sum_before = getattr(account_before, name) if account_before is not None else 0
        yield RuleCheck(
            f"the sum of {name} is not that of the certificates",
            sum_before + getattr(change.certificate.counts, name),
            getattr(account_after, name),
        )
    yield from _coverage_rules(change, change.certificate)


def _certificate_rules(change: Change, certificate: Certificate) -> Iterator[RuleCheck]:
    """A certificate is of its change, and counts its records."""
    changed_range = (str(change.partition), change.epoch, change.frontier, change.until)
    certified_range = (
        str(certificate.partition),
        certificate.epoch,
        certificate.start,
        certificate.until,
    )
    yield RuleCheck("a certificate is of another range", changed_range, certified_range)
    yield RuleCheck(
        "a certificate counts other records than its files have",
        _row_count(change.records),
        certificate.counts.records,
    )
    other_rows = {table: _row_count(files) for table, files in change.other_records.items()}
    yield RuleCheck(
        "a certificate counts other records of another table than its files have",
        other_rows,
        certificate.counts.other_records,
    )


def _coverage_rules(change: Change, certificate: Certificate) -> Iterator[RuleCheck]:
    """A certificate accounts for every offset of its range, and no file goes beyond the range."""
    yield RuleCheck(
        "a certificate does not account for every offset",
        certificate.until - certificate.start,
        certificate.counts.messages + sum(certificate.holes.values()),
        certificate.start,
    )
    files = list(change.records)
    for other_files in change.other_records.values():
        files += other_files
    for file in files:
        is_inside = change.frontier <= file.first_offset <= file.last_offset < change.until
        yield RuleCheck(f"{file.path} has offsets outside its certificate", True, is_inside)


def _row_count(files: Iterable[File]) -> int:
    return sum(file.rows for file in files)


# Counted and unique: the content of files.


class CommittedFile(Struct, frozen=True):
    """A file, and the entry and the change that name it."""

    file: File
    sequence: int
    change: Change
    entry_type: type[Entry] | None = None
    """None: the entry was not read."""

    @classmethod
    def of_unread_entry(cls, file: File, sequence: int, partition: Partition) -> CommittedFile:
        """A file of an entry that was not read, with a change that says nothing."""
        change = Change(
            partition=partition,
            epoch=0,
            frontier=0,
            until=0,
            topic_id="",
            initial_frontier=0,
            state=(file,),
        )
        return cls(file, sequence, change)

    @property
    def is_of_slice(self) -> bool:
        """Whether its rows come from the messages of one slice."""
        return self.entry_type in (StartEntry, SliceEntry)

    @property
    def is_quarantine_file(self) -> bool:
        """Whether it has quarantined messages. Some of them may have waited in a window before."""
        return self.file.path.startswith("kept/")

    @property
    def slice_certificate(self) -> Certificate | None:
        """The certificate of its slice."""
        return self.change.certificate if self.is_of_slice else None

    def difference(
        self,
        description: str,
        promise: Promise = "",
        *,
        expected: object = "",
        found: object = "",
        offset: int = -1,
        cause: str = "",
        advice: str = "",
    ) -> Difference:
        """A difference in this file."""
        return Difference(
            description=description,
            promise=promise,
            file=self.file.path,
            partition=str(self.change.partition),
            offset=offset,
            sequence=self.sequence,
            expected=str(expected),
            found=str(found),
            cause=cause,
            next=advice,
        )


def check_file(
    committed_file: CommittedFile,
    size: int | None,
    digests: tuple[str, str],
    paths_by_digest: Mapping[str, str],
) -> Iterator[Difference]:
    """A file exists, with the size and the digests (XXH3 and SHA-256) that its entry says.

    `paths_by_digest` are the files that are known: they tell whether two files were swapped.
    """
    file = committed_file.file
    digest, sha256_digest = digests
    advice = RESTORE_ADVICE if committed_file.is_quarantine_file else REPAIR_ADVICE
    expected_size = f"{file.size_bytes} bytes"
    if size is None:
        yield committed_file.difference("a file is missing", expected=expected_size, advice=advice)
        return
    cause = "it was changed after it was committed"
    if digest != file.digest and digest in paths_by_digest:
        cause = (
            f"it has the content of {paths_by_digest[digest]}: the two were swapped, or one was"
            " copied over the other"
        )
    if size != file.size_bytes:
        yield committed_file.difference(
            "a file has another size",
            expected=expected_size,
            found=f"{size} bytes",
            cause=cause,
            advice=advice,
        )
    if digest != file.digest:
        yield committed_file.difference(
            "a file is damaged", expected=file.digest, found=digest, cause=cause, advice=advice
        )
    elif sha256_digest != file.sha256:
        yield committed_file.difference(
            "a file is damaged",
            expected=f"SHA-256 {file.sha256}",
            found=f"SHA-256 {sha256_digest}",
            cause="somebody changed it on purpose: its XXH3-128 is still the one of its entry",
            advice=advice,
        )


def check_content(committed_file: CommittedFile, outline: FileOutline) -> Iterator[Difference]:
    """The content of a file is what its entry says: its partition, its range, in order, each record
    once, and no more messages and sessions than its certificate counts.
    """
    for difference in (
        *_check_rows(committed_file, outline),
        *_check_offsets(committed_file, outline),
        *_check_topic_ids(committed_file, outline),
    ):
        # A rule may know better what to do.
        yield replace(difference, next=difference.next or WRITTEN_WRONG_ADVICE)
    if committed_file.file.path.startswith("records"):
        yield from _check_certified_counts(committed_file, outline)


def _check_rows(committed_file: CommittedFile, outline: FileOutline) -> Iterator[Difference]:
    """Rows that are too many or too few, of another partition, or in the wrong order."""
    partition = committed_file.change.partition
    if outline.rows != committed_file.file.rows:
        yield committed_file.difference(
            "a file has another number of rows",
            "counted",
            expected=committed_file.file.rows,
            found=outline.rows,
        )
    other_topics = outline.topics - {partition.topic}
    if other_topics:
        description = "a file has rows of another topic"
        yield committed_file.difference(description, "unique", expected=set(), found=other_topics)
    other_numbers = outline.partitions - {partition.number}
    if other_numbers:
        description = "a file has rows of another partition"
        yield committed_file.difference(description, "unique", expected=set(), found=other_numbers)
    # A quarantined message may have waited in a window: then it comes after the message that
    # brought its session into quarantine, whatever their offsets are.
    if outline.first_disorder is not None and not committed_file.is_quarantine_file:
        offset, index = outline.first_disorder
        yield committed_file.difference(
            "a record comes twice, or before one that it must follow",
            "unique",
            expected="offset and index rise",
            found=f"offset {offset}, index {index}",
            offset=offset,
        )
    if outline.early_offset >= 0:
        yield committed_file.difference(
            "a record has a lower offset than the message it was made of",
            "unique",
            expected="offset at or after source_offset",
            found="before it",
            offset=outline.early_offset,
        )


def _check_offsets(committed_file: CommittedFile, outline: FileOutline) -> Iterator[Difference]:
    """Offsets that are not those that the entry says."""
    file = committed_file.file
    change = committed_file.change
    expected_span = (file.first_offset, file.last_offset)
    actual_span = (outline.first_offset, outline.last_offset)
    if file.first_offset >= 0 and actual_span != expected_span:
        yield committed_file.difference(
            "a file has other offsets (first, last)",
            "unique",
            expected=expected_span,
            found=actual_span,
            offset=outline.first_offset,
        )
    if not committed_file.is_of_slice:
        return
    # A quarantined message that waited in a window is older than its slice.
    start = change.initial_frontier if committed_file.is_quarantine_file else change.frontier
    if not start <= outline.first_offset <= outline.last_offset < change.until:
        yield committed_file.difference(
            "a file has offsets outside its slice",
            "unique",
            expected=f"offsets in [{change.frontier}, {change.until})",
            found=f"offsets from {outline.first_offset} to {outline.last_offset}",
            offset=outline.first_offset,
        )


def _check_topic_ids(committed_file: CommittedFile, outline: FileOutline) -> Iterator[Difference]:
    """A slice and a compaction write files of one topic id. A repair may write others."""
    other_topic_ids = outline.offsets_by_topic_id.keys() - {committed_file.change.topic_id}
    has_one_topic_id = committed_file.is_of_slice or committed_file.entry_type is CompactEntry
    if has_one_topic_id and other_topic_ids:
        yield committed_file.difference(
            "a file has rows of another topic id", "unique", expected=set(), found=other_topic_ids
        )


def _check_certified_counts(
    committed_file: CommittedFile, outline: FileOutline
) -> Iterator[Difference]:
    """A certificate counts no fewer messages and sessions than its records come from."""
    certificate = committed_file.slice_certificate
    if certificate is None:
        return
    counts = (
        ("messages", outline.distinct_offsets, certificate.counts.messages),
        ("sessions", outline.session_count, certificate.sessions),
    )
    for name, least, certified in counts:
        if certified < least:
            yield committed_file.difference(
                f"a certificate counts fewer {name} than its records come from",
                "counted",
                expected=f"at least {least}",
                found=certified,
                offset=certificate.start,
                advice="report this as a bug, with this entry's manifest;"
                " `seriatim verify {stream} --kafka` tells more",
            )


class StateFileContents:
    """What a rule must know of the sessions of one state file."""

    def __init__(self) -> None:
        self.last_offsets: list[int] = []
        """The last offset of each session."""
        self.rows = 0
        """The sessions, and the rows of those that are stored row by row."""

    def add(self, session: Session) -> None:
        """Take a session in."""
        self.last_offsets.append(session.last_offset)
        self.rows += 1
        if session.stored_rows is not None:
            self.rows += session.stored_rows.source.stored_count


def check_state_file(
    committed_file: CommittedFile, contents: StateFileContents
) -> Iterator[Difference]:
    """A state file has as many rows as its entry says, and its certificate counts no fewer sessions than
    were touched.
    """
    change = committed_file.change
    last_offsets = contents.last_offsets
    rows = contents.rows
    if rows != committed_file.file.rows:
        yield committed_file.difference(
            "a file has another number of rows",
            "counted",
            expected=committed_file.file.rows,
            found=rows,
            advice=REPAIR_ADVICE,
        )
    certificate = committed_file.slice_certificate
    # A certificate counts the sessions of its slice: those are in the last file of its change.
    if certificate is None or not change.state or change.state[-1].path != committed_file.file.path:
        return
    touched = sum(change.frontier <= offset < change.until for offset in last_offsets)
    sessions = len(last_offsets)
    if not touched <= certificate.sessions <= sessions:
        yield committed_file.difference(
            "a certificate counts other sessions than its state file has",
            "counted",
            expected=f"from {touched} to {sessions}",
            found=certificate.sessions,
            offset=certificate.start,
            advice="report this as a bug, with this entry's manifest",
        )


class _FileSpan(Struct, frozen=True, order=True):
    """The offsets of one topic id in a record file. A repair may write a file with several."""

    partition_name: str
    topic_id: str
    first_offset: int
    last_offset: int
    path: str


def check_overlaps(outlines: Iterable[tuple[CommittedFile, FileOutline]]) -> Iterator[Difference]:
    """Active record files of one partition and topic id have no offset in common: each record is
    there once.
    """
    spans: list[_FileSpan] = []
    for committed_file, outline in outlines:
        partition_name = str(committed_file.change.partition)
        path = committed_file.file.path
        for topic_id, (first_offset, last_offset) in outline.offsets_by_topic_id.items():
            spans.append(_FileSpan(partition_name, topic_id, first_offset, last_offset, path))
    # Of the spans so far of one partition and topic id: the one that ends last.
    furthest: _FileSpan | None = None
    for span in sorted(spans):
        if furthest is None or not _has_same_offset_space(furthest, span):
            furthest = span
            continue
        if span.first_offset <= furthest.last_offset:
            yield Difference(
                description="two files of the table have the same offsets",
                promise="unique",
                file=span.path,
                partition=span.partition_name,
                offset=span.first_offset,
                expected=f"offsets after {furthest.last_offset}, the last of {furthest.path}",
                found=f"offset {span.first_offset}",
                next=RESTORE_LOG_ADVICE,
            )
        if span.last_offset > furthest.last_offset:
            furthest = span


def _has_same_offset_space(span: _FileSpan, other: _FileSpan) -> bool:
    return (span.partition_name, span.topic_id) == (other.partition_name, other.topic_id)


def check_record_count(partition: Partition, account: Account, rows: int) -> Iterator[Difference]:
    """The files of a partition that are in the table have as many rows as the ledger counts."""
    if rows != account.records:
        yield Difference(
            description="the table's files have other records than the ledger counts",
            promise="counted",
            partition=str(partition),
            expected=f"{account.records} records in all",
            found=f"{rows} in the table's files",
            next=RESTORE_LOG_ADVICE,
        )


# Folded and linked: rows that records make, beside the rows in the state of their sessions.


class StateRowReader(Struct, frozen=True):
    """Reads the rows in the saved state of a session. The records of the machine become the same
    rows, by its `row_key_spec`.
    """

    runner: Runner
    row_key_spec: RowKeySpec
    is_exact: bool
    """Whether the state has exactly the rows that are read. A machine of the user says only by its
    `end` which rows it takes back, and those may be more than there are.
    """
    load_runner: Callable[[], Runner] | None = None
    """Loads the machine again in another process, because a machine cannot be sent there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_row_reader, (self.load_runner,)

    def rows_of(self, session: Session) -> RowsByKey:
        """The rows of a session by key; none if it has no state."""
        if session.state_bytes is None:
            return {}
        state = self.runner.load(session.state_bytes, session.state_version)
        if self.is_exact:
            rows_of_state: RowsByKey = state
            return rows_of_state
        rows: dict[Any, Row] = {}
        for record in self.runner.end(state):
            if table_of_record(record) == MAIN_TABLE:
                row = normalize_row(record)
                values = dict(zip(self.runner.columns, row, strict=True))
                rows[self.row_key_spec.key_of(values)] = row
        return rows

    def describe(self, row: Row | None) -> str:
        """A row for people."""
        if row is None:
            return "no such row"
        named_values = zip(self.row_key_spec.columns, row, strict=True)
        return ", ".join(f"{name}={value!r}" for name, value in named_values)[:ROW_CHARACTERS_MAX]


def state_row_reader(
    runner: Runner, load_runner: Callable[[], Runner] | None = None
) -> StateRowReader | None:
    """Reads rows out of the state of a machine; None if the machine does not say how.

    All rows in the state of the table machine are known. What the state of a user's machine holds
    is known only by `end`, which takes every row back: so its record class must have a `row_key`
    and a `row_gone`.
    """
    row_key_spec = runner.row_key_spec
    if row_key_spec is None:
        return None
    if isinstance(runner, TableMachine):
        return StateRowReader(runner, row_key_spec, is_exact=True, load_runner=load_runner)
    if not isinstance(runner, UserMachine) or not runner.has_end or not row_key_spec.deleted_when:
        return None
    return StateRowReader(runner, row_key_spec, is_exact=False, load_runner=load_runner)


def _load_row_reader(load_runner: Callable[[], Runner] | None) -> StateRowReader | None:
    """The row reader in another process."""
    if load_runner is None:
        return raise_broken_promise("a row reader that is sent away says how to load its machine")
    return state_row_reader(load_runner(), load_runner)


class FoldedRows:
    """The rows of sessions, as records leave them."""

    def __init__(self) -> None:
        self.tables: dict[TopicSession, dict[Any, tuple[Row, int]]] = {}
        """By session, then by key: the row, and the offset of its last record. A topic that was
        created again begins anew, so its sessions are others.
        """

    def put_session(self, session: TopicSession, rows: RowsByKey) -> None:
        """Set the rows that a session has before its records are folded."""
        self.tables[session] = {key: (row, -1) for key, row in rows.items()}

    def row(self, image: RowImage) -> Row | None:
        """The row that an image is of, as it is now; None: there is none."""
        table = self.tables.get((image.topic_id, image.session), {})
        return table.get(image.key, (None, -1))[0]

    def fold(self, image: RowImage) -> None:
        """Fold the last record of a row over what is there."""
        table = self.tables.setdefault((image.topic_id, image.session), {})
        if image.row is None:
            table.pop(image.key, None)
        else:
            table[image.key] = (image.row, image.offset)

    def take_differences(
        self, session: TopicSession, state_rows: RowsByKey
    ) -> Iterator[tuple[Row | None, Row | None, int]]:
        """The rows of a session that are not the same in its state: as the records make it, as the
        state has it, and the offset of the row's last record. The session is forgotten, so that few
        rows are in memory.
        """
        table = self.tables.pop(session, {})
        for key in sorted({*table, *state_rows}, key=repr):
            row, offset = table.get(key, (None, -1))
            state_row = state_rows.get(key)
            if not same_rows(row, state_row):
                yield row, state_row, offset


# One partition as a piece of work.


class FoldBase(Struct, frozen=True):
    """Where folding begins for a topic id: state files, and the first offset that is not in them."""

    topic_id: str = ""
    frontier: int = 0
    state: Files = ()

    def newer_files(self, account: Account) -> list[File]:
        """The present state files that are not of the base."""
        base_paths = {file.path for file in self.state}
        return [file for file in account.state if file.path not in base_paths]


class PartitionClaims(Struct, frozen=True, kw_only=True):
    """What the ledger says of one partition, and which of its files are to be compared with it."""

    partition: Partition
    account: Account
    record_files: tuple[CommittedFile, ...] = ()
    """Those to read, by offset."""
    state_files: tuple[CommittedFile, ...] = ()
    """The present state files that are not of the base, oldest first."""
    base: FoldBase = FoldBase()
    first_offsets: dict[str, int] | None = None
    """By topic id: the first offset that is folded over the base. None: that of each file."""
    rows_in_table: int | None = None
    """Rows of all its record files that are in the table; None: that is not known."""
    checks_files: bool = True
    """Whether the content of the files is compared with their entries."""
    folds_rows: bool = True
    """Whether its records can be folded to rows."""
    counts_sessions: bool = False
    """Whether all sessions of the state are counted."""
    round_count: int = 1
    """How many rounds the sessions are folded in. Every round reads all record files."""

    def __str__(self) -> str:
        return str(self.partition)


class PartitionProof(Struct, kw_only=True):
    """How the promises about one partition hold."""

    evidence: list[Evidence] = field(default_factory=list)
    records: int = 0
    """Records that were read and count as new."""
    sessions: int = 0
    """Sessions in the state, if they were to be counted."""
    unreadable_path: str = ""
    """A record file that cannot be read. Then nothing is proved."""
    read_error: str = ""
    """Why it cannot be read."""


class PartitionProver(Struct, frozen=True):
    """Compares the files of one partition with what the ledger claims. It can be sent to other
    processes.
    """

    record_scanner: RecordScanner
    state: StateStore
    row_reader: StateRowReader | None = None
    """None: records cannot be folded to rows."""

    def __call__(self, claims: PartitionClaims) -> PartitionProof:
        """The proof of one partition."""
        try:
            return _PartitionReading(self, claims).prove()
        except UnreadableFileError as error:
            return PartitionProof(unreadable_path=error.path, read_error=error.reason)


class _PartitionReading:
    """The files of one partition, while they are read."""

    def __init__(self, prover: PartitionProver, claims: PartitionClaims) -> None:
        self.prover = prover
        self.claims = claims
        self.row_reader = prover.row_reader if claims.folds_rows else None
        self.counted = EvidenceTally(claims.partition, "counted")
        self.unique = EvidenceTally(claims.partition, "unique")
        self.folded = EvidenceTally(claims.partition, "folded")
        self.linked = EvidenceTally(claims.partition, "linked")
        self.proof = PartitionProof()

    def prove(self) -> PartitionProof:
        """Read everything, and give evidence of every promise."""
        claims = self.claims
        if claims.rows_in_table is not None:
            differences = check_record_count(claims.partition, claims.account, claims.rows_in_table)
            self._add_differences(differences)
        if claims.counts_sessions:
            self._count_sessions()
        if self.row_reader is None and claims.checks_files:
            for _ in self._names_in_state(ScanRequest()):
                pass  # The files are compared while their sessions are read.
        try:
            for number in range(claims.round_count):
                self._read_round(number)
        except DifferenceError as error:
            # A state that cannot be read says more than the differences that come of it.
            self.folded = EvidenceTally(claims.partition, "folded")
            self.folded.add(error.difference)
        tallies = [self.counted, self.unique]
        if self.row_reader is not None:
            tallies.append(self.folded)
            if self.row_reader.row_key_spec.has_before_images:
                tallies.append(self.linked)
        self.proof.evidence = [tally.evidence for tally in tallies]
        return self.proof

    def _add_differences(self, differences: Iterable[Difference]) -> None:
        tallies = {"counted": self.counted, "unique": self.unique}
        for difference in differences:
            ensure(
                difference.promise in tallies,
                "what breaks a rule about files is counted or unique",
                description=difference.description,
                found=difference.promise,
            )
            tallies[difference.promise].add(difference)

    def _count_sessions(self) -> None:
        """All sessions of the state; as many are in quarantine as the ledger says."""
        account = self.claims.account
        quarantined = 0
        for _, session in self.prover.state.all_sessions(account.state, with_rows=False):
            self.proof.sessions += 1
            quarantined += session.finding is not None
        if quarantined != account.quarantined:
            difference = Difference(
                description="the ledger counts other sessions in quarantine than the state has",
                promise="counted",
                partition=str(self.claims.partition),
                expected=str(account.quarantined),
                found=str(quarantined),
                next=RESTORE_LOG_ADVICE,
            )
            self.counted.add(difference)

    def _read_round(self, number: int) -> None:
        """Read the record files, and fold the sessions of one bucket, or of all if one round is
        enough.
        """
        claims = self.claims
        is_first_round = number == 0
        bucket = (number, claims.round_count) if claims.round_count > 1 else None
        if self.row_reader is None and not claims.checks_files:
            return
        request = ScanRequest(
            first_offsets=claims.first_offsets,
            row_key_spec=self.row_reader.row_key_spec if self.row_reader is not None else None,
            bucket=bucket,
            # The files are read again in every round, and they are to be compared only once.
            with_outlines=claims.checks_files and is_first_round,
        )
        files = [committed_file.file for committed_file in claims.record_files]
        scanned = self.prover.record_scanner.scan(files, request)
        if is_first_round:
            self.proof.records = scanned.new_rows
            outlines = list(zip(claims.record_files, scanned.outlines, strict=False))
            for committed_file, outline in outlines:
                self._add_differences(check_content(committed_file, outline))
            self._add_differences(check_overlaps(outlines))
        if self.row_reader is not None:
            rows = FoldedRows()
            self._check_links(self.row_reader, rows, scanned)
            self._fold_rows(self.row_reader, rows, scanned.last_rows)
            self._compare_with_state(self.row_reader, rows, request)

    def _check_links(
        self, row_reader: StateRowReader, rows: FoldedRows, scanned: ScannedRecords
    ) -> None:
        """Compare before-images with the rows as they were, before the records are folded."""
        if not row_reader.row_key_spec.has_before_images:
            return
        if scanned.unlinked_rows:
            difference = self._unlinked_difference(
                scanned.unlinked_offset, "the row before it in the records", "another one"
            )
            self.linked.add(difference, count=scanned.unlinked_rows, files=scanned.unlinked_files)
        for images in _chunks(scanned.first_rows):
            self._load_sessions(row_reader, rows, images)
            for image in images:
                row = rows.row(image)
                if not same_rows(image.row, row):
                    difference = self._unlinked_difference(
                        image.offset, row_reader.describe(row), row_reader.describe(image.row)
                    )
                    path = self._path_of_offset(image.offset)
                    self.linked.add(replace(difference, session=image.session), files=path)

    def _unlinked_difference(self, offset: int, expected: str, found: str) -> Difference:
        return Difference(
            description="a before-image is not the row as it was",
            promise="linked",
            partition=str(self.claims.partition),
            offset=offset,
            expected=expected,
            found=found,
            cause="expected: the row by the records and the state before; found: in the record",
            next="keep the files and report this as a bug; the before-images are right again after"
            " the session's next snapshot",
        )

    def _path_of_offset(self, offset: int) -> list[str]:
        """The record file that has an offset."""
        for committed_file in self.claims.record_files:
            file = committed_file.file
            if file.first_offset <= offset <= file.last_offset:
                return [file.path]
        return []

    def _fold_rows(
        self, row_reader: StateRowReader, rows: FoldedRows, images: Iterable[RowImage]
    ) -> None:
        """Fold the last records of rows over the base."""
        for chunk in _chunks(images):
            self._load_sessions(row_reader, rows, chunk)
            for image in chunk:
                rows.fold(image)

    def _load_sessions(
        self, row_reader: StateRowReader, rows: FoldedRows, images: Sequence[RowImage]
    ) -> None:
        """Load the sessions of these images as they are in the base."""
        sessions = {(image.topic_id, image.session) for image in images}
        self._load_base(row_reader, rows, sessions - rows.tables.keys())

    def _load_base(
        self, row_reader: StateRowReader, rows: FoldedRows, sessions: Iterable[TopicSession]
    ) -> None:
        """Load these sessions as they are in the base. Those of another topic id have no rows there."""
        base = self.claims.base
        names: list[str] = []
        for topic_id, name in sessions:
            rows.put_session((topic_id, name), {})
            if topic_id == base.topic_id:
                names.append(name)
        for name, session in self.prover.state.load(base.state, names).items():
            rows.put_session((base.topic_id, name), self._rows_of(row_reader, name, session))

    def _rows_of(self, row_reader: StateRowReader, name: str, session: Session) -> RowsByKey:
        """The rows in the state of a session. Raises `DifferenceError` if it cannot be read."""
        try:
            return row_reader.rows_of(session)
        except Exception as error:
            # A user's `upgrade` or `end` may raise anything. Of our own code only what msgspec
            # raises is expected.
            if row_reader.is_exact and not isinstance(error, msgspec.MsgspecError):
                raise
            raise DifferenceError(
                Difference(
                    description="a session's state cannot be read",
                    promise="folded",
                    partition=str(self.claims.partition),
                    session=name,
                    found=str(error),
                    next="check that the stream file has the columns and the key it had when it was"
                    " run",
                )
            ) from None

    def _compare_with_state(
        self, row_reader: StateRowReader, rows: FoldedRows, request: ScanRequest
    ) -> None:
        """Compare the sessions of a bucket with their state.

        1. Sessions that the state files since the base have, if all their rows are known.
        2. Sessions that records touched.
        3. Sessions of a topic that was deleted: they have no state any more.
        """
        account = self.claims.account
        # 1. Sessions of new state files.
        if row_reader.is_exact:
            for chunk in _chunks(self._names_in_state(request)):
                self._compare_sessions(row_reader, rows, chunk)
        # 2. Sessions of records. The comparison takes sessions out, so these are those that are
        # left.
        touched = [name for topic_id, name in rows.tables if topic_id == account.topic_id]
        for chunk in _chunks(touched):
            self._compare_sessions(row_reader, rows, chunk)
        # 3. Sessions of other topic ids.
        for topic_session in list(rows.tables):
            self._compare_session(row_reader, rows, topic_session, {})

    def _names_in_state(self, request: ScanRequest) -> Iterator[str]:
        """The sessions of the requested bucket that the state files since the base have, each once.

        If files are outlined, each is compared with its entry when all of it was read.
        """
        # Only those of the bucket: a partition may have more sessions than fit into memory.
        seen_names: set[str] = set()
        for state_file in self.claims.state_files:
            contents = StateFileContents()
            state_files = [state_file.file]
            for name, session in self.prover.state.all_sessions(state_files, with_rows=False):
                contents.add(session)
                is_asked_for = request.bucket is None or request.includes_session(name)
                if is_asked_for and name not in seen_names:
                    seen_names.add(name)
                    yield name
            if request.with_outlines:
                self._add_differences(check_state_file(state_file, contents))

    def _compare_sessions(
        self, row_reader: StateRowReader, rows: FoldedRows, names: Sequence[str]
    ) -> None:
        """Compare sessions of the present topic id with their state."""
        account = self.claims.account
        topic_sessions = {(account.topic_id, name): None for name in names}
        self._load_base(row_reader, rows, topic_sessions.keys() - rows.tables.keys())
        sessions = self.prover.state.load(account.state, names)
        for topic_session in topic_sessions:
            name = topic_session[1]
            state_rows: RowsByKey = {}
            if name in sessions:
                self._check_rows_summary(name, sessions[name])
                state_rows = self._rows_of(row_reader, name, sessions[name])
            self._compare_session(row_reader, rows, topic_session, state_rows)

    def _check_rows_summary(self, name: str, session: Session) -> None:
        """What the head of a session says of its rows is what its rows are. A repair compares sessions by
        it, without reading their rows.
        """
        summary = session.rows_summary
        if summary is None or session.state_bytes is None:
            return
        count, digest = summarize_state_bytes(session.state_bytes)
        if count == summary.count and digest == summary.digest:
            return
        difference = Difference(
            description="a session has other rows than its head says",
            promise="folded",
            partition=str(self.claims.partition),
            session=name,
            expected=f"{summary.count} rows with digest {summary.digest.hex()}",
            found=f"{count} rows with digest {digest.hex()}",
            next="keep both and report this as a bug; the session is right again after its"
            " next snapshot",
        )
        self.folded.add(difference)

    def _compare_session(
        self,
        row_reader: StateRowReader,
        rows: FoldedRows,
        topic_session: TopicSession,
        state_rows: RowsByKey,
    ) -> None:
        for row, state_row, offset in rows.take_differences(topic_session, state_rows):
            difference = Difference(
                description="the state is not what its records make",
                promise="folded",
                partition=str(self.claims.partition),
                offset=offset,
                session=topic_session[1],
                expected=row_reader.describe(row),
                found=row_reader.describe(state_row),
                cause="expected: by folding the records; found: in the state files",
                next="keep both and report this as a bug; the session is right again after its"
                " next snapshot",
            )
            if not row_reader.is_exact:
                # The rows that a user's `end` takes back may be more than there are: only missing
                # rows are a difference then.
                if state_row is not None:
                    continue
                difference = replace(
                    difference,
                    description="the state lacks a row that its records make",
                    found="`end` of the machine does not take it back",
                    cause="the state lost the row, or the machine's `end` does not name every row",
                    next="let `end` take back every row of the state; then"
                    f" `seriatim repair {{stream}} --partition {self.claims.partition}`"
                    " folds the session again",
                )
            self.folded.add(difference)


def _chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Items in lists of at most `SESSIONS_AT_ONCE`, in order."""
    remaining = iter(items)
    chunk = list(islice(remaining, SESSIONS_AT_ONCE))
    while chunk:
        yield chunk
        chunk = list(islice(remaining, SESSIONS_AT_ONCE))
