"""State files: one row per session in Parquet, newest file last. Each is proved by its digest before
it is used.

A row has the name of the session, its finding if it is in quarantine, and the packed session
(engine/session.py).

Next: `save_state` in engine/files.py says when files are merged; engine/task.py loads and saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec.msgpack import decode

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session, WaitingMessage, pack_session, unpack_session
from seriatim.errors import DamagedFileError, raise_broken_promise
from seriatim.storage.parquet import (
    DEFAULT_FILE_BYTES,
    ChangedFileError,
    ParquetFileWriter,
    describe_damage,
    open_parquet,
    open_proved,
    part_path,
)
from seriatim.storage.store import Store

ROWS_PER_GROUP = 4_096
STATE_SCHEMA = pa.schema(
    [
        pa.field("session", pa.string()),
        # Null: the session is live. The packed session has it, too. The column serves to find the
        # sessions in quarantine without unpacking the others.
        pa.field("finding", pa.string()),
        pa.field("packed", pa.binary()),
    ]
)


class ParquetState:
    """The state files of one stream. A file is opened when it is first needed."""

    def __init__(
        self,
        store: Store,
        stream: str,
        compression: str = "zstd",
        file_bytes: int = DEFAULT_FILE_BYTES,
    ) -> None:
        self.store = store
        self.stream = stream
        self.compression = compression
        self.file_bytes = file_bytes
        """A state file that has grown so large is finished."""
        self._open_files: dict[str, StateFile] = {}
        self._verified_files: set[tuple[str, str]] = set()

    def load(self, files: Iterable[File], names: Iterable[str]) -> dict[str, Session]:
        """The sessions of these names, each from the newest file that has it."""
        missing = set(names)
        sessions: dict[str, Session] = {}
        # Newest first: the newest file that has a session is right, the others are outdated.
        for file in reversed(tuple(files)):
            if not missing:
                break
            sessions_of_file = self._open_file(file).sessions(missing)
            sessions.update(sessions_of_file)
            missing -= set(sessions_of_file)
        return sessions

    def find_names(self, files: Iterable[File], names: Iterable[str]) -> set[str]:
        """Which of these sessions are in the files, by the column of names alone."""
        searched_names = set(names)
        present: set[str] = set()
        if not searched_names:
            return present
        for file in files:
            if self.store.is_remote:
                # Proving the file reads all of it, so that it may as well be kept for what follows.
                present |= searched_names.intersection(self._open_file(file).names())
            else:
                self._verify_digest(file)
                present |= _find_names(self.store, file.path, searched_names)
        return present

    def save(
        self,
        partition: Partition,
        stem: str,
        sessions: Mapping[str, Session],
        files_to_merge: Iterable[File],
    ) -> tuple[File, ...]:
        """Write sessions on top of those of the files to be merged, row group by row group. A file
        that is large enough is finished, and the next one is begun.
        """
        path = f"state/{partition}/{stem}.parquet"
        files: list[File] = []
        writer = self._file_writer(path)
        for batch in self._rows_to_save(sessions, files_to_merge):
            writer.add(batch, ROWS_PER_GROUP)
            if writer.written_bytes >= self.file_bytes:
                files += _finished(writer)
                writer = self._file_writer(part_path(path, len(files)))
        files += _finished(writer)
        if not files:
            raise_broken_promise("state is saved only where there is some", path=path)
        return tuple(files)

    def _file_writer(self, path: str) -> ParquetFileWriter:
        return ParquetFileWriter(self.store, path, STATE_SCHEMA, self.compression)

    def _rows_to_save(
        self, sessions: Mapping[str, Session], files_to_merge: Iterable[File]
    ) -> Iterator[pa.RecordBatch]:
        """The rows of these sessions, and then of those that only the files have."""
        names = list(sessions)
        for begin in range(0, len(names), ROWS_PER_GROUP):
            group = names[begin : begin + ROWS_PER_GROUP]
            yield _pack_rows(group, [sessions[name] for name in group])
        yield from self._batches_of_unseen_sessions(tuple(files_to_merge), set(sessions))

    def _batches_of_unseen_sessions(
        self,
        files: Sequence[File],
        seen_names: set[str],
    ) -> Iterator[pa.RecordBatch]:
        """The rows of files, newest file first, without sessions that came before."""
        for file in reversed(files):
            names_of_file: set[str] = set()
            for batch in self._open_file(file).batches():
                names = batch.column("session").to_pylist()
                names_of_file.update(names)
                is_unseen = [name not in seen_names for name in names]
                yield batch.filter(pa.array(is_unseen, pa.bool_()))
            seen_names |= names_of_file

    def quarantined_sessions(self, files: Iterable[File]) -> dict[str, Session]:
        """The sessions in quarantine. Only these are unpacked."""
        sessions: dict[str, Session] = {}
        seen_names: set[str] = set()
        for file in reversed(tuple(files)):
            state_file = self._open_file(file)
            # A session that a newer file has may have been released since.
            quarantined_names = state_file.quarantined_names() - seen_names
            sessions.update(state_file.sessions(quarantined_names))
            seen_names.update(state_file.names())
        return sessions

    def all_sessions(self, files: Iterable[File]) -> Iterator[tuple[str, Session]]:
        """Every session, each once. One row group is in memory at a time."""
        for batch in self._batches_of_unseen_sessions(tuple(files), set()):
            yield from _unpack_rows(batch)

    def _open_file(self, file: File) -> StateFile:
        if file.path not in self._open_files:
            try:
                if (file.path, file.digest) in self._verified_files:
                    content = self.store.open(file.path)
                else:
                    content = open_proved(self.store, file)
            except ChangedFileError as error:
                raise self._damaged_file_error(file, str(error)) from None
            self._verified_files.add((file.path, file.digest))
            self._open_files[file.path] = StateFile(content)
        return self._open_files[file.path]

    def _verify_digest(self, file: File) -> None:
        """Prove a file by its digest, once in this process."""
        if (file.path, file.digest) in self._verified_files:
            return
        damage = describe_damage(self.store, file)
        if damage:
            raise self._damaged_file_error(file, damage)
        self._verified_files.add((file.path, file.digest))

    def _damaged_file_error(self, file: File, damage: str) -> DamagedFileError:
        return DamagedFileError(
            f"state file {file.path}: {damage}",
            path=file.path,
            cause="the file was changed or lost after it was committed",
            next=f"seriatim repair {self.stream}: it makes the file again from Kafka."
            " Nothing was folded on top of it",
        )


class StateFile:
    """One state file. Its rows are given out packed, also if the file is of before format 4."""

    def __init__(self, content: pa.NativeFile) -> None:
        # The file stays open as long as this object: row groups are read when they are asked for.
        self._parquet = pq.ParquetFile(content, page_checksum_verification=True)
        self._is_packed = "packed" in self._parquet.schema_arrow.names
        self._names = self._parquet.read(columns=["session"]).column("session").combine_chunks()
        metadata = self._parquet.metadata
        group_count = self._parquet.num_row_groups
        group_rows = [metadata.row_group(group).num_rows for group in range(group_count)]
        self._group_edges = np.cumsum([0, *group_rows])
        """The number of the first row of each row group, and the number of all rows."""

    def names(self) -> list[str]:
        """The names of all sessions of this file."""
        names: list[str] = self._names.to_pylist()
        return names

    def quarantined_names(self) -> set[str]:
        """The names of the sessions that are in quarantine, by the column of findings alone."""
        findings = self._parquet.read(columns=["finding"]).column("finding").combine_chunks()
        return set(self._names.filter(pc.is_valid(findings)).to_pylist())

    def sessions(self, searched_names: set[str]) -> dict[str, Session]:
        """Those of the searched sessions that are in this file."""
        searched = pa.array(list(searched_names), pa.string())
        is_searched = pc.is_in(self._names, value_set=searched).to_numpy(False)
        row_numbers = np.flatnonzero(is_searched)
        groups = np.searchsorted(self._group_edges, row_numbers, side="right") - 1
        sessions = {}
        for group in np.unique(groups).tolist():
            rows_of_group = row_numbers[groups == group]
            names = self._names.take(pa.array(rows_of_group)).to_pylist()
            packed_sessions = self._packed_rows(group, rows_of_group - self._group_edges[group])
            for name, packed in zip(names, packed_sessions, strict=True):
                sessions[name] = unpack_session(packed)
        return sessions

    def _packed_rows(self, group: int, rows_in_group: Any) -> list[bytes]:
        """The packed sessions of some rows of a row group."""
        columns = ["packed"] if self._is_packed else None
        table = self._parquet.read_row_group(group, columns).take(pa.array(rows_in_group))
        if not self._is_packed:
            table = pack_columns_of_format_3(table)
        packed_sessions: list[bytes] = table.column("packed").to_pylist()
        return packed_sessions

    def all_sessions(self) -> Iterator[tuple[str, Session]]:
        """Every session of this file. Every page is read and proved by its checksum."""
        for batch in self.batches():
            yield from _unpack_rows(batch)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, one row group at a time."""
        for group in range(self._parquet.num_row_groups):
            table = self._parquet.read_row_group(group)
            if not self._is_packed:
                table = pack_columns_of_format_3(table)
            yield from table.to_batches()


def _finished(writer: ParquetFileWriter) -> list[File]:
    file = writer.finish()
    return [] if file is None else [file]


def _find_names(store: Store, path: str, searched_names: set[str]) -> set[str]:
    """The searched names that are in a file. Row groups whose statistics rule them all out are not
    read.
    """
    with open_parquet(store, path) as parquet:
        column = parquet.schema_arrow.get_field_index("session")
        groups = []
        for group in range(parquet.num_row_groups):
            statistics = parquet.metadata.row_group(group).column(column).statistics
            if _may_contain(statistics, searched_names):
                groups.append(group)
        if not groups:
            return set()
        names = parquet.read_row_groups(groups, columns=["session"]).column("session")
    searched = pa.array(list(searched_names), pa.string())
    return set(names.filter(pc.is_in(names, value_set=searched)).to_pylist())


def _may_contain(statistics: Any, searched_names: set[str]) -> bool:
    """Whether a row group with these statistics may have one of the names."""
    if statistics is None or not statistics.has_min_max:
        return True
    return any(statistics.min <= name <= statistics.max for name in searched_names)


def _pack_rows(names: Sequence[str], sessions: Sequence[Session]) -> pa.RecordBatch:
    """The rows of these sessions."""
    findings = []
    packed_sessions = []
    for session in sessions:
        findings.append(session.finding)
        packed_sessions.append(pack_session(session))
    columns = [
        pa.array(names, pa.string()),
        pa.array(findings, pa.string()),
        pa.array(packed_sessions, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=STATE_SCHEMA)


def _unpack_rows(batch: pa.RecordBatch) -> Iterator[tuple[str, Session]]:
    names = batch.column("session").to_pylist()
    packed_sessions = batch.column("packed").to_pylist()
    for name, packed in zip(names, packed_sessions, strict=True):
        yield name, unpack_session(packed)


def pack_columns_of_format_3(table: pa.Table) -> pa.Table:
    """The rows of a state file of before format 4, as they would be written today. Such files have a
    column for each field of a session.
    """
    names = []
    sessions = []
    for row in table.to_pylist():
        names.append(row["session"])
        sessions.append(_session_of_format_3(row))
    packed_rows = _pack_rows(names, sessions)
    return pa.Table.from_batches([packed_rows])


def _session_of_format_3(row: dict[str, Any]) -> Session:
    missing_sequences: list[tuple[int, int]] = []
    if row["missing"]:
        missing_sequences = decode(row["missing"], type=list[tuple[int, int]])
    waiting_messages: list[WaitingMessage] = []
    if row["waiting"]:
        waiting_messages = decode(row["waiting"], type=list[WaitingMessage])
    return Session(
        state_bytes=row["state"],
        state_version=row["state_version"],
        sequence=row["sequence"],
        snapshot_sequence=row["anchor"],
        snapshot_fingerprint=row["fingerprint"],
        missing_sequences=missing_sequences,
        waiting_messages=waiting_messages,
        damaged_since_offset=row["damaged"],
        messages_since_snapshot=row["since_snapshot"],
        snapshot_timestamp=row["snapshot_timestamp"],
        snapshot_distance_ms=row["reach_ms"],
        first_offset=row["first_offset"],
        last_offset=row["last_offset"],
        snapshot_offset=row["snapshot_offset"],
        timestamp=row["timestamp"],
        finding=row["finding"],
        finding_offset=row["finding_offset"],
    )
