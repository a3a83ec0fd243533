"""Compactions of streams in memory and on disk, for tests.

Next: memory_streams.py creates the streams.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from seriatim.engine.offsets import Partition
from seriatim.operations.compact import CompactContext, CompactResult, compact_stream
from seriatim.testing import MemoryStream

DAY = 86_400.0
_attempts = count()


def compact_context_of(
    memory_stream: MemoryStream, *, bytes_target: int = 1 << 20, rewriter: Any = None
) -> CompactContext:
    """The context of a compaction of this stream."""
    return CompactContext(
        stream=memory_stream.stream.name,
        bytes_target=bytes_target,
        keep_versions_days=memory_stream.stream.output.keep_versions_days,
        ledger=memory_stream.ledger,
        records=memory_stream.files,
        rewriter=rewriter or memory_stream.files,
        open_state=lambda: memory_stream.files,
        derived=memory_stream.derived,
        clock=memory_stream.clock,
        new_attempt=lambda: f"c{next(_attempts)}",
    )


def run_compaction(
    memory_stream: MemoryStream, only: Partition | None = None, *, bytes_target: int = 1 << 20
) -> CompactResult:
    """Run one compaction."""
    return compact_stream(compact_context_of(memory_stream, bytes_target=bytes_target), only)
