"""Record, quarantine and state files in memory, and the digests of messages.

Next room: ledger.py names files; what no entry names means nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace
from xxhash import xxh3_128

from seriatim.core.compact import Intent
from seriatim.core.crash import crash_point
from seriatim.core.current import Keyed, Tabled, is_gone
from seriatim.core.errors import DamagedFileError, ensure
from seriatim.core.ledger import File
from seriatim.core.machine import fits
from seriatim.core.message import Stretch
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.outputs import MAIN, ROOM, room
from seriatim.core.scope import Replaced
from seriatim.core.session import Ended, Folded, Kept, Session
from seriatim.ports import UnfitRecords


class MemoryDigests:
    """Digests of offsets, keys and values: XXH3-128, the same however the messages are cut."""

    def __init__(self) -> None:
        self._offsets = xxh3_128()
        self._columns = {"keys": (xxh3_128(), xxh3_128()), "values": (xxh3_128(), xxh3_128())}

    def update(self, stretch: Stretch) -> None:
        """Take in messages, in order."""
        for offset in range(stretch.start, stretch.start + len(stretch)):
            self._offsets.update(struct.pack("<q", offset))
        for name, column in (("keys", stretch.keys), ("values", stretch.values)):
            content, lengths = self._columns[name]
            for value in column:
                content.update(value or b"")
                lengths.update(struct.pack("<i", -1 if value is None else len(value)))

    def finish(self) -> dict[str, str]:
        """Hexadecimal digests by name."""
        both = {
            name: xxh3_128(content.digest() + lengths.digest()).hexdigest()
            for name, (content, lengths) in self._columns.items()
        }
        return {"offsets": self._offsets.hexdigest(), **both}


class MemoryFile(Struct):
    """A file: its bytes, and the rows they stand for. Empty until it is closed, as half a file is."""

    content: bytes = b""
    rows: list[dict[str, Any]] = field(default_factory=list)


class MemoryFiles:
    """Record, quarantine and state files. Implements `RecordStore`, `StateStore` and `Joiner`."""

    def __init__(self, columns: Mapping[str, str], others: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.columns = {MAIN: dict(columns), **{table: dict(theirs) for table, theirs in (others or {}).items()}}
        """The machine's own columns, by type name, of each table."""
        self.files: dict[str, MemoryFile] = {}
        self.noted: dict[tuple[Partition, str], Intent] = {}
        self.swept_up_to = (-1, "")

    def records(self, partition: Partition, topic_id: str, stem: str, table: str = MAIN) -> MemoryRecordWriter:
        """A record file to be written."""
        made = MemoryRecordWriter(self, f"{room(table)}/{partition}/{stem}", partition, topic_id)
        made.columns = self.columns[table]
        return made

    def kept(self, partition: Partition, topic_id: str, stem: str) -> MemoryKeptWriter:
        """A file of messages set aside, to be written."""
        return MemoryKeptWriter(self, f"kept/{partition}/{stem}", partition, topic_id)

    def sweep(self, partition: Partition, stem_prefix: str, keep: set[str]) -> list[str]:
        """Delete a partition's files whose stem begins so and whose paths are not in `keep`."""
        paths = [path for path in self.paths(partition) if path.rpartition("/")[2].startswith(stem_prefix)]
        return self.delete(set(paths) - keep)

    def paths(self, partition: Partition) -> list[str]:
        """All files of a partition: records, state and messages set aside."""
        others = {path.partition("/")[0] for path in self.files if path.startswith(ROOM)}
        begins = tuple(f"{kind}/{partition}/" for kind in ("records", "state", "kept", *others))
        return [path for path in self.files if path.startswith(begins)]

    def delete(self, paths: Iterable[str]) -> list[str]:
        """Delete files; those that are gone already are no error."""
        deleted = sorted(paths)
        for path in deleted:
            self.files.pop(path, None)
        return deleted

    def intents(self, partition: Partition) -> list[Intent]:
        """The intents of a partition."""
        return [intent for (place, _), intent in self.noted.items() if place == partition]

    def put_intent(self, intent: Intent) -> None:
        """Note what a compaction is about to replace."""
        self.noted[intent.partition, intent.attempt] = intent

    def drop_intent(self, intent: Intent) -> None:
        """Forget it."""
        self.noted.pop((intent.partition, intent.attempt), None)

    def swept(self) -> tuple[int, str]:
        """The oldest entry whose files are all there."""
        return self.swept_up_to

    def put_swept(self, sequence: int, sha256: str) -> None:
        """Note how far was swept."""
        self.swept_up_to = (sequence, sha256)

    def concatenate(self, partition: Partition, topic_id: str, stem: str, files: Sequence[File]) -> File:
        """One record file of several, each proved before it is copied."""
        path, rows = f"records/{partition}/{stem}", list[dict[str, Any]]()
        self.open(path)
        for file in files:
            rows += self.read(file).rows
            crash_point("record-file-half")
        ensure({row["topic_id"] for row in rows} == {topic_id}, "a file is of one life", path=path)
        places = [(row["offset"], row["index"]) for row in rows]
        ensure(sorted(set(places)) == places, "files follow each other", path=path)
        return self.close(path, msgspec.msgpack.encode(rows), rows)

    def load(self, files: Iterable[File], names: Iterable[str]) -> dict[str, Session]:
        """The named sessions, each from the newest file that has it."""
        wanted = set(names)
        return {name: session for name, session in self.everything(files).items() if name in wanted}

    def holds(self, files: Iterable[File], names: Iterable[str]) -> set[str]:
        """Which of these names are in the files."""
        return set(self.load(files, names))

    def save(self, partition: Partition, stem: str, sessions: Mapping[str, Session], merge: Iterable[File]) -> File:
        """Write sessions, over those of the files to be merged."""
        bare = {
            name: replace(session, state=None, awake=False, touched=False, careful=False)
            for name, session in sessions.items()
        }
        path = f"state/{partition}/{stem}"
        self.open(path)
        everyone = {**self.everything(merge), **bare}
        ensure(bool(everyone), "state is saved only where there is some", path=path)
        return self.close(path, msgspec.msgpack.encode(everyone), [{"session": name} for name in everyone])

    def quarantined(self, files: Iterable[File]) -> dict[str, Session]:
        """Sessions in quarantine."""
        everyone = self.everything(files)
        return {name: session for name, session in everyone.items() if session.finding is not None}

    def each(self, files: Iterable[File]) -> Iterable[tuple[str, Session]]:
        """Every session, one by one."""
        return self.everything(files).items()

    def everything(self, files: Iterable[File]) -> dict[str, Session]:
        """All sessions of state files, each from the newest that has it."""
        found: dict[str, Session] = {}
        for file in files:
            found |= msgspec.msgpack.decode(self.read(file).content, type=dict[str, Session])
        return found

    def read(self, file: File) -> MemoryFile:
        """A file, checked against its digest."""
        stored = self.files.get(file.path)
        if stored is None:
            raise DamagedFileError(f"{file.path} is missing", path=file.path, next="restore it from a backup")
        if xxh3_128(stored.content).hexdigest() != file.digest:
            raise DamagedFileError(f"{file.path} is corrupt", path=file.path, next="restore it from a backup")
        return stored

    def damaged(self, files: Iterable[File], *, thorough: bool = True) -> dict[str, str]:
        """Files that are not as committed, and why."""
        found = {}
        for file in files:
            stored = self.files.get(file.path)
            if stored is None:
                found[file.path] = "it is missing"
            elif len(stored.content) != file.bytes:
                found[file.path] = f"it has {len(stored.content)} bytes, not {file.bytes}"
            elif thorough and xxh3_128(stored.content).hexdigest() != file.digest:
                found[file.path] = "its digest differs"
        return found

    def touches(self, file: File, replaced: Replaced) -> bool:
        """Whether a file has a record that is replaced."""
        return any(replaced.has(row["session"], row["offset"]) for row in self.read(file).rows)

    def any_within(self, files: Iterable[File], within: OffsetRange, of: tuple[Partition, str] | None = None) -> bool:
        """Whether any of these files has a record at these offsets; of one partition and topic id, if that is asked."""
        rows = (row for file in files for row in (self.files[file.path] if of else self.read(file)).rows)
        at = (row for row in rows if row["offset"] in within)
        return any(not of or (_place(row), row["topic_id"]) == of for row in at)

    def tables(self, partition: Partition, topic_id: str, files: Sequence[File], keyed: Keyed) -> Iterable[Tabled]:
        """What a partition's records make of each session."""
        words = [row for file in sorted(files, key=lambda file: file.first) for row in self.read(file).rows]
        ensure(all(row["topic_id"] == topic_id for row in words), "files are of one life", partition=str(partition))
        sessions: dict[str, list[dict[str, Any]]] = {}
        for row in words:
            sessions.setdefault(row["session"], []).append(row)
        for session, mine in sessions.items():
            last = {tuple(row[name] for name in keyed.key): row for row in mine}
            kept = [tuple(row[name] for name in keyed.columns) for row in last.values() if not is_gone(keyed, row)]
            yield Tabled(session, kept, mine[-1]["offset"], mine[-1]["timestamp"], mine[-1]["sequence"])

    def parts_at(
        self, olds: Sequence[File], replaced: Replaced, news: Sequence[File], within: OffsetRange
    ) -> int | None:
        """The first offset at which what is replaced in `olds` is not what `news` have at these offsets."""
        was = [row for old in olds for row in self.read(old).rows if replaced.has(row["session"], row["offset"])]
        now = [row for new in news for row in self.read(new).rows if row["offset"] in within]
        one, other = (sorted(rows, key=lambda row: (row["offset"], row["index"])) for rows in (was, now))
        parted = (pair for pair in zip_longest(one, other) if repr(pair[0]) != repr(pair[1]))
        return min((row["offset"] for row in next(parted, ()) if row is not None), default=None)

    def join(
        self,
        partition: Partition,
        stem: str,
        olds: Sequence[File],
        replaced: Replaced,
        news: Sequence[File],
        within: OffsetRange,
    ) -> File | None:
        """One file of what is not replaced in `olds` and what `news` have at these offsets."""
        stay = [row for old in olds for row in self.read(old).rows if not replaced.has(row["session"], row["offset"])]
        come = [row for new in news for row in self.read(new).rows if row["offset"] in within]
        rows = sorted(stay + come, key=lambda row: (row["offset"], row["index"]))
        if not rows:
            return None
        path = f"{(*olds, *news)[0].path.partition('/')[0]}/{partition}/{stem}"
        self.open(path)
        crash_point("record-file-half")
        return self.close(path, msgspec.msgpack.encode(rows), rows)

    def open(self, path: str) -> None:
        """Begin a file. Names are unique: nothing is ever overwritten."""
        ensure(path not in self.files, "the file is there already", path=path)
        self.files[path] = MemoryFile()

    def close(self, path: str, content: bytes, rows: list[dict[str, Any]]) -> File:
        """Finish a file; its description for the ledger. Whoever swept it meanwhile was first."""
        if path not in self.files:
            raise FileNotFoundError(path)
        self.files[path] = MemoryFile(content, rows)
        offsets = [row["offset"] for row in rows if "index" in row] or [-1]  # of records alone
        digest = xxh3_128(content).hexdigest()
        return File(path, len(content), len(rows), digest, offsets[0], offsets[-1])


class _MemoryWriter:
    """Rows of one file until it is closed."""

    def __init__(self, files: MemoryFiles, path: str, partition: Partition, topic_id: str) -> None:
        self.files, self.path = files, path
        self.common = {"topic": partition.topic, "topic_id": topic_id, "partition": partition.number}
        self.rows: list[dict[str, Any]] = []

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Take rows; the first ones open the file."""
        if rows and not self.rows:
            self.files.open(self.path)
            crash_point("record-file-open")
        self.rows += [self.common | row for row in rows]
        if rows:
            crash_point("record-file-half")

    def close(self) -> File | None:
        """Finish the file; None if nothing was written."""
        if not self.rows:
            return None
        return self.files.close(self.path, msgspec.msgpack.encode(self.rows), self.rows)


class MemoryRecordWriter(_MemoryWriter):
    """A record file of one partition and slice."""

    columns: Mapping[str, str]

    def write(self, stretch: Stretch, folded: Folded) -> None:
        """Records with their own columns first; those whose values do not fit are refused."""
        kinds = list(self.columns.values())
        unfit = [i for i, row in enumerate(folded.rows) if not all(map(_fits, row, kinds))]
        if unfit:
            raise UnfitRecords(unfit)
        self.add([self._row(stretch, folded, i) for i in range(len(folded.rows))])

    def end(self, offset: int, ended: Ended) -> None:
        """Records that end sessions, all at one offset."""
        kinds = list(self.columns.values())
        if unfit := [i for i, row in enumerate(ended.rows) if not all(map(_fits, row, kinds))]:
            raise UnfitRecords(unfit)
        own = zip(ended.indexes, ended.timestamps, ended.sessions, ended.sequences, ended.rows, strict=True)
        self.add(
            [
                {
                    "offset": offset,
                    "index": index,
                    "source_offset": offset,
                    "timestamp": timestamp,
                    "session": session,
                    "sequence": sequence,
                    **dict(zip(self.columns, row, strict=True)),
                }
                for index, timestamp, session, sequence, row in own
            ]
        )

    def _row(self, stretch: Stretch, folded: Folded, i: int) -> dict[str, Any]:
        position = folded.positions[i]
        offset, source = stretch.start + position, folded.sources.get(i)
        return {
            "offset": offset,
            "index": folded.indexes[i],
            "source_offset": source.offset if source else offset,
            "timestamp": source.timestamp if source else stretch.timestamps[position],
            "session": folded.sessions[i],
            "sequence": folded.sequences[i],
            **dict(zip(self.columns, folded.rows[i], strict=True)),
        }


class MemoryKeptWriter(_MemoryWriter):
    """A file of messages set aside."""

    def write(self, stretch: Stretch, kept: list[Kept]) -> None:
        """Messages whole, with why they had no effect."""
        self.add([one.row(stretch) for one in kept])


def _place(row: Mapping[str, Any]) -> Partition:
    return Partition(row["topic"], row["partition"])


def _fits(value: Any, kind: str) -> bool:
    return kind.startswith("decimal") or fits(value, kind)
