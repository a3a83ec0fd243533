"""Kill -9 at every named crash point, then a plain run: the same digest as in one go. Real
processes.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle, product

import pytest

from seriatim.engine.crash_points import CRASH_POINTS
from tests.integration.lab import Lab
from tests.integration.test_slices import tables

EVERY_RUN = tuple(point for point in CRASH_POINTS if point != "table-created")
FIRST_RUNS = (["ledger-read", "table-created"], ["plan-made"])
FIRST_RUNS_FULL = (["mid-fold"], ["manifest-written"], ["committed"])


def killed_at(lab: Lab, stream: str, point: str, *arguments: str) -> None:
    """A run that kills itself at a crash point."""
    ended = lab.command("run", stream, *arguments, SERIATIM_CRASH_POINT=point)
    assert ended.returncode == -signal.SIGKILL, (point, ended.returncode, ended.stderr[-800:])


def test_kills_at_crash_points_leave_no_trace(
    lab: Lab, topic: Callable[..., str], full: bool
) -> None:
    """Runs killed one after another, then a plain one: records and state as in one go, whoever read
    them.
    """
    count = 1_000_000 if full else 60_000
    slice_size = str(50_000 if full else 8_000)
    names = {topic(3): 3, topic(3): 3, topic(2): 2}
    messages = tables(names, 200, count)
    pattern = "|".join(names)
    one, hurt = lab.stream("one", pattern), lab.stream("hurt", pattern, slice={"read": "task"})
    points = sorted(random.Random(4).sample(EVERY_RUN, 3), key=EVERY_RUN.index)
    # Readers take turns; in full every point is passed with each.
    runs = list(
        product(EVERY_RUN, ("spark", "task"))
        if full
        else zip(points, cycle(("task", "spark")), strict=False)
    )

    # Some points come at the end of a run: so each run finds messages that no run before it had.
    portion = count // (2 * len(runs))
    head_count = count - portion * len(runs)
    lab.send(messages[:head_count])
    for number, (point, read) in enumerate(runs):
        start = head_count + number * portion
        lab.send(messages[start : start + portion])
        lab.stream(hurt, pattern, slice={"read": read})
        killed_at(lab, hurt, point, "--messages-max", slice_size)
    lab.fold(one)
    ended = lab.command("run", hurt, "--messages-max", slice_size)

    assert ended.returncode == 0, ended.stderr
    assert lab.digest(hurt) == lab.digest(one)
    assert sum(account.messages for account in lab.ledger(hurt).partitions.values()) == count
    assert swept(lab, hurt)


def swept(lab: Lab, stream: str) -> bool:
    """Whether every record file on disk is one that the ledger names. In a bucket runs delete nothing."""
    from deltalake import DeltaTable

    if lab.store(stream).is_remote:
        return True
    root = lab.root(stream) / "records"
    active = set(DeltaTable(root).get_add_actions(flatten=True)["path"].to_pylist())
    return {str(path.relative_to(root)) for path in root.rglob("*.parquet")} == active


@pytest.mark.parametrize(
    "points",
    [*FIRST_RUNS, *(pytest.param(points, marks=pytest.mark.full) for points in FIRST_RUNS_FULL)],
)
def test_the_first_run_ever_may_be_killed(
    lab: Lab, topic: Callable[..., str], points: list[str]
) -> None:
    """A stream whose very first run dies is right after the next; one that died before the table
    was made was none.
    """
    name = topic(2)
    lab.send(tables({name: 2}, 10, 2000))
    first, other = lab.stream("first", name), lab.stream("other", name)

    for point in points:
        killed_at(lab, first, point)
    lab.fold(first)
    lab.fold(other)

    assert lab.digest(first) == lab.digest(other)


def test_a_killed_worker_is_platform_trouble(lab: Lab, topic: Callable[..., str]) -> None:
    """A Python worker that dies in mid-fold fails the run with exit 4, and the next one goes on."""
    import psutil

    name = topic(1)
    lab.send(tables({name: 1}, 50, 150_000))
    stream = lab.stream("worker", name)
    process = lab.start("run", stream)
    me = psutil.Process(process.pid)
    while process.poll() is None:
        workers = [
            child
            for child in me.children(recursive=True)
            if _words(child)[-2:] == ["seriatim.spark_daemon", "pyspark.worker"]
        ]
        # The first one is the daemon, which forks the others: those that hand out ranges, and those
        # that fold. One that is killed while it waits for
        # work is forked anew, so they are killed until the run has ended.
        for worker in workers[1:]:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        time.sleep(0.05)
    _, errors = process.communicate(timeout=900)

    assert process.returncode == 4, errors
    assert "Traceback" not in errors
    assert lab.fold(stream).messages == 150_000


def _words(process: object) -> list[str]:
    import psutil

    try:
        return list(process.cmdline())  # type: ignore[attr-defined]
    except psutil.Error:
        return []
