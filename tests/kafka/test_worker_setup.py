"""Whether a worker has what tasks need, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from pyspark import SparkContext
from pyspark.errors import PySparkException

from seriatim.engine.files import SourceFailedError
from seriatim.errors import ConfigError
from seriatim.kafka import worker_setup
from seriatim.kafka.spark_reader import translate_spark_errors

MISSING_PACKAGE = """Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent failure: \
Lost task 0.3 in stage 0.0 (TID 3) (10.77.0.11 executor 1): org.apache.spark.SparkException:
Error from python worker:
  /usr/bin/python3: Error while finding module specification for 'seriatim.spark_daemon' \
(ModuleNotFoundError: No module named 'seriatim')"""


def test_the_same_versions_are_taken() -> None:
    """A worker of the same versions works."""
    worker_setup.refuse_other_versions(worker_setup.versions_here())


@pytest.mark.parametrize("name", ["seriatim", "python", "spark"])
def test_other_versions_are_refused(name: str) -> None:
    """Each version is compared, and both are named."""
    ours = replace(worker_setup.versions_here(), **{name: "0.0.1"})
    with pytest.raises(ConfigError, match="other versions") as refusal:
        worker_setup.refuse_other_versions(ours)
    assert "0.0.1 in the driver" in refusal.value.fields[name]


def test_a_version_that_is_not_known_is_not_compared() -> None:
    """Where Spark's own JARs cannot be found, nothing is claimed about them."""
    worker_setup.refuse_other_versions(replace(worker_setup.versions_here(), spark=""))


def test_a_worker_without_the_package_is_named() -> None:
    """Spark's error is translated: it is configuration, and it has the worker's host."""
    error = worker_setup.setup_error(MISSING_PACKAGE, "No module named 'seriatim'")
    assert error is not None
    assert error.exit_code == 2
    assert error.fields["worker"] == "10.77.0.11"
    assert "install seriatim" in error.next


def test_other_failures_are_not_the_setup() -> None:
    """What reading raises stays what it is."""
    assert worker_setup.setup_error("java.lang.IllegalStateException: offset 7 is gone", "") is None


@pytest.mark.parametrize(
    ("master", "expected"), [("local[2]", SourceFailedError), ("spark://m:7077", ConfigError)]
)
def test_a_worker_on_the_drivers_host_is_set_up(
    monkeypatch: pytest.MonkeyPatch, master: str, expected: type[Exception]
) -> None:
    """A process that cannot be started there is trouble of the moment, and the run may be tried again."""
    monkeypatch.setattr(SparkContext, "_active_spark_context", SimpleNamespace(master=master))
    text = 'java.io.IOException: Cannot run program "python3": error=12, Cannot allocate memory'
    with pytest.raises(expected), translate_spark_errors():
        raise PySparkException(text)
