"""One process at a time: a lock on a file that the system itself releases when its holder dies.

Next: embedded/jars.py and embedded/broker.py do their slow work while they hold it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from seriatim.errors import ConfigError


@contextmanager
def file_lock(
    path: Path, print_notice: Callable[[str], None], waiting_notice: str
) -> Iterator[None]:
    """Hold the lock at `path`. Prints `waiting_notice` once if another process has it. The file itself
    is not deleted.
    """
    with _open_lock_file(path) as file:
        if not _try_lock(file):
            print_notice(waiting_notice)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open_lock_file(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a")
    except OSError as error:
        raise ConfigError(
            f"{path.parent} is not writable: {error.strerror}",
            next="set SERIATIM_HOME to a folder you may write to",
        ) from None


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
