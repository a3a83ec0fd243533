"""What a check costs: a slice of so many messages is folded without Spark or a broker, then checked.

    python -m bench.check --messages 2000000 --partitions 4 --sessions 10000

Prints seconds, CPU seconds and the peak memory of the check alone, which runs in a process of its
own.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from seriatim import config, context, stream_files
from seriatim.clock import WallClock
from seriatim.engine.offsets import Partition
from seriatim.engine.task import PartitionWork, read_result, run_task
from seriatim.ledger.commit import commit, read_head, start_ledger
from seriatim.ledger.entries import SliceEntry
from seriatim.ledger.model import Change
from seriatim.operations.run import change_from_result
from seriatim.storage.arrow import message_batches

STREAM = """
topics = "bench"
machine = "table"
sequence = "seq"
table = {key = ["id"], columns = {id = "string", price = "float64", size = "int64"}}
output = {path = "lake"}
"""
ROW_COUNT = 20
BATCH_MESSAGES = 5_000
FIRST_TIME_US = 1_700_000_000_000_000


def main() -> None:
    """Fold, then check in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--judge", default="")
    options = parser.parse_args()
    if options.judge:
        judge(Path(options.judge))
        return
    with tempfile.TemporaryDirectory() as folder:
        fold(Path(folder), options.messages, options.partitions, options.sessions)
        command = [sys.executable, "-m", "bench.check", "--judge", folder]
        result = subprocess.run(command, text=True, capture_output=True, check=True)
        print(result.stdout, end="")


def fold(folder: Path, messages: int, partition_count: int, sessions: int) -> None:
    """Fold one slice and commit it as a run does."""
    (folder / "streams").mkdir()
    (folder / "streams" / "s.toml").write_text(STREAM)
    file = stream_files.load_stream("s", folder / "streams")
    store = context.ledger(file, with_schema=True)
    clock = WallClock()
    partitions = [Partition("bench", number) for number in range(partition_count)]
    start_ledger(store, clock, "s", "first", tuple(map(first_change, partitions)))
    head = read_head(store, "s")
    assert head is not None
    changes = []
    for partition in partitions:
        messages_each = messages // partition_count
        work = PartitionWork(
            partition=partition,
            start=0,
            end=messages_each,
            epoch=0,
            topic_id="id",
            attempt="bench",
        )
        batches = make_batches(partition.number, messages_each, sessions // partition_count)
        task_context = context.task_context(file, {})
        result = read_result(run_task(work, message_batches(batches), task_context))
        state = head.ledger.partitions[str(partition)]
        changes.append(change_from_result(partition, state, result, messages_each))
    entry = SliceEntry(attempt="bench", changes=tuple(changes), machine="table")
    commit(store, clock, head, entry)


def first_change(partition: Partition) -> Change:
    """The entry by which a partition begins at offset 0."""
    return Change(
        partition=partition, epoch=0, frontier=0, until=0, topic_id="id", initial_frontier=0
    )


def make_batches(seed: int, count: int, session_count: int) -> Iterator[pa.RecordBatch]:
    """A snapshot of a few rows for each session, then updates of any row of any session."""
    chance = random.Random(seed)
    sequences = [0] * session_count
    for begin in range(0, count, BATCH_MESSAGES):
        offsets = range(begin, min(begin + BATCH_MESSAGES, count))
        keys = []
        values = []
        for offset in offsets:
            is_snapshot = offset < session_count
            session = offset if is_snapshot else chance.randrange(session_count)
            sequences[session] += 1
            message = make_snapshot() if is_snapshot else make_update(chance)
            message["seq"] = sequences[session]
            keys.append(f"session-{session}".encode())
            values.append(json.dumps(message).encode())
        times = [FIRST_TIME_US + offset for offset in offsets]
        columns = {
            "offset": pa.array(offsets, pa.int64()),
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "timestamp": pa.array(times, pa.timestamp("us", "UTC")),
        }
        yield pa.RecordBatch.from_pydict(columns)


def make_snapshot() -> dict[str, Any]:
    """A snapshot of a few rows."""
    rows = [{"id": f"row-{n}", "price": 1.0, "size": n} for n in range(ROW_COUNT)]
    return {"type": "snapshot", "rows": rows}


def make_update(chance: random.Random) -> dict[str, Any]:
    """An update of any row."""
    return {
        "type": "update",
        "id": f"row-{chance.randrange(ROW_COUNT)}",
        "price": round(chance.random() * 100, 2),
        "size": 7,
    }


def judge(folder: Path) -> None:
    """Check what was folded, and print what it took."""
    from seriatim.cli.check import check_with_suites

    began = time.monotonic()
    file = stream_files.load_stream("s", folder / "streams")
    open_stream = context.ConnectedStream(file, config.load_settings(), writes_records=True)
    result = check_with_suites(open_stream, lambda _done, _total: None)
    seconds = time.monotonic() - began
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "records": result.records,
        "verdict": sorted(set(result.verdict.values())),
        "expectations": result.expectations,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_memory_mb": usage.ru_maxrss // 1024,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
