"""Contenders on the JVM: compiled once from `bench/jvm`, started, warmed up, and started on the work
by a line on their standard input.

A JDK is needed for the Java ones (`javac`); the Scala one is compiled by the compiler inside the
pyspark package.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyspark

from bench.data import BATCH_MESSAGES_MAX, TOPIC, WARM_MESSAGES, WARM_TOPIC
from seriatim import config, context
from seriatim.embedded import jars, java
from seriatim.errors import SeriatimError

SOURCES = Path(__file__).parent / "jvm"
SPARK = Path(pyspark.__file__).parent
MEMORY = "3g"
FROM_SPARK = (
    "parquet-*",
    "hadoop-client-*",
    "zstd-jni-*",
    "jackson-core-*",
    "commons-logging-*",
    "snappy-java-*",
    "jts-core-*",
)
FLINK_OPENS = (
    "java.util",
    "java.lang",
    "java.time",
    "java.net",
    "java.io",
    "java.nio",
    "sun.nio.ch",
)
"""The packages that Flink's own start script opens on Java 17."""


class CannotRunError(Exception):
    """A contender cannot run on this computer; the text says what is missing."""


def flink(folder: Path, kind: str) -> Callable[[], Any]:
    """Flink with state in the heap (`hashmap`) or in RocksDB, in one JVM with as many slots as
    cores.
    """
    settings = config.load_settings()
    path = [*_jars("bench", settings), *_from_spark()]
    classes = compiled(["Rows.java", "FlinkPeer.java"], path)
    opens = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in FLINK_OPENS]
    command = [
        _java(),
        f"-Xmx{MEMORY}",
        *opens,
        "-cp",
        _joined([classes, *path]),
        "FlinkPeer",
        kind,
    ]
    return _started(
        [*command, str(os.cpu_count()), _servers(settings), TOPIC, WARM_TOPIC, str(folder)], folder
    )


def streams(folder: Path, messages: int, output: str) -> Callable[[], Any]:
    """Kafka Streams, as many threads as cores, from topic to topic."""
    settings = config.load_settings()
    path = _jars("bench-streams", settings)
    classes = compiled(["Rows.java", "StreamsPeer.java"], path)
    command = [
        _java(),
        f"-Xmx{MEMORY}",
        "-cp",
        _joined([classes, *path]),
        "StreamsPeer",
        str(os.cpu_count()),
    ]
    counts = [str(messages), str(WARM_MESSAGES), output, f"{output}-warm"]
    return _started([*command, _servers(settings), TOPIC, WARM_TOPIC, str(folder), *counts], folder)


def scala(folder: Path) -> Callable[[], Any]:
    """Spark's flatMapGroupsWithState, in Scala, by spark-submit."""
    settings = config.load_settings()
    path = sorted((SPARK / "jars").glob("*.jar"))
    packed = _packed(compiled(["Rows.java", "SparkPeer.scala"], path))
    own = ",".join(map(str, jars.ensure_jars("spark", settings, print_aside)))
    log = Path(context.__file__).with_name("log4j2.properties").as_uri()
    spark_conf = {
        "spark.master": settings.spark_master,
        "spark.driver.memory": MEMORY,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log}",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    conf_arguments = []
    for name, value in spark_conf.items():
        conf_arguments += ["--conf", f"{name}={value}"]
    command = [
        str(SPARK / "bin" / "spark-submit"),
        *conf_arguments,
        "--jars",
        own,
        "--class",
        "SparkPeer",
        str(packed),
    ]
    return _started(
        [*command, _servers(settings), TOPIC, WARM_TOPIC, str(folder), str(BATCH_MESSAGES_MAX)],
        folder,
    )


def compiled(names: list[str], path: Iterable[Path]) -> Path:
    """A folder with the classes; sources with the same content are compiled once."""
    sources = [SOURCES / name for name in names]
    content = b"".join(source.read_bytes() for source in sources)
    digest = hashlib.sha256(content).hexdigest()[:16]
    folder = config.load_settings().home / "bench" / digest
    if folder.is_dir():
        return folder
    # Compiled into a folder of this process and renamed: an interrupted compilation leaves nothing
    # that looks complete.
    scratch = folder.with_suffix(f".{os.getpid()}")
    scratch.mkdir(parents=True)
    java_files = [str(source) for source in sources if source.suffix == ".java"]
    scala_files = [str(source) for source in sources if source.suffix == ".scala"]
    classes = _joined([scratch, *path])
    _compile(
        [
            _javac(),
            "--release",
            "17",
            "-nowarn",
            "-d",
            str(scratch),
            "-cp",
            classes,
            *java_files,
        ]
    )
    if scala_files:
        compiler = [
            _java(),
            "-cp",
            _joined(path),
            "scala.tools.nsc.Main",
            "-nowarn",
            "-d",
            str(scratch),
        ]
        _compile([*compiler, "-classpath", classes, *scala_files])
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)
    return folder


def _compile(command: list[str]) -> None:
    result = subprocess.run(command, text=True, capture_output=True, check=False)
    if result.returncode:
        output = result.stdout + result.stderr
        raise SystemExit(f"{command[0]} failed:\n{output[-3000:]}")


def _started(command: list[str], folder: Path) -> Callable[[], Any]:
    """Start a process and wait until it is warm. The work begins with our line and ends with its
    DONE.
    """
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )
    assert process.stdin
    assert process.stdout
    printed_lines = process.stdout

    def wait(word: str) -> None:
        for line in printed_lines:
            if line.strip() == word:
                return
        raise SystemExit(f"it ended before it was {word}:\n{(folder / 'log').read_text()[-3000:]}")

    def work() -> Any:
        process.stdin.write("\n")  # type: ignore[union-attr]  # it is a pipe, see above
        process.stdin.flush()  # type: ignore[union-attr]
        wait("DONE")

    wait("READY")
    return work


def _jars(group: str, settings: config.Settings) -> list[Path]:
    try:
        return jars.ensure_jars(group, settings, print_aside)
    except SeriatimError as error:
        raise CannotRunError(f"its JARs could not be fetched: {error.message}") from None


def _from_spark() -> list[Path]:
    """The JARs that Flink needs and the pyspark package has."""
    files: list[Path] = []
    for name in FROM_SPARK:
        files += sorted((SPARK / "jars").glob(f"{name}.jar"))
    return files


def _packed(classes: Path) -> Path:
    packed = classes.with_suffix(".jar")
    if not packed.exists():
        with zipfile.ZipFile(packed, "w") as archive:
            for file in classes.rglob("*.class"):
                archive.write(file, file.relative_to(classes))
    return packed


def _java() -> str:
    return str(java.find_java(config.child_environment()))


def _javac() -> str:
    javac = Path(_java()).resolve().with_name("javac")
    if not javac.exists():
        raise CannotRunError(
            "a JDK is needed to compile it, and only a JRE is here (no javac beside java)"
        )
    return str(javac)


def _servers(settings: config.Settings) -> str:
    return context.kafka_client(settings)["bootstrap.servers"]


def _joined(path: Iterable[Path]) -> str:
    return os.pathsep.join(map(str, path))


def print_aside(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
