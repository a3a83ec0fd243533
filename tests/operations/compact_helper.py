"""Compactions of worlds in memory and on disk, for tests.

Next room: worlds.py makes the worlds.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from seriatim.engine.offsets import Partition
from seriatim.operations.compact import CompactContext, CompactResult, compact_stream
from seriatim.testing import MemoryStream

DAY = 86_400.0
_attempts = count()


def means(
    made: MemoryStream, *, bytes_target: int = 1 << 20, rewriter: Any = None
) -> CompactContext:
    """What a compaction of this world works with."""
    return CompactContext(
        stream=made.stream.name,
        bytes_target=bytes_target,
        keep_versions_days=made.stream.output.keep_versions_days,
        ledger=made.ledger,
        records=made.files,
        rewriter=rewriter or made.files,
        open_state=lambda: made.files,
        derived=made.derived,
        clock=made.clock,
        new_attempt=lambda: f"c{next(_attempts)}",
    )


def compacted(
    made: MemoryStream, only: Partition | None = None, *, bytes_target: int = 1 << 20
) -> CompactResult:
    """One compaction."""
    return compact_stream(means(made, bytes_target=bytes_target), only)
