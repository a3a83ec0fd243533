"""Traces that runs with `--trace` leave of named sessions, as Parquet files under `traces/`. Their
size is bounded, and nothing depends on them.

A file is of one partition and start offset: folding the same again replaces it.

Next: operations/inspect/run_traces.py makes the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from seriatim.engine.offsets import Partition
from seriatim.storage.store import Store

TRACES = "traces/"
BYTES_MAX = 64 * 1024 * 1024
"""The size of all traces of a stream. Beyond it the oldest files of each partition are deleted."""
TRACE_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("topic_id", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("session", pa.string()),
        ("sequence", pa.int64()),
        ("outcome", pa.string()),
        *((name, pa.string()) for name in ("message", "changes", "records", "findings")),
    ]
)


def write_trace_rows(
    store: Store,
    partition: Partition,
    stem: str,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write the rows of one task, all of them or nothing. `stem` is the epoch and the start."""
    if not rows:
        return
    buffer = pa.BufferOutputStream()
    table = pa.Table.from_pylist(list(rows), schema=TRACE_SCHEMA)
    pq.write_table(table, buffer, compression="zstd")
    store.replace(f"{TRACES}{partition}/{stem}.parquet", buffer.getvalue().to_pybytes())


def prune(store: Store, bytes_max: int = BYTES_MAX) -> list[str]:
    """Delete the oldest files of the partitions beyond the bound. Returns the deleted paths.

    Offsets of two partitions cannot be compared. So the newest file of each partition is kept first,
    then the second newest of each, and so on, as long as they fit.
    """
    store.delete_unfinished(TRACES)
    sizes_by_partition: dict[str, dict[str, int]] = {}
    for key, size in store.keys(TRACES):
        sizes_by_partition.setdefault(key.rpartition("/")[0], {})[key] = size
    ranked = []
    for sizes in sizes_by_partition.values():
        newest_first = sorted(sizes, key=_epoch_and_start, reverse=True)
        ranked += [(rank, key, sizes[key]) for rank, key in enumerate(newest_first)]
    total_bytes = 0
    too_old = []
    for _, key, size in sorted(ranked):
        total_bytes += size
        if total_bytes > bytes_max:
            too_old.append(key)
    return store.delete(too_old)


def _epoch_and_start(key: str) -> tuple[int, int]:
    """The position in the name of a trace. A name that has none is older than all others."""
    stem = key.rpartition("/")[2].removesuffix(".parquet")
    epoch, _, start = stem.partition("-")
    if not (epoch.isdecimal() and start.isdecimal()):
        return -1, -1
    return int(epoch), int(start)
