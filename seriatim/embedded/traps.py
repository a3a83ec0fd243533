"""Traps: environments that install without complaint and break later in a way nobody understands.

Checked before Spark is started, so that a person reads one sentence instead of a stack trace.

Next room: checkup.py looks at everything, these included.
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
    """Python must be new enough."""
    if python_version < OLDEST_PYTHON:
        raise ConfigError(
            f"Python {_dotted_version(python_version)} is too old: Seriatim needs {_dotted_version(OLDEST_PYTHON)} or newer",
            next=f"make setup with a Python {_dotted_version(OLDEST_PYTHON)} on PATH",
        )


def check_packages(installed_version: InstalledVersion) -> None:
    """Two packages of Spark write the same files; pandas 3 changed what Spark relies on."""
    spark, client, pandas = (
        installed_version(name) for name in ("pyspark", "pyspark-client", "pandas")
    )
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


def _dotted_version(parts: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in parts[:2])
