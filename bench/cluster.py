"""Check, verify and publish: what they cost in this process, and on one and two
workers of a Spark cluster with one core each.

    python -m bench.cluster --records 1000000
    python -m bench.cluster --records 1000000 10000000 --rounds 3

Records are folded once without Spark or a broker. Then each operation runs on a copy of the output (hard
links) in this process, on one worker and on two, in alternating order, each time in a driver of its own.
Measured are the time from the start of the first piece of work to the end of the last one, the CPU of
all pieces, both without the imports of libraries, and the most memory of the driver: its Python and its
JVM. The time says something only on a quiet machine; CPU and memory also on a busy one. Every answer must
be the same wherever it comes from. Results: results/cluster.json; what they mean: docs/SCALE.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.check import fold
from bench.run import RESULTS, print_progress
from seriatim import config, context, stream_files
from seriatim.embedded.cluster import WorkerSize, start_cluster, stop_cluster
from seriatim.operations.prove.check import check_stream
from seriatim.operations.prove.great_expectations_suites import GreatExpectations
from seriatim.operations.prove.partition_rules import state_row_reader
from seriatim.operations.prove.suite import load_suites
from seriatim.operations.prove.verify import Verification
from seriatim.operations.publish import publish_current
from seriatim.storage.audit import FileAudit
from seriatim.storage.record_scan import RecordScan
from seriatim.workers import ChooseWorkers, Workers

ROOT = Path(__file__).parent.parent
PARTITIONS = 8
SESSIONS_PER_MILLION = 10_000
WORKER_COUNTS = (0, 1, 2)
"""0: this process."""


class TimedFunction:
    """Does a piece of work, and notes when it was done and what it cost, without imports."""

    def __init__(self, function: Callable[[Any], Any], folder: str) -> None:
        self.function = function
        self.folder = folder

    def __call__(self, work: Any) -> Any:
        import great_expectations  # noqa: F401  # the import is not to be measured

        from seriatim.operations.prove.great_expectations_suites import _batch_definition

        _batch_definition()
        start_seconds, start_cpu_seconds = time.time(), time.process_time()
        answer = self.function(work)
        times = {
            "start": start_seconds,
            "end": time.time(),
            "cpu": time.process_time() - start_cpu_seconds,
        }
        (Path(self.folder) / uuid.uuid4().hex).write_text(json.dumps(times))
        return answer


class TimedWorkers:
    """Workers whose works are timed."""

    def __init__(self, workers: Workers, folder: Path) -> None:
        self.workers = workers
        self.folder = folder

    def map(self, function: Callable[[Any], Any], works: Iterable[Any]) -> Iterator[Any]:
        """The answers of the workers."""
        return self.workers.map(TimedFunction(function, str(self.folder)), works)


def main() -> None:
    """Measure every size, print and save the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, nargs="*", default=[1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(OPERATIONS), choices=list(OPERATIONS))
    parser.add_argument("--results", default=str(RESULTS))
    parser.add_argument("--drive", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        operation, folder, times = options.drive
        print(json.dumps(drive(operation, Path(folder), Path(times))))
        return
    results = [measure_size(records, options) for records in options.records]
    path = Path(options.results) / "cluster.json"
    path.write_text(json.dumps(results, indent=2) + "\n")


def measure_size(records: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one number of records."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output = folder / "output"
        output.mkdir()
        print_progress(f"folding {records:,} messages")
        sessions = max(PARTITIONS, records * SESSIONS_PER_MILLION // 1_000_000)
        fold(output, records, PARTITIONS, sessions)
        for number in range(options.rounds):
            # The order alternates, so that no side has the quieter machine.
            counts = WORKER_COUNTS if number % 2 == 0 else WORKER_COUNTS[::-1]
            for worker_count in counts:
                for operation in options.only:
                    figures = measure_once(operation, output, folder, worker_count)
                    print_progress(f"{records:,} {operation} on {worker_count} workers: {figures}")
                    by_workers = runs.setdefault(operation, {})
                    by_workers.setdefault(str(worker_count), []).append(figures)
    answers = {}
    for operation, by_workers in runs.items():
        seen = {figures["answer"] for all_runs in by_workers.values() for figures in all_runs}
        if len(seen) != 1:
            raise SystemExit(f"{operation} did not answer the same everywhere: {seen}")
        answers[operation] = summary(by_workers)
    return {"records": records, "partitions": PARTITIONS, "operations": answers, "runs": runs}


def measure_once(operation: str, output: Path, folder: Path, worker_count: int) -> dict[str, Any]:
    """One operation on a copy of the output, in a driver of its own."""
    copy = folder / "copy"
    times = folder / "times"
    subprocess.run(["cp", "-al", str(output), str(copy)], check=True)
    times.mkdir()
    environment = dict(os.environ)
    home = folder / "home"
    if worker_count:
        os.environ["PYTHONPATH"] = str(ROOT)
        info = start_cluster(home, worker_count, WorkerSize(), lambda _: None)
        environment["SERIATIM_SPARK_MASTER"] = info.master
        environment["SERIATIM_SPARK_RECORDS_MIN"] = "0"
    load = os.getloadavg()[0]
    try:
        command = [sys.executable, "-m", "bench.cluster", "--drive", operation, str(copy)]
        result = subprocess.run(
            [*command, str(times)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise SystemExit(result.stderr)
    finally:
        if worker_count:
            stop_cluster(home, lambda _: None)
    works = [json.loads(path.read_text()) for path in times.iterdir()]
    for path in (copy, times):
        subprocess.run(["rm", "-r", str(path)], check=True)
    return {
        **json.loads(result.stdout.splitlines()[-1]),
        "seconds": round(max(w["end"] for w in works) - min(w["start"] for w in works), 2),
        "cpu_seconds": round(sum(w["cpu"] for w in works), 2),
        "works": len(works),
        "load": round(load, 1),
    }


def summary(by_workers: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Medians beside each other."""

    def middle(count: int, name: str) -> float:
        return median(float(figures[name]) for figures in by_workers[str(count)])

    return {
        "two_workers_to_one": round(middle(2, "seconds") / middle(1, "seconds"), 2),
        "cpu_of_works_on_two_workers_to_here": round(
            middle(2, "cpu_seconds") / middle(0, "cpu_seconds"), 2
        ),
        "driver_mb_here": middle(0, "driver_mb"),
        "driver_mb_on_two_workers": middle(2, "driver_mb"),
        "driver_jvm_mb_on_two_workers": middle(2, "driver_jvm_mb"),
    }


def drive(operation: str, folder: Path, times: Path) -> dict[str, Any]:
    """Be the driver of one operation."""
    settings = config.load_settings()
    file = stream_files.load_stream("s", folder / "streams")
    with context.choose_workers(file, settings, lambda _: None) as choose:

        def choose_timed(records: int) -> Workers:
            return TimedWorkers(choose(records), times)

        answer = OPERATIONS[operation](file, settings, choose_timed)
        jvm_bytes = _peak_memory_of_jvm()
    return {
        "answer": hashlib.sha256(answer.encode()).hexdigest(),
        "driver_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "driver_jvm_mb": jvm_bytes // 2**20,
    }


def _check(file: Any, settings: Any, choose: ChooseWorkers) -> str:
    open_stream = context.ConnectedStream(file, settings, writes_records=True)
    store = context.output_store(file)
    result = check_stream(
        open_stream,
        load_suites(file.stream, Path(file.folder)),
        GreatExpectations(store),
        RecordScan(store),
        choose_workers=choose,
        load_runner=partial(stream_files.load_runner, file),
    )
    return repr((result.verdict, result.records, result.evidence, result.findings))


def _verify(file: Any, _: Any, choose: ChooseWorkers) -> str:
    store = context.output_store(file)
    row_reader = state_row_reader(
        stream_files.load_runner(file), partial(stream_files.load_runner, file)
    )
    audit = FileAudit(store, choose(1))
    result = Verification("s", audit, row_reader=row_reader, from_first_entry=True).run()
    return repr((result.difference, result.files, result.bytes, result.records))


def _publish(file: Any, _: Any, choose: ChooseWorkers) -> str:
    result = publish_current(
        "s", context.ledger(file, with_schema=True), context.current_table(file, choose)
    )
    return repr((result.sequence, result.written))


OPERATIONS: dict[str, Callable[[Any, Any, ChooseWorkers], str]] = {
    "check": _check,
    "verify": _verify,
    "publish": _publish,
}


def _peak_memory_of_jvm() -> int:
    """The most memory of the JVM that this process has started; 0 if it has none."""
    peak_bytes = 0
    for child in psutil.Process().children():
        status = Path(f"/proc/{child.pid}/status").read_text()
        if "java" in status.splitlines()[0]:
            line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
            peak_bytes = max(peak_bytes, int(line.split()[1]) * 1024)
    return peak_bytes


if __name__ == "__main__":
    main()
