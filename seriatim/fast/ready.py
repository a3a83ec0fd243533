"""Whether the bulk fold is compiled for this machine, and where. Nobody waits for it: until it is,
folds are plain.

`python -m seriatim.fast` compiles it, in about half a minute, once per machine and version; `make
setup` does so. What was compiled is kept beside the package, or in the user's cache where that
cannot be written to, in a folder named by these sources and the CPU: numba itself would not see
that a function of another file changed.

Next room: compiled.py; __main__.py does the compiling.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

HERE = Path(__file__).parent
CPU_INFO = Path("/proc/cpuinfo")
READY_MARKER = "ready"


@cache
def compiled_folder() -> Path | None:
    """Where compiled code is kept; None: nowhere, so that it cannot be kept."""
    digest = blake2b(_describe_cpu().encode(), digest_size=8)
    for source in sorted(HERE.glob("*.py")):
        digest.update(source.read_bytes())
    name = f"compiled-{digest.hexdigest()}"
    places = [HERE / "__pycache__" / name]
    with suppress(RuntimeError):  # some users have no home
        places.append(Path.home() / ".cache" / "seriatim" / name)
    return next(
        (place for place in places if (place / READY_MARKER).exists()), None
    ) or _first_writable(places)


def _first_writable(places: list[Path]) -> Path | None:
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(place, os.W_OK):
            return place
    return None


def _describe_cpu() -> str:
    """What compiled code depends on: the kind of CPU, and what it can do."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.version()}"
    found = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in reversed(lines))
    }
    return f"{platform.machine()} {found.get('model name', '')} {found.get('flags', '')}"


def is_ready() -> bool:
    """Whether all of it is compiled."""
    place = compiled_folder()
    return place is not None and (place / READY_MARKER).exists()


def mark_ready() -> None:
    """All of it is compiled now."""
    place = compiled_folder()
    if place is not None:
        (place / READY_MARKER).touch()


def compile_in_background() -> subprocess.Popen[bytes] | None:
    """Compile in a process of its own, for later tasks. None: there is nothing to do, or nowhere to
    keep it.
    """
    if is_ready() or compiled_folder() is None:
        return None
    command = [sys.executable, "-m", "seriatim.fast"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
