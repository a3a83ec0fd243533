"""Contenders, each run in a process of its own: `python -m bench.contenders NAME FOLDER MESSAGES
BROKER_DATA`.

Start-up and a warm-up on a small topic of its own are measured apart. The figure is the work: CPU
seconds of the whole process tree, wall seconds and peak memory (PSS). Afterwards, and not measured,
the records are read again: all contenders must give the same ones. Prints one JSON line; a
contender that cannot run here prints the reason instead.

Next: java_peers.py, spark_peers.py and quix.py have the peers; answer.py compares the records.
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
from bench.data import BATCH_MESSAGES_MAX, MESSAGE_BYTES, PARTITIONS, TOPIC, WARM_TOPIC
from bench.java_peers import CannotRunError
from bench.meter import Meter
from seriatim import config, context, stream_files
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.kafka.sending import create_topics
from seriatim.kafka.spark_reader import KAFKA_COLUMNS, SparkReader
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
READ_BY_SPARK = """[slice]
read = "spark"
"""
"""Spark's own Kafka source in place of the default."""
QUIX_LOCK = Path(__file__).parent / "quix.lock"


class ContenderRun(Struct):
    """Where a contender works, and on how many messages."""

    folder: Path
    messages: int
    broker: Path
    """The folder of the broker's data."""
    output: str = ""
    """A topic that no other run writes to."""


class WarmContender(Struct):
    """A contender that is warm: its work, and functions that look at the records afterwards."""

    work: Callable[[], Any]
    answer: Callable[[], dict[str, Any]]
    output_bytes: Callable[[], int]


def floor(run: ContenderRun) -> WarmContender:
    """Spark reads the same ranges with the same fetch settings and writes them to Parquet
    untouched.
    """
    settings = config.load_settings()
    spark = context.spark_session("floor", settings, silent)
    output_folder = run.folder / "out"

    def copy(topic: str, folder: Path) -> None:
        reader, ranges = _reader(spark, settings, topic)
        messages = reader.read_ranges(ranges, ReadOptions(average_message_bytes=MESSAGE_BYTES))
        frame = messages.frame.select(*KAFKA_COLUMNS)
        frame.write.option("compression", "zstd").parquet(str(folder))

    def answer_of_floor() -> dict[str, Any]:
        rows = [pq.read_metadata(file).num_rows for file in output_folder.glob("*.parquet")]
        return {"messages": sum(rows)}

    copy(WARM_TOPIC, run.folder / "warm")
    return WarmContender(
        lambda: copy(TOPIC, output_folder),
        answer_of_floor,
        lambda: answer.folder_bytes(output_folder, "*.parquet"),
    )


def ours(run: ContenderRun, stream_text: str, column_names: dict[str, str]) -> WarmContender:
    """Seriatim, all integrity checks on, from discovery to the commit."""
    (run.folder / "streams").mkdir(exist_ok=True)
    environment = {**config.child_environment(), "SERIATIM_STREAMS": str(run.folder)}
    settings = config.load_settings(environment)
    # The warm-up starts Spark; the work goes on with the same session.
    warm_spark: Any = None

    def fold(topic: str, output: Path) -> None:
        nonlocal warm_spark
        text = stream_text.replace("TOPIC", topic).replace("OUT", str(output))
        (run.folder / f"{output.name}.toml").write_text(text)
        file = stream_files.load_stream(output.name, settings.streams)
        open_stream = context.open_for_fold(file, settings, silent)
        open_stream.spark.spark = warm_spark
        outcome = FoldRun(open_stream).run(BATCH_MESSAGES_MAX)
        warm_spark = open_stream.spark.spark
        if outcome.findings:
            raise SystemExit(
                f"the data is not in order, so the figures mean nothing: {outcome.findings[0]}"
            )

    fold(WARM_TOPIC, run.folder / "warm")
    output_folder = run.folder / "out"
    records = output_folder / "records"
    return WarmContender(
        lambda: fold(TOPIC, output_folder),
        lambda: answer.of_files(records, "**/*.parquet", column_names),
        lambda: answer.folder_bytes(records, "**/*.parquet"),
    )


def spark_python(run: ContenderRun, operator: str) -> WarmContender:
    """One of Spark's own stateful operators in Python."""
    from bench.spark_peers import peer

    return _with_files(run, peer(run.folder, operator))


def quix(run: ContenderRun) -> WarmContender:
    """Quix Streams: a process per core, in one consumer group."""
    from bench.quix import QUIET_SECONDS

    python = quix_python()
    servers = _create_output_topics(run)
    log_path = run.folder / "log"

    def fold(topic: str, output: str, process_count: int) -> dict[str, float]:
        program = [python, str(Path(__file__).parent / "quix.py"), servers, topic, output]
        processes = []
        with log_path.open("w") as log:
            for number in range(process_count):
                command = [*program, str(run.folder / f"{output}-{number}")]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        exit_codes = [process.wait() for process in processes]
        if any(exit_codes):
            raise SystemExit(log_path.read_text()[-3000:])
        return {"waited_seconds": QUIET_SECONDS}

    fold(WARM_TOPIC, f"{run.output}-warm", 1)
    return _with_topic(run, lambda: fold(TOPIC, run.output, os.cpu_count() or 1), servers)


def kafka_streams(run: ContenderRun) -> WarmContender:
    """Kafka Streams: from topic to topic, with a state store."""
    servers = _create_output_topics(run)
    work = java_peers.streams(run.folder, run.messages, run.output)
    return _with_topic(run, work, servers)


def spark_scala(run: ContenderRun) -> WarmContender:
    """Spark's stateful operator in Scala."""
    return _with_files(run, java_peers.scala(run.folder))


def flink(run: ContenderRun, state_backend: str) -> WarmContender:
    """Flink with one of its state backends."""
    return _with_files(run, java_peers.flink(run.folder, state_backend))


CONTENDERS: dict[str, Callable[[ContenderRun], WarmContender]] = {
    "floor": floor,
    "table": lambda run: ours(run, TABLE, answer.OUR_COLUMN_NAMES),
    "machine": lambda run: ours(run, MACHINE, {}),
    "table-spark": lambda run: ours(run, TABLE + READ_BY_SPARK, answer.OUR_COLUMN_NAMES),
    "machine-spark": lambda run: ours(run, MACHINE + READ_BY_SPARK, {}),
    "spark-apply": lambda run: spark_python(run, "apply"),
    "spark-transform": lambda run: spark_python(run, "transform"),
    "spark-scala": spark_scala,
    "flink-heap": lambda run: flink(run, "hashmap"),
    "flink-rocksdb": lambda run: flink(run, "rocksdb"),
    "kafka-streams": kafka_streams,
    "quix": quix,
}


def quix_python() -> str:
    """The Python of Quix's own environment, which is installed from its lock file if missing."""
    environment = config.load_settings().home / "bench" / "quix"
    python = environment / "bin" / "python"
    if (environment / ".ready").exists():
        return str(python)
    uv = str(Path(sys.executable).with_name("uv"))
    steps = [
        [uv, "venv", "--clear", str(environment), "--quiet"],
        [uv, "pip", "sync", "--python", str(python), str(QUIX_LOCK), "--quiet"],
    ]
    for command in steps:
        result = subprocess.run(command, text=True, capture_output=True, check=False)
        if result.returncode:
            raise CannotRunError(f"it could not be installed: {result.stderr.strip()[-300:]}")
    (environment / ".ready").touch()
    return str(python)


def _create_output_topics(run: ContenderRun) -> str:
    """Create the topics that a contender writes to; the broker's address."""
    servers = context.kafka_client(config.load_settings())["bootstrap.servers"]
    topics = {run.output: PARTITIONS, f"{run.output}-warm": PARTITIONS}
    create_topics({"bootstrap.servers": servers}, topics)
    return servers


def _with_files(run: ContenderRun, work: Callable[[], Any]) -> WarmContender:
    """A contender that writes Parquet files, as Spark and Flink name them."""
    records = run.folder / "out" / "records"
    return WarmContender(
        work,
        lambda: answer.of_files(records, "**/part-*"),
        lambda: answer.folder_bytes(records, "**/part-*"),
    )


def _with_topic(run: ContenderRun, work: Callable[[], Any], servers: str) -> WarmContender:
    """A contender that writes to a topic; its size is that of the broker's log files."""
    log_files = f"**/{run.output}-[0-9]*/*.log"
    return WarmContender(
        work,
        lambda: answer.of_topic(servers, run.output, PARTITIONS),
        lambda: answer.folder_bytes(run.broker, log_files),
    )


def _reader(
    spark: Any, settings: config.Settings, topic: str
) -> tuple[SparkReader, dict[Partition, OffsetRange]]:
    """Spark's reader, and the range of all messages of each partition."""
    from seriatim.kafka.log import KafkaLog

    client = context.kafka_client(settings)
    ranges: dict[Partition, OffsetRange] = {}
    for partition, bounds in KafkaLog(client).bounds(topic).items():
        ranges[partition] = OffsetRange(0, bounds.log_end)
    reader = SparkReader(spark, {**client, "isolation.level": "read_committed"})
    return reader, ranges


def silent(_: str) -> None:
    """Print nothing."""


def main(name: str, folder: str, messages: str, broker: str) -> None:
    """Warm up, measure, read the answer, print."""
    output_topic = f"out-{name}-{uuid.uuid4().hex[:8]}"
    run = ContenderRun(Path(folder), int(messages), Path(broker), output_topic)
    try:
        contender = CONTENDERS[name](run)
    except CannotRunError as reason:
        print(json.dumps({"cannot_run": str(reason)}), flush=True)
        return
    measurement = Meter().measure(contender.work)
    del measurement["result"], measurement["seen_cpu_seconds"]
    measurement["output_bytes"] = contender.output_bytes()
    measurement["answer"] = contender.answer()
    print(json.dumps(measurement), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    # JVMs below end with their pipe. An orderly end would wait for them, and all is printed.
    os._exit(0)
