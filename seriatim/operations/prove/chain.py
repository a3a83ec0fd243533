"""The rules of verify about the Delta log, the entries of the ledger and the witness.

All values come in as they were read anew. Nothing here relies on what a run remembered. A rule
returns the differences that it finds, in order. This module is pure.

Next: operations/prove/rules.py has the rules about files; operations/prove/verify.py reads, and
applies them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import Certificate, File
from seriatim.engine.records import MAIN_TABLE, table_of_path
from seriatim.ledger.entries import (
    AcceptEntry,
    CompactEntry,
    Entry,
    HoldEntry,
    ReleaseEntry,
    RepairEntry,
    RetireEntry,
    VerdictEntry,
)
from seriatim.ledger.manifests import Manifest, UnreadableWitnessError, decode_witness
from seriatim.ledger.model import Account, Change, Ledger, state_files_after
from seriatim.operations.prove.difference import RESTORE_ADVICE, RESTORE_LOG_ADVICE, Difference

STANDING_ENTRIES = (HoldEntry, ReleaseEntry, RetireEntry, VerdictEntry, CompactEntry)
"""Types of entries that do not move a partition."""


class AddedFile(Struct, frozen=True, kw_only=True):
    """A file as a Delta commit adds it."""

    path: str
    size: int = -1
    rows: int = -1
    first_offset: int = -1
    last_offset: int = -1
    partition_values: dict[str, str | None] = field(default_factory=dict)


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


class RuleCheck(NamedTuple):
    """One rule about the ledger, with the two values that must be equal."""

    description: str
    """What is wrong if they are not."""
    expected: object
    actual: object


def check_chain(commits: Iterable[Commit]) -> Iterator[Difference]:
    """The log has every version, and each entry names the one before it by its hash."""
    next_version = 0
    previous_signature = CommitSignature(-1, "", "", "")
    for commit in commits:
        if commit.version != next_version:
            yield Difference(
                description="a commit of the Delta log is missing",
                file=_commit_path(next_version),
                next=RESTORE_ADVICE,
            )
        if commit.read_error:
            yield Difference(
                description="a commit cannot be read",
                file=_commit_path(commit.version),
                found=commit.read_error,
                next=RESTORE_ADVICE,
            )
        next_version = commit.version + 1
        if commit.signature is not None:
            yield from _check_signature(commit, commit.signature, previous_signature)
            previous_signature = commit.signature


def _check_signature(
    commit: Commit, signature: CommitSignature, previous: CommitSignature
) -> Iterator[Difference]:
    """An entry follows the one before it, and names its manifest and its transaction."""
    expected_entry = _describe_entry(previous.sequence + 1, previous.sha256)
    actual_entry = _describe_entry(signature.sequence, signature.previous)
    manifest_path = f"manifests/{signature.sequence:010d}-{signature.sha256}.json.zst"
    checks = [
        RuleCheck("the chain of entries is broken", expected_entry, actual_entry),
        RuleCheck(
            "an entry names a manifest of another name than its own",
            manifest_path,
            signature.manifest,
        ),
        RuleCheck(
            "a commit's transaction is of another entry",
            str(signature.sequence),
            str(commit.transaction),
        ),
    ]
    for check in checks:
        if check.expected != check.actual:
            yield Difference(
                description=check.description,
                file=_commit_path(commit.version),
                sequence=signature.sequence,
                expected=str(check.expected),
                found=str(check.actual),
                next=RESTORE_LOG_ADVICE,
            )


def _describe_entry(sequence: int, previous_sha256: str) -> str:
    return f"entry {sequence} after {previous_sha256 or 'nothing'}"


def _commit_path(version: int) -> str:
    return f"records/_delta_log/{version:020d}.json"


def check_witness(
    witness: bytes | None, signatures: Mapping[int, CommitSignature]
) -> Iterator[Difference]:
    """The entry that head.json remembers is in the ledger."""
    last_sequence = max(signatures, default=-1)
    if witness is None:
        # The first entry is committed before the witness is written for the first time.
        if last_sequence > 0:
            yield Difference(
                description="the witness is missing",
                file="head.json",
                level="warning",
                next="without head.json a ledger that is rolled back is not noticed; the next run"
                " writes it again",
            )
        return
    try:
        seen = decode_witness(witness)
    except UnreadableWitnessError:
        yield Difference(
            description="the witness cannot be read", file="head.json", next=RESTORE_ADVICE
        )
        return
    sequence = seen.sequence
    if sequence not in signatures:
        yield Difference(
            description="the witness has seen an entry that the ledger has not",
            file="head.json",
            sequence=sequence,
            expected=f"an entry up to {last_sequence}",
            found=f"entry {sequence}",
            cause="the records table was rolled back, or the witness was changed",
            next=RESTORE_LOG_ADVICE,
        )
    elif seen.sha256 != signatures[sequence].sha256:
        yield Difference(
            description="the witness has seen another entry than the ledger has",
            file="head.json",
            sequence=sequence,
            expected=signatures[sequence].sha256,
            found=seen.sha256,
            next=RESTORE_LOG_ADVICE,
        )


def replay_expected_files(commits: Iterable[Commit]) -> dict[str, AddedFile]:
    """The files of the table by the entries of the ledger, and by rewrites of other programs."""
    files: dict[str, AddedFile] = {}
    for commit in commits:
        # A commit by another program that changes data is not expected: its files show as
        # differences in `check_table_files`.
        if commit.signature is None and not commit.is_rewrite:
            continue
        for path in commit.removes:
            files.pop(path, None)
        for added in commit.adds:
            files[added.path] = added
    return files


def replay_active_files(commits: Iterable[Commit]) -> set[str]:
    """The files of the table by all its commits."""
    paths: set[str] = set()
    for commit in commits:
        paths.difference_update(commit.removes)
        paths.update(added.path for added in commit.adds)
    return paths


def check_table_files(
    expected_paths: Iterable[str], active_paths: Iterable[str], reader_paths: Iterable[str]
) -> Iterator[Difference]:
    """The table has exactly the files that entries added and did not remove, and readers see the
    same files.
    """
    expected = set(expected_paths)
    active = set(active_paths)
    visible = set(reader_paths)
    for path in sorted(active - expected):
        yield Difference(
            description="the table has a file that no entry added",
            file=path,
            next="find who wrote to the records table beside Seriatim, and take that commit back",
        )
    for path in sorted(expected - active):
        yield Difference(
            description="the table lacks a file that an entry added",
            file=path,
            next="find who removed it from the records table beside Seriatim, and take that commit"
            " back",
        )
    # Readers begin with a checkpoint, which is a file of its own: it can disagree with the commits.
    for path in sorted(visible ^ active):
        description = "readers do not see a file"
        if path in visible:
            description = "readers see a file that the commits do not have"
        yield Difference(
            description=description,
            file=path,
            cause="a checkpoint of the Delta log does not agree with its commits",
            next="delete records/_delta_log/*.checkpoint.parquet and _last_checkpoint: they are"
            " made of the commits",
        )


def check_rewrites(commits: Iterable[Commit]) -> Iterator[Difference]:
    """A commit that says it changed no data adds as many rows as it removes."""
    rows_by_path: dict[str, int] = {}
    for commit in commits:
        for added in commit.adds:
            rows_by_path[added.path] = added.rows
        if not commit.is_rewrite:
            continue
        removed_rows = sum(rows_by_path.get(path, 0) for path in commit.removes)
        added_rows = sum(added.rows for added in commit.adds)
        if removed_rows != added_rows:
            yield Difference(
                description="somebody rewrote files of the table, and rows were lost or came in",
                file=_commit_path(commit.version),
                expected=f"{removed_rows} rows",
                found=f"{added_rows} rows",
                next="find who rewrote the records table, and take that commit back",
            )


def check_manifest(
    signature: CommitSignature, commit: Commit, manifest: Manifest, stream: str
) -> Iterator[Difference]:
    """A manifest belongs to its entry, and the commit adds and removes what the manifest says."""
    entry = manifest.entry
    sequence = signature.sequence
    files = {file.path: file for change in entry.changes for file in change.records}
    added_files = {added.path: added for added in commit.adds}
    removed_paths = [path for path in entry.removed_paths if table_of_path(path) == MAIN_TABLE]
    checks = [
        RuleCheck("a manifest is of another entry", sequence, entry.sequence),
        RuleCheck("a manifest is of another entry", sequence, manifest.ledger.sequence),
        RuleCheck("a manifest follows another entry", signature.previous, entry.previous),
        RuleCheck("a manifest is of another stream", stream, manifest.ledger.stream),
        RuleCheck(
            "a commit adds other files than its manifest says", sorted(files), sorted(added_files)
        ),
        RuleCheck(
            "a commit removes other files than its manifest says",
            sorted(removed_paths),
            sorted(commit.removes),
        ),
    ]
    for check in checks:
        if check.expected != check.actual:
            yield Difference(
                description=check.description,
                file=signature.manifest,
                sequence=sequence,
                expected=str(check.expected),
                found=str(check.actual),
                next=RESTORE_ADVICE,
            )
    for path, file in files.items():
        if path in added_files:  # Otherwise the comparison of the paths has found it already.
            yield from _check_added_file(file, added_files[path], sequence)


def check_base(
    signature: CommitSignature, manifest: Manifest, signatures: Mapping[int, CommitSignature]
) -> Iterator[Difference]:
    """The base of a partial manifest is the manifest of an earlier entry of this ledger."""
    base = manifest.base
    if base is None:
        return
    base_signature = signatures.get(base.sequence)
    expected = "an entry before it"
    if base_signature is not None and base.sequence < signature.sequence:
        expected = base_signature.manifest
    if base.path != expected:
        yield Difference(
            description="a manifest is based on one that is not of an entry before it",
            file=signature.manifest,
            sequence=signature.sequence,
            expected=expected,
            found=base.path,
            next=RESTORE_ADVICE,
        )


def _check_added_file(file: File, added: AddedFile, sequence: int) -> Iterator[Difference]:
    """A commit says the same of a file as its manifest."""
    expected = (file.size_bytes, file.rows, file.first_offset, file.last_offset)
    actual = (added.size, added.rows, added.first_offset, added.last_offset)
    if expected != actual:
        yield Difference(
            description="a commit says something else of a file than its manifest"
            " (bytes, rows, first, last offset)",
            file=file.path,
            sequence=sequence,
            expected=str(expected),
            found=str(actual),
            next=RESTORE_LOG_ADVICE,
        )


def check_ledger_step(manifest: Manifest, previous_ledger: Ledger) -> Iterator[Difference]:
    """The ledger in a manifest is what its entry makes of the ledger before it, and certificates
    join without a hole.
    """
    entry = manifest.entry
    ledger = manifest.ledger
    changes = {str(change.partition): change for change in entry.changes}
    for partition_name in sorted({*previous_ledger.partitions, *ledger.partitions, *changes}):
        checks = _partition_rules(
            entry,
            changes.get(partition_name),
            previous_ledger.partitions.get(partition_name),
            ledger.partitions.get(partition_name),
        )
        for check in checks:
            if check.expected != check.actual:
                yield Difference(
                    description=check.description,
                    partition=partition_name,
                    sequence=entry.sequence,
                    expected=str(check.expected),
                    found=str(check.actual),
                    cause="the ledger's account of this partition does not add up",
                    next=f"report this as a bug, with the manifest of entry {entry.sequence}",
                )


def _partition_rules(
    entry: Entry,
    change: Change | None,
    account_before: Account | None,
    account_after: Account | None,
) -> Iterator[RuleCheck]:
    """What one entry may do to the account of one partition."""
    if account_after is None:
        yield RuleCheck("a partition has left the ledger", "an account", "none")
    elif change is None or isinstance(entry, STANDING_ENTRIES):
        yield from _standing_rules(entry, change, account_before, account_after)
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
    )


def _standing_rules(
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
    yield RuleCheck("a slice does not begin at the frontier", frontier, change.frontier)
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
    yield RuleCheck(
        "a certificate is of another range",
        (str(change.partition), change.epoch, change.frontier, change.until),
        (str(certificate.partition), certificate.epoch, certificate.start, certificate.until),
    )
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
    )
    files = list(change.records)
    for other_files in change.other_records.values():
        files += other_files
    for file in files:
        is_inside = change.frontier <= file.first_offset <= file.last_offset < change.until
        yield RuleCheck(f"{file.path} has offsets outside its certificate", True, is_inside)


def _row_count(files: Iterable[File]) -> int:
    return sum(file.rows for file in files)
