"""A helper: `python -m seriatim.spread`, started by a task, ends with its pipe.

Next room: part.py.
"""

from __future__ import annotations

import gc
import sys
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


if __name__ == "__main__":
    gc.disable()
    serve(sys.stdin.buffer, sys.stdout.buffer)
