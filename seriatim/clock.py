"""The clock of this host. No decision about data depends on it."""

from __future__ import annotations

import time


class WallClock:
    """The time of this host. Implements `Clock`."""

    def now_seconds(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
