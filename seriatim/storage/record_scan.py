"""Sight: committed record files read again for check, a row group at a time, pages proved by their
checksums.

Within a part everything is done on whole columns: which rows are new, whether they are in order,
and for each row of a session the one before it. Only the first and the last of each row become
Python values.

Next room: operations/prove/evidence.py asks; operations/prove/great_expectations_suites.py judges
the same files by suites.
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

RECORD_COLUMNS = ("topic", "topic_id", "partition", "offset", "index", "session")
READ_ERRORS = (OSError, pa.ArrowException, KeyError, ValueError)
"""What reading a damaged file raises."""
RowNumbers = Any  # a numpy array of row numbers


class RecordScan:
    """A stream's record files, below its output path."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def scan(self, file: File, request: EvidenceRequest) -> Iterator[PartitionEvidence]:
        """A file's rows, a row group at a time."""
        before = (-1, -1, "")
        for table in self._row_group_tables(file, request):
            part = PartitionEvidence(total_rows=table.num_rows)
            _check_order_and_partition(part, table, request, before)
            before = tuple(
                table.column(name)[-1].as_py() for name in ("offset", "index", "topic_id")
            )
            new = _new_row_numbers(table, request)
            part.new_rows = len(new)
            _add_offset_spans(part, table, new)
            if request.key_columns:
                _add_first_and_last_rows(part, table, new, request)
            yield part

    def _row_group_tables(self, file: File, request: EvidenceRequest) -> Iterator[pa.Table]:
        machine = [
            *request.key_columns,
            *request.columns,
            *(f"before_{name}" for name in request.columns if request.has_before_images),
        ]
        names = [*RECORD_COLUMNS, *(["op", *machine] if request.key_columns else [])]
        try:
            with pq.ParquetFile(self.root / file.path, page_checksum_verification=True) as parquet:
                there = [
                    name for name in dict.fromkeys(names) if name in parquet.schema_arrow.names
                ]
                for group in range(parquet.num_row_groups):
                    if parquet.metadata.row_group(group).num_rows:
                        yield parquet.read_row_group(
                            group, there, use_threads=False
                        ).combine_chunks()
        except READ_ERRORS as error:
            raise UnreadableFileError(f"{file.path}: {str(error).splitlines()[0][:300]}") from None


def _check_order_and_partition(
    evidence: PartitionEvidence,
    table: pa.Table,
    request: EvidenceRequest,
    previous_position: tuple[Any, ...],
) -> None:
    """Order, and whose rows they are. Folders of the table's partitioning stand for columns that
    are left out.
    """
    offsets, indexes = _numpy_column(table, "offset"), _numpy_column(table, "index")
    lives, codes = _distinct_values_and_codes(table.column("topic_id"))
    step, turn = (
        np.diff(offsets, prepend=previous_position[0]),
        np.diff(indexes, prepend=previous_position[1]),
    )
    same = (
        np.diff(
            codes,
            prepend=lives.index(previous_position[2]) if previous_position[2] in lives else -1,
        )
        == 0
    )
    wrong = np.flatnonzero(same & ((step < 0) | ((step == 0) & (turn <= 0))))
    evidence.disorder_offset = int(offsets[wrong[0]]) if len(wrong) else -1
    for name, mine in (("topic", request.partition.topic), ("partition", request.partition.number)):
        if name in table.column_names:
            other = np.flatnonzero(~_boolean_array(pc.equal(table.column(name), mine)))
            evidence.foreign_offset = (
                int(offsets[other[0]])
                if len(other) and evidence.foreign_offset < 0
                else evidence.foreign_offset
            )


def _new_row_numbers(table: pa.Table, request: EvidenceRequest) -> RowNumbers:
    """The rows that are new, by number."""
    offsets, (lives, codes) = (
        _numpy_column(table, "offset"),
        _distinct_values_and_codes(table.column("topic_id")),
    )
    least = np.array(
        [request.first_new_offsets.get(life, np.iinfo(np.int64).max) for life in lives],
        dtype=np.int64,
    )
    return np.flatnonzero(offsets >= least[codes])


def _add_offset_spans(
    evidence: PartitionEvidence, table: pa.Table, row_numbers: RowNumbers
) -> None:
    offsets, (lives, codes) = (
        _numpy_column(table, "offset")[row_numbers],
        _distinct_values_and_codes(table.column("topic_id")),
    )
    for number, life in enumerate(lives):
        mine = offsets[codes[row_numbers] == number]
        if len(mine):
            evidence.offset_spans[life] = int(mine.min()), int(mine.max())


def _add_first_and_last_rows(
    evidence: PartitionEvidence, table: pa.Table, row_numbers: RowNumbers, request: EvidenceRequest
) -> None:
    """Rows of sessions: each as it is met first, as it is left, and whether those between follow
    each other.
    """
    names, sessions = _distinct_values_and_codes(table.column("session"))
    chosen = np.array(
        [name is not None and in_bucket(name, request.bucket) for name in names], dtype=bool
    )
    rows = row_numbers[chosen[sessions[row_numbers]]]
    if not len(rows):
        return
    table = table.take(pa.array(rows))
    groups = _group_numbers(
        [table.column(name) for name in ("topic_id", "session", *request.key_columns)]
    )
    order = np.argsort(groups, kind="stable")
    joined = np.diff(groups[order]) == 0
    first, last = np.sort(order[np.append(True, ~joined)]), np.sort(order[np.append(~joined, True)])
    if request.has_before_images:
        earlier, later = order[:-1][joined], order[1:][joined]
        wrong = np.sort(later[~_is_before_image_equal(table, earlier, later, request)])
        evidence.unlinked_rows = len(wrong)
        evidence.unlinked_offset = (
            int(_numpy_column(table, "offset")[wrong[0]]) if len(wrong) else -1
        )
    evidence.first_rows = list(_first_row_images(table.take(pa.array(first)), request))
    evidence.last_rows = list(_last_row_images(table.take(pa.array(last)), request))


def _is_before_image_equal(
    table: pa.Table, earlier: RowNumbers, later: RowNumbers, request: EvidenceRequest
) -> Any:
    """Whether each later row's before-image is its earlier row: none where that was a delete."""
    was, now = table.take(pa.array(earlier)), table.take(pa.array(later))
    deleted = _boolean_array(pc.equal(was.column("op"), "delete"))
    blank = _boolean_array(now.column(f"before_{request.key_columns[0]}").is_null())
    equal = np.ones(len(earlier), dtype=bool)
    for name in request.columns:
        one, other = was.column(name), now.column(f"before_{name}")
        equal &= _boolean_array(pc.equal(one, other)) | (
            _boolean_array(one.is_null()) & _boolean_array(other.is_null())
        )
    return np.where(deleted, blank, equal & ~blank)


def _first_row_images(
    table: pa.Table, request: EvidenceRequest
) -> Iterator[tuple[str, str, Any, tuple[Any, ...] | None, int]]:
    names = [f"before_{name}" for name in request.columns] if request.has_before_images else []
    images: Sequence[tuple[Any, ...] | None] = [None] * table.num_rows
    if names:
        there = _boolean_array(table.column(f"before_{request.key_columns[0]}").is_valid()).tolist()
        images = [
            row if known else None
            for row, known in zip(_row_tuples(table, names), there, strict=True)
        ]
    yield from zip(
        *_row_identities(table, request), images, table.column("offset").to_pylist(), strict=True
    )


def _last_row_images(
    table: pa.Table, request: EvidenceRequest
) -> Iterator[tuple[str, str, Any, tuple[Any, ...] | None, int]]:
    gone = _boolean_array(pc.equal(table.column("op"), "delete")).tolist()
    rows = [
        None if end else row
        for row, end in zip(_row_tuples(table, request.columns), gone, strict=True)
    ]
    yield from zip(
        *_row_identities(table, request), rows, table.column("offset").to_pylist(), strict=True
    )


def _row_identities(
    table: pa.Table, request: EvidenceRequest
) -> tuple[list[str], list[str], list[Any]]:
    """Topic id, session and key of each row."""
    keys = (
        table.column(request.key_columns[0]).to_pylist()
        if len(request.key_columns) == 1
        else _row_tuples(table, request.key_columns)
    )
    return table.column("topic_id").to_pylist(), table.column("session").to_pylist(), keys


def _row_tuples(table: pa.Table, names: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(zip(*(table.column(name).to_pylist() for name in names), strict=True))


def _group_numbers(columns: Sequence[pa.ChunkedArray]) -> Any:
    """A number for each row, the same where all columns are the same."""
    groups = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, codes = _distinct_values_and_codes(column)
        groups = np.unique(groups * (len(values) + 1) + codes, return_inverse=True)[1]
    return groups


def _distinct_values_and_codes(column: pa.ChunkedArray) -> tuple[list[Any], Any]:
    """Different values, and their number for each row."""
    coded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    return coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False).astype(
        np.int64
    )


def _numpy_column(table: pa.Table, name: str) -> Any:
    return table.column(name).to_numpy()


def _boolean_array(column: Any) -> Any:
    """Truth by row; nothing is false."""
    return pc.fill_null(column, False).to_numpy(zero_copy_only=False).astype(bool)
