"""Record, quarantine and state files in memory, and the digests of messages.

Next: memory/ledger.py names files; a file that no entry names means nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec import Struct, field
from xxhash import xxh3_128

from seriatim.engine.crash_points import crash_point
from seriatim.engine.files import File, Files, UnfitRecordsError
from seriatim.engine.messages import MessageBatch
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.records import (
    MAIN_TABLE,
    OTHER_TABLE_PREFIX,
    Record,
    RecordSource,
    RowKeySpec,
    SessionTable,
    fits_column_type,
    owner_values,
    record_values,
    table_directory,
)
from seriatim.engine.session import (
    FoldOutput,
    QuarantinedMessage,
    ReplacedRecords,
    Row,
    Session,
    SessionEndRecords,
    SessionsByName,
    pack_session,
    unpack_session,
)
from seriatim.errors import DamagedFileError, ensure
from seriatim.ledger.replaced_files import Intent


class MemoryDigests:
    """Digests of offsets, keys and values: XXH3-128, the same however the messages are cut."""

    def __init__(self) -> None:
        self._offsets = xxh3_128()
        self._column_digests = {
            "keys": (xxh3_128(), xxh3_128()),
            "values": (xxh3_128(), xxh3_128()),
        }

    def update(self, batch: MessageBatch) -> None:
        """Add messages, in order."""
        for offset in range(batch.start, batch.start + len(batch)):
            self._offsets.update(struct.pack("<q", offset))
        for name, column in (("keys", batch.keys), ("values", batch.values)):
            content_digest, length_digest = self._column_digests[name]
            for value in column:
                length = -1 if value is None else len(value)
                content_digest.update(value or b"")
                length_digest.update(struct.pack("<i", length))

    def finish(self) -> dict[str, str]:
        """Hexadecimal digests by name."""
        digests = {"offsets": self._offsets.hexdigest()}
        for name, (content_digest, length_digest) in self._column_digests.items():
            both = content_digest.digest() + length_digest.digest()
            digests[name] = xxh3_128(both).hexdigest()
        return digests


class MemoryFile(Struct):
    """A file: its bytes, and the rows that they stand for. It is empty until it is closed."""

    content: bytes = b""
    rows: list[Record] = field(default_factory=list)


class MemoryFiles:
    """Record, quarantine and state files. Implements `RecordStore`, `StateStore` and `Joiner`."""

    def __init__(
        self,
        columns: Mapping[str, str],
        other_columns: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.columns = {MAIN_TABLE: dict(columns)}
        """The machine's own columns of each table, with the names of their types."""
        for table, table_columns in (other_columns or {}).items():
            self.columns[table] = dict(table_columns)
        self.files: dict[str, MemoryFile] = {}
        self.lists_cheaply = True
        """Simulations set it to False, as a bucket has it."""
        self.stored_intents: dict[tuple[Partition, str], Intent] = {}

    def record_writer(
        self,
        partition: Partition,
        topic_id: str,
        stem: str,
        table: str = MAIN_TABLE,
    ) -> MemoryRecordWriter:
        """A writer for a record file."""
        path = f"{table_directory(table)}/{partition}/{stem}"
        writer = MemoryRecordWriter(self, path, partition, topic_id)
        writer.columns = self.columns[table]
        return writer

    def quarantine_writer(
        self,
        partition: Partition,
        topic_id: str,
        stem: str,
    ) -> MemoryQuarantineWriter:
        """A writer for a file of quarantined messages."""
        return MemoryQuarantineWriter(self, f"kept/{partition}/{stem}", partition, topic_id)

    def paths(self, partition: Partition) -> list[str]:
        """The paths of all files of a partition: records, state and quarantined messages."""
        folders = {"records", "state", "kept"}
        for path in self.files:
            if path.startswith(OTHER_TABLE_PREFIX):
                folders.add(path.partition("/")[0])
        prefixes = tuple(f"{folder}/{partition}/" for folder in folders)
        return [path for path in self.files if path.startswith(prefixes)]

    def has_files(self, paths: Iterable[str]) -> bool:
        """Whether all of these files are there."""
        return all(path in self.files for path in paths)

    def delete(self, paths: Iterable[str]) -> list[str]:
        """Delete files. One that is gone already is no error."""
        deleted = sorted(paths)
        for path in deleted:
            self.files.pop(path, None)
        return deleted

    def intents(self, partition: Partition) -> list[Intent]:
        """The intents of a partition."""
        intents = self.stored_intents.values()
        return [intent for intent in intents if intent.partition == partition]

    def put_intent(self, intent: Intent) -> None:
        """Note what a compaction is about to replace."""
        self.stored_intents[intent.partition, intent.attempt] = intent

    def drop_intent(self, intent: Intent) -> None:
        """Delete an intent."""
        self.stored_intents.pop((intent.partition, intent.attempt), None)

    def concatenate(
        self,
        partition: Partition,
        topic_id: str,
        stem: str,
        files: Sequence[File],
    ) -> File:
        """Write one record file of several, each proved before it is copied."""
        path = f"records/{partition}/{stem}"
        rows: list[Record] = []
        self.open(path)
        for file in files:
            rows += self.read(file).rows
            crash_point("record-file-half")
        topic_ids = {row["topic_id"] for row in rows}
        ensure(topic_ids == {topic_id}, "a record file has one topic id", path=path)
        positions = [_record_order(row) for row in rows]
        ensure(sorted(set(positions)) == positions, "files follow each other", path=path)
        return self.close(path, msgspec.msgpack.encode(rows), rows)

    def load(self, files: Iterable[File], names: Iterable[str]) -> SessionsByName:
        """The named sessions, each from the newest file that has it."""
        sessions = self.load_all(files)
        return {name: sessions[name] for name in names if name in sessions}

    open_sessions = load
    """Sessions are stored as one value here, so there is nothing to leave where it is."""

    def find_names(self, files: Iterable[File], names: Iterable[str]) -> set[str]:
        """Which of these names are in the files."""
        return set(self.load(files, names))

    def save(
        self,
        partition: Partition,
        stem: str,
        sessions: SessionsByName,
        files_to_merge: Iterable[File],
    ) -> Files:
        """Write sessions on top of those of the files to be merged."""
        packed_sessions = self._packed_sessions(files_to_merge)
        for name, session in sessions.items():
            session.join_rows()
            packed_sessions[name] = pack_session(session)
        path = f"state/{partition}/{stem}"
        self.open(path)
        ensure(bool(packed_sessions), "state is saved only where there is some", path=path)
        rows = [{"session": name} for name in packed_sessions]
        return (self.close(path, msgspec.msgpack.encode(packed_sessions), rows),)

    def quarantined_sessions(self, files: Iterable[File]) -> SessionsByName:
        """The sessions in quarantine."""
        sessions = self.load_all(files)
        return {name: session for name, session in sessions.items() if session.finding is not None}

    def all_sessions(
        self,
        files: Iterable[File],
        *,
        with_rows: bool = True,  # there are only whole sessions
    ) -> Iterable[tuple[str, Session]]:
        """Every session, one by one."""
        return self.load_all(files).items()

    def load_all(self, files: Iterable[File]) -> SessionsByName:
        """All sessions of state files, each from the newest file that has it."""
        packed_sessions = self._packed_sessions(files)
        return {name: unpack_session(packed) for name, packed in packed_sessions.items()}

    def _packed_sessions(self, files: Iterable[File]) -> dict[str, bytes]:
        packed_sessions: dict[str, bytes] = {}
        for file in files:
            content = self.read(file).content
            packed_sessions.update(msgspec.msgpack.decode(content, type=dict[str, bytes]))
        return packed_sessions

    def read(self, file: File) -> MemoryFile:
        """A file, checked against its digest."""
        stored = self.files.get(file.path)
        if stored is None:
            raise DamagedFileError(
                f"{file.path} is missing",
                path=file.path,
                next="restore it from a backup",
            )
        if xxh3_128(stored.content).hexdigest() != file.digest:
            raise DamagedFileError(
                f"{file.path} is corrupt",
                path=file.path,
                next="restore it from a backup",
            )
        return stored

    def find_damaged_files(
        self,
        files: Iterable[File],
        *,
        check_digests: bool = True,
    ) -> dict[str, str]:
        """The files that are not as committed, by path, and what is wrong with each."""
        damaged = {}
        for file in files:
            stored = self.files.get(file.path)
            if stored is None:
                damaged[file.path] = "it is missing"
            elif len(stored.content) != file.size_bytes:
                damaged[file.path] = f"it has {len(stored.content)} bytes, not {file.size_bytes}"
            elif check_digests and xxh3_128(stored.content).hexdigest() != file.digest:
                damaged[file.path] = "its digest differs"
        return damaged

    def has_replaced_records(self, file: File, replaced: ReplacedRecords) -> bool:
        """Whether a file has a record that is replaced."""
        for row in self.read(file).rows:
            if replaced.includes(row["session"], row["offset"]):
                return True
        return False

    def has_records_in(
        self,
        files: Iterable[File],
        offset_range: OffsetRange,
        partition_and_topic_id: tuple[Partition, str] | None = None,
    ) -> bool:
        """Whether any of these files has a record at these offsets, of one partition and topic id
        if that is given.
        """
        for file in files:
            # The ledger has no digest of a file that somebody else wrote.
            is_own_file = partition_and_topic_id is None
            stored = self.read(file) if is_own_file else self.files[file.path]
            for row in stored.rows:
                owner = (Partition(row["topic"], row["partition"]), row["topic_id"])
                is_asked_for = partition_and_topic_id in (None, owner)
                if is_asked_for and row["offset"] in offset_range:
                    return True
        return False

    def session_tables(
        self,
        partition: Partition,
        topic_id: str,
        files: Sequence[File],
        row_key_spec: RowKeySpec,
    ) -> Iterable[SessionTable]:
        """The table of each session, as the records of a partition leave it."""
        records_by_session: dict[str, list[Record]] = {}
        for file in sorted(files, key=lambda file: file.first_offset):
            for record in self.read(file).rows:
                ensure(
                    record["topic_id"] == topic_id,
                    "the files have one topic id",
                    partition=str(partition),
                )
                records_by_session.setdefault(record["session"], []).append(record)
        for session, records in records_by_session.items():
            newest = {
                tuple(record[name] for name in row_key_spec.key): record for record in records
            }
            remaining = [
                record for record in newest.values() if not row_key_spec.deletes_row(record)
            ]
            yield SessionTable(
                session=session,
                # A record may be older than a column.
                rows=[
                    tuple(record.get(name) for name in row_key_spec.columns) for record in remaining
                ],
                offset=records[-1]["offset"],
                timestamp=records[-1]["timestamp"],
                sequence=records[-1]["sequence"],
            )

    def first_difference_offset(
        self,
        old_files: Sequence[File],
        replaced: ReplacedRecords,
        new_files: Sequence[File],
        offset_range: OffsetRange,
    ) -> int | None:
        """The first offset at which the replaced records of the old files differ from the records
        of the new files in this range; None if they are the same.
        """
        old_records, _ = self._split_by_replaced(old_files, replaced)
        new_records = self._records_in_range(new_files, offset_range)
        old_records.sort(key=_record_order)
        new_records.sort(key=_record_order)
        for old, new in zip_longest(old_records, new_records):
            # By their text: NaN equals nothing, but reads the same.
            if repr(old) != repr(new):
                return min(record["offset"] for record in (old, new) if record is not None)
        return None

    def join_files(
        self,
        partition: Partition,
        stem: str,
        old_files: Sequence[File],
        replaced: ReplacedRecords,
        new_files: Sequence[File],
        offset_range: OffsetRange,
    ) -> File | None:
        """Write one file: the records of the old files that are not replaced, and those of the new
        files in this range. None if there are none.
        """
        _, rows = self._split_by_replaced(old_files, replaced)
        rows += self._records_in_range(new_files, offset_range)
        if not rows:
            return None
        rows.sort(key=_record_order)
        # All files are of one table, and its folder is the first part of their paths.
        table_folder = (*old_files, *new_files)[0].path.partition("/")[0]
        path = f"{table_folder}/{partition}/{stem}"
        self.open(path)
        crash_point("record-file-half")
        return self.close(path, msgspec.msgpack.encode(rows), rows)

    def _split_by_replaced(
        self,
        files: Sequence[File],
        replaced: ReplacedRecords,
    ) -> tuple[list[Record], list[Record]]:
        """The records of files that are replaced, and those that are not."""
        replaced_records = []
        other_records = []
        for file in files:
            for record in self.read(file).rows:
                if replaced.includes(record["session"], record["offset"]):
                    replaced_records.append(record)
                else:
                    other_records.append(record)
        return replaced_records, other_records

    def _records_in_range(
        self,
        files: Sequence[File],
        offset_range: OffsetRange,
    ) -> list[Record]:
        records = []
        for file in files:
            rows = self.read(file).rows
            records += [record for record in rows if record["offset"] in offset_range]
        return records

    def open(self, path: str) -> None:
        """Create a file. Names are unique: nothing is ever overwritten."""
        ensure(path not in self.files, "the file is there already", path=path)
        # Without content, as a file that is half written: its digest fits no entry.
        self.files[path] = MemoryFile()

    def close(
        self,
        path: str,
        content: bytes,
        rows: list[Record],
    ) -> File:
        """Finish a file and return its description for the ledger. `FileNotFoundError` if another
        run swept it meanwhile.
        """
        if path not in self.files:
            raise FileNotFoundError(path)
        self.files[path] = MemoryFile(content, rows)
        # Only records have an index: other files have no offsets in the ledger.
        offsets = [row["offset"] for row in rows if "index" in row] or [-1]
        return File(
            path=path,
            size_bytes=len(content),
            rows=len(rows),
            digest=xxh3_128(content).hexdigest(),
            first_offset=offsets[0],
            last_offset=offsets[-1],
        )


class _MemoryWriter:
    """The rows of one file until it is closed."""

    full_files: Sequence[File] = ()

    def __init__(
        self,
        files: MemoryFiles,
        path: str,
        partition: Partition,
        topic_id: str,
    ) -> None:
        self.files = files
        self.path = path
        self.partition = partition
        self.topic_id = topic_id
        self.rows: list[Record] = []

    def add(self, rows: list[Record]) -> None:
        """Add rows. The first ones open the file."""
        if rows and not self.rows:
            self.files.open(self.path)
            crash_point("record-file-open")
        self.rows += rows
        if rows:
            crash_point("record-file-half")

    def close(self) -> File | None:
        """Finish the file and return its description; None if nothing was written."""
        if not self.rows:
            return None
        return self.files.close(self.path, msgspec.msgpack.encode(self.rows), self.rows)


class MemoryRecordWriter(_MemoryWriter):
    """A record file of one partition and slice."""

    columns: Mapping[str, str]

    def write(self, batch: MessageBatch, output: FoldOutput) -> None:
        """Add the records of a message batch. `UnfitRecordsError` names those that do not fit."""
        self._refuse_unfit_rows(output.rows)
        offsets = [batch.start + position for position in output.positions]
        source_offsets = list(offsets)
        timestamps = [batch.timestamps[position] for position in output.positions]
        # A message that waited for its turn was read earlier than the message that released it.
        for row, message in output.source_messages.items():
            source_offsets[row] = message.offset
            timestamps[row] = message.timestamp
        source = RecordSource(
            partition=self.partition,
            topic_id=self.topic_id,
            offsets=offsets,
            indexes=output.indexes,
            source_offsets=source_offsets,
            timestamps=timestamps,
            sessions=output.sessions,
            sequences=output.sequences,
        )
        self._add_records(source, output.rows)

    def write_end_records(self, offset: int, end_records: SessionEndRecords) -> None:
        """Add the records that end sessions, all at one offset."""
        self._refuse_unfit_rows(end_records.rows)
        offsets = [offset] * len(end_records.rows)
        source = RecordSource(
            partition=self.partition,
            topic_id=self.topic_id,
            offsets=offsets,
            indexes=end_records.indexes,
            source_offsets=offsets,
            timestamps=end_records.timestamps,
            sessions=end_records.sessions,
            sequences=end_records.sequences,
        )
        self._add_records(source, end_records.rows)

    def _refuse_unfit_rows(self, rows: Sequence[Row]) -> None:
        kinds = list(self.columns.values())
        unfit: list[int] = []
        for i, row in enumerate(rows):
            if not all(map(_fits, row, kinds)):
                unfit.append(i)
        if unfit:
            raise UnfitRecordsError(unfit)

    def _add_records(self, source: RecordSource, rows: Sequence[Row]) -> None:
        records = record_values(source)
        for record, values in zip(records, rows, strict=True):
            record.update(zip(self.columns, values, strict=True))
        self.add(records)


class MemoryQuarantineWriter(_MemoryWriter):
    """A file of quarantined messages."""

    def write(self, batch: MessageBatch, messages: list[QuarantinedMessage]) -> None:
        """Add whole messages, with the reason why they had no effect."""
        owner = owner_values(self.partition, self.topic_id)
        self.add([owner | message.to_row(batch) for message in messages])


def _record_order(record: Mapping[str, Any]) -> tuple[int, int]:
    return record["offset"], record["index"]


def _fits(value: Any, kind: str) -> bool:
    return kind.startswith("decimal") or fits_column_type(value, kind)
