"""Contenders, each run in a process of its own: `python -m bench.contenders NAME FOLDER MESSAGES
BROKER_DATA`.

Start-up and a warm-up on a small topic of its own are measured apart; the figure is the work: CPU
seconds of the whole process tree, wall seconds and peak memory (PSS). Afterwards, and not measured,
the records are read again: everybody must give the same ones. Prints one JSON line; a contender
that cannot run here says why instead.

Next room: java_peers.py, spark_peers.py and quix.py have the peers; answer.py the records.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from msgspec import Struct

from bench import answer, java_peers
from bench.data import MESSAGE_BYTES, PARTITIONS, TOPIC, WARM_TOPIC
from bench.java_peers import CannotRunError
from bench.meter import Meter
from seriatim import config, context, stream_files
from seriatim.demo.producer import create_topics
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.kafka.spark_reader import MESSAGE_COLUMNS, SparkReader
from seriatim.operations.run import FoldRun
from seriatim.ports import ReadOptions

TABLE = """
topics = "TOPIC"
machine = "table"
sequence = "seq"
[table]
key = ["id"]
columns = { id = "string", price = "float64", size = "int64" }
[output]
path = "OUT"
"""
MACHINE = """
topics = "TOPIC"
machine = "bench.machine:Rows"
sequence = "seq"
[output]
path = "OUT"
"""
READ = """[slice]
read = "{}"
"""
"""Ours as the documents advise it for large streams (`task`), and as it is by default, through
Spark's own source.
"""
QUIX_LOCK = Path(__file__).parent / "quix.lock"


class Run(Struct):
    """Where a contender works, and on how much."""

    folder: Path
    messages: int
    broker: Path
    """The broker's data."""
    output: str = ""
    """A topic that nobody else writes to."""


class Ready(Struct):
    """A contender that is warm: its work, then how to look at what it made."""

    work: Callable[[], Any]
    answer: Callable[[], dict[str, Any]]
    output_bytes: Callable[[], int]


def floor(run: Run) -> Ready:
    """Spark reads the same ranges with the same fetch settings and writes them to Parquet
    untouched.
    """
    settings = config.load_settings()
    spark = context.spark_session("floor", settings, silent)
    out = run.folder / "out"

    def copy(topic: str, to: Path) -> None:
        reader, ends = _reader(spark, settings, topic)
        frame = reader.read_ranges(
            ends, ReadOptions(average_message_bytes=MESSAGE_BYTES)
        ).frame.select(*MESSAGE_COLUMNS)
        frame.write.option("compression", "zstd").parquet(str(to))

    copy(WARM_TOPIC, run.folder / "warm")
    count = lambda: sum(pq.read_metadata(file).num_rows for file in out.glob("*.parquet"))  # noqa: E731
    return Ready(
        lambda: copy(TOPIC, out),
        lambda: {"messages": count()},
        lambda: answer.folder_bytes(out, "*.parquet"),
    )


def ours(run: Run, text: str, names: dict[str, str]) -> Ready:
    """Seriatim, all integrity checks on, from discovery to the commit."""
    (run.folder / "streams").mkdir(exist_ok=True)
    out, settings = (
        run.folder / "out",
        config.load_settings({**config.child_environment(), "SERIATIM_STREAMS": str(run.folder)}),
    )
    spark: list[Any] = [None]

    def fold(topic: str, to: Path) -> None:
        (run.folder / f"{to.name}.toml").write_text(
            text.replace("TOPIC", topic).replace("OUT", str(to))
        )
        file = stream_files.load_stream(to.name, settings.streams)
        reader = context.LazySpark(file, settings, silent)
        reader.spark = spark[0]
        world = context.fold_context(file, settings, reader)
        outcome = FoldRun(file.stream, stream_files.load_runner(file), world).run(
            file.stream.slice.messages_max
        )
        spark[0] = reader.spark
        if outcome.findings:
            raise SystemExit(
                f"the data is not in order, so the figures mean nothing: {outcome.findings[0]}"
            )

    fold(WARM_TOPIC, run.folder / "warm")
    records = out / "records"
    return Ready(
        lambda: fold(TOPIC, out),
        lambda: answer.of_files(records, "**/*.parquet", names),
        lambda: answer.folder_bytes(records, "**/*.parquet"),
    )


def spark_python(run: Run, way: str) -> Ready:
    """Spark's own stateful operators in Python."""
    from bench.spark_peers import peer

    return _of_files(run, peer(run.folder, way))


def quix(run: Run) -> Ready:
    """Quix Streams: a process per core, in one group."""
    from bench.quix import QUIET_SECONDS

    python, servers = (
        quix_python(),
        context.kafka_client(config.load_settings())["bootstrap.servers"],
    )
    create_topics(
        {"bootstrap.servers": servers}, {run.output: PARTITIONS, f"{run.output}-warm": PARTITIONS}
    )

    def fold(topic: str, output: str, processes: int) -> dict[str, float]:
        log = (run.folder / "log").open("w")
        program = [python, str(Path(__file__).parent / "quix.py"), servers, topic, output]
        started = [
            subprocess.Popen([*program, str(run.folder / f"{output}-{n}")], stdout=log, stderr=log)
            for n in range(processes)
        ]
        if sum(process.wait() for process in started):
            raise SystemExit((run.folder / "log").read_text()[-3000:])
        return {"waited_seconds": QUIET_SECONDS}

    fold(WARM_TOPIC, f"{run.output}-warm", 1)
    return _of_topic(run, lambda: fold(TOPIC, run.output, os.cpu_count() or 1), servers)


def kafka_streams(run: Run) -> Ready:
    """Kafka Streams: state store → topic."""
    servers = context.kafka_client(config.load_settings())["bootstrap.servers"]
    create_topics(
        {"bootstrap.servers": servers}, {run.output: PARTITIONS, f"{run.output}-warm": PARTITIONS}
    )
    return _of_topic(run, java_peers.streams(run.folder, run.messages, run.output), servers)


CONTENDERS: dict[str, Callable[[Run], Ready]] = {
    "floor": floor,
    "table": lambda run: ours(run, TABLE + READ.format("task"), answer.OURS),
    "machine": lambda run: ours(run, MACHINE + READ.format("task"), {}),
    "table-spark": lambda run: ours(run, TABLE + READ.format("spark"), answer.OURS),
    "machine-spark": lambda run: ours(run, MACHINE + READ.format("spark"), {}),
    "spark-apply": lambda run: spark_python(run, "apply"),
    "spark-transform": lambda run: spark_python(run, "transform"),
    "spark-scala": lambda run: _of_files(run, java_peers.scala(run.folder)),
    "flink-heap": lambda run: _of_files(run, java_peers.flink(run.folder, "hashmap")),
    "flink-rocksdb": lambda run: _of_files(run, java_peers.flink(run.folder, "rocksdb")),
    "kafka-streams": kafka_streams,
    "quix": quix,
}


def quix_python() -> str:
    """Quix's own environment under the home, made from its lock when there is none."""
    home = config.load_settings().home / "bench" / "quix"
    python = home / "bin" / "python"
    if not (home / ".ready").exists():
        uv = str(Path(sys.executable).with_name("uv"))
        for step in (
            ["venv", "--clear", str(home)],
            ["pip", "sync", "--python", str(python), str(QUIX_LOCK)],
        ):
            ended = subprocess.run(
                [uv, *step, "--quiet"], text=True, capture_output=True, check=False
            )
            if ended.returncode:
                raise CannotRunError(f"it could not be installed: {ended.stderr.strip()[-300:]}")
        (home / ".ready").touch()
    return str(python)


def _of_files(run: Run, work: Callable[[], Any]) -> Ready:
    records = run.folder / "out" / "records"
    return Ready(
        work,
        lambda: answer.of_files(records, "**/part-*"),
        lambda: answer.folder_bytes(records, "**/part-*"),
    )


def _of_topic(run: Run, work: Callable[[], Any], servers: str) -> Ready:
    files = f"**/{run.output}-[0-9]*/*.log"
    return Ready(
        work,
        lambda: answer.of_topic(servers, run.output, PARTITIONS),
        lambda: answer.folder_bytes(run.broker, files),
    )


def _reader(
    spark: Any, settings: config.Settings, topic: str
) -> tuple[SparkReader, dict[Partition, OffsetRange]]:
    from seriatim.kafka.log import KafkaLog

    client = context.kafka_client(settings)
    bounds = KafkaLog(client).bounds(topic)
    ends = {place: OffsetRange(0, seen.log_end) for place, seen in bounds.items()}
    return SparkReader(spark, {**client, "isolation.level": "read_committed"}), ends


def silent(_: str) -> None:
    """Nobody listens."""


def main(name: str, folder: str, messages: str, broker: str) -> None:
    """Warm up, measure, look at the answer."""
    run = Run(Path(folder), int(messages), Path(broker), f"out-{name}-{uuid.uuid4().hex[:8]}")
    try:
        ready = CONTENDERS[name](run)
    except CannotRunError as reason:
        print(json.dumps({"cannot_run": str(reason)}), flush=True)
        return
    measured = Meter().measure(ready.work)
    del measured["found"], measured["seen_cpu_seconds"]
    print(
        json.dumps({**measured, "output_bytes": ready.output_bytes(), "answer": ready.answer()}),
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # JVMs below end with their pipe; nothing is left to be said
