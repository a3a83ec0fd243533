"""What the ways of handing out ranges cost beside the fold: a query's start, and a batch.

    python -m bench.batches --rounds 3

The task of these measurements counts messages and does nothing else. A restart after a halt is the
start of one more query. `query`: our source under Trigger.AvailableNow, the default. `cut`: slices cut
by the driver, as for Spark Connect. `spark`: Spark's own Kafka source. Saved in results/batches.json.

Next: seriatim/kafka/spark_reader.py has the readers; docs/PERFORMANCE.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from bench.data import PARTITIONS, TOPIC, produce
from bench.growth import current_load
from bench.meter import Meter
from bench.run import RESULTS, print_progress, temporary_broker
from seriatim import config, context
from seriatim.engine.offsets import OffsetRange, Partition, Ranges
from seriatim.kafka import client
from seriatim.kafka.log import KafkaLog
from seriatim.kafka.spark_reader import SparkReader, TaskReader
from seriatim.kafka.task_reader import KafkaRangeReader
from seriatim.ports import Source
from seriatim.stream import Stream, parse_stream

MESSAGES = 8_000
BATCHES = 10
READERS = ("query", "cut", "spark")


def count_messages(_: Partition, __: OffsetRange, batches: Iterable[Any]) -> bytes:
    """A task that counts."""
    return str(sum(batch.num_rows for batch in batches)).encode()


def measure(servers: str, reader_name: str) -> dict[str, float]:
    """CPU seconds of one query with one batch, and of each further batch, on a warm Spark."""
    stream = _stream(reader_name)
    settings = config.load_settings()
    spark = context.spark_session("batches", settings, print_progress, streams=[stream])
    kafka = {"bootstrap.servers": servers}
    log = KafkaLog(kafka)
    reader: SparkReader | TaskReader
    if reader_name == "spark":
        java_settings = client.java_settings({**kafka, "isolation.level": "read_committed"})
        reader = SparkReader(spark, java_settings)
    else:
        reader = TaskReader(
            spark,
            KafkaRangeReader(kafka),
            lambda: log.bounds(TOPIC),
            has_queries=reader_name == "query",
        )

    def read(batch_count: int) -> None:
        counted = 0

        def on_slice(_: Ranges, source: Source) -> bool:
            nonlocal counted
            counted += sum(map(int, source.map(count_messages)))
            return True

        starts = {Partition(TOPIC, number): 0 for number in range(PARTITIONS)}
        reader.read_slices(starts, MESSAGES // batch_count, on_slice)
        if counted != MESSAGES:
            raise SystemExit(f"{counted} of {MESSAGES} messages were read")

    first = Meter().measure(lambda: read(1))
    for _ in range(3):
        read(BATCHES)
    one = Meter().measure(lambda: [read(1) for _ in range(3)])
    many = Meter().measure(lambda: [read(BATCHES) for _ in range(3)])
    figures = {}
    for unit in ("cpu_seconds", "wall_seconds"):
        figures[f"first_{unit}"] = first[unit]
        figures[f"query_{unit}"] = one[unit] / 3
        figures[f"batch_{unit}"] = (many[unit] - one[unit]) / 3 / (BATCHES - 1)
    context.end_spark_session(spark)
    return figures


def _stream(reader_name: str) -> Stream:
    """A stream file with which Spark is started as for a run."""
    values: dict[str, Any] = {
        "topics": TOPIC,
        "machine": "table",
        "table": {"key": ["id"], "columns": {"id": "string"}},
        "output": {"path": "out"},
    }
    if reader_name == "spark":
        values["slice"] = {"read": "spark"}
    return parse_stream("batches", values, "batches.toml")


def measure_apart(servers: str, reader_name: str) -> dict[str, float]:
    """The same in a process of its own: the broker's CPU does not count."""
    command = [sys.executable, "-m", "bench.batches", "--servers", servers, "--one", reader_name]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def summarize(rounds: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Best and median of each figure."""
    summary = {}
    for name in rounds[0]:
        values = [figures[name] for figures in rounds]
        summary[name] = {"best": round(min(values), 3), "median": round(median(values), 3)}
    return summary


def main() -> None:
    """Measure the readers by turns, save and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", default="")
    parser.add_argument("--one", choices=READERS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.servers, options.one)))
        return
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in READERS}
    with temporary_broker() as (_, servers):
        produce(servers, MESSAGES)
        for _ in range(options.rounds):
            for name in READERS:
                measured[name].append(measure_apart(servers, name))
                print_progress(f"{name}: {measured[name][-1]}")
    results: dict[str, Any] = {name: summarize(rounds) for name, rounds in measured.items()}
    results["load"] = current_load()
    (RESULTS / "batches.json").write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
