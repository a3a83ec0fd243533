"""What every compiled function here is compiled with. Arrays are numpy's; nothing in them is a
Python object.

Next room: ready.py says where compiled code is kept; parse.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from seriatim.fast import ready

F = TypeVar("F", bound=Callable[..., Any])
Array = Any
"""A numpy array, as numba sees it."""
int64: Any = np.int64
uint64: Any = np.uint64
uint8: Any = np.uint8
"""Numbers of a known width, which are plain ones to mypy."""
MISSING, NULL = -2, -1
"""In place of a cell's size: the message does not name the column, or names it as null."""
NUMBA_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""No division here can fail, and nothing is allocated: without counting references it is three
times as fast.
"""


def compiled(function: F) -> F:
    """A function that Python calls: compiled at its first call; later processes load what was
    compiled.
    """
    place, before = ready.compiled_folder(), numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(place or "")
    try:
        return numba.njit(cache=place is not None, **NUMBA_OPTIONS)(function)
    finally:
        numba.config.CACHE_DIR = before


def compiled_inner(function: F) -> F:
    """A function that only compiled ones call. Without a way in from Python it compiles in half the
    time.
    """
    return numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **NUMBA_OPTIONS)(function)


@intrinsic  # type: ignore[untyped-decorator]
def load_eight_bytes(context: Any, data: Any, position: Any) -> Any:  # noqa: ARG001  # numba wants all three
    """Eight bytes from a place on, as one number. Whoever calls it knows that they are there."""

    def load(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, values[0])
        first = builder.gep(array.data, [values[1]])
        return builder.load(builder.bitcast(first, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(data, types.int64), load
