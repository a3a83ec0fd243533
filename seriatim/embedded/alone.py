"""One process at a time: a lock on a file that the system itself releases when its holder dies.

Next room: jars.py and broker.py do their slow work inside it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from seriatim.core.errors import ConfigError


@contextmanager
def alone(path: Path, say: Callable[[str], None], waiting: str) -> Iterator[None]:
    """Hold the lock at `path`; say `waiting` once if somebody else has it. The file itself stays."""
    with _opened(path) as file:
        if not _taken_at_once(file):
            say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _opened(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a")
    except OSError as error:
        raise ConfigError(
            f"{path.parent} is not writable: {error.strerror}",
            next="set SERIATIM_HOME to a folder you may write to",
        ) from None


def _taken_at_once(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
