"""Reads committed record files again for `check`, one row group at a time, with page checksums.

Everything is done on whole columns: which rows are new, whether they are in order, and which row of
a session follows which. Only the first and the last record of each row become Python values.

Next: operations/prove/evidence.py asks; operations/prove/great_expectations_suites.py judges the
same files by suites.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seriatim.engine.files import File
from seriatim.engine.records import POSITION_COLUMNS, RowImage, RowKeySpec
from seriatim.operations.prove.evidence import EvidenceRequest, PartitionEvidence, in_bucket
from seriatim.ports import UnreadableFileError
from seriatim.storage.parquet import first_line
from seriatim.storage.record_rows import (
    RecordGroups,
    RecordOrderScan,
    RowNumbers,
    boolean_array,
    deleted_mask,
    distinct_values_and_codes,
    images_of_rows,
    read_row_groups,
    row_images,
    row_tuples,
)
from seriatim.storage.store import Store

READ_ERRORS = (OSError, pa.ArrowException, KeyError, ValueError)
"""What reading a damaged file raises."""


class RecordScan:
    """The record files of one stream."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def scan(self, file: File, request: EvidenceRequest) -> Iterator[PartitionEvidence]:
        """The evidence of a file, row group by row group."""
        order_scan = RecordOrderScan()
        for table in self._row_group_tables(file, request.row_key_spec):
            evidence = PartitionEvidence(total_rows=table.num_rows)
            evidence.disorder_offset = _disorder_offset(table, order_scan)
            evidence.foreign_offset = _foreign_offset(table, request)
            row_numbers = _new_row_numbers(table, request)
            evidence.new_rows = len(row_numbers)
            _add_offset_spans(evidence, table, row_numbers)
            if request.row_key_spec is not None:
                records = _records_in_bucket(table, row_numbers, request)
                _add_first_and_last_rows(evidence, records, request.row_key_spec)
            yield evidence

    def _row_group_tables(self, file: File, row_key_spec: RowKeySpec | None) -> Iterator[pa.Table]:
        columns = [*POSITION_COLUMNS, "session"]
        if row_key_spec is not None:
            columns += [*row_key_spec.deleted_when, *row_key_spec.key, *row_key_spec.columns]
            if row_key_spec.has_before_images:
                columns += _before_columns(row_key_spec)
        try:
            yield from read_row_groups(self.store, file.path, columns)
        except READ_ERRORS as error:
            raise UnreadableFileError(f"{file.path}: {first_line(error)[:300]}") from None


def _before_columns(row_key_spec: RowKeySpec) -> list[str]:
    """The columns with the row as it was before the record."""
    return [f"before_{name}" for name in row_key_spec.columns]


def _disorder_offset(table: pa.Table, order_scan: RecordOrderScan) -> int:
    """The offset of the first row that is out of order; -1 if there is none."""
    rows = order_scan.scan(table).disordered_rows
    if not len(rows):
        return -1
    offset = table.column("offset")[int(rows[0])].as_py()
    # A row without an offset is out of order, too.
    return 0 if offset is None else int(offset)


def _foreign_offset(table: pa.Table, request: EvidenceRequest) -> int:
    """The offset of the first row of another topic or partition; -1 if there is none.

    A column that the file does not have is in the name of its folder, and taken to be right.
    """
    owner = {"topic": request.partition.topic, "partition": request.partition.number}
    for name, value in owner.items():
        if name not in table.column_names:
            continue
        is_own = boolean_array(pc.equal(table.column(name), value))
        rows = np.flatnonzero(~is_own)
        if len(rows):
            return int(_numpy_column(table, "offset")[rows[0]])
    return -1


def _new_row_numbers(table: pa.Table, request: EvidenceRequest) -> RowNumbers:
    """The numbers of the rows that are new."""
    offsets = _numpy_column(table, "offset")
    topic_ids, id_codes = distinct_values_and_codes(table.column("topic_id"))
    never = np.iinfo(np.int64).max
    first_new = [request.first_new_offsets.get(topic_id, never) for topic_id in topic_ids]
    return np.flatnonzero(offsets >= np.array(first_new, dtype=np.int64)[id_codes])


def _add_offset_spans(
    evidence: PartitionEvidence,
    table: pa.Table,
    row_numbers: RowNumbers,
) -> None:
    offsets = _numpy_column(table, "offset")[row_numbers]
    topic_ids, id_codes = distinct_values_and_codes(table.column("topic_id"))
    new_codes = id_codes[row_numbers]
    for code, topic_id in enumerate(topic_ids):
        id_offsets = offsets[new_codes == code]
        if len(id_offsets):
            evidence.offset_spans[topic_id] = int(id_offsets.min()), int(id_offsets.max())


def _records_in_bucket(
    table: pa.Table, row_numbers: RowNumbers, request: EvidenceRequest
) -> pa.Table:
    """Those of these records whose session is in the bucket that is asked for."""
    names, session_codes = distinct_values_and_codes(table.column("session"))
    in_bucket_by_code = [name is not None and in_bucket(name, request.bucket) for name in names]
    is_chosen = np.array(in_bucket_by_code, dtype=bool)[session_codes[row_numbers]]
    return table.take(pa.array(row_numbers[is_chosen]))


def _add_first_and_last_rows(
    evidence: PartitionEvidence, records: pa.Table, row_key_spec: RowKeySpec
) -> None:
    """Add each row of a session as its first and its last new record have it, and the records
    between whose before-image is not the record before.
    """
    if not records.num_rows:
        return
    groups = RecordGroups(records, ("topic_id", "session", *row_key_spec.key))
    if row_key_spec.has_before_images:
        earlier, later = groups.neighbours
        is_linked = _is_before_image_equal(records, earlier, later, row_key_spec)
        unlinked = np.sort(later[~is_linked])
        evidence.unlinked_rows = len(unlinked)
        if len(unlinked):
            evidence.unlinked_offset = int(_numpy_column(records, "offset")[unlinked[0]])
    first_records = records.take(pa.array(groups.first_rows()))
    last_records = records.take(pa.array(groups.last_rows()))
    evidence.first_rows = list(_images_before(first_records, row_key_spec))
    evidence.last_rows = list(row_images(last_records, row_key_spec))


def _is_before_image_equal(
    records: pa.Table, earlier: RowNumbers, later: RowNumbers, row_key_spec: RowKeySpec
) -> Any:
    """Whether the before-image of each later record is its earlier record. After a delete it must
    be empty.
    """
    earlier_records = records.take(pa.array(earlier))
    later_records = records.take(pa.array(later))
    is_delete = deleted_mask(earlier_records, row_key_spec)
    before_key = later_records.column(f"before_{row_key_spec.key[0]}")
    is_empty = boolean_array(before_key.is_null())
    is_equal = np.ones(len(earlier), dtype=bool)
    for name in row_key_spec.columns:
        value = earlier_records.column(name)
        before_value = later_records.column(f"before_{name}")
        both_null = boolean_array(value.is_null()) & boolean_array(before_value.is_null())
        is_equal &= boolean_array(pc.equal(value, before_value)) | both_null
    return np.where(is_delete, is_empty, is_equal & ~is_empty)


def _images_before(records: pa.Table, row_key_spec: RowKeySpec) -> Iterator[RowImage]:
    """Each row as it was before its record; None where that is not known."""
    rows: list[tuple[Any, ...] | None] = [None] * records.num_rows
    if row_key_spec.has_before_images:
        before_key = records.column(f"before_{row_key_spec.key[0]}")
        is_known = boolean_array(before_key.is_valid()).tolist()
        before_rows = row_tuples(records, _before_columns(row_key_spec))
        rows = [row if known else None for row, known in zip(before_rows, is_known, strict=True)]
    yield from images_of_rows(records, row_key_spec, rows)


def _numpy_column(table: pa.Table, name: str) -> Any:
    return table.column(name).to_numpy()
