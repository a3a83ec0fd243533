"""The benchmark's arbitrary machine with work of its own in `apply`: BENCH_APPLY_US microseconds,
spent by counting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from bench.machine import Change, Rows


def _turns_per_microsecond() -> float:
    began, turns = time.process_time(), 2_000_000
    for _ in range(turns):
        pass
    return turns / (time.process_time() - began) / 1e6


TURNS = int(float(os.environ.get("BENCH_APPLY_US", "0")) * _turns_per_microsecond())


class HeavyRows(Rows):
    """Rows by id, slowly."""

    def apply(self, rows: Any, message: Any) -> Iterable[Change]:
        """One record per row changed."""
        for _ in range(TURNS):
            pass
        return super().apply(rows, message)
