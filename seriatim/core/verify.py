"""Verify: what must hold of a stream's files and what is in them, and up to where that was signed off. Pure.

Folding the records always gives the state, for every session: `Rows` does it for the stock machine.

Next room: chain.py has the rules about the ledger; steps/verify.py reads and asks them all.
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

from seriatim.core.chain import Commit, Sign
from seriatim.core.compact import NAME as COMPACTED
from seriatim.core.difference import REPAIR, RESTORE, RESTORE_LOG, Difference
from seriatim.core.ledger import Change, File, Ledger, Manifest
from seriatim.core.outputs import room, table_in

OURS = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)-(.+?)\.parquet")
"""Epoch, start and attempt: the names that Seriatim gives."""
MANIFEST = re.compile(r"manifests/(\d{10,})-[0-9a-f]{64}\.json\.zst")
DEAD = "left by a run that crashed or was fenced; no damage, the next run that commits sweeps it"
AT_WORK = "of a run that is at work now, or crashed at the frontier; no damage, a later run sweeps it"
COMPACTING = "of a compaction that is at work now, or crashed; no damage, a later run or compaction sweeps it"
STRANGE = "not of a name that Seriatim gives: ask who put it there, and delete it if nobody needs it"
REBUILD = "`seriatim rebuild {stream}` makes it again from the ledger"
Row = tuple[Any, ...]


class SignOff(Struct, frozen=True, kw_only=True):
    """Up to where everything was looked at and found right."""

    sequence: int = -1
    sha256: str = ""
    """Of that entry's manifest."""
    version: int = -1
    log: str = ""
    """Of the Delta log's bytes up to that version."""
    kafka: int = -1
    """Up to which entry Kafka was compared too."""
    digest: str = ""

    def sealed(self) -> bytes:
        """As it is kept, under a digest of its own."""
        return msgspec.json.encode(replace(self, digest=self._seal()), order="deterministic")

    def _seal(self) -> str:
        bare = replace(self, digest="")
        return sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()

    @classmethod
    def opened(cls, content: bytes) -> SignOff | None:
        """What was sealed; None if it was changed since."""
        try:
            seen = msgspec.json.decode(content, type=cls)
        except (msgspec.MsgspecError, ValueError):  # bytes that are no text raise the latter
            return None
        return seen if seen.digest == seen._seal() and seen.sealed() == content else None


def signed_off(kept: SignOff, commits: Mapping[int, Commit], signs: Mapping[int, Sign]) -> Iterator[Difference]:
    """What was signed off is what is there: the same entry, the same log before it."""
    way_out = f"{RESTORE_LOG}. If an older ledger\nis meant (a deliberate restore): `seriatim verify {{stream}} --all`"
    sign, commit = signs.get(kept.sequence), commits.get(kept.version)
    if sign is None or sign.sha256 != kept.sha256:
        yield Difference(
            what=f"entry {kept.sequence} is another one than was signed off",
            file="verified.json",
            sequence=kept.sequence,
            expected=kept.sha256,
            found=sign.sha256 if sign else "no such entry",
            next=way_out,
        )
    elif commit is None or commit.log != kept.log:
        yield Difference(
            what="the Delta log was changed since it was signed off",
            file="records/_delta_log",
            sequence=kept.sequence,
            expected=f"{kept.log} up to version {kept.version}",
            found=commit.log if commit else "no such version",
            next=way_out,
        )


def orphans(
    paths: Iterable[str], named: set[str], ledger: Ledger, since: Ledger | None = None
) -> Iterator[tuple[str, str]]:
    """Files that nobody names, and what each is. `since`: what was signed off is not asked again."""
    for path in sorted(set(paths) - named):
        room, _, rest = path.partition("/")
        if match := MANIFEST.fullmatch(path):
            if since is None or int(match[1]) > since.sequence:
                at_work = int(match[1]) > ledger.sequence
                yield path, AT_WORK if at_work else DEAD
            continue
        place, _, name = rest.rpartition("/")
        if COMPACTED.fullmatch(name) and place in ledger.partitions:
            if since is None:  # what an entry before the sign-off named is not known
                yield path, COMPACTING
            continue
        ours, account = OURS.fullmatch(name), ledger.partitions.get(place)
        if ours is None or account is None or room == "manifests":
            yield path, STRANGE
            continue
        start, old = (int(ours[1]), int(ours[2])), since.partitions.get(place) if since else None
        if old is None or start >= (old.epoch, old.frontier):
            yield path, DEAD if start < (account.epoch, account.frontier) else AT_WORK


class Outline(Struct, kw_only=True):
    """What a file of records or of messages set aside holds, without its rows."""

    rows: int = 0
    first: int = -1
    last: int = -1
    disorder: tuple[int, int] | None = None
    """Offset and index of the first row that does not come after the one before it."""
    early: int = -1
    """The offset of the first record that is older than the message it was made of."""
    topics: set[str] = msgspec.field(default_factory=set)
    topic_ids: set[str] = msgspec.field(default_factory=set)
    partitions: set[int] = msgspec.field(default_factory=set)
    """None of these three where the column is a folder's name."""
    sessions: set[str] = msgspec.field(default_factory=set)
    offsets: int = 0
    """How many different ones."""


class Known(Struct, frozen=True):
    """A file, and the entry and the partition it was named for."""

    file: File
    sequence: int
    change: Change


def file_differs(known: Known, size: int | None, digest: str, twins: Mapping[str, str]) -> Iterator[Difference]:
    """A file is there, with the bytes and the digest that its entry says. `twins`: paths by digest."""
    file = known.file
    way_out = RESTORE if file.path.startswith("kept/") else REPAIR
    where: dict[str, Any] = {"file": file.path, "sequence": known.sequence, "next": way_out}
    where["partition"] = str(known.change.partition)
    if size is None:
        yield Difference(what="a file is missing", expected=f"{file.bytes} bytes", **where)
        return
    cause = "it was changed after it was committed"
    if digest != file.digest and digest in twins:
        cause = f"it has the content of {twins[digest]}: the two were swapped, or one was copied over the other"
    if size != file.bytes:
        expected, found = f"{file.bytes} bytes", f"{size} bytes"
        yield Difference(what="a file has another size", expected=expected, found=found, cause=cause, **where)
    if digest != file.digest:
        yield Difference(what="a file is damaged", expected=file.digest, found=digest, cause=cause, **where)


def content_differs(known: Known, outline: Outline, *, in_slice: bool, compacted: bool = False) -> Iterator[Difference]:
    """What is in a file is what its entry says: its partition, its range, in order, each record once.

    Messages set aside may have waited in a window: those are older than their slice, and come after who hurt them.
    """
    file, partition = known.file, known.change.partition

    def differs(what: str, expected: object, found: object, offset: int = -1) -> Iterator[Difference]:
        if expected != found:
            yield Difference(
                what=what,
                file=file.path,
                partition=str(partition),
                offset=offset,
                sequence=known.sequence,
                expected=str(expected),
                found=str(found),
                next="keep this file and report this as a bug: its digest is right, so it was written like this",
            )

    yield from differs("a file has another number of rows", file.rows, outline.rows)
    yield from differs("a file has rows of another topic", set(), outline.topics - {partition.topic})
    yield from differs("a file has rows of another partition", set(), outline.partitions - {partition.number})
    kept = known.file.path.startswith("kept/")
    if outline.disorder and not kept:
        offset, index = outline.disorder
        what = "a record comes twice, or before one that it must follow"
        yield from differs(what, "offset and index rise", f"offset {offset}, index {index}", offset)
    if outline.early >= 0:
        what = "a record has a lower offset than the message it was made of"
        yield from differs(what, "offset at or after source_offset", "before it", outline.early)
    if file.first >= 0:
        span = (outline.first, outline.last)
        yield from differs("a file has other offsets (first, last)", (file.first, file.last), span, outline.first)
    if in_slice:
        begun = known.change.born if kept else known.change.frontier
        inside = begun <= outline.first <= outline.last < known.change.until
        whole = f"offsets in [{known.change.frontier}, {known.change.until})"
        found = whole if inside else f"offsets from {outline.first} to {outline.last}"
        yield from differs("a file has offsets outside its slice", whole, found, outline.first)
    if in_slice or compacted:
        yield from differs("a file has rows of another topic id", set(), outline.topic_ids - {known.change.topic_id})


def counts_differ(known: Known, outline: Outline) -> Iterator[Difference]:
    """No certificate counts fewer messages or sessions than its records come from."""
    certificate = known.change.certificate
    if certificate is None:
        return
    for what, least, said in (
        ("messages", outline.offsets, certificate.counts.messages),
        ("sessions", len(outline.sessions), certificate.sessions),
    ):
        if said < least:
            yield Difference(
                what=f"a certificate counts fewer {what} than its records come from",
                file=known.file.path,
                partition=str(certificate.partition),
                offset=certificate.start,
                sequence=known.sequence,
                expected=f"at least {least}",
                found=str(said),
                next="report this as a bug, with this entry's manifest; `seriatim verify {stream} --kafka` tells more",
            )


def state_differs(known: Known, rows: int, touched: int) -> Iterator[Difference]:
    """A state file has the rows its entry says; its certificate counts no fewer sessions than were touched."""
    certificate = known.change.certificate
    where: dict[str, Any] = {"file": known.file.path, "sequence": known.sequence}
    where["partition"] = str(known.change.partition)
    if rows != known.file.rows:
        what, expected = "a file has another number of rows", str(known.file.rows)
        yield Difference(what=what, expected=expected, found=str(rows), next=REPAIR, **where)
    if certificate is not None and not touched <= certificate.sessions <= rows:
        yield Difference(
            what="a certificate counts other sessions than its state file has",
            offset=certificate.start,
            expected=f"from {touched} to {rows}",
            found=str(certificate.sessions),
            next="report this as a bug, with this entry's manifest",
            **where,
        )


def overlaps(outlines: Iterable[tuple[Known, Outline]]) -> Iterator[Difference]:
    """Active record files of one partition and topic id have no offset in common: each record is there once."""
    ordered = sorted(
        ((str(known.change.partition), sorted(outline.topic_ids), outline.first, outline.last, known.file.path))
        for known, outline in outlines
    )
    last: tuple[Any, ...] | None = None
    for place, ids, first, until, path in ordered:
        if last and last[:2] == (place, ids) and first <= last[2]:
            yield Difference(
                what="two files of the table have the same offsets",
                file=path,
                partition=place,
                offset=first,
                expected=f"offsets after {last[2]}, the last of {last[3]}",
                found=f"offset {first}",
                next=RESTORE_LOG,
            )
        last = (place, ids, until, path)


def beside(manifests: Iterable[Manifest], until: int) -> set[str]:
    """The files of a machine's further tables, by the entries up to one of them."""
    files: set[str] = set()
    for manifest in manifests:
        if manifest.entry.sequence > until:
            break
        added = {file.path for change in manifest.entry.changes for some in change.others.values() for file in some}
        files = (files - set(manifest.entry.removed)) | added
    return files


def same_outputs(tables: Mapping[str, tuple[int, set[str]]], manifests: Sequence[Manifest]) -> Iterator[Difference]:
    """Each further table has the files of the entry that it says to have reached. One that is behind is no damage."""
    last = manifests[-1].entry.sequence
    for table, (reached, seen) in tables.items():
        wanted = {path for path in beside(manifests, reached) if table_in(path) == table}
        where: dict[str, Any] = {"file": room(table), "sequence": reached, "next": REBUILD}
        if not 0 <= reached <= last:
            found = f"entry {reached}" if reached >= 0 else "no entry, or it cannot be read"
            yield Difference(what="a table names no entry of the ledger", found=found, **where)
        elif seen != wanted:
            one = min(seen ^ wanted)
            what = "a table lacks a file" if one in wanted else "a table has a file that no entry added to it"
            yield Difference(what=what, **{**where, "file": one})
        if reached < last:
            told = {**where, "next": "the next run brings it up", "level": "warning"}
            yield Difference(what=f"a table is as of entry {reached}, the ledger is at {last}", **told)


class Rows:
    """A partition's tables, made of its records alone."""

    def __init__(self, place: str, names: Iterable[str]) -> None:
        self.place, self.names = place, list(names)
        self.tables: dict[str, dict[Any, tuple[Row, int]]] = {}

    def take(self, session: str, key: Any, row: Row | None, offset: int) -> None:
        """The last record of a row: what it is now, or None where it was deleted."""
        table = self.tables.setdefault(session, {})
        if row is None:
            table.pop(key, None)
        else:
            table[key] = (row, offset)

    def differ(self, states: Mapping[str, Mapping[Any, Row]]) -> Iterator[Difference]:
        """Sessions whose state is not what their records make."""
        for name in sorted({*self.tables, *states}):
            made, kept = self.tables.get(name, {}), states.get(name, {})
            for key in sorted({*made, *kept}, key=repr):
                row, offset = made.get(key, (None, -1))
                if key not in made or key not in kept or plain(made[key][0]) != plain(kept[key]):
                    yield Difference(
                        what="the state is not what its records make",
                        partition=self.place,
                        offset=offset,
                        session=name,
                        expected=self._shown(row),
                        found=self._shown(kept.get(key)),
                        cause="expected: by folding the records; found: in the state files",
                        next="keep both and report this as a bug; the session is right again after its next snapshot",
                    )

    def lacking(self, states: Mapping[str, Mapping[Any, Row]]) -> Iterator[Difference]:
        """Rows that records make and that a state does not have."""
        for name in sorted(self.tables):
            for key, (row, offset) in sorted(self.tables[name].items(), key=repr):
                if key not in states.get(name, {}):
                    yield Difference(
                        what="the state lacks a row that its records make",
                        partition=self.place,
                        offset=offset,
                        session=name,
                        expected=self._shown(row),
                        found="`end` of the machine does not take it back",
                        cause="the state lost the row, or the machine's `end` does not name every row",
                        next="let `end` take back every row of the state; then `seriatim repair {stream} --partition"
                        f" {self.place}` folds the session again",
                    )

    def _shown(self, row: Row | None) -> str:
        if row is None:
            return "no such row"
        return ", ".join(f"{name}={value!r}" for name, value in zip(self.names, row, strict=True))[:400]


def plain(row: Row) -> Row:
    """A row as it compares: a time without a zone is in UTC, as the records have it."""
    return tuple([_in_utc(value) if isinstance(value, datetime) else value for value in row])


def _in_utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value
