"""Stopping: Ctrl-C and SIGTERM end a run at once, in one line. Output is safe at any kill, so
nothing is waited for.

Next room: cli/run.py runs inside it.
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
    """Within it either signal does `last`, says so and exits with 128 + its number, as shells
    count.
    """

    def stop(number: int, _: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        try:
            before_exit()
            print_notice(
                f"{name}: stopped; run again goes on from the last commit",
                stopped=signal.Signals(number).name,
            )
        finally:
            os._exit(
                128 + number
            )  # an exception would come out of Spark's threads as pages of traces

    before = {each: signal.signal(each, stop) for each in SIGNALS}
    try:
        yield
    finally:
        for each, was in before.items():
            signal.signal(each, was)
