"""An output of an earlier version whose first entry by this version is killed, at each point: a plain
run afterwards ends as if nothing had been.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from seriatim.engine.crash_points import CRASH_POINTS, arm
from tests.golden.output import STREAMS, everything, later, opened, pinned, told_of, verified
from tests.golden.product import Killed, command

OF_A_NEW_LEDGER = ("table-created",)
"""Points that only the very first run of a stream passes."""
OF_A_BROKER = ("first-fetch", "mid-fetch")
"""Points of the task that fetches its messages itself; here the messages are given to it."""
POINTS = [point for point in CRASH_POINTS if point not in OF_A_NEW_LEDGER + OF_A_BROKER]


def run_killed(stream: str, point: str) -> None:
    """Run a stream, and kill it where it passes a point for the first time."""

    def kill(passed: str) -> None:
        if passed == point:
            raise Killed

    arm(kill)
    try:
        answer = command("run", stream, "--json")
    finally:
        arm(None)
    assert answer.code == -9, f"{stream} did not pass {point}: {answer}"


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_its_first_new_entry_is_killed(point: str, tmp_path: Path) -> None:
    """Whatever the kill leaves on the disk, a plain run makes the same output, and verify agrees."""
    with opened(tmp_path) as cluster:
        later(cluster)
        for stream in STREAMS:
            run_killed(stream, point)
        for stream in STREAMS:
            command("run", stream, "--json")
        assert everything(tmp_path) == pinned()["folded"]
        assert verified("--all", "--kafka")["difference"] is None


def test_the_new_format_is_told_once(tmp_path: Path) -> None:
    """By the run that commits the first new entry, and by none after it."""
    with opened(tmp_path) as cluster:
        assert command("status", "market").err == ""
        later(cluster)
        told = [told_of("run", "market")["stderr"] for _ in range(2)]
    assert [[line for line in lines if "format" in line] for lines in told] == [
        [{"format": 4, "message": "<text>"}],
        [],
    ]
