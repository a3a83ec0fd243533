"""What the counts of executors mean, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext

from seriatim.errors import ConfigError, PlatformError
from seriatim.kafka import executors
from seriatim.kafka.executors import ExecutorCounts, ExecutorWatch, ExecutorWatcher

ADDRESS = "10.1.2.3:7078"


def _watch() -> ExecutorWatch:
    return ExecutorWatch("spark://m:7077", ADDRESS, wait_seconds=300)


def _counts(registered: int = 0, granted: int = 0, died: int = 0) -> ExecutorCounts:
    return ExecutorCounts(registered, granted, died)


def test_executors_that_die_in_a_row_cannot_reach_the_driver() -> None:
    """The error is a ConfigError that names the driver's address, and comes with the fourth death."""
    watch = _watch()
    for died in range(4):
        assert watch.look(died, _counts(granted=died + 1, died=died)) is None
    error = watch.look(5, _counts(granted=5, died=4))
    assert isinstance(error, ConfigError)
    assert ADDRESS in error.message
    assert "SERIATIM_SPARK_DRIVER_HOST" in error.next


def test_executors_that_hang_cannot_reach_the_driver_either() -> None:
    """Packets to a wrong address may just vanish: an executor that says nothing is given the whole
    wait, because its host may only be slow.
    """
    watch = _watch()
    assert not isinstance(watch.look(0, _counts(granted=1)), ConfigError)
    assert not isinstance(watch.look(299, _counts(granted=1)), ConfigError)
    assert isinstance(watch.look(300, _counts(granted=1)), ConfigError)


def test_executors_that_die_slowly_cannot_reach_the_driver() -> None:
    """A single worker, whose packets to the driver vanish: each executor gives up after half a minute.
    It is said within 90 seconds.
    """
    watch = _watch()
    outcomes = []
    for second in range(90):
        died = second // 34
        outcomes.append(watch.look(second, _counts(granted=died + 1, died=died)))
    (error,) = {str(outcome) for outcome in outcomes if isinstance(outcome, ConfigError)}
    assert "cannot reach the driver" in error
    # Where executors have worked before, two that are lost may be an accident.
    watch = _watch()
    assert watch.look(0, _counts(registered=1, granted=1)) is None
    for second in range(1, 90):
        outcome = watch.look(second, _counts(granted=3, died=2))
        assert outcome is None or isinstance(outcome, str)


def test_no_executor_at_all_is_platform_trouble_after_the_wait() -> None:
    """Each 30 seconds a line says what is waited for; at the end the cluster is named."""
    watch = _watch()
    lines = []
    for second in range(300):
        outcome = watch.look(second, _counts())
        if outcome is not None:
            lines.append(outcome)
    assert len(lines) == 9
    assert all("spark://m:7077" in str(line) for line in lines)
    error = watch.look(300, _counts())
    assert isinstance(error, PlatformError)
    assert "gave no executor in 300 s" in error.message


def test_executors_that_worked_before_are_no_wrong_address() -> None:
    """If the executors were lost later, it is the platform's trouble."""
    watch = _watch()
    assert watch.look(0, _counts(registered=2, granted=2)) is None
    for second in range(1, 4):
        assert watch.look(second, _counts(granted=2 + second, died=second)) is None
    error = watch.look(9, _counts(granted=8, died=6))
    assert isinstance(error, PlatformError)
    assert not isinstance(error, ConfigError)


def test_nobody_waits_without_jobs() -> None:
    """Between jobs a cluster may take all executors away."""
    watch = _watch()
    for second in range(0, 1000, 10):
        assert watch.look(second, ExecutorCounts(0, has_jobs=False)) is None
    assert watch.look(1000, _counts()) is None


def test_a_spark_without_log4j_is_watched_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log tells nothing of executors, and the run starts."""

    def refuse(_jvm: Any) -> None:
        raise TypeError("'JavaPackage' object is not callable")

    monkeypatch.setattr(SparkContext, "_ensure_initialized", lambda **_: None)
    monkeypatch.setattr(executors, "_ClientLog", refuse)
    watcher = ExecutorWatcher(300, print)
    watcher.prepare({})
    assert watcher._client_log is None


class StoppedContext:
    """A context that is stopped while it is watched: it forgets its JVM."""

    master = "spark://m:7077"

    def __init__(self, watcher: ExecutorWatcher) -> None:
        self.watcher = watcher
        self._jsc: Any = SimpleNamespace(sc=lambda: self)
        self.looks = 0

    def getConf(self) -> dict[str, str]:  # noqa: N802  # Spark's name
        """The settings of the session."""
        return {}

    def statusTracker(self) -> Any:  # noqa: N802  # Spark's name
        """Spark's own answers, of a session without executors and jobs."""
        self.looks += 1
        self._jsc = None
        if self.looks == 2:
            self.watcher.stop()
        return SimpleNamespace(getExecutorInfos=lambda: [None], getActiveJobIds=list)


def test_the_watch_ends_quietly_with_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session may be stopped between two looks."""
    monkeypatch.setattr(executors, "POLL_SECONDS", 0.0)
    watcher = ExecutorWatcher(300, print)
    context: Any = StoppedContext(watcher)
    watcher._watch(context)
    assert context.looks == 2
