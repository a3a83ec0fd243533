"""Verify: what must hold of a stream's files and what is in them, and up to where that was signed
off. Pure.

Folding the records always gives the state, for every session: `Rows` does it for the stock machine.

Next room: chain.py has the rules about the ledger; operations/prove/verify.py reads and asks them
all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.record_kinds import table_directory, table_of_path
from seriatim.ledger.model import Change, File, Ledger, Manifest
from seriatim.operations.compaction_rules import COMPACTED_NAME as COMPACTED
from seriatim.operations.prove.chain import Commit, CommitSignature
from seriatim.operations.prove.difference import (
    REPAIR_ADVICE,
    RESTORE_ADVICE,
    RESTORE_LOG_ADVICE,
    Difference,
)

RECORD_FILE_NAME = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)-(.+?)\.parquet")
"""Epoch, start and attempt: the names that Seriatim gives."""
MANIFEST_PATH = re.compile(r"manifests/(\d{10,})-[0-9a-f]{64}\.json\.zst")
ORPHAN_OF_DEAD_RUN = (
    "left by a run that crashed or was fenced; no damage, the next run that commits sweeps it"
)
ORPHAN_OF_RUNNING_RUN = (
    "of a run that is at work now, or crashed at the frontier; no damage, a later run sweeps it"
)
ORPHAN_OF_COMPACTION = "of a compaction that is at work now, or crashed; no damage, a later run or compaction sweeps it"
ORPHAN_OF_OTHERS = (
    "not of a name that Seriatim gives: ask who put it there, and delete it if nobody needs it"
)
REBUILD_ADVICE = "`seriatim rebuild {stream}` makes it again from the ledger"
Row = tuple[Any, ...]


class SignOff(
    Struct, frozen=True, kw_only=True, rename={"log_sha256": "log", "kafka_sequence": "kafka"}
):
    """Up to where everything was looked at and found right."""

    sequence: int = -1
    sha256: str = ""
    """Of that entry's manifest."""
    version: int = -1
    log_sha256: str = ""
    """Of the Delta log's bytes up to that version."""
    kafka_sequence: int = -1
    """Up to which entry Kafka was compared too."""
    digest: str = ""

    def to_bytes(self) -> bytes:
        """As it is kept, under a digest of its own."""
        return msgspec.json.encode(
            replace(self, digest=self._compute_digest()), order="deterministic"
        )

    def _compute_digest(self) -> str:
        bare = replace(self, digest="")
        return sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()

    @classmethod
    def from_bytes(cls, content: bytes) -> SignOff | None:
        """What was sealed; None if it was changed since."""
        try:
            seen = msgspec.json.decode(content, type=cls)
        except (msgspec.MsgspecError, ValueError):  # bytes that are no text raise the latter
            return None
        return (
            seen if seen.digest == seen._compute_digest() and seen.to_bytes() == content else None
        )


def check_sign_off(
    sign_off: SignOff, commits: Mapping[int, Commit], signatures: Mapping[int, CommitSignature]
) -> Iterator[Difference]:
    """What was signed off is what is there: the same entry, the same log before it."""
    way_out = f"{RESTORE_LOG_ADVICE}. If an older ledger\nis meant (a deliberate restore): `seriatim verify {{stream}} --all`"
    sign, commit = signatures.get(sign_off.sequence), commits.get(sign_off.version)
    if sign is None or sign.sha256 != sign_off.sha256:
        yield Difference(
            description=f"entry {sign_off.sequence} is another one than was signed off",
            file="verified.json",
            sequence=sign_off.sequence,
            expected=sign_off.sha256,
            found=sign.sha256 if sign else "no such entry",
            next=way_out,
        )
    elif commit is None or commit.log_sha256 != sign_off.log_sha256:
        yield Difference(
            description="the Delta log was changed since it was signed off",
            file="records/_delta_log",
            sequence=sign_off.sequence,
            expected=f"{sign_off.log_sha256} up to version {sign_off.version}",
            found=commit.log_sha256 if commit else "no such version",
            next=way_out,
        )


def find_orphans(
    paths: Iterable[str],
    named_paths: set[str],
    ledger: Ledger,
    signed_off_ledger: Ledger | None = None,
) -> Iterator[tuple[str, str]]:
    """Files that nobody names, and what each is. `since`: what was signed off is not asked again."""
    for path in sorted(set(paths) - named_paths):
        room, _, rest = path.partition("/")
        if match := MANIFEST_PATH.fullmatch(path):
            if signed_off_ledger is None or int(match[1]) > signed_off_ledger.sequence:
                at_work = int(match[1]) > ledger.sequence
                yield path, ORPHAN_OF_RUNNING_RUN if at_work else ORPHAN_OF_DEAD_RUN
            continue
        place, _, name = rest.rpartition("/")
        if COMPACTED.fullmatch(name) and place in ledger.partitions:
            if signed_off_ledger is None:  # what an entry before the sign-off named is not known
                yield path, ORPHAN_OF_COMPACTION
            continue
        ours, account = RECORD_FILE_NAME.fullmatch(name), ledger.partitions.get(place)
        if ours is None or account is None or room == "manifests":
            yield path, ORPHAN_OF_OTHERS
            continue
        start, old = (
            (int(ours[1]), int(ours[2])),
            signed_off_ledger.partitions.get(place) if signed_off_ledger else None,
        )
        if old is None or start >= (old.epoch, old.frontier):
            yield (
                path,
                ORPHAN_OF_DEAD_RUN
                if start < (account.epoch, account.frontier)
                else ORPHAN_OF_RUNNING_RUN,
            )


class FileOutline(Struct, kw_only=True):
    """What a file of records or of messages set aside holds, without its rows."""

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
    """None of these three where the column is a folder's name."""
    sessions: set[str] = msgspec.field(default_factory=set)
    distinct_offsets: int = 0
    """How many different ones."""


class CommittedFile(Struct, frozen=True):
    """A file, and the entry and the partition it was named for."""

    file: File
    sequence: int
    change: Change


def check_file(
    committed_file: CommittedFile, size: int | None, digest: str, paths_by_digest: Mapping[str, str]
) -> Iterator[Difference]:
    """A file is there, with the bytes and the digest that its entry says. `twins`: paths by digest."""
    file = committed_file.file
    way_out = RESTORE_ADVICE if file.path.startswith("kept/") else REPAIR_ADVICE
    where: dict[str, Any] = {
        "file": file.path,
        "sequence": committed_file.sequence,
        "next": way_out,
    }
    where["partition"] = str(committed_file.change.partition)
    if size is None:
        yield Difference(
            description="a file is missing", expected=f"{file.size_bytes} bytes", **where
        )
        return
    cause = "it was changed after it was committed"
    if digest != file.digest and digest in paths_by_digest:
        cause = f"it has the content of {paths_by_digest[digest]}: the two were swapped, or one was copied over the other"
    if size != file.size_bytes:
        expected, found = f"{file.size_bytes} bytes", f"{size} bytes"
        yield Difference(
            description="a file has another size",
            expected=expected,
            found=found,
            cause=cause,
            **where,
        )
    if digest != file.digest:
        yield Difference(
            description="a file is damaged",
            expected=file.digest,
            found=digest,
            cause=cause,
            **where,
        )


def check_content(
    committed_file: CommittedFile, outline: FileOutline, *, in_slice: bool, compacted: bool = False
) -> Iterator[Difference]:
    """What is in a file is what its entry says: its partition, its range, in order, each record
    once.

    Messages set aside may have waited in a window: those are older than their slice, and come after
    who hurt them.
    """
    file, partition = committed_file.file, committed_file.change.partition

    def differs(
        what: str, expected: object, found: object, offset: int = -1
    ) -> Iterator[Difference]:
        if expected != found:
            yield Difference(
                description=what,
                file=file.path,
                partition=str(partition),
                offset=offset,
                sequence=committed_file.sequence,
                expected=str(expected),
                found=str(found),
                next="keep this file and report this as a bug: its digest is right, so it was written like this",
            )

    yield from differs("a file has another number of rows", file.rows, outline.rows)
    yield from differs(
        "a file has rows of another topic", set(), outline.topics - {partition.topic}
    )
    yield from differs(
        "a file has rows of another partition", set(), outline.partitions - {partition.number}
    )
    kept = committed_file.file.path.startswith("kept/")
    if outline.first_disorder and not kept:
        offset, index = outline.first_disorder
        what = "a record comes twice, or before one that it must follow"
        yield from differs(what, "offset and index rise", f"offset {offset}, index {index}", offset)
    if outline.early_offset >= 0:
        what = "a record has a lower offset than the message it was made of"
        yield from differs(
            what, "offset at or after source_offset", "before it", outline.early_offset
        )
    if file.first_offset >= 0:
        span = (outline.first_offset, outline.last_offset)
        yield from differs(
            "a file has other offsets (first, last)",
            (file.first_offset, file.last_offset),
            span,
            outline.first_offset,
        )
    if in_slice:
        begun = committed_file.change.initial_frontier if kept else committed_file.change.frontier
        inside = begun <= outline.first_offset <= outline.last_offset < committed_file.change.until
        whole = f"offsets in [{committed_file.change.frontier}, {committed_file.change.until})"
        found = whole if inside else f"offsets from {outline.first_offset} to {outline.last_offset}"
        yield from differs(
            "a file has offsets outside its slice", whole, found, outline.first_offset
        )
    if in_slice or compacted:
        yield from differs(
            "a file has rows of another topic id",
            set(),
            outline.topic_ids - {committed_file.change.topic_id},
        )


def check_counts(committed_file: CommittedFile, outline: FileOutline) -> Iterator[Difference]:
    """No certificate counts fewer messages or sessions than its records come from."""
    certificate = committed_file.change.certificate
    if certificate is None:
        return
    for what, least, said in (
        ("messages", outline.distinct_offsets, certificate.counts.messages),
        ("sessions", len(outline.sessions), certificate.sessions),
    ):
        if said < least:
            yield Difference(
                description=f"a certificate counts fewer {what} than its records come from",
                file=committed_file.file.path,
                partition=str(certificate.partition),
                offset=certificate.start,
                sequence=committed_file.sequence,
                expected=f"at least {least}",
                found=str(said),
                next="report this as a bug, with this entry's manifest; `seriatim verify {stream} --kafka` tells more",
            )


def check_state(
    committed_file: CommittedFile, rows: int, touched_sessions: int
) -> Iterator[Difference]:
    """A state file has the rows its entry says; its certificate counts no fewer sessions than were
    touched.
    """
    certificate = committed_file.change.certificate
    where: dict[str, Any] = {"file": committed_file.file.path, "sequence": committed_file.sequence}
    where["partition"] = str(committed_file.change.partition)
    if rows != committed_file.file.rows:
        what, expected = "a file has another number of rows", str(committed_file.file.rows)
        yield Difference(
            description=what, expected=expected, found=str(rows), next=REPAIR_ADVICE, **where
        )
    if certificate is not None and not touched_sessions <= certificate.sessions <= rows:
        yield Difference(
            description="a certificate counts other sessions than its state file has",
            offset=certificate.start,
            expected=f"from {touched_sessions} to {rows}",
            found=str(certificate.sessions),
            next="report this as a bug, with this entry's manifest",
            **where,
        )


def check_overlaps(outlines: Iterable[tuple[CommittedFile, FileOutline]]) -> Iterator[Difference]:
    """Active record files of one partition and topic id have no offset in common: each record is
    there once.
    """
    ordered = sorted(
        (
            (
                str(known.change.partition),
                sorted(outline.topic_ids),
                outline.first_offset,
                outline.last_offset,
                known.file.path,
            )
        )
        for known, outline in outlines
    )
    last: tuple[Any, ...] | None = None
    for place, ids, first, until, path in ordered:
        if last and last[:2] == (place, ids) and first <= last[2]:
            yield Difference(
                description="two files of the table have the same offsets",
                file=path,
                partition=place,
                offset=first,
                expected=f"offsets after {last[2]}, the last of {last[3]}",
                found=f"offset {first}",
                next=RESTORE_LOG_ADVICE,
            )
        last = (place, ids, until, path)


def other_table_paths(manifests: Iterable[Manifest], until_sequence: int) -> set[str]:
    """The files of a machine's further tables, by the entries up to one of them."""
    files: set[str] = set()
    for manifest in manifests:
        if manifest.entry.sequence > until_sequence:
            break
        added = {
            file.path
            for change in manifest.entry.changes
            for some in change.other_records.values()
            for file in some
        }
        files = (files - set(manifest.entry.removed_paths)) | added
    return files


def check_other_tables(
    tables: Mapping[str, tuple[int, set[str]]], manifests: Sequence[Manifest]
) -> Iterator[Difference]:
    """Each further table has the files of the entry that it says to have reached. One that is
    behind is no damage.
    """
    last = manifests[-1].entry.sequence
    for table, (reached, seen) in tables.items():
        wanted = {
            path for path in other_table_paths(manifests, reached) if table_of_path(path) == table
        }
        where: dict[str, Any] = {
            "file": table_directory(table),
            "sequence": reached,
            "next": REBUILD_ADVICE,
        }
        if not 0 <= reached <= last:
            found = f"entry {reached}" if reached >= 0 else "no entry, or it cannot be read"
            yield Difference(
                description="a table names no entry of the ledger", found=found, **where
            )
        elif seen != wanted:
            one = min(seen ^ wanted)
            what = (
                "a table lacks a file"
                if one in wanted
                else "a table has a file that no entry added to it"
            )
            yield Difference(description=what, **{**where, "file": one})
        if reached < last:
            told = {**where, "next": "the next run brings it up", "level": "warning"}
            yield Difference(
                description=f"a table is as of entry {reached}, the ledger is at {last}", **told
            )


class RowsOfRecords:
    """A partition's tables, made of its records alone."""

    def __init__(self, partition_name: str, column_names: Iterable[str]) -> None:
        self.partition_name, self.column_names = partition_name, list(column_names)
        self.tables: dict[str, dict[Any, tuple[Row, int]]] = {}

    def set_row(self, session: str, key: Any, row: Row | None, offset: int) -> None:
        """The last record of a row: what it is now, or None where it was deleted."""
        table = self.tables.setdefault(session, {})
        if row is None:
            table.pop(key, None)
        else:
            table[key] = (row, offset)

    def find_differences(self, states: Mapping[str, Mapping[Any, Row]]) -> Iterator[Difference]:
        """Sessions whose state is not what their records make."""
        for name in sorted({*self.tables, *states}):
            made, kept = self.tables.get(name, {}), states.get(name, {})
            for key in sorted({*made, *kept}, key=repr):
                row, offset = made.get(key, (None, -1))
                if (
                    key not in made
                    or key not in kept
                    or normalize_row(made[key][0]) != normalize_row(kept[key])
                ):
                    yield Difference(
                        description="the state is not what its records make",
                        partition=self.partition_name,
                        offset=offset,
                        session=name,
                        expected=self._describe_row(row),
                        found=self._describe_row(kept.get(key)),
                        cause="expected: by folding the records; found: in the state files",
                        next="keep both and report this as a bug; the session is right again after its next snapshot",
                    )

    def lacking(self, states: Mapping[str, Mapping[Any, Row]]) -> Iterator[Difference]:
        """Rows that records make and that a state does not have."""
        for name in sorted(self.tables):
            for key, (row, offset) in sorted(self.tables[name].items(), key=repr):
                if key not in states.get(name, {}):
                    yield Difference(
                        description="the state lacks a row that its records make",
                        partition=self.partition_name,
                        offset=offset,
                        session=name,
                        expected=self._describe_row(row),
                        found="`end` of the machine does not take it back",
                        cause="the state lost the row, or the machine's `end` does not name every row",
                        next="let `end` take back every row of the state; then `seriatim repair {stream} --partition"
                        f" {self.partition_name}` folds the session again",
                    )

    def _describe_row(self, row: Row | None) -> str:
        if row is None:
            return "no such row"
        return ", ".join(
            f"{name}={value!r}" for name, value in zip(self.column_names, row, strict=True)
        )[:400]


def normalize_row(row: Row) -> Row:
    """A row as it compares: a time without a zone is in UTC, as the records have it."""
    return tuple([_in_utc(value) if isinstance(value, datetime) else value for value in row])


def _in_utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value
