"""The contract of `Clock`: time passes by sleeping."""

from __future__ import annotations

import pytest

from seriatim.clock import WallClock
from seriatim.memory import MemoryClock
from seriatim.ports import Clock


@pytest.mark.parametrize("clock", [MemoryClock(), WallClock()], ids=["memory", "real"])
def test_time_passes_by_sleeping(clock: Clock) -> None:
    """At least as much as was slept, give or take a millisecond."""
    before = clock.now_seconds()
    clock.sleep(0.02)
    assert clock.now_seconds() - before >= 0.019


def test_the_fake_clock_stands_still() -> None:
    """Nothing but sleeping moves it: simulated worlds replay exactly."""
    clock = MemoryClock(5.0)
    assert clock.now_seconds() == clock.now_seconds() == 5.0
