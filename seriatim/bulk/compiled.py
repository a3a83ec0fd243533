"""What every compiled function here is compiled with. Arrays are numpy's; nothing in them is a Python object.

What was compiled is kept beside the package, or in the user's cache where that cannot be written to, in a folder
named by the digest of all of these sources: numba itself would not see that a function of another file changed.

Next room: parse.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])
Array = Any
"""A numpy array, as numba sees it."""
int64: Any = np.int64
uint64: Any = np.uint64
uint8: Any = np.uint8
"""Numbers of a known width, which are plain ones to mypy."""
MISSING, NULL = -2, -1
"""In place of a cell's size: the message does not name the column, or names it as null."""
TEXT, WHOLE, FLOAT, BOOL = 0, 1, 2, 3
"""Kinds of columns that can be folded in bulk."""
KINDS = {"string": TEXT, "int64": WHOLE, "float64": FLOAT, "bool": BOOL}
HERE = Path(__file__).parent
OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""No division here can fail, and nothing is allocated: without counting references it is three times as fast."""


def compiled(function: F) -> F:
    """A function that Python calls: compiled at its first call; later processes load what was compiled."""
    numba.config.CACHE_DIR, before = str(FOLDER), numba.config.CACHE_DIR
    try:
        return numba.njit(cache=FOLDER is not None, **OPTIONS)(function)
    finally:
        numba.config.CACHE_DIR = before


def inside(function: F) -> F:
    """A function that only compiled ones call. Without a way in from Python it compiles in half the time."""
    return numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)


def _folder() -> Path | None:
    """Where compiled code is kept; None: nowhere, so that every process compiles for itself."""
    digest = blake2b(digest_size=8)
    for source in sorted(HERE.glob("*.py")):
        digest.update(source.read_bytes())
    for base in (HERE / "__pycache__", Path("~/.cache/seriatim").expanduser()):
        folder = base / f"compiled-{digest.hexdigest()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return None


FOLDER = _folder()
