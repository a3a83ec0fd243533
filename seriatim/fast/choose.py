"""Which machine and fold a task takes: in bulk where that can be, is compiled, and is worth loading
it.

Next room: fold.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable

from seriatim.engine.fold import Fold
from seriatim.engine.machine import Runner
from seriatim.fast.column_kinds import can_fold_in_bulk
from seriatim.fast.ready import compile_in_background, is_ready
from seriatim.stream import Stream

MESSAGES_MIN, MESSAGES_MIN_LOADED = 50_000, 1_000
"""Messages of a task from which on folding in bulk is faster: loading what it takes costs half a
second, once.
"""


def choose_machine(
    stream: Stream, create_plain_machine: Callable[[], Runner], message_count: int
) -> tuple[Runner, type[Fold]]:
    """A machine and its fold for this many messages."""
    least = MESSAGES_MIN_LOADED if "numba" in sys.modules else MESSAGES_MIN
    if message_count < least or not can_fold_in_bulk(stream) or not is_ready():
        return create_plain_machine(), Fold
    from seriatim.fast.fold import BulkFold
    from seriatim.fast.table import BulkTable

    return stream.table_machine(BulkTable), BulkFold


def compile_for_later_tasks(
    stream: Stream, message_counts: Iterable[int]
) -> subprocess.Popen[bytes] | None:
    """Compile aside what tasks of these sizes would have taken, had it been ready."""
    return (
        compile_in_background()
        if can_fold_in_bulk(stream) and max(message_counts, default=0) >= MESSAGES_MIN
        else None
    )
