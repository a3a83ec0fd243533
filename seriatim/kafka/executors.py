"""Whether Spark has executors to work on: it waits for them, says what it waits for, and gives up with an
error that names what a person can change.

Spark itself waits for ever. Executors of a standalone cluster that cannot reach the driver die and
are started again, and the driver's own API never tells of them; only a log line of Spark's client
does. So these lines are counted.

Next: kafka/spark_reader.py starts the watch with a session; spark_settings.py chooses the driver's address.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct
from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no types
from pyspark import SparkConf, SparkContext

from seriatim.errors import ConfigError, PlatformError, SeriatimError

DEATHS_MAX = 4
"""So many executors that die one after the other, without one that works, are no accident."""
FIRST_DEATHS = 2
FIRST_DEATHS_SECONDS = 75.0
"""Nor are so many in this time, where none has ever worked. Packets to a wrong address may just vanish: then an
executor lives for half a minute (spark_settings.py says how long it tries), and a single worker starts one after the
other.
"""
NOTICE_EVERY_SECONDS = 30.0
POLL_SECONDS = 1.0
CLIENT_LOGGER = "org.apache.spark.deploy.client.StandaloneAppClient$ClientEndpoint"
"""The part of Spark that the master of a standalone cluster tells of executors."""
GRANTED = re.compile(r"Executor added: \S+")
DIED = re.compile(r"Executor updated: \S+ is now (?:EXITED|FAILED|LOST)")

PrintLine = Callable[[str], None]


class ExecutorCounts(Struct, frozen=True):
    """The executors of a session at one moment."""

    registered: int
    """Those that work for the driver now."""
    granted: int = 0
    """Those that the cluster has started so far; 0 if it does not tell."""
    died: int = 0
    """Those of them that ended by themselves."""
    has_jobs: bool = True
    """Whether anybody waits for executors."""


class ExecutorWatch:
    """Judges the counts of executors, one look after the other."""

    def __init__(self, master: str, driver_address: str, wait_seconds: float) -> None:
        self.master = master
        self.driver_address = driver_address
        self.wait_seconds = wait_seconds
        self.has_ever_registered = False
        self._before = ExecutorCounts(0)
        """The counts when the wait began."""
        self._since_seconds: float | None = None
        self._notice_seconds = 0.0

    def look(self, now_seconds: float, counts: ExecutorCounts) -> str | SeriatimError | None:
        """What these counts mean: an error that ends the run, a line for the log, or nothing."""
        if counts.registered or not counts.has_jobs:
            self.has_ever_registered |= counts.registered > 0
            self._since_seconds = None
            if counts.registered:
                self._before = counts
            return None
        if self._since_seconds is None:
            self._since_seconds = self._notice_seconds = now_seconds
        waited_seconds = now_seconds - self._since_seconds
        died = counts.died - self._before.died
        granted = counts.granted - self._before.granted
        # An executor that was started and says nothing may hang at a wrong address, or its host may be
        # slow: only the whole wait tells.
        has_waited = waited_seconds >= self.wait_seconds
        has_never_begun = (
            not self.has_ever_registered
            and died >= FIRST_DEATHS
            and waited_seconds >= FIRST_DEATHS_SECONDS
        )
        if died >= DEATHS_MAX or has_never_begun or (has_waited and granted > 0):
            if self.has_ever_registered:
                return self._dying_error(died)
            return self._unreachable_error(granted, died)
        if has_waited:
            return self._missing_error(waited_seconds)
        if now_seconds - self._notice_seconds < NOTICE_EVERY_SECONDS:
            return None
        self._notice_seconds = now_seconds
        return (
            f"waiting for executors of {self.master}: {waited_seconds:.0f} s,"
            f" {granted} started, {died} ended, none has reached the driver at {self.driver_address}"
        )

    def _unreachable_error(self, granted: int, died: int) -> ConfigError:
        return ConfigError(
            f"executors of {self.master} cannot reach the driver at {self.driver_address}",
            started=max(granted, died),
            ended=died,
            next="set SERIATIM_SPARK_DRIVER_HOST to an address of this host that the workers can reach;"
            " the workers' logs (work/app-…/N/stderr) say what else may be wrong",
        )

    def _dying_error(self, died: int) -> PlatformError:
        return PlatformError(
            f"all executors of {self.master} are gone, and new ones do not come up",
            ended=died,
            next="look at the memory and the logs of the workers (work/app-…/N/stderr), then run again",
        )

    def _missing_error(self, waited_seconds: float) -> PlatformError:
        return PlatformError(
            f"{self.master} gave no executor in {waited_seconds:.0f} s",
            next="see whether its workers run and have free cores and memory, then run again;"
            " SERIATIM_SPARK_EXECUTOR_WAIT_SECONDS says how long is waited",
        )


class _ClientLog:
    """The lines of Spark's client about executors, kept in the memory of the JVM."""

    def __init__(self, jvm: Any) -> None:
        log4j = jvm.org.apache.logging.log4j
        self._lines = jvm.java.io.ByteArrayOutputStream()
        layout = log4j.core.layout.PatternLayout.newBuilder().withPattern("%m%n").build()
        appender = log4j.core.appender.OutputStreamAppender.createAppender(
            layout, None, self._lines, "seriatim-executors", False, True
        )
        appender.start()
        logger = log4j.LogManager.getLogger(CLIENT_LOGGER)
        log4j.core.config.Configurator.setLevel(CLIENT_LOGGER, log4j.Level.INFO)
        # These lines are for us alone: what they mean for a person is said once.
        logger.setAdditive(False)
        logger.addAppender(appender)

    def counts(self) -> tuple[int, int]:
        """How many executors were granted, and how many of them ended, so far."""
        text = self._lines.toString()
        return len(GRANTED.findall(text)), len(DIED.findall(text))


class ExecutorWatcher:
    """Watches the executors of this process' Spark, in a thread, and cancels its jobs when there is no
    hope of executors. `error` says why then.
    """

    def __init__(self, wait_seconds: float, print_line: PrintLine) -> None:
        self.wait_seconds = wait_seconds
        self.print_line = print_line
        self.error: SeriatimError | None = None
        self._client_log: _ClientLog | None = None
        self._has_stopped = False

    def prepare(self, settings: Mapping[str, str]) -> None:
        """Start the JVM, if none runs, and begin to listen before the session is started: executors may
        be granted at once.
        """
        conf = SparkConf(loadDefaults=False)
        conf.setAll(list(settings.items()))
        SparkContext._ensure_initialized(conf=conf)
        # A Spark that logs by something else than Log4j tells less; that is no reason not to run.
        # TypeError: a class that the JVM does not have is a package to Py4J.
        with suppress(Py4JError, TypeError):
            self._client_log = _ClientLog(SparkContext._jvm)

    def start(self, context: SparkContext) -> None:
        """Watch, until `stop` or the end of the session."""
        threading.Thread(target=self._watch, args=(context,), daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._has_stopped = True

    def _watch(self, context: SparkContext) -> None:
        # The session has ended, or its JVM has died: whoever waits for it reports that.
        with suppress(Py4JError, OSError):
            conf = context.getConf()
            # The context itself forgets its JVM when it is stopped, perhaps between two looks.
            java_context = context._jsc.sc()
            address = f"{conf.get('spark.driver.host')}:{conf.get('spark.driver.port')}"
            watch = ExecutorWatch(context.master, address, self.wait_seconds)
            while True:
                time.sleep(POLL_SECONDS)
                if self._has_stopped:
                    return
                outcome = watch.look(time.monotonic(), self._counts(java_context))
                if isinstance(outcome, str):
                    # Whoever read our lines may be gone: the watch goes on all the same.
                    with suppress(OSError):
                        self.print_line(outcome)
                elif outcome is not None:
                    self.error = outcome
                    java_context.cancelAllJobs()
                    return

    def _counts(self, java_context: Any) -> ExecutorCounts:
        tracker = java_context.statusTracker()
        granted, died = self._client_log.counts() if self._client_log else (0, 0)
        return ExecutorCounts(
            # The driver is listed as well.
            registered=len(tracker.getExecutorInfos()) - 1,
            granted=granted,
            died=died,
            has_jobs=len(tracker.getActiveJobIds()) > 0,
        )
