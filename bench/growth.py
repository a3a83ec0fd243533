"""How cost grows: with sessions, with what a session holds, with the size of messages, with
partitions.

    python -m bench.growth                  # all, into results/growth.json and docs/images/bench_*.svg
    python -m bench.growth touched hot      # some of them

The task is run as Spark's worker runs it (the fold, its checks, its files), in a process of its
own, without Spark or a broker, so that the figures are of what grows and not of start-up. CPU
seconds are the task's own; a busy machine changes them by a third, not by ten times.

Next: whole.py measures backlog and the idle run, which need a broker; picture.py draws the curves.
"""

from __future__ import annotations

import argparse
import gc
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

from bench.check import first_change
from bench.picture import line_chart
from bench.run import RESULTS
from seriatim import context, stream_files
from seriatim.clock import WallClock
from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.engine.task import PartitionWork, TaskResult, read_result, run_task
from seriatim.ledger.commit import commit, read_head, start_ledger
from seriatim.ledger.entries import SliceEntry
from seriatim.operations.run import change_from_result
from seriatim.ports import Clock, LedgerStore
from seriatim.storage.arrow import message_batches

IMAGES = Path(__file__).parent.parent / "docs" / "images"
STREAM = """
topics = "bench"
machine = "MACHINE"
sequence = "seq"
output = {path = "lake"}
"""
TABLE = 'table = {key = ["id"], columns = {id = "string", price = "float64", size = "int64"}}\n'
PARTITION = Partition("bench", 0)
BATCH_MESSAGES = 5_000
FIRST_TIME_US = 1_700_000_000_000_000
TASK_RUNS = 3
COMMITS = 3
Message = tuple[str, dict[str, Any]]


def create_stream(folder: Path, machine: str = "table") -> stream_files.StreamFile:
    """A stream in a folder."""
    text = STREAM.replace("MACHINE", machine)
    if machine == "table":
        text += TABLE
    (folder / "streams").mkdir(exist_ok=True)
    (folder / "streams" / "s.toml").write_text(text)
    return stream_files.load_stream("s", folder / "streams")


def to_batches(begin: int, messages: Iterable[Message]) -> list[pa.RecordBatch]:
    """Messages as Spark hands them over, from offset `begin` on."""
    keys: list[bytes] = []
    values: list[bytes] = []
    for key, value in messages:
        keys.append(key.encode())
        values.append(msgspec.json.encode(value))
    batches = []
    for low in range(0, len(keys), BATCH_MESSAGES):
        batch_keys = keys[low : low + BATCH_MESSAGES]
        batch_values = values[low : low + BATCH_MESSAGES]
        offsets = range(begin + low, begin + low + len(batch_keys))
        times = [FIRST_TIME_US + offset for offset in offsets]
        columns = {
            "offset": pa.array(offsets, pa.int64()),
            "key": pa.array(batch_keys, pa.binary()),
            "value": pa.array(batch_values, pa.binary()),
            "timestamp": pa.array(times, pa.timestamp("us", "UTC")),
        }
        batches.append(pa.RecordBatch.from_pydict(columns))
    return batches


def fold_batches(
    file: stream_files.StreamFile, batches: Sequence[pa.RecordBatch], state: tuple[File, ...] = ()
) -> TaskResult:
    """Run one task over these messages."""
    begin = batches[0].column("offset")[0].as_py()
    count = sum(batch.num_rows for batch in batches)
    work = PartitionWork(
        partition=PARTITION,
        start=begin,
        end=begin + count,
        epoch=0,
        topic_id="id",
        state=state,
        attempt=context.new_attempt(),
    )
    task_context = context.task_context(file, {}, count)
    result = read_result(run_task(work, message_batches(batches), task_context))
    if result.findings or result.half_changed_sessions:
        raise SystemExit(f"the data is not in order, so the figures mean nothing: {result}")
    return result


def measure_task(
    file: stream_files.StreamFile, batches: Sequence[pa.RecordBatch], state: tuple[File, ...] = ()
) -> dict[str, Any]:
    """What a task takes, best of three, and what it wrote."""
    count = sum(batch.num_rows for batch in batches)
    # As in a worker, where the collector would walk in vain through millions of objects.
    gc.disable()
    runs = []
    for _ in range(TASK_RUNS):
        cpu_before = time.process_time()
        began = time.monotonic()
        result = fold_batches(file, batches, state)
        runs.append((time.process_time() - cpu_before, time.monotonic() - began))
    cpu_seconds, wall_seconds = min(runs)
    new_state = [state_file for state_file in result.state or () if state_file not in state]
    return {
        "messages": count,
        "cpu_seconds": round(cpu_seconds, 3),
        "wall_seconds": round(wall_seconds, 3),
        "cpu_us_per_message": round(cpu_seconds / count * 1e6, 2),
        "written_bytes": total_bytes([*result.records, *new_state]),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "load": current_load(),
    }


def total_bytes(files: Iterable[File]) -> int:
    """The size of files together."""
    return sum(file.size_bytes for file in files)


def current_load() -> float:
    """The load of this computer: figures taken on a busy one are worth less."""
    return round(os.getloadavg()[0], 1)


def snapshot(seq: int, row_count: int) -> dict[str, Any]:
    """A snapshot of a few rows."""
    rows = [{"id": f"r{n}", "price": 1.5, "size": n} for n in range(row_count)]
    return {"type": "snapshot", "seq": seq, "rows": rows}


def update(seq: int, row: int, note: str = "") -> dict[str, Any]:
    """An update of one row."""
    return {
        "type": "update",
        "seq": seq,
        "id": f"r{row}",
        "price": seq / 4,
        "size": seq,
        "note": note,
    }


def measure_touched(folder: Path, sessions: int) -> dict[str, Any]:
    """10,000 updates of 1,000 sessions, in a partition that has so many sessions."""
    file, batches, state = fill_partition(folder, sessions)
    figures = measure_task(file, batches, state)
    return {**figures, "state_files": len(state), "state_bytes": total_bytes(state)}


def fill_partition(
    folder: Path, sessions: int
) -> tuple[stream_files.StreamFile, list[pa.RecordBatch], tuple[File, ...]]:
    """A stream with so many sessions: its file, 10,000 updates that touch 1,000 of the sessions, and
    its state files.
    """
    file = create_stream(folder)
    state: tuple[File, ...] = ()
    for low in range(0, sessions, 100_000):
        numbers = range(low, min(low + 100_000, sessions))
        snapshots = [(f"session-{n:07}", snapshot(1, 3)) for n in numbers]
        state = fold_batches(file, to_batches(low, snapshots), state).state or ()
    touched_count = min(1000, sessions)
    step = sessions // touched_count
    updates = []
    for turn in range(10):
        message = update(2 + turn, turn % 3)
        updates += [(f"session-{n * step:07}", message) for n in range(touched_count)]
    return file, to_batches(sessions, updates), state


def measure_spread(folder: Path, sessions: int) -> dict[str, Any]:
    """200,000 messages over so many sessions, all of them new."""
    messages = [(f"s-{n}", snapshot(1, 3)) for n in range(sessions)]
    for number in range(200_000 - sessions):
        message = update(2 + number // sessions, number % 3)
        messages.append((f"s-{number % sessions}", message))
    return measure_task(create_stream(folder), to_batches(0, messages))


def measure_size(folder: Path, size_bytes: int, machine: str = "table") -> dict[str, Any]:
    """Messages of so many bytes: a field that the machine does not know makes them long."""
    count = min(200_000, 400_000_000 // size_bytes)
    note = "x" * (size_bytes - 80)
    messages = [(f"s-{n}", snapshot(1, 3)) for n in range(100)]
    messages += [(f"s-{n % 100}", update(2 + n // 100, n % 3, note)) for n in range(count)]
    return measure_task(create_stream(folder, machine), to_batches(0, messages))


def measure_hot(folder: Path, row_count: int) -> dict[str, Any]:
    """One session that grows to so many rows by inserts, then 100,000 updates of it in a slice of
    their own.
    """
    file = create_stream(folder)
    inserts: list[Message] = [("hot", snapshot(1, 0))]
    for number in range(row_count):
        row = {"id": f"r{number}", "price": 1.0, "size": number}
        inserts.append(("hot", {"type": "insert", "seq": number + 2, **row}))
    cpu_before = time.process_time()
    state = fold_batches(file, to_batches(0, inserts)).state or ()
    growing_cpu_seconds = time.process_time() - cpu_before
    first_seq = row_count + 2
    updates = [("hot", update(first_seq + n, n * 7 % row_count)) for n in range(100_000)]
    figures = measure_task(file, to_batches(len(inserts), updates), state)
    return {
        **figures,
        "growing_cpu_seconds": round(growing_cpu_seconds, 1),
        "state_bytes": total_bytes(state),
    }


def measure_partitions(folder: Path, count: int) -> dict[str, Any]:
    """Commits of a slice that touched every one of so many partitions, each with a record and a
    state file; then one that touched ten of them.
    """
    file = create_stream(folder)
    store = context.ledger(file, with_schema=True)
    clock = WallClock()
    partitions = [Partition("bench", number) for number in range(count)]
    start_ledger(store, clock, "s", "first", tuple(map(first_change, partitions)))
    commits = [commit_slice(file, store, clock, turn, partitions) for turn in range(COMMITS)]
    wall_ms, cpu_ms = zip(*commits, strict=True)
    manifest_bytes = _newest_manifest_bytes(folder)
    read_head_ms = _read_head_milliseconds(file)
    delta_log_bytes = max(folder.rglob("_delta_log/*.json")).stat().st_size
    few_wall_ms, few_cpu_ms = commit_slice(file, store, clock, COMMITS, partitions[:10])
    return {
        "commit_ms": list(wall_ms),
        "commit_cpu_ms": list(cpu_ms),
        "read_head_ms": read_head_ms,
        "manifest_bytes": manifest_bytes,
        "delta_log_bytes_a_commit": delta_log_bytes,
        "ten_touched_commit_ms": few_wall_ms,
        "ten_touched_commit_cpu_ms": few_cpu_ms,
        "ten_touched_manifest_bytes": _newest_manifest_bytes(folder),
        "ten_touched_read_head_ms": _read_head_milliseconds(file),
        "load": current_load(),
    }


def commit_slice(
    file: stream_files.StreamFile,
    store: LedgerStore,
    clock: Clock,
    turn: int,
    partitions: Sequence[Partition],
) -> tuple[float, float]:
    """Commit a slice of two messages in each partition. Returns the milliseconds that the commit
    took, and those of CPU.
    """
    # 1. A task of the first partition; the others get copies of its files.
    head = read_head(store, "s")
    assert head is not None
    accounts = head.ledger.partitions
    begin = turn * 2
    messages = [("s", snapshot(begin + 1, 1)), ("s", update(begin + 2, 0))]
    batches = to_batches(begin, messages)
    result = fold_batches(file, batches, accounts[str(partitions[0])].state)
    changes = []
    for partition in partitions:
        copied = _copy_result(file, result, partition)
        changes.append(change_from_result(partition, accounts[str(partition)], copied, begin + 2))
    entry = SliceEntry(attempt=f"a{turn}", changes=tuple(changes), machine="table")
    # 2. The commit alone is measured.
    began = time.monotonic()
    cpu_before = time.process_time()
    commit(store, clock, head, entry)
    wall_ms = _milliseconds(time.monotonic() - began)
    return wall_ms, _milliseconds(time.process_time() - cpu_before)


def _newest_manifest_bytes(folder: Path) -> int:
    # The name begins with the number of the entry.
    return max(folder.rglob("manifests/*")).stat().st_size


def _read_head_milliseconds(file: stream_files.StreamFile) -> float:
    began = time.monotonic()
    read_head(context.ledger(file, with_schema=True), "s")
    return _milliseconds(time.monotonic() - began)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)


def _copy_result(
    file: stream_files.StreamFile, result: TaskResult, partition: Partition
) -> TaskResult:
    """The result of a task of another partition: the same content under names of its own."""
    root = Path(file.stream.output.path)

    def copy(original: File) -> File:
        path = original.path.replace(f"/{PARTITION}/", f"/{partition}/")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if path != original.path and not (root / path).exists():
            os.link(root / original.path, root / path)
        return replace(original, path=path)

    assert result.certificate
    return TaskResult(
        certificate=replace(result.certificate, partition=partition),
        records=tuple(map(copy, result.records)),
        state=tuple(map(copy, result.state or ())),
    )


SERIES: dict[str, tuple[Callable[..., dict[str, Any]], Sequence[int]]] = {
    "touched": (measure_touched, (1_000, 10_000, 100_000, 1_000_000)),
    "spread": (measure_spread, (10, 100, 1_000, 10_000, 50_000)),
    "size": (measure_size, (200, 1_000, 5_000, 20_000, 100_000)),
    "hot": (measure_hot, (1_000, 100_000, 1_000_000)),
    "partitions": (measure_partitions, (10, 100, 1_000, 10_000)),
}
"""By name: what measures an amount, and the amounts."""
Results = dict[str, dict[str, Any]]
"""Figures by series and amount."""


def draw_curves(results: Results) -> None:
    """Write the curves of what was measured as pictures."""
    if "touched" in results:
        _write_picture(
            "bench_sessions.svg",
            "A slice that touches 1,000 sessions (10,000 messages): CPU seconds of the task",
            "sessions that the partition has",
            {"CPU s": _curve(results["touched"], "cpu_seconds")},
        )
    if "size" in results:
        per_message = _curve(results["size"], "cpu_us_per_message")
        per_kilobyte = [(size, cost / size * 1000) for size, cost in per_message]
        _write_picture(
            "bench_message_size.svg",
            "CPU of the task for a message, µs, and per KB of it",
            "bytes of a message",
            {"µs a message": per_message, "µs a KB": per_kilobyte},
        )
    if "partitions" in results:
        _write_picture(
            "bench_partitions.svg",
            "A commit that touches every partition, milliseconds",
            "partitions",
            {
                "CPU ms": _curve(results["partitions"], "commit_cpu_ms"),
                "wall ms": _curve(results["partitions"], "commit_ms"),
            },
        )
    if "spread" in results:
        _write_picture(
            "bench_sessions_at_work.svg",
            "200,000 messages over so many sessions: CPU of the task for a message, µs",
            "sessions with messages",
            {"µs a message": _curve(results["spread"], "cpu_us_per_message")},
        )


def _curve(series: dict[str, Any], figure_name: str) -> list[tuple[float, float]]:
    """A figure by amount; of several measurements the least."""
    points = []
    for amount, figures in series.items():
        figure = figures[figure_name]
        if isinstance(figure, list):
            figure = min(figure)
        points.append((float(amount), figure))
    return points


def _write_picture(
    name: str, title: str, x_title: str, curves: dict[str, list[tuple[float, float]]]
) -> None:
    (IMAGES / name).write_text(line_chart(title, x_title, curves))


def print_figure(name: str, amount: int) -> None:
    """Take one figure in this process and print it."""
    measure, _ = SERIES[name]
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), amount)), flush=True)


def main() -> None:
    """Every figure in a process of its own; those of earlier runs stay until they are taken again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SERIES))
    parser.add_argument("--one", type=int, default=0)
    parser.add_argument(
        "--draw", action="store_true", help="only the pictures, of what was measured before"
    )
    options = parser.parse_args()
    if options.one:
        print_figure(options.names[0], options.one)
        return
    results_file = RESULTS / "growth.json"
    results: Results = {}
    if results_file.exists():
        results = json.loads(results_file.read_text())
    if not options.draw:
        for name in options.names:
            _measure_series(name, results, results_file)
    draw_curves(results)


def _measure_series(name: str, results: Results, results_file: Path) -> None:
    """Take every figure of a series; each is saved at once."""
    _, amounts = SERIES[name]
    for amount in amounts:
        command = [sys.executable, "-m", "bench.growth", name, "--one", str(amount)]
        process = subprocess.run(command, text=True, capture_output=True, check=False)
        if process.returncode:
            raise SystemExit(f"{name} {amount} failed:\n{process.stderr[-2000:]}")
        printed_line = process.stdout.splitlines()[-1]
        results.setdefault(name, {})[str(amount)] = json.loads(printed_line)
        print(f"{name} {amount:,}: {printed_line}", file=sys.stderr, flush=True)
        results_file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
