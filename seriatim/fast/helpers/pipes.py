"""The frames between a task and its helpers: their length in eight bytes, then their content.

Next: fold.py sends; __main__.py answers.
"""

from __future__ import annotations

from typing import IO

import pyarrow as pa
from msgspec import Struct, field

from seriatim.engine.session import Counts
from seriatim.engine.task import PartitionWork
from seriatim.stream_files import StreamFile

LENGTH_BYTES = 8
FIRST_HELPER_OFFSET = 1 << 60
"""A helper numbers its messages from here on: it has some of the partition's, with holes between
them. No offset of Kafka is as large, so both can be told apart.
"""


class HelperStart(Struct):
    """The first frame: what to fold."""

    file: StreamFile
    work: PartitionWork
    message_count: int


class HelperResult(Struct):
    """The last answer: the sessions that a helper touched, and what it counted."""

    counts: Counts
    packed_sessions: dict[str, bytes] = field(default_factory=dict)
    sessions_without_state: dict[str, int] = field(default_factory=dict)


def send_frame(pipe: IO[bytes], content: bytes | memoryview) -> None:
    """Send one frame."""
    pipe.write(len(content).to_bytes(LENGTH_BYTES, "little"))
    pipe.write(content)
    pipe.flush()


def receive_frame(pipe: IO[bytes]) -> bytes | None:
    """The next frame; None if the other process has ended."""
    length = pipe.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    size = int.from_bytes(length, "little")
    content = pipe.read(size)
    if len(content) < size:
        return None
    return content


def encode_batch(batch: pa.RecordBatch) -> memoryview:
    """A batch of columns as bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def decode_batch(content: bytes) -> pa.RecordBatch:
    """The batch of columns from bytes."""
    with pa.ipc.open_stream(content) as reader:
        return reader.read_next_batch()
