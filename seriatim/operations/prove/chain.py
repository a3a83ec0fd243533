"""The chain: what must hold between the Delta log, the ledger's entries and the witness. Pure.

Everything comes in as values that were read anew; nothing here trusts what a run remembered. A rule
gives the differences it sees, the first one first.

Next room: verify.py has the rules about files; operations/prove/verify.py reads and asks them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.record_kinds import MAIN_TABLE, table_of_path
from seriatim.ledger.model import Account, Change, Ledger, Manifest, state_files_after
from seriatim.operations.prove.difference import RESTORE_ADVICE, RESTORE_LOG_ADVICE, Difference


class AddedFile(Struct, frozen=True, kw_only=True):
    """A file as a Delta commit adds it."""

    path: str
    size: int = -1
    rows: int = -1
    first_offset: int = -1
    last_offset: int = -1
    partition_values: dict[str, str | None] = field(default_factory=dict)


class CommitSignature(Struct, frozen=True):
    """What a Delta commit says of the entry that it is."""

    sequence: int
    previous: str
    manifest: str
    sha256: str


class Commit(Struct, frozen=True, kw_only=True):
    """One Delta commit, as its JSON file has it."""

    version: int
    signature: CommitSignature | None = None
    transaction: int | None = None
    adds: tuple[AddedFile, ...] = ()
    removes: tuple[str, ...] = ()
    is_rewrite: bool = False
    """It says that it changed no data: an OPTIMIZE by somebody."""
    read_error: str = ""
    """Why it cannot be read."""
    log_sha256: str = ""
    """SHA-256 over the bytes of all commits up to and including this one."""


def check_chain(commits: Iterable[Commit]) -> Iterator[Difference]:
    """The log has every version; entries follow each other, each naming the one before by its hash."""
    version, last = 0, CommitSignature(-1, "", "", "")
    for commit in commits:
        at = f"records/_delta_log/{commit.version:020d}.json"
        if commit.version != version:
            missing = f"records/_delta_log/{version:020d}.json"
            yield Difference(
                description="a commit of the Delta log is missing",
                file=missing,
                next=RESTORE_ADVICE,
            )
        if commit.read_error:
            yield Difference(
                description="a commit cannot be read",
                file=at,
                found=commit.read_error,
                next=RESTORE_ADVICE,
            )
        version = commit.version + 1
        sign = commit.signature
        if sign is None:
            continue
        wanted = CommitSignature(last.sequence + 1, last.sha256, sign.manifest, sign.sha256)
        name = f"manifests/{sign.sequence:010d}-{sign.sha256}.json.zst"
        rules = [
            (
                "the chain of entries is broken",
                _describe_signature(wanted),
                _describe_signature(sign),
            ),
            ("an entry names a manifest of another name than its own", name, sign.manifest),
            (
                "a commit's transaction is of another entry",
                str(sign.sequence),
                str(commit.transaction),
            ),
        ]
        for what, expected, found in rules:
            if expected != found:
                yield Difference(
                    description=what,
                    file=at,
                    sequence=sign.sequence,
                    expected=expected,
                    found=found,
                    next=RESTORE_LOG_ADVICE,
                )
        last = sign


def _describe_signature(signature: CommitSignature) -> str:
    return f"entry {signature.sequence} after {signature.previous or 'nothing'}"


def check_witness(
    witness: bytes | None, signatures: Mapping[int, CommitSignature]
) -> Iterator[Difference]:
    """head.json has seen an entry that is in the ledger."""
    last = max(signatures, default=-1)
    if witness is None:
        if last > 0:
            told = "without head.json a ledger that is rolled back is not noticed; the next run writes it again"
            yield Difference(
                description="the witness is missing", file="head.json", level="warning", next=told
            )
        return
    try:
        seen = json.loads(witness)
        sequence, found = int(seen["sequence"]), str(seen["sha256"])
    except (ValueError, KeyError, TypeError, OverflowError):
        yield Difference(
            description="the witness cannot be read", file="head.json", next=RESTORE_ADVICE
        )
        return
    if sequence not in signatures:
        wanted = f"an entry up to {last}"
        cause = "the records table was rolled back, or the witness was changed"
        yield Difference(
            description="the witness has seen an entry that the ledger has not",
            file="head.json",
            sequence=sequence,
            expected=wanted,
            found=f"entry {sequence}",
            cause=cause,
            next=RESTORE_LOG_ADVICE,
        )
    elif found != signatures[sequence].sha256:
        yield Difference(
            description="the witness has seen another entry than the ledger has",
            file="head.json",
            sequence=sequence,
            expected=signatures[sequence].sha256,
            found=found,
            next=RESTORE_LOG_ADVICE,
        )


def replay_expected_files(commits: Iterable[Commit]) -> dict[str, AddedFile]:
    """The table's files by our own entries, and by others' rewriting of them."""
    files: dict[str, AddedFile] = {}
    for commit in commits:
        if commit.signature is not None or commit.is_rewrite:
            files = {path: added for path, added in files.items() if path not in commit.removes}
            files |= {added.path: added for added in commit.adds}
    return files


def replay_active_files(commits: Iterable[Commit]) -> set[str]:
    """The table's files by all its commits."""
    files: set[str] = set()
    for commit in commits:
        files = (files - set(commit.removes)) | {added.path for added in commit.adds}
    return files


def check_table_files(
    expected_paths: Iterable[str], active_paths: Iterable[str], reader_paths: Iterable[str]
) -> Iterator[Difference]:
    """The table holds exactly what the entries added and did not remove, and readers see the same."""
    wanted, there, seen = set(expected_paths), set(active_paths), set(reader_paths)
    for path in sorted(there - wanted):
        take_back = "find who wrote to the records table beside Seriatim, and take that commit back"
        yield Difference(
            description="the table has a file that no entry added", file=path, next=take_back
        )
    for path in sorted(wanted - there):
        take_back = (
            "find who removed it from the records table beside Seriatim, and take that commit back"
        )
        yield Difference(
            description="the table lacks a file that an entry added", file=path, next=take_back
        )
    for path in sorted(seen ^ there):
        what = (
            "readers see a file that the commits do not have"
            if path in seen
            else "readers do not see a file"
        )
        yield Difference(
            description=what,
            file=path,
            cause="a checkpoint of the Delta log does not agree with its commits",
            next="delete records/_delta_log/*.checkpoint.parquet and _last_checkpoint: they are made of the commits",
        )


def check_rewrites(commits: Iterable[Commit]) -> Iterator[Difference]:
    """Whoever rewrites files says that no data changed: then the rows are as many."""
    rows: dict[str, int] = {}
    for commit in commits:
        rows |= {added.path: added.rows for added in commit.adds}
        was, now = (
            sum(rows.get(path, 0) for path in commit.removes),
            sum(added.rows for added in commit.adds),
        )
        if commit.is_rewrite and was != now:
            yield Difference(
                description="somebody rewrote files of the table, and rows were lost or came in",
                file=f"records/_delta_log/{commit.version:020d}.json",
                expected=f"{was} rows",
                found=f"{now} rows",
                next="find who rewrote the records table, and take that commit back",
            )


def check_manifest(
    signature: CommitSignature, commit: Commit, manifest: Manifest, stream: str
) -> Iterator[Difference]:
    """A manifest is its entry's, and the commit adds and removes what it says, size and rows alike."""
    entry = manifest.entry

    def differs(what: str, expected: object, found: object) -> Iterator[Difference]:
        if expected != found:
            yield Difference(
                description=what,
                file=signature.manifest,
                sequence=signature.sequence,
                expected=str(expected),
                found=str(found),
                next=RESTORE_ADVICE,
            )

    yield from differs("a manifest is of another entry", signature.sequence, entry.sequence)
    yield from differs(
        "a manifest is of another entry", signature.sequence, manifest.ledger.sequence
    )
    yield from differs("a manifest follows another entry", signature.previous, entry.previous)
    yield from differs("a manifest is of another stream", stream, manifest.ledger.stream)
    files = {file.path: file for change in entry.changes for file in change.records}
    adds = {added.path: added for added in commit.adds}
    removed = sorted(path for path in entry.removed_paths if table_of_path(path) == MAIN_TABLE)
    yield from differs(
        "a commit adds other files than its manifest says", sorted(files), sorted(adds)
    )
    yield from differs(
        "a commit removes other files than its manifest says", removed, sorted(commit.removes)
    )
    for path, file in files.items():
        wanted = (file.size_bytes, file.rows, file.first_offset, file.last_offset)
        found = adds[path]
        if wanted != (found.size, found.rows, found.first_offset, found.last_offset):
            yield Difference(
                description="a commit says something else of a file than its manifest (bytes, rows, first, last offset)",
                file=path,
                sequence=signature.sequence,
                expected=str(wanted),
                found=str((found.size, found.rows, found.first_offset, found.last_offset)),
                next=RESTORE_LOG_ADVICE,
            )


def check_ledger_step(manifest: Manifest, previous_ledger: Ledger) -> Iterator[Difference]:
    """The ledger in a manifest is what its entry makes of the ledger before it; certificates join
    without hole.
    """
    entry, after = manifest.entry, manifest.ledger
    changes = {str(change.partition): change for change in entry.changes}
    for place in sorted({*previous_ledger.partitions, *after.partitions, *changes}):
        was, now = previous_ledger.partitions.get(place), after.partitions.get(place)
        rules = _partition_rules(entry.kind, changes.get(place), was, now)
        for what, expected, found in rules:
            if expected != found:
                yield Difference(
                    description=what,
                    partition=place,
                    sequence=entry.sequence,
                    expected=str(expected),
                    found=str(found),
                    cause="the ledger's account of this partition does not add up",
                    next=f"report this as a bug, with the manifest of entry {entry.sequence}",
                )


def _partition_rules(
    kind: str, change: Change | None, account_before: Account | None, account_after: Account | None
) -> Iterator[tuple[str, object, object]]:
    if account_after is None:
        yield "a partition has left the ledger", "an account", "none"
        return
    place = (account_after.topic_id, account_after.frontier, account_after.epoch)
    if change is None or kind in ("hold", "release", "retire", "verdict", "compact"):
        known = account_before and (
            account_before.topic_id,
            account_before.frontier,
            account_before.epoch,
        )
        yield "a partition moved without a change (topic id, frontier, epoch)", known, place
        if change is None:
            yield (
                "a partition's state changed without a change",
                account_before and account_before.state,
                account_after.state,
            )
        elif kind == "compact" and account_before is not None:
            yield from _compaction_rules(change, account_before, account_after)
        return
    if kind == "accept":
        yield from _accept_rules(change, account_before, account_after)
        return
    epoch = account_before.epoch if account_before else 0
    raised = kind == "repair"
    yield "a change is of another epoch", epoch, change.epoch
    yield "a partition's epoch", epoch + raised, account_after.epoch
    yield (
        "a partition's frontier is not where its change ends",
        change.until,
        account_after.frontier,
    )
    made = (
        change.state if change.state is not None else account_before.state if account_before else ()
    )
    state = made if raised or account_before is None else state_files_after(change, account_before)
    yield "a partition's state files are not those of its last change", state, account_after.state
    if not raised:
        yield from _slice_rules(change, account_before, account_after)


def _compaction_rules(
    change: Change, account_before: Account, account_after: Account
) -> Iterator[tuple[str, object, object]]:
    """The oldest state files became fewer, and nothing else of the account moved."""
    oldest = tuple(file.path for file in account_before.state[: len(change.merged_state_paths)])
    yield "a compaction merged other state files than the oldest", oldest, change.merged_state_paths
    state = (
        account_before.state
        if change.state is None
        else (*change.state, *account_before.state[len(change.merged_state_paths) :])
    )
    yield (
        "a compaction changed more than the state files it merged",
        replace(account_before, state=state),
        account_after,
    )


def _accept_rules(
    change: Change, account_before: Account | None, account_after: Account
) -> Iterator[tuple[str, object, object]]:
    """A topic's new life begins without state where the change says; the life that is known goes on
    where it was.
    """
    place = (account_after.topic_id, account_after.frontier, account_after.state)
    if account_before is None or change.topic_id != account_before.topic_id:
        yield (
            "a new life does not begin where it was accepted",
            (change.topic_id, change.until, ()),
            place,
        )
    else:
        state = state_files_after(change, account_before)
        yield (
            "an accept moved a partition",
            (account_before.topic_id, account_before.frontier, state),
            place,
        )
    if account_before is not None:
        yield "an accept raises the epoch", account_before.epoch + 1, account_after.epoch


def _slice_rules(
    change: Change, account_before: Account | None, account_after: Account
) -> Iterator[tuple[str, object, object]]:
    """Slices join: each begins where the partition was, and accounts for all that it adds."""
    start = account_before.frontier if account_before else change.initial_frontier
    certificate, rows = change.certificate, sum(file.rows for file in change.records)
    yield "a slice does not begin at the frontier", start, change.frontier
    yield (
        "a partition's topic id changed in a slice",
        account_before.topic_id if account_before else change.topic_id,
        account_after.topic_id,
    )
    yield (
        "a partition was born elsewhere",
        account_before.initial_frontier if account_before else change.initial_frontier,
        account_after.initial_frontier,
    )
    if certificate is None:
        yield "the frontier moved without a certificate", change.frontier, change.until
        yield "records without a certificate", 0, rows
        return
    found = (str(certificate.partition), certificate.epoch, certificate.start, certificate.until)
    yield (
        "a certificate is of another range",
        (str(change.partition), change.epoch, change.frontier, change.until),
        found,
    )
    yield "a certificate counts other records than its files have", rows, certificate.counts.records
    beside = {
        table: sum(file.rows for file in files) for table, files in change.other_records.items()
    }
    yield (
        "a certificate counts other records of another table than its files have",
        beside,
        certificate.counts.other_records,
    )
    for name in ("messages", "records", "headless"):
        before = getattr(account_before, name) if account_before else 0
        total = before + getattr(certificate.counts, name)
        yield (
            f"the sum of {name} is not that of the certificates",
            total,
            getattr(account_after, name),
        )
    accounted = certificate.counts.messages + sum(certificate.holes.values())
    yield (
        "a certificate does not account for every offset",
        certificate.until - certificate.start,
        accounted,
    )
    for file in (
        *change.records,
        *(file for files in change.other_records.values() for file in files),
    ):
        inside = change.frontier <= file.first_offset <= file.last_offset < change.until
        yield f"{file.path} has offsets outside its certificate", True, inside
