"""What Spark's hundred lines really say, in one."""

from __future__ import annotations

import pytest

from seriatim.kafka.spark_reader import first_error_line

JAVA = """An error occurred while calling o91.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2844)
Caused by: java.lang.IllegalStateException: Cannot fetch offset 10
\tat org.apache.spark.sql.kafka010.KafkaDataConsumer.fetchData(KafkaDataConsumer.scala:600)
\t... 22 more
Caused by: org.apache.kafka.clients.consumer.OffsetOutOfRangeException: offset 10 is out of range
\t... 30 more
"""
PYTHON = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/venv/pyspark/worker.py", line 1, in main
    process()
seriatim.errors.BrokenPromiseError: a task has one partition

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)
Caused by: java.io.EOFException
"""
NO_PYTHON = """An error occurred while calling o175.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Lost task 0.3 (10.0.0.7 executor 1):
Error from python worker:
  /usr/bin/python3.9: No module named seriatim.spark_daemon
PYTHONPATH was:
  /spark/python/lib/pyspark.zip
Caused by: org.apache.spark.SparkException:
Error from python worker:
  /usr/bin/python3.9: No module named seriatim.spark_daemon
\t... 1 more
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one line", "one line"),
        ("\n\n  first \nsecond", "first"),
        (
            JAVA,
            "org.apache.kafka.clients.consumer.OffsetOutOfRangeException: offset 10 is out of range",
        ),
        (PYTHON, "seriatim.errors.BrokenPromiseError: a task has one partition"),
        (NO_PYTHON, "/usr/bin/python3.9: No module named seriatim.spark_daemon"),
        ("Traceback (most recent call last):\nnothing known", "Traceback (most recent call last):"),
        ("", "ValueError"),
        ("x" * 5000, "x" * 600),
    ],
    ids=["one", "first", "last cause", "worker", "no Python", "unknown worker", "empty", "long"],
)
def test_the_line_that_helps_is_found(text: str, line: str) -> None:
    """A worker's own exception before Java's, the last cause before the first line, never a
    screenful.
    """
    assert first_error_line(ValueError(text)) == line
