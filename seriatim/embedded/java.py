"""Java: find it where Spark itself would look, check it before anything is started with it, and filter
out the one line that every JVM of Spark prints when it starts.

Spark uses an incubator module, the JVM warns about it on its stderr, and no option turns that off.

Next: embedded/jars.py and embedded/broker.py start Java; context.py starts Spark inside the filter.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from seriatim.config import Environment
from seriatim.errors import ConfigError

OLDEST_VERSION = 17
ADVICE = f"install Java {OLDEST_VERSION} or 21 (package openjdk-17-jre-headless or the like), or set JAVA_HOME to one"
INCUBATOR_WARNING = b"WARNING: Using incubator modules: jdk.incubator.vector\n"
STDERR_DESCRIPTOR = 2


def find_java(environ: Environment) -> Path:
    """The java binary: that of JAVA_HOME if it is set, else the one on PATH. One that is too old is
    refused.
    """
    java = _locate_java(environ)
    version = major_version(java)
    if version < OLDEST_VERSION:
        raise ConfigError(
            f"Java {version} at {java} is too old: Spark needs {OLDEST_VERSION} or newer",
            next=ADVICE,
        )
    return java


def major_version(java: Path) -> int:
    """17 for Java 17, from the `release` file of its home, or from the output of `java -version`."""
    release = java.resolve().parent.parent / "release"
    text = release.read_text() if release.is_file() else _run_java_version(java)
    match = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', text)
    if not match:
        raise ConfigError(f"{java} does not tell its version: it is no working Java", next=ADVICE)
    return int(match[1])


def _locate_java(environ: Environment) -> Path:
    home = environ.get("JAVA_HOME", "")
    if home:
        java = Path(home) / "bin" / "java"
        if not java.is_file():
            raise ConfigError(
                f"JAVA_HOME is {home}, but there is no Java in it (no bin/java)",
                next=f"set JAVA_HOME to a Java {OLDEST_VERSION} or 21, or unset it to take the java on PATH",
            )
        return java
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path is None:
        raise ConfigError(
            "no Java found: JAVA_HOME is not set and there is no java on PATH", next=ADVICE
        )
    return Path(on_path)


def _run_java_version(java: Path) -> str:
    try:
        process = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{java} cannot be run: {error}", next=ADVICE) from None
    return process.stderr + process.stdout


@contextmanager
def quiet_java() -> Iterator[None]:
    """Child processes that are started within write to stderr through a filter as long as they live.
    Our own lines go straight to stderr.
    """
    sys.stderr.flush()
    real_stderr = os.dup(STDERR_DESCRIPTOR)
    pipe_output, pipe_input = os.pipe()
    arguments = (pipe_output, real_stderr)
    threading.Thread(target=_forward_lines, args=arguments, daemon=True).start()
    # Children inherit descriptor 2, which is the pipe from here on.
    os.dup2(pipe_input, STDERR_DESCRIPTOR)
    os.close(pipe_input)
    try:
        with os.fdopen(os.dup(real_stderr), "w", buffering=1) as own, redirect_stderr(own):
            yield
    finally:
        os.dup2(real_stderr, STDERR_DESCRIPTOR)


def _forward_lines(read_descriptor: int, stderr_descriptor: int) -> None:
    """Copy line by line, except for the warning, until the last child has closed its end."""
    with (
        os.fdopen(read_descriptor, "rb") as lines,
        os.fdopen(stderr_descriptor, "wb", buffering=0) as stderr,
    ):
        for line in lines:
            if line != INCUBATOR_WARNING:
                stderr.write(line)
