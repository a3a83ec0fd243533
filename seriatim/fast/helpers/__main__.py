"""A helper: `python -m seriatim.fast.helpers`. A task starts it; it ends when its pipe does.

Next: helper_fold.py, which folds the messages that come.
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
    """Answer every frame until the pipe ends: a batch with its records, an empty frame with the
    sessions.

    An empty answer means that the task must fold everything again, in one process.
    """
    start_frame = receive_frame(input_pipe) or raise_broken_promise("a helper is told what to fold")
    start = msgspec.msgpack.decode(start_frame, type=HelperStart)
    task_context = context.task_context(start.file, {})
    helper_fold = HelperFold(start.work, task_context)
    while (frame := receive_frame(input_pipe)) is not None:
        answer: bytes | memoryview = b""
        if frame:
            records = helper_fold.fold_batch(decode_batch(frame))
            if records is not None:
                answer = encode_batch(records)
        else:
            result = helper_fold.finish()
            if result is not None:
                answer = msgspec.msgpack.encode(result)
        send_frame(output_pipe, answer)


def take_over_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """The task's pipes, under other numbers than standard input and output.

    A machine that prints would write into the answers otherwise: its output goes to standard error.
    """
    input_pipe = os.fdopen(os.dup(0), "rb")
    output_pipe = os.fdopen(os.dup(1), "wb")
    empty_input = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty_input, 0)
    os.dup2(2, 1)
    return input_pipe, output_pipe


if __name__ == "__main__":
    # Ctrl-C reaches every process of the terminal. The task decides; when it ends, the pipe does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    serve(*take_over_pipes())
