"""A helper: `python -m seriatim.spread`, started by a task, ends with its pipe.

Next room: part.py.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import IO

import msgspec

from seriatim import wiring
from seriatim.core.errors import broken
from seriatim.spread.part import Part
from seriatim.spread.pipes import Begin, packed, receive, send, unpacked


def serve(come: IO[bytes], to: IO[bytes]) -> None:
    """Fold what comes; an empty frame is the end. An empty answer: this is to be folded again, alone."""
    first = receive(come) or broken("a helper is told what to fold")
    begin = msgspec.msgpack.decode(first, type=Begin)
    part = Part(begin.work, wiring.kit(begin.file, {}))
    while (content := receive(come)) is not None:
        if content:
            made = part.take(unpacked(content))
            send(to, b"" if made is None else packed(made))
        else:
            end = part.end()
            send(to, b"" if end is None else msgspec.msgpack.encode(end))


def own_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """The task's pipes, out of reach of a machine that prints: what it says goes where errors go."""
    come, to = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return come, to


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the task decides; without it the pipe ends
    gc.disable()
    serve(*own_pipes())
