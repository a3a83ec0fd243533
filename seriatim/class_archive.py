"""`python -m seriatim.class_archive`: make the archive of the classes with which Spark's JVM starts.

A JVM without it reads, checks and links about 12,000 classes from JARs, which is half of the CPU of
its start. The archive (class data sharing, part of every JDK) has them ready. It is made once per
Java and set of Spark's JARs, takes about 160 MB below SERIATIM_HOME, and is used by the Spark that
our commands and Airflow's task `fold` start on this host. If there is none, or Java refuses it,
everything works the same.

Next: spark_settings.py has the other options of the JVM; context.py and airflow/fold.py start it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from seriatim import config
from seriatim.config import Settings
from seriatim.embedded import java
from seriatim.errors import SeriatimError

if TYPE_CHECKING:
    import pyarrow as pa

    from seriatim.engine.offsets import OffsetRange, Partition

QUIET = "-Xlog:cds*=off"
"""Java prints warnings about classes that it leaves out, and about an archive that does not fit."""
SAMPLE_MESSAGES = 4


def java_options(settings: Settings) -> str:
    """Options with which a JVM uses the archive; empty if there is none."""
    archive = archive_path(settings)
    if archive is None or not archive.exists():
        return ""
    return f'"-XX:SharedArchiveFile={archive}" {QUIET}'


def archive_path(settings: Settings) -> Path | None:
    """Where the archive is for this Java and these JARs; None if this Java can have none."""
    java_program = java.find_java(config.child_environment()).resolve()
    java_library = java_program.parent.parent / "lib" / "server"
    # An archive builds upon the one of Java's own classes, which some builds of Java lack.
    base_archive = java_library / "classes.jsa"
    java_machine = java_library / "libjvm.so"
    package = importlib.util.find_spec("pyspark")
    if package is None or package.origin is None:
        return None
    if not (base_archive.exists() and java_machine.exists()):
        return None
    jars_folder = Path(package.origin).parent / "jars"
    # Two digests: archives with the same places and other files are of an earlier installation.
    places = blake2b(f"{java_program} {jars_folder}".encode(), digest_size=8)
    installation = blake2b(digest_size=8)
    for file in (java_machine, base_archive, *sorted(jars_folder.glob("*.jar"))):
        status = file.stat()
        installation.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    name = f"spark-{places.hexdigest()}-{installation.hexdigest()}.jsa"
    return settings.home / "java" / name


def make_archive(settings: Settings, print_line: Callable[[str], None]) -> None:
    """Make the archive if it is missing: start Spark, let it do what a run lets it do, and let the
    JVM write down the classes that it has loaded.
    """
    archive = archive_path(settings)
    if archive is None:
        print_line("this Java has no archive of its own classes: Spark starts without one")
        return
    if archive.exists():
        return
    print_line("making the archive of Spark's classes, about half a minute")
    archive.parent.mkdir(parents=True, exist_ok=True)
    # A JVM must never find half an archive: it does not refuse one, it crashes.
    unfinished = archive.with_suffix(f".{os.getpid()}")
    # The classes are those of a driver on this host, wherever the user's Spark runs.
    here = replace(settings, spark_master="local[2]", spark_remote="")
    try:
        has_ended_well = _write_archive(here, unfinished, print_line)
        if has_ended_well and unfinished.exists():
            # Without this the name may survive a power cut, and the content not.
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.rename(archive)
            _delete_earlier_archives(archive)
        else:
            print_line("Java wrote no archive: Spark starts without one")
    finally:
        unfinished.unlink(missing_ok=True)


def _delete_earlier_archives(archive: Path) -> None:
    """Delete the archives of earlier versions of this Java and these JARs, which no JVM takes any more.
    One that runs with such an archive keeps it open.
    """
    of_these_places, _, _ = archive.stem.rpartition("-")
    for earlier in archive.parent.glob(f"{of_these_places}-*.jsa"):
        if earlier != archive:
            earlier.unlink(missing_ok=True)


def _write_archive(settings: Settings, path: Path, print_line: Callable[[str], None]) -> bool:
    """Run a query, and end the JVM in an orderly way: it writes the archive when it ends. False if a
    signal ended it.
    """
    from pyspark import SparkContext

    from seriatim import context
    from seriatim.engine.offsets import Bounds, Partition
    from seriatim.kafka.spark_reader import TaskReader
    from seriatim.ports import Source

    partition = Partition("sample", 0)
    options = {"spark.driver.defaultJavaOptions": f'"-XX:ArchiveClassesAtExit={path}" {QUIET}'}
    spark = context.spark_session("class archive", settings, print_line, options)
    reader = TaskReader(
        spark, _no_messages, lambda: {partition: Bounds("sample", 0, SAMPLE_MESSAGES)}
    )

    def on_slice(_: object, source: Source) -> bool:
        source.map(_fold_nothing)
        return True

    try:
        reader.read_slices({partition: 0}, SAMPLE_MESSAGES // 2, on_slice)
    finally:
        process = SparkContext._gateway.proc
        context.end_spark_session(spark)
        process.stdin.close()
        exit_code: int = process.wait()
    return exit_code >= 0


def _no_messages(_: Partition, __: OffsetRange, ___: bool) -> Iterator[pa.RecordBatch]:
    """A range in which no message is left."""
    return iter(())


def _fold_nothing(_: Partition, __: OffsetRange, ___: Iterable[pa.RecordBatch]) -> bytes:
    return b""


def _print_to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main() -> None:
    """Make the archive. Nothing needs it, so setting up goes on without: on a full disk, in a home
    that cannot be written.
    """
    try:
        make_archive(config.load_settings(), _print_to_stderr)
    except (SeriatimError, OSError) as error:
        _print_to_stderr(f"no archive of Spark's classes: {error}")


if __name__ == "__main__":
    main()
