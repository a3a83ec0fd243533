"""The meter: CPU of this process and everything below it, wall, and the peak of memory (PSS).

Next: contenders.py, whose work it measures.
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
        self.process = process or psutil.Process()
        self.peak_bytes = 0
        self.watch_seconds = 0.0
        """CPU seconds of the watching thread, which are not part of the work."""
        self.seen_cpu_seconds: dict[int, float] = {}
        """CPU seconds of each process when it was last looked at, also of processes that nothing
        waited for: their time is not added to their parent's.
        """
        self._stop = threading.Event()

    def cpu_seconds(self) -> float:
        """CPU seconds so far, of processes that have ended as well."""
        total = 0.0
        for process in self.family():
            try:
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
            except psutil.Error:
                continue
        return total

    def family(self) -> list[psutil.Process]:
        """The process and those below it; empty once it has ended."""
        try:
            return [self.process, *self.process.children(recursive=True)]
        except psutil.Error:
            return []

    def watch(self) -> None:
        """Look at memory and CPU every second until `measure` is done."""
        while not self._stop.wait(WATCH_EVERY_SECONDS):
            memory_bytes = 0
            for process in self.family():
                memory_bytes += pss_bytes(process.pid)
                self.seen_cpu_seconds[process.pid] = own_cpu_seconds(process)
            self.peak_bytes = max(self.peak_bytes, memory_bytes)
        self.watch_seconds = time.thread_time()

    def measure(self, work: Callable[[], Any]) -> dict[str, Any]:
        """What the work takes, and what start-up and warm-up took before it."""
        watcher = threading.Thread(target=self.watch)
        process_started = started_at(self.process)
        watcher.start()
        cpu_before = self.cpu_seconds()
        began = time.monotonic()
        try:
            result = work()
            wall_seconds = time.monotonic() - began
            cpu_seconds = self.cpu_seconds() - cpu_before
        finally:
            self._stop.set()
            watcher.join()
        return {
            "cpu_seconds": cpu_seconds - self.watch_seconds,
            "wall_seconds": wall_seconds - self.waited_seconds(result),
            "startup_cpu_seconds": cpu_before,
            "startup_wall_seconds": began - process_started,
            "peak_memory_mb": round(self.peak_bytes / 1e6),
            "seen_cpu_seconds": sum(self.seen_cpu_seconds.values()),
            "result": result,
        }

    @staticmethod
    def waited_seconds(result: Any) -> float:
        """Seconds in which a contender that never ends by itself only waited to see that no more
        messages come.
        """
        if isinstance(result, dict):
            return result.get("waited_seconds", 0.0)
        return 0.0


def own_cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of one process alone; 0 if it has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


def started_at(process: psutil.Process) -> float:
    """When a process began, on the monotonic clock."""
    age_seconds = time.time() - process.create_time()
    return time.monotonic() - age_seconds


def pss_bytes(pid: int) -> int:
    """A process's share of memory; pages that several use are split between them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("Pss:"):
            kilobytes = int(line.split()[1])
            return kilobytes * 1024
    return 0
