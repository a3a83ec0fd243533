"""How much work a piece of code is, as a number of calls: the same on a busy machine as on an idle
one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def count_calls(work: Callable[[], object]) -> int:
    """How many functions are called while `work` runs, those of C included. Threads that it starts
    do not count.
    """
    calls = 0

    def count(_: FrameType, kind: str, __: object) -> None:
        nonlocal calls
        if kind in ("call", "c_call"):
            calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls
