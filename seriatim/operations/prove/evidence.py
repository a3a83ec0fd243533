"""Evidence: promises that no stock expectation can say, one row per partition and promise, for a
suite to assert on.

dense     certificates account for every offset from the frontier before to the frontier after
counted   the partition's record files hold as many records as the ledger says unique    each record
is there once, in order, in a file of its own partition folded    folding the new records over the
old state gives the new state (stock machine) linked    each before-image is the row as it was
(stock machine, `before = true`)

Pure: a `RecordScanner` reads the files and gives their new rows as parts.

Next room: check.py makes a verdict of what suites say; operations/prove/check.py gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol
from zlib import crc32

from msgspec import Struct, field

from seriatim.engine.offsets import Partition
from seriatim.ledger.model import Account, Certificate, Change, Entry, File
from seriatim.operations.prove.rules import Row, normalize_row

RowsByKey = Mapping[Any, Row]
LoadRows = Callable[[str, list[str]], dict[str, RowsByKey]]
"""Rows of these sessions of a life, as they were before."""


class Evidence(Struct, frozen=True, kw_only=True):
    """One promise about one partition: whether it holds, and where it does not."""

    partition: Partition
    promise: str
    broken_count: int = 0
    """How often it does not hold."""
    offset: int = -1
    """The first place where it does not."""
    expected: str = ""
    found: str = ""
    files: tuple[str, ...] = ()
    """Record files to blame; none: not known."""

    @property
    def holds(self) -> bool:
        """Whether it does."""
        return not self.broken_count

    def to_row(self) -> dict[str, Any]:
        """As a row of the evidence frame."""
        return {
            "topic": self.partition.topic,
            "partition": self.partition.number,
            "promise": self.promise,
            "holds": self.holds,
            "broken": self.broken_count,
            "offset": self.offset,
        }


class EvidenceRequest(Struct, frozen=True, kw_only=True):
    """What is asked of a record file."""

    partition: Partition
    first_new_offsets: dict[str, int]
    """By topic id: the first offset that is new. Records of other lives are left out."""
    key_columns: tuple[str, ...] = ()
    """Of the stock machine; none: its rows are not asked for."""
    columns: tuple[str, ...] = ()
    has_before_images: bool = False
    bucket: tuple[int, int] = (0, 1)
    """Rows of the sessions whose name falls into this one of so many."""


class PartitionEvidence(Struct, kw_only=True):
    """New rows of a record file, in order, as far as the promises need them."""

    new_rows: int = 0
    total_rows: int = 0
    """Rows of the file that were passed, new or not."""
    disorder_offset: int = -1
    """The offset of the first row that does not come after the one before it."""
    foreign_offset: int = -1
    """The offset of the first row of another topic or partition."""
    offset_spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By topic id: first and last offset."""
    first_rows: list[tuple[str, str, Any, Row | None, int]] = field(default_factory=list)
    """Rows of sessions as they are met: topic id, session, key, before-image (None: there was no
    row), offset.
    """
    last_rows: list[tuple[str, str, Any, Row | None, int]] = field(default_factory=list)
    """The same as this part leaves them: topic id, session, key, row (None: deleted), offset."""
    unlinked_rows: int = 0
    """Rows whose before-image is not the row before them in this part."""
    unlinked_offset: int = -1


class RecordScanner(Protocol):
    """Committed record files, read again a part at a time. Raises `UnreadableFileError` (ports.py)."""

    def scan(self, file: File, request: EvidenceRequest) -> Iterator[PartitionEvidence]: ...


def dense_evidence(
    partition: Partition,
    before: Account | None,
    changes: Iterable[tuple[Entry, Change]],
    after: Account,
) -> Evidence:
    """Certificates join from the frontier before to the one now; a repair or a new life begins
    where it says.
    """
    broken: list[tuple[int, str, str]] = []
    at, life = (before.frontier, before.topic_id) if before else (-1, "")
    for entry, change in changes:
        if entry.kind != "slice":
            at, life = (change.until if entry.kind in ("repair", "accept") else at), change.topic_id
            continue
        begins = at if life == change.topic_id else change.frontier
        certificate = change.certificate
        if (
            certificate is None
            or certificate.start != begins
            or _accounted_offsets(certificate) != _range_length(certificate)
        ):
            found = (
                "none"
                if certificate is None
                else f"[{certificate.start}, {certificate.until}) and {_accounted_offsets(certificate)} offsets"
            )
            broken.append((begins, f"a certificate for every offset from {begins} on", found))
        at, life = change.until, change.topic_id
    if at != after.frontier:
        broken.append((at, f"certificates up to the frontier {after.frontier}", f"up to {at}"))
    first = broken[0] if broken else (-1, "", "")
    return Evidence(
        partition=partition,
        promise="dense",
        broken_count=len(broken),
        offset=first[0],
        expected=first[1],
        found=first[2],
    )


def _accounted_offsets(certificate: Certificate) -> int:
    return certificate.counts.messages + sum(certificate.holes.values())


def _range_length(certificate: Certificate) -> int:
    return certificate.until - certificate.start


class RecordFilesCheck:
    """A partition's record files as they are read: counted, unique, in order."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.new_rows = 0
        self.miscounted_files: list[tuple[File, int]] = []
        self.misplaced_rows: list[tuple[File, int, str]] = []
        self._last_offsets: dict[str, tuple[int, File]] = {}

    def check_parts(
        self, file: File, evidence_parts: Iterable[PartitionEvidence]
    ) -> Iterator[PartitionEvidence]:
        """Pass a file's parts on, and look at them. Files come by their first offset."""
        every, spans = 0, dict[str, tuple[int, int]]()
        for part in evidence_parts:
            every += part.total_rows
            self.new_rows += part.new_rows
            for offset, what in (
                (part.disorder_offset, "out of order, or twice"),
                (part.foreign_offset, "of another partition"),
            ):
                if offset >= 0:
                    self.misplaced_rows.append((file, offset, what))
            for life, (first, last) in part.offset_spans.items():
                spans[life] = (spans[life][0] if life in spans else first, last)
            yield part
        if every != file.rows:
            self.miscounted_files.append((file, every))
        for life, (first, last) in spans.items():
            if life in self._last_offsets and first <= self._last_offsets[life][0]:
                self.misplaced_rows.append(
                    (file, first, f"also in {self._last_offsets[life][1].path}")
                )
            self._last_offsets[life] = (last, file)

    def evidence(self, total_records: int, account: Account) -> Iterator[Evidence]:
        """Counted and unique. `total`: the records of all files of the partition, of which the
        ledger has the sum.
        """
        expected, found, count = (
            f"{account.records} records in all",
            f"{total_records} in the table's files",
            abs(total_records - account.records),
        )
        if self.miscounted_files and not count:
            file, seen = self.miscounted_files[0]
            expected, found, count = (
                f"{file.rows} records in {file.path}",
                f"{seen}",
                abs(file.rows - seen),
            )
        yield Evidence(
            partition=self.partition,
            promise="counted",
            broken_count=count,
            expected=expected if count else "",
            found=found if count else "",
            files=tuple(file.path for file, _ in self.miscounted_files),
        )
        first = self.misplaced_rows[0] if self.misplaced_rows else None
        yield Evidence(
            partition=self.partition,
            promise="unique",
            broken_count=len(self.misplaced_rows),
            offset=first[1] if first else -1,
            expected="each record once, in order" if first else "",
            found=f"a record {first[2]}" if first else "",
            files=tuple(dict.fromkeys(file.path for file, _, _ in self.misplaced_rows)),
        )


class RowFold:
    """New records folded over the rows as they were."""

    def __init__(
        self, column_names: Iterable[str], load_rows: LoadRows, *, has_before_images: bool
    ) -> None:
        self.column_names, self.load_rows, self.has_before_images = (
            list(column_names),
            load_rows,
            has_before_images,
        )
        self.tables: dict[tuple[str, str], dict[Any, tuple[Row, int]]] = {}
        self.unlinked_rows, self.unlinked_offset, self.first_broken_link = 0, -1, ("", "")
        self.difference_count, self.difference_offset, self.first_difference = 0, -1, ("", "")
        self.files_by_promise: dict[str, set[str]] = {"linked": set(), "folded": set()}

    def fold_part(self, evidence_part: PartitionEvidence, path: str) -> None:
        """Fold a part."""
        self.load_sessions({(life, session) for life, session, _, _, _ in evidence_part.first_rows})
        if self.has_before_images:
            self._check_links(evidence_part, path)
        for life, session, key, row, offset in evidence_part.last_rows:
            if row is None:
                self.tables[life, session].pop(key, None)
            else:
                self.tables[life, session][key] = (row, offset)

    def load_sessions(self, sessions: set[tuple[str, str]]) -> None:
        """Have these sessions, by topic id, as they were before."""
        by_life: dict[str, list[str]] = {}
        for life, name in sessions - self.tables.keys():
            by_life.setdefault(life, []).append(name)
        for life, names in by_life.items():
            was = self.load_rows(life, names)
            for name in names:
                self.tables[life, name] = {key: (row, -1) for key, row in was.get(name, {}).items()}

    def _check_links(self, evidence_part: PartitionEvidence, path: str) -> None:
        if evidence_part.unlinked_rows:
            self._record_broken_link(
                evidence_part.unlinked_rows,
                evidence_part.unlinked_offset,
                path,
                ("the row before it in the records", "another one"),
            )
        for life, session, key, before, offset in evidence_part.first_rows:
            was = self.tables[life, session].get(key)
            if not same_rows(before, was[0] if was else None):
                row = was[0] if was else None
                self._record_broken_link(
                    1, offset, path, (self.describe_row(row), self.describe_row(before))
                )

    def _record_broken_link(
        self, count: int, offset: int, path: str, link: tuple[str, str]
    ) -> None:
        self.unlinked_rows += count
        self.files_by_promise["linked"].add(path)
        if self.unlinked_offset < 0 or offset < self.unlinked_offset:
            self.unlinked_offset, self.first_broken_link = offset, link

    def compare_with_state(self, topic_id: str, name: str, state_rows: RowsByKey) -> None:
        """Hold a session's rows, as its records make them, against its state. It is done with then."""
        made = self.tables.pop((topic_id, name))
        for key in {*made, *state_rows}:
            row, offset = made.get(key, (None, -1))
            if not same_rows(row, state_rows.get(key)):
                self.difference_count += 1
                if self.difference_count == 1 or 0 <= offset < self.difference_offset:
                    found = f"{self.describe_row(state_rows.get(key))} in session {name[:100]!r}"
                    self.difference_offset, self.first_difference = (
                        offset,
                        (self.describe_row(row), found),
                    )

    def describe_row(self, row: Row | None) -> str:
        """A row for a person."""
        if row is None:
            return "no such row"
        return ", ".join(
            f"{name}={value!r}" for name, value in zip(self.column_names, row, strict=True)
        )[:200]


def row_evidence(
    partition: Partition, row_folds: Iterable[RowFold], files: tuple[str, ...]
) -> Iterator[Evidence]:
    """Folded and linked, of walks through all sessions."""
    row_folds = list(row_folds)
    differ = [walk for walk in row_folds if walk.difference_count]
    first = min(differ, key=lambda walk: walk.difference_offset, default=None)
    yield Evidence(
        partition=partition,
        promise="folded",
        broken_count=sum(walk.difference_count for walk in row_folds),
        offset=first.difference_offset if first else -1,
        expected=first.first_difference[0] if first else "",
        found=first.first_difference[1] if first else "",
        files=files if differ else (),
    )
    if any(walk.has_before_images for walk in row_folds):
        broken = [walk for walk in row_folds if walk.unlinked_rows]
        first = min(broken, key=lambda walk: walk.unlinked_offset, default=None)
        yield Evidence(
            partition=partition,
            promise="linked",
            broken_count=sum(walk.unlinked_rows for walk in row_folds),
            offset=first.unlinked_offset if first else -1,
            expected=first.first_broken_link[0] if first else "",
            found=first.first_broken_link[1] if first else "",
            files=tuple(
                sorted({path for walk in broken for path in walk.files_by_promise["linked"]})
            ),
        )


def in_bucket(name: str, bucket: tuple[int, int]) -> bool:
    """Whether a session's name falls into this one of so many."""
    number, of = bucket
    return of == 1 or crc32(name.encode("utf-8", "surrogatepass")) % of == number


def same_rows(left: Row | None, right: Row | None) -> bool:
    """Whether two rows are the same; a time without a zone is in UTC."""
    return left == right or (
        left is not None and right is not None and normalize_row(left) == normalize_row(right)
    )
