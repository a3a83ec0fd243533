"""A helper: `python -m seriatim.fast.helpers`, started by a task, ends with its pipe.

Next room: part.py.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import IO

import msgspec

from seriatim import context
from seriatim.errors import raise_broken_promise
from seriatim.fast.helpers.helper_fold import HelperFold
from seriatim.fast.helpers.pipes import (
    HelperStart,
    decode_batch,
    encode_batch,
    receive_frame,
    send_frame,
)


def serve(input_pipe: IO[bytes], output_pipe: IO[bytes]) -> None:
    """Fold what comes; an empty frame is the end. An empty answer: this is to be folded again,
    alone.
    """
    first = receive_frame(input_pipe) or raise_broken_promise("a helper is told what to fold")
    begin = msgspec.msgpack.decode(first, type=HelperStart)
    part = HelperFold(begin.work, context.task_context(begin.file, {}))
    while (content := receive_frame(input_pipe)) is not None:
        if content:
            made = part.fold_batch(decode_batch(content))
            send_frame(output_pipe, b"" if made is None else encode_batch(made))
        else:
            end = part.finish()
            send_frame(output_pipe, b"" if end is None else msgspec.msgpack.encode(end))


def take_over_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """The task's pipes, out of reach of a machine that prints: what it says goes where errors go."""
    come, to = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return come, to


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the task decides; without it the pipe ends
    gc.disable()
    serve(*take_over_pipes())
