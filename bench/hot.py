"""A hot partition: the same messages folded by one process, and with their sessions in several
helper processes.

    python -m bench.hot --messages 400000 --work 0 20

One partition, 200 sessions, the benchmark's arbitrary machine. `--work` is the time in microseconds
that `apply` spends on top, as a real machine that looks things up or computes would. Without Spark
or a broker: the task alone, from Arrow batches to closed files, wall seconds, in turn, best of
three.
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

from bench.data import SESSIONS, SentSession, next_message
from bench.growth import BATCH_MESSAGES, PARTITION, current_load, to_batches
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


def make_batches(count: int) -> list[pa.RecordBatch]:
    """The data of `make bench`, of one partition."""
    chance = random.Random(1)
    sessions: dict[str, SentSession] = {}
    names = [f"session-{chance.randrange(SESSIONS):04d}" for _ in range(count)]
    messages = []
    for name in names:
        session = sessions.setdefault(name, SentSession())
        messages.append((name, next_message(session, name, chance)))
    return to_batches(0, messages)


def measure_task(batches: list[pa.RecordBatch], helper_count: int) -> dict[str, Any]:
    """One task in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        streams = Path(folder) / "streams"
        streams.mkdir()
        (streams / "s.toml").write_text(STREAM)
        file = stream_files.load_stream("s", streams)
        return _measure_fold(file, batches, helper_count)


def _measure_fold(
    file: stream_files.StreamFile, batches: list[pa.RecordBatch], helper_count: int
) -> dict[str, Any]:
    count = sum(batch.num_rows for batch in batches)
    work = PartitionWork(
        partition=PARTITION,
        start=0,
        end=count,
        epoch=0,
        topic_id="id",
        attempt=context.new_attempt(),
    )
    began = time.monotonic()
    before = os.times()
    plain_context = context.task_context(file, {}, count)
    with with_helpers(file, work, plain_context, helper_count) as task_context:
        result = read_result(run_task(work, message_batches(batches), task_context))
    wall_seconds = time.monotonic() - began
    after = os.times()
    if result.certificate is None:
        raise SystemExit("the data is not in order, so the figures mean nothing")
    task_seconds = after.user + after.system - before.user - before.system
    helper_seconds = after.children_user + after.children_system
    helper_seconds -= before.children_user + before.children_system
    return {
        "wall_seconds": round(wall_seconds, 2),
        "task_cpu_seconds": round(task_seconds, 2),
        "helpers_cpu_seconds": round(helper_seconds, 2),
        "records": sum(record_file.rows for record_file in result.records),
    }


def main() -> None:
    """Print a line per amount of work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=400_000)
    parser.add_argument("--work", type=int, nargs="+", default=[0, 20])
    parser.add_argument("--parts", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if len(options.work) == 1:
        compare(options.work[0], options.messages, options.parts, options.rounds)
        return
    # The machine reads the amount of work once, when it is loaded: every amount needs a process.
    for work in options.work:
        command = [sys.executable, "-m", "bench.hot", "--work", str(work)]
        command += ["--messages", str(options.messages)]
        command += ["--parts", str(options.parts), "--rounds", str(options.rounds)]
        subprocess.run(command, check=True)


def compare(work: int, message_count: int, helper_count: int, rounds: int) -> None:
    """Print the best task in one process and the best with helpers, taken in turn."""
    os.environ["BENCH_APPLY_US"] = str(work)
    batches = make_batches(message_count // BATCH_MESSAGES * BATCH_MESSAGES)
    alone = []
    spread = []
    for _ in range(rounds):
        alone.append(measure_task(batches, 1))
        spread.append(measure_task(batches, helper_count))
    best_alone = min(alone, key=_wall_seconds)
    best_spread = min(spread, key=_wall_seconds)
    ratio = _wall_seconds(best_alone) / _wall_seconds(best_spread)
    figures = {
        "apply_us": work,
        "one": best_alone,
        f"{helper_count} helpers": best_spread,
        "times": round(ratio, 2),
        "load": current_load(),
    }
    print(json.dumps(figures), flush=True)


def _wall_seconds(figures: dict[str, Any]) -> float:
    seconds: float = figures["wall_seconds"]
    return seconds


if __name__ == "__main__":
    main()
