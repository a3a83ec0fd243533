"""Contenders on the JVM: compiled once from `bench/jvm`, started, warmed up, and told when to
begin.

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

from bench.data import AT_ONCE, TOPIC, WARM_MESSAGES, WARM_TOPIC
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
"""What Flink's own start script opens to it on Java 17."""


class CannotRunError(Exception):
    """A contender that this machine has not got the means for; the text says which."""


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
    given = {
        "spark.master": settings.spark_master,
        "spark.driver.memory": MEMORY,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log}",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    conf = [part for name, value in given.items() for part in ("--conf", f"{name}={value}")]
    command = [
        str(SPARK / "bin" / "spark-submit"),
        *conf,
        "--jars",
        own,
        "--class",
        "SparkPeer",
        str(packed),
    ]
    return _started(
        [*command, _servers(settings), TOPIC, WARM_TOPIC, str(folder), str(AT_ONCE)], folder
    )


def compiled(names: list[str], path: Iterable[Path]) -> Path:
    """A folder with the classes; made once for one content."""
    content = b"".join((SOURCES / name).read_bytes() for name in names)
    place = config.load_settings().home / "bench" / hashlib.sha256(content).hexdigest()[:16]
    if place.is_dir():
        return place
    scratch = place.with_suffix(f".{os.getpid()}")
    scratch.mkdir(parents=True)
    files = {
        end: [str(SOURCES / name) for name in names if name.endswith(end)]
        for end in (".java", ".scala")
    }
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
            *files[".java"],
        ]
    )
    if files[".scala"]:
        compiler = [
            _java(),
            "-cp",
            _joined(path),
            "scala.tools.nsc.Main",
            "-nowarn",
            "-d",
            str(scratch),
        ]
        _compile([*compiler, "-classpath", classes, *files[".scala"]])
    shutil.rmtree(place, ignore_errors=True)
    scratch.rename(place)
    return place


def _compile(command: list[str]) -> None:
    ended = subprocess.run(command, text=True, capture_output=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{command[0]} failed:\n{(ended.stdout + ended.stderr)[-3000:]}")


def _started(command: list[str], folder: Path) -> Callable[[], Any]:
    """Start it, wait until it is warm; the work is from our word to its own."""
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )
    assert process.stdin
    assert process.stdout
    said = process.stdout

    def wait(word: str) -> None:
        for line in said:
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
    return [file for name in FROM_SPARK for file in sorted((SPARK / "jars").glob(f"{name}.jar"))]


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
    found = Path(_java()).resolve().with_name("javac")
    if not found.exists():
        raise CannotRunError(
            "a JDK is needed to compile it, and only a JRE is here (no javac beside java)"
        )
    return str(found)


def _servers(settings: config.Settings) -> str:
    return context.kafka_client(settings)["bootstrap.servers"]


def _joined(path: Iterable[Path]) -> str:
    return os.pathsep.join(map(str, path))


def print_aside(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
