"""Whether the compiled fold is compiled for this computer, and where its code is saved.

No task waits for it: until it is compiled, tasks take the plain fold. `python -m seriatim.fast`
compiles it, in about half a minute, once per computer and version; `make setup` does so. The code
is saved beside the package, or in the user's cache if the package cannot be written to, in a folder
named after these sources and the CPU: numba itself would not notice that a function of another file
has changed.

Next: __main__.py, which compiles; compiled.py, which loads.
"""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

HERE = Path(__file__).parent
CPU_INFO = Path("/proc/cpuinfo")
READY_MARKER = "ready"
LOCK_NAME = "compiling"


@cache
def compiled_folder() -> Path | None:
    """The folder of the compiled code; None if no folder can be written to.

    A folder in which everything is compiled already comes before one that could be written to.
    """
    digest = blake2b(_describe_cpu().encode(), digest_size=8)
    for source in sorted(HERE.glob("*.py")):
        digest.update(source.read_bytes())
    name = f"compiled-{digest.hexdigest()}"
    folders = [HERE / "__pycache__" / name]
    with suppress(RuntimeError):  # some users have no home
        folders.append(Path.home() / ".cache" / "seriatim" / name)
    for folder in folders:
        if (folder / READY_MARKER).exists():
            return folder
    return _first_writable(folders)


def _first_writable(folders: list[Path]) -> Path | None:
    """The first folder that can be made and written to; None if there is none."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return None


def _describe_cpu() -> str:
    """What compiled code depends on: the model of the CPU, and its features."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.version()}"
    properties: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        # Every core has its lines; those of the first one count.
        properties.setdefault(name.strip(), value.strip())
    model = properties.get("model name", "")
    flags = properties.get("flags", "")
    return f"{platform.machine()} {model} {flags}"


def is_ready() -> bool:
    """Whether everything is compiled."""
    folder = compiled_folder()
    return folder is not None and (folder / READY_MARKER).exists()


def mark_ready() -> None:
    """Note that everything is compiled."""
    folder = compiled_folder()
    if folder is not None:
        (folder / READY_MARKER).touch()


@contextmanager
def compiling() -> Iterator[bool]:
    """Yields whether this process is the one that compiles. Every executor of a host starts to, and
    all share the folder.
    """
    folder = compiled_folder()
    if folder is None:
        yield True
        return
    with (folder / LOCK_NAME).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def compile_in_background() -> subprocess.Popen[bytes] | None:
    """Compile in a process of its own, for later tasks.

    None if everything is compiled already, or if the code cannot be saved.
    """
    if is_ready() or compiled_folder() is None:
        return None
    command = [sys.executable, "-m", "seriatim.fast"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
