"""Compactions of streams in memory and on disk, for tests.

Next: memory_streams.py creates the streams.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from seriatim.engine.offsets import Partition
from seriatim.operations.compact import CompactResult, compact_stream
from seriatim.testing import MemoryStream

DAY = 86_400.0


def run_compaction(
    memory_stream: MemoryStream,
    only: Partition | None = None,
    *,
    bytes_target: int = 1 << 20,
    rewriter: Any = None,
    dry_run: bool = False,
) -> CompactResult:
    """Run one compaction, as a process of its own."""
    open_stream = memory_stream.open()
    output = replace(open_stream.stream.output, file_bytes_target=bytes_target)
    open_stream.stream = replace(open_stream.stream, output=output)
    if rewriter is not None:
        open_stream.rewriter = rewriter
    return compact_stream(open_stream, only, dry_run=dry_run)
