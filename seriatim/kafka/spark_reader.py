"""Spark: hands out bounded ranges of Kafka, one task per topic-partition, without a shuffle.

Slices are the batches of a query with Trigger.AvailableNow and `foreachBatch`. Its checkpoint is
temporary: a new folder for each reading, deleted after it. There are two readers, which give the same
messages to the same task:

- `TaskReader`, the default: our own source plans the ranges, and each task reads its own. Exact
  ranges (second tries, repairs, backfills) and Spark Connect do without the query.
- `SparkReader`: Spark's own Kafka source, with its batch reader for exact ranges.

Next: kafka/range_source.py is our source; context.py chooses the reader and makes the task;
operations/run.py asks for slices.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import pyarrow as pa
from msgspec import Struct
from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]  # it has no types
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

from seriatim.engine.failure import Failure, as_worker_error
from seriatim.engine.files import SourceFailedError, ranges_to_log_ends
from seriatim.engine.offsets import (
    BoundsByPartition,
    OffsetByPartition,
    OffsetRange,
    Partition,
    Ranges,
    cut_into_slices,
    drop_empty_ranges,
)
from seriatim.errors import (
    SIGKILL_ADVICE,
    SIGKILL_CAUSE,
    ConfigError,
    PlatformError,
    raise_broken_promise,
)
from seriatim.kafka import worker_setup
from seriatim.kafka.client import ClientSettings
from seriatim.kafka.executors import ExecutorWatcher
from seriatim.kafka.range_source import RangeSource, offsets_from_json, offsets_to_json
from seriatim.ports import (
    DEFAULT_READ_OPTIONS,
    OnSlice,
    ReadOptions,
    Source,
    UnreadableMessageError,
)

log = logging.getLogger(__name__)
ArrowTask = Callable[[Partition, OffsetRange, Iterable[pa.RecordBatch]], bytes]
ReadRange = Callable[[Partition, OffsetRange, bool], Iterator[pa.RecordBatch]]
"""Reads a range in the process that calls it, with headers or without."""
RESULT_SCHEMA = "result binary"
PYTHON_ERROR = re.compile(
    r"[\w.]+(Error|Exception|Interrupt|Exit|SourceFailedError|UnreadableMessageError)\b"
)
TRACEBACK_LINE = "Traceback (most recent call last):"
PYTHON_START_LINE = "Error from python worker:"
ERROR_LINE_MAX = 600
KAFKA_COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value")
UNBOUNDED_BATCH_BYTES = str(2**31 - 1)
BATCH_BYTES = str(64 << 20)
"""Bounds of an Arrow batch. Without a bound Spark does not measure every row, which saves half a
microsecond per message.
"""
FETCH_SETTINGS = {
    "kafka.max.partition.fetch.bytes": str(8 << 20),
    "kafka.fetch.max.bytes": str(32 << 20),
}
"""Large fetches cost less CPU per message than the defaults. Still larger ones would fill the heap
where messages are large.
"""
POLL_BYTES = 64 << 20
POLL_MESSAGES_MAX = 5000
POLL_MESSAGES_MIN = 10
POLL_MESSAGES_DEFAULT = 200
"""A poll is unpacked into the heap as a whole, and a compressed fetch of 8 MiB may become gigabytes.
Where the size of messages is not known yet, a poll takes few (this costs half a microsecond per
message); else it takes as many as fit.
"""
UNREADABLE_MESSAGE_ERRORS = (
    "java.lang.ArithmeticException: long overflow",
    UnreadableMessageError.__name__,
)
"""The errors of Spark's source, and of ours, for a message whose timestamp in microseconds does not
fit into 64 bits.
"""
MASTER_GONE = ("All masters are unresponsive", "Master removed our application")
"""Spark's errors if the master of a standalone cluster was not found for a minute, or has ended the
application.
"""
HEAP = ("Java heap space", "OutOfMemoryError")
"""Java's errors when it has no memory left."""
JVM_DEATH_ERRORS = ("Answer from Java side is empty", *HEAP)
"""Errors that mean that the JVM died or has no memory left."""
JVM_END_SECONDS = 5.0
"""How long we wait for the process to end after the JVM has stopped answering."""
CONNECT_PORT = 15002
"""The port of a Spark Connect server whose address has none."""
CONNECT_SECONDS_MAX = 20.0
CONNECT_RETRIES_MAX = 6
"""How often the client of Spark Connect asks again a server that has gone: for about a minute. Its own
default is about ten.
"""
SESSION_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "5000",
    "spark.sql.shuffle.partitions": "1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.streaming.stopTimeout": "30s",
    "spark.sql.streaming.numRecentProgressUpdates": "2",
    "spark.python.worker.faulthandler.enabled": "false",
}


_watchers: list[ExecutorWatcher] = []
"""What watches the executors of this process' Spark, if they are on other hosts. A process has one
Spark.
"""


def create_spark_session(
    name: str,
    master: str,
    driver_memory: str,
    jars: Iterable[Path],
    java_options: str,
    extra_settings: Mapping[str, str],
    watcher: ExecutorWatcher | None = None,
) -> SparkSession:
    """Start a Spark session with our settings: few log lines, times in UTC. `watcher` watches the
    executors of a cluster.
    """
    _silence_py4j()
    settings = {
        **SESSION_SETTINGS,
        "spark.jars": ",".join(map(str, jars)),
        "spark.driver.memory": driver_memory,
        "spark.driver.extraJavaOptions": java_options,
        **extra_settings,
    }
    builder = SparkSession.builder.appName(f"seriatim {name}").master(master)
    if watcher is None:
        return _start_session(builder, settings)
    watcher.prepare({**settings, "spark.master": master})
    return _watched(_start_session(builder, settings), watcher)


def create_submitted_session(name: str, watcher: ExecutorWatcher) -> SparkSession:
    """A session in the JVM that spark-submit has started. Master, JARs and memory are those it was
    submitted with.
    """
    _silence_py4j()
    watcher.prepare({})
    builder = SparkSession.builder.appName(f"seriatim {name}")
    session = _start_session(builder, SESSION_SETTINGS)
    if _has_local_master():
        return session
    return _watched(session, watcher)


def _watched(session: SparkSession, watcher: ExecutorWatcher) -> SparkSession:
    """The session, whose executors are watched from now on."""
    _watchers.append(watcher)
    watcher.start(session.sparkContext)
    return session


def create_remote_session(address: str) -> SparkSession:
    """A session of a Spark Connect server, such as sc://host:15002. Its settings are the server's."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    _silence_py4j()
    # The error that comes after it says more.
    warnings.filterwarnings("ignore", message=r"\[RETRIES_EXCEEDED\]")
    _refuse_dead_server(address)
    session = _start_session(SparkSession.builder.remote(address), {})
    client: Any = session.client
    client.set_retry_policies([DefaultPolicy(max_retries=CONNECT_RETRIES_MAX)])
    return session


def _refuse_dead_server(address: str) -> None:
    """Refuse a Spark Connect server that nobody reaches: its client would try for ten minutes, and say
    nothing.
    """
    try:
        parts = urlsplit(address)
        place = (parts.hostname or "", parts.port or CONNECT_PORT)
    except ValueError as error:
        raise ConfigError(
            f"settings: spark_remote: {address}: {error}", next="such as sc://HOST:PORT"
        ) from None
    try:
        socket.create_connection(place, CONNECT_SECONDS_MAX).close()
    except OSError as error:
        raise PlatformError(
            f"the Spark Connect server {address} cannot be reached",
            cause=str(error),
            next="start it, or correct SERIATIM_SPARK_REMOTE, then run again",
        ) from error


def _start_session(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except Exception as error:  # py4j and pyspark raise many different classes
        raise PlatformError(
            "Spark did not start", cause=first_error_line(error), next="run `seriatim doctor`"
        ) from error


def running_session() -> SparkSession | None:
    """The Spark session that this process has already; None if it has none."""
    if SparkContext._active_spark_context is None:
        return None
    return SparkSession.builder.getOrCreate()


def stop_spark_session(session: SparkSession) -> None:
    """End a session. It is no error if its JVM has died already."""
    while _watchers:
        _watchers.pop().stop()
    with suppress(Py4JError, ConnectionError), warnings.catch_warnings():
        # pyspark warns that the JVM is gone, which was reported already.
        warnings.simplefilter("ignore", RuntimeWarning)
        session.stop()


def discard_spark_session(session: SparkSession) -> None:
    """End a session and its JVM, which may be dead or out of memory already, so that the next session
    starts a new one. A JVM that we did not start (spark-submit, Spark Connect) is left as it is.
    """
    stop_spark_session(session)
    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return
    process.terminate()
    try:
        process.wait(JVM_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # pyspark would go on with the connection to the dead JVM.
    SparkContext._gateway = None
    SparkContext._jvm = None
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None


def _silence_py4j() -> None:
    """Drop py4j's log lines with their stack traces: the error that we raise has the facts."""
    py4j = logging.getLogger("py4j")
    py4j.setLevel(logging.CRITICAL)
    py4j.propagate = False
    # py4j also logs to the root logger, where only the path of the caller tells who it is.
    logging.getLogger().addFilter(_is_not_py4j)


def _is_not_py4j(log_record: logging.LogRecord) -> bool:
    return "py4j" not in Path(log_record.pathname).parts


@contextmanager
def translate_spark_errors() -> Iterator[None]:
    """Raise Spark's failures as our errors: Spark died, or reading failed and discovery decides what
    that means.
    """
    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:
        for watcher in _watchers:
            if watcher.error is not None:
                raise watcher.error from None
        if any(phrase in str(error) for phrase in MASTER_GONE):
            raise PlatformError(
                "the master of Spark does not answer, or has ended our application",
                cause=first_error_line(error),
                next="see whether SERIATIM_SPARK_MASTER is right and the master runs, then run again",
            ) from error
        if is_connect_server_gone(error):
            raise PlatformError(
                "the Spark Connect server is gone",
                cause=first_error_line(error),
                next="start it, then run again: a run goes on from the last commit",
            ) from error
        if is_jvm_dead(error):
            raise death(error, _jvm_signal()) from error
        text = str(error)
        if not _has_local_master():
            setup_error = worker_setup.setup_error(text, first_error_line(error))
            if setup_error is not None:
                raise setup_error from error
        if any(unreadable in text for unreadable in UNREADABLE_MESSAGE_ERRORS):
            raise UnreadableMessageError(first_error_line(error)) from error
        raise SourceFailedError(first_error_line(error)) from error


def _has_local_master() -> bool:
    """Whether this process' Spark works on this host alone."""
    spark_context = SparkContext._active_spark_context
    return spark_context is not None and spark_context.master.startswith("local")


def death(error: Exception, signal_number: int | None) -> PlatformError:
    """The error for the end of Spark's JVM. `signal_number`: None if no signal ended it, or if that
    is not known.
    """
    text = str(error)
    if any(heap_error in text for heap_error in HEAP):
        advice = "lower --messages-max or raise SERIATIM_SPARK_DRIVER_MEMORY, then run again"
        return PlatformError("Spark is out of memory", cause=first_error_line(error), next=advice)
    if signal_number is None:
        advice = "read what Java said above, then run again: a run goes on from the last commit"
        return PlatformError("Spark's JVM is gone", cause=first_error_line(error), next=advice)
    message = f"Spark's JVM was ended by signal {signal_number}"
    if signal_number == signal.SIGKILL:
        advice = f"{SIGKILL_ADVICE}.\nThen run again"
        return PlatformError(message, cause=SIGKILL_CAUSE, next=advice)
    advice = "run again: a run goes on from the last commit"
    return PlatformError(message, cause="somebody ended it", next=advice)


def is_connect_server_gone(error: Exception) -> bool:
    """Whether an error means that nobody answers for the Spark Connect server, or a server that was
    started anew and does not know our session.
    """
    # Errors of Spark's classic API have no such code.
    find_code = getattr(error, "getGrpcStatusCode", None)
    if find_code is None:
        return False
    return find_code().name == "UNAVAILABLE" or "INVALID_HANDLE" in str(error)


def _jvm_signal() -> int | None:
    """The signal that ended the JVM; None if it ended otherwise, still runs, or is not our child.

    Under spark-submit the JVM has started us, and only the process that started spark-submit sees
    how it ends.
    """
    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if process is None:
        return None
    try:
        exit_code: int = process.wait(JVM_END_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return -exit_code if exit_code < 0 else None


def is_jvm_dead(error: Exception) -> bool:
    """Whether an error means that the JVM is gone or out of memory."""
    if isinstance(error, Py4JNetworkError | ConnectionError):
        return True
    text = str(error)
    if any(death_error in text for death_error in JVM_DEATH_ERRORS):
        return True
    # A plain Py4JError has a stack trace of several lines, unless nobody was there to write one.
    return type(error) is Py4JError and "\n" not in text


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A temporary folder on this host, for what Spark itself writes. Folders that killed processes of
    this host left behind are deleted, too.
    """
    temporary = Path(tempfile.gettempdir())
    prefix = f"seriatim-{purpose}-{socket.gethostname()}-"
    for path in temporary.glob(f"{prefix}*"):
        match = re.fullmatch(rf"{re.escape(prefix)}(\d+)-\w+", path.name)
        if match and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class SparkReader:
    """Reads Kafka through Spark's own source."""

    def __init__(self, spark: SparkSession, kafka: ClientSettings) -> None:
        self.spark = spark
        self._options = {
            **{f"kafka.{key}": value for key, value in kafka.items()},
            **FETCH_SETTINGS,
            "failOnDataLoss": "true",
        }

    def read_slices(
        self,
        starts: OffsetByPartition,
        messages_max: int,
        on_slice: OnSlice,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        """Read from `starts` to the present log ends, with one slice per batch of an AvailableNow
        query.
        """
        with scratch_folder("checkpoint") as checkpoint_folder, translate_spark_errors():
            frame = self._stream_frame(starts, messages_max, options)

            def make_source(ranges: Ranges, batch: DataFrame) -> Source:
                return SparkSource(batch, ranges, options)

            _AvailableNowQuery(frame, checkpoint_folder, starts, on_slice, make_source).run()

    def read_ranges(
        self, ranges: Ranges, options: ReadOptions = DEFAULT_READ_OPTIONS
    ) -> SparkSource:
        """Read exactly these ranges, through the batch reader."""
        starts = {partition: offset_range.start for partition, offset_range in ranges.items()}
        ends = {partition: offset_range.end for partition, offset_range in ranges.items()}
        with translate_spark_errors():
            reader = self.spark.read.format("kafka")
            reader = reader.options(**self._options, **_spark_options(options))
            reader = reader.option("assign", _assignment_json(ranges))
            reader = reader.option("startingOffsets", json.dumps(offsets_to_json(starts)))
            reader = reader.option("endingOffsets", json.dumps(offsets_to_json(ends)))
            return SparkSource(reader.load(), ranges, options)

    def _stream_frame(
        self, starts: OffsetByPartition, messages_max: int, options: ReadOptions
    ) -> DataFrame:
        reader = self.spark.readStream.format("kafka")
        reader = reader.options(**self._options, **_spark_options(options))
        reader = reader.option("assign", _assignment_json(starts))
        reader = reader.option("startingOffsets", json.dumps(offsets_to_json(starts)))
        reader = reader.option("maxOffsetsPerTrigger", messages_max)
        return reader.load()


def _spark_options(options: ReadOptions) -> dict[str, str]:
    """Read options as options of Spark's source."""
    poll_messages = POLL_MESSAGES_DEFAULT
    if options.average_message_bytes:
        poll_messages = POLL_BYTES // options.average_message_bytes
    poll_messages = max(POLL_MESSAGES_MIN, min(POLL_MESSAGES_MAX, poll_messages))
    return {
        "includeHeaders": str(options.with_headers).lower(),
        "kafka.max.poll.records": str(poll_messages),
    }


class SparkSource:
    """The messages of a slice as a frame, for one task per partition."""

    def __init__(self, frame: DataFrame, ranges: Ranges, options: ReadOptions) -> None:
        self.frame = frame
        self.ranges = ranges
        self.options = options

    def build_frame(self, task: ArrowTask, *, has_small_messages: bool = False) -> DataFrame:
        """The frame that sorts the messages of each partition and runs the task on them. Nothing is
        exchanged between partitions.
        """
        batch_bytes = UNBOUNDED_BATCH_BYTES if has_small_messages else BATCH_BYTES
        self.frame.sparkSession.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", batch_bytes)
        columns = list(KAFKA_COLUMNS)
        if self.options.with_headers:
            columns.append("headers")
        # Spark promises no order inside a partition, so the sort is explicit. It costs next to
        # nothing on messages that are in order, and the task checks the offsets in any case.
        messages = self.frame.select(*columns)
        ordered = messages.sortWithinPartitions("topic", "partition", "offset")
        return ordered.mapInArrow(_PartitionMapper(task, self.ranges), RESULT_SCHEMA)

    def map(self, task: ArrowTask, *, has_small_messages: bool = False) -> list[bytes]:
        """Run the task on every partition; the results."""
        with translate_spark_errors():
            frame = self.build_frame(task, has_small_messages=has_small_messages)
            return _read_answers(frame.collect())


class _PartitionMapper:
    """Runs in the worker: finds out which partition it has, and gives its batches to the task."""

    def __init__(self, task: ArrowTask, ranges: Ranges) -> None:
        self.task = task
        self.ranges = ranges
        self.versions = worker_setup.versions_here()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        filled_batches = (batch for batch in batches if batch.num_rows)
        first_batch = next(filled_batches, None)
        if first_batch is None:
            return
        topic = first_batch.column("topic")[0].as_py()
        number = first_batch.column("partition")[0].as_py()
        partition = Partition(topic, number)
        messages = _checked_batches(partition, first_batch, filled_batches)
        answer = RangeAnswer.of(
            partition,
            self.versions,
            lambda: self.task(partition, self.ranges[partition], messages),
        )
        yield _answer_batch(answer)


def _answer_batch(answer: RangeAnswer) -> pa.RecordBatch:
    content = msgspec.msgpack.encode(answer)
    return pa.RecordBatch.from_pydict({"result": pa.array([content], pa.binary())})


def _read_answers(rows: Iterable[Row]) -> list[bytes]:
    """The results of all tasks. A failure is raised."""
    answers = [msgspec.msgpack.decode(row.result, type=RangeAnswer) for row in rows]
    # A range that could not be read comes before any other failure: discovery finds out what
    # happened to the log, and that may explain the others.
    for answer in answers:
        answer.raise_read_failure()
    for answer in answers:
        if answer.failure is not None:
            raise answer.failure.to_error()
    return [answer.result for answer in answers if answer.result is not None]


def _checked_batches(
    partition: Partition, first_batch: pa.RecordBatch, further_batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """All batches, each checked to be of this partition alone."""
    expected = [(partition.topic, partition.number)] * 2
    for batch in chain([first_batch], further_batches):
        topics = batch.column("topic")
        numbers = batch.column("partition")
        # The rows are sorted by topic and partition, so the first and the last one say it for all.
        ends = [(topics[i].as_py(), numbers[i].as_py()) for i in (0, batch.num_rows - 1)]
        if ends != expected:
            raise_broken_promise(
                "a task has one partition", partition=str(partition), found=str(ends)
            )
        yield batch


class TaskReader:
    """Lets the tasks read Kafka themselves: Spark hands out ranges, and no message passes through
    the JVM.
    """

    def __init__(
        self,
        spark: SparkSession,
        read_range: ReadRange,
        read_bounds: Callable[[], BoundsByPartition],
        *,
        has_queries: bool = True,
    ) -> None:
        self.spark = spark
        self.read_range = read_range
        self.read_bounds = read_bounds
        self.has_queries = has_queries
        """Whether slices are the batches of a query. Under Spark Connect `foreachBatch` runs on the
        server, which cannot commit for us, so that slices are cut here.
        """

    def read_slices(
        self,
        starts: OffsetByPartition,
        messages_max: int,
        on_slice: OnSlice,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        """Read from `starts` to the present log ends. Raises `SourceFailedError` if a start is not
        in its log.
        """
        ranges = drop_empty_ranges(ranges_to_log_ends(starts, self.read_bounds()))
        if not ranges:
            return
        if self.has_queries and self._read_by_query(ranges, messages_max, on_slice, options):
            return
        for slice_ranges in cut_into_slices(ranges, messages_max):
            if not on_slice(slice_ranges, self.read_ranges(slice_ranges, options)):
                return

    def _read_by_query(
        self, ranges: Ranges, messages_max: int, on_slice: OnSlice, options: ReadOptions
    ) -> bool:
        """Read the ranges in the batches of a query. Returns False, with nothing read, if Spark
        cannot start it.
        """
        has_begun = False

        def make_source(slice_ranges: Ranges, _: DataFrame) -> Source:
            nonlocal has_begun
            has_begun = True
            # The ranges are known. To read them from the batch's frame, Spark would start a second
            # Python worker beside each task.
            return TaskSource(self.spark, slice_ranges, self.read_range, options)

        first_offsets = {partition: taken.start for partition, taken in ranges.items()}
        try:
            with scratch_folder("checkpoint") as checkpoint_folder, translate_spark_errors():
                frame = self._stream_frame(ranges, messages_max)
                query = _AvailableNowQuery(
                    frame, checkpoint_folder, first_offsets, on_slice, make_source
                )
                query.run()
        except SourceFailedError as error:
            if has_begun:
                raise
            # Spark waits about ten seconds for the Python process that plans; we found no setting
            # for it. On a host that is too busy for it the slices can be cut without the query.
            log.warning("slices are cut here, because Spark did not start to plan them: %s", error)
            return False
        return True

    def _stream_frame(self, ranges: Ranges, messages_max: int) -> DataFrame:
        """The ranges as rows of our own streaming source."""
        self.spark.dataSource.register(RangeSource)
        starts = {partition: taken.start for partition, taken in ranges.items()}
        ends = {partition: taken.end for partition, taken in ranges.items()}
        reader = self.spark.readStream.format(RangeSource.name())
        reader = reader.option("starts", json.dumps(offsets_to_json(starts)))
        reader = reader.option("ends", json.dumps(offsets_to_json(ends)))
        return reader.option("messages_max", messages_max).load()

    def read_ranges(
        self, ranges: Ranges, options: ReadOptions = DEFAULT_READ_OPTIONS
    ) -> TaskSource:
        """Read exactly these ranges."""
        return TaskSource(self.spark, ranges, self.read_range, options)


class RangeAnswer(Struct, frozen=True, kw_only=True):
    """What the task of one range answers. Failures are values, because Spark would pass on an error
    as the text of a stack trace.
    """

    result: bytes | None = None
    """None if no message of the range arrived, or if there is a failure."""
    failure: Failure | None = None
    read_failure: str = ""
    """Why the range could not be read."""
    is_unreadable_message: bool = False
    """The failure to read is a message that cannot be read."""

    @classmethod
    def of(
        cls,
        partition: Partition,
        driver: worker_setup.Versions,
        fold: Callable[[], bytes | None],
    ) -> RangeAnswer:
        """Called in the worker: fold, if it has the driver's versions, and answer."""
        try:
            worker_setup.refuse_other_versions(driver)
            return cls(result=fold())
        except SourceFailedError as error:
            return cls(
                read_failure=str(error) or type(error).__name__,
                is_unreadable_message=isinstance(error, UnreadableMessageError),
            )
        except Exception as error:  # noqa: BLE001  # the driver reports it once
            our_error = as_worker_error(str(partition), error)
            worker_setup.name_worker(our_error)
            return cls(failure=Failure.of(our_error))

    def raise_read_failure(self) -> None:
        """Raise the failure to read, if there is one."""
        if self.is_unreadable_message:
            raise UnreadableMessageError(self.read_failure)
        if self.read_failure:
            raise SourceFailedError(self.read_failure)


class TaskSource:
    """The ranges of a slice, for one task per partition. They are handed out by number."""

    def __init__(
        self,
        spark: SparkSession,
        ranges: Ranges,
        read_range: ReadRange,
        options: ReadOptions,
    ) -> None:
        self.spark = spark
        self.read_range = read_range
        self.options = options
        filled_ranges = drop_empty_ranges(ranges)
        # The longest begins first, so that it is not the one that all others wait for.
        self.ranges = sorted(filled_ranges.items(), key=lambda item: (-len(item[1]), item[0]))

    def build_frame(self, task: ArrowTask) -> DataFrame:
        """The frame that runs the task once for each range. Nothing is exchanged between them."""
        # A row with a number for each range, each in a partition of Spark's own.
        range_count = len(self.ranges)
        frame = self.spark.range(0, range_count, 1, range_count)
        mapper = _RangeMapper(task, self.read_range, self.ranges, self.options)
        return frame.mapInArrow(mapper, RESULT_SCHEMA)

    def map(self, task: ArrowTask, *, has_small_messages: bool = False) -> list[bytes]:
        """Run the task on every partition; the results. `has_small_messages` has no effect: the
        range reader bounds its batches by itself.
        """
        if not self.ranges:
            return []
        with translate_spark_errors():
            rows = self.build_frame(task).collect()
        return _read_answers(rows)


class _RangeMapper:
    """Runs in the worker: reads the ranges of its rows, and gives their messages to the task."""

    def __init__(
        self,
        task: ArrowTask,
        read_range: ReadRange,
        numbered_ranges: list[tuple[Partition, OffsetRange]],
        options: ReadOptions,
    ) -> None:
        self.task = task
        self.read_range = read_range
        self.numbered_ranges = numbered_ranges
        self.options = options
        self.versions = worker_setup.versions_here()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                partition, offset_range = self.numbered_ranges[number]
                yield _answer_batch(self._answer(partition, offset_range))

    def _answer(self, partition: Partition, offset_range: OffsetRange) -> RangeAnswer:
        def fold() -> bytes | None:
            messages = self.read_range(partition, offset_range, self.options.with_headers)
            first_batch = next(messages, None)
            if first_batch is None:
                return None
            return self.task(partition, offset_range, chain([first_batch], messages))

        return RangeAnswer.of(partition, self.versions, fold)


class _StopQuery(Exception):  # noqa: N818  # a signal to Spark, not an error
    """Ends a query from inside one of its batches."""


class _AvailableNowQuery:
    """One AvailableNow query."""

    def __init__(
        self,
        frame: DataFrame,
        checkpoint_folder: Path,
        starts: OffsetByPartition,
        on_slice: OnSlice,
        make_source: Callable[[Ranges, DataFrame], Source],
    ) -> None:
        self.frame = frame
        self.checkpoint_folder = checkpoint_folder
        self.frontier = dict(starts)
        self.on_slice = on_slice
        self.make_source = make_source
        self.failure: BaseException | None = None
        """What `_on_batch` raised. Spark passes it on as text only."""

    def run(self) -> None:
        """Run until the query ends by itself, or `on_slice` returns False."""
        writer = self.frame.writeStream.foreachBatch(self._on_batch).trigger(availableNow=True)
        try:
            query = writer.option("checkpointLocation", str(self.checkpoint_folder)).start()
            query.awaitTermination()
        except (PySparkException, Py4JError, ConnectionError):
            # Spark reports only that the batch function raised. What it raised is kept here.
            if isinstance(self.failure, _StopQuery):
                return
            if self.failure is not None:
                raise self.failure from None
            raise

    def _on_batch(self, frame: DataFrame, number: int) -> None:
        """Handle one batch, which is one slice. Spark does not tell its ranges; the ends are in the
        offset log of the checkpoint.
        """
        try:
            ends = self._end_offsets(number)
            ranges = {}
            for partition, start in self.frontier.items():
                ranges[partition] = OffsetRange(start, ends[partition])
            should_continue = self.on_slice(ranges, self.make_source(ranges, frame))
            # The checkpoint says only where a batch ends: the next one begins there.
            self.frontier = ends
            if not should_continue:
                raise _StopQuery
        except BaseException as error:
            self.failure = error
            raise

    def _end_offsets(self, number: int) -> dict[Partition, int]:
        """The end offset of each partition in a batch."""
        lines = (self.checkpoint_folder / "offsets" / str(number)).read_text().splitlines()
        # The third line has the source's offsets: {"topic": {"0": 1234}}.
        return {**self.frontier, **offsets_from_json(json.loads(lines[2]))}


def _assignment_json(partitions: Iterable[Partition]) -> str:
    topics: dict[str, list[int]] = {}
    for partition in sorted(partitions):
        topics.setdefault(partition.topic, []).append(partition.number)
    return json.dumps(topics)


def first_error_line(error: BaseException) -> str:
    """The line that matters of an error of many lines: the Python worker's own exception, the last
    cause, or the first line.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if TRACEBACK_LINE in lines:
        traceback_lines = lines[lines.index(TRACEBACK_LINE) + 1 :]
        python_errors = [line for line in traceback_lines if PYTHON_ERROR.match(line)]
        lines = python_errors or lines
    causes = [line for line in lines if line.startswith("Caused by:")]
    if causes:
        line = causes[-1].removeprefix("Caused by:").strip()
    elif lines:
        line = lines[0]
    else:
        line = type(error).__name__
    # A Python that did not start has no exception of its own, and Spark's has no text.
    if PYTHON_START_LINE in lines[:-1] and line.endswith(":"):
        line = lines[lines.index(PYTHON_START_LINE) + 1]
    return line[:ERROR_LINE_MAX]
