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

from seriatim.engine.crash_points import crash_point
from seriatim.engine.machine import fits_column_type
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.record_kinds import MAIN_TABLE, OTHER_TABLE_PREFIX, RowKeySpec, table_directory
from seriatim.engine.session import FoldOutput, QuarantinedMessage, Session, SessionEndRecords
from seriatim.engine.session_filter import ReplacedRecords
from seriatim.errors import DamagedFileError, ensure
from seriatim.ledger.model import File
from seriatim.operations.compaction_rules import Intent
from seriatim.ports import UnfitRecordsError
from seriatim.storage.current_rows import SessionTable, is_row_deleted


class MemoryDigests:
    """Digests of offsets, keys and values: XXH3-128, the same however the messages are cut."""

    def __init__(self) -> None:
        self._offsets = xxh3_128()
        self._columns_to_read = {
            "keys": (xxh3_128(), xxh3_128()),
            "values": (xxh3_128(), xxh3_128()),
        }

    def update(self, batch: MessageBatch) -> None:
        """Take in messages, in order."""
        for offset in range(batch.start, batch.start + len(batch)):
            self._offsets.update(struct.pack("<q", offset))
        for name, column in (("keys", batch.keys), ("values", batch.values)):
            content, lengths = self._columns_to_read[name]
            for value in column:
                content.update(value or b"")
                lengths.update(struct.pack("<i", -1 if value is None else len(value)))

    def finish(self) -> dict[str, str]:
        """Hexadecimal digests by name."""
        both = {
            name: xxh3_128(content.digest() + lengths.digest()).hexdigest()
            for name, (content, lengths) in self._columns_to_read.items()
        }
        return {"offsets": self._offsets.hexdigest(), **both}


class MemoryFile(Struct):
    """A file: its bytes, and the rows they stand for. Empty until it is closed, as half a file is."""

    content: bytes = b""
    rows: list[dict[str, Any]] = field(default_factory=list)


class MemoryFiles:
    """Record, quarantine and state files. Implements `RecordStore`, `StateStore` and `Joiner`."""

    def __init__(
        self,
        columns: Mapping[str, str],
        other_columns: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.columns = {
            MAIN_TABLE: dict(columns),
            **{table: dict(theirs) for table, theirs in (other_columns or {}).items()},
        }
        """The machine's own columns, by type name, of each table."""
        self.files: dict[str, MemoryFile] = {}
        self.stored_intents: dict[tuple[Partition, str], Intent] = {}
        self.oldest_complete = (-1, "")

    def record_writer(
        self, partition: Partition, topic_id: str, stem: str, table: str = MAIN_TABLE
    ) -> MemoryRecordWriter:
        """A record file to be written."""
        made = MemoryRecordWriter(
            self, f"{table_directory(table)}/{partition}/{stem}", partition, topic_id
        )
        made.columns = self.columns[table]
        return made

    def quarantine_writer(
        self, partition: Partition, topic_id: str, stem: str
    ) -> MemoryQuarantineWriter:
        """A file of messages set aside, to be written."""
        return MemoryQuarantineWriter(self, f"kept/{partition}/{stem}", partition, topic_id)

    def sweep(self, partition: Partition, stem_prefix: str, keep: set[str]) -> list[str]:
        """Delete a partition's files whose stem begins so and whose paths are not in `keep`."""
        paths = [
            path
            for path in self.paths(partition)
            if path.rpartition("/")[2].startswith(stem_prefix)
        ]
        return self.delete(set(paths) - keep)

    def paths(self, partition: Partition) -> list[str]:
        """All files of a partition: records, state and messages set aside."""
        others = {
            path.partition("/")[0] for path in self.files if path.startswith(OTHER_TABLE_PREFIX)
        }
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
        return [intent for (place, _), intent in self.stored_intents.items() if place == partition]

    def put_intent(self, intent: Intent) -> None:
        """Note what a compaction is about to replace."""
        self.stored_intents[intent.partition, intent.attempt] = intent

    def drop_intent(self, intent: Intent) -> None:
        """Forget it."""
        self.stored_intents.pop((intent.partition, intent.attempt), None)

    def oldest_complete_entry(self) -> tuple[int, str]:
        """The oldest entry whose files are all there."""
        return self.oldest_complete

    def put_oldest_complete_entry(self, sequence: int, sha256: str) -> None:
        """Note how far was swept."""
        self.oldest_complete = (sequence, sha256)

    def concatenate(
        self, partition: Partition, topic_id: str, stem: str, files: Sequence[File]
    ) -> File:
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
        return {name: session for name, session in self.load_all(files).items() if name in wanted}

    def find_names(self, files: Iterable[File], names: Iterable[str]) -> set[str]:
        """Which of these names are in the files."""
        return set(self.load(files, names))

    def save(
        self,
        partition: Partition,
        stem: str,
        sessions: Mapping[str, Session],
        files_to_merge: Iterable[File],
    ) -> File:
        """Write sessions, over those of the files to be merged."""
        bare = {
            name: replace(session, state=None, is_active=False, is_touched=False, is_undoable=False)
            for name, session in sessions.items()
        }
        path = f"state/{partition}/{stem}"
        self.open(path)
        everyone = {**self.load_all(files_to_merge), **bare}
        ensure(bool(everyone), "state is saved only where there is some", path=path)
        return self.close(
            path, msgspec.msgpack.encode(everyone), [{"session": name} for name in everyone]
        )

    def quarantined_sessions(self, files: Iterable[File]) -> dict[str, Session]:
        """Sessions in quarantine."""
        everyone = self.load_all(files)
        return {name: session for name, session in everyone.items() if session.finding is not None}

    def all_sessions(self, files: Iterable[File]) -> Iterable[tuple[str, Session]]:
        """Every session, one by one."""
        return self.load_all(files).items()

    def load_all(self, files: Iterable[File]) -> dict[str, Session]:
        """All sessions of state files, each from the newest that has it."""
        found: dict[str, Session] = {}
        for file in files:
            found |= msgspec.msgpack.decode(self.read(file).content, type=dict[str, Session])
        return found

    def read(self, file: File) -> MemoryFile:
        """A file, checked against its digest."""
        stored = self.files.get(file.path)
        if stored is None:
            raise DamagedFileError(
                f"{file.path} is missing", path=file.path, next="restore it from a backup"
            )
        if xxh3_128(stored.content).hexdigest() != file.digest:
            raise DamagedFileError(
                f"{file.path} is corrupt", path=file.path, next="restore it from a backup"
            )
        return stored

    def find_damaged_files(
        self, files: Iterable[File], *, check_digests: bool = True
    ) -> dict[str, str]:
        """Files that are not as committed, and why."""
        found = {}
        for file in files:
            stored = self.files.get(file.path)
            if stored is None:
                found[file.path] = "it is missing"
            elif len(stored.content) != file.size_bytes:
                found[file.path] = f"it has {len(stored.content)} bytes, not {file.size_bytes}"
            elif check_digests and xxh3_128(stored.content).hexdigest() != file.digest:
                found[file.path] = "its digest differs"
        return found

    def has_replaced_records(self, file: File, replaced: ReplacedRecords) -> bool:
        """Whether a file has a record that is replaced."""
        return any(replaced.includes(row["session"], row["offset"]) for row in self.read(file).rows)

    def has_records_in(
        self,
        files: Iterable[File],
        offset_range: OffsetRange,
        partition_and_topic_id: tuple[Partition, str] | None = None,
    ) -> bool:
        """Whether any of these files has a record at these offsets; of one partition and topic id,
        if that is asked.
        """
        rows = (
            row
            for file in files
            for row in (self.files[file.path] if partition_and_topic_id else self.read(file)).rows
        )
        at = (row for row in rows if row["offset"] in offset_range)
        return any(
            not partition_and_topic_id
            or (_partition_of(row), row["topic_id"]) == partition_and_topic_id
            for row in at
        )

    def session_tables(
        self, partition: Partition, topic_id: str, files: Sequence[File], row_key_spec: RowKeySpec
    ) -> Iterable[SessionTable]:
        """What a partition's records make of each session."""
        words = [
            row
            for file in sorted(files, key=lambda file: file.first_offset)
            for row in self.read(file).rows
        ]
        ensure(
            all(row["topic_id"] == topic_id for row in words),
            "files are of one life",
            partition=str(partition),
        )
        sessions: dict[str, list[dict[str, Any]]] = {}
        for row in words:
            sessions.setdefault(row["session"], []).append(row)
        for session, mine in sessions.items():
            last = {tuple(row[name] for name in row_key_spec.key): row for row in mine}
            kept = [
                tuple(row[name] for name in row_key_spec.columns)
                for row in last.values()
                if not is_row_deleted(row_key_spec, row)
            ]
            yield SessionTable(
                session, kept, mine[-1]["offset"], mine[-1]["timestamp"], mine[-1]["sequence"]
            )

    def first_difference_offset(
        self,
        old_files: Sequence[File],
        replaced: ReplacedRecords,
        new_files: Sequence[File],
        offset_range: OffsetRange,
    ) -> int | None:
        """The first offset at which what is replaced in `olds` is not what `news` have at these
        offsets.
        """
        was = [
            row
            for old in old_files
            for row in self.read(old).rows
            if replaced.includes(row["session"], row["offset"])
        ]
        now = [
            row for new in new_files for row in self.read(new).rows if row["offset"] in offset_range
        ]
        one, other = (
            sorted(rows, key=lambda row: (row["offset"], row["index"])) for rows in (was, now)
        )
        parted = (pair for pair in zip_longest(one, other) if repr(pair[0]) != repr(pair[1]))
        return min((row["offset"] for row in next(parted, ()) if row is not None), default=None)

    def join_files(
        self,
        partition: Partition,
        stem: str,
        old_files: Sequence[File],
        replaced: ReplacedRecords,
        new_files: Sequence[File],
        offset_range: OffsetRange,
    ) -> File | None:
        """One file of what is not replaced in `olds` and what `news` have at these offsets."""
        stay = [
            row
            for old in old_files
            for row in self.read(old).rows
            if not replaced.includes(row["session"], row["offset"])
        ]
        come = [
            row for new in new_files for row in self.read(new).rows if row["offset"] in offset_range
        ]
        rows = sorted(stay + come, key=lambda row: (row["offset"], row["index"]))
        if not rows:
            return None
        path = f"{(*old_files, *new_files)[0].path.partition('/')[0]}/{partition}/{stem}"
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
        self.common = {
            "topic": partition.topic,
            "topic_id": topic_id,
            "partition": partition.number,
        }
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

    def write(self, batch: MessageBatch, output: FoldOutput) -> None:
        """Records with their own columns first; those whose values do not fit are refused."""
        kinds = list(self.columns.values())
        unfit = [i for i, row in enumerate(output.rows) if not all(map(_fits, row, kinds))]
        if unfit:
            raise UnfitRecordsError(unfit)
        self.add([self._row(batch, output, i) for i in range(len(output.rows))])

    def write_end_records(self, offset: int, end_records: SessionEndRecords) -> None:
        """Records that end sessions, all at one offset."""
        kinds = list(self.columns.values())
        if unfit := [
            i for i, row in enumerate(end_records.rows) if not all(map(_fits, row, kinds))
        ]:
            raise UnfitRecordsError(unfit)
        own = zip(
            end_records.indexes,
            end_records.timestamps,
            end_records.sessions,
            end_records.sequences,
            end_records.rows,
            strict=True,
        )
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

    def _row(self, batch: MessageBatch, output: FoldOutput, i: int) -> dict[str, Any]:
        position = output.positions[i]
        offset, source = batch.start + position, output.source_messages.get(i)
        return {
            "offset": offset,
            "index": output.indexes[i],
            "source_offset": source.offset if source else offset,
            "timestamp": source.timestamp if source else batch.timestamps[position],
            "session": output.sessions[i],
            "sequence": output.sequences[i],
            **dict(zip(self.columns, output.rows[i], strict=True)),
        }


class MemoryQuarantineWriter(_MemoryWriter):
    """A file of messages set aside."""

    def write(self, batch: MessageBatch, messages: list[QuarantinedMessage]) -> None:
        """Messages whole, with why they had no effect."""
        self.add([one.to_row(batch) for one in messages])


def _partition_of(row: Mapping[str, Any]) -> Partition:
    return Partition(row["topic"], row["partition"])


def _fits(value: Any, kind: str) -> bool:
    return kind.startswith("decimal") or fits_column_type(value, kind)
