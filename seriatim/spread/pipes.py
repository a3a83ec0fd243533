"""What goes between a task and its helpers: frames with a length before them.

Next room: fold.py sends; __main__.py answers.
"""

from __future__ import annotations

from typing import IO

import pyarrow as pa
from msgspec import Struct, field

from seriatim.core.session import Counts, Session
from seriatim.steps.task import Work
from seriatim.streams import StreamFile

LENGTH_BYTES = 8
BASE = 1 << 60
"""A helper numbers its messages from here on, since it has not all of them; its offsets are told apart by that."""


class Begin(Struct):
    """The first frame: what to fold."""

    file: StreamFile
    work: Work
    messages: int


class End(Struct):
    """The last answer: what a helper has in its hands."""

    counts: Counts
    sessions: dict[str, Session] = field(default_factory=dict)
    strangers: dict[str, int] = field(default_factory=dict)


def send(to: IO[bytes], content: bytes | memoryview) -> None:
    """One frame."""
    to.write(len(content).to_bytes(LENGTH_BYTES, "little"))
    to.write(content)
    to.flush()


def receive(come: IO[bytes]) -> bytes | None:
    """The next frame; None where the other side is gone."""
    length = come.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    size = int.from_bytes(length, "little")
    content = come.read(size)
    return content if len(content) == size else None


def packed(batch: pa.RecordBatch) -> memoryview:
    """Columns as bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def unpacked(content: bytes) -> pa.RecordBatch:
    """Bytes as columns."""
    with pa.ipc.open_stream(content) as reader:
        return reader.read_next_batch()
