"""The meter: CPU of this process and everything below it, wall, and the peak of memory (PSS).

Next room: contenders.py, whose work it measures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

WATCH_EVERY_SECONDS = 1.0


class Meter:
    """CPU and memory of a process, this one if none is given, and everything below it."""

    def __init__(self, process: psutil.Process | None = None) -> None:
        self.me = process or psutil.Process()
        self.peak = 0
        self.own_seconds = 0.0
        """What watching itself has cost."""
        self.seen: dict[int, float] = {}
        """CPU seconds of each process when last looked at: of those, too, that nobody waited for."""
        self._retired_partition = threading.Event()

    def cpu_seconds(self) -> float:
        """All that was spent so far, by the dead, too."""
        total = 0.0
        for process in self.family():
            try:
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
            except psutil.Error:
                continue
        return total

    def family(self) -> list[psutil.Process]:
        """The process and those below it; nobody once it is gone."""
        try:
            return [self.me, *self.me.children(recursive=True)]
        except psutil.Error:
            return []

    def watch(self) -> None:
        """Look at memory until told to stop."""
        while not self._retired_partition.wait(WATCH_EVERY_SECONDS):
            family = self.family()
            self.peak = max(self.peak, sum(pss_bytes(process.pid) for process in family))
            self.seen |= {process.pid: own_cpu_seconds(process) for process in family}
        self.own_seconds = time.thread_time()

    def measure(self, work: Callable[[], Any]) -> dict[str, Any]:
        """What the work takes; and, beside it, what start-up and warm-up took before."""
        watcher, born = threading.Thread(target=self.watch), started_at(self.me)
        watcher.start()
        cpu, began = self.cpu_seconds(), time.monotonic()
        try:
            found = work()
            wall = time.monotonic() - began
            spent = self.cpu_seconds() - cpu
        finally:
            self._retired_partition.set()
            watcher.join()
        return {
            "cpu_seconds": spent - self.own_seconds,
            "wall_seconds": wall - self.waited(found),
            "startup_cpu_seconds": cpu,
            "startup_wall_seconds": began - born,
            "peak_memory_mb": round(self.peak / 1e6),
            "seen_cpu_seconds": sum(self.seen.values()),
            "found": found,
        }

    @staticmethod
    def waited(found: Any) -> float:
        """Seconds in which a contender without an end of its own only waited to see that nothing
        came any more.
        """
        return found.get("waited_seconds", 0.0) if isinstance(found, dict) else 0.0


def own_cpu_seconds(process: psutil.Process) -> float:
    """Of one process alone; 0 if it is gone."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


def started_at(process: psutil.Process) -> float:
    """When a process began, on the monotonic clock."""
    return time.monotonic() - (time.time() - process.create_time())


def pss_bytes(pid: int) -> int:
    """A process's share of memory; pages that several use are split between them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
