"""Evidence: promises that no stock expectation can express, one row per partition and promise, for
a suite to assert on.

- dense: certificates account for every offset from the frontier before to the frontier after.
- counted: the partition's record files hold as many records as the ledger says.
- unique: each record is there once, in order, in a file of its own partition.
- folded: folding the new records over the old state gives the new state (table machine).
- linked: each before-image is the row as it was (table machine, `before = true`).

This module is pure: a `RecordScanner` reads the files and returns their new rows, part by part.

Next: operations/prove/gather_evidence.py gathers evidence; operations/prove/verdict_rules.py makes
a verdict of what suites say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol
from zlib import crc32

from msgspec import Struct, field

from seriatim.engine.files import Certificate, File
from seriatim.engine.offsets import Partition
from seriatim.engine.records import RowImage, RowKeySpec, same_rows
from seriatim.ledger.entries import AcceptEntry, Entry, RepairEntry, SliceEntry
from seriatim.ledger.model import Account, Change
from seriatim.operations.prove.folded_rows import FoldedRows, RowsByKey

ROW_CHARACTERS_MAX = 200
"""How much of a row the evidence shows."""
LoadRows = Callable[[str, list[str]], dict[str, RowsByKey]]
"""The rows of these sessions of a topic id, as they were before."""


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


class EvidenceRequest(Struct, frozen=True, kw_only=True):
    """What is to be read of a record file."""

    partition: Partition
    first_new_offsets: dict[str, int]
    """By topic id: the first offset that is new. Records of other topic ids are left out."""
    row_key_spec: RowKeySpec | None = None
    """How records become rows; None: no rows are returned."""
    bucket: tuple[int, int] = (0, 1)
    """Number and count: only rows of sessions whose name falls into this bucket."""


class PartitionEvidence(Struct, kw_only=True):
    """New rows of a part of a record file, in order, as far as the promises need them."""

    new_rows: int = 0
    total_rows: int = 0
    """Rows of the file that were read, new or not."""
    disorder_offset: int = -1
    """The offset of the first row that does not come after the one before it."""
    foreign_offset: int = -1
    """The offset of the first row of another topic or partition."""
    offset_spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By topic id: first and last offset."""
    first_rows: list[RowImage] = field(default_factory=list)
    """The before-image of each row where this part first meets it."""
    last_rows: list[RowImage] = field(default_factory=list)
    """Each row as this part leaves it."""
    unlinked_rows: int = 0
    """Rows whose before-image is not the row before them in this part."""
    unlinked_offset: int = -1
    """The offset of the first of them."""


class RecordScanner(Protocol):
    """Reads committed record files again, a part at a time. Raises `UnreadableFileError` (ports.py)."""

    def scan(self, file: File, request: EvidenceRequest) -> Iterator[PartitionEvidence]: ...


class _BrokenPromise(Struct, frozen=True):
    """One place where a promise does not hold."""

    offset: int
    expected: str
    actual: str


def dense_evidence(
    partition: Partition,
    before: Account | None,
    changes: Iterable[tuple[Entry, Change]],
    after: Account,
) -> Evidence:
    """Certificates join from the frontier before to the present one.

    After a repair, and where a topic was created again, they begin where that change says.
    """
    broken: list[_BrokenPromise] = []
    offset = -1
    topic_id = ""
    if before is not None:
        offset = before.frontier
        topic_id = before.topic_id
    for entry, change in changes:
        if isinstance(entry, SliceEntry):
            start = offset if topic_id == change.topic_id else change.frontier
            if not _is_dense_from(change.certificate, start):
                broken.append(
                    _BrokenPromise(
                        start,
                        f"a certificate for every offset from {start} on",
                        _describe_certificate(change.certificate),
                    )
                )
        if isinstance(entry, SliceEntry | RepairEntry | AcceptEntry):
            offset = change.until
        topic_id = change.topic_id
    if offset != after.frontier:
        expected = f"certificates up to the frontier {after.frontier}"
        broken.append(_BrokenPromise(offset, expected, f"up to {offset}"))
    if not broken:
        return Evidence(partition=partition, promise="dense")
    return Evidence(
        partition=partition,
        promise="dense",
        broken_count=len(broken),
        offset=broken[0].offset,
        expected=broken[0].expected,
        found=broken[0].actual,
    )


def _is_dense_from(certificate: Certificate | None, start: int) -> bool:
    """Whether a certificate begins at an offset and accounts for every offset of its range."""
    if certificate is None or certificate.start != start:
        return False
    return _accounted_offsets(certificate) == certificate.until - certificate.start


def _accounted_offsets(certificate: Certificate) -> int:
    return certificate.counts.messages + sum(certificate.holes.values())


def _describe_certificate(certificate: Certificate | None) -> str:
    if certificate is None:
        return "none"
    offset_range = f"[{certificate.start}, {certificate.until})"
    return f"{offset_range} and {_accounted_offsets(certificate)} offsets"


class _MisplacedRow(Struct, frozen=True):
    """A record that is out of order, or that is there twice."""

    file: File
    offset: int
    description: str


class RecordFilesCheck:
    """Checks the record files of a partition while they are read: counted, unique, in order."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.new_rows = 0
        self.miscounted_files: list[tuple[File, int]] = []
        """Files with another number of rows than committed, and how many they have."""
        self.misplaced_rows: list[_MisplacedRow] = []
        self._last_offsets: dict[str, tuple[int, File]] = {}
        """By topic id: the last offset so far, and the file that has it."""

    def check_parts(
        self, file: File, evidence_parts: Iterable[PartitionEvidence]
    ) -> Iterator[PartitionEvidence]:
        """Check the parts of a file, and pass them on. Files must come by their first offset."""
        total_rows = 0
        spans: dict[str, tuple[int, int]] = {}
        for evidence_part in evidence_parts:
            total_rows += evidence_part.total_rows
            self.new_rows += evidence_part.new_rows
            self._check_order(file, evidence_part)
            for topic_id, (first_offset, last_offset) in evidence_part.offset_spans.items():
                span_start = spans.get(topic_id, (first_offset, last_offset))[0]
                spans[topic_id] = (span_start, last_offset)
            yield evidence_part
        # The rest is known only at the end of the file, after the caller has taken all parts.
        if total_rows != file.rows:
            self.miscounted_files.append((file, total_rows))
        for topic_id, (first_offset, last_offset) in spans.items():
            self._check_overlap(file, topic_id, first_offset)
            self._last_offsets[topic_id] = (last_offset, file)

    def _check_order(self, file: File, evidence_part: PartitionEvidence) -> None:
        if evidence_part.disorder_offset >= 0:
            self.misplaced_rows.append(
                _MisplacedRow(file, evidence_part.disorder_offset, "out of order, or twice")
            )
        if evidence_part.foreign_offset >= 0:
            self.misplaced_rows.append(
                _MisplacedRow(file, evidence_part.foreign_offset, "of another partition")
            )

    def _check_overlap(self, file: File, topic_id: str, first_offset: int) -> None:
        """A file begins after the end of the file before it."""
        if topic_id not in self._last_offsets:
            return
        previous_offset, previous_file = self._last_offsets[topic_id]
        if first_offset <= previous_offset:
            description = f"also in {previous_file.path}"
            self.misplaced_rows.append(_MisplacedRow(file, first_offset, description))

    def evidence(self, total_records: int, account: Account) -> Iterator[Evidence]:
        """The evidence for counted and unique.

        `total_records` is the number of records in all files of the partition. The ledger has their
        sum.
        """
        yield self._counted_evidence(total_records, account)
        yield self._unique_evidence()

    def _counted_evidence(self, total_records: int, account: Account) -> Evidence:
        expected = ""
        actual = ""
        broken_count = abs(total_records - account.records)
        if broken_count:
            expected = f"{account.records} records in all"
            actual = f"{total_records} in the table's files"
        elif self.miscounted_files:
            file, rows = self.miscounted_files[0]
            broken_count = abs(file.rows - rows)
            expected = f"{file.rows} records in {file.path}"
            actual = f"{rows}"
        return Evidence(
            partition=self.partition,
            promise="counted",
            broken_count=broken_count,
            expected=expected,
            found=actual,
            files=tuple(file.path for file, _ in self.miscounted_files),
        )

    def _unique_evidence(self) -> Evidence:
        if not self.misplaced_rows:
            return Evidence(partition=self.partition, promise="unique")
        paths = dict.fromkeys(misplaced.file.path for misplaced in self.misplaced_rows)
        return Evidence(
            partition=self.partition,
            promise="unique",
            broken_count=len(self.misplaced_rows),
            offset=self.misplaced_rows[0].offset,
            expected="each record once, in order",
            found=f"a record {self.misplaced_rows[0].description}",
            files=tuple(paths),
        )


class RowFold(FoldedRows):
    """Folds new records over the rows as they were before."""

    def __init__(self, row_key_spec: RowKeySpec, load_rows: LoadRows) -> None:
        super().__init__(row_key_spec, separate_topic_ids=True)
        self.load_rows = load_rows
        self.unlinked_rows = 0
        self.unlinked_offset = -1
        self.first_broken_link = ("", "")
        """What was expected and what was there, at `unlinked_offset`."""
        self.difference_count = 0
        self.difference_offset = -1
        self.first_difference = ("", "")
        """What was expected and what was there, at `difference_offset`."""
        self.unlinked_paths: set[str] = set()

    def fold_part(self, evidence_part: PartitionEvidence, path: str) -> None:
        """Fold the rows of one part of a file."""
        sessions = {(image.topic_id, image.session) for image in evidence_part.first_rows}
        self.load_sessions(sessions)
        if self.row_key_spec.has_before_images:
            self._check_links(evidence_part, path)
        self.fold_images(evidence_part.last_rows)

    def load_sessions(self, sessions: set[tuple[str, str]]) -> None:
        """Load the rows of these sessions, by topic id and name, as they were before."""
        names_by_topic_id: dict[str, list[str]] = {}
        for topic_id, name in sessions - self.tables.keys():
            names_by_topic_id.setdefault(topic_id, []).append(name)
        for topic_id, names in names_by_topic_id.items():
            rows_by_session = self.load_rows(topic_id, names)
            for name in names:
                self.put_session((topic_id, name), rows_by_session.get(name, {}))

    def _check_links(self, evidence_part: PartitionEvidence, path: str) -> None:
        """Compare before-images with the rows as they were."""
        if evidence_part.unlinked_rows:
            self._record_broken_link(
                evidence_part.unlinked_rows,
                evidence_part.unlinked_offset,
                path,
                ("the row before it in the records", "another one"),
            )
        for topic_id, session, key, before_image, offset in evidence_part.first_rows:
            row, _ = self.tables[topic_id, session].get(key, (None, -1))
            if not same_rows(before_image, row):
                link = (
                    self.describe_row(row, ROW_CHARACTERS_MAX),
                    self.describe_row(before_image, ROW_CHARACTERS_MAX),
                )
                self._record_broken_link(1, offset, path, link)

    def _record_broken_link(
        self, count: int, offset: int, path: str, link: tuple[str, str]
    ) -> None:
        self.unlinked_rows += count
        self.unlinked_paths.add(path)
        if self.unlinked_offset < 0 or offset < self.unlinked_offset:
            self.unlinked_offset = offset
            self.first_broken_link = link

    def compare_with_state(self, topic_id: str, name: str, state_rows: RowsByKey) -> None:
        """Compare the rows of a session, as its records make them, with its state.

        The session is forgotten afterwards, to hold few rows in memory.
        """
        for difference in self.differences((topic_id, name), state_rows):
            self.difference_count += 1
            offset = difference.offset
            # A row that no new record touched has offset -1, and says less than one with an offset.
            if self.difference_count == 1 or 0 <= offset < self.difference_offset:
                self.difference_offset = offset
                expected = self.describe_row(difference.row, ROW_CHARACTERS_MAX)
                actual = self.describe_row(difference.state_row, ROW_CHARACTERS_MAX)
                self.first_difference = (expected, f"{actual} in session {name[:100]!r}")
        self.tables.pop((topic_id, name), None)


def row_evidence(
    partition: Partition, row_folds: Iterable[RowFold], files: tuple[str, ...]
) -> Iterator[Evidence]:
    """The evidence for folded and linked, from folds that cover all sessions together."""
    row_folds = list(row_folds)
    yield _folded_evidence(partition, row_folds, files)
    if any(row_fold.row_key_spec.has_before_images for row_fold in row_folds):
        yield _linked_evidence(partition, row_folds)


def _folded_evidence(
    partition: Partition, row_folds: list[RowFold], files: tuple[str, ...]
) -> Evidence:
    differing = [row_fold for row_fold in row_folds if row_fold.difference_count]
    if not differing:
        return Evidence(partition=partition, promise="folded")
    earliest = min(differing, key=lambda row_fold: row_fold.difference_offset)
    expected, actual = earliest.first_difference
    return Evidence(
        partition=partition,
        promise="folded",
        broken_count=sum(row_fold.difference_count for row_fold in differing),
        offset=earliest.difference_offset,
        expected=expected,
        found=actual,
        files=files,
    )


def _linked_evidence(partition: Partition, row_folds: list[RowFold]) -> Evidence:
    unlinked = [row_fold for row_fold in row_folds if row_fold.unlinked_rows]
    if not unlinked:
        return Evidence(partition=partition, promise="linked")
    earliest = min(unlinked, key=lambda row_fold: row_fold.unlinked_offset)
    expected, actual = earliest.first_broken_link
    paths: set[str] = set()
    for row_fold in unlinked:
        paths |= row_fold.unlinked_paths
    return Evidence(
        partition=partition,
        promise="linked",
        broken_count=sum(row_fold.unlinked_rows for row_fold in unlinked),
        offset=earliest.unlinked_offset,
        expected=expected,
        found=actual,
        files=tuple(sorted(paths)),
    )


def in_bucket(name: str, bucket: tuple[int, int]) -> bool:
    """Whether the name of a session falls into a bucket, given as number and count."""
    number, count = bucket
    # A name may have lone surrogates, which plain UTF-8 refuses.
    return count == 1 or crc32(name.encode("utf-8", "surrogatepass")) % count == number
