"""What a check costs: a slice of so many messages, folded without Spark or a broker, then judged.

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

import pyarrow as pa

from seriatim import context, stream_files
from seriatim.clock import WallClock
from seriatim.engine.offsets import Partition
from seriatim.engine.task import PartitionWork, read_result, run_task
from seriatim.ledger.commit import commit, read_head, start_ledger
from seriatim.ledger.model import Change, Entry
from seriatim.operations.changes import change_from_result
from seriatim.storage.arrow import message_batches

STREAM = """
topics = "bench"
machine = "table"
sequence = "seq"
table = {key = ["id"], columns = {id = "string", price = "float64", size = "int64"}}
output = {path = "lake"}
"""
ROWS = 20
AT_ONCE = 5_000


def main() -> None:
    """Fold, then check in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--judge", default="")
    given = parser.parse_args()
    if given.judge:
        return judge(Path(given.judge))
    with tempfile.TemporaryDirectory() as folder:
        fold(Path(folder), given.messages, given.partitions, given.sessions)
        command = [sys.executable, "-m", "bench.check", "--judge", folder]
        print(subprocess.run(command, text=True, capture_output=True, check=True).stdout, end="")
    return None


def fold(folder: Path, messages: int, partitions: int, sessions: int) -> None:
    """One slice, as a run commits it."""
    (folder / "streams").mkdir()
    (folder / "streams" / "s.toml").write_text(STREAM)
    file = stream_files.load_stream("s", folder / "streams")
    store, kit, clock = (
        context.ledger(file, with_schema=True),
        context.task_context(file, {}),
        WallClock(),
    )
    places, each = (
        [Partition("bench", number) for number in range(partitions)],
        messages // partitions,
    )
    births = [
        Change(partition=p, epoch=0, frontier=0, until=0, topic_id="id", initial_frontier=0)
        for p in places
    ]
    start_ledger(store, clock, "s", "first", tuple(births))
    head = read_head(store, "s")
    assert head is not None
    changes = []
    for place in places:
        work = PartitionWork(
            partition=place, start=0, end=each, epoch=0, topic_id="id", attempt="bench"
        )
        result = read_result(
            run_task(work, message_batches(made(place.number, each, sessions // partitions)), kit)
        )
        changes.append(change_from_result(place, head.ledger.partitions[str(place)], result, each))
    commit(
        store,
        clock,
        head,
        Entry(kind="slice", attempt="bench", changes=tuple(changes), machine="table"),
    )


def made(seed: int, count: int, sessions: int) -> Iterator[pa.RecordBatch]:
    """Each session a snapshot of a few rows, then updates of any of them."""
    draw, sequences = random.Random(seed), [0] * sessions
    for begin in range(0, count, AT_ONCE):
        keys, values = [], []
        for offset in range(begin, min(begin + AT_ONCE, count)):
            session = offset if offset < sessions else draw.randrange(sessions)
            sequences[session] += 1
            rows = [{"id": f"row-{n}", "price": 1.0, "size": n} for n in range(ROWS)]
            update = {
                "id": f"row-{draw.randrange(ROWS)}",
                "price": round(draw.random() * 100, 2),
                "size": 7,
            }
            body = (
                {"type": "snapshot", "rows": rows}
                if offset < sessions
                else {"type": "update", **update}
            )
            keys.append(f"session-{session}".encode())
            values.append(json.dumps({**body, "seq": sequences[session]}).encode())
        offsets = range(begin, begin + len(keys))
        yield pa.RecordBatch.from_pydict(
            {
                "offset": pa.array(offsets, pa.int64()),
                "key": pa.array(keys, pa.binary()),
                "value": pa.array(values, pa.binary()),
                "timestamp": pa.array(
                    [1_700_000_000_000_000 + n for n in offsets], pa.timestamp("us", "UTC")
                ),
            }
        )


def judge(folder: Path) -> None:
    """Check what was folded, and say what it took."""
    from seriatim.cli.check import check_context
    from seriatim.operations.prove.check import check_stream

    began, file = time.monotonic(), stream_files.load_stream("s", folder / "streams")
    done = check_stream(check_context(file))
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "records": done.records,
                "verdict": sorted(set(done.verdict.values())),
                "expectations": done.expectations,
                "seconds": round(time.monotonic() - began, 1),
                "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
                "peak_memory_mb": used.ru_maxrss // 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
