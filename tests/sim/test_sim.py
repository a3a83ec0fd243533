"""The simulation: one seed is one world. `make sim SEEDS=10000` runs many; a failure names its
seed.

To look at one: `.venv/bin/python -c "from tests.sim.test_sim import simulate; simulate(SEED)"`.

Next room: chaos.py.
"""

from __future__ import annotations

import pytest

from seriatim.engine.crash_points import COMPACT_POINTS, CRASH_POINTS, REPAIR_POINTS, arm
from tests.sim.chaos import Chaos
from tests.sim.compare import check_digests, compare


def simulate(seed: int) -> Chaos:
    """Live through one seed and check all that must hold."""
    chaos = Chaos(seed)
    try:
        chaos.live()
    finally:
        arm(None)
    compare(chaos)
    check_digests(chaos)
    return chaos


def test_any_world_ends_as_the_straight_fold(seeds: range) -> None:
    """Crashes, retries, zombies, lost answers and topics that change never alter what is committed."""
    for seed in seeds:
        try:
            simulate(seed)
        except Exception as error:  # noqa: BLE001  # whatever it is, the seed is all one needs
            pytest.fail(f"seed={seed} ({type(error).__name__})", pytrace=False)


@pytest.mark.long
def test_the_simulation_passes_every_crash_point() -> None:
    """A crash point that is never passed proves nothing."""
    passed: set[str] = set()
    for seed in range(20):
        passed |= simulate(seed).points
    assert passed >= {*CRASH_POINTS, *COMPACT_POINTS, *REPAIR_POINTS}
