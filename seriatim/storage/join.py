"""Joins committed record files with what a refold wrote: rows are filtered out of old files and
merged with new ones.

A file is read only after its digest agrees with the ledger: damage is never copied.

Next: operations/repair/refold.py calls this; record_files.py writes what the fold itself produces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, zip_longest

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.engine.records import ORDER_COLUMNS, RowKeySpec, SessionTable, owner_values
from seriatim.engine.session import ReplacedRecords
from seriatim.ledger.current_rows import PartitionCatchUp
from seriatim.storage.parquet import (
    ROWS_PER_GROUP,
    ParquetFileWriter,
    damaged_record_file,
    describe_damage,
    open_parquet,
    with_added_columns,
)
from seriatim.storage.record_rows import RowMerger, row_images
from seriatim.storage.store import Store, open_store
from seriatim.workers import LocalWorkers, Workers, map_or_raise

RECORD_ORDER = [(name, "ascending") for name in ORDER_COLUMNS]
SESSION_ORDER = [("session", "ascending"), *RECORD_ORDER]


class FileToCheck(Struct, frozen=True):
    """A piece of work: a file that is compared with what the ledger says of it."""

    store_url: str
    file: File
    check_digest: bool

    def __str__(self) -> str:
        return self.file.path


def damage_of_work(work: FileToCheck) -> str:
    """What is wrong with a file; empty if nothing is."""
    store = open_store(work.store_url)
    return describe_damage(store, work.file, check_digest=work.check_digest)


class ParquetJoiner:
    """The committed files of one stream, below its output path. `workers` look for damage."""

    def __init__(
        self,
        store: Store,
        stream: str,
        compression: str = "zstd",
        workers: Workers | None = None,
    ) -> None:
        self.store = store
        self.stream = stream
        self.compression = compression
        self.workers = LocalWorkers() if workers is None else workers

    def find_damaged_files(
        self,
        files: Iterable[File],
        *,
        check_digests: bool = True,
    ) -> dict[str, str]:
        """The files that are not as committed, by path, and what is wrong with each."""
        files = list(files)
        works = [FileToCheck(self.store.address, file, check_digests) for file in files]
        damages = map_or_raise(self.workers, damage_of_work, works)
        return {file.path: damage for file, damage in zip(files, damages, strict=True) if damage}

    def has_replaced_records(self, file: File, replaced: ReplacedRecords) -> bool:
        """Whether a file has a record that is replaced."""
        table = self._read_verified(file, ["session", "offset"])
        return _any(_replaced_mask(table, replaced))

    def has_records_in(
        self,
        files: Iterable[File],
        offset_range: OffsetRange,
        partition_and_topic_id: tuple[Partition, str] | None = None,
    ) -> bool:
        """Whether any of these files has a record at these offsets, of one partition and topic id
        if that is given.
        """
        if partition_and_topic_id is not None:
            partition, topic_id = partition_and_topic_id
            return any(
                self._has_record_of_partition(file, offset_range, partition, topic_id)
                for file in files
            )
        for file in _overlapping_files(files, offset_range):
            table = self._read_verified(file, ["offset"])
            if _any(_offset_mask(table, offset_range)):
                return True
        return False

    def _has_record_of_partition(
        self,
        file: File,
        offset_range: OffsetRange,
        partition: Partition,
        topic_id: str,
    ) -> bool:
        """The same for one file that somebody else wrote, which may hold records of any partition.

        A column that is not in the file is in the name of its folder, and taken to be right.
        """
        owner = owner_values(partition, topic_id)
        table = self._read_columns(file, ["offset", *owner])
        mask = _offset_mask(table, offset_range)
        for name, value in owner.items():
            if name in table.column_names:
                mask = pc.and_(mask, pc.equal(table.column(name), value))
        return _any(mask)

    def session_tables(
        self,
        partition: Partition,
        topic_id: str,
        files: Sequence[File],
        row_key_spec: RowKeySpec,
    ) -> Iterator[SessionTable]:
        """The table of each session, as the records of a partition leave it."""
        for file in files:
            damage = describe_damage(self.store, file)
            if damage:
                raise damaged_record_file(self.stream, file, damage)
        if not files:
            return
        ordered = tuple(sorted(files, key=lambda file: file.first_offset))
        # A later file has more columns, or those of a repair.
        schema = pa.unify_schemas([self._read_schema(file) for file in ordered])
        for name in row_key_spec.addable_columns:
            if name not in schema.names:
                # It was added to the table, and no file of the partition has it yet.
                schema = schema.append(pa.field(name, pa.null()))
        merger = RowMerger(self.store, self.stream, schema, row_key_spec)
        catch_up = PartitionCatchUp(
            partition=partition,
            files=ordered,
            topic_ids=(topic_id,),
        )
        changes = merger.read_changes(catch_up).sort_by(SESSION_ORDER)
        # As numbers: Python has no datetime for a time after the year 9999.
        times = changes.column("timestamp").cast(pa.int64()).to_pylist()
        sequences = changes.column("sequence").to_pylist()
        images = enumerate(row_images(changes, row_key_spec))
        for session, group in groupby(images, key=lambda image: str(image[1].session)):
            numbered_images = list(group)
            # The last record of a session is the last record of one of its rows.
            newest_number, newest_image = numbered_images[-1]
            yield SessionTable(
                session=session,
                rows=[image.row for _, image in numbered_images if image.row is not None],
                offset=newest_image.offset,
                timestamp=times[newest_number] // 1000,
                sequence=sequences[newest_number],
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
        old_tables = self._read_rows(old_files, lambda table: _replaced_mask(table, replaced))
        near_files = _overlapping_files(new_files, offset_range)
        new_tables = self._read_rows(near_files, lambda table: _offset_mask(table, offset_range))
        if not old_tables and not new_tables:
            return None
        # One of the two sides may have no file at all, or files with fewer columns.
        schema = _common_schema([*old_tables, *new_tables])
        old_records = _join_tables(old_tables, schema).sort_by(RECORD_ORDER)
        new_records = _join_tables(new_tables, schema).sort_by(RECORD_ORDER)
        if old_records.equals(new_records):
            return None
        for old, new in zip_longest(old_records.to_pylist(), new_records.to_pylist()):
            # By their text: NaN equals nothing, but reads the same.
            if repr(old) != repr(new):
                return min(int(record["offset"]) for record in (old, new) if record is not None)
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
        near_files = _overlapping_files(new_files, offset_range)
        tables = self._read_rows(
            old_files, lambda table: pc.invert(_replaced_mask(table, replaced))
        )
        tables += self._read_rows(near_files, lambda table: _offset_mask(table, offset_range))
        tables = [table for table in tables if table.num_rows]
        if not tables:
            return None
        rows = _join_tables(tables, _common_schema(tables)).sort_by(RECORD_ORDER)
        # All files are of one table, and its folder is the first part of their paths.
        table_folder = (*old_files, *near_files)[0].path.partition("/")[0]
        path = f"{table_folder}/{partition}/{stem}.parquet"
        writer = ParquetFileWriter(self.store, path, rows.schema, self.compression)
        for batch in rows.to_batches(max_chunksize=ROWS_PER_GROUP):
            writer.add(batch)
        file_written = writer.finish()
        if file_written is None:
            return None
        offsets = rows.column("offset")
        return replace(
            file_written,
            first_offset=offsets[0].as_py(),
            last_offset=offsets[-1].as_py(),
        )

    def _read_rows(
        self, files: Iterable[File], mask_of_table: Callable[[pa.Table], pa.ChunkedArray]
    ) -> list[pa.Table]:
        """The rows of each file that a mask chooses."""
        # One file after the other: only what is taken of each stays in memory.
        tables = []
        for file in files:
            table = self._read_verified(file)
            tables.append(table.filter(mask_of_table(table)))
        return tables

    def _read_verified(self, file: File, columns: list[str] | None = None) -> pa.Table:
        """The rows of a file that is as committed. A few columns are proved by the checksums of
        their pages, a whole file by its digest.
        """
        damage = describe_damage(self.store, file, check_digest=columns is None)
        if damage:
            raise damaged_record_file(self.stream, file, damage)
        return self._read_columns(file, columns)

    def _read_schema(self, file: File) -> pa.Schema:
        try:
            with open_parquet(self.store, file.path) as parquet:
                return parquet.schema_arrow.remove_metadata()
        except (OSError, pa.ArrowException) as error:
            raise damaged_record_file(self.stream, file, str(error).splitlines()[0]) from None

    def _read_columns(self, file: File, columns: list[str] | None) -> pa.Table:
        try:
            with open_parquet(self.store, file.path) as parquet:
                return parquet.read(columns)
        except (OSError, pa.ArrowException) as error:
            raise damaged_record_file(self.stream, file, str(error).splitlines()[0]) from None


def _overlapping_files(files: Iterable[File], offset_range: OffsetRange) -> list[File]:
    """The files that may have records in this range."""
    return [
        file
        for file in files
        if file.first_offset < offset_range.end and offset_range.start <= file.last_offset
    ]


def _common_schema(tables: Sequence[pa.Table]) -> pa.Schema:
    """The columns of all these records. Some were written before others were added to their table."""
    return pa.unify_schemas([table.schema for table in tables])


def _join_tables(tables: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    """The records as one table with these columns."""
    whole_tables = [schema.empty_table()]
    for table in tables:
        whole_tables.append(with_added_columns(table, schema).select(schema.names))
    return pa.concat_tables(whole_tables)


def _any(mask: pa.ChunkedArray) -> bool:
    return bool(pc.any(mask).as_py())


def _offset_mask(table: pa.Table, offset_range: OffsetRange) -> pa.ChunkedArray:
    """Which rows are in the range."""
    offsets = table.column("offset")
    not_before = pc.greater_equal(offsets, offset_range.start)
    not_after = pc.less(offsets, offset_range.end)
    return pc.and_(not_before, not_after)


def _replaced_mask(table: pa.Table, replaced: ReplacedRecords) -> pa.ChunkedArray:
    """Which rows are replaced, by session and offset."""
    offsets = table.column("offset")
    sessions = table.column("session")
    ends: pa.ChunkedArray | pa.Scalar = pa.scalar(replaced.end, pa.int64())
    if replaced.session_ends:
        # The end of each row's own session; the common end for sessions without one.
        names = pa.array(list(replaced.session_ends), pa.string())
        own_ends = pa.array(list(replaced.session_ends.values()), pa.int64())
        positions = pc.index_in(sessions, value_set=names)
        ends = pc.fill_null(pc.take(own_ends, positions), replaced.end)
    not_before = pc.greater_equal(offsets, replaced.start)
    mask = pc.and_(not_before, pc.less(offsets, ends))
    if replaced.sessions is not None:
        names = pa.array(sorted(replaced.sessions), pa.string())
        mask = pc.and_(mask, pc.is_in(sessions, value_set=names))
    return mask
