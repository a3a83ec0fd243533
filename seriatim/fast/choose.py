"""Which machine and fold a task takes: compiled where it can be, is ready, and is worth loading.

This module must not import numba: loading it costs half a second.

Next: fold.py, the compiled fold; engine/fold.py, the plain one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable

from seriatim.engine.fold import Fold
from seriatim.engine.machine import Runner
from seriatim.fast.column_kinds import can_use_compiled_fold
from seriatim.fast.ready import compile_in_background, is_ready
from seriatim.stream import Stream

MESSAGES_MIN, MESSAGES_MIN_LOADED = 50_000, 1_000
"""Messages of a task from which on the compiled fold is faster; the second one if numba is loaded
already, which costs half a second, once.
"""


def choose_machine(
    stream: Stream, create_plain_machine: Callable[[], Runner], message_count: int
) -> tuple[Runner, type[Fold]]:
    """A machine and its fold for a task of this many messages."""
    messages_min = MESSAGES_MIN_LOADED if "numba" in sys.modules else MESSAGES_MIN
    if message_count < messages_min or not can_use_compiled_fold(stream) or not is_ready():
        return create_plain_machine(), Fold
    from seriatim.fast.fold import CompiledFold
    from seriatim.fast.table import CompiledTable

    return stream.table_machine(CompiledTable), CompiledFold


def compile_for_later_tasks(
    stream: Stream, message_counts: Iterable[int]
) -> subprocess.Popen[bytes] | None:
    """Start compiling, in a process of its own, if tasks of these sizes would use the compiled fold.

    None if they would not, or if there is nothing to compile.
    """
    largest_task = max(message_counts, default=0)
    if largest_task < MESSAGES_MIN or not can_use_compiled_fold(stream):
        return None
    return compile_in_background()
