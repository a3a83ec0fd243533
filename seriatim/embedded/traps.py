"""Traps: environments that install without complaint, and fail later with errors that are hard to
understand.

They are checked before Spark is started, so that a person reads one sentence instead of a stack
trace.

Next: embedded/doctor.py checks everything, these included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

from seriatim.embedded import java
from seriatim.errors import ConfigError

OLDEST_PYTHON = (3, 11)
REINSTALL_ADVICE = "make setup in a clone, else install what requirements.lock names"

InstalledVersion = Callable[[str], str | None]


def refuse_broken_environment(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if this environment is known to break."""
    check_python(sys.version_info[:2])
    check_packages(installed_version)
    java.find_java(environ)


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_python(python_version: tuple[int, ...]) -> None:
    """Refuse a Python that is too old."""
    if python_version < OLDEST_PYTHON:
        version_text = _dotted_version(python_version)
        oldest_text = _dotted_version(OLDEST_PYTHON)
        raise ConfigError(
            f"Python {version_text} is too old: Seriatim needs {oldest_text} or newer",
            next=f"make setup with a Python {oldest_text} on PATH",
        )


def check_packages(installed_version: InstalledVersion) -> None:
    """Refuse two packages of Spark that write the same files in different versions, and pandas 3,
    which changed what Spark relies on.
    """
    spark = installed_version("pyspark")
    client = installed_version("pyspark-client")
    pandas = installed_version("pandas")
    if spark and client and spark != client:
        raise ConfigError(
            f"pyspark {spark} and pyspark-client {client} overwrite each other's files: make them the same",
            next=REINSTALL_ADVICE,
        )
    if pandas and int(pandas.split(".")[0]) >= 3:
        raise ConfigError(
            f"pandas {pandas} does not work with this Spark: it must be below 3",
            next=REINSTALL_ADVICE,
        )


def _dotted_version(version_numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version_numbers[:2])
