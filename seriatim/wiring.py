"""Wiring: joins the steps to the real adapters. An edge, used by the command line and spark_apps.

Heavy imports are inside the functions: `seriatim --help` and DAG files must not pay for them.

Next room: cli/run.py.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from seriatim import client, config, streams, tables
from seriatim.config import Settings
from seriatim.core.errors import ConfigError
from seriatim.core.offsets import Partition
from seriatim.embedded.java_noise import quiet_java
from seriatim.ports import NO_WISH, Wish
from seriatim.streams import StreamFile

Say = Callable[[str], None]
current, derived = tables.current, tables.derived
"""The tables that follow the ledger; they have a room of their own."""

if TYPE_CHECKING:
    import pyarrow as pa

    from seriatim.adapters.ask import KafkaRequests
    from seriatim.adapters.delta import DeltaLedger
    from seriatim.adapters.join import ParquetJoiner
    from seriatim.adapters.kafka import KafkaLog
    from seriatim.adapters.mail import SmtpNotifier
    from seriatim.adapters.outbox import DiskOutbox
    from seriatim.adapters.parquet import ParquetRecords
    from seriatim.adapters.spark import SparkReader, TaskReader
    from seriatim.adapters.state import ParquetState
    from seriatim.core.holes import Piece
    from seriatim.core.ledger import Ledger
    from seriatim.core.offsets import OffsetRange
    from seriatim.core.slice import Ranges
    from seriatim.core.stream import Stream
    from seriatim.ports import Explain, OnSlice, Source
    from seriatim.steps.accept import Means
    from seriatim.steps.fold import World
    from seriatim.steps.task import Kit, Work


class FoldTask(Struct):
    """Step 4 where the messages are: pickled to the worker, where it loads the machine."""

    file: StreamFile
    works: dict[Partition, Any]
    kafka: dict[str, str] = {}
    """Client settings, for what the fold itself asks Kafka: why offsets are missing."""
    crash_point: str = ""
    driver: int = 0
    """The driver's process, which a crash point takes along."""
    trace: tuple[str, ...] = ()
    """Sessions that are traced beside the fold."""

    def __call__(self, partition: Partition, batches: Iterable[pa.RecordBatch]) -> bytes:
        """Fold one partition's batches."""
        import gc

        from pyspark import TaskContext

        from seriatim.adapters.arrow import stretches
        from seriatim.spread.fold import spread
        from seriatim.steps.task import run_task

        config.arm_crash_point(self.crash_point, self.driver)
        context = TaskContext.get()
        number = context.taskAttemptId() if context else 0
        work: Work = self.works[partition]
        work = replace(work, attempt=f"{work.attempt}-{number}")
        gc.disable()
        try:
            made = kit(self.file, self.kafka, work.end - work.start)
            with spread(self.file, work, made) as ready:
                if self.trace:
                    return self._traced(work, stretches(batches), ready)
                return run_task(work, stretches(batches), ready)
        finally:
            gc.enable()

    def _traced(self, work: Work, given: Iterable[Any], ready: Kit) -> bytes:
        """The same, with named sessions looked at on the way; what was seen is left under `traces/`."""
        from seriatim.adapters import traces
        from seriatim.steps.shadow import Shadow
        from seriatim.steps.task import run_task

        shadow = Shadow(self.file.stream, streams.runner(self.file), work, state(self.file), self.trace)
        content = run_task(work, shadow.through(given), ready)
        root, stem = Path(self.file.stream.output.path), f"{work.epoch}-{work.start}"
        shadow.leave(content, lambda rows: traces.put(root, work.partition, stem, rows))
        if shadow.trouble:
            sys.stderr.write(f"{shadow.trouble}\n")
        return content


def kit(file: StreamFile, kafka: dict[str, str], messages: int = 0) -> Kit:
    """What a task works with, for one stream and this many messages."""
    from seriatim.adapters.arrow import ArrowDigests
    from seriatim.adapters.parquet import ParquetRecords
    from seriatim.adapters.state import ParquetState
    from seriatim.bulk.choose import machine
    from seriatim.steps.task import Kit

    stream, (runner, fold) = file.stream, machine(file.stream, lambda: streams.runner(file), messages)
    root = Path(stream.output.path)
    return Kit(
        runner=runner,
        fold=fold,
        tier=stream.tier,
        on_poison=stream.on_poison,
        limits=stream.limits,
        session_field=stream.session_field is not None,
        records=ParquetRecords(
            root,
            runner.columns,
            stream.output.compression,
            stream.output.partition_by,
            checked=not runner.may_half_change,
            others=runner.others,
        ),
        state=ParquetState(root, stream.output.compression, stream.name),
        explain=explain(file, kafka),
        digests=ArrowDigests,
        peak_memory_bytes=_peak_memory_bytes,
    )


def explain(file: StreamFile, kafka: dict[str, str]) -> Explain:
    """Why offsets are missing. What it takes is loaded with the first hole: without one it costs nothing."""

    @cache
    def batches() -> Explain:
        from seriatim.adapters.batches import KafkaBatches

        return KafkaBatches(kafka, file.stream.isolation)

    def explained(partition: Partition, hole: OffsetRange) -> list[Piece]:
        return batches()(partition, hole)

    return explained


class LazySpark:
    """Kafka through Spark, started when there is something to read: an idle run costs no Spark."""

    def __init__(self, file: StreamFile, settings: Settings, say: Say) -> None:
        self.file, self.settings, self.say = file, settings, say
        self.spark: Any = None
        self.trace: tuple[str, ...] = ()
        self.compiling: subprocess.Popen[bytes] | None = None

    def _reader(self) -> SparkReader | TaskReader:
        from seriatim.adapters.fetch import KafkaRanges
        from seriatim.adapters.spark import SparkReader, TaskReader

        stream, kafka = self.file.stream, kafka_client(self.settings)
        if self.spark is None:
            self.spark = spark_session(stream.name, self.settings, self.say, stream=stream)
        if stream.slice.read == "task":
            ranges = KafkaRanges(kafka, stream.isolation)
            return TaskReader(self.spark, ranges, lambda: log(self.file, self.settings).bounds(stream.topics))
        return SparkReader(self.spark, client.for_java({**kafka, "isolation.level": stream.isolation}))

    def follow(
        self, starts: Mapping[Partition, int], messages_max: int, on_slice: OnSlice, wish: Wish = NO_WISH
    ) -> None:
        """From `starts` to the log ends of now."""
        self._reader().follow(starts, messages_max, on_slice, wish)

    def exactly(self, ranges: Ranges, wish: Wish = NO_WISH) -> Source:
        """These ranges and no others."""
        return self._reader().exactly(ranges, wish)

    def kill(self) -> None:
        """End Spark at once and without a word. A JVM still on its way up ends by itself, with us."""
        if self.spark is not None and (jvm := self.spark.sparkContext._gateway.proc) is not None:
            jvm.kill()

    def stop(self) -> None:
        """End Spark, if it was started."""
        if self.compiling is not None:
            self.compiling.terminate()
            self.compiling.wait()
        if self.spark is not None:
            from seriatim.adapters.spark import stop

            stop(self.spark)

    def task(self, works: dict[Partition, Any], kafka: dict[str, str]) -> FoldTask:
        """Step 4 of a slice. What would make it faster, and is not compiled yet, is compiled aside, for the next."""
        from seriatim.bulk.choose import for_later

        if self.compiling is None:
            self.compiling = for_later(self.file.stream, [work.end - work.start for work in works.values()])
        return FoldTask(self.file, works, kafka, self.settings.crash_point, os.getpid(), self.trace)


def world(file: StreamFile, settings: Settings, reader: LazySpark) -> World:
    """Everything outside that a fold touches, for real."""
    from seriatim.adapters.clock import WallClock
    from seriatim.adapters.parquet import ParquetRecords
    from seriatim.steps.fold import World

    stream, runner = file.stream, streams.runner(file)
    root, kafka = Path(stream.output.path), kafka_client(settings)
    tables.refuse_other_columns(derived(file))
    return World(
        log=log(file, settings),
        reader=reader,
        explain=explain(file, kafka),
        ledger=ledger(file, with_schema=True),
        records=ParquetRecords(root, runner.columns, stream.output.compression, stream.output.partition_by),
        state=lambda: state(file),
        derived=derived(file),
        joiner=joiner(file),
        clock=WallClock(),
        task=lambda works: reader.task(works, kafka),
        requests=requests(file, settings),
        new_attempt=new_attempt,
    )


def requests(file: StreamFile, settings: Settings) -> KafkaRequests | None:
    """Where the stream's producers are asked for snapshots, if it wants that."""
    from seriatim.adapters.ask import KafkaRequests

    topic = file.stream.snapshot_requests
    return KafkaRequests(kafka_client(settings), topic, Path(file.stream.output.path)) if topic else None


def new_attempt() -> str:
    """A name for one try, that nobody else has."""
    return uuid.uuid4().hex[:12]


def means(file: StreamFile, settings: Settings) -> Means:
    """What a person's decision is made with, for real."""
    from seriatim.adapters.clock import WallClock
    from seriatim.adapters.parquet import ParquetRecords
    from seriatim.steps.accept import Means

    stream, runner = file.stream, streams.runner(file)
    root, output = Path(stream.output.path), stream.output
    return Means(
        stream=stream,
        runner=runner,
        log=log(file, settings),
        ledger=ledger(file, with_schema=True),
        records=ParquetRecords(root, runner.columns, output.compression, output.partition_by, others=runner.others),
        state=state(file),
        clock=WallClock(),
        new_attempt=new_attempt,
    )


def log(file: StreamFile, settings: Settings, timeout_seconds: float = 20.0) -> KafkaLog:
    """Kafka, as discovery sees it."""
    from seriatim.adapters.kafka import KafkaLog

    return KafkaLog(kafka_client(settings), file.stream.isolation, timeout_seconds)


def ledger(file: StreamFile, *, with_schema: bool = False) -> DeltaLedger:
    """The stream's ledger; with the machine's schema where it may be written to."""
    from seriatim.adapters.delta import DeltaLedger
    from seriatim.adapters.parquet import record_schema

    stream = file.stream
    schema = record_schema(streams.runner(file).columns) if with_schema else None
    return DeltaLedger(Path(stream.output.path), schema, stream.output.partition_by)


def files(file: StreamFile) -> ParquetRecords:
    """The stream's files, to be listed and swept. Without the machine's columns nothing can be written."""
    from seriatim.adapters.parquet import ParquetRecords

    return ParquetRecords(Path(file.stream.output.path), {}, file.stream.output.compression, ())


def joiner(file: StreamFile) -> ParquetJoiner:
    """The stream's committed files, to be looked at again."""
    from seriatim.adapters.join import ParquetJoiner

    return ParquetJoiner(Path(file.stream.output.path), file.stream.output.compression)


def state(file: StreamFile) -> ParquetState:
    """The stream's state files."""
    from seriatim.adapters.state import ParquetState

    return ParquetState(Path(file.stream.output.path), file.stream.output.compression, file.stream.name)


def outbox(stream: str, settings: Settings) -> DiskOutbox:
    """Where a stream's incidents and mails are, by its name in `streams/` or the path of its file."""
    from seriatim.adapters.outbox import DiskOutbox

    path = config.expanded(Path(stream), stream, "give a name or a path").absolute()
    folder = path.parent if stream.endswith(".toml") else settings.streams
    return DiskOutbox(settings.outbox, path.stem if stream.endswith(".toml") else stream, folder)


def notifier(settings: Settings) -> SmtpNotifier | None:
    """Whoever carries mails, if a server is named."""
    from seriatim.adapters.mail import SmtpNotifier, server

    if not settings.smtp:
        return None
    return SmtpNotifier(
        server(
            settings.smtp,
            user=settings.smtp_user,
            password=settings.smtp_password,
            password_file=settings.smtp_password_file,
            tls=settings.smtp_tls,
            sender=settings.smtp_from,
        )
    )


def refuse_code(file: StreamFile, ledger: Ledger) -> None:
    """Refuse a machine that would misread this ledger's state."""
    from seriatim.core.code import refuse_code

    runner = streams.runner(file)
    refuse_code(ledger, runner.name, runner.state_version, runner.can_upgrade, runner.shape)


def spark_session(
    name: str, settings: Settings, say: Say, more: Mapping[str, str] | None = None, *, stream: Stream | None = None
) -> Any:
    """A Spark session with our JARs, after a look at the traps; the one of spark-submit, if that started us."""
    from seriatim import tuned
    from seriatim.adapters.spark import session, submitted_session
    from seriatim.embedded import jars, traps

    traps.refuse(config.environment())
    if config.is_submitted():
        return submitted_session(name)
    config.use_this_python()
    found, master = jars.ensure("spark", settings, say), settings.spark_master
    usual = tuned.on_this_machine(stream) if master.startswith("local") else {}
    with _signals_kept(), quiet_java():
        options = tuned.java_options(stream)
        return session(name, master, settings.spark_driver_memory, found, options, {**usual, **(more or {})})


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Spark takes SIGINT for itself; it goes back to whom it belonged."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def kafka_client(settings: Settings) -> dict[str, str]:
    """Client settings: the servers given, or the embedded broker of this home."""
    servers = settings.kafka_bootstrap_servers or _embedded_servers(settings)
    return {**client.read(settings.kafka_config), "bootstrap.servers": servers}


def _embedded_servers(settings: Settings) -> str:
    from seriatim.embedded import broker

    found = broker.status(settings.home)
    if found is None:
        raise ConfigError(
            "no Kafka broker is named, and the embedded one does not run",
            next="set SERIATIM_KAFKA_BOOTSTRAP_SERVERS, or `seriatim kafka start`",
        )
    return found.bootstrap_servers


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
