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

from seriatim import config, follower_tables, stream_files
from seriatim.config import Settings
from seriatim.embedded.java_noise import quiet_java
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.kafka import client
from seriatim.ports import DEFAULT_READ_OPTIONS, ReadOptions
from seriatim.stream_files import StreamFile

PrintLine = Callable[[str], None]
current_table, derived_tables = follower_tables.current_table, follower_tables.derived_tables
"""The tables that follow the ledger; they have a room of their own."""

if TYPE_CHECKING:
    import pyarrow as pa

    from seriatim.alerts.outbox import DiskOutbox
    from seriatim.alerts.smtp import SmtpNotifier
    from seriatim.engine.holes import ExplainedRange
    from seriatim.engine.offsets import OffsetRange
    from seriatim.engine.task import PartitionWork, TaskContext
    from seriatim.kafka.log import KafkaLog
    from seriatim.kafka.snapshot_requests import KafkaSnapshotRequester
    from seriatim.kafka.spark_reader import SparkReader, TaskReader
    from seriatim.ledger.delta_store import DeltaLedger
    from seriatim.ledger.model import Ledger
    from seriatim.operations.accept import DecisionContext
    from seriatim.operations.run import FoldContext
    from seriatim.operations.slicing import Ranges
    from seriatim.ports import Explain, OnSlice, Source
    from seriatim.storage.join import ParquetJoiner
    from seriatim.storage.record_files import ParquetRecords
    from seriatim.storage.state_files import ParquetState
    from seriatim.stream import Stream


class SparkFoldTask(Struct):
    """Step 4 where the messages are: pickled to the worker, where it loads the machine."""

    file: StreamFile
    works: dict[Partition, Any]
    kafka: dict[str, str] = {}
    """Client settings, for what the fold itself asks Kafka: why offsets are missing."""
    crash_point: str = ""
    driver_pid: int = 0
    """The driver's process, which a crash point takes along."""
    traced_sessions: tuple[str, ...] = ()
    """Sessions that are traced beside the fold."""

    def __call__(self, partition: Partition, batches: Iterable[pa.RecordBatch]) -> bytes:
        """Fold one partition's batches."""
        import gc

        from pyspark import TaskContext

        from seriatim.engine.task import run_task
        from seriatim.fast.helpers.fold import with_helpers
        from seriatim.storage.arrow import message_batches

        config.arm_crash_point(self.crash_point, self.driver_pid)
        context = TaskContext.get()
        number = context.taskAttemptId() if context else 0
        work: PartitionWork = self.works[partition]
        work = replace(work, attempt=f"{work.attempt}-{number}")
        gc.disable()
        try:
            made = task_context(self.file, self.kafka, work.end - work.start)
            with with_helpers(self.file, work, made) as ready:
                if self.traced_sessions:
                    return self._fold_with_trace(work, message_batches(batches), ready)
                return run_task(work, message_batches(batches), ready)
        finally:
            gc.enable()

    def _fold_with_trace(
        self, work: PartitionWork, batches: Iterable[Any], context: TaskContext
    ) -> bytes:
        """The same, with named sessions looked at on the way; what was seen is left under
        `traces/`.
        """
        from seriatim.engine.task import run_task
        from seriatim.operations.inspect.run_traces import ShadowTrace
        from seriatim.storage import traces

        shadow = ShadowTrace(
            self.file.stream,
            stream_files.load_runner(self.file),
            work,
            state(self.file),
            self.traced_sessions,
        )
        content = run_task(work, shadow.pass_through(batches), context)
        root, stem = Path(self.file.stream.output.path), f"{work.epoch}-{work.start}"
        shadow.write_counting_rows(
            content, lambda rows: traces.write_trace_rows(root, work.partition, stem, rows)
        )
        if shadow.trouble:
            sys.stderr.write(f"{shadow.trouble}\n")
        return content


def task_context(file: StreamFile, kafka: dict[str, str], messages: int = 0) -> TaskContext:
    """What a task works with, for one stream and this many messages."""
    from seriatim.engine.task import TaskContext
    from seriatim.fast.choose import choose_machine
    from seriatim.storage.arrow import ArrowDigests
    from seriatim.storage.record_files import ParquetRecords
    from seriatim.storage.state_files import ParquetState

    stream, (runner, fold) = (
        file.stream,
        choose_machine(file.stream, lambda: stream_files.load_runner(file), messages),
    )
    root = Path(stream.output.path)
    return TaskContext(
        runner=runner,
        make_fold=fold,
        tier=stream.tier,
        on_poison=stream.on_poison,
        limits=stream.limits,
        has_session_field=stream.session_field is not None,
        records=ParquetRecords(
            root,
            runner.columns,
            stream.output.compression,
            stream.output.partition_by,
            values_are_checked=not runner.may_half_change,
            other_tables=runner.other_columns,
        ),
        state=ParquetState(root, stream.name, stream.output.compression),
        explain=hole_explainer(file, kafka),
        digests=ArrowDigests,
        peak_memory_bytes=_peak_memory_bytes,
    )


def hole_explainer(file: StreamFile, kafka: dict[str, str]) -> Explain:
    """Why offsets are missing. What it takes is loaded with the first hole: without one it costs
    nothing.
    """

    @cache
    def batches() -> Explain:
        from seriatim.kafka.raw_batches import KafkaHoleExplainer

        return KafkaHoleExplainer(kafka, file.stream.isolation)

    def explained(partition: Partition, hole: OffsetRange) -> list[ExplainedRange]:
        return batches()(partition, hole)

    return explained


class LazySpark:
    """Kafka through Spark, started when there is something to read: an idle run costs no Spark."""

    def __init__(self, file: StreamFile, settings: Settings, print_line: PrintLine) -> None:
        self.file, self.settings, self.print_line = file, settings, print_line
        self.spark: Any = None
        self.traced_sessions: tuple[str, ...] = ()
        self.compiler_process: subprocess.Popen[bytes] | None = None

    def _reader(self) -> SparkReader | TaskReader:
        from seriatim.kafka.spark_reader import SparkReader, TaskReader
        from seriatim.kafka.task_reader import KafkaRangeReader

        stream, kafka = self.file.stream, kafka_client(self.settings)
        if self.spark is None:
            self.spark = spark_session(stream.name, self.settings, self.print_line, stream=stream)
        if stream.slice.read == "task":
            ranges = KafkaRangeReader(kafka, stream.isolation)
            return TaskReader(
                self.spark, ranges, lambda: log(self.file, self.settings).bounds(stream.topics)
            )
        return SparkReader(
            self.spark, client.java_settings({**kafka, "isolation.level": stream.isolation})
        )

    def read_slices(
        self,
        starts: Mapping[Partition, int],
        messages_max: int,
        on_slice: OnSlice,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        """From `starts` to the log ends of now."""
        self._reader().read_slices(starts, messages_max, on_slice, options)

    def read_ranges(self, ranges: Ranges, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Source:
        """These ranges and no others."""
        return self._reader().read_ranges(ranges, options)

    def kill(self) -> None:
        """End Spark at once and without a word. A JVM still on its way up ends by itself, with us."""
        if self.spark is not None and (jvm := self.spark.sparkContext._gateway.proc) is not None:
            jvm.kill()

    def stop(self) -> None:
        """End Spark, if it was started."""
        if self.compiler_process is not None:
            self.compiler_process.terminate()
            self.compiler_process.wait()
        if self.spark is not None:
            from seriatim.kafka.spark_reader import stop_spark_session

            stop_spark_session(self.spark)

    def make_task(self, works: dict[Partition, Any], kafka: dict[str, str]) -> SparkFoldTask:
        """Step 4 of a slice. What would make it faster, and is not compiled yet, is compiled aside,
        for the next.
        """
        from seriatim.fast.choose import compile_for_later_tasks

        if self.compiler_process is None:
            self.compiler_process = compile_for_later_tasks(
                self.file.stream, [work.end - work.start for work in works.values()]
            )
        return SparkFoldTask(
            self.file, works, kafka, self.settings.crash_point, os.getpid(), self.traced_sessions
        )


def fold_context(file: StreamFile, settings: Settings, reader: LazySpark) -> FoldContext:
    """Everything outside that a fold touches, for real."""
    from seriatim.clock import WallClock
    from seriatim.operations.run import FoldContext
    from seriatim.storage.record_files import ParquetRecords

    stream, runner = file.stream, stream_files.load_runner(file)
    root, kafka = Path(stream.output.path), kafka_client(settings)
    follower_tables.refuse_other_columns(derived_tables(file))
    return FoldContext(
        log=log(file, settings),
        reader=reader,
        explain=hole_explainer(file, kafka),
        ledger=ledger(file, with_schema=True),
        records=ParquetRecords(
            root, runner.columns, stream.output.compression, stream.output.partition_by
        ),
        open_state=lambda: state(file),
        derived=derived_tables(file),
        joiner=joiner(file),
        clock=WallClock(),
        make_task=lambda works: reader.make_task(works, kafka),
        snapshot_requester=snapshot_requester(file, settings),
        new_attempt=new_attempt,
    )


def snapshot_requester(file: StreamFile, settings: Settings) -> KafkaSnapshotRequester | None:
    """Where the stream's producers are asked for snapshots, if it wants that."""
    from seriatim.kafka.snapshot_requests import KafkaSnapshotRequester

    topic = file.stream.snapshot_requests
    return (
        KafkaSnapshotRequester(kafka_client(settings), topic, Path(file.stream.output.path))
        if topic
        else None
    )


def new_attempt() -> str:
    """A name for one try, that nobody else has."""
    return uuid.uuid4().hex[:12]


def decision_context(file: StreamFile, settings: Settings) -> DecisionContext:
    """What a person's decision is made with, for real."""
    from seriatim.clock import WallClock
    from seriatim.operations.accept import DecisionContext
    from seriatim.storage.record_files import ParquetRecords

    stream, runner = file.stream, stream_files.load_runner(file)
    root, output = Path(stream.output.path), stream.output
    return DecisionContext(
        stream=stream,
        runner=runner,
        log=log(file, settings),
        ledger=ledger(file, with_schema=True),
        records=ParquetRecords(
            root,
            runner.columns,
            output.compression,
            output.partition_by,
            other_tables=runner.other_columns,
        ),
        state=state(file),
        clock=WallClock(),
        new_attempt=new_attempt,
    )


def log(file: StreamFile, settings: Settings, timeout_seconds: float = 20.0) -> KafkaLog:
    """Kafka, as discovery sees it."""
    from seriatim.kafka.log import KafkaLog

    return KafkaLog(kafka_client(settings), file.stream.isolation, timeout_seconds)


def ledger(file: StreamFile, *, with_schema: bool = False) -> DeltaLedger:
    """The stream's ledger; with the machine's schema where it may be written to."""
    from seriatim.ledger.delta_store import DeltaLedger
    from seriatim.storage.record_files import record_schema

    stream = file.stream
    schema = record_schema(stream_files.load_runner(file).columns) if with_schema else None
    return DeltaLedger(Path(stream.output.path), schema, stream.output.partition_by)


def record_files(file: StreamFile) -> ParquetRecords:
    """The stream's files, to be listed and swept. Without the machine's columns nothing can be
    written.
    """
    from seriatim.storage.record_files import ParquetRecords

    return ParquetRecords(Path(file.stream.output.path), {}, file.stream.output.compression, ())


def joiner(file: StreamFile) -> ParquetJoiner:
    """The stream's committed files, to be looked at again."""
    from seriatim.storage.join import ParquetJoiner

    stream = file.stream
    return ParquetJoiner(Path(stream.output.path), stream.name, stream.output.compression)


def state(file: StreamFile) -> ParquetState:
    """The stream's state files."""
    from seriatim.storage.state_files import ParquetState

    stream = file.stream
    return ParquetState(Path(stream.output.path), stream.name, stream.output.compression)


def outbox(stream: str, settings: Settings) -> DiskOutbox:
    """Where a stream's incidents and mails are, by its name in `streams/` or the path of its file."""
    from seriatim.alerts.outbox import DiskOutbox

    path = config.expand_user(Path(stream), stream, "give a name or a path").absolute()
    folder = path.parent if stream.endswith(".toml") else settings.streams
    return DiskOutbox(settings.outbox, path.stem if stream.endswith(".toml") else stream, folder)


def notifier(settings: Settings) -> SmtpNotifier | None:
    """Whoever carries mails, if a server is named."""
    from seriatim.alerts.smtp import SmtpNotifier, mail_server

    if not settings.smtp:
        return None
    return SmtpNotifier(
        mail_server(
            settings.smtp,
            user=settings.smtp_user,
            password=settings.smtp_password,
            password_file=settings.smtp_password_file,
            tls=settings.smtp_tls,
            sender=settings.smtp_from,
        )
    )


def refuse_machine_for_ledger(file: StreamFile, ledger: Ledger) -> None:
    """Refuse a machine that would misread this ledger's state."""
    from seriatim.ledger.machine_version import refuse_incompatible_machine

    runner = stream_files.load_runner(file)
    refuse_incompatible_machine(
        ledger, runner.name, runner.state_version, runner.can_upgrade, runner.shape
    )


def spark_session(
    name: str,
    settings: Settings,
    print_line: PrintLine,
    extra_settings: Mapping[str, str] | None = None,
    *,
    stream: Stream | None = None,
) -> Any:
    """A Spark session with our JARs, after a look at the traps; the one of spark-submit, if that
    started us.
    """
    from seriatim import spark_settings
    from seriatim.embedded import jars, traps
    from seriatim.kafka.spark_reader import create_spark_session, create_submitted_session

    traps.refuse_broken_environment(config.child_environment())
    if config.is_spark_submitted():
        return create_submitted_session(name)
    config.use_this_python()
    found, master = jars.ensure_jars("spark", settings, print_line), settings.spark_master
    usual = spark_settings.local_spark_settings(stream) if master.startswith("local") else {}
    with _restore_sigint(), quiet_java():
        options = spark_settings.java_options(stream)
        return create_spark_session(
            name,
            master,
            settings.spark_driver_memory,
            found,
            options,
            {**usual, **(extra_settings or {})},
        )


@contextmanager
def _restore_sigint() -> Iterator[None]:
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
    return {**client.read_client_settings(settings.kafka_config), "bootstrap.servers": servers}


def _embedded_servers(settings: Settings) -> str:
    from seriatim.embedded import broker

    found = broker.broker_status(settings.home)
    if found is None:
        raise ConfigError(
            "no Kafka broker is named, and the embedded one does not run",
            next="set SERIATIM_KAFKA_BOOTSTRAP_SERVERS, or `seriatim kafka start`",
        )
    return found.bootstrap_servers


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
