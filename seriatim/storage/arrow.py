"""Arrow: batches from Spark as stretches of messages, and the digests that prove what was read.

Next room: engine/task.py folds the stretches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from seriatim.engine.messages import TIMESTAMP_RANGE_MS, Header, MessageBatch, session_name_of_key
from seriatim.errors import ensure


class ArrowMessageBatch(MessageBatch):
    """Messages as they came from Spark, columns taken out when they are needed."""

    def __init__(self, record_batch: pa.RecordBatch, start: int) -> None:
        self.record_batch, self.start = record_batch, start

    def __len__(self) -> int:
        return self.record_batch.num_rows

    def first_messages(self, count: int) -> ArrowMessageBatch:
        """The first `count` messages."""
        return ArrowMessageBatch(self.record_batch.slice(0, count), self.start)

    def size_bytes(self) -> int:
        """Of all keys and values."""
        return sum(
            len(_content_and_lengths(self.record_batch.column(name))[0])
            for name in ("key", "value")
        )

    def session_names(self) -> list[str | None]:
        """Sessions by Kafka key, each name made once."""
        keys = self.record_batch.column("key").dictionary_encode()
        known = [session_name_of_key(key) for key in keys.dictionary.to_pylist()]
        if keys.null_count == 0:
            return [known[i] for i in keys.indices.to_numpy().tolist()]
        return [None if i is None else known[i] for i in keys.indices.to_pylist()]

    @property
    def has_rising_timestamps(self) -> bool:
        """Whether no timestamp is below the one before."""
        return bool((np.diff(self.microseconds) >= 0).all())

    def invalid_timestamp_positions(self) -> list[int]:
        """Positions of messages whose timestamp no calendar has."""
        times = self.timestamps
        if TIMESTAMP_RANGE_MS[0] <= np.min(times) and np.max(times) <= TIMESTAMP_RANGE_MS[1]:
            return []
        return super().invalid_timestamp_positions()

    @cached_property
    def timestamps(self) -> Sequence[int]:  # type: ignore[override]
        """Milliseconds since 1970."""
        return self.microseconds // 1000

    @cached_property
    def microseconds(self) -> Any:
        """As Spark gives them."""
        return self.record_batch.column("timestamp").cast(pa.int64()).to_numpy(zero_copy_only=False)

    @cached_property
    def keys(self) -> Sequence[bytes | None]:  # type: ignore[override]
        """Kafka's keys."""
        return self.record_batch.column("key").to_pylist()

    @cached_property
    def values(self) -> Sequence[bytes | None]:  # type: ignore[override]
        """Kafka's values."""
        return self.record_batch.column("value").to_pylist()

    @cached_property
    def headers(self) -> Sequence[Sequence[Header]] | None:  # type: ignore[override]
        """Kafka's headers, if they were asked for."""
        if "headers" not in self.record_batch.schema.names:
            return None
        rows = self.record_batch.column("headers").to_pylist()
        return [[(header["key"], header["value"]) for header in row or ()] for row in rows]


def message_batches(record_batches: Iterable[pa.RecordBatch]) -> Iterator[MessageBatch]:
    """Batches of one partition in order, cut wherever an offset is missing."""
    for batch in record_batches:
        offsets = batch.column("offset").to_numpy(zero_copy_only=False)
        if len(offsets) == 0:
            continue
        steps = np.diff(offsets)
        ensure(
            bool((steps > 0).all()), "offsets rise", first=int(offsets[0]), last=int(offsets[-1])
        )
        edges = [0, *(np.flatnonzero(steps != 1) + 1).tolist(), len(offsets)]
        for begin, end in pairwise(edges):
            yield ArrowMessageBatch(batch.slice(begin, end - begin), int(offsets[begin]))


class ArrowDigests:
    """Digests over whole Arrow buffers, so that they do not depend on how batches were cut."""

    def __init__(self) -> None:
        self._offsets = xxhash.xxh3_128()
        self._columns_to_read = {
            name: (xxhash.xxh3_128(), xxhash.xxh3_128()) for name in ("key", "value")
        }

    def update(self, batch: MessageBatch) -> None:
        """Take in the messages of a stretch."""
        ensure(isinstance(batch, ArrowMessageBatch), "an Arrow digest is made of Arrow stretches")
        assert isinstance(batch, ArrowMessageBatch)
        offsets = np.arange(batch.start, batch.start + len(batch), dtype="<i8")
        self._offsets.update(offsets.data)
        for name, (content, lengths) in self._columns_to_read.items():
            data, sizes = _content_and_lengths(batch.record_batch.column(name))
            content.update(data)
            lengths.update(sizes)

    def finish(self) -> dict[str, str]:
        """The digests as hexadecimal text."""
        both = {
            f"{name}s": xxhash.xxh3_128_hexdigest(content.digest() + lengths.digest())
            for name, (content, lengths) in self._columns_to_read.items()
        }
        return {"offsets": self._offsets.hexdigest(), **both}


def _content_and_lengths(column: pa.Array) -> tuple[Any, Any]:
    """A binary column's bytes and its lengths, -1 for null."""
    count = len(column)
    if count == 0:
        return b"", b""
    wide = pa.types.is_large_binary(column.type)
    _, starts, data = column.buffers()
    edges = np.frombuffer(starts, dtype="<i8" if wide else "<i4")[
        column.offset : column.offset + count + 1
    ]
    sizes = np.diff(edges).astype("<i4")
    if column.null_count:
        nulls = column.is_null().to_numpy(zero_copy_only=False)
        if sizes[nulls].any():  # Arrow allows bytes behind a null: they are no part of a message
            return _content_and_lengths(pa.array(column.to_pylist(), column.type))
        sizes[nulls] = -1
    content = memoryview(data)[int(edges[0]) : int(edges[-1])] if data is not None else b""
    return content, sizes
