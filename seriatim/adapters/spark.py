"""Spark: reads bounded ranges of Kafka, one task per topic-partition, no shuffle.

AvailableNow through `foreachBatch` on the main path; the batch reader where ranges are given. Both give
the same frame to the same task. The checkpoint is scratch: a new folder per reading, deleted after it.
Where the stream says `read = "task"`, Spark hands out the ranges alone, and each task reads its own.

Next room: wiring.py makes the task; steps/fold.py asks for slices.
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

from seriatim.core.errors import SIGKILL_ADVICE, SIGKILL_CAUSE, PlatformError, broken
from seriatim.core.offsets import OffsetRange, Partition
from seriatim.core.slice import Bounds, Ranges, cut
from seriatim.disk import scratch_folder
from seriatim.ports import NO_WISH, OnSlice, SourceFailed, UnreadableMessage, Wish

ArrowTask = Callable[[Partition, Iterable[pa.RecordBatch]], bytes]
ReadRange = Callable[[Partition, OffsetRange, bool], Iterator[pa.RecordBatch]]
"""Reads a range where it is called, with headers or without."""
RESULT = "result binary"
PYTHON_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit|SourceFailed|UnreadableMessage)\b")
COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value")
ANY_BYTES, BATCH_BYTES = str(2**31 - 1), str(64 << 20)
"""Bounds of an Arrow batch. Without one Spark need not weigh every row, which costs half a microsecond."""
FETCH = {
    "kafka.max.partition.fetch.bytes": str(8 << 20),
    "kafka.fetch.max.bytes": str(32 << 20),
}
"""Large fetches cost less CPU per message than the defaults; larger ones fill the heap where messages are large."""
POLL_BYTES, POLL_MAX, POLL_MIN, POLL_UNKNOWN = 64 << 20, 5000, 10, 200
"""A poll is unpacked into the heap as a whole, and a fetch of 8 MiB may unpack to gigabytes. Of messages that nobody
has seen yet it takes few (half a microsecond a message), of known ones as many as fit."""
UNREADABLE = ("java.lang.ArithmeticException: long overflow", UnreadableMessage.__name__)
"""What Spark's source, and our own, say of a message whose timestamp in microseconds does not fit 64 bits."""
HEAP = ("Java heap space", "OutOfMemoryError")
"""What Java says when it has no memory left."""
DEAD = ("Answer from Java side is empty", *HEAP)
"""What is said of a JVM that died or has no memory left."""
JVM_END_SECONDS = 5.0
"""Between the moment when a JVM stops answering and the end of its process."""
SESSION = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "5000",
    "spark.sql.shuffle.partitions": "1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.streaming.stopTimeout": "30s",
    "spark.sql.streaming.numRecentProgressUpdates": "2",
    "spark.python.worker.faulthandler.enabled": "false",
}


def session(
    name: str,
    master: str,
    driver_memory: str,
    jars: Iterable[Path],
    java_options: str,
    more: Mapping[str, str],
) -> SparkSession:
    """A Spark session of ours: quiet and in UTC."""
    _quieten()
    settings = {
        **SESSION,
        "spark.jars": ",".join(map(str, jars)),
        "spark.driver.memory": driver_memory,
        "spark.driver.extraJavaOptions": java_options,
        **more,
    }
    return _started(SparkSession.builder.appName(f"seriatim {name}").master(master), settings)


def submitted_session(name: str) -> SparkSession:
    """A session in the JVM that spark-submit started: master, JARs and memory are those it was submitted with."""
    _quieten()
    return _started(SparkSession.builder.appName(f"seriatim {name}"), SESSION)


def _started(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except Exception as error:  # py4j and pyspark raise many kinds
        raise PlatformError("Spark did not start", cause=first_line(error), next="run `seriatim doctor`") from error


def stop(session: SparkSession) -> None:
    """End a session; one whose JVM died has ended."""
    with suppress(Py4JError, ConnectionError), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # pyspark's word that the JVM is gone: it was told already
        session.stop()


def _quieten() -> None:
    """No traces of py4j's: what they tell is in the error that we raise."""
    py4j = logging.getLogger("py4j")
    py4j.setLevel(logging.CRITICAL)
    py4j.propagate = False
    logging.getLogger().addFilter(_is_not_py4j)  # it also logs to the root, in its own name nowhere


def _is_not_py4j(line: logging.LogRecord) -> bool:
    return "py4j" not in Path(line.pathname).parts


@contextmanager
def _reading() -> Iterator[None]:
    """Failures of Spark, told apart: it died, or reading broke and discovery decides what that means."""
    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:
        if not has_died(error):
            failed = UnreadableMessage if any(said in str(error) for said in UNREADABLE) else SourceFailed
            raise failed(first_line(error)) from error
        raise death(error, _jvm_signal()) from error


def death(error: Exception, signal_number: int | None) -> PlatformError:
    """What is known of the end of Spark's JVM. `signal_number`: None if no signal ended it, or nobody knows."""
    if any(words in str(error) for words in HEAP):
        advice = "lower --messages-max or raise SERIATIM_SPARK_DRIVER_MEMORY, then run again"
        return PlatformError("Spark is out of memory", cause=first_line(error), next=advice)
    if signal_number is None:
        advice = "read what Java said above, then run again: a run goes on from the last commit"
        return PlatformError("Spark's JVM is gone", cause=first_line(error), next=advice)
    message = f"Spark's JVM was ended by signal {signal_number}"
    if signal_number == signal.SIGKILL:
        return PlatformError(message, cause=SIGKILL_CAUSE, next=f"{SIGKILL_ADVICE}.\nThen run again")
    return PlatformError(message, cause="somebody ended it", next="run again: a run goes on from the last commit")


def _jvm_signal() -> int | None:
    """The signal that ended the JVM; None if it ended otherwise, still runs, or is not a process of ours.

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


def has_died(error: Exception) -> bool:
    """Whether an error means that the JVM is gone or out of memory. Only such a Py4JError comes without a trace."""
    text = str(error)
    gone = isinstance(error, Py4JNetworkError | ConnectionError)
    return gone or any(said in text for said in DEAD) or (type(error) is Py4JError and "\n" not in text)


class SparkReader:
    """Kafka through Spark's own source."""

    def __init__(self, spark: SparkSession, kafka: Mapping[str, str]) -> None:
        self.spark = spark
        self._options = {
            **{f"kafka.{key}": value for key, value in kafka.items()},
            **FETCH,
            "failOnDataLoss": "true",
        }

    def follow(
        self, starts: Mapping[Partition, int], messages_max: int, on_slice: OnSlice, wish: Wish = NO_WISH
    ) -> None:
        """From `starts` to the log ends of now: AvailableNow, a slice per batch."""
        with scratch_folder("checkpoint") as scratch, _reading():
            _Following(self._stream(starts, messages_max, wish), scratch, dict(starts), on_slice, wish).run()

    def exactly(self, ranges: Ranges, wish: Wish = NO_WISH) -> SparkSource:
        """These ranges and no others, through the batch reader."""
        with _reading():
            reader = self.spark.read.format("kafka").options(**self._options, **_wished(wish))
            frame = (
                reader.option("assign", _assignment(ranges))
                .option("startingOffsets", _offsets({p: whole.start for p, whole in ranges.items()}))
                .option("endingOffsets", _offsets({p: whole.end for p, whole in ranges.items()}))
                .load()
            )
            return SparkSource(frame, wish)

    def _stream(self, starts: Mapping[Partition, int], messages_max: int, wish: Wish) -> DataFrame:
        reader = self.spark.readStream.format("kafka").options(**self._options, **_wished(wish))
        return (
            reader.option("assign", _assignment(starts))
            .option("startingOffsets", _offsets(starts))
            .option("maxOffsetsPerTrigger", messages_max)
            .load()
        )


def _wished(wish: Wish) -> dict[str, str]:
    """What a wish means for the source."""
    fitting = POLL_BYTES // wish.message_bytes if wish.message_bytes else POLL_UNKNOWN
    records = max(POLL_MIN, min(POLL_MAX, fitting))
    return {"includeHeaders": str(wish.headers).lower(), "kafka.max.poll.records": str(records)}


class SparkSource:
    """A slice's messages as a frame, ready for one task per partition."""

    def __init__(self, frame: DataFrame, wish: Wish) -> None:
        self.frame, self.wish = frame, wish

    def plan(self, task: ArrowTask, *, small: bool = False) -> DataFrame:
        """Sorted explicitly, then through the task; nothing is exchanged between partitions."""
        limit = ANY_BYTES if small else BATCH_BYTES
        self.frame.sparkSession.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", limit)
        columns = [*COLUMNS, "headers"] if self.wish.headers else COLUMNS
        ordered = self.frame.select(*columns).sortWithinPartitions("topic", "partition", "offset")
        return ordered.mapInArrow(_Mapped(task), RESULT)

    def map(self, task: ArrowTask, *, small: bool = False) -> list[bytes]:
        """Run the task on every partition; its answers."""
        with _reading():
            return [bytes(row.result) for row in self.plan(task, small=small).collect()]


class _Mapped:
    """What runs in the worker: finds out which partition it has, and hands it to the task."""

    def __init__(self, task: ArrowTask) -> None:
        self.task = task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        filled = (batch for batch in batches if batch.num_rows)
        first = next(filled, None)
        if first is None:
            return
        partition = Partition(first.column("topic")[0].as_py(), first.column("partition")[0].as_py())
        result = self.task(partition, _one_partition(partition, first, filled))
        yield pa.RecordBatch.from_pydict({"result": pa.array([result], pa.binary())})


def _one_partition(
    partition: Partition, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """All batches, each proved to be of this partition alone."""
    for batch in _chain(first, rest):
        topics, numbers = batch.column("topic"), batch.column("partition")
        ends = [(topics[i].as_py(), numbers[i].as_py()) for i in (0, batch.num_rows - 1)]
        if ends != [(partition.topic, partition.number)] * 2:
            broken("a task has one partition", partition=str(partition), found=str(ends))
        yield batch


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


class TaskReader:
    """Kafka read by the tasks themselves: Spark hands out ranges, and no message passes through the JVM."""

    def __init__(self, spark: SparkSession, read: ReadRange, bounds: Callable[[], Mapping[Partition, Bounds]]) -> None:
        self.spark, self.read, self.bounds = spark, read, bounds

    def follow(
        self, starts: Mapping[Partition, int], messages_max: int, on_slice: OnSlice, wish: Wish = NO_WISH
    ) -> None:
        """From `starts` to the log ends of now."""
        bounds = self.bounds()
        for partition, start in starts.items():
            seen = bounds.get(partition)
            if seen is None or not seen.log_start <= start <= seen.log_end:
                there = "gone" if seen is None else f"[{seen.log_start}, {seen.log_end})"
                raise SourceFailed(f"{partition}: offset {start} was to be read, and the log is {there}")
        ranges = {partition: OffsetRange(start, bounds[partition].log_end) for partition, start in starts.items()}
        for piece in cut(ranges, messages_max):
            if not on_slice(piece, self.exactly(piece, wish)):
                return

    def exactly(self, ranges: Ranges, wish: Wish = NO_WISH) -> TaskSource:
        """These ranges and no others."""
        return TaskSource(self.spark, ranges, self.read, wish)


class TaskSource:
    """A slice's ranges, ready for one task per partition."""

    def __init__(self, spark: SparkSession, ranges: Ranges, read: ReadRange, wish: Wish) -> None:
        self.spark, self.read, self.wish = spark, read, wish
        filled = [(partition, whole) for partition, whole in sorted(ranges.items()) if len(whole)]
        self.ranges = sorted(filled, key=lambda one: -len(one[1]))  # the longest begin first

    def map(self, task: ArrowTask, *, small: bool = False) -> list[bytes]:  # we weigh what we gather
        """Run the task on every partition; its answers."""
        if not self.ranges:
            return []
        with _reading():
            numbers = self.spark.range(0, len(self.ranges), 1, len(self.ranges))
            found = numbers.mapInArrow(_Read(task, self.read, self.ranges, self.wish), RESULT)
            return [bytes(row.result) for row in found.collect()]


class _Read:
    """What runs in the worker: reads the range of its number, and hands it to the task."""

    def __init__(
        self, task: ArrowTask, read: ReadRange, ranges: list[tuple[Partition, OffsetRange]], wish: Wish
    ) -> None:
        self.task, self.read, self.ranges, self.wish = task, read, ranges, wish

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in (number for batch in batches for number in batch.column("id").to_pylist()):
            partition, whole = self.ranges[number]
            found = self.read(partition, whole, self.wish.headers)
            if (first := next(found, None)) is not None:
                result = self.task(partition, _chain(first, found))
                yield pa.RecordBatch.from_pydict({"result": pa.array([result], pa.binary())})


class _Enough(Exception):  # noqa: N818  # a signal to Spark, not an error
    """Ends a query from inside its own batch."""


class _Following:
    """One AvailableNow query."""

    def __init__(
        self, frame: DataFrame, scratch: Path, starts: dict[Partition, int], on_slice: OnSlice, wish: Wish
    ) -> None:
        self.frame, self.scratch, self.frontier, self.on_slice, self.wish = frame, scratch, starts, on_slice, wish
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Until the query ends by itself, or a slice says enough."""
        writer = self.frame.writeStream.foreachBatch(self._batch).trigger(availableNow=True)
        try:
            query = writer.option("checkpointLocation", str(self.scratch)).start()
            query.awaitTermination()
        except (PySparkException, Py4JError, ConnectionError):
            if isinstance(self.failure, _Enough):
                return
            if self.failure is not None:
                raise self.failure from None
            raise

    def _batch(self, frame: DataFrame, number: int) -> None:
        """One batch is one slice; its ends are in the checkpoint's offset log."""
        try:
            ends = self._ends(number)
            ranges = {p: OffsetRange(start, ends[p]) for p, start in self.frontier.items()}
            go_on = self.on_slice(ranges, SparkSource(frame, self.wish))
            self.frontier = ends
            if not go_on:
                raise _Enough
        except BaseException as error:
            self.failure = error
            raise

    def _ends(self, number: int) -> dict[Partition, int]:
        lines = (self.scratch / "offsets" / str(number)).read_text().splitlines()
        ends = {Partition(t, int(p)): o for t, parts in json.loads(lines[2]).items() for p, o in parts.items()}
        return {partition: ends.get(partition, start) for partition, start in self.frontier.items()}


def _assignment(partitions: Iterable[Partition]) -> str:
    topics: dict[str, list[int]] = {}
    for partition in sorted(partitions):
        topics.setdefault(partition.topic, []).append(partition.number)
    return json.dumps(topics)


def _offsets(offsets: Mapping[Partition, int]) -> str:
    topics: dict[str, dict[str, int]] = {}
    for partition, offset in sorted(offsets.items()):
        topics.setdefault(partition.topic, {})[str(partition.number)] = offset
    return json.dumps(topics)


def first_line(error: BaseException) -> str:
    """What a JVM's hundred lines really say: a worker's own exception, the last cause, or the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "Traceback (most recent call last):" in lines:
        after = lines[lines.index("Traceback (most recent call last):") + 1 :]
        lines = [line for line in after if PYTHON_ERROR.match(line)] or lines
    causes = [line.removeprefix("Caused by:").strip() for line in lines if line.startswith("Caused by:")]
    return (causes[-1:] or lines[:1] or [type(error).__name__])[0][:600]
