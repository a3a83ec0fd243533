"""Joining: committed record files taken apart and put together anew, with what a refold made. Arrow
in, Arrow out.

A file is read only after its digest agrees with the ledger: damage is never copied.

Next room: operations/repair/refold.py asks; parquet.py writes what the fold itself makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec.structs import replace

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.session_filter import ReplacedRecords
from seriatim.ledger.model import File
from seriatim.storage.current_rows import PartitionCatchUp, RowKeySpec, SessionTable
from seriatim.storage.files import (
    ROWS_PER_GROUP,
    ParquetFileWriter,
    damaged_record_file,
    file_digest,
)
from seriatim.storage.rows import RowMerger

OWNER_COLUMNS = ("topic", "partition", "topic_id")
RECORD_ORDER = [("offset", "ascending"), ("index", "ascending")]


class ParquetJoiner:
    """Committed files below one stream's output path."""

    def __init__(self, root: Path, stream: str, compression: str = "zstd") -> None:
        self.root, self.stream, self.compression = root, stream, compression

    def find_damaged_files(
        self, files: Iterable[File], *, check_digests: bool = True
    ) -> dict[str, str]:
        """Files that are not as committed, and why."""
        found = {}
        for file in files:
            if why := self._describe_damage(file, thorough=check_digests):
                found[file.path] = why
        return found

    def _describe_damage(self, file: File, *, thorough: bool) -> str:
        full = self.root / file.path
        try:
            size = full.stat().st_size
            if size != file.size_bytes:
                return f"it has {size} bytes, the ledger says {file.size_bytes}"
            digest = file_digest(full) if thorough else file.digest
        except FileNotFoundError:
            return "it is missing"
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        return (
            ""
            if digest == file.digest
            else f"its digest is {digest}, the ledger says {file.digest}"
        )

    def has_replaced_records(self, file: File, replaced: ReplacedRecords) -> bool:
        """Whether a file has a record that is replaced."""
        return bool(
            pc.any(
                _replaced_mask(self._read_verified(file, ["session", "offset"]), replaced)
            ).as_py()
        )

    def has_records_in(
        self,
        files: Iterable[File],
        offset_range: OffsetRange,
        partition_and_topic_id: tuple[Partition, str] | None = None,
    ) -> bool:
        """Whether any of these files has a record at these offsets; of one partition and topic id,
        if that is asked.
        """
        if partition_and_topic_id is not None:
            return any(
                self._has_record_of_partition(file, offset_range, *partition_and_topic_id)
                for file in files
            )
        near = _overlapping_files(files, offset_range)
        return any(
            pc.any(_offset_mask(self._read_verified(file, ["offset"]), offset_range)).as_py()
            for file in near
        )

    def _has_record_of_partition(
        self, file: File, offset_range: OffsetRange, partition: Partition, topic_id: str
    ) -> bool:
        """The same of a file that is not ours, and may hold anybody's. What folders say and it does
        not is taken so.
        """
        found = _offset_mask(
            table := self._read_columns(file, ["offset", *OWNER_COLUMNS]), offset_range
        )
        for name, value in zip(
            OWNER_COLUMNS, (partition.topic, partition.number, topic_id), strict=True
        ):
            if name in table.column_names:
                found = pc.and_(found, pc.equal(table.column(name), value))
        return bool(pc.any(found).as_py())

    def session_tables(
        self, partition: Partition, topic_id: str, files: Sequence[File], row_key_spec: RowKeySpec
    ) -> Iterator[SessionTable]:
        """What a partition's records make of each session."""
        for file in files:
            if why := self._describe_damage(file, thorough=True):
                raise damaged_record_file(self.stream, file, why)
        if not files:
            return
        ordered = tuple(sorted(files, key=lambda file: file.first_offset))
        merging = RowMerger(
            self.root, self.stream, pq.read_schema(self.root / ordered[0].path), row_key_spec
        )
        table = merging.read_changes(
            PartitionCatchUp(partition=partition, files=ordered, topic_ids=(topic_id,))
        )
        words = table.sort_by(
            [("session", "ascending"), ("offset", "ascending"), ("index", "ascending")]
        )
        times = words.column("timestamp").cast(
            pa.int64()
        )  # those of no year that Python knows are counted, too
        words = words.set_column(words.schema.get_field_index("timestamp"), "timestamp", times)
        for session, mine in groupby(words.to_pylist(), key=lambda row: str(row["session"])):
            rows = list(mine)
            kept = [
                tuple(row[name] for name in row_key_spec.columns)
                for row in rows
                if not row["_gone"]
            ]
            last = rows[-1]
            yield SessionTable(
                session, kept, last["offset"], last["timestamp"] // 1000, last["sequence"]
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
            table.filter(_replaced_mask(table, replaced))
            for table in map(self._read_verified, old_files)
        ]
        now = [
            table.filter(_offset_mask(table, offset_range))
            for table in map(self._read_verified, _overlapping_files(new_files, offset_range))
        ]
        if not was and not now:
            return None
        empty = (was or now)[0].slice(0, 0)
        one, other = (
            pa.concat_tables([empty, *tables]).sort_by(RECORD_ORDER) for tables in (was, now)
        )
        if one.equals(other):
            return None
        pairs = zip_longest(
            one.to_pylist(), other.to_pylist()
        )  # what is no number equals nothing, but reads the same
        parted = (pair for pair in pairs if repr(pair[0]) != repr(pair[1]))
        return min(
            (int(row["offset"]) for row in next(parted, ()) if row is not None), default=None
        )

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
        near = _overlapping_files(new_files, offset_range)
        parts = [
            table.filter(pc.invert(_replaced_mask(table, replaced)))
            for table in map(self._read_verified, old_files)
        ]
        parts += [
            table.filter(_offset_mask(table, offset_range))
            for table in map(self._read_verified, near)
        ]
        parts = [part for part in parts if part.num_rows]
        if not parts:
            return None
        rows = pa.concat_tables(parts).sort_by(RECORD_ORDER)
        room = (*old_files, *near)[0].path.partition("/")[0]
        writer = ParquetFileWriter(
            self.root, f"{room}/{partition}/{stem}.parquet", rows.schema, self.compression
        )
        for batch in rows.to_batches(max_chunksize=ROWS_PER_GROUP):
            writer.add(batch)
        offsets = rows.column("offset")
        file = writer.finish()
        return (
            None
            if file is None
            else replace(file, first_offset=offsets[0].as_py(), last_offset=offsets[-1].as_py())
        )

    def _read_verified(self, file: File, columns: list[str] | None = None) -> pa.Table:
        if why := self._describe_damage(file, thorough=columns is None):
            raise damaged_record_file(self.stream, file, why)
        return self._read_columns(file, columns)

    def _read_columns(self, file: File, columns: list[str] | None) -> pa.Table:
        try:
            with pq.ParquetFile(self.root / file.path, page_checksum_verification=True) as parquet:
                return parquet.read(columns)
        except (OSError, pa.ArrowException) as error:
            raise damaged_record_file(self.stream, file, str(error).splitlines()[0]) from None


def _overlapping_files(files: Iterable[File], offset_range: OffsetRange) -> list[File]:
    """Those that may have records there."""
    return [
        file
        for file in files
        if file.first_offset < offset_range.end and offset_range.start <= file.last_offset
    ]


def _offset_mask(table: pa.Table, offset_range: OffsetRange) -> pa.ChunkedArray:
    offsets = table.column("offset")
    return pc.and_(
        pc.greater_equal(offsets, offset_range.start), pc.less(offsets, offset_range.end)
    )


def _replaced_mask(table: pa.Table, replaced: ReplacedRecords) -> pa.ChunkedArray:
    """Which rows are replaced, by session and offset."""
    offsets, sessions = table.column("offset"), table.column("session")
    ends: pa.ChunkedArray | pa.Scalar = pa.scalar(replaced.end, pa.int64())
    if replaced.session_ends:
        names = pa.array(list(replaced.session_ends), pa.string())
        known = pa.array(list(replaced.session_ends.values()), pa.int64())
        ends = pc.fill_null(pc.take(known, pc.index_in(sessions, value_set=names)), replaced.end)
    mask = pc.and_(pc.greater_equal(offsets, replaced.start), pc.less(offsets, ends))
    if replaced.sessions is not None:
        mask = pc.and_(
            mask, pc.is_in(sessions, value_set=pa.array(sorted(replaced.sessions), pa.string()))
        )
    return mask
