"""State files: one row per session in Parquet, newest file last, proved by their digest before use.

Next room: core/state.py says when files are merged; steps/task.py loads and saves.
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

from seriatim.core.errors import IntegrityError, broken
from seriatim.core.ledger import File
from seriatim.core.offsets import Partition
from seriatim.core.session import Session, Waiting
from seriatim.disk import ParquetFileWriter, file_digest

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

    def __init__(self, root: Path, compression: str = "zstd", stream: str = "STREAM") -> None:
        self.root, self.compression = root, compression
        self.stream = stream
        """The stream's name, for advice."""
        self._open: dict[str, _StateFile] = {}
        self._proved: set[tuple[str, str]] = set()

    def load(self, files: Iterable[File], names: Iterable[str]) -> dict[str, Session]:
        """The sessions of these names, each from the newest file that has it."""
        wanted, found = set(names), {}
        for file in reversed(tuple(files)):
            if not wanted:
                break
            for name, session in self._file(file).sessions(wanted).items():
                found[name] = session
                wanted.discard(name)
        return found

    def holds(self, files: Iterable[File], names: Iterable[str]) -> set[str]:
        """Which of these names are in the files, by the column of names alone."""
        wanted, found = set(names), set()
        for file in files if wanted else ():
            found |= _names_in(self._prove(file), wanted)
        return found

    def save(self, partition: Partition, stem: str, sessions: Mapping[str, Session], merge: Iterable[File]) -> File:
        """Write sessions, over those of the files to be merged, row group by row group."""
        path = f"state/{partition}/{stem}.parquet"
        writer = ParquetFileWriter(self.root, path, STATE_SCHEMA, self.compression)
        rows = [_state_row(name, session) for name, session in sessions.items()]
        for begin in range(0, len(rows), ROWS_PER_GROUP):
            part = rows[begin : begin + ROWS_PER_GROUP]
            writer.add(pa.RecordBatch.from_pylist(part, schema=STATE_SCHEMA), ROWS_PER_GROUP)
        for batch in self._unseen(tuple(merge), set(sessions)):
            writer.add(batch, ROWS_PER_GROUP)
        return writer.finish() or broken("state is saved only where there is some", path=path)

    def _unseen(self, files: Sequence[File], seen: set[str]) -> Iterator[pa.RecordBatch]:
        """Rows of files, newest first, without sessions that came before."""
        for file in reversed(files):
            met: set[str] = set()
            for batch in self._file(file).batches():
                names = batch.column("session").to_pylist()
                met.update(names)
                yield batch.filter(pa.array([name not in seen for name in names], pa.bool_()))
            seen |= met

    def quarantined(self, files: Iterable[File]) -> dict[str, Session]:
        """Sessions in quarantine."""
        return {name: session for name, session in self.everything(files) if session.finding is not None}

    def each(self, files: Iterable[File]) -> Iterator[tuple[str, Session]]:
        """Every session, one by one, a row group in memory at a time."""
        return self.everything(files)

    def everything(self, files: Iterable[File]) -> Iterator[tuple[str, Session]]:
        """Every session, each once."""
        for batch in self._unseen(tuple(files), set()):
            for row in batch.to_pylist():
                yield row["session"], _session(row)

    def _file(self, file: File) -> _StateFile:
        if file.path not in self._open:
            self._open[file.path] = _StateFile(self._prove(file))
        return self._open[file.path]

    def _prove(self, file: File) -> Path:
        """Where a file is, once it is proved by its digest."""
        full = self.root / file.path
        if (file.path, file.digest) not in self._proved:
            try:
                found = file_digest(full)
            except FileNotFoundError:
                raise self._damaged(file, "it is missing") from None
            if found != file.digest:
                raise self._damaged(file, f"its digest is {found}, the ledger says {file.digest}")
            self._proved.add((file.path, file.digest))
        return full

    def _damaged(self, file: File, what: str) -> IntegrityError:
        return IntegrityError(
            f"state file {file.path}: {what}",
            cause="the file was changed or lost after it was committed",
            next=f"seriatim repair {self.stream}: it makes the file again from Kafka. Nothing was folded on top of it",
        )


class _StateFile:
    """One state file that is proved."""

    def __init__(self, full: Path) -> None:
        self._parquet = pq.ParquetFile(full, memory_map=True, page_checksum_verification=True)
        self._names = self._parquet.read(columns=["session"]).column("session").combine_chunks()
        groups = [self._parquet.metadata.row_group(i).num_rows for i in range(self._parquet.num_row_groups)]
        self._edges = np.cumsum([0, *groups])

    def sessions(self, wanted: set[str]) -> dict[str, Session]:
        """The wanted sessions that are in this file."""
        rows = np.flatnonzero(pc.is_in(self._names, value_set=pa.array(list(wanted), pa.string())).to_numpy(False))
        found = {}
        groups = np.searchsorted(self._edges, rows, side="right") - 1
        for group in np.unique(groups).tolist():
            inside = rows[groups == group] - self._edges[group]
            for row in self._parquet.read_row_group(group).take(pa.array(inside)).to_pylist():
                found[row["session"]] = _session(row)
        return found

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, a row group at a time."""
        for group in range(self._parquet.num_row_groups):
            yield from self._parquet.read_row_group(group).to_batches()


def _names_in(path: Path, wanted: set[str]) -> set[str]:
    """Row groups whose range of names has none of the wanted are not read."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        column = file.schema_arrow.get_field_index("session")
        parts = [file.metadata.row_group(i).column(column).statistics for i in range(file.num_row_groups)]
        groups = [
            i
            for i, part in enumerate(parts)
            if part is None or not part.has_min_max or any(part.min <= name <= part.max for name in wanted)
        ]
        if not groups:
            return set()
        names = file.read_row_groups(groups, columns=["session"]).column("session")
        return set(names.filter(pc.is_in(names, value_set=pa.array(list(wanted), pa.string()))).to_pylist())


def _state_row(name: str, session: Session) -> dict[str, Any]:
    return {
        "session": name,
        "state": session.saved,
        "state_version": session.version,
        "sequence": session.sequence,
        "anchor": session.anchor,
        "fingerprint": session.fingerprint,
        "missing": encode(session.missing) if session.missing else None,
        "waiting": encode(session.waiting) if session.waiting else None,
        "damaged": session.damaged,
        "since_snapshot": session.since_snapshot,
        "snapshot_timestamp": session.snapshot_timestamp,
        "reach_ms": session.reach_ms,
        "first_offset": session.first_offset,
        "last_offset": session.last_offset,
        "snapshot_offset": session.snapshot_offset,
        "timestamp": session.timestamp,
        "status": "live" if session.finding is None else "quarantined",
        "finding": session.finding,
        "finding_offset": session.finding_offset,
    }


def _session(row: dict[str, Any]) -> Session:
    return Session(
        saved=row["state"],
        version=row["state_version"],
        sequence=row["sequence"],
        anchor=row["anchor"],
        fingerprint=row["fingerprint"],
        missing=decode(row["missing"], type=list[tuple[int, int]]) if row["missing"] else [],
        waiting=decode(row["waiting"], type=list[Waiting]) if row["waiting"] else [],
        damaged=row["damaged"],
        since_snapshot=row["since_snapshot"],
        snapshot_timestamp=row["snapshot_timestamp"],
        reach_ms=row["reach_ms"],
        first_offset=row["first_offset"],
        last_offset=row["last_offset"],
        snapshot_offset=row["snapshot_offset"],
        timestamp=row["timestamp"],
        finding=row["finding"],
        finding_offset=row["finding_offset"],
    )
