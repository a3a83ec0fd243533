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
"""Numbers of a known width. To mypy they are Any, so that code can use them as plain numbers."""
MISSING, NULL = -2, -1
"""Values in the place of a cell's size. MISSING: the message does not name the column. NULL: it gives
the column the value null.
"""
NUMBA_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""`error_model`: a division does not check for zero, since no division here can fail. `_nrt`: there is
no reference counting, since nothing is allocated here; the code is three times as fast without it.
"""


def compiled(function: F) -> F:
    """Decorate a function that Python calls. It is compiled at its first call; later processes load
    the compiled code, if it could be saved.
    """
    folder = ready.compiled_folder()
    previous_folder = numba.config.CACHE_DIR
    # numba reads this setting when it decorates a function. It takes the folder in no other way.
    numba.config.CACHE_DIR = str(folder or "")
    try:
        compile_function = numba.njit(cache=folder is not None, **NUMBA_OPTIONS)
        return compile_function(function)
    finally:
        numba.config.CACHE_DIR = previous_folder


def compiled_inner(function: F) -> F:
    """Decorate a function that only compiled functions call. Without wrappers for Python and C it is
    compiled in half the time.
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
