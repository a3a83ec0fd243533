"""A crash at each named point, then one plain re-run: the same output, and nothing by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from seriatim.engine.crash_points import CRASH_POINTS, arm, crash_point
from seriatim.errors import BrokenPromiseError
from seriatim.testing import MemoryStream
from tests.operations.memory_streams import A0, A1, create_filled_stream, send


class Killed(BaseException):
    """The end of the process."""


def killer(point: str, times: int) -> Callable[[str], None]:
    """Ends the process when a point is passed for the n-th time."""
    passed = [0]

    def hook(name: str) -> None:
        passed[0] += name == point
        if name == point and passed[0] == times:
            raise Killed(point)

    return hook


def lively() -> MemoryStream:
    """Two partitions, cut into stretches, with a session in quarantine."""
    made = create_filled_stream(2)
    send(made, A0, b"?", 8, ["a", "c"], 9)
    send(made, A1, 5, 6, 7, session="s")
    made.reader.cuts = lambda count: [count // 2]
    return made


def logical(made: MemoryStream) -> object:
    """What must be the same however the runs went: not file names, attempts or sequences."""
    rows = {partition: made.rows(partition) for partition in (A0, A1)}
    accounts = {
        p: (a.frontier, a.messages, a.records, a.quarantined, a.counts)
        for p, a in made.accounts().items()
    }
    return rows, {p: made.sessions(p) for p in (A0, A1)}, accounts


def run_killed(made: MemoryStream, point: str, times: int) -> bool:
    """Run until killed; whether that happened."""
    arm(killer(point, times))
    try:
        made.run(messages_max=6)
    except Killed:
        return True
    finally:
        arm(None)
    return False


@pytest.fixture(scope="module")
def straight() -> object:
    """The outcome without a crash."""
    made = lively()
    made.run()
    return logical(made)


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_crash_and_a_re_run_end_as_if_nothing_had_been(
    point: str, times: int, straight: object
) -> None:
    """Whether at the first passing of the point or at a later one."""
    made = lively()
    killed = run_killed(made, point, times)
    assert killed or times == 2
    made.run(messages_max=6)
    assert logical(made) == straight


@pytest.mark.long
@pytest.mark.parametrize("second", CRASH_POINTS[1:])
@pytest.mark.parametrize("first", ["plan-made", "slice-folded", "manifest-written", "committed"])
def test_a_second_crash_in_the_re_run(first: str, second: str, straight: object) -> None:
    """Crashes on top of crashes leave orphans, and nothing else."""
    made = lively()
    assert run_killed(made, first, 1)
    run_killed(made, second, 1)
    made.run(messages_max=6)
    assert logical(made) == straight


def test_crash_points_are_no_ops_unless_armed() -> None:
    """And an unknown name is our bug, once anybody listens."""
    crash_point("anything")
    arm(lambda _: None)
    try:
        with pytest.raises(BrokenPromiseError, match="unknown crash point"):
            crash_point("anything")
    finally:
        arm(None)
