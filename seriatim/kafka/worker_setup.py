"""Whether a worker of Spark is set up for our tasks: it has this package, in the driver's versions, with a
Python that starts. Whatever is wrong there is for a person to fix, so it is a `ConfigError` that names the worker.

Next: kafka/spark_reader.py compares in every task, and translates what Spark says of workers that cannot start one.
"""

from __future__ import annotations

import platform
import re
import socket
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from msgspec import Struct
from msgspec.structs import asdict

from seriatim import config
from seriatim.errors import ConfigError, SeriatimError

BROKEN_SETUP = (
    "No module named 'seriatim",
    "Can't get attribute",
    "SerializationError",
    "PYTHON_VERSION_MISMATCH",
    "Cannot run program",
    "Error from python worker",
)
"""What Spark's errors contain if a worker could not start our Python, or could not load the task. On the
driver's own host they mean something else, such as too little memory for another process.
"""
TASK_HOST = re.compile(r"\(TID \d+\) \((\S+) executor ")
"""Where Spark names the host of a task that failed."""
SPARK_CORE = re.compile(r"spark-core_[\d.]+-(\d+\.\d+\.\d+).*\.jar")
"""The name of Spark's own JAR. Distributors add a version of their own behind Spark's.
"""


class Versions(Struct, frozen=True):
    """The versions that driver and workers must share."""

    seriatim: str
    python: str
    """Major and minor: code is sent in the form of one of them."""
    spark: str
    """Of the JARs beside which the process runs; empty if they cannot be found."""

    def differences(self, worker: Versions) -> dict[str, str]:
        """What a worker has otherwise, in words. A version that is not known on either side is left out."""
        texts = {}
        theirs = asdict(worker)
        for name, ours in asdict(self).items():
            if ours and theirs[name] and ours != theirs[name]:
                texts[name] = f"{theirs[name]} there, {ours} in the driver"
        return texts


@cache
def versions_here() -> Versions:
    """The versions of this process."""
    major, minor, _ = platform.python_version_tuple()
    return Versions(_package_version("seriatim"), f"{major}.{minor}", _spark_version())


def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _spark_version() -> str:
    """The version in the name of Spark's own JAR, else that of the Python package."""
    for name in config.spark_jar_names():
        match = SPARK_CORE.fullmatch(name)
        if match:
            return match[1]
    return _package_version("pyspark")


def refuse_other_versions(driver: Versions) -> None:
    """Called in a worker: refuse to work for a driver of other versions."""
    differences = driver.differences(versions_here())
    if differences:
        raise ConfigError(
            "this worker has other versions than the driver",
            **differences,
            next=_install_advice(driver),
        )


def name_worker(error: SeriatimError) -> None:
    """Called in a worker: add its host to an error that a person fixes there."""
    if isinstance(error, ConfigError):
        error.fields.setdefault("worker", socket.gethostname())


def setup_error(text: str, cause: str) -> ConfigError | None:
    """The error for a worker that could not start our Python or load a task, from the `text` of Spark's
    error; None if it says something else.
    """
    if not any(phrase in text for phrase in BROKEN_SETUP):
        return None
    host = TASK_HOST.search(text)
    return ConfigError(
        "a worker of Spark cannot run our tasks",
        worker=host[1] if host else "",
        cause=cause,
        next=_install_advice(versions_here()),
    )


def _install_advice(driver: Versions) -> str:
    return (
        f"install seriatim {driver.seriatim} with Python {driver.python} and Spark {driver.spark} on every worker,"
        " and name that Python by PYSPARK_PYTHON in the environment of the driver (docs/DEPLOY.md)"
    )
