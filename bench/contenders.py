"""Contenders, each run in a process of its own: `python -m bench.contenders NAME FOLDER`.

Start-up and a small warm-up are left out; what is measured is the work, in CPU seconds of the whole
process tree, wall seconds and peak memory (PSS). Each prints its figures as one JSON line.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from bench.data import MESSAGE_BYTES, PARTITIONS, TOPIC
from seriatim import config, streams, wiring
from seriatim.adapters.spark import COLUMNS, SparkReader
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.ports import Wish
from seriatim.steps.fold import Folding

TABLE = """
topics = "bench-[a-z]+"
machine = "table"
sequence = "seq"
[table]
key = ["id"]
columns = { id = "string", price = "float64", size = "int64" }
[output]
path = "out/table"
"""
WATCH_EVERY_SECONDS = 1.0
MACHINE = """
topics = "bench-[a-z]+"
machine = "bench.machine:Rows"
sequence = "seq"
[output]
path = "out/machine"
"""


def floor(folder: Path) -> Callable[[], Any]:
    """Spark reads the same ranges with the same fetch settings and writes them to Parquet untouched."""
    reader, ends = _reader("floor")

    def work() -> Any:
        frame = reader.exactly(ends, Wish(message_bytes=MESSAGE_BYTES)).frame.select(*COLUMNS)
        frame.write.option("compression", "zstd").parquet(str(folder / "out" / "floor"))
        return sum(map(len, ends.values()))

    _warm(reader, ends)
    return work


def ours(folder: Path, name: str, text: str) -> Callable[[], Any]:
    """Seriatim, all integrity checks on, from discovery to the commit."""
    (folder / "streams").mkdir(exist_ok=True)
    (folder / "streams" / f"{name}.toml").write_text(text)
    file, settings = _load(folder, name)
    spark = wiring.LazySpark(file, settings, silent)
    ends = {
        p: OffsetRange(0, seen.log_end) for p, seen in wiring.log(file, settings).bounds(file.stream.topics).items()
    }

    def work() -> Any:
        world = wiring.world(file, settings, spark)
        outcome = Folding(file.stream, streams.runner(file), world).run(file.stream.slice.messages_max)
        if outcome.findings:
            raise SystemExit(f"the data is not in order, so the figures mean nothing: {outcome.findings[0]}")
        return {"messages": outcome.messages, "records": outcome.records}

    _warm(spark._reader(), ends)
    return work


CONTENDERS: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "floor": floor,
    "table": lambda folder: ours(folder, "table", TABLE),
    "machine": lambda folder: ours(folder, "machine", MACHINE),
}


def _load(folder: Path, name: str) -> tuple[streams.StreamFile, config.Settings]:
    settings = config.load({**config.environment(), "SERIATIM_STREAMS": str(folder / "streams")})
    return streams.load(name, settings.streams), settings


def _reader(name: str) -> tuple[SparkReader, dict[Partition, OffsetRange]]:
    settings = config.load()
    spark = wiring.spark_session(name, settings, silent)
    client = wiring.kafka_client(settings)
    from seriatim.adapters.kafka import KafkaLog

    bounds = KafkaLog(client).bounds(TOPIC)
    ends = {Partition(TOPIC, p): OffsetRange(0, bounds[Partition(TOPIC, p)].log_end) for p in range(PARTITIONS)}
    return SparkReader(spark, {**client, "isolation.level": "read_committed"}), ends


def _warm(reader: SparkReader, ends: dict[Partition, OffsetRange]) -> None:
    few = {partition: OffsetRange(0, min(2000, len(whole))) for partition, whole in ends.items()}
    frame = reader.exactly(few).frame
    frame.selectExpr("sum(length(value))").collect()
    frame.select("value").mapInArrow(_through, "value binary").count()


def _through(batches: Any) -> Any:
    yield from batches


def silent(_: str) -> None:
    """Nobody listens."""


def pss_bytes(pid: int) -> int:
    """A process's share of memory; pages that several use are split between them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


class Meter:
    """CPU and memory of this process and everything below it."""

    def __init__(self) -> None:
        self.me = psutil.Process()
        self.peak = 0
        self.own_seconds = 0.0
        """What watching itself has cost."""
        self._over = threading.Event()

    def cpu_seconds(self) -> float:
        total = 0.0
        for process in [self.me, *self.me.children(recursive=True)]:
            try:
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
            except psutil.Error:
                continue
        return total

    def watch(self) -> None:
        while not self._over.wait(WATCH_EVERY_SECONDS):
            family = [self.me, *self.me.children(recursive=True)]
            self.peak = max(self.peak, sum(pss_bytes(process.pid) for process in family))
        self.own_seconds = time.thread_time()

    def measure(self, work: Callable[[], Any]) -> dict[str, Any]:
        watcher = threading.Thread(target=self.watch)
        watcher.start()
        cpu, began = self.cpu_seconds(), time.monotonic()
        try:
            answer = work()
            wall = time.monotonic() - began
            spent = self.cpu_seconds() - cpu
        finally:
            self._over.set()
            watcher.join()
        return {
            "cpu_seconds": spent - self.own_seconds,
            "wall_seconds": wall,
            "peak_memory_mb": round(self.peak / 1e6),
            "answer": answer,
        }


if __name__ == "__main__":
    contender, where = sys.argv[1], Path(sys.argv[2])
    ready = CONTENDERS[contender](where)
    print(json.dumps(Meter().measure(ready)), flush=True)
