"""The rules of verify about a stream as a whole: the Delta log, the chain of entries, the witness, the
sign-off, the files of its tables, and files that nothing names.

All values come in as they were read anew. Nothing here relies on what a run remembered. A rule
returns the differences that it finds, in order. This module is pure.

Next: operations/prove/partition_rules.py has the rules about one partition;
operations/prove/verify.py reads, and applies them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.records import MAIN_TABLE, table_directory, table_of_path
from seriatim.ledger.manifests import (
    RESTORE_LOG_ADVICE,
    Manifest,
    UnreadableWitnessError,
    decode_witness,
)
from seriatim.ledger.model import Ledger
from seriatim.ledger.replaced_files import COMPACTED_NAME
from seriatim.operations.prove.partition_rules import (
    RESTORE_ADVICE,
    Difference,
    RuleCheck,
    check_step,
)
from seriatim.ports import AddedFile, Commit, CommitSignature

DATA_FILE_NAME = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)-(.+?)\.parquet")
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
    "Seriatim gives no file such a name: ask who put it there, and delete it if nobody needs it"
)
REBUILD_ADVICE = "`seriatim rebuild {stream}` makes it again from the ledger"
SIGN_OFF_ADVICE = (
    f"{RESTORE_LOG_ADVICE}. If an older ledger\n"
    "is meant (a deliberate restore): `seriatim verify {stream} --all`"
)


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
    file = _commit_path(commit.version)
    yield from _broken_rules(checks, file, signature.sequence, RESTORE_LOG_ADVICE)


def _broken_rules(
    checks: Iterable[RuleCheck], file: str, sequence: int, advice: str
) -> Iterator[Difference]:
    """The rules about a file of the ledger that do not hold."""
    for check in checks:
        if check.expected != check.actual:
            yield Difference(
                description=check.description,
                file=file,
                sequence=sequence,
                expected=str(check.expected),
                found=str(check.actual),
                next=advice,
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


def replay_active_files(commits: Iterable[Commit]) -> dict[str, AddedFile]:
    """The files of the table by these commits, as they were added."""
    files: dict[str, AddedFile] = {}
    for commit in commits:
        for path in commit.removes:
            files.pop(path, None)
        for added in commit.adds:
            files[added.path] = added
    return files


def replay_expected_files(commits: Iterable[Commit]) -> dict[str, AddedFile]:
    """The files of the table by the entries of the ledger, and by rewrites of other programs."""
    # A commit by another program that changes data is not expected: its files show as differences
    # in `check_table_files`.
    return replay_active_files(
        commit for commit in commits if commit.signature is not None or commit.is_rewrite
    )


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
    yield from _broken_rules(checks, signature.manifest, sequence, RESTORE_ADVICE)
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
    changes = {str(change.partition): change for change in manifest.entry.changes}
    names = {*previous_ledger.partitions, *manifest.ledger.partitions, *changes}
    for partition_name in sorted(names):
        account_before = previous_ledger.partitions.get(partition_name)
        account_after = manifest.ledger.partitions.get(partition_name)
        change = changes.get(partition_name)
        for check in check_step(manifest.entry, change, account_before, account_after):
            yield check.to_difference(partition_name, manifest.entry.sequence)


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
    name_match = DATA_FILE_NAME.fullmatch(file_name)
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
