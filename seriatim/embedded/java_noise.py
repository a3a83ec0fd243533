"""Java noise: filter out the one line that every JVM of Spark prints when it starts.

Spark uses an incubator module, the JVM warns about it on its stderr, and no option turns that off.

Next: context.py starts Spark inside the filter.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

INCUBATOR_WARNING = b"WARNING: Using incubator modules: jdk.incubator.vector\n"
STDERR_DESCRIPTOR = 2


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
