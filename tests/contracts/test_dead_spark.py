"""A Spark that died: said in one screen, with what helps, and ended without a second error."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from grpc import StatusCode
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.connect import SparkConnectGrpcException

from seriatim.engine.files import SourceFailedError
from seriatim.errors import PlatformError
from seriatim.kafka.spark_reader import (
    _spark_options,
    death,
    is_jvm_dead,
    stop_spark_session,
    translate_spark_errors,
)
from seriatim.ports import ReadOptions

KILLED = """
import os, signal, time
import psutil
from seriatim import config, context
from seriatim.kafka.spark_reader import SparkReader, SparkSource, stop_spark_session
from seriatim.errors import PlatformError
from seriatim.engine.offsets import OffsetRange, Partition
from seriatim.ports import DEFAULT_READ_OPTIONS

spark = context.spark_session("dies", config.load_settings(), print)
java = [child.pid for child in psutil.Process().children(recursive=True) if child.name() == "java"]

def slow(partition, offsets, batches):
    for pid in java:
        os.kill(pid, signal.SIGKILL)
    time.sleep(60)

p = Partition("t", 0)
frame = spark.sql("select 't' topic, 0 partition, 0L offset, now() timestamp, binary('k') key, binary('v') value")
reader = SparkReader(spark, {"bootstrap.servers": "127.0.0.1:1"})
for read in (
    lambda: SparkSource(frame, {p: OffsetRange(0, 1)}, DEFAULT_READ_OPTIONS).map(slow),
    lambda: reader.read_ranges({p: OffsetRange(0, 1)}),
    lambda: reader.read_slices({p: 0}, 1, print),
):
    try:
        read()
    except PlatformError as error:
        print(error.render())
stop_spark_session(spark)
print("stopped")
"""


def test_a_killed_spark_is_told_once_and_stops() -> None:
    """While it maps and on every reading after: how it ended, where to look, and not one line of
    py4j's traces.
    """
    ended = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=600, check=False
    )
    told = ended.stdout.splitlines()
    assert told.count("PlatformError: Spark's JVM was ended by signal 9") == 3, (
        ended.stdout + ended.stderr
    )
    assert "probably" not in ended.stdout
    for words in (
        "by the kernel",
        "or by somebody",
        "dmesg",
        "memory limit",
        "lower --messages-max",
    ):
        assert ended.stdout.count(words) == 3, words
    assert told[-1] == "stopped"
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("error", "died"),
    [
        (ConnectionRefusedError(111, "Connection refused"), True),
        (Py4JNetworkError("Answer from Java side is empty"), True),
        (Py4JError("An error occurred while calling o91.collectToPython"), True),
        (
            Py4JError(
                "An error occurred while calling o91.no. Trace:\npy4j.Py4JException: Method no([]) is not there"
            ),
            False,
        ),
        (
            PySparkException("Job aborted\nCaused by: java.lang.OutOfMemoryError: Java heap space"),
            True,
        ),
        (
            PySparkException(
                "Job aborted\nCaused by: java.lang.IllegalStateException: Cannot fetch offset 10"
            ),
            False,
        ),
    ],
    ids=["refused", "network", "no trace", "a trace", "heap", "offsets"],
)
def test_a_dead_spark_is_told_from_a_failed_reading(error: Exception, died: bool) -> None:
    """What Kafka refused is for discovery to judge; a JVM that is gone is not."""
    assert is_jvm_dead(error) is died


def test_a_master_that_does_not_answer_is_no_failed_reading() -> None:
    """It would be said that reading from Kafka broke."""
    text = "Job aborted due to stage failure: All masters are unresponsive! Giving up."
    with pytest.raises(PlatformError, match="master of Spark") as raised, translate_spark_errors():
        raise PySparkException(text)
    assert "SERIATIM_SPARK_MASTER" in raised.value.next


@pytest.mark.parametrize(
    ("message", "code", "is_gone"),
    [
        ("failed to connect to all addresses", StatusCode.UNAVAILABLE, True),
        ("[INVALID_HANDLE.SESSION_CHANGED] The handle is invalid", StatusCode.INTERNAL, True),
        ("Job aborted: no leader for partition", StatusCode.INTERNAL, False),
    ],
    ids=["gone", "started anew", "a failed job"],
)
def test_a_lost_spark_connect_server_is_no_failed_reading(
    message: str, code: StatusCode, is_gone: bool
) -> None:
    """It would be said that reading from Kafka broke."""
    error = SparkConnectGrpcException(message=message, grpc_status_code=code)
    with pytest.raises((PlatformError, SourceFailedError)) as raised, translate_spark_errors():
        raise error
    assert isinstance(raised.value, PlatformError) == is_gone
    assert ("Spark Connect server is gone" in str(raised.value)) == is_gone


@pytest.mark.parametrize(
    ("error", "signal_number", "message"),
    [
        (
            PySparkException("Caused by: java.lang.OutOfMemoryError: Java heap space"),
            None,
            "Spark is out of memory",
        ),
        (ConnectionRefusedError(), None, "Spark's JVM is gone"),
        (ConnectionRefusedError(), 9, "Spark's JVM was ended by signal 9"),
        (ConnectionRefusedError(), 15, "Spark's JVM was ended by signal 15"),
    ],
)
def test_no_more_is_said_of_a_dead_spark_than_is_known(
    error: Exception, signal_number: int | None, message: str
) -> None:
    """Memory is named as the cause only where Java itself says so, and signal 9 alone may be the
    kernel's.
    """
    told = death(error, signal_number)
    assert told.message == message
    assert ("dmesg" in told.next) is (signal_number == 9)


class Session:
    """A session that ends badly."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def stop(self) -> None:
        raise self.error


def test_only_death_is_forgiven_when_stopping() -> None:
    """Any other failure to stop is told."""
    dead: Any = Session(ConnectionRefusedError())
    stop_spark_session(dead)
    odd: Any = Session(LookupError("odd"))
    with pytest.raises(LookupError, match="odd"):
        stop_spark_session(odd)


@pytest.mark.parametrize(
    ("message_bytes", "records"), [(0, "200"), (200, "5000"), (100_000, "671"), (10**9, "10")]
)
def test_a_poll_takes_what_fits_into_the_heap(message_bytes: int, records: str) -> None:
    """3,500 messages of 0.9 MB that compress to 13 MB came in one fetch, and one poll of them
    killed Spark.
    """
    assert (
        _spark_options(ReadOptions(average_message_bytes=message_bytes))["kafka.max.poll.records"]
        == records
    )
