"""The clock. It paces and informs; it never decides."""

from __future__ import annotations

import time


class WallClock:
    """Time as this machine has it."""

    def now_seconds(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
