"""State files: one row per session in Parquet, newest file last. Each is proved by its digest before
it is used.

Next: engine/state_merging.py says when files are merged; engine/task.py loads and saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec.msgpack import decode, encode

from seriatim.engine.offsets import Partition
from seriatim.engine.session import Session, WaitingMessage
from seriatim.errors import DamagedFileError, raise_broken_promise
from seriatim.ledger.model import File
from seriatim.storage.files import ParquetFileWriter, file_digest

ROWS_PER_GROUP = 4_096
STATE_SCHEMA = pa.schema(
    [
        pa.field("session", pa.string()),
        pa.field("state", pa.binary()),
        pa.field("state_version", pa.int32()),
        pa.field("sequence", pa.int64()),
        pa.field("anchor", pa.int64()),
        pa.field("fingerprint", pa.binary()),
        pa.field("missing", pa.binary()),
        pa.field("waiting", pa.binary()),
        pa.field("damaged", pa.int64()),
        pa.field("since_snapshot", pa.int64()),
        pa.field("snapshot_timestamp", pa.int64()),
        pa.field("reach_ms", pa.int64()),
        pa.field("first_offset", pa.int64()),
        pa.field("last_offset", pa.int64()),
        pa.field("snapshot_offset", pa.int64()),
        pa.field("timestamp", pa.int64()),
        pa.field("status", pa.string()),
        pa.field("finding", pa.string()),
        pa.field("finding_offset", pa.int64()),
    ]
)


class ParquetState:
    """The state files of one stream, below its output path. A file is opened when it is first
    needed.
    """

    def __init__(
        self,
        root: Path,
        stream: str,
        compression: str = "zstd",
    ) -> None:
        self.root = root
        self.stream = stream
        self.compression = compression
        self._open_files: dict[str, _StateFile] = {}
        self._verified_files: set[tuple[str, str]] = set()

    def load(self, files: Iterable[File], names: Iterable[str]) -> dict[str, Session]:
        """The sessions of these names, each from the newest file that has it."""
        missing = set(names)
        sessions: dict[str, Session] = {}
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
            present |= _find_names(self._verify_digest(file), searched_names)
        return present

    def save(
        self,
        partition: Partition,
        stem: str,
        sessions: Mapping[str, Session],
        files_to_merge: Iterable[File],
    ) -> File:
        """Write sessions on top of those of the files to be merged, row group by row group."""
        path = f"state/{partition}/{stem}.parquet"
        writer = ParquetFileWriter(self.root, path, STATE_SCHEMA, self.compression)
        rows = [_session_to_row(name, session) for name, session in sessions.items()]
        for begin in range(0, len(rows), ROWS_PER_GROUP):
            group = rows[begin : begin + ROWS_PER_GROUP]
            writer.add(pa.RecordBatch.from_pylist(group, schema=STATE_SCHEMA), ROWS_PER_GROUP)
        for batch in self._batches_of_unseen_sessions(tuple(files_to_merge), set(sessions)):
            writer.add(batch, ROWS_PER_GROUP)
        file = writer.finish()
        if file is None:
            raise_broken_promise("state is saved only where there is some", path=path)
        return file

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
        """The sessions in quarantine."""
        return {
            name: session
            for name, session in self.all_sessions(files)
            if session.finding is not None
        }

    def all_sessions(self, files: Iterable[File]) -> Iterator[tuple[str, Session]]:
        """Every session, each once. One row group is in memory at a time."""
        for batch in self._batches_of_unseen_sessions(tuple(files), set()):
            for row in batch.to_pylist():
                yield row["session"], _row_to_session(row)

    def _open_file(self, file: File) -> _StateFile:
        if file.path not in self._open_files:
            self._open_files[file.path] = _StateFile(self._verify_digest(file))
        return self._open_files[file.path]

    def _verify_digest(self, file: File) -> Path:
        """The full path of a file, after it was proved by its digest once in this process."""
        full_path = self.root / file.path
        if (file.path, file.digest) in self._verified_files:
            return full_path
        try:
            digest = file_digest(full_path)
        except FileNotFoundError:
            raise self._damaged_file_error(file, "it is missing") from None
        if digest != file.digest:
            raise self._damaged_file_error(
                file, f"its digest is {digest}, the ledger says {file.digest}"
            )
        self._verified_files.add((file.path, file.digest))
        return full_path

    def _damaged_file_error(self, file: File, damage: str) -> DamagedFileError:
        return DamagedFileError(
            f"state file {file.path}: {damage}",
            path=file.path,
            cause="the file was changed or lost after it was committed",
            next=f"seriatim repair {self.stream}: it makes the file again from Kafka."
            " Nothing was folded on top of it",
        )


class _StateFile:
    """One state file that was proved by its digest."""

    def __init__(self, path: Path) -> None:
        self._parquet = pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        self._names = self._parquet.read(columns=["session"]).column("session").combine_chunks()
        metadata = self._parquet.metadata
        group_count = self._parquet.num_row_groups
        group_rows = [metadata.row_group(group).num_rows for group in range(group_count)]
        self._group_edges = np.cumsum([0, *group_rows])
        """The number of the first row of each row group, and the number of all rows."""

    def sessions(self, searched_names: set[str]) -> dict[str, Session]:
        """Those of the searched sessions that are in this file."""
        names = pa.array(list(searched_names), pa.string())
        is_searched = pc.is_in(self._names, value_set=names).to_numpy(False)
        row_numbers = np.flatnonzero(is_searched)
        groups = np.searchsorted(self._group_edges, row_numbers, side="right") - 1
        sessions = {}
        for group in np.unique(groups).tolist():
            rows_in_group = row_numbers[groups == group] - self._group_edges[group]
            table = self._parquet.read_row_group(group).take(pa.array(rows_in_group))
            for row in table.to_pylist():
                sessions[row["session"]] = _row_to_session(row)
        return sessions

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, one row group at a time."""
        for group in range(self._parquet.num_row_groups):
            yield from self._parquet.read_row_group(group).to_batches()


def _find_names(path: Path, searched_names: set[str]) -> set[str]:
    """The searched names that are in a file. Row groups whose statistics rule them all out are not
    read.
    """
    with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
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


def _session_to_row(name: str, session: Session) -> dict[str, Any]:
    return {
        "session": name,
        "state": session.state_bytes,
        "state_version": session.state_version,
        "sequence": session.sequence,
        "anchor": session.snapshot_sequence,
        "fingerprint": session.snapshot_fingerprint,
        "missing": encode(session.missing_sequences) if session.missing_sequences else None,
        "waiting": encode(session.waiting_messages) if session.waiting_messages else None,
        "damaged": session.damaged_since_offset,
        "since_snapshot": session.messages_since_snapshot,
        "snapshot_timestamp": session.snapshot_timestamp,
        "reach_ms": session.snapshot_distance_ms,
        "first_offset": session.first_offset,
        "last_offset": session.last_offset,
        "snapshot_offset": session.snapshot_offset,
        "timestamp": session.timestamp,
        "status": "live" if session.finding is None else "quarantined",
        "finding": session.finding,
        "finding_offset": session.finding_offset,
    }


def _row_to_session(row: dict[str, Any]) -> Session:
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
