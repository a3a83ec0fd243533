"""The chain: what must hold between the Delta log, the ledger's entries and the witness. Pure.

Everything comes in as values that were read anew; nothing here trusts what a run remembered. A rule gives
the differences it sees, the first one first.

Next room: verify.py has the rules about files; steps/verify.py reads and asks them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.core.difference import RESTORE, RESTORE_LOG, Difference
from seriatim.core.ledger import Account, Change, Ledger, Manifest, state_after
from seriatim.core.outputs import MAIN, table_in


class Added(Struct, frozen=True, kw_only=True):
    """A file as a Delta commit adds it."""

    path: str
    size: int = -1
    rows: int = -1
    first: int = -1
    last: int = -1
    partition_values: dict[str, str | None] = field(default_factory=dict)


class Sign(Struct, frozen=True):
    """What a Delta commit says of the entry that it is."""

    sequence: int
    previous: str
    manifest: str
    sha256: str


class Commit(Struct, frozen=True, kw_only=True):
    """One Delta commit, as its JSON file has it."""

    version: int
    sign: Sign | None = None
    transaction: int | None = None
    adds: tuple[Added, ...] = ()
    removes: tuple[str, ...] = ()
    rewrites: bool = False
    """It says that it changed no data: an OPTIMIZE by somebody."""
    trouble: str = ""
    """Why it cannot be read."""
    log: str = ""
    """SHA-256 over the bytes of all commits up to and including this one."""


def chained(commits: Iterable[Commit]) -> Iterator[Difference]:
    """The log has every version; entries follow each other, each naming the one before by its hash."""
    version, last = 0, Sign(-1, "", "", "")
    for commit in commits:
        at = f"records/_delta_log/{commit.version:020d}.json"
        if commit.version != version:
            missing = f"records/_delta_log/{version:020d}.json"
            yield Difference(what="a commit of the Delta log is missing", file=missing, next=RESTORE)
        if commit.trouble:
            yield Difference(what="a commit cannot be read", file=at, found=commit.trouble, next=RESTORE)
        version = commit.version + 1
        sign = commit.sign
        if sign is None:
            continue
        wanted = Sign(last.sequence + 1, last.sha256, sign.manifest, sign.sha256)
        name = f"manifests/{sign.sequence:010d}-{sign.sha256}.json.zst"
        rules = [
            ("the chain of entries is broken", _shown(wanted), _shown(sign)),
            ("an entry names a manifest of another name than its own", name, sign.manifest),
            ("a commit's transaction is of another entry", str(sign.sequence), str(commit.transaction)),
        ]
        for what, expected, found in rules:
            if expected != found:
                yield Difference(
                    what=what, file=at, sequence=sign.sequence, expected=expected, found=found, next=RESTORE_LOG
                )
        last = sign


def _shown(sign: Sign) -> str:
    return f"entry {sign.sequence} after {sign.previous or 'nothing'}"


def witnessed(witness: bytes | None, signs: Mapping[int, Sign]) -> Iterator[Difference]:
    """head.json has seen an entry that is in the ledger."""
    last = max(signs, default=-1)
    if witness is None:
        if last > 0:
            told = "without head.json a ledger that is rolled back is not noticed; the next run writes it again"
            yield Difference(what="the witness is missing", file="head.json", level="warning", next=told)
        return
    try:
        seen = json.loads(witness)
        sequence, found = int(seen["sequence"]), str(seen["sha256"])
    except (ValueError, KeyError, TypeError, OverflowError):
        yield Difference(what="the witness cannot be read", file="head.json", next=RESTORE)
        return
    if sequence not in signs:
        wanted = f"an entry up to {last}"
        cause = "the records table was rolled back, or the witness was changed"
        yield Difference(
            what="the witness has seen an entry that the ledger has not",
            file="head.json",
            sequence=sequence,
            expected=wanted,
            found=f"entry {sequence}",
            cause=cause,
            next=RESTORE_LOG,
        )
    elif found != signs[sequence].sha256:
        yield Difference(
            what="the witness has seen another entry than the ledger has",
            file="head.json",
            sequence=sequence,
            expected=signs[sequence].sha256,
            found=found,
            next=RESTORE_LOG,
        )


def expected_files(commits: Iterable[Commit]) -> dict[str, Added]:
    """The table's files by our own entries, and by others' rewriting of them."""
    files: dict[str, Added] = {}
    for commit in commits:
        if commit.sign is not None or commit.rewrites:
            files = {path: added for path, added in files.items() if path not in commit.removes}
            files |= {added.path: added for added in commit.adds}
    return files


def active_files(commits: Iterable[Commit]) -> set[str]:
    """The table's files by all its commits."""
    files: set[str] = set()
    for commit in commits:
        files = (files - set(commit.removes)) | {added.path for added in commit.adds}
    return files


def same_table(expected: Iterable[str], active: Iterable[str], readers: Iterable[str]) -> Iterator[Difference]:
    """The table holds exactly what the entries added and did not remove, and readers see the same."""
    wanted, there, seen = set(expected), set(active), set(readers)
    for path in sorted(there - wanted):
        take_back = "find who wrote to the records table beside Seriatim, and take that commit back"
        yield Difference(what="the table has a file that no entry added", file=path, next=take_back)
    for path in sorted(wanted - there):
        take_back = "find who removed it from the records table beside Seriatim, and take that commit back"
        yield Difference(what="the table lacks a file that an entry added", file=path, next=take_back)
    for path in sorted(seen ^ there):
        what = "readers see a file that the commits do not have" if path in seen else "readers do not see a file"
        yield Difference(
            what=what,
            file=path,
            cause="a checkpoint of the Delta log does not agree with its commits",
            next="delete records/_delta_log/*.checkpoint.parquet and _last_checkpoint: they are made of the commits",
        )


def rewritten(commits: Iterable[Commit]) -> Iterator[Difference]:
    """Whoever rewrites files says that no data changed: then the rows are as many."""
    rows: dict[str, int] = {}
    for commit in commits:
        rows |= {added.path: added.rows for added in commit.adds}
        was, now = sum(rows.get(path, 0) for path in commit.removes), sum(added.rows for added in commit.adds)
        if commit.rewrites and was != now:
            yield Difference(
                what="somebody rewrote files of the table, and rows were lost or came in",
                file=f"records/_delta_log/{commit.version:020d}.json",
                expected=f"{was} rows",
                found=f"{now} rows",
                next="find who rewrote the records table, and take that commit back",
            )


def same_entry(sign: Sign, commit: Commit, manifest: Manifest, stream: str) -> Iterator[Difference]:
    """A manifest is its entry's, and the commit adds and removes what it says, size and rows alike."""
    entry = manifest.entry

    def differs(what: str, expected: object, found: object) -> Iterator[Difference]:
        if expected != found:
            yield Difference(
                what=what,
                file=sign.manifest,
                sequence=sign.sequence,
                expected=str(expected),
                found=str(found),
                next=RESTORE,
            )

    yield from differs("a manifest is of another entry", sign.sequence, entry.sequence)
    yield from differs("a manifest is of another entry", sign.sequence, manifest.ledger.sequence)
    yield from differs("a manifest follows another entry", sign.previous, entry.previous)
    yield from differs("a manifest is of another stream", stream, manifest.ledger.stream)
    files = {file.path: file for change in entry.changes for file in change.records}
    adds = {added.path: added for added in commit.adds}
    removed = sorted(path for path in entry.removed if table_in(path) == MAIN)
    yield from differs("a commit adds other files than its manifest says", sorted(files), sorted(adds))
    yield from differs("a commit removes other files than its manifest says", removed, sorted(commit.removes))
    for path, file in files.items():
        wanted = (file.bytes, file.rows, file.first, file.last)
        found = adds[path]
        if wanted != (found.size, found.rows, found.first, found.last):
            yield Difference(
                what="a commit says something else of a file than its manifest (bytes, rows, first, last offset)",
                file=path,
                sequence=sign.sequence,
                expected=str(wanted),
                found=str((found.size, found.rows, found.first, found.last)),
                next=RESTORE_LOG,
            )


def follows(manifest: Manifest, before: Ledger) -> Iterator[Difference]:
    """The ledger in a manifest is what its entry makes of the ledger before it; certificates join without hole."""
    entry, after = manifest.entry, manifest.ledger
    changes = {str(change.partition): change for change in entry.changes}
    for place in sorted({*before.partitions, *after.partitions, *changes}):
        was, now = before.partitions.get(place), after.partitions.get(place)
        rules = _of_partition(entry.kind, changes.get(place), was, now)
        for what, expected, found in rules:
            if expected != found:
                yield Difference(
                    what=what,
                    partition=place,
                    sequence=entry.sequence,
                    expected=str(expected),
                    found=str(found),
                    cause="the ledger's account of this partition does not add up",
                    next=f"report this as a bug, with the manifest of entry {entry.sequence}",
                )


def _of_partition(
    kind: str, change: Change | None, was: Account | None, now: Account | None
) -> Iterator[tuple[str, object, object]]:
    if now is None:
        yield "a partition has left the ledger", "an account", "none"
        return
    place = (now.topic_id, now.frontier, now.epoch)
    if change is None or kind in ("hold", "release", "retire", "verdict", "compact"):
        known = was and (was.topic_id, was.frontier, was.epoch)
        yield "a partition moved without a change (topic id, frontier, epoch)", known, place
        if change is None:
            yield "a partition's state changed without a change", was and was.state, now.state
        elif kind == "compact" and was is not None:
            yield from _of_compaction(change, was, now)
        return
    if kind == "accept":
        yield from _of_accept(change, was, now)
        return
    epoch = was.epoch if was else 0
    raised = kind == "repair"
    yield "a change is of another epoch", epoch, change.epoch
    yield "a partition's epoch", epoch + raised, now.epoch
    yield "a partition's frontier is not where its change ends", change.until, now.frontier
    made = change.state if change.state is not None else was.state if was else ()
    state = made if raised or was is None else state_after(change, was)
    yield "a partition's state files are not those of its last change", state, now.state
    if not raised:
        yield from _of_slice(change, was, now)


def _of_compaction(change: Change, was: Account, now: Account) -> Iterator[tuple[str, object, object]]:
    """The oldest state files became fewer, and nothing else of the account moved."""
    oldest = tuple(file.path for file in was.state[: len(change.merged)])
    yield "a compaction merged other state files than the oldest", oldest, change.merged
    state = was.state if change.state is None else (*change.state, *was.state[len(change.merged) :])
    yield "a compaction changed more than the state files it merged", replace(was, state=state), now


def _of_accept(change: Change, was: Account | None, now: Account) -> Iterator[tuple[str, object, object]]:
    """A topic's new life begins without state where the change says; the life that is known goes on where it was."""
    place = (now.topic_id, now.frontier, now.state)
    if was is None or change.topic_id != was.topic_id:
        yield "a new life does not begin where it was accepted", (change.topic_id, change.until, ()), place
    else:
        state = state_after(change, was)
        yield "an accept moved a partition", (was.topic_id, was.frontier, state), place
    if was is not None:
        yield "an accept raises the epoch", was.epoch + 1, now.epoch


def _of_slice(change: Change, was: Account | None, now: Account) -> Iterator[tuple[str, object, object]]:
    """Slices join: each begins where the partition was, and accounts for all that it adds."""
    start = was.frontier if was else change.born
    certificate, rows = change.certificate, sum(file.rows for file in change.records)
    yield "a slice does not begin at the frontier", start, change.frontier
    yield "a partition's topic id changed in a slice", was.topic_id if was else change.topic_id, now.topic_id
    yield "a partition was born elsewhere", was.born if was else change.born, now.born
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
    beside = {table: sum(file.rows for file in files) for table, files in change.others.items()}
    yield "a certificate counts other records of another table than its files have", beside, certificate.counts.others
    for name in ("messages", "records", "headless"):
        before = getattr(was, name) if was else 0
        total = before + getattr(certificate.counts, name)
        yield f"the sum of {name} is not that of the certificates", total, getattr(now, name)
    accounted = certificate.counts.messages + sum(certificate.holes.values())
    yield "a certificate does not account for every offset", certificate.until - certificate.start, accounted
    for file in (*change.records, *(file for files in change.others.values() for file in files)):
        inside = change.frontier <= file.first <= file.last < change.until
        yield f"{file.path} has offsets outside its certificate", True, inside
