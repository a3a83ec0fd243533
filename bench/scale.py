"""What grows with the number of partitions: the driver's side of a run, with everything outside in memory,
and the page of a stream.

    python -m bench.scale
    python -m bench.scale --partitions 1000 10000

Each size runs in a process of its own. A stream has 20 partitions in each topic and 3 messages in each
partition. Measured are the CPU of a plan, of a run that touches ten partitions (Kafka, files and Delta cost
nothing here), of a status, the bytes of the status as JSON, and the most memory of the process. The page of a stream
is read from real files, in another process, as the web server does it.
Results: results/scale.json; what they mean: docs/SCALE.md.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.check import first_change
from bench.growth import commit_slice, create_stream
from bench.run import RESULTS, print_progress
from seriatim import context
from seriatim.clock import WallClock
from seriatim.engine.offsets import Partition
from seriatim.ledger.commit import start_ledger
from seriatim.ledger.manifests import Manifest
from seriatim.operations.plan import plan_run
from seriatim.operations.status import read_status
from seriatim.stream import OutputSettings, Stream, TableSettings
from seriatim.testing import MemoryStream
from seriatim.web.read import HISTORY, PageReader
from seriatim.web.views import render_stream_page

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
    parser.add_argument("--one-page", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--results", default=str(RESULTS))
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    if options.one_page:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure_pages(Path(folder), options.one_page)))
        return
    results: list[dict[str, Any]] = []
    for size in options.partitions:
        print_progress(f"measuring {size} partitions")
        load = round(os.getloadavg()[0], 1)
        figures = _run_alone("--one", size)
        page_load = round(os.getloadavg()[0], 1)
        page_figures = _run_alone("--one-page", size)
        loads = {"load_before": load, "page_load_before": page_load}
        results.append({**figures, **page_figures, **loads})
        print(json.dumps(results[-1]))
    path = Path(options.results) / "scale.json"
    path.write_text(json.dumps(results, indent=2) + "\n")


def _run_alone(option: str, size: int) -> dict[str, Any]:
    """Measure in a process of its own, whose most memory is that of one size alone."""
    command = [sys.executable, "-m", "bench.scale", option, str(size)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(answer.stdout)
    return figures


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
        "peak_memory_bytes": _peak_memory_bytes(),
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


def measure_pages(folder: Path, partition_count: int) -> dict[str, Any]:
    """The page of a stream, from real files: its last entries touched ten partitions each. Some partial
    manifests stand between two whole ones, as in a real stream.
    """
    file = create_stream(folder)
    store = context.ledger(file, with_schema=True)
    clock = WallClock()
    partitions = [Partition("bench", number) for number in range(partition_count)]
    start_ledger(store, clock, "s", "first", tuple(map(first_change, partitions)))
    for turn in range(HISTORY):
        commit_slice(file, store, clock, turn, partitions[:TOUCHED])
    reader = PageReader(Path(file.folder), time.time)
    # The first page of a process loads the templates.
    render_stream_page("/", reader.stream_history("s"), time.time())
    read_seconds, history = _cpu_of(lambda: reader.stream_history("s"))
    render_seconds, page = _cpu_of(lambda: render_stream_page("/", history, time.time()))
    return {
        "page_read_cpu_seconds": read_seconds,
        "page_render_cpu_seconds": render_seconds,
        "page_bytes": len(page.encode()),
        "page_peak_memory_bytes": _peak_memory_bytes(),
    }


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _manifest_bytes(manifest: Manifest) -> int:
    """A whole manifest before it is compressed."""
    return len(msgspec.json.encode(manifest, enc_hook=str))


def _cpu_of(action: Callable[[], T]) -> tuple[float, T]:
    before_seconds = time.process_time()
    answer = action()
    return round(time.process_time() - before_seconds, 3), answer


if __name__ == "__main__":
    main()
