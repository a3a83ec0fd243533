"""The order of records: those of one topic id rise by offset, and those of one offset by index.

A topic that was created again has a new topic id, and its offsets start over at 0.

Next: record_scan.py and rewrite.py check the files that they read by this.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

INDEX_MAX = np.iinfo(np.int32).max
BEFORE_FIRST_RECORD = (-1, INDEX_MAX)
"""Offset and index before every valid one. A record without an offset counts as offset -1, and is
out of order.
"""


class BatchOrder(Struct, frozen=True):
    """What one batch of records is like, seen after the batches before it."""

    disordered_rows: Any
    """The numbers of the rows that do not come after the row before them, in rising order."""
    distinct_offsets: int
    """How many rows have another offset than the row before them."""


class RecordOrderScan:
    """Checks the order of records, batch by batch. It remembers the last record of each topic id."""

    def __init__(self) -> None:
        self._last_positions: dict[str | None, tuple[int, int]] = {}
        """By topic id: offset and index."""

    def scan(self, batch: pa.RecordBatch | pa.Table) -> BatchOrder:
        """Check the next batch. The rows of a batch without an `index` all have index 0."""
        offsets = whole_numbers(batch, "offset")
        indexes = np.zeros(len(offsets), np.int64)
        if "index" in batch.schema.names:
            indexes = whole_numbers(batch, "index")
        topic_ids, codes = distinct_values_and_codes(batch.column("topic_id"))
        disordered = []
        distinct_offsets = 0
        for code, topic_id in enumerate(topic_ids):
            # Nearly all batches have one topic id: then these are all rows.
            rows = np.flatnonzero(codes == code)
            id_offsets = offsets[rows]
            id_indexes = indexes[rows]
            last_offset, last_index = self._last_positions.get(topic_id, BEFORE_FIRST_RECORD)
            previous_offsets = np.concatenate(([last_offset], id_offsets[:-1]))
            previous_indexes = np.concatenate(([last_index], id_indexes[:-1]))
            is_same_offset = id_offsets == previous_offsets
            is_after = id_offsets > previous_offsets
            is_after |= is_same_offset & (id_indexes > previous_indexes)
            disordered.append(rows[~is_after])
            distinct_offsets += int(np.count_nonzero(~is_same_offset))
            self._last_positions[topic_id] = (int(id_offsets[-1]), int(id_indexes[-1]))
        disordered_rows = np.sort(np.concatenate(disordered)) if disordered else np.array([], int)
        return BatchOrder(disordered_rows, distinct_offsets)


def distinct_values_and_codes(column: pa.Array | pa.ChunkedArray) -> tuple[list[Any], Any]:
    """The distinct values of a column, and for each row the number of its value. Null is a value."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    encoded = column.dictionary_encode(null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    return encoded.dictionary.to_pylist(), codes.astype(np.int64)


def whole_numbers(batch: pa.RecordBatch | pa.Table, name: str) -> Any:
    """A column of whole numbers; null becomes -1."""
    column = pc.fill_null(batch.column(name), -1)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column.to_numpy(zero_copy_only=False).astype(np.int64)
