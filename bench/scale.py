"""What grows with the number of partitions: the driver's side of a run, with everything outside in memory.

    python -m bench.scale
    python -m bench.scale --partitions 1000 10000

Each size runs in a process of its own. A stream has 20 partitions in each topic and 3 messages in each
partition. Measured are the CPU of a plan, of a run that touches ten partitions (Kafka, files and Delta cost
nothing here), of a status, the bytes of the status as JSON, and the most memory of the process.
Results: results/scale.json; what they mean: docs/SCALE.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.run import RESULTS, print_progress
from seriatim.ledger.manifests import Manifest
from seriatim.operations.plan import plan_run
from seriatim.operations.status import read_status
from seriatim.stream import OutputSettings, Stream, TableSettings
from seriatim.testing import MemoryStream

SIZES = (1_000, 10_000, 100_000)
PARTITIONS_PER_TOPIC = 20
TOUCHED = 10
T = TypeVar("T")


def main() -> None:
    """Measure every size, print and save the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--partitions", type=int, nargs="*", default=SIZES)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--results", default=str(RESULTS))
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    results: list[dict[str, Any]] = []
    for size in options.partitions:
        print_progress(f"measuring {size} partitions")
        load = round(os.getloadavg()[0], 1)
        command = [sys.executable, "-m", "bench.scale", "--one", str(size)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        results.append({**json.loads(answer.stdout), "load_before": load})
        print(json.dumps(results[-1]))
    path = Path(options.results) / "scale.json"
    path.write_text(json.dumps(results, indent=2) + "\n")


def measure(partition_count: int) -> dict[str, Any]:
    """The figures of one size."""
    made = _stream(partition_count)
    open_stream = made.open()
    _produce(made, partition_count)
    plan_seconds, _ = _cpu_of(lambda: plan_run(made.stream, made.kafka, made.ledger))
    first_seconds, _ = _cpu_of(made.run)
    _produce(made, TOUCHED)
    few_seconds, _ = _cpu_of(made.run)
    status_seconds, status = _cpu_of(
        lambda: read_status(made.stream, made.kafka, made.ledger, open_stream.state, made.clock)
    )
    manifest = made.ledger.manifest_at(made.stream.name, 1)
    return {
        "partitions": partition_count,
        "topics": partition_count // PARTITIONS_PER_TOPIC,
        "plan_cpu_seconds": plan_seconds,
        "run_of_all_cpu_seconds": first_seconds,
        "run_of_few_cpu_seconds": few_seconds,
        "status_cpu_seconds": status_seconds,
        "status_json_bytes": len(msgspec.json.encode(status)),
        "manifest_json_bytes": _manifest_bytes(manifest),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _stream(partition_count: int) -> MemoryStream:
    table = TableSettings(key=("id",), columns={"id": "string", "v": "int64"})
    stream = Stream(
        name="scale",
        topics="in-.*",
        machine="table",
        table=table,
        output=OutputSettings(path="memory"),
    )
    made = MemoryStream(stream, stream.table_machine)
    # As on an object store: a run lists nothing, and orphans are left to compact.
    made.files.lists_cheaply = False
    for number in range(partition_count // PARTITIONS_PER_TOPIC):
        made.kafka.create(f"in-{number:05}", PARTITIONS_PER_TOPIC)
    return made


def _produce(made: MemoryStream, partition_count: int) -> None:
    """A snapshot and two updates in each of the first partitions."""
    bodies = [{"type": "snapshot", "rows": [{"id": "a", "v": 0}]}]
    bodies += [{"type": "update", "id": "a", "v": value} for value in (1, 2)]
    contents = [json.dumps(body).encode() for body in bodies]
    for number in range(partition_count):
        topic = f"in-{number // PARTITIONS_PER_TOPIC:05}"
        for content in contents:
            partition = number % PARTITIONS_PER_TOPIC
            made.kafka.produce(topic, f"s{number}", content, partition=partition)


def _manifest_bytes(manifest: Manifest) -> int:
    """A whole manifest before it is compressed."""
    return len(msgspec.json.encode(manifest, enc_hook=str))


def _cpu_of(action: Callable[[], T]) -> tuple[float, T]:
    before_seconds = time.process_time()
    answer = action()
    return round(time.process_time() - before_seconds, 3), answer


if __name__ == "__main__":
    main()
