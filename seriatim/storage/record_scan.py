"""Reads committed record files again, one row group at a time, with page checksums: what each file
contains, and which rows its records make.

Everything is done on whole columns: which rows are new, whether they are in order, and which row of
a session follows which. Only the first and the last record of each row become Python values.

Next: operations/prove/partition_rules.py asks; operations/prove/great_expectations_suites.py judges
the same files by suites.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seriatim.engine.files import File
from seriatim.engine.records import POSITION_COLUMNS, ROW_IMAGE_COLUMNS, RowImage, RowKeySpec
from seriatim.engine.session import Row
from seriatim.ports import FileOutline, ScannedRecords, ScanRequest, UnreadableFileError
from seriatim.storage.parquet import first_line, open_parquet, with_added_columns
from seriatim.storage.record_rows import (
    RecordGroups,
    RecordOrderScan,
    RowNumbers,
    boolean_array,
    deleted_mask,
    distinct_values_and_codes,
    images_of_rows,
    row_groups_of,
    row_images,
    row_tuples,
    value_ranges,
    whole_numbers,
)
from seriatim.storage.store import Store

READ_ERRORS = (OSError, pa.ArrowException, KeyError, ValueError)
"""What reading a damaged file raises."""
WAITING_RECORDS_MAX = 500_000
"""Records in memory that wait to be linked and reduced together."""
OUTLINE_COLUMNS = (*POSITION_COLUMNS, "session", "source_offset")
"""What outlines read. Files of quarantined messages, and older files, do not have all of them."""


class RecordScan:
    """The record files of one stream."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def scan(self, files: Sequence[File], request: ScanRequest) -> ScannedRecords:
        """What record files of one partition contain, and the rows that their records make."""
        scanned = ScannedRecords()
        columns = [*OUTLINE_COLUMNS]
        row_scan = None
        if request.row_key_spec is not None:
            row_scan = RowScan(request.row_key_spec)
            columns += row_scan.columns
        for file in files:
            outline = _OutlineScan()
            for table in self._row_groups(file.path, columns, outline.outline):
                if request.with_outlines:
                    outline.add(table)
                row_numbers = _new_row_numbers(table, request)
                scanned.new_rows += len(row_numbers)
                if row_scan is not None:
                    row_scan.add(_records_in_bucket(table, row_numbers, request), file.path)
            if request.with_outlines:
                scanned.outlines.append(outline.outline)
        if row_scan is not None:
            row_scan.finish(scanned)
        return scanned

    def outline(self, path: str) -> FileOutline:
        """What a file of records or quarantined messages contains. Every page of it is read."""
        outline = _OutlineScan()
        for table in self._row_groups(path, None, outline.outline):
            outline.add(table)
        return outline.outline

    def _row_groups(
        self, path: str, columns: Sequence[str] | None, outline: FileOutline
    ) -> Iterator[pa.Table]:
        """The row groups of a file. What the file states of itself goes into its outline."""
        try:
            with open_parquet(self.store, path) as parquet:
                outline.value_ranges = value_ranges(parquet)
                yield from row_groups_of(parquet, columns)
        except FileNotFoundError:
            raise UnreadableFileError(path, "it is missing") from None
        except READ_ERRORS as error:
            raise UnreadableFileError(path, first_line(error)[:300]) from None


class _OutlineScan:
    """Outlines one file, row group by row group."""

    def __init__(self) -> None:
        self.outline = FileOutline()
        self._order_scan = RecordOrderScan()
        self._sessions: set[str] = set()

    def add(self, table: pa.Table) -> None:
        """Add the rows of a row group."""
        outline = self.outline
        offsets = whole_numbers(table, "offset")
        order = self._order_scan.scan(table)
        if outline.first_disorder is None and len(order.disordered_rows):
            row = int(order.disordered_rows[0])
            index = table.column("index")[row].as_py() if "index" in table.schema.names else 0
            outline.first_disorder = int(offsets[row]), index
        outline.rows += table.num_rows
        outline.distinct_offsets += order.distinct_offsets
        lowest_offset = int(offsets.min())
        if outline.first_offset < 0 or lowest_offset < outline.first_offset:
            outline.first_offset = lowest_offset
        outline.last_offset = max(outline.last_offset, int(offsets.max()))
        if "source_offset" in table.schema.names and outline.early_offset < 0:
            early_rows = np.flatnonzero(whole_numbers(table, "source_offset") > offsets)
            if len(early_rows):
                outline.early_offset = int(offsets[early_rows[0]])
        self._add_topic_ids(table, offsets)
        outline.topics.update(_distinct_values(table, "topic"))
        outline.partitions.update(_distinct_values(table, "partition"))
        self._sessions.update(_distinct_values(table, "session"))
        outline.session_count = len(self._sessions)

    def _add_topic_ids(self, table: pa.Table, offsets: np.ndarray[Any, Any]) -> None:
        """Extend the offsets of each topic id by those of a row group."""
        spans = self.outline.offsets_by_topic_id
        topic_ids, id_codes = distinct_values_and_codes(table.column("topic_id"))
        for code, topic_id in enumerate(topic_ids):
            own_offsets = offsets if len(topic_ids) == 1 else offsets[id_codes == code]
            first_offset = int(own_offsets.min())
            last_offset = int(own_offsets.max())
            if topic_id in spans:
                first_offset = min(first_offset, spans[topic_id][0])
                last_offset = max(last_offset, spans[topic_id][1])
            spans[topic_id] = (first_offset, last_offset)


def _distinct_values(table: pa.Table, name: str) -> list[Any]:
    """The distinct values of a column; none if it is the name of a folder instead."""
    if name not in table.schema.names:
        return []
    values: list[Any] = table.column(name).unique().to_pylist()
    return values


def _new_row_numbers(table: pa.Table, request: ScanRequest) -> RowNumbers:
    """The numbers of the rows that count as new."""
    if request.first_offsets is None:
        return np.arange(table.num_rows)
    offsets = whole_numbers(table, "offset")
    topic_ids, id_codes = distinct_values_and_codes(table.column("topic_id"))
    never = np.iinfo(np.int64).max
    first_offsets = [request.first_offsets.get(topic_id, never) for topic_id in topic_ids]
    return np.flatnonzero(offsets >= np.array(first_offsets, dtype=np.int64)[id_codes])


def _records_in_bucket(table: pa.Table, row_numbers: RowNumbers, request: ScanRequest) -> pa.Table:
    """Those of these records whose session is in the bucket that is asked for."""
    names, session_codes = distinct_values_and_codes(table.column("session"))
    is_included = [name is not None and request.includes_session(name) for name in names]
    is_chosen = np.array(is_included, dtype=bool)[session_codes[row_numbers]]
    return table.take(pa.array(row_numbers[is_chosen]))


class RowScan:
    """Follows each row of each session through the records of a partition, which come in order."""

    def __init__(self, row_key_spec: RowKeySpec) -> None:
        self.row_key_spec = row_key_spec
        self.row_columns = ("topic_id", "session", *row_key_spec.key)
        columns = [*ROW_IMAGE_COLUMNS, *row_key_spec.deleted_when]
        columns += [*row_key_spec.key, *row_key_spec.columns]
        self.before_columns: list[str] = []
        """The columns with the row as it was before the record."""
        if row_key_spec.has_before_images:
            self.before_columns = [f"before_{name}" for name in row_key_spec.columns]
        self.columns = list(dict.fromkeys([*columns, *self.before_columns]))
        # Without a type: files that have the column give it one.
        self.addable_fields = [
            pa.field(name, pa.null()) for name in row_key_spec.addable_record_columns
        ]
        self.unlinked_rows = 0
        self.unlinked_offset = -1
        self.unlinked_files: list[str] = []
        self._waiting: list[pa.Table] = []
        self._waiting_paths: list[str] = []
        self._waiting_rows = 0
        self._first_records: list[pa.Table] = []
        """The first record of each row so far."""
        self._last_records: pa.Table | None = None
        """The last record of each row so far."""

    def add(self, records: pa.Table, path: str) -> None:
        """Add the next records."""
        if not records.num_rows:
            return
        records = with_added_columns(records, self.addable_fields)
        self._waiting.append(records.select(self.columns))
        self._waiting_paths.append(path)
        self._waiting_rows += records.num_rows
        # As many as are known, too: then each record is grouped only a few times in all.
        known_rows = 0 if self._last_records is None else self._last_records.num_rows
        if self._waiting_rows > max(WAITING_RECORDS_MAX, known_rows):
            self._reduce()

    def finish(self, scanned: ScannedRecords) -> None:
        """Say what became of each row."""
        if self._waiting:
            self._reduce()
        scanned.unlinked_rows = self.unlinked_rows
        scanned.unlinked_offset = self.unlinked_offset
        scanned.unlinked_files = self.unlinked_files
        scanned.first_rows = self._images_before()
        if self._last_records is not None:
            scanned.last_rows = row_images(self._last_records, self.row_key_spec)

    def _reduce(self) -> None:
        """Link the records that wait, and keep the first and the last of each row."""
        known_rows = 0
        tables = self._waiting
        if self._last_records is not None:
            known_rows = self._last_records.num_rows
            tables = [self._last_records, *tables]
        records = pa.concat_tables(tables, promote_options="default")
        groups = RecordGroups(records, self.row_columns)
        if self.before_columns:
            earlier, later = groups.neighbours
            is_linked = self._is_before_image_equal(records, earlier, later)
            unlinked = np.sort(later[~is_linked])
            if len(unlinked):
                self._add_unlinked(records, unlinked, known_rows)
        first_rows = groups.first_rows()
        new_rows = first_rows[first_rows >= known_rows]
        self._first_records.append(records.take(pa.array(new_rows)))
        self._last_records = records.take(pa.array(groups.last_rows()))
        self._waiting = []
        self._waiting_paths = []
        self._waiting_rows = 0

    def _add_unlinked(self, records: pa.Table, unlinked: RowNumbers, known_rows: int) -> None:
        """Count records that are not linked. All of them are among those that waited."""
        self.unlinked_rows += len(unlinked)
        offset = int(whole_numbers(records, "offset")[unlinked[0]])
        if self.unlinked_offset < 0 or offset < self.unlinked_offset:
            self.unlinked_offset = offset
        table_ends = known_rows + np.cumsum([table.num_rows for table in self._waiting])
        for table_number in np.unique(np.searchsorted(table_ends, unlinked, side="right")):
            path = self._waiting_paths[table_number]
            if path not in self.unlinked_files:
                self.unlinked_files.append(path)

    def _is_before_image_equal(
        self, records: pa.Table, earlier: RowNumbers, later: RowNumbers
    ) -> Any:
        """Whether the before-image of each later record is its earlier record. After a delete it
        must be empty.
        """
        spec = self.row_key_spec
        earlier_records = records.take(pa.array(earlier))
        later_records = records.take(pa.array(later))
        is_delete = deleted_mask(earlier_records, spec)
        before_key = later_records.column(f"before_{spec.key[0]}")
        is_empty = boolean_array(before_key.is_null())
        is_equal = np.ones(len(earlier), dtype=bool)
        for name in spec.columns:
            value = earlier_records.column(name)
            if pa.types.is_null(value.type):
                continue  # no file has this column yet
            before_value = later_records.column(f"before_{name}")
            both_null = boolean_array(value.is_null()) & boolean_array(before_value.is_null())
            is_equal &= boolean_array(pc.equal(value, before_value)) | both_null
        return np.where(is_delete, is_empty, is_equal & ~is_empty)

    def _images_before(self) -> Iterator[RowImage]:
        """Each row as it was before its first record; None where that is not known."""
        for records in self._first_records:
            rows: list[Row | None] = [None] * records.num_rows
            if self.before_columns:
                before_key = records.column(f"before_{self.row_key_spec.key[0]}")
                is_known = boolean_array(before_key.is_valid()).tolist()
                before_rows = row_tuples(records, self.before_columns)
                rows = [
                    row if known else None for row, known in zip(before_rows, is_known, strict=True)
                ]
            yield from images_of_rows(records, self.row_key_spec, rows)
