"""Traces: what runs with `--trace` left of named sessions, as Parquet files under `traces/`.
Bounded, and not needed.

A file is of one partition and start, so that whoever folds the same again replaces it.

Next room: operations/inspect/run_traces.py makes the rows.
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
"""Of all of a stream's traces: the oldest files go first."""
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
    root: Path, partition: Partition, stem: str, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Leave the rows of one task, as a whole or not at all."""
    if rows:
        into = pa.BufferOutputStream()
        pq.write_table(
            pa.Table.from_pylist(list(rows), schema=TRACE_SCHEMA), into, compression="zstd"
        )
        path = root / "traces" / str(partition) / f"{stem}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, into.getvalue().to_pybytes())


def prune(root: Path, bytes_max: int = BYTES_MAX) -> list[Path]:
    """Delete the oldest files beyond the bound; which they were."""
    files = [
        (path.stat().st_mtime, path.stat().st_size, path)
        for path in (root / "traces").rglob("*.parquet")
    ]
    kept, gone = 0, []
    for _, size, path in sorted(files, reverse=True):
        kept += size
        if kept > bytes_max:
            path.unlink(missing_ok=True)
            gone.append(path)
    return gone
