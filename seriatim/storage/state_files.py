"""State files: one row per session in Parquet, newest file last, proved by their digest before use.

Next room: engine/state_merging.py says when files are merged; engine/task.py loads and saves.
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
    """State files: one row per session, newest file last, opened when first needed."""

    def __init__(self, root: Path, stream: str, compression: str = "zstd") -> None:
        self.root, self.stream, self.compression = root, stream, compression
        self._open_files: dict[str, _StateFile] = {}
        self._verified_files: set[tuple[str, str]] = set()

    def load(self, files: Iterable[File], names: Iterable[str]) -> dict[str, Session]:
        """The sessions of these names, each from the newest file that has it."""
        wanted, found = set(names), {}
        for file in reversed(tuple(files)):
            if not wanted:
                break
            for name, session in self._open_file(file).sessions(wanted).items():
                found[name] = session
                wanted.discard(name)
        return found

    def find_names(self, files: Iterable[File], names: Iterable[str]) -> set[str]:
        """Which of these names are in the files, by the column of names alone."""
        wanted, found = set(names), set()
        for file in files if wanted else ():
            found |= _find_names(self._verify_digest(file), wanted)
        return found

    def save(
        self,
        partition: Partition,
        stem: str,
        sessions: Mapping[str, Session],
        files_to_merge: Iterable[File],
    ) -> File:
        """Write sessions, over those of the files to be merged, row group by row group."""
        path = f"state/{partition}/{stem}.parquet"
        writer = ParquetFileWriter(self.root, path, STATE_SCHEMA, self.compression)
        rows = [_session_to_row(name, session) for name, session in sessions.items()]
        for begin in range(0, len(rows), ROWS_PER_GROUP):
            part = rows[begin : begin + ROWS_PER_GROUP]
            writer.add(pa.RecordBatch.from_pylist(part, schema=STATE_SCHEMA), ROWS_PER_GROUP)
        for batch in self._batches_of_unseen_sessions(tuple(files_to_merge), set(sessions)):
            writer.add(batch, ROWS_PER_GROUP)
        return writer.finish() or raise_broken_promise(
            "state is saved only where there is some", path=path
        )

    def _batches_of_unseen_sessions(
        self, files: Sequence[File], seen_names: set[str]
    ) -> Iterator[pa.RecordBatch]:
        """Rows of files, newest first, without sessions that came before."""
        for file in reversed(files):
            met: set[str] = set()
            for batch in self._open_file(file).batches():
                names = batch.column("session").to_pylist()
                met.update(names)
                yield batch.filter(pa.array([name not in seen_names for name in names], pa.bool_()))
            seen_names |= met

    def quarantined_sessions(self, files: Iterable[File]) -> dict[str, Session]:
        """Sessions in quarantine."""
        return {
            name: session
            for name, session in self.iterate_sessions(files)
            if session.finding is not None
        }

    def all_sessions(self, files: Iterable[File]) -> Iterator[tuple[str, Session]]:
        """Every session, one by one, a row group in memory at a time."""
        return self.iterate_sessions(files)

    def iterate_sessions(self, files: Iterable[File]) -> Iterator[tuple[str, Session]]:
        """Every session, each once."""
        for batch in self._batches_of_unseen_sessions(tuple(files), set()):
            for row in batch.to_pylist():
                yield row["session"], _row_to_session(row)

    def _open_file(self, file: File) -> _StateFile:
        if file.path not in self._open_files:
            self._open_files[file.path] = _StateFile(self._verify_digest(file))
        return self._open_files[file.path]

    def _verify_digest(self, file: File) -> Path:
        """Where a file is, once it is proved by its digest."""
        full = self.root / file.path
        if (file.path, file.digest) not in self._verified_files:
            try:
                found = file_digest(full)
            except FileNotFoundError:
                raise self._damaged_file_error(file, "it is missing") from None
            if found != file.digest:
                raise self._damaged_file_error(
                    file, f"its digest is {found}, the ledger says {file.digest}"
                )
            self._verified_files.add((file.path, file.digest))
        return full

    def _damaged_file_error(self, file: File, why: str) -> DamagedFileError:
        return DamagedFileError(
            f"state file {file.path}: {why}",
            path=file.path,
            cause="the file was changed or lost after it was committed",
            next=f"seriatim repair {self.stream}: it makes the file again from Kafka. Nothing was folded on top of it",
        )


class _StateFile:
    """One state file that is proved."""

    def __init__(self, path: Path) -> None:
        self._parquet = pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        self._names = self._parquet.read(columns=["session"]).column("session").combine_chunks()
        groups = [
            self._parquet.metadata.row_group(i).num_rows
            for i in range(self._parquet.num_row_groups)
        ]
        self._group_edges = np.cumsum([0, *groups])

    def sessions(self, searched_names: set[str]) -> dict[str, Session]:
        """The wanted sessions that are in this file."""
        rows = np.flatnonzero(
            pc.is_in(self._names, value_set=pa.array(list(searched_names), pa.string())).to_numpy(
                False
            )
        )
        found = {}
        groups = np.searchsorted(self._group_edges, rows, side="right") - 1
        for group in np.unique(groups).tolist():
            inside = rows[groups == group] - self._group_edges[group]
            for row in self._parquet.read_row_group(group).take(pa.array(inside)).to_pylist():
                found[row["session"]] = _row_to_session(row)
        return found

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, a row group at a time."""
        for group in range(self._parquet.num_row_groups):
            yield from self._parquet.read_row_group(group).to_batches()


def _find_names(path: Path, searched_names: set[str]) -> set[str]:
    """Row groups whose range of names has none of the wanted are not read."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        column = file.schema_arrow.get_field_index("session")
        parts = [
            file.metadata.row_group(i).column(column).statistics for i in range(file.num_row_groups)
        ]
        groups = [
            i
            for i, part in enumerate(parts)
            if part is None
            or not part.has_min_max
            or any(part.min <= name <= part.max for name in searched_names)
        ]
        if not groups:
            return set()
        names = file.read_row_groups(groups, columns=["session"]).column("session")
        return set(
            names.filter(
                pc.is_in(names, value_set=pa.array(list(searched_names), pa.string()))
            ).to_pylist()
        )


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
    return Session(
        state_bytes=row["state"],
        state_version=row["state_version"],
        sequence=row["sequence"],
        snapshot_sequence=row["anchor"],
        snapshot_fingerprint=row["fingerprint"],
        missing_sequences=decode(row["missing"], type=list[tuple[int, int]])
        if row["missing"]
        else [],
        waiting_messages=decode(row["waiting"], type=list[WaitingMessage])
        if row["waiting"]
        else [],
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
