"""Stop on Ctrl-C and SIGTERM: end a command at once, with one line.

The output is safe at any kill, so nothing has to be waited for.

Next: cli/run.py and cli/repair_screen.py run inside it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from seriatim.cli import print_notice

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def exit_on_signal(name: str, before_exit: Callable[[], None]) -> Iterator[None]:
    """Within this context either signal calls `before_exit`, prints a notice, and exits.

    The exit code is 128 plus the number of the signal, as shells have it.
    """

    def stop(signal_number: int, _: FrameType | None) -> None:
        # A second Ctrl-C must not interrupt the steps below.
        for handled_signal in SIGNALS:
            signal.signal(handled_signal, signal.SIG_IGN)
        try:
            before_exit()
            print_notice(
                f"{name}: stopped; run again goes on from the last commit",
                stopped=signal.Signals(signal_number).name,
            )
        finally:
            # Not an exception: it would come out of Spark's threads as pages of stack traces.
            os._exit(128 + signal_number)

    actions_before = {
        handled_signal: signal.signal(handled_signal, stop) for handled_signal in SIGNALS
    }
    try:
        yield
    finally:
        for handled_signal, action in actions_before.items():
            signal.signal(handled_signal, action)
