"""How cost grows: with sessions, with what a session holds, with the size of messages, with
partitions, with backlog.

    python -m bench.growth                  # all, into results/growth.json and docs/images/bench_*.svg
    python -m bench.growth touched hot      # some of them

The task is run as Spark's worker runs it (the fold, its checks, its files), in a process of its
own, without Spark or a broker, so that the figures are of what grows and not of start-up. CPU
seconds are the task's own; a busy machine swings them by a third, not by ten times. Backlog and the
idle run are in bench/whole.py: they need a broker.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from bench.picture import lines
from bench.run import RESULTS
from seriatim import context, stream_files
from seriatim.clock import WallClock
from seriatim.engine.offsets import Partition
from seriatim.engine.task import PartitionWork, TaskResult, read_result, run_task
from seriatim.ledger.commit import commit, read_head, start_ledger
from seriatim.ledger.model import Change, Entry, File
from seriatim.operations.changes import change_from_result
from seriatim.storage.arrow import message_batches

IMAGES = Path(__file__).parent.parent / "docs" / "images"
STREAM = """
topics = "bench"
machine = "MACHINE"
sequence = "seq"
output = {path = "lake"}
"""
TABLE = 'table = {key = ["id"], columns = {id = "string", price = "float64", size = "int64"}}\n'
PLACE = Partition("bench", 0)
AT_ONCE = 5_000
Message = tuple[str, dict[str, Any]]


def opened(folder: Path, machine: str = "table") -> stream_files.StreamFile:
    """A stream in a folder."""
    text = STREAM.replace("MACHINE", machine) + (TABLE if machine == "table" else "")
    (folder / "streams").mkdir(exist_ok=True)
    (folder / "streams" / "s.toml").write_text(text)
    return stream_files.load_stream("s", folder / "streams")


def batches(begin: int, messages: Iterable[Message]) -> list[pa.RecordBatch]:
    """Messages as Spark hands them over."""
    made = [(key.encode(), msgspec.json.encode(value)) for key, value in messages]
    found = []
    for low in range(0, len(made), AT_ONCE):
        part = made[low : low + AT_ONCE]
        offsets = range(begin + low, begin + low + len(part))
        columns = {
            "offset": pa.array(offsets, pa.int64()),
            "key": pa.array([key for key, _ in part], pa.binary()),
            "value": pa.array([value for _, value in part], pa.binary()),
            "timestamp": pa.array(
                [1_700_000_000_000_000 + n for n in offsets], pa.timestamp("us", "UTC")
            ),
        }
        found.append(pa.RecordBatch.from_pydict(columns))
    return found


def folded(
    file: stream_files.StreamFile, given: Sequence[pa.RecordBatch], state: tuple[File, ...] = ()
) -> TaskResult:
    """One task over these messages."""
    begin, count = given[0].column("offset")[0].as_py(), sum(batch.num_rows for batch in given)
    work = PartitionWork(
        partition=PLACE,
        start=begin,
        end=begin + count,
        epoch=0,
        topic_id="id",
        state=state,
        attempt=context.new_attempt(),
    )
    result = read_result(
        run_task(work, message_batches(given), context.task_context(file, {}, count))
    )
    if result.findings or result.raised_sessions:
        raise SystemExit(f"the data is not in order, so the figures mean nothing: {result}")
    return result


def measured(
    file: stream_files.StreamFile, given: Sequence[pa.RecordBatch], state: tuple[File, ...] = ()
) -> dict[str, Any]:
    """What a task takes, best of three, and what it wrote."""
    count, best = sum(batch.num_rows for batch in given), None
    for _ in range(3):
        cpu, began = time.process_time(), time.monotonic()
        result = folded(file, given, state)
        took = (time.process_time() - cpu, time.monotonic() - began)
        best = min(best or took, took)
    assert best
    files = [*result.records, *(file for file in result.state or () if file not in state)]
    return {
        "messages": count,
        "cpu_seconds": round(best[0], 3),
        "wall_seconds": round(best[1], 3),
        "cpu_us_per_message": round(best[0] / count * 1e6, 2),
        "written_bytes": sum(file.size_bytes for file in files),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "load": round(os.getloadavg()[0], 1),
    }


def snapshot(seq: int, rows: int) -> dict[str, Any]:
    """A table of a few rows."""
    return {
        "type": "snapshot",
        "seq": seq,
        "rows": [{"id": f"r{n}", "price": 1.5, "size": n} for n in range(rows)],
    }


def update(seq: int, row: int, note: str = "") -> dict[str, Any]:
    """A row as it is now."""
    return {
        "type": "update",
        "seq": seq,
        "id": f"r{row}",
        "price": seq / 4,
        "size": seq,
        "note": note,
    }


def touched(folder: Path, sessions: int) -> dict[str, Any]:
    """10,000 updates of 1,000 sessions, in a partition that has so many sessions."""
    file, few = opened(folder), min(1000, sessions)
    state: tuple[File, ...] = ()
    for low in range(0, sessions, 100_000):
        names = range(low, min(low + 100_000, sessions))
        state = (
            folded(
                file, batches(low, ((f"session-{n:07}", snapshot(1, 3)) for n in names)), state
            ).state
            or ()
        )
    step = sessions // few
    given = [
        (f"session-{n * step:07}", update(2 + turn, turn % 3))
        for turn in range(10)
        for n in range(few)
    ]
    found = measured(file, batches(sessions, given), state)
    return {
        **found,
        "state_files": len(state),
        "state_bytes": sum(file.size_bytes for file in state),
    }


def spread(folder: Path, sessions: int) -> dict[str, Any]:
    """200,000 messages over so many sessions, all of them new."""
    given = [(f"s-{n}", snapshot(1, 3)) for n in range(sessions)]
    given += [
        (f"s-{n % sessions}", update(2 + n // sessions, n % 3)) for n in range(200_000 - sessions)
    ]
    return measured(opened(folder), batches(0, given))


def size(folder: Path, size_bytes: int, machine: str = "table") -> dict[str, Any]:
    """Messages of so many bytes: a field that the machine does not know makes them long."""
    count, note = min(200_000, 400_000_000 // size_bytes), "x" * (size_bytes - 80)
    given = [(f"s-{n}", snapshot(1, 3)) for n in range(100)]
    given += [(f"s-{n % 100}", update(2 + n // 100, n % 3, note)) for n in range(count)]
    return measured(opened(folder, machine), batches(0, given))


def hot(folder: Path, rows: int) -> dict[str, Any]:
    """One session that grows to so many rows by inserts, then 100,000 updates of it in a slice of
    their own.
    """
    file = opened(folder)
    given: list[Message] = [("hot", snapshot(1, 0))]
    given += [
        ("hot", {"type": "insert", "seq": n + 2, "id": f"r{n}", "price": 1.0, "size": n})
        for n in range(rows)
    ]
    cpu = time.process_time()
    first = folded(file, batches(0, given))
    grown = time.process_time() - cpu
    state = first.state or ()
    seq = rows + 2
    found = measured(
        file,
        batches(seq - 1, (("hot", update(seq + n, n * 7 % rows)) for n in range(100_000))),
        state,
    )
    return {
        **found,
        "growing_cpu_seconds": round(grown, 1),
        "state_bytes": sum(file.size_bytes for file in state),
    }


def partitions(folder: Path, count: int) -> dict[str, Any]:
    """Commits of a slice that touched every one of so many partitions, each with a record and a
    state file.
    """
    file = opened(folder)
    store, clock = context.ledger(file, with_schema=True), WallClock()
    places = [Partition("bench", number) for number in range(count)]
    births = [
        Change(partition=p, epoch=0, frontier=0, until=0, topic_id="id", initial_frontier=0)
        for p in places
    ]
    start_ledger(store, clock, "s", "first", tuple(births))
    took, spent, sizes = [], [], []
    for turn in range(3):
        head = read_head(store, "s")
        assert head is not None
        low = turn * 2
        first = head.ledger.partitions[str(places[0])]
        result = folded(
            file,
            batches(low, [("s", snapshot(low + 1, 1)), ("s", update(low + 2, 0))]),
            first.state,
        )
        changes = [
            change_from_result(
                place, head.ledger.partitions[str(place)], _copied(file, result, place), low + 2
            )
            for place in places
        ]
        began, cpu = time.monotonic(), time.process_time()
        commit(
            store,
            clock,
            head,
            Entry(kind="slice", attempt=f"a{turn}", changes=tuple(changes), machine="table"),
        )
        took.append(round((time.monotonic() - began) * 1000, 1))
        spent.append(round((time.process_time() - cpu) * 1000, 1))
        newest = max(folder.rglob("manifests/*"), key=lambda path: path.stat().st_mtime)
        sizes.append(newest.stat().st_size)
    began = time.monotonic()
    read_head(context.ledger(file, with_schema=True), "s")
    log = [path.stat().st_size for path in sorted(folder.rglob("_delta_log/*.json"))]
    return {
        "commit_ms": took,
        "commit_cpu_ms": spent,
        "read_head_ms": round((time.monotonic() - began) * 1000, 1),
        "manifest_bytes": sizes[-1],
        "delta_log_bytes_a_commit": log[-1],
        "load": round(os.getloadavg()[0], 1),
    }


def _copied(file: stream_files.StreamFile, result: TaskResult, place: Partition) -> TaskResult:
    """What a task of another partition would have made: the same, under names of its own."""
    root = Path(file.stream.output.path)

    def copy(one: File) -> File:
        path = one.path.replace(f"/{PLACE}/", f"/{place}/")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if path != one.path and not (root / path).exists():
            os.link(root / one.path, root / path)
        return replace(one, path=path)

    assert result.certificate
    return TaskResult(
        certificate=replace(result.certificate, partition=place),
        records=tuple(map(copy, result.records)),
        state=tuple(map(copy, result.state or ())),
    )


SERIES: dict[str, tuple[Callable[..., dict[str, Any]], Sequence[int]]] = {
    "touched": (touched, (1_000, 10_000, 100_000, 1_000_000)),
    "spread": (spread, (10, 100, 1_000, 10_000, 50_000)),
    "size": (size, (200, 1_000, 5_000, 20_000, 100_000)),
    "hot": (hot, (1_000, 100_000, 1_000_000)),
    "partitions": (partitions, (10, 100, 1_000, 10_000)),
}


def draw(found: dict[str, dict[str, Any]]) -> None:
    """The curves, as pictures."""

    def curve(name: str, figure: str, factor: float = 1.0) -> list[tuple[float, float]]:
        return [(float(x), one[figure] * factor) for x, one in found[name].items()]

    if "touched" in found:
        title = "A slice that touches 1,000 sessions (10,000 messages): CPU seconds of the task"
        curves = {"CPU s": curve("touched", "cpu_seconds")}
        (IMAGES / "bench_sessions.svg").write_text(
            lines(title, "sessions that the partition has", curves)
        )
    if "size" in found:
        title = "CPU of the task for a message, µs, and per KB of it"
        per_kb = [(x, y / x * 1000) for x, y in curve("size", "cpu_us_per_message")]
        curves = {"µs a message": curve("size", "cpu_us_per_message"), "µs a KB": per_kb}
        (IMAGES / "bench_message_size.svg").write_text(lines(title, "bytes of a message", curves))
    if "partitions" in found:
        curves = {
            name: [(float(x), min(one[figure])) for x, one in found["partitions"].items()]
            for name, figure in (("CPU ms", "commit_cpu_ms"), ("wall ms", "commit_ms"))
        }
        title = "A commit that touches every partition, milliseconds"
        (IMAGES / "bench_partitions.svg").write_text(lines(title, "partitions", curves))
    if "spread" in found:
        title = "200,000 messages over so many sessions: CPU of the task for a message, µs"
        curves = {"µs a message": curve("spread", "cpu_us_per_message")}
        (IMAGES / "bench_sessions_at_work.svg").write_text(
            lines(title, "sessions with messages", curves)
        )


def one(name: str, amount: int) -> None:
    """One figure, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(SERIES[name][0](Path(folder), amount)), flush=True)


def main() -> None:
    """Every figure in a process of its own; those of earlier runs stay until they are taken again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SERIES))
    parser.add_argument("--one", type=int, default=0)
    parser.add_argument(
        "--draw", action="store_true", help="only the pictures, of what was measured before"
    )
    given = parser.parse_args()
    if given.one:
        return one(given.names[0], given.one)
    kept = RESULTS / "growth.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    for name in () if given.draw else given.names:
        for amount in SERIES[name][1]:
            command = [sys.executable, "-m", "bench.growth", name, "--one", str(amount)]
            ended = subprocess.run(command, text=True, capture_output=True, check=False)
            if ended.returncode:
                raise SystemExit(f"{name} {amount} failed:\n{ended.stderr[-2000:]}")
            found.setdefault(name, {})[str(amount)] = json.loads(ended.stdout.splitlines()[-1])
            print(
                f"{name} {amount:,}: {ended.stdout.splitlines()[-1]}", file=sys.stderr, flush=True
            )
            kept.write_text(json.dumps(found, indent=2) + "\n")
    draw(found)
    return None


if __name__ == "__main__":
    main()
