"""How much work a piece of code is, as a number of calls: the same on a busy machine as on an idle
one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_calls(work: Callable[[], object]) -> int:
    """How many functions are called while `work` runs, those of C included. Threads that it starts
    do not count.
    """
    return count_calls_by_function(work).total()


def count_calls_by_function(work: Callable[[], object]) -> Counter[str]:
    """How often each function is called while `work` runs, as `count_calls` counts."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, kind: str, function: Any) -> None:
        if kind == "call":
            calls[f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname}"] += 1
        elif kind == "c_call":
            calls[function.__qualname__] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls
