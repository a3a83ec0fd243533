"""Reads committed record files again for `check`, one row group at a time, with page checksums.

Everything is done on whole columns: which rows are new, whether they are in order, and which row of
a session follows which. Only the first and the last record of each row become Python values.

Next: operations/prove/evidence.py asks; operations/prove/great_expectations_suites.py judges the
same files by suites.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from seriatim.ledger.model import File
from seriatim.operations.prove.evidence import EvidenceRequest, PartitionEvidence, in_bucket
from seriatim.ports import UnreadableFileError
from seriatim.storage.arrow import follows_previous
from seriatim.storage.delta import first_line

RECORD_COLUMNS = ("topic", "topic_id", "partition", "offset", "index", "session")
READ_ERRORS = (OSError, pa.ArrowException, KeyError, ValueError)
"""What reading a damaged file raises."""
RowNumbers = Any
"""A numpy array of row numbers."""
RowImage = tuple[str, str, Any, tuple[Any, ...] | None, int]
"""The topic id, session, key, values (None: deleted or unknown) and offset of a row."""


class RecordScan:
    """The record files of one stream, below its output path."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def scan(self, file: File, request: EvidenceRequest) -> Iterator[PartitionEvidence]:
        """The evidence of a file, row group by row group."""
        previous_position: tuple[Any, ...] = (-1, -1, "")
        for table in self._row_group_tables(file, request):
            evidence = PartitionEvidence(total_rows=table.num_rows)
            evidence.disorder_offset = _disorder_offset(table, previous_position)
            evidence.foreign_offset = _foreign_offset(table, request)
            previous_position = tuple(
                table.column(name)[-1].as_py() for name in ("offset", "index", "topic_id")
            )
            row_numbers = _new_row_numbers(table, request)
            evidence.new_rows = len(row_numbers)
            _add_offset_spans(evidence, table, row_numbers)
            if request.key_columns:
                _add_first_and_last_rows(evidence, table, row_numbers, request)
            yield evidence

    def _row_group_tables(self, file: File, request: EvidenceRequest) -> Iterator[pa.Table]:
        names = list(RECORD_COLUMNS)
        if request.key_columns:
            names += ["op", *request.key_columns, *request.columns]
            if request.has_before_images:
                names += [f"before_{name}" for name in request.columns]
        try:
            with pq.ParquetFile(self.root / file.path, page_checksum_verification=True) as parquet:
                file_names = parquet.schema_arrow.names
                columns = [name for name in dict.fromkeys(names) if name in file_names]
                for group in range(parquet.num_row_groups):
                    if parquet.metadata.row_group(group).num_rows:
                        table = parquet.read_row_group(group, columns, use_threads=False)
                        yield table.combine_chunks()
        except READ_ERRORS as error:
            raise UnreadableFileError(f"{file.path}: {first_line(error)[:300]}") from None


def _disorder_offset(table: pa.Table, previous_position: tuple[Any, ...]) -> int:
    """The offset of the first row that is out of order; -1 if there is none."""
    offsets = _numpy_column(table, "offset")
    indexes = _numpy_column(table, "index")
    topic_ids, id_codes = _distinct_values_and_codes(table.column("topic_id"))
    previous_offset, previous_index, previous_id = previous_position
    previous_code = topic_ids.index(previous_id) if previous_id in topic_ids else -1
    in_order = follows_previous(offsets, indexes, previous_offset, previous_index)
    # A topic that was created again starts over at offset 0, under a new id.
    same_id = np.diff(id_codes, prepend=previous_code) == 0
    rows = np.flatnonzero(same_id & ~in_order)
    return int(offsets[rows[0]]) if len(rows) else -1


def _foreign_offset(table: pa.Table, request: EvidenceRequest) -> int:
    """The offset of the first row of another topic or partition; -1 if there is none.

    A column that the file does not have is in the name of its folder, and taken to be right.
    """
    owner = {"topic": request.partition.topic, "partition": request.partition.number}
    for name, value in owner.items():
        if name not in table.column_names:
            continue
        is_own = _boolean_array(pc.equal(table.column(name), value))
        rows = np.flatnonzero(~is_own)
        if len(rows):
            return int(_numpy_column(table, "offset")[rows[0]])
    return -1


def _new_row_numbers(table: pa.Table, request: EvidenceRequest) -> RowNumbers:
    """The numbers of the rows that are new."""
    offsets = _numpy_column(table, "offset")
    topic_ids, id_codes = _distinct_values_and_codes(table.column("topic_id"))
    never = np.iinfo(np.int64).max
    first_new = [request.first_new_offsets.get(topic_id, never) for topic_id in topic_ids]
    return np.flatnonzero(offsets >= np.array(first_new, dtype=np.int64)[id_codes])


def _add_offset_spans(
    evidence: PartitionEvidence,
    table: pa.Table,
    row_numbers: RowNumbers,
) -> None:
    offsets = _numpy_column(table, "offset")[row_numbers]
    topic_ids, id_codes = _distinct_values_and_codes(table.column("topic_id"))
    new_codes = id_codes[row_numbers]
    for code, topic_id in enumerate(topic_ids):
        id_offsets = offsets[new_codes == code]
        if len(id_offsets):
            evidence.offset_spans[topic_id] = int(id_offsets.min()), int(id_offsets.max())


def _add_first_and_last_rows(
    evidence: PartitionEvidence,
    table: pa.Table,
    row_numbers: RowNumbers,
    request: EvidenceRequest,
) -> None:
    """Add each row of a session as its first and its last new record have it, and the records
    between whose before-image is not the record before.

    1. Take the new records of the sessions in the bucket.
    2. Sort them by row, keeping their order: neighbours of one group are records of one row.
    3. Compare the before-images of neighbours.
    4. Take the first and the last record of each group.
    """
    # 1. The records of the bucket.
    names, session_codes = _distinct_values_and_codes(table.column("session"))
    in_bucket_by_code = [name is not None and in_bucket(name, request.bucket) for name in names]
    is_chosen = np.array(in_bucket_by_code, dtype=bool)[session_codes[row_numbers]]
    chosen_rows = row_numbers[is_chosen]
    if not len(chosen_rows):
        return
    table = table.take(pa.array(chosen_rows))
    # 2. Sorted by row.
    row_columns = ("topic_id", "session", *request.key_columns)
    groups = _group_numbers([table.column(name) for name in row_columns])
    order = np.argsort(groups, kind="stable")
    has_next = np.diff(groups[order]) == 0
    # 3. The before-images.
    if request.has_before_images:
        earlier = order[:-1][has_next]
        later = order[1:][has_next]
        unlinked = np.sort(later[~_is_before_image_equal(table, earlier, later, request)])
        evidence.unlinked_rows = len(unlinked)
        if len(unlinked):
            evidence.unlinked_offset = int(_numpy_column(table, "offset")[unlinked[0]])
    # 4. The ends of each group.
    first_rows = np.sort(order[np.append(True, ~has_next)])
    last_rows = np.sort(order[np.append(~has_next, True)])
    evidence.first_rows = list(_first_row_images(table.take(pa.array(first_rows)), request))
    evidence.last_rows = list(_last_row_images(table.take(pa.array(last_rows)), request))


def _is_before_image_equal(
    table: pa.Table,
    earlier: RowNumbers,
    later: RowNumbers,
    request: EvidenceRequest,
) -> Any:
    """Whether the before-image of each later record is its earlier record. After a delete it must
    be empty.
    """
    earlier_records = table.take(pa.array(earlier))
    later_records = table.take(pa.array(later))
    is_delete = _boolean_array(pc.equal(earlier_records.column("op"), "delete"))
    before_key = later_records.column(f"before_{request.key_columns[0]}")
    is_empty = _boolean_array(before_key.is_null())
    is_equal = np.ones(len(earlier), dtype=bool)
    for name in request.columns:
        value = earlier_records.column(name)
        before_value = later_records.column(f"before_{name}")
        both_null = _boolean_array(value.is_null()) & _boolean_array(before_value.is_null())
        is_equal &= _boolean_array(pc.equal(value, before_value)) | both_null
    return np.where(is_delete, is_empty, is_equal & ~is_empty)


def _first_row_images(table: pa.Table, request: EvidenceRequest) -> Iterator[RowImage]:
    """Each row as it was before its first record; None where that is not known."""
    images: Sequence[tuple[Any, ...] | None] = [None] * table.num_rows
    if request.has_before_images:
        before_columns = [f"before_{name}" for name in request.columns]
        before_key = table.column(f"before_{request.key_columns[0]}")
        is_known = _boolean_array(before_key.is_valid()).tolist()
        rows = _row_tuples(table, before_columns)
        images = [row if has_image else None for row, has_image in zip(rows, is_known, strict=True)]
    yield from _row_images(table, request, images)


def _last_row_images(table: pa.Table, request: EvidenceRequest) -> Iterator[RowImage]:
    """Each row as its last record leaves it; None if it is deleted."""
    is_delete = _boolean_array(pc.equal(table.column("op"), "delete")).tolist()
    rows = _row_tuples(table, request.columns)
    images = [None if deleted else row for row, deleted in zip(rows, is_delete, strict=True)]
    yield from _row_images(table, request, images)


def _row_images(
    table: pa.Table,
    request: EvidenceRequest,
    images: Sequence[tuple[Any, ...] | None],
) -> Iterator[RowImage]:
    topic_ids = table.column("topic_id").to_pylist()
    sessions = table.column("session").to_pylist()
    offsets = table.column("offset").to_pylist()
    keys: list[Any]
    if len(request.key_columns) == 1:
        keys = table.column(request.key_columns[0]).to_pylist()
    else:
        keys = _row_tuples(table, request.key_columns)
    yield from zip(topic_ids, sessions, keys, images, offsets, strict=True)


def _row_tuples(table: pa.Table, names: Sequence[str]) -> list[tuple[Any, ...]]:
    columns = [table.column(name).to_pylist() for name in names]
    return list(zip(*columns, strict=True))


def _group_numbers(columns: Sequence[pa.ChunkedArray]) -> Any:
    """A number for each row; rows with the same values in all columns have the same."""
    groups = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, codes = _distinct_values_and_codes(column)
        combined = groups * (len(values) + 1) + codes
        # Numbered anew after each column: the product of many columns would overflow.
        _, groups = np.unique(combined, return_inverse=True)
    return groups


def _distinct_values_and_codes(column: pa.ChunkedArray) -> tuple[list[Any], Any]:
    """The distinct values of a column, and for each row the number of its value."""
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    return encoded.dictionary.to_pylist(), codes.astype(np.int64)


def _numpy_column(table: pa.Table, name: str) -> Any:
    return table.column(name).to_numpy()


def _boolean_array(column: Any) -> Any:
    """A boolean for each row; null counts as false."""
    filled = pc.fill_null(column, False)
    return filled.to_numpy(zero_copy_only=False).astype(bool)
