"""The rules of verify about files and their content, and the sign-off: up to where all was right.

Folding the records of a session always gives its state: `RowsOfRecords` does this for machines that
say how. This module is pure.

Next: operations/prove/chain.py has the rules about the ledger; operations/prove/verify.py reads,
and applies them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.records import RowKeySpec, table_directory, table_of_path
from seriatim.ledger.manifests import Manifest
from seriatim.ledger.model import Change, Ledger
from seriatim.ledger.replaced_files import COMPACTED_NAME
from seriatim.operations.prove.chain import Commit, CommitSignature
from seriatim.operations.prove.difference import (
    REPAIR_ADVICE,
    RESTORE_ADVICE,
    RESTORE_LOG_ADVICE,
    Difference,
)
from seriatim.operations.prove.folded_rows import FoldedRows, RowsByKey

RECORD_FILE_NAME = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)-(.+?)\.parquet")
"""Epoch, start and attempt: the names that Seriatim gives."""
MANIFEST_PATH = re.compile(r"manifests/(\d{10,})-[0-9a-f]{64}\.json\.zst")
ORPHAN_OF_DEAD_RUN = (
    "left by a run that crashed or was fenced; no damage, the next run that commits sweeps it"
)
ORPHAN_OF_RUNNING_RUN = (
    "of a run that is at work now, or crashed at the frontier; no damage, a later run sweeps it"
)
ORPHAN_OF_COMPACTION = (
    "of a compaction that is at work now, or crashed; no damage, a later run or compaction sweeps"
    " it"
)
ORPHAN_OF_OTHERS = (
    "not of a name that Seriatim gives: ask who put it there, and delete it if nobody needs it"
)
REBUILD_ADVICE = "`seriatim rebuild {stream}` makes it again from the ledger"
SIGN_OFF_ADVICE = (
    f"{RESTORE_LOG_ADVICE}. If an older ledger\n"
    "is meant (a deliberate restore): `seriatim verify {stream} --all`"
)
ROW_CHARACTERS_MAX = 400
"""How much of a row a difference shows."""


class SignOff(
    Struct, frozen=True, kw_only=True, rename={"log_sha256": "log", "kafka_sequence": "kafka"}
):
    """Up to where everything was looked at and was right."""

    sequence: int = -1
    """The ledger entry; -1: nothing is signed off."""
    sha256: str = ""
    """The hash of the manifest of that entry."""
    version: int = -1
    """The version of the Delta log."""
    log_sha256: str = ""
    """The hash of the bytes of the Delta log up to that version."""
    kafka_sequence: int = -1
    """Up to which entry Kafka was compared too."""
    digest: str = ""
    """The hash of the sign-off itself."""

    def to_bytes(self) -> bytes:
        """The sign-off as it is stored, with a digest of its own."""
        with_digest = replace(self, digest=self._compute_digest())
        return msgspec.json.encode(with_digest, order="deterministic")

    def _compute_digest(self) -> str:
        without_digest = replace(self, digest="")
        return sha256(msgspec.json.encode(without_digest, order="deterministic")).hexdigest()

    @classmethod
    def from_bytes(cls, content: bytes) -> SignOff | None:
        """The sign-off that was stored; None if it was changed since."""
        try:
            sign_off = msgspec.json.decode(content, type=cls)
        except (msgspec.MsgspecError, ValueError):  # Bytes that are no text raise a ValueError.
            return None
        # The second comparison finds changes that decoding ignores, such as additional fields.
        if sign_off.digest == sign_off._compute_digest() and sign_off.to_bytes() == content:
            return sign_off
        return None


def check_sign_off(
    sign_off: SignOff, commits: Mapping[int, Commit], signatures: Mapping[int, CommitSignature]
) -> Iterator[Difference]:
    """What was signed off is still there: the same entry, and the same log before it.

    `commits` are by version, `signatures` by sequence.
    """
    signature = signatures.get(sign_off.sequence)
    commit = commits.get(sign_off.version)
    if signature is None or signature.sha256 != sign_off.sha256:
        yield Difference(
            description=f"entry {sign_off.sequence} is another one than was signed off",
            file="verified.json",
            sequence=sign_off.sequence,
            expected=sign_off.sha256,
            found=signature.sha256 if signature else "no such entry",
            next=SIGN_OFF_ADVICE,
        )
    elif commit is None or commit.log_sha256 != sign_off.log_sha256:
        yield Difference(
            description="the Delta log was changed since it was signed off",
            file="records/_delta_log",
            sequence=sign_off.sequence,
            expected=f"{sign_off.log_sha256} up to version {sign_off.version}",
            found=commit.log_sha256 if commit else "no such version",
            next=SIGN_OFF_ADVICE,
        )


def find_orphans(
    paths: Iterable[str],
    named_paths: set[str],
    ledger: Ledger,
    signed_off_ledger: Ledger | None = None,
) -> Iterator[tuple[str, str]]:
    """Files that nothing names, and what each of them is.

    `signed_off_ledger`: files from before it are left out, because the entries that may name them
    were not read again.
    """
    for path in sorted(set(paths) - named_paths):
        reason = _orphan_reason(path, ledger, signed_off_ledger)
        if reason is not None:
            yield path, reason


def _orphan_reason(path: str, ledger: Ledger, signed_off_ledger: Ledger | None) -> str | None:
    """What a file is that nothing names; None if it is from before the sign-off."""
    manifest_match = MANIFEST_PATH.fullmatch(path)
    if manifest_match is not None:
        return _manifest_orphan_reason(int(manifest_match[1]), ledger, signed_off_ledger)
    folder, _, path_in_folder = path.partition("/")
    partition_name, _, file_name = path_in_folder.rpartition("/")
    account = ledger.partitions.get(partition_name)
    if account is not None and COMPACTED_NAME.fullmatch(file_name):
        # The name of such a file does not say when it was made.
        return ORPHAN_OF_COMPACTION if signed_off_ledger is None else None
    name_match = RECORD_FILE_NAME.fullmatch(file_name)
    if name_match is None or account is None or folder == "manifests":
        return ORPHAN_OF_OTHERS
    position = (int(name_match[1]), int(name_match[2]))
    signed_off_account = None
    if signed_off_ledger is not None:
        signed_off_account = signed_off_ledger.partitions.get(partition_name)
    if signed_off_account is not None:
        signed_off_position = (signed_off_account.epoch, signed_off_account.frontier)
        if position < signed_off_position:
            return None
    is_behind = position < (account.epoch, account.frontier)
    return ORPHAN_OF_DEAD_RUN if is_behind else ORPHAN_OF_RUNNING_RUN


def _manifest_orphan_reason(
    sequence: int, ledger: Ledger, signed_off_ledger: Ledger | None
) -> str | None:
    if signed_off_ledger is not None and sequence <= signed_off_ledger.sequence:
        return None
    return ORPHAN_OF_DEAD_RUN if sequence <= ledger.sequence else ORPHAN_OF_RUNNING_RUN


class FileOutline(Struct, kw_only=True):
    """What a file of records, or of quarantined messages, contains, without its rows."""

    rows: int = 0
    first_offset: int = -1
    last_offset: int = -1
    first_disorder: tuple[int, int] | None = None
    """Offset and index of the first row that does not come after the one before it."""
    early_offset: int = -1
    """The offset of the first record that is older than the message it was made of."""
    topics: set[str] = msgspec.field(default_factory=set)
    topic_ids: set[str] = msgspec.field(default_factory=set)
    partitions: set[int] = msgspec.field(default_factory=set)
    """None of these three if the column is the name of a folder."""
    sessions: set[str] = msgspec.field(default_factory=set)
    distinct_offsets: int = 0
    """How many different offsets there are."""


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


class CommittedFile(Struct, frozen=True):
    """A file, and the entry and the change that name it."""

    file: File
    sequence: int
    change: Change


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
    location: dict[str, Any] = {
        "file": file.path,
        "sequence": committed_file.sequence,
        "partition": str(committed_file.change.partition),
        "next": RESTORE_ADVICE if file.path.startswith("kept/") else REPAIR_ADVICE,
    }
    expected_size = f"{file.size_bytes} bytes"
    if size is None:
        yield Difference(description="a file is missing", expected=expected_size, **location)
        return
    cause = "it was changed after it was committed"
    if digest != file.digest and digest in paths_by_digest:
        cause = (
            f"it has the content of {paths_by_digest[digest]}: the two were swapped, or one was"
            " copied over the other"
        )
    if size != file.size_bytes:
        yield Difference(
            description="a file has another size",
            expected=expected_size,
            found=f"{size} bytes",
            cause=cause,
            **location,
        )
    if digest != file.digest:
        yield Difference(
            description="a file is damaged",
            expected=file.digest,
            found=digest,
            cause=cause,
            **location,
        )
    elif sha256_digest != file.sha256:
        yield Difference(
            description="a file is damaged",
            expected=f"SHA-256 {file.sha256}",
            found=f"SHA-256 {sha256_digest}",
            cause="somebody changed it on purpose: its XXH3-128 is still the one of its entry",
            **location,
        )


class _ContentProblem(Struct, frozen=True):
    """One thing in a file that is not as its entry says."""

    description: str
    expected: object
    actual: object
    offset: int = -1


def check_content(
    committed_file: CommittedFile, outline: FileOutline, *, in_slice: bool, compacted: bool = False
) -> Iterator[Difference]:
    """The content of a file is what its entry says: its partition, its range, in order, and each
    record once.
    """
    problems = [
        *_row_problems(committed_file, outline),
        *_offset_problems(committed_file, outline, in_slice=in_slice),
    ]
    other_topic_ids = outline.topic_ids - {committed_file.change.topic_id}
    if (in_slice or compacted) and other_topic_ids:
        description = "a file has rows of another topic id"
        problems.append(_ContentProblem(description, set(), other_topic_ids))
    for problem in problems:
        yield Difference(
            description=problem.description,
            file=committed_file.file.path,
            partition=str(committed_file.change.partition),
            offset=problem.offset,
            sequence=committed_file.sequence,
            expected=str(problem.expected),
            found=str(problem.actual),
            next="keep this file and report this as a bug: its digest is right, so it was written"
            " like this",
        )


def _row_problems(committed_file: CommittedFile, outline: FileOutline) -> Iterator[_ContentProblem]:
    """Rows that are too many or too few, of another partition, or in the wrong order."""
    partition = committed_file.change.partition
    expected_rows = committed_file.file.rows
    if outline.rows != expected_rows:
        description = "a file has another number of rows"
        yield _ContentProblem(description, expected_rows, outline.rows)
    other_topics = outline.topics - {partition.topic}
    if other_topics:
        yield _ContentProblem("a file has rows of another topic", set(), other_topics)
    other_partitions = outline.partitions - {partition.number}
    if other_partitions:
        yield _ContentProblem("a file has rows of another partition", set(), other_partitions)
    # A quarantined message may have waited in a window: then it comes after the message that
    # brought its session into quarantine, whatever their offsets are.
    if outline.first_disorder is not None and not _is_quarantine_file(committed_file):
        offset, index = outline.first_disorder
        yield _ContentProblem(
            "a record comes twice, or before one that it must follow",
            "offset and index rise",
            f"offset {offset}, index {index}",
            offset,
        )
    if outline.early_offset >= 0:
        yield _ContentProblem(
            "a record has a lower offset than the message it was made of",
            "offset at or after source_offset",
            "before it",
            outline.early_offset,
        )


def _offset_problems(
    committed_file: CommittedFile, outline: FileOutline, *, in_slice: bool
) -> Iterator[_ContentProblem]:
    """Offsets that are not those that the entry says."""
    file = committed_file.file
    change = committed_file.change
    expected_span = (file.first_offset, file.last_offset)
    actual_span = (outline.first_offset, outline.last_offset)
    if file.first_offset >= 0 and actual_span != expected_span:
        yield _ContentProblem(
            "a file has other offsets (first, last)",
            expected_span,
            actual_span,
            outline.first_offset,
        )
    if not in_slice:
        return
    # A quarantined message that waited in a window is older than its slice.
    start = change.initial_frontier if _is_quarantine_file(committed_file) else change.frontier
    if not start <= outline.first_offset <= outline.last_offset < change.until:
        yield _ContentProblem(
            "a file has offsets outside its slice",
            f"offsets in [{change.frontier}, {change.until})",
            f"offsets from {outline.first_offset} to {outline.last_offset}",
            outline.first_offset,
        )


def _is_quarantine_file(committed_file: CommittedFile) -> bool:
    return committed_file.file.path.startswith("kept/")


def check_counts(committed_file: CommittedFile, outline: FileOutline) -> Iterator[Difference]:
    """A certificate counts no fewer messages and sessions than its records come from."""
    certificate = committed_file.change.certificate
    if certificate is None:
        return
    counts = (
        ("messages", outline.distinct_offsets, certificate.counts.messages),
        ("sessions", len(outline.sessions), certificate.sessions),
    )
    for name, least, certified in counts:
        if certified < least:
            yield Difference(
                description=f"a certificate counts fewer {name} than its records come from",
                file=committed_file.file.path,
                partition=str(certificate.partition),
                offset=certificate.start,
                sequence=committed_file.sequence,
                expected=f"at least {least}",
                found=str(certified),
                next="report this as a bug, with this entry's manifest;"
                " `seriatim verify {stream} --kafka` tells more",
            )


def check_state(
    committed_file: CommittedFile, rows: int, touched_sessions: int
) -> Iterator[Difference]:
    """A state file has as many rows as its entry says, and its certificate counts no fewer sessions
    than were touched.
    """
    certificate = committed_file.change.certificate
    location: dict[str, Any] = {
        "file": committed_file.file.path,
        "sequence": committed_file.sequence,
        "partition": str(committed_file.change.partition),
    }
    if rows != committed_file.file.rows:
        yield Difference(
            description="a file has another number of rows",
            expected=str(committed_file.file.rows),
            found=str(rows),
            next=REPAIR_ADVICE,
            **location,
        )
    if certificate is not None and not touched_sessions <= certificate.sessions <= rows:
        yield Difference(
            description="a certificate counts other sessions than its state file has",
            offset=certificate.start,
            expected=f"from {touched_sessions} to {rows}",
            found=str(certificate.sessions),
            next="report this as a bug, with this entry's manifest",
            **location,
        )


class _FileSpan(Struct, frozen=True, order=True):
    """The offsets of a record file. In sorted order, files that may overlap are neighbours."""

    partition_name: str
    topic_ids: list[str]
    first_offset: int
    last_offset: int
    path: str


def check_overlaps(outlines: Iterable[tuple[CommittedFile, FileOutline]]) -> Iterator[Difference]:
    """Active record files of one partition and topic id have no offset in common: each record is
    there once.
    """
    spans: list[_FileSpan] = []
    for committed_file, outline in outlines:
        span = _FileSpan(
            str(committed_file.change.partition),
            sorted(outline.topic_ids),
            outline.first_offset,
            outline.last_offset,
            committed_file.file.path,
        )
        spans.append(span)
    previous: _FileSpan | None = None
    for span in sorted(spans):
        if previous is not None and _overlaps(previous, span):
            yield Difference(
                description="two files of the table have the same offsets",
                file=span.path,
                partition=span.partition_name,
                offset=span.first_offset,
                expected=f"offsets after {previous.last_offset}, the last of {previous.path}",
                found=f"offset {span.first_offset}",
                next=RESTORE_LOG_ADVICE,
            )
        previous = span


def _overlaps(previous: _FileSpan, span: _FileSpan) -> bool:
    if previous.partition_name != span.partition_name or previous.topic_ids != span.topic_ids:
        return False
    return span.first_offset <= previous.last_offset


def other_table_paths(manifests: Iterable[Manifest], until_sequence: int) -> set[str]:
    """The files of a machine's further tables, by the entries up to one of them."""
    paths: set[str] = set()
    for manifest in manifests:
        entry = manifest.entry
        if entry.sequence > until_sequence:
            break
        paths.difference_update(entry.removed_paths)
        for change in entry.changes:
            for files in change.other_records.values():
                paths.update(file.path for file in files)
    return paths


def check_other_tables(
    tables: Mapping[str, tuple[int, set[str]]], manifests: Sequence[Manifest]
) -> Iterator[Difference]:
    """Each further table has the files of the entry that it says it has reached.

    A table that is behind the ledger is no damage. `tables` has, by name, the entry that a table
    has reached and its paths.
    """
    last_sequence = manifests[-1].entry.sequence
    for table, (reached_sequence, actual_paths) in tables.items():
        yield from _check_other_table(table, reached_sequence, actual_paths, manifests)
        if reached_sequence < last_sequence:
            yield Difference(
                description=f"a table is as of entry {reached_sequence}, the ledger is at"
                f" {last_sequence}",
                file=table_directory(table),
                sequence=reached_sequence,
                next="the next run brings it up",
                level="warning",
            )


def _check_other_table(
    table: str, reached_sequence: int, actual_paths: set[str], manifests: Sequence[Manifest]
) -> Iterator[Difference]:
    last_sequence = manifests[-1].entry.sequence
    if not 0 <= reached_sequence <= last_sequence:
        reached = "no entry, or it cannot be read"
        if reached_sequence >= 0:
            reached = f"entry {reached_sequence}"
        yield Difference(
            description="a table names no entry of the ledger",
            file=table_directory(table),
            sequence=reached_sequence,
            found=reached,
            next=REBUILD_ADVICE,
        )
        return
    all_paths = other_table_paths(manifests, reached_sequence)
    expected_paths = {path for path in all_paths if table_of_path(path) == table}
    if actual_paths == expected_paths:
        return
    path = min(actual_paths ^ expected_paths)
    description = "a table has a file that no entry added to it"
    if path in expected_paths:
        description = "a table lacks a file"
    yield Difference(
        description=description, file=path, sequence=reached_sequence, next=REBUILD_ADVICE
    )


class RowsOfRecords(FoldedRows):
    """The rows of a partition's sessions, made of its records alone."""

    def __init__(self, partition_name: str, row_key_spec: RowKeySpec) -> None:
        super().__init__(row_key_spec, separate_topic_ids=False)
        self.partition_name = partition_name

    def find_differences(self, states: Mapping[str, RowsByKey]) -> Iterator[Difference]:
        """Rows of states that are not what the records make."""
        sessions = {session for _, session in self.tables}
        for session in sorted(sessions.union(states)):
            for difference in self.differences(("", session), states.get(session, {})):
                yield Difference(
                    description="the state is not what its records make",
                    partition=self.partition_name,
                    offset=difference.offset,
                    session=session,
                    expected=self.describe_row(difference.row, ROW_CHARACTERS_MAX),
                    found=self.describe_row(difference.state_row, ROW_CHARACTERS_MAX),
                    cause="expected: by folding the records; found: in the state files",
                    next="keep both and report this as a bug; the session is right again after its"
                    " next snapshot",
                )

    def lacking(self, states: Mapping[str, RowsByKey]) -> Iterator[Difference]:
        """Rows that the records make and that a state does not have."""
        for topic_session in sorted(self.tables):
            session = topic_session[1]
            for difference in self.differences(topic_session, states.get(session, {})):
                if difference.state_row is not None:
                    continue
                yield Difference(
                    description="the state lacks a row that its records make",
                    partition=self.partition_name,
                    offset=difference.offset,
                    session=session,
                    expected=self.describe_row(difference.row, ROW_CHARACTERS_MAX),
                    found="`end` of the machine does not take it back",
                    cause="the state lost the row, or the machine's `end` does not name every row",
                    next="let `end` take back every row of the state; then"
                    f" `seriatim repair {{stream}} --partition {self.partition_name}`"
                    " folds the session again",
                )
