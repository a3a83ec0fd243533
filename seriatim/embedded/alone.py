"""One process at a time: a lock on a file that the system itself releases when its holder dies.

Next room: jars.py and broker.py do their slow work inside it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def alone(path: Path, say: Callable[[str], None], waiting: str) -> Iterator[None]:
    """Hold the lock at `path`; say `waiting` once if somebody else has it. The file itself stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        if not _taken_at_once(file):
            say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _taken_at_once(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
