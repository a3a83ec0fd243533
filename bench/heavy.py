"""The benchmark's arbitrary machine with work of its own in `apply`: BENCH_APPLY_US microseconds,
spent in an empty loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from bench.machine import Change, Rows


def _turns_per_microsecond() -> float:
    turns = 2_000_000
    began = time.process_time()
    for _ in range(turns):
        pass
    seconds = time.process_time() - began
    return turns / seconds / 1e6


APPLY_MICROSECONDS = float(os.environ.get("BENCH_APPLY_US", "0"))
TURNS = int(APPLY_MICROSECONDS * _turns_per_microsecond())


class HeavyRows(Rows):
    """Rows by id, changed slowly."""

    def apply(self, rows: Any, message: Any) -> Iterable[Change]:
        """One record per row changed."""
        for _ in range(TURNS):
            pass
        return super().apply(rows, message)
