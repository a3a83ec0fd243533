"""Workers on Spark: each piece of work is a row of a frame, in a partition of its own, so that a task gets its
own work only. Nothing is exchanged between tasks, and answers come back in the order of the works.

Function, works and answers are serialized by Spark's own serializer. They are sent between processes of
one application and never stored.

Next: workers.py says what holds for every kind of workers; context.py chooses where work is done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import pyarrow as pa
from msgspec import Struct
from pyspark import SparkFiles
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import SparkSession

from seriatim.engine.failure import Failure, as_worker_error
from seriatim.kafka import worker_setup
from seriatim.kafka.spark_reader import translate_spark_errors
from seriatim.workers import WORK_TEXT_MAX

WORKS_PER_JOB = 256
"""Works of one Spark job. The answers of a job come together, so fewer show progress sooner; more keep
all executors busy to the end.
"""
WORK_COLUMN = "work"
ANSWER_SCHEMA = "answer binary"
SLICES_SETTING = "spark.sql.leafNodeDefaultParallelism"
"""In how many partitions Spark cuts rows that the driver has: one for each work."""

W = TypeVar("W")
A = TypeVar("A")


class ClusterSession(Struct, frozen=True):
    """A session of a cluster, and the name under which its workers have the user's files."""

    session: SparkSession
    shipped_folder: str


class SparkWorkers:
    """The executors of a cluster. Spark is started with the first work."""

    def __init__(self, open_session: Callable[[], ClusterSession]) -> None:
        self.open_session = open_session

    def map(self, function: Callable[[W], A], works: Iterable[W]) -> Iterator[A | Failure]:
        """The answers, in the order of the works, job by job."""
        remaining = iter(works)
        serializer = CloudPickleSerializer()
        while contents := [serializer.dumps(work) for work in islice(remaining, WORKS_PER_JOB)]:
            for answer in self._run_job(function, contents):
                yield serializer.loads(answer)

    def _run_job(self, function: Callable[[W], A], contents: list[bytes]) -> list[bytes]:
        opened = self.open_session()
        opened.session.conf.set(SLICES_SETTING, str(len(contents)))
        works = pa.table({WORK_COLUMN: pa.array(contents, pa.binary())})
        with translate_spark_errors():
            mapper = _WorkMapper(function, opened.shipped_folder)
            frame = opened.session.createDataFrame(works).mapInArrow(mapper, ANSWER_SCHEMA)
            return [bytes(row.answer) for row in frame.collect()]


class _WorkMapper:
    """Runs in the worker: does the works of its rows."""

    def __init__(self, function: Callable[[Any], Any], shipped_folder: str) -> None:
        # The function may need modules of the user, which the worker must find before it loads it.
        self.function_content = CloudPickleSerializer().dumps(function)
        self.shipped_folder = shipped_folder
        self.versions = worker_setup.versions_here()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        serializer = CloudPickleSerializer()
        for batch in batches:
            for content in batch.column(WORK_COLUMN).to_pylist():
                answer = serializer.dumps(self._answer(content))
                yield pa.RecordBatch.from_pydict({"answer": pa.array([answer], pa.binary())})

    def _answer(self, content: bytes) -> Any:
        serializer = CloudPickleSerializer()
        work: Any = "a piece of work"
        try:
            worker_setup.refuse_other_versions(self.versions)
            folder = SparkFiles.get(self.shipped_folder)
            if folder not in sys.path:
                # At the end: a file of the user must not replace an installed package.
                sys.path.append(folder)
            work = serializer.loads(content)
            function = serializer.loads(self.function_content)
            return function(work)
        except Exception as error:  # noqa: BLE001  # the caller decides what a failure means
            failure = as_worker_error(str(work)[:WORK_TEXT_MAX], error)
            worker_setup.name_worker(failure)
            return Failure.of(failure)
