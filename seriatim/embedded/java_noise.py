"""Java's noise: the one line that every JVM of Spark prints at launch, kept from a person's face.

Spark asks for an incubator module, the JVM warns of it on its stderr, and no option turns that off.

Next room: wiring.py starts Spark inside it.
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
    """Children started within it write to stderr through a filter, for life. Our own lines go
    straight there.
    """
    sys.stderr.flush()
    real, (outlet, inlet) = os.dup(STDERR_DESCRIPTOR), os.pipe()
    threading.Thread(target=_forward_lines, args=(outlet, real), daemon=True).start()
    os.dup2(inlet, STDERR_DESCRIPTOR)
    os.close(inlet)
    try:
        with os.fdopen(os.dup(real), "w", buffering=1) as ours, redirect_stderr(ours):
            yield
    finally:
        os.dup2(real, STDERR_DESCRIPTOR)


def _forward_lines(read_descriptor: int, stderr_descriptor: int) -> None:
    """Line by line, until the last child has closed its end."""
    with (
        os.fdopen(read_descriptor, "rb") as lines,
        os.fdopen(stderr_descriptor, "wb", buffering=0) as stderr,
    ):
        for line in lines:
            if line != INCUBATOR_WARNING:
                stderr.write(line)
