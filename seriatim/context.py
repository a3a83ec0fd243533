"""Opens everything outside that the commands and Spark tasks of a stream work with: Kafka, Spark, files,
tables, mail. The only place that joins the operations to real libraries.

Heavy imports are inside the functions: `seriatim --help` and DAG files must not wait for them.

Next: cli/run.py uses it.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache, cached_property, partial
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec import Struct, msgpack
from msgspec.structs import replace

from seriatim import config, stream_files
from seriatim.config import Settings
from seriatim.embedded.java import quiet_java
from seriatim.engine.offsets import BoundsByPartition, OffsetByPartition, Partition
from seriatim.errors import ConfigError
from seriatim.kafka import client
from seriatim.kafka.client import SettingsSource
from seriatim.ports import DEFAULT_READ_OPTIONS, ReadOptions
from seriatim.spark_settings import has_cluster, is_local_master
from seriatim.stream_files import StreamFile
from seriatim.workers import ChooseWorkers, LocalWorkers, Workers, this_process

PrintLine = Callable[[str], None]
_shipped_archives: list[tempfile.TemporaryDirectory[str]] = []
"""The archives that were sent to workers. An executor that starts later asks this process for them, so
they are kept until it ends.
"""
CORES_PROPERTY = "resource.executor.cores"
"""Spark's name for the cores of an executor, in a task."""

if TYPE_CHECKING:
    import pyarrow as pa

    from seriatim.alerts.alert import Notifier
    from seriatim.alerts.outbox import StoreOutbox
    from seriatim.engine.files import Explain
    from seriatim.engine.holes import ExplainedRange
    from seriatim.engine.machine import Runner
    from seriatim.engine.offsets import OffsetRange, Ranges
    from seriatim.engine.task import PartitionWork, TaskContext
    from seriatim.kafka.log import KafkaLog
    from seriatim.kafka.past_messages import KafkaPastMessageReader
    from seriatim.kafka.snapshot_requests import KafkaSnapshotRequester
    from seriatim.kafka.spark_reader import SparkReader, TaskReader
    from seriatim.ledger.delta_store import DeltaLedger
    from seriatim.ledger.model import Ledger
    from seriatim.ports import Clock, OnSlice, Source
    from seriatim.spark_workers import ClusterSession
    from seriatim.storage.current_table import DeltaCurrent
    from seriatim.storage.derived_tables import DeltaDerived
    from seriatim.storage.join import ParquetJoiner
    from seriatim.storage.record_files import ParquetRecords, ParquetRewriter
    from seriatim.storage.state_files import StateFiles
    from seriatim.storage.store import Store
    from seriatim.stream import Stream


class KafkaAccess(Struct, frozen=True):
    """How a process finds the client settings of a Kafka cluster: by the name of the cluster, or by
    its servers and the path of a settings file. It has no secrets: each process reads them by itself,
    also on workers.
    """

    name: str = ""
    bootstrap_servers: str = ""
    config_path: str = ""
    is_read_elsewhere: bool = False
    """Whether workers are on other hosts, where the environment may name another settings file."""

    def __call__(self) -> dict[str, str]:
        """The client settings."""
        if self.name:
            return client.named_client_settings(
                self.name, config.named_connection("kafka", self.name)
            )
        path = self.config_path
        if self.is_read_elsewhere:
            path = config.kafka_config_of_this_host(path)
        file_settings = client.read_client_settings(Path(path) if path else None)
        return {**file_settings, "bootstrap.servers": self.bootstrap_servers}


class DriverProcess(Struct, frozen=True):
    """The process that commits."""

    host: str
    pid: int

    def pids_on_this_host(self) -> tuple[int, ...]:
        """Its id, if it is on this host: elsewhere the same number is somebody else's process."""
        return (self.pid,) if self.host == socket.gethostname() else ()


class WorkTable(Struct):
    """The works of a slice, as they are sent to tasks: each task decodes its own alone.

    Through Spark's classic API they go once to each executor, beside the tasks (a broadcast). Within
    each task they would be as many bytes as partitions, times partitions.
    """

    packed: Any
    """Each work encoded, by partition; or a broadcast of that."""

    @classmethod
    def of_works(cls, works: Mapping[Partition, PartitionWork], session: Any = None) -> WorkTable:
        """The table of these works. `session`: of Spark's classic API; None if there is none."""
        packed = {partition: msgpack.encode(work) for partition, work in works.items()}
        return cls(packed if session is None else session.sparkContext.broadcast(packed))

    def of(self, partition: Partition) -> dict[Partition, PartitionWork]:
        """The work of one partition, if it has any."""
        packed = self.packed if isinstance(self.packed, dict) else self.packed.value
        content = packed.get(partition)
        if content is None:
            return {}
        from seriatim.engine.task import PartitionWork

        return {partition: msgpack.decode(content, type=PartitionWork)}


class SparkFoldTask(Struct):
    """Step 4 of a slice. It is pickled and sent to the worker, where it loads the machine and folds."""

    file: StreamFile
    works: WorkTable
    kafka: SettingsSource = {}
    """How the worker finds Kafka's client settings. The fold itself asks Kafka why offsets are
    missing.
    """
    crash_point: str = ""
    driver: DriverProcess | None = None
    """For tests: the process of the driver, which a crash point kills as well."""
    traced_sessions: tuple[str, ...] = ()
    """Sessions that are traced while they are folded."""
    shipped_folder: str = ""
    """The name under which workers on other hosts have the folder of the stream file."""

    def __call__(
        self, partition: Partition, offset_range: OffsetRange, batches: Iterable[pa.RecordBatch]
    ) -> bytes:
        """Fold the batches of one range."""
        import gc

        from pyspark import TaskContext

        from seriatim.engine.task import find_work, run_task
        from seriatim.fast.helpers.fold import with_helpers
        from seriatim.storage.arrow import message_batches

        # Tests set crash points in the driver's environment, which the worker does not have.
        victims = self.driver.pids_on_this_host() if self.driver else ()
        config.arm_crash_point(self.crash_point, *victims)
        spark_context = TaskContext.get()
        attempt_number = spark_context.taskAttemptId() if spark_context else 0
        work = find_work(self.works.of(partition), partition, offset_range)
        if self.shipped_folder:
            self._settle_on_other_host(work)
        # Spark may run the same task twice at once: each attempt writes files of its own.
        work = replace(work, attempt=f"{work.attempt}-{attempt_number}")
        # The fold makes millions of objects without cycles, which the collector would walk in vain.
        gc.disable()
        try:
            plain_context = task_context(self.file, self.kafka, work.end - work.start)
            cores = _executor_cores(spark_context)
            with with_helpers(self.file, work, plain_context, cores=cores) as context:
                if self.traced_sessions:
                    return self._fold_with_trace(work, message_batches(batches), context)
                return run_task(work, message_batches(batches), context)
        finally:
            gc.enable()

    def _settle_on_other_host(self, work: PartitionWork) -> None:
        """On a worker of a cluster: find the user's files where Spark put them, and let the compiled
        fold be compiled for this host, for later tasks.
        """
        from pyspark import SparkFiles

        from seriatim.fast.choose import compile_for_later_tasks

        folder = SparkFiles.get(self.shipped_folder)
        # Spark Connect puts what it was sent elsewhere.
        if Path(folder).is_dir():
            self.file = replace(self.file, folder=folder)
        compile_for_later_tasks(self.file.stream, [work.end - work.start])

    def _fold_with_trace(
        self, work: PartitionWork, batches: Iterable[Any], context: TaskContext
    ) -> bytes:
        """Fold, and trace the named sessions meanwhile. Their traces are written below `traces/`."""
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
        store = output_store(self.file)
        stem = f"{work.epoch}-{work.start}"
        shadow.write_counting_rows(
            content, lambda rows: traces.write_trace_rows(store, work.partition, stem, rows)
        )
        if shadow.trouble:
            sys.stderr.write(f"{shadow.trouble}\n")
        return content


def _executor_cores(spark_context: Any) -> int:
    """The cores that a task's executor has: those that Spark was told to give it, else those that this
    process may run on. Its host may have more, for others.
    """
    cores = spark_context.getLocalProperty(CORES_PROPERTY) if spark_context else None
    return int(cores) if cores else len(os.sched_getaffinity(0))


def task_context(file: StreamFile, kafka: SettingsSource, messages: int = 0) -> TaskContext:
    """The dependencies of a task, for one stream and this many messages."""
    from seriatim.engine.task import TaskContext
    from seriatim.fast.choose import choose_machine
    from seriatim.storage.arrow import ArrowDigests

    stream = file.stream
    runner, fold = choose_machine(stream, lambda: stream_files.load_runner(file), messages)
    return TaskContext(
        runner=runner,
        make_fold=fold,
        tier=stream.tier,
        on_poison=stream.on_poison,
        limits=stream.limits,
        has_session_field=stream.session_field is not None,
        records=record_files(file, runner, values_are_checked=not runner.may_half_change),
        state=state(file),
        explain=hole_explainer(file, kafka),
        digests=ArrowDigests,
        peak_memory_bytes=peak_memory_bytes,
    )


def hole_explainer(file: StreamFile, kafka: SettingsSource) -> Explain:
    """Explains missing offsets. Its libraries are loaded with the first hole: without one it costs
    nothing.
    """

    @cache
    def load_explainer() -> Explain:
        from seriatim.kafka.raw_batches import KafkaHoleExplainer

        return KafkaHoleExplainer(client.resolve_settings(kafka), file.stream.isolation)

    def explain(partition: Partition, hole: OffsetRange) -> list[ExplainedRange]:
        return load_explainer()(partition, hole)

    return explain


class ReaderChoice(Struct, frozen=True):
    """Who reads Kafka for a stream, and why."""

    reader: Literal["task", "spark"]
    text: str
    """One line for the log."""


def choose_reader(stream: Stream, settings: Settings, kafka: Mapping[str, str]) -> ReaderChoice:
    """Each task reads its own range, unless the stream file or Kafka's settings ask for Spark's own
    source.
    """
    read = stream.slice.read
    has_kerberos = kafka.get("sasl.mechanism", "").upper() == "GSSAPI"
    if read == "spark" or (read is None and has_kerberos):
        reason = 'slice.read = "spark"' if read else "its login is Kerberos"
        if settings.spark_remote:
            raise ConfigError(
                f"{stream.name}: Spark Connect cannot read Kafka by Spark's own source ({reason})",
                next='unset SERIATIM_SPARK_REMOTE, or say slice.read = "task"',
            )
        return ReaderChoice("spark", f"Kafka is read by Spark's own source: {reason}")
    if settings.spark_remote:
        reason = "under Spark Connect a query's batches would run on the server"
        return ReaderChoice("task", f"Kafka is read by the tasks, slices are cut here: {reason}")
    reason = f'slice.read = "{read}"' if read else "the default"
    return ReaderChoice("task", f"Kafka is read by the tasks, Spark plans the slices: {reason}")


class LazySpark:
    """Reads Kafka through Spark, which is started with the first read: an idle run needs no Spark."""

    def __init__(self, file: StreamFile, settings: Settings, print_line: PrintLine) -> None:
        self.file = file
        self.settings = settings
        self.print_line = print_line
        self.spark: Any = None
        self.shared_with: tuple[Stream, ...] = ()
        """Further streams of this process, which are folded by the same Spark before or after. If there
        are any, `stop` leaves it running for them.
        """
        self._opened_reader: SparkReader | TaskReader | None = None
        self.traced_sessions: tuple[str, ...] = ()
        self.compiler_process: subprocess.Popen[bytes] | None = None
        self.shipped_folder = ""
        """The name under which workers on other hosts have the folder of the stream file."""

    def _reader(self) -> SparkReader | TaskReader:
        """The reader. It is chosen, and the choice is said, when the first messages are read."""
        if self._opened_reader is None:
            self._opened_reader = self._open_reader()
        return self._opened_reader

    def _open_reader(self) -> SparkReader | TaskReader:
        from seriatim.kafka.spark_reader import SparkReader, TaskReader
        from seriatim.kafka.task_reader import KafkaRangeReader

        stream = self.file.stream
        kafka = kafka_client(self.settings, stream.kafka)
        choice = choose_reader(stream, self.settings, kafka)
        self.print_line(f"{stream.name}: {choice.text}")
        if self.spark is None:
            streams = (stream, *self.shared_with)
            self.spark = spark_session(stream.name, self.settings, self.print_line, streams=streams)
        if self.is_on_cluster:
            self.shipped_folder = ship_stream_folder(
                self.spark, self.file, is_connect=bool(self.settings.spark_remote)
            )
        if choice.reader == "spark":
            java_settings = client.java_settings({**kafka, "isolation.level": stream.isolation})
            return SparkReader(self.spark, java_settings)
        return TaskReader(
            self.spark,
            KafkaRangeReader(self._access, stream.isolation),
            self._read_bounds,
            has_queries=not self.settings.spark_remote,
        )

    @property
    def is_on_cluster(self) -> bool:
        """Whether the workers are, or may be, on other hosts."""
        if self.settings.spark_remote:
            return True
        if self.spark is None:
            return not is_local_master(self.settings.spark_master)
        return not is_local_master(self.spark.sparkContext.master)

    def _read_bounds(self) -> BoundsByPartition:
        return log(self.file, self.settings).bounds(self.file.stream.topics)

    def read_slices(
        self,
        starts: OffsetByPartition,
        messages_max: int,
        on_slice: OnSlice,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        """Read from `starts` to the present log ends."""
        self._reader().read_slices(starts, messages_max, on_slice, options)

    def read_ranges(self, ranges: Ranges, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Source:
        """Read exactly these ranges."""
        return self._reader().read_ranges(ranges, options)

    def kill(self) -> None:
        """End Spark at once, without output. A JVM that is still starting ends together with us."""
        if self.spark is None or self.settings.spark_remote:
            return
        jvm_process = self.spark.sparkContext._gateway.proc
        if jvm_process is not None:
            jvm_process.kill()

    def stop(self) -> None:
        """End Spark, if it was started and no other stream needs it."""
        if self.compiler_process is not None:
            self.compiler_process.terminate()
            self.compiler_process.wait()
        if self.spark is not None and not self.shared_with:
            end_spark_session(self.spark)

    @cached_property
    def _access(self) -> KafkaAccess:
        # Looked up once: the end of the embedded broker during a run is trouble with reading, and
        # not a setting that is missing.
        access = kafka_access(self.settings, self.file.stream.kafka)
        return replace(access, is_read_elsewhere=self.is_on_cluster)

    def make_task(self, works: dict[Partition, PartitionWork]) -> SparkFoldTask:
        """The task of a slice. If a compiled fold would be faster and is not compiled yet, it is
        compiled in another process, for later tasks.
        """
        from seriatim.fast.choose import compile_for_later_tasks

        if self.compiler_process is None and not self.shipped_folder:
            message_counts = [work.end - work.start for work in works.values()]
            self.compiler_process = compile_for_later_tasks(self.file.stream, message_counts)
        has_broadcasts = self.is_on_cluster and not self.settings.spark_remote
        return SparkFoldTask(
            self.file,
            WorkTable.of_works(works, self.spark if has_broadcasts else None),
            self._access,
            self.settings.crash_point,
            DriverProcess(socket.gethostname(), os.getpid()),
            self.traced_sessions,
            self.shipped_folder,
        )


def _print_nothing(_line: str) -> None:
    """For commands that start nothing that has something to say."""


class ConnectedStream:
    """A stream with the real Kafka, Spark, files and tables. Implements `OpenStream`.

    Each port is opened when it is first used: a command loads no library, and asks no broker, that
    it does not need.
    """

    def __init__(
        self,
        file: StreamFile,
        settings: Settings,
        *,
        writes_records: bool = False,
        print_line: PrintLine = _print_nothing,
    ) -> None:
        self.file = file
        self.settings = settings
        self.writes_records = writes_records
        """Whether records are written. Then the ledger and the record files know the machine's
        columns, and a table with other columns is refused. If not, the machine need not be loaded.
        """
        self.print_line = print_line
        self.new_attempt = new_attempt
        self.peak_memory_bytes = peak_memory_bytes

    def with_machine(self, file: StreamFile, runner: Runner) -> ConnectedStream:
        """The same stream and ports, folded by another machine."""
        other = copy(self)
        other.file = file
        other.runner = runner
        return other

    @property
    def stream(self) -> Stream:
        """The stream file as a value."""
        return self.file.stream

    @cached_property
    def runner(self) -> Runner:
        """The stream's machine."""
        return stream_files.load_runner(self.file)

    @cached_property
    def kafka_client(self) -> dict[str, str]:
        """Kafka client settings."""
        return kafka_client(self.settings, self.stream.kafka)

    @cached_property
    def log(self) -> KafkaLog:
        """Kafka's log, for discovery."""
        return log(self.file, self.settings)

    @cached_property
    def spark(self) -> LazySpark:
        """Spark, which is started with the first read."""
        return LazySpark(self.file, self.settings, self.print_line)

    @cached_property
    def reader(self) -> LazySpark:
        """Reads Kafka for the fold."""
        return self.spark

    @cached_property
    def past_reader(self) -> KafkaPastMessageReader:
        """Reads messages of the past again, without Spark."""
        from seriatim.kafka.past_messages import KafkaPastMessageReader

        return KafkaPastMessageReader(self.kafka_client, self.stream.isolation)

    @cached_property
    def explain(self) -> Explain:
        """Explains missing offsets."""
        return hole_explainer(self.file, self.kafka_client)

    @cached_property
    def ledger(self) -> DeltaLedger:
        """The stream's ledger."""
        return ledger(self.file, with_schema=self.writes_records)

    @cached_property
    def records(self) -> ParquetRecords:
        """The stream's record files."""
        return record_files(self.file, self.runner if self.writes_records else None)

    @cached_property
    def state(self) -> StateFiles:
        """The stream's state files. This store keeps the files that it read open."""
        return self.open_state()

    def open_state(self) -> StateFiles:
        """The stream's state files, opened anew."""
        return state(self.file)

    @cached_property
    def joiner(self) -> ParquetJoiner:
        """The stream's committed files, for checks and joins."""
        from seriatim.storage.join import ParquetJoiner

        stream = self.stream
        return ParquetJoiner(output_store(self.file), stream.name, stream.output.compression)

    @cached_property
    def rewriter(self) -> ParquetRewriter:
        """Makes record files of other record files."""
        from seriatim.storage.record_files import ParquetRewriter

        stream = self.stream
        return ParquetRewriter(output_store(self.file), stream.name, stream.output.compression)

    @cached_property
    def derived(self) -> DeltaDerived:
        """The tables gaps and quarantine, and those of further kinds of records."""
        return derived_tables(self.file)

    @cached_property
    def current(self) -> DeltaCurrent:
        """The table `current`."""
        return current_table(self.file)

    @cached_property
    def snapshot_requester(self) -> KafkaSnapshotRequester | None:
        """Asks producers for snapshots; None if the stream file names no topic for it."""
        from seriatim.kafka.snapshot_requests import (
            KafkaSnapshotRequester,
            encode_requests,
            encode_signals,
        )

        topic = self.stream.snapshot_requests
        if not topic:
            return None
        encode = encode_requests
        if self.stream.decoder == "debezium":
            encode = partial(encode_signals, columns=self.stream.table.columns)
        return KafkaSnapshotRequester(self.kafka_client, topic, encode=encode)

    @cached_property
    def clock(self) -> Clock:
        """The clock of this host."""
        from seriatim.clock import WallClock

        return WallClock()

    def make_task(self, works: dict[Partition, PartitionWork]) -> SparkFoldTask:
        """The task that folds these works on Spark's workers."""
        return self.spark.make_task(works)


def open_for_fold(file: StreamFile, settings: Settings, print_line: PrintLine) -> ConnectedStream:
    """Open a stream to fold it. Refuses a machine whose further records have other columns than
    their tables, before anything is written. A bucket in which two runs could overwrite each other
    is refused by the ledger, before it writes its first entry there.
    """
    open_stream = ConnectedStream(file, settings, writes_records=True, print_line=print_line)
    _refuse_other_columns(open_stream.derived)
    return open_stream


def has_ledger(file: StreamFile) -> bool:
    """Whether a stream was ever run: whether its ledger exists. The ledger itself is not read."""
    from seriatim.storage.store import open_store

    return "_delta_log" in open_store(file.stream.output.path).folders("records/")


def new_attempt() -> str:
    """A unique name for one attempt."""
    return uuid.uuid4().hex[:12]


def log(file: StreamFile | None, settings: Settings, timeout_seconds: float = 20.0) -> KafkaLog:
    """Kafka's log, for discovery. Without a stream it is seen as streams see it by default."""
    from seriatim.kafka.log import KafkaLog

    isolation = file.stream.isolation if file else "read_committed"
    kafka_name = file.stream.kafka if file else ""
    return KafkaLog(kafka_client(settings, kafka_name), isolation, timeout_seconds)


def ledger(file: StreamFile, *, with_schema: bool = False) -> DeltaLedger:
    """The stream's ledger. `with_schema` is needed for writing, and loads the machine."""
    from seriatim.ledger.delta_store import DeltaLedger
    from seriatim.storage.record_files import older_schema, record_schema

    if not with_schema:
        return DeltaLedger(output_store(file), None, file.stream.output.partition_by)
    runner = stream_files.load_runner(file)

    return DeltaLedger(
        output_store(file),
        record_schema(runner.columns),
        file.stream.output.partition_by,
        partial(older_schema, runner),
    )


def output_store(file: StreamFile) -> Store:
    """The store with all objects of the stream's output."""
    from seriatim.storage.store import open_store

    return open_store(file.stream.output.path)


def record_files(
    file: StreamFile, runner: Runner | None = None, *, values_are_checked: bool = False
) -> ParquetRecords:
    """The stream's record files. Without the machine they can be listed and swept, not written."""
    from seriatim.storage.record_files import ParquetRecords

    output = file.stream.output
    if runner is None:
        return ParquetRecords(output_store(file), {}, output.compression, ())
    return ParquetRecords(
        output_store(file),
        runner.columns,
        output.compression,
        output.partition_by,
        values_are_checked=values_are_checked,
        other_tables=runner.other_columns,
        file_bytes=output.file_bytes_target,
    )


def state(file: StreamFile) -> StateFiles:
    """The stream's state files."""
    from seriatim.storage.state_files import StateFiles

    output = file.stream.output
    return StateFiles(
        output_store(file), file.stream.name, output.compression, output.file_bytes_target
    )


def outbox(stream: str, settings: Settings) -> StoreOutbox:
    """The outbox of a stream, by its name in `streams/` or the path of its file."""
    from seriatim.alerts.outbox import StoreOutbox
    from seriatim.clock import WallClock
    from seriatim.storage.store import open_store

    name = stream
    streams_folder = settings.streams
    if stream.endswith(".toml"):
        path = config.expand_user(Path(stream), stream, "give a name or a path").absolute()
        name = path.stem
        streams_folder = path.parent
    store = open_store(settings.outbox)
    return StoreOutbox(store, WallClock(), name, str(streams_folder))


def notifier(settings: Settings) -> Notifier | None:
    """Sends mails; None if no channel is set."""
    from seriatim.alerts import channels

    return channels.notifier(settings)


def refuse_machine_for_ledger(file: StreamFile, ledger: Ledger) -> None:
    """Refuse a machine that cannot read the state of this ledger. One with more columns can: they are
    null there.
    """
    from seriatim.ledger.model import refuse_incompatible_machine

    runner = stream_files.load_runner(file)
    refuse_incompatible_machine(ledger, runner, may_have_more=True)


def spark_session(
    name: str,
    settings: Settings,
    print_line: PrintLine,
    extra_settings: Mapping[str, str] | None = None,
    *,
    streams: Sequence[Stream] = (),
) -> Any:
    """A Spark session with our JARs. Under spark-submit it is the session that this has started, and
    with `spark_remote` one on that server. Refuses an environment in which Spark is known to break.
    """
    from seriatim import class_archive, spark_settings
    from seriatim.embedded import doctor, jars
    from seriatim.kafka.executors import ExecutorWatcher
    from seriatim.kafka.spark_reader import (
        create_remote_session,
        create_spark_session,
        create_submitted_session,
    )

    if settings.spark_remote:
        return create_remote_session(settings.spark_remote)
    doctor.refuse_broken_environment(config.child_environment())
    watcher = ExecutorWatcher(settings.spark_executor_wait_seconds, print_line)
    if config.is_spark_submitted():
        return create_submitted_session(name, watcher)
    master = settings.spark_master
    is_local = is_local_master(master)
    config.use_this_python(is_local=is_local)
    jar_paths = jars.ensure_jars("spark", settings, print_line)
    if is_local:
        all_settings = spark_settings.local_spark_settings(*streams)
    else:
        all_settings = spark_settings.cluster_spark_settings(master, settings)
    all_settings |= extra_settings or {}
    with _restore_sigint(), quiet_java():
        return create_spark_session(
            name,
            master,
            settings.spark_driver_memory,
            jar_paths,
            spark_settings.java_options(
                *streams, class_archive=class_archive.java_options(settings)
            ),
            all_settings,
            None if is_local else watcher,
        )


@contextmanager
def choose_workers(
    file: StreamFile, settings: Settings, print_line: PrintLine
) -> Iterator[ChooseWorkers]:
    """Yields what chooses where the files of a stream are read, by the number of their records: here,
    or on the executors of the cluster that the settings name. A Spark that is started for it ends with
    the block; one that runs already serves, too, and stays. A Spark Connect server only folds.
    """
    opened: list[Any] = []
    started: list[Any] = []

    def open_session() -> ClusterSession:
        from seriatim.kafka.spark_reader import running_session
        from seriatim.spark_workers import ClusterSession

        if not opened:
            session: Any = running_session()
            if session is None:
                streams = (file.stream,)
                session = spark_session(file.stream.name, settings, print_line, streams=streams)
                started.append(session)
            folder = ship_stream_folder(session, file, is_connect=False)
            opened.append(ClusterSession(session, folder))
        return cast("ClusterSession", opened[0])

    def choose(records: int) -> Workers:
        if not has_cluster(settings):
            return LocalWorkers()
        master = settings.spark_master
        if records < settings.spark_records_min:
            print_line(
                f"{file.stream.name}: {records} records are few: read in this process,"
                f" and not on {master}"
            )
            return LocalWorkers()
        from seriatim.spark_workers import SparkWorkers

        print_line(f"{file.stream.name}: {records} records are read on the executors of {master}")
        return SparkWorkers(open_session)

    try:
        yield choose
    finally:
        for session in started:
            end_spark_session(session)


def ship_stream_folder(session: Any, file: StreamFile, *, is_connect: bool) -> str:
    """Send the folder of a stream file to the workers of a cluster: machines, decoders and their schemas
    lie there. Returns the name under which workers have it.
    """
    content = BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in _shipped_files(file):
            # Without a date, so that the same files are the same archive.
            archive.writestr(zipfile.ZipInfo(str(path.relative_to(file.folder))), path.read_bytes())
    name = f"seriatim-streams-{blake2b(content.getvalue(), digest_size=8).hexdigest()}"
    archive_folder = tempfile.TemporaryDirectory(prefix=f"{name}-")
    archive_path = Path(archive_folder.name) / f"{name}.zip"
    archive_path.write_bytes(content.getvalue())
    _shipped_archives.append(archive_folder)
    named_archive = f"{archive_path}#{name}"
    if is_connect:
        session.addArtifacts(named_archive, archive=True)
    else:
        session.sparkContext.addArchive(named_archive)
    return name


def _shipped_files(file: StreamFile) -> list[Path]:
    """What a worker may need of the folder of a stream file: modules, packages, and the schemas that the
    stream file names. Whatever else lies there, such as data or secrets, stays here. A schema elsewhere
    is found by a worker at the same path, or not at all.
    """
    folder = Path(file.folder)
    files = {path for path in folder.iterdir() if path.suffix == ".py"}
    for name in (file.stream.avro.reader_schema, file.stream.protobuf.descriptors):
        path = folder / name
        if path.is_relative_to(folder) and ".." not in path.parts:
            files.add(path)
    for package in folder.iterdir():
        if (package / "__init__.py").is_file():
            for path in package.rglob("*"):
                names = path.relative_to(folder).parts
                # Hidden files are not code: .env may have secrets.
                is_hidden = any(name.startswith(".") for name in names)
                if not is_hidden and "__pycache__" not in names:
                    files.add(path)
    return sorted(path for path in files if path.is_file())


def end_spark_session(session: Any, *, with_jvm: bool = False) -> None:
    """End a Spark session. `with_jvm`: its JVM may be dead or out of memory, so another session of
    this process must start a new one.
    """
    from seriatim.kafka.spark_reader import discard_spark_session, stop_spark_session

    if with_jvm:
        discard_spark_session(session)
    else:
        stop_spark_session(session)


@contextmanager
def _restore_sigint() -> Iterator[None]:
    """Restore what SIGINT does afterwards: Spark changes it when it starts."""
    sigint_action = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, sigint_action)


def kafka_client(settings: Settings, name: str = "") -> dict[str, str]:
    """Kafka client settings, for the cluster of this name; without one, for the servers of the
    settings or the embedded broker of this home.
    """
    return kafka_access(settings, name)()


def kafka_access(settings: Settings, name: str = "") -> KafkaAccess:
    """How workers find these client settings."""
    if name:
        return KafkaAccess(name)
    servers = settings.kafka_bootstrap_servers or _embedded_servers(settings)
    path = "" if settings.kafka_config is None else str(settings.kafka_config.absolute())
    return KafkaAccess(bootstrap_servers=servers, config_path=path)


def _embedded_servers(settings: Settings) -> str:
    from seriatim.embedded import broker

    broker_info = broker.broker_status(settings.home)
    if broker_info is None:
        raise ConfigError(
            "no Kafka broker is named, and the embedded one does not run",
            next="set SERIATIM_KAFKA_BOOTSTRAP_SERVERS, or `seriatim kafka start`",
        )
    return broker_info.bootstrap_servers


def peak_memory_bytes() -> int:
    """The most memory that this process had so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_maxrss * 1024  # Linux counts it in KiB


def derived_tables(file: StreamFile) -> DeltaDerived:
    """The stream's tables gaps and quarantine, and those of further kinds of records."""
    from seriatim.storage.derived_tables import DeltaDerived, DeltaOutputs
    from seriatim.storage.record_files import record_schema

    output = file.stream.output
    store = output_store(file)
    other_columns = stream_files.load_runner(file).other_columns
    schemas = {table: record_schema(columns) for table, columns in other_columns.items()}
    outputs = DeltaOutputs(store, schemas, output.partition_by) if schemas else None
    return DeltaDerived(store, output.compression, outputs)


def _refuse_other_columns(derived: DeltaDerived) -> None:
    """Refuse a machine whose further records have other columns than their tables, before anything
    is written.
    """
    if derived.output_store is not None:
        for table in derived.output_store.tables:
            derived.output_store.applied_version(table)  # raises if the columns differ


def table_sequences(file: StreamFile) -> dict[str, Any]:
    """The ledger entry that each table has reached, without loading the machine."""
    from seriatim.storage.audit import FileAudit
    from seriatim.storage.current_table import published_sequence

    store = output_store(file)
    other_tables = FileAudit(store).other_tables()
    output_sequences = {table: sequence for table, (sequence, _) in other_tables.items()}
    return {"published": published_sequence(store), "outputs": output_sequences}


def current_table(file: StreamFile, choose: ChooseWorkers = this_process) -> DeltaCurrent:
    """The stream's table `current`. Refuses a machine whose records have no key. `choose` chooses where
    records are read.
    """
    from seriatim.storage.current_table import DeltaCurrent
    from seriatim.storage.record_files import record_schema

    stream = file.stream
    runner = stream_files.load_runner(file)
    if runner.row_key_spec is None:
        raise ConfigError(
            f"{stream.name}: the records of {runner.name} name no key, so there is no table `current`",
            next='say in the record\'s Struct what names a row: row_key: ClassVar = ("side", "price")',
        )
    output = stream.output
    return DeltaCurrent(
        output_store(file),
        stream.name,
        record_schema(runner.columns),
        runner.row_key_spec,
        output.compression,
        output.keep_versions_days,
        choose,
    )
