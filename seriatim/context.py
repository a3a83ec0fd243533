"""Opens everything outside that the commands and Spark tasks of a stream work with: Kafka, Spark, files,
tables, mail. The only place that joins the operations to real libraries.

Heavy imports are inside the functions: `seriatim --help` and DAG files must not wait for them.

Next: cli/run.py uses it.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from seriatim import config, stream_files
from seriatim.config import Settings
from seriatim.embedded.java import quiet_java
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.kafka import client
from seriatim.ports import DEFAULT_READ_OPTIONS, ReadOptions
from seriatim.stream_files import StreamFile

PrintLine = Callable[[str], None]

if TYPE_CHECKING:
    import pyarrow as pa

    from seriatim.alerts.outbox import StoreOutbox
    from seriatim.alerts.smtp import SmtpNotifier
    from seriatim.engine.files import Explain
    from seriatim.engine.holes import ExplainedRange
    from seriatim.engine.machine import Runner
    from seriatim.engine.offsets import Bounds, OffsetRange, Ranges
    from seriatim.engine.task import PartitionWork, TaskContext
    from seriatim.kafka.log import KafkaLog
    from seriatim.kafka.past_messages import KafkaPastMessageReader
    from seriatim.kafka.snapshot_requests import KafkaSnapshotRequester
    from seriatim.kafka.spark_reader import SparkReader, TaskReader
    from seriatim.ledger.delta_store import DeltaLedger
    from seriatim.ledger.model import Ledger
    from seriatim.ports import Clock, OnSlice, Source
    from seriatim.storage.current_table import DeltaCurrent
    from seriatim.storage.derived_tables import DeltaDerived
    from seriatim.storage.join import ParquetJoiner
    from seriatim.storage.record_files import ParquetRecords, ParquetRewriter
    from seriatim.storage.state_files import ParquetState
    from seriatim.storage.store import Store
    from seriatim.stream import Stream


class SparkFoldTask(Struct):
    """Step 4 of a slice. It is pickled and sent to the worker, where it loads the machine and folds."""

    file: StreamFile
    works: dict[Partition, Any]
    kafka: dict[str, str] = {}
    """Kafka client settings. The fold itself asks Kafka why offsets are missing."""
    crash_point: str = ""
    driver_pid: int = 0
    """For tests: the process of the driver, which a crash point kills as well."""
    traced_sessions: tuple[str, ...] = ()
    """Sessions that are traced while they are folded."""

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
        config.arm_crash_point(self.crash_point, self.driver_pid)
        spark_context = TaskContext.get()
        attempt_number = spark_context.taskAttemptId() if spark_context else 0
        work = find_work(self.works, partition, offset_range)
        # Spark may run the same task twice at once: each attempt writes files of its own.
        work = replace(work, attempt=f"{work.attempt}-{attempt_number}")
        # The fold makes millions of objects without cycles, which the collector would walk in vain.
        gc.disable()
        try:
            plain_context = task_context(self.file, self.kafka, work.end - work.start)
            with with_helpers(self.file, work, plain_context) as context:
                if self.traced_sessions:
                    return self._fold_with_trace(work, message_batches(batches), context)
                return run_task(work, message_batches(batches), context)
        finally:
            gc.enable()

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


def task_context(file: StreamFile, kafka: dict[str, str], messages: int = 0) -> TaskContext:
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


def hole_explainer(file: StreamFile, kafka: dict[str, str]) -> Explain:
    """Explains missing offsets. Its libraries are loaded with the first hole: without one it costs
    nothing.
    """

    @cache
    def load_explainer() -> Explain:
        from seriatim.kafka.raw_batches import KafkaHoleExplainer

        return KafkaHoleExplainer(kafka, file.stream.isolation)

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
        if choice.reader == "spark":
            java_settings = client.java_settings({**kafka, "isolation.level": stream.isolation})
            return SparkReader(self.spark, java_settings)
        return TaskReader(
            self.spark,
            KafkaRangeReader(kafka, stream.isolation),
            self._read_bounds,
            has_queries=not self.settings.spark_remote,
        )

    def _read_bounds(self) -> Mapping[Partition, Bounds]:
        return log(self.file, self.settings).bounds(self.file.stream.topics)

    def read_slices(
        self,
        starts: Mapping[Partition, int],
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

    def make_task(self, works: dict[Partition, Any], kafka: dict[str, str]) -> SparkFoldTask:
        """The task of a slice. If a compiled fold would be faster and is not compiled yet, it is
        compiled in another process, for later tasks.
        """
        from seriatim.fast.choose import compile_for_later_tasks

        if self.compiler_process is None:
            message_counts = [work.end - work.start for work in works.values()]
            self.compiler_process = compile_for_later_tasks(self.file.stream, message_counts)
        return SparkFoldTask(
            self.file, works, kafka, self.settings.crash_point, os.getpid(), self.traced_sessions
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
    def state(self) -> ParquetState:
        """The stream's state files. This store keeps the files that it read open."""
        return self.open_state()

    def open_state(self) -> ParquetState:
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
        from seriatim.kafka.snapshot_requests import KafkaSnapshotRequester

        topic = self.stream.snapshot_requests
        return KafkaSnapshotRequester(self.kafka_client, topic) if topic else None

    @cached_property
    def clock(self) -> Clock:
        """The clock of this host."""
        from seriatim.clock import WallClock

        return WallClock()

    def make_task(self, works: dict[Partition, PartitionWork]) -> SparkFoldTask:
        """The task that folds these works on Spark's workers."""
        return self.spark.make_task(works, self.kafka_client)


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
    from seriatim.storage.record_files import record_schema

    schema = None
    if with_schema:
        schema = record_schema(stream_files.load_runner(file).columns)
    return DeltaLedger(output_store(file), schema, file.stream.output.partition_by)


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


def state(file: StreamFile) -> ParquetState:
    """The stream's state files."""
    from seriatim.storage.state_files import ParquetState

    output = file.stream.output
    return ParquetState(
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


def notifier(settings: Settings) -> SmtpNotifier | None:
    """Sends mails; None if no mail server is set."""
    from seriatim.alerts.smtp import SmtpNotifier, mail_server

    if not settings.smtp:
        return None
    server = mail_server(
        settings.smtp,
        user=settings.smtp_user,
        password=settings.smtp_password,
        password_file=settings.smtp_password_file,
        tls=settings.smtp_tls,
        sender=settings.smtp_from,
    )
    return SmtpNotifier(server)


def refuse_machine_for_ledger(file: StreamFile, ledger: Ledger) -> None:
    """Refuse a machine that cannot read the state of this ledger."""
    from seriatim.ledger.model import refuse_incompatible_machine

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
    streams: Sequence[Stream] = (),
) -> Any:
    """A Spark session with our JARs. Under spark-submit it is the session that this has started, and
    with `spark_remote` one on that server. Refuses an environment in which Spark is known to break.
    """
    from seriatim import spark_settings
    from seriatim.embedded import doctor, jars
    from seriatim.kafka.spark_reader import (
        create_remote_session,
        create_spark_session,
        create_submitted_session,
    )

    if settings.spark_remote:
        return create_remote_session(settings.spark_remote)
    doctor.refuse_broken_environment(config.child_environment())
    if config.is_spark_submitted():
        return create_submitted_session(name)
    config.use_this_python()
    jar_paths = jars.ensure_jars("spark", settings, print_line)
    master = settings.spark_master
    all_settings: dict[str, str] = {}
    if master.startswith("local"):
        all_settings |= spark_settings.local_spark_settings(*streams)
    all_settings |= extra_settings or {}
    with _restore_sigint(), quiet_java():
        return create_spark_session(
            name,
            master,
            settings.spark_driver_memory,
            jar_paths,
            spark_settings.java_options(*streams),
            all_settings,
        )


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
    if name:
        return client.named_client_settings(name, config.named_connection("kafka", name))
    servers = settings.kafka_bootstrap_servers or _embedded_servers(settings)
    return {**client.read_client_settings(settings.kafka_config), "bootstrap.servers": servers}


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


def current_table(file: StreamFile) -> DeltaCurrent:
    """The stream's table `current`. Refuses a machine whose records have no key."""
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
    )
