"""Traces that runs with `--trace` leave of named sessions, as Parquet files under `traces/`. Their
size is bounded, and nothing depends on them.

A file is of one partition and start offset: folding the same again replaces it.

Next: operations/inspect/run_traces.py makes the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from seriatim.engine.offsets import Partition
from seriatim.storage.files import write_file

BYTES_MAX = 64 * 1024 * 1024
"""The size of all traces of a stream. Beyond it the oldest files are deleted."""
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
    root: Path,
    partition: Partition,
    stem: str,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write the rows of one task, all of them or nothing."""
    if not rows:
        return
    buffer = pa.BufferOutputStream()
    table = pa.Table.from_pylist(list(rows), schema=TRACE_SCHEMA)
    pq.write_table(table, buffer, compression="zstd")
    path = root / "traces" / str(partition) / f"{stem}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, buffer.getvalue().to_pybytes())


def prune(root: Path, bytes_max: int = BYTES_MAX) -> list[Path]:
    """Delete the oldest files beyond the bound. Returns the deleted paths."""
    files = []
    for path in (root / "traces").rglob("*.parquet"):
        status = path.stat()
        files.append((status.st_mtime, status.st_size, path))
    total_bytes = 0
    deleted = []
    for _, size, path in sorted(files, reverse=True):
        total_bytes += size
        if total_bytes > bytes_max:
            path.unlink(missing_ok=True)
            deleted.append(path)
    return deleted
