"""Spark: reads bounded ranges of Kafka, one task per topic-partition, no shuffle.

AvailableNow through `foreachBatch` on the main path; the batch reader where ranges are given. Both
give the same frame to the same task. The checkpoint is scratch: a new folder per reading, deleted
after it. Where the stream says `read = "task"`, Spark hands out the ranges alone, and each task
reads its own.

Next room: wiring.py makes the task; operations/run.py asks for slices.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]  # it has no types
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.errors import SIGKILL_ADVICE, SIGKILL_CAUSE, PlatformError, raise_broken_promise
from seriatim.operations.slicing import Bounds, Ranges, cut_into_slices
from seriatim.ports import (
    DEFAULT_READ_OPTIONS,
    OnSlice,
    ReadOptions,
    SourceFailedError,
    UnreadableMessageError,
)
from seriatim.storage.files import scratch_folder

ArrowTask = Callable[[Partition, Iterable[pa.RecordBatch]], bytes]
ReadRange = Callable[[Partition, OffsetRange, bool], Iterator[pa.RecordBatch]]
"""Reads a range where it is called, with headers or without."""
RESULT_SCHEMA = "result binary"
PYTHON_ERROR = re.compile(
    r"[\w.]+(Error|Exception|Interrupt|Exit|SourceFailedError|UnreadableMessageError)\b"
)
MESSAGE_COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value")
UNBOUNDED_BATCH_BYTES, BATCH_BYTES = str(2**31 - 1), str(64 << 20)
"""Bounds of an Arrow batch. Without one Spark need not weigh every row, which costs half a
microsecond.
"""
FETCH_SETTINGS = {
    "kafka.max.partition.fetch.bytes": str(8 << 20),
    "kafka.fetch.max.bytes": str(32 << 20),
}
"""Large fetches cost less CPU per message than the defaults; larger ones fill the heap where
messages are large.
"""
POLL_BYTES, POLL_MESSAGES_MAX, POLL_MESSAGES_MIN, POLL_MESSAGES_DEFAULT = 64 << 20, 5000, 10, 200
"""A poll is unpacked into the heap as a whole, and a fetch of 8 MiB may unpack to gigabytes. Of
messages that nobody has seen yet it takes few (half a microsecond a message), of known ones as many
as fit.
"""
UNREADABLE_MESSAGE_ERRORS = (
    "java.lang.ArithmeticException: long overflow",
    UnreadableMessageError.__name__,
)
"""What Spark's source, and our own, say of a message whose timestamp in microseconds does not fit
64 bits.
"""
HEAP = ("Java heap space", "OutOfMemoryError")
"""What Java says when it has no memory left."""
JVM_DEATH_ERRORS = ("Answer from Java side is empty", *HEAP)
"""What is said of a JVM that died or has no memory left."""
JVM_END_SECONDS = 5.0
"""Between the moment when a JVM stops answering and the end of its process."""
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


def create_spark_session(
    name: str,
    master: str,
    driver_memory: str,
    jars: Iterable[Path],
    java_options: str,
    extra_settings: Mapping[str, str],
) -> SparkSession:
    """A Spark session of ours: quiet and in UTC."""
    _silence_py4j()
    settings = {
        **SESSION_SETTINGS,
        "spark.jars": ",".join(map(str, jars)),
        "spark.driver.memory": driver_memory,
        "spark.driver.extraJavaOptions": java_options,
        **extra_settings,
    }
    return _start_session(SparkSession.builder.appName(f"seriatim {name}").master(master), settings)


def create_submitted_session(name: str) -> SparkSession:
    """A session in the JVM that spark-submit started: master, JARs and memory are those it was
    submitted with.
    """
    _silence_py4j()
    return _start_session(SparkSession.builder.appName(f"seriatim {name}"), SESSION_SETTINGS)


def _start_session(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except Exception as error:  # py4j and pyspark raise many kinds
        raise PlatformError(
            "Spark did not start", cause=first_error_line(error), next="run `seriatim doctor`"
        ) from error


def stop_spark_session(session: SparkSession) -> None:
    """End a session; one whose JVM died has ended."""
    with suppress(Py4JError, ConnectionError), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # pyspark's word that the JVM is gone: it was told already
        session.stop()


def _silence_py4j() -> None:
    """No traces of py4j's: what they tell is in the error that we raise."""
    py4j = logging.getLogger("py4j")
    py4j.setLevel(logging.CRITICAL)
    py4j.propagate = False
    logging.getLogger().addFilter(_is_not_py4j)  # it also logs to the root, in its own name nowhere


def _is_not_py4j(line: logging.LogRecord) -> bool:
    return "py4j" not in Path(line.pathname).parts


@contextmanager
def _translate_spark_errors() -> Iterator[None]:
    """Failures of Spark, told apart: it died, or reading broke and discovery decides what that
    means.
    """
    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:
        if not is_jvm_dead(error):
            failed = (
                UnreadableMessageError
                if any(said in str(error) for said in UNREADABLE_MESSAGE_ERRORS)
                else SourceFailedError
            )
            raise failed(first_error_line(error)) from error
        raise death(error, _jvm_signal()) from error


def death(error: Exception, signal_number: int | None) -> PlatformError:
    """What is known of the end of Spark's JVM. `signal_number`: None if no signal ended it, or
    nobody knows.
    """
    if any(words in str(error) for words in HEAP):
        advice = "lower --messages-max or raise SERIATIM_SPARK_DRIVER_MEMORY, then run again"
        return PlatformError("Spark is out of memory", cause=first_error_line(error), next=advice)
    if signal_number is None:
        advice = "read what Java said above, then run again: a run goes on from the last commit"
        return PlatformError("Spark's JVM is gone", cause=first_error_line(error), next=advice)
    message = f"Spark's JVM was ended by signal {signal_number}"
    if signal_number == signal.SIGKILL:
        return PlatformError(
            message, cause=SIGKILL_CAUSE, next=f"{SIGKILL_ADVICE}.\nThen run again"
        )
    return PlatformError(
        message, cause="somebody ended it", next="run again: a run goes on from the last commit"
    )


def _jvm_signal() -> int | None:
    """The signal that ended the JVM; None if it ended otherwise, still runs, or is not a process of
    ours.

    Under spark-submit the JVM started us, and how it ends is seen by whoever started spark-submit.
    """
    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if process is None:
        return None
    try:
        code: int = process.wait(JVM_END_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return -code if code < 0 else None


def is_jvm_dead(error: Exception) -> bool:
    """Whether an error means that the JVM is gone or out of memory. Only such a Py4JError comes
    without a trace.
    """
    text = str(error)
    gone = isinstance(error, Py4JNetworkError | ConnectionError)
    return (
        gone
        or any(said in text for said in JVM_DEATH_ERRORS)
        or (type(error) is Py4JError and "\n" not in text)
    )


class SparkReader:
    """Kafka through Spark's own source."""

    def __init__(self, spark: SparkSession, kafka: Mapping[str, str]) -> None:
        self.spark = spark
        self._options = {
            **{f"kafka.{key}": value for key, value in kafka.items()},
            **FETCH_SETTINGS,
            "failOnDataLoss": "true",
        }

    def read_slices(
        self,
        starts: Mapping[Partition, int],
        messages_max: int,
        on_slice: OnSlice,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        """From `starts` to the log ends of now: AvailableNow, a slice per batch."""
        with scratch_folder("checkpoint") as scratch, _translate_spark_errors():
            _AvailableNowQuery(
                self._stream_frame(starts, messages_max, options),
                scratch,
                dict(starts),
                on_slice,
                options,
            ).run()

    def read_ranges(
        self, ranges: Ranges, options: ReadOptions = DEFAULT_READ_OPTIONS
    ) -> SparkSource:
        """These ranges and no others, through the batch reader."""
        with _translate_spark_errors():
            reader = self.spark.read.format("kafka").options(
                **self._options, **_spark_options(options)
            )
            frame = (
                reader.option("assign", _assignment_json(ranges))
                .option(
                    "startingOffsets",
                    _offsets_json({p: whole.start for p, whole in ranges.items()}),
                )
                .option(
                    "endingOffsets", _offsets_json({p: whole.end for p, whole in ranges.items()})
                )
                .load()
            )
            return SparkSource(frame, options)

    def _stream_frame(
        self, starts: Mapping[Partition, int], messages_max: int, options: ReadOptions
    ) -> DataFrame:
        reader = self.spark.readStream.format("kafka").options(
            **self._options, **_spark_options(options)
        )
        return (
            reader.option("assign", _assignment_json(starts))
            .option("startingOffsets", _offsets_json(starts))
            .option("maxOffsetsPerTrigger", messages_max)
            .load()
        )


def _spark_options(options: ReadOptions) -> dict[str, str]:
    """What a wish means for the source."""
    fitting = (
        POLL_BYTES // options.average_message_bytes
        if options.average_message_bytes
        else POLL_MESSAGES_DEFAULT
    )
    records = max(POLL_MESSAGES_MIN, min(POLL_MESSAGES_MAX, fitting))
    return {
        "includeHeaders": str(options.with_headers).lower(),
        "kafka.max.poll.records": str(records),
    }


class SparkSource:
    """A slice's messages as a frame, ready for one task per partition."""

    def __init__(self, frame: DataFrame, options: ReadOptions) -> None:
        self.frame, self.options = frame, options

    def build_frame(self, task: ArrowTask, *, has_small_messages: bool = False) -> DataFrame:
        """Sorted explicitly, then through the task; nothing is exchanged between partitions."""
        limit = UNBOUNDED_BATCH_BYTES if has_small_messages else BATCH_BYTES
        self.frame.sparkSession.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", limit)
        columns = [*MESSAGE_COLUMNS, "headers"] if self.options.with_headers else MESSAGE_COLUMNS
        ordered = self.frame.select(*columns).sortWithinPartitions("topic", "partition", "offset")
        return ordered.mapInArrow(_PartitionMapper(task), RESULT_SCHEMA)

    def map(self, task: ArrowTask, *, has_small_messages: bool = False) -> list[bytes]:
        """Run the task on every partition; its answers."""
        with _translate_spark_errors():
            return [
                bytes(row.result)
                for row in self.build_frame(task, has_small_messages=has_small_messages).collect()
            ]


class _PartitionMapper:
    """What runs in the worker: finds out which partition it has, and hands it to the task."""

    def __init__(self, task: ArrowTask) -> None:
        self.task = task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        filled = (batch for batch in batches if batch.num_rows)
        first = next(filled, None)
        if first is None:
            return
        partition = Partition(
            first.column("topic")[0].as_py(), first.column("partition")[0].as_py()
        )
        result = self.task(partition, _checked_batches(partition, first, filled))
        yield pa.RecordBatch.from_pydict({"result": pa.array([result], pa.binary())})


def _checked_batches(
    partition: Partition, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """All batches, each proved to be of this partition alone."""
    for batch in _chain(first, rest):
        topics, numbers = batch.column("topic"), batch.column("partition")
        ends = [(topics[i].as_py(), numbers[i].as_py()) for i in (0, batch.num_rows - 1)]
        if ends != [(partition.topic, partition.number)] * 2:
            raise_broken_promise(
                "a task has one partition", partition=str(partition), found=str(ends)
            )
        yield batch


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


class TaskReader:
    """Kafka read by the tasks themselves: Spark hands out ranges, and no message passes through the
    JVM.
    """

    def __init__(
        self,
        spark: SparkSession,
        read_range: ReadRange,
        read_bounds: Callable[[], Mapping[Partition, Bounds]],
    ) -> None:
        self.spark, self.read_range, self.read_bounds = spark, read_range, read_bounds

    def read_slices(
        self,
        starts: Mapping[Partition, int],
        messages_max: int,
        on_slice: OnSlice,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> None:
        """From `starts` to the log ends of now."""
        bounds = self.read_bounds()
        for partition, start in starts.items():
            seen = bounds.get(partition)
            if seen is None or not seen.log_start <= start <= seen.log_end:
                there = "gone" if seen is None else f"[{seen.log_start}, {seen.log_end})"
                raise SourceFailedError(
                    f"{partition}: offset {start} was to be read, and the log is {there}"
                )
        ranges = {
            partition: OffsetRange(start, bounds[partition].log_end)
            for partition, start in starts.items()
        }
        for piece in cut_into_slices(ranges, messages_max):
            if not on_slice(piece, self.read_ranges(piece, options)):
                return

    def read_ranges(
        self, ranges: Ranges, options: ReadOptions = DEFAULT_READ_OPTIONS
    ) -> TaskSource:
        """These ranges and no others."""
        return TaskSource(self.spark, ranges, self.read_range, options)


class TaskSource:
    """A slice's ranges, ready for one task per partition."""

    def __init__(
        self, spark: SparkSession, ranges: Ranges, read_range: ReadRange, options: ReadOptions
    ) -> None:
        self.spark, self.read_range, self.options = spark, read_range, options
        filled = [(partition, whole) for partition, whole in sorted(ranges.items()) if len(whole)]
        self.ranges = sorted(filled, key=lambda one: -len(one[1]))  # the longest begin first

    def map(
        self, task: ArrowTask, *, has_small_messages: bool = False
    ) -> list[bytes]:  # we weigh what we gather
        """Run the task on every partition; its answers."""
        if not self.ranges:
            return []
        with _translate_spark_errors():
            numbers = self.spark.range(0, len(self.ranges), 1, len(self.ranges))
            found = numbers.mapInArrow(
                _RangeMapper(task, self.read_range, self.ranges, self.options), RESULT_SCHEMA
            )
            return [bytes(row.result) for row in found.collect()]


class _RangeMapper:
    """What runs in the worker: reads the range of its number, and hands it to the task."""

    def __init__(
        self,
        task: ArrowTask,
        read_range: ReadRange,
        ranges: list[tuple[Partition, OffsetRange]],
        options: ReadOptions,
    ) -> None:
        self.task, self.read_range, self.ranges, self.options = task, read_range, ranges, options

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in (number for batch in batches for number in batch.column("id").to_pylist()):
            partition, whole = self.ranges[number]
            found = self.read_range(partition, whole, self.options.with_headers)
            if (first := next(found, None)) is not None:
                result = self.task(partition, _chain(first, found))
                yield pa.RecordBatch.from_pydict({"result": pa.array([result], pa.binary())})


class _StopQuery(Exception):  # noqa: N818  # a signal to Spark, not an error
    """Ends a query from inside its own batch."""


class _AvailableNowQuery:
    """One AvailableNow query."""

    def __init__(
        self,
        frame: DataFrame,
        checkpoint_folder: Path,
        starts: dict[Partition, int],
        on_slice: OnSlice,
        options: ReadOptions,
    ) -> None:
        self.frame, self.checkpoint_folder, self.frontier, self.on_slice, self.options = (
            frame,
            checkpoint_folder,
            starts,
            on_slice,
            options,
        )
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Until the query ends by itself, or a slice says enough."""
        writer = self.frame.writeStream.foreachBatch(self._on_batch).trigger(availableNow=True)
        try:
            query = writer.option("checkpointLocation", str(self.checkpoint_folder)).start()
            query.awaitTermination()
        except (PySparkException, Py4JError, ConnectionError):
            if isinstance(self.failure, _StopQuery):
                return
            if self.failure is not None:
                raise self.failure from None
            raise

    def _on_batch(self, frame: DataFrame, number: int) -> None:
        """One batch is one slice; its ends are in the checkpoint's offset log."""
        try:
            ends = self._end_offsets(number)
            ranges = {p: OffsetRange(start, ends[p]) for p, start in self.frontier.items()}
            go_on = self.on_slice(ranges, SparkSource(frame, self.options))
            self.frontier = ends
            if not go_on:
                raise _StopQuery
        except BaseException as error:
            self.failure = error
            raise

    def _end_offsets(self, number: int) -> dict[Partition, int]:
        lines = (self.checkpoint_folder / "offsets" / str(number)).read_text().splitlines()
        ends = {
            Partition(t, int(p)): o
            for t, parts in json.loads(lines[2]).items()
            for p, o in parts.items()
        }
        return {partition: ends.get(partition, start) for partition, start in self.frontier.items()}


def _assignment_json(partitions: Iterable[Partition]) -> str:
    topics: dict[str, list[int]] = {}
    for partition in sorted(partitions):
        topics.setdefault(partition.topic, []).append(partition.number)
    return json.dumps(topics)


def _offsets_json(offsets: Mapping[Partition, int]) -> str:
    topics: dict[str, dict[str, int]] = {}
    for partition, offset in sorted(offsets.items()):
        topics.setdefault(partition.topic, {})[str(partition.number)] = offset
    return json.dumps(topics)


def first_error_line(error: BaseException) -> str:
    """What a JVM's hundred lines really say: a worker's own exception, the last cause, or the first
    line.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "Traceback (most recent call last):" in lines:
        after = lines[lines.index("Traceback (most recent call last):") + 1 :]
        lines = [line for line in after if PYTHON_ERROR.match(line)] or lines
    causes = [
        line.removeprefix("Caused by:").strip() for line in lines if line.startswith("Caused by:")
    ]
    return (causes[-1:] or lines[:1] or [type(error).__name__])[0][:600]
