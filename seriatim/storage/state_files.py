"""State files: the sessions of a partition, newest file last. Each file is proved by its digest before
it is used.

A session has its name, its finding if it is in quarantine, and the packed session (engine/session.py).
Files are written in blocks (state_blocks.py). Those of before have a row for each session: they are
read, and become blocks when they are merged.

Next: `save_state` in engine/files.py says when files are merged; engine/task.py loads and saves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec.msgpack import decode

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.row_parts import StoredRows, join_rows
from seriatim.engine.session import Session, WaitingMessage, pack_session, unpack_session
from seriatim.errors import DamagedFileError, raise_broken_promise
from seriatim.storage.parquet import (
    DEFAULT_FILE_BYTES,
    ChangedFileError,
    describe_damage,
    open_proved,
    part_path,
)
from seriatim.storage.row_blocks import PartToWrite, RowPart, RowParts
from seriatim.storage.state_blocks import (
    SessionRows,
    StateBlocks,
    StateBlockWriter,
    has_blocks,
    merge_rows,
)
from seriatim.storage.store import Store

ROWS_AT_ONCE = 1_024
"""So many sessions are packed, or given out by a file of before, before some are written."""


class StateFiles:
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
        """The sessions of these names, each from the newest file that has it, with all of its rows."""
        sessions = self.open_sessions(files, names)
        for session in sessions.values():
            _read_rows(session)
        return sessions

    def open_sessions(self, files: Iterable[File], names: Iterable[str]) -> dict[str, Session]:
        """The same sessions. The rows of those that are stored row by row stay where they are."""
        missing = set(names)
        sessions: dict[str, Session] = {}
        older_files = list(files)
        # Newest first: the newest file that has a session is right, the others are outdated.
        while older_files and missing:
            packed_sessions = self._open_file(older_files[-1]).find_packed(missing)
            sessions_of_file = self._unpack_sessions(packed_sessions, older_files)
            sessions.update(sessions_of_file)
            missing -= set(sessions_of_file)
            older_files = older_files[:-1]
        return sessions

    def _unpack_sessions(
        self, packed_sessions: Mapping[str, bytes], files: Sequence[File]
    ) -> dict[str, Session]:
        """Sessions of the newest of these files. The others may have older rows of theirs."""
        sessions = {}
        for name, packed in packed_sessions.items():
            session = unpack_session(packed)
            if session.rows_summary is not None:
                find_parts = partial(self._parts_of, tuple(files), name)
                session.stored_rows = StoredRows(session.rows_summary, RowParts(find_parts))
            sessions[name] = session
        return sessions

    def _parts_of(self, files: Sequence[File], name: str) -> Iterator[RowPart]:
        """The row parts of a session, newest first. A file is opened when its turn comes."""
        return _parts_in((self._open_file(file) for file in reversed(files)), name)

    def find_names(self, files: Iterable[File], names: Iterable[str]) -> set[str]:
        """Which of these sessions are in the files."""
        searched_names = set(names)
        present: set[str] = set()
        if not searched_names:
            return present
        for file in files:
            if self.store.is_remote:
                # Proving the file reads all of it, so that it may as well be kept for what follows.
                present |= self._open_file(file).find_names(searched_names)
                continue
            # The driver asks this of thousands of partitions, so that files are not kept open.
            self._verify_digest(file)
            with self.store.open(file.path) as content:
                present |= open_state_file(content).find_names(searched_names)
        return present

    def save(
        self,
        partition: Partition,
        stem: str,
        sessions: Mapping[str, Session],
        files_to_merge: Iterable[File],
    ) -> tuple[File, ...]:
        """Write sessions on top of those of the files to be merged, block by block. A file that is
        large enough is finished, and the next one is begun.
        """
        path = f"state/{partition}/{stem}.parquet"
        files: list[File] = []
        merged_files = [self._open_file(file) for file in files_to_merge]
        row_parts = PartsToWrite(merged_files, sessions)
        writer = self._file_writer(path, row_parts)
        sources = [file.sorted_rows() for file in merged_files]
        for rows in merge_rows([*sources, _pack_rows(sessions)]):
            writer.add(rows, row_parts.find)
            if writer.written_bytes >= self.file_bytes:
                files += _finished(writer)
                writer = self._file_writer(part_path(path, len(files)), row_parts)
        files += _finished(writer)
        if not files:
            raise_broken_promise("state is saved only where there is some", path=path)
        return tuple(files)

    def _file_writer(self, path: str, row_parts: PartsToWrite) -> StateBlockWriter:
        return StateBlockWriter(
            self.store, path, self.compression, with_row_parts=not row_parts.is_empty
        )

    def quarantined_sessions(self, files: Iterable[File]) -> dict[str, Session]:
        """The sessions in quarantine. Only these are unpacked, and none of their rows."""
        sessions: dict[str, Session] = {}
        newer_files: list[StateFile] = []
        older_files = list(files)
        while older_files:
            state_file = self._open_file(older_files[-1])
            names = state_file.quarantined_names()
            # A session that a newer file has may have been released since.
            for newer_file in newer_files:
                names -= newer_file.find_names(names)
            sessions.update(self._unpack_sessions(state_file.find_packed(names), older_files))
            newer_files.append(state_file)
            older_files = older_files[:-1]
        return sessions

    def all_sessions(
        self, files: Iterable[File], *, with_rows: bool = True
    ) -> Iterator[tuple[str, Session]]:
        """Every session, each once, sorted by name. One block of each file is in memory at a time."""
        all_files = tuple(files)
        sources = [self._open_file(file).sorted_rows() for file in all_files]
        for rows in merge_rows(sources):
            packed_sessions = dict(zip(rows.names, rows.packed_sessions, strict=True))
            for name, session in self._unpack_sessions(packed_sessions, all_files).items():
                if with_rows:
                    _read_rows(session)
                yield name, session

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
            self._open_files[file.path] = open_state_file(content)
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


class StateFile(Protocol):
    """A state file that is open, of whichever form."""

    def find_packed(self, names: Collection[str]) -> dict[str, bytes]:
        """Those of these sessions that are in this file, packed."""

    def find_names(self, names: Collection[str]) -> set[str]:
        """Which of these sessions are in this file."""

    def quarantined_names(self) -> set[str]:
        """The names of the sessions that are in quarantine."""

    def sorted_rows(self) -> Iterable[SessionRows]:
        """All sessions, sorted by name."""

    @property
    def has_parts(self) -> bool:
        """Whether a session of this file is stored row by row."""

    def part_of(self, name: str) -> RowPart | None:
        """The row part of a session; None if it has none here."""


def _parts_in(files: Iterable[StateFile], name: str) -> Iterator[RowPart]:
    for file in files:
        row_part = file.part_of(name)
        if row_part is not None:
            yield row_part


class PartsToWrite:
    """The row parts that new files get: of the files that are merged, with what a slice changed."""

    def __init__(self, merged_files: Sequence[StateFile], sessions: Mapping[str, Session]) -> None:
        self._files = [file for file in reversed(merged_files) if file.has_parts]
        """Newest first."""
        self._heads = {name: session for name, session in sessions.items() if session.is_head}
        self.is_empty = not self._files and not self._heads

    def find(self, name: str, packed: bytes) -> PartToWrite | None:
        """The part of a session; None if the session is stored as one value."""
        if self.is_empty:
            return None
        changes = None
        if name in self._heads:
            changes = self._heads[name].row_changes
        elif unpack_session(packed).rows_summary is None:
            return None
        return PartToWrite(RowParts(partial(_parts_in, self._files, name)), changes)


def _read_rows(session: Session) -> None:
    """Read all rows of a session that is stored row by row."""
    stored_rows = session.stored_rows
    if stored_rows is not None:
        session.state_bytes = join_rows([row.packed for row in stored_rows.source.read_all()])
        session.stored_rows = None


def open_state_file(content: pa.NativeFile) -> StateFile:
    """The state file of this content. It reads from `content` when it is asked for sessions."""
    # The file stays open as long as this object: row groups are read when they are asked for.
    parquet = pq.ParquetFile(content, page_checksum_verification=True)
    if has_blocks(parquet):
        return StateBlocks(parquet)
    return RowStateFile(parquet)


def sessions_of_content(content: pa.NativeFile) -> Iterator[tuple[str, Session]]:
    """Every session of one state file, with the part of its rows that is in the file. All of it is read
    and proved by checksums.
    """
    state_file = open_state_file(content)
    for rows in state_file.sorted_rows():
        for name, packed in zip(rows.names, rows.packed_sessions, strict=True):
            session = unpack_session(packed)
            row_part = state_file.part_of(name)
            if row_part is not None and session.rows_summary is not None:
                for _ in row_part.read_in_order():
                    pass  # the pages are proved
                row_parts = RowParts(partial(_parts_in, [state_file], name))
                session.stored_rows = StoredRows(session.rows_summary, row_parts)
            yield name, session


class RowStateFile:
    """A state file of before blocks. Its rows are given out packed, also if they have a column for
    each field. Its sessions are in no order, so that all names are searched, and a merge sorts them in
    memory.
    """

    def __init__(self, parquet: pq.ParquetFile) -> None:
        self._parquet = parquet
        self._is_packed = "packed" in self._parquet.schema_arrow.names
        self._names = self._parquet.read(columns=["session"]).column("session").combine_chunks()
        metadata = self._parquet.metadata
        group_count = self._parquet.num_row_groups
        group_rows = [metadata.row_group(group).num_rows for group in range(group_count)]
        self._group_edges = np.cumsum([0, *group_rows])
        """The number of the first row of each row group, and the number of all rows."""

    has_parts = False

    def part_of(self, name: str) -> None:  # there was no such part
        """None: each session is one value."""

    def find_names(self, names: Collection[str]) -> set[str]:
        """Which of these sessions are in this file."""
        searched = pa.array(list(names), pa.string())
        return set(self._names.filter(pc.is_in(self._names, value_set=searched)).to_pylist())

    def quarantined_names(self) -> set[str]:
        """The names of the sessions that are in quarantine, by the column of findings alone."""
        findings = self._parquet.read(columns=["finding"]).column("finding").combine_chunks()
        return set(self._names.filter(pc.is_valid(findings)).to_pylist())

    def find_packed(self, names: Collection[str]) -> dict[str, bytes]:
        """Those of these sessions that are in this file, packed."""
        searched = pa.array(list(names), pa.string())
        is_searched = pc.is_in(self._names, value_set=searched).to_numpy(False)
        row_numbers = np.flatnonzero(is_searched)
        groups = np.searchsorted(self._group_edges, row_numbers, side="right") - 1
        packed_by_name: dict[str, bytes] = {}
        for group in np.unique(groups).tolist():
            rows_of_group = row_numbers[groups == group]
            table = self._read_group(group, rows_of_group - self._group_edges[group])
            names_of_group = table.column("session").to_pylist()
            packed_sessions = table.column("packed").to_pylist()
            packed_by_name.update(zip(names_of_group, packed_sessions, strict=True))
        return packed_by_name

    def sorted_rows(self) -> Iterator[SessionRows]:
        """All sessions, sorted by name."""
        groups = [self._read_group(group) for group in range(self._parquet.num_row_groups)]
        table = pa.concat_tables(groups).sort_by("session")
        for batch in table.to_batches(ROWS_AT_ONCE):
            yield SessionRows(
                batch.column("session").to_pylist(),
                batch.column("finding").to_pylist(),
                batch.column("packed").to_pylist(),
            )

    def _read_group(self, group: int, rows_in_group: Any = None) -> pa.Table:
        """The rows of a row group, or some of them, as they were written before blocks."""
        table = self._parquet.read_row_group(group)
        if rows_in_group is not None:
            table = table.take(pa.array(rows_in_group))
        if not self._is_packed:
            table = pack_columns_of_format_3(table)
        return table


def _finished(writer: StateBlockWriter) -> list[File]:
    file = writer.finish()
    return [] if file is None else [file]


def _pack_rows(sessions: Mapping[str, Session]) -> Iterator[SessionRows]:
    """These sessions as rows, sorted by name."""
    names = sorted(sessions)
    for begin in range(0, len(names), ROWS_AT_ONCE):
        rows = SessionRows(names[begin : begin + ROWS_AT_ONCE], [], [])
        for name in rows.names:
            session = sessions[name]
            rows.findings.append(session.finding)
            rows.packed_sessions.append(pack_session(session))
        yield rows


def pack_columns_of_format_3(table: pa.Table) -> pa.Table:
    """The rows of a state file of before format 4, packed. Such files have a column for each field of
    a session.
    """
    packed_sessions = [pack_session(_session_of_format_3(row)) for row in table.to_pylist()]
    packed_column = pa.array(packed_sessions, pa.binary())
    return table.select(["session", "finding"]).append_column("packed", packed_column)


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
