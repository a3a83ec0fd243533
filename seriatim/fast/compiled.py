"""The decorators that compile a function, and what all compiled functions share.

Compiled functions work on numpy arrays of numbers; they neither use nor make Python objects.

Next: ready.py, which says where compiled code is saved; parse.py, the first compiled module.
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
"""Instead of a cell's size: the message does not name the column, or names it as null."""
NUMBA_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""No division here can fail, and nothing is allocated: without reference counting (`_nrt`) the code
is three times as fast.
"""


def compiled(function: F) -> F:
    """A function that Python calls. It is compiled at its first call; later processes load the
    compiled code.
    """
    folder = ready.compiled_folder()
    previous_folder = numba.config.CACHE_DIR
    # numba reads the folder when it decorates, and has no other way to be told.
    numba.config.CACHE_DIR = str(folder or "")
    try:
        compile_function = numba.njit(cache=folder is not None, **NUMBA_OPTIONS)
        return compile_function(function)
    finally:
        numba.config.CACHE_DIR = previous_folder


def compiled_inner(function: F) -> F:
    """A function that only compiled functions call. Without wrappers for Python and C it compiles in
    half the time.
    """
    compile_function = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **NUMBA_OPTIONS)
    return compile_function(function)


@intrinsic  # type: ignore[untyped-decorator]
def load_eight_bytes(context: Any, data: Any, position: Any) -> Any:  # noqa: ARG001  # numba wants all three
    """Eight bytes from a position on, as one number. The caller has proved that they are there."""

    def load(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        make_array = context.make_array(signature.args[0])
        array = make_array(context, builder, values[0])
        byte_pointer = builder.gep(array.data, [values[1]])
        word_pointer = builder.bitcast(byte_pointer, ir.IntType(64).as_pointer())
        # A text begins anywhere, so the eight bytes are not aligned.
        return builder.load(word_pointer, align=1)

    return types.uint64(data, types.int64), load
