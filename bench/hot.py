"""A hot partition: the same messages folded by one process, and with their sessions spread over
helpers.

    python -m bench.hot --messages 400000 --work 0 20

One partition, 200 sessions, the benchmark's arbitrary machine (`--work`: microseconds of its own
that `apply` spends on top, by counting; a real machine that looks things up or computes). Without
Spark or a broker: the task alone, from Arrow batches to closed files, wall seconds, in turn, best
of three.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.data import SESSIONS, _next
from bench.growth import AT_ONCE, PLACE, batches
from seriatim import context, stream_files
from seriatim.engine.task import PartitionWork, read_result, run_task
from seriatim.fast.helpers.fold import with_helpers
from seriatim.storage.arrow import message_batches

STREAM = """
topics = "bench"
machine = "bench.heavy:HeavyRows"
sequence = "seq"
parallelism = "session"
output = {path = "lake"}
"""


def made(count: int) -> list[pa.RecordBatch]:
    """The data of `make bench`, of one partition."""
    chance, tables = random.Random(1), dict[str, list[Any]]()
    names = [f"session-{chance.randrange(SESSIONS):04d}" for _ in range(count)]
    return batches(
        0, ((name, _next(tables.setdefault(name, [0, []]), name, chance)) for name in names)
    )


def timed(file: stream_files.StreamFile, given: list[pa.RecordBatch], parts: int) -> dict[str, Any]:
    """One task."""
    count = sum(batch.num_rows for batch in given)
    work = PartitionWork(
        partition=PLACE, start=0, end=count, epoch=0, topic_id="id", attempt=context.new_attempt()
    )
    began, cpu = time.monotonic(), os.times()
    with with_helpers(file, work, context.task_context(file, {}, count), parts) as kit:
        result = read_result(run_task(work, message_batches(given), kit))
    wall, after = time.monotonic() - began, os.times()
    if result.certificate is None:
        raise SystemExit("the data is not in order, so the figures mean nothing")
    task, helpers = (sum(after[n : n + 2]) - sum(cpu[n : n + 2]) for n in (0, 2))
    return {
        "wall_seconds": round(wall, 2),
        "task_cpu_seconds": round(task, 2),
        "helpers_cpu_seconds": round(helpers, 2),
        "records": sum(file.rows for file in result.records),
    }


def main() -> None:
    """Print a line per amount of work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=400_000)
    parser.add_argument("--work", type=int, nargs="+", default=[0, 20])
    parser.add_argument("--parts", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if len(given.work) > 1:  # the machine reads it once, when it is loaded
        same = ["--messages", given.messages, "--parts", given.parts, "--rounds", given.rounds]
        for work in given.work:
            subprocess.run(
                [sys.executable, "-m", "bench.hot", *map(str, same), "--work", str(work)],
                check=True,
            )
        return
    os.environ["BENCH_APPLY_US"] = str(given.work[0])
    found = made(given.messages // AT_ONCE * AT_ONCE)
    for work in given.work:
        runs: dict[int, list[dict[str, Any]]] = {1: [], given.parts: []}
        for _ in range(given.rounds):
            for parts, taken in runs.items():
                with tempfile.TemporaryDirectory() as folder:
                    (Path(folder) / "streams").mkdir()
                    (Path(folder) / "streams" / "s.toml").write_text(STREAM)
                    taken.append(
                        timed(stream_files.load_stream("s", Path(folder) / "streams"), found, parts)
                    )
        best = {
            parts: min(taken, key=lambda one: one["wall_seconds"]) for parts, taken in runs.items()
        }
        ratio = best[1]["wall_seconds"] / best[given.parts]["wall_seconds"]
        line = {"apply_us": work, "one": best[1], f"{given.parts} helpers": best[given.parts]}
        print(
            json.dumps({**line, "times": round(ratio, 2), "load": round(os.getloadavg()[0], 1)}),
            flush=True,
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
