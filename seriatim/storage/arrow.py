"""Messages as Arrow record batches from Spark, and the digests that prove what was read.

Next: engine/task.py folds the message batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from seriatim.engine.messages import (
    Header,
    KeysOrValues,
    MessageBatch,
    session_name_of_key,
)
from seriatim.errors import ensure


class ArrowMessageBatch(MessageBatch):
    """Messages as they came from Spark. A column is converted when it is first needed."""

    def __init__(self, record_batch: pa.RecordBatch, start: int) -> None:
        self.record_batch = record_batch
        self.start = start

    def __len__(self) -> int:
        return self.record_batch.num_rows

    def first_messages(self, count: int) -> ArrowMessageBatch:
        """The first `count` messages."""
        return ArrowMessageBatch(self.record_batch.slice(0, count), self.start)

    def size_bytes(self) -> int:
        """The size of all keys and values."""
        key_bytes, _ = _content_and_lengths(self.record_batch.column("key"))
        value_bytes, _ = _content_and_lengths(self.record_batch.column("value"))
        return len(key_bytes) + len(value_bytes)

    def session_names(self) -> list[str | None]:
        """The session of each message by its Kafka key; None for a message without a key."""
        keys = self.record_batch.column("key").dictionary_encode()
        # One name per distinct key: messages of a session then share one string.
        names = [session_name_of_key(key) for key in keys.dictionary.to_pylist()]
        if keys.null_count == 0:
            return [names[i] for i in keys.indices.to_numpy().tolist()]
        return [None if i is None else names[i] for i in keys.indices.to_pylist()]

    @property
    def has_rising_timestamps(self) -> bool:
        """Whether no timestamp is before that of the message before."""
        steps = np.diff(self.microseconds)
        return bool((steps >= 0).all())

    def time_range(self) -> tuple[int, int] | None:
        """The earliest and the latest timestamp; None if there are no messages."""
        if not len(self):
            return None
        return int(np.min(self.timestamps)), int(np.max(self.timestamps))

    @cached_property
    def timestamps(self) -> Sequence[int]:  # type: ignore[override]
        """Milliseconds since 1970."""
        return self.microseconds // 1000

    @cached_property
    def microseconds(self) -> Any:
        """Microseconds since 1970, as Spark gives them."""
        column = self.record_batch.column("timestamp").cast(pa.int64())
        return column.to_numpy(zero_copy_only=False)

    @cached_property
    def keys(self) -> KeysOrValues:  # type: ignore[override]
        """The Kafka keys."""
        return self.record_batch.column("key").to_pylist()

    @cached_property
    def values(self) -> KeysOrValues:  # type: ignore[override]
        """The Kafka values."""
        return self.record_batch.column("value").to_pylist()

    @cached_property
    def headers(self) -> Sequence[Sequence[Header]] | None:  # type: ignore[override]
        """The Kafka headers; None if they were not read."""
        if "headers" not in self.record_batch.schema.names:
            return None
        rows = self.record_batch.column("headers").to_pylist()
        return [_header_pairs(row or ()) for row in rows]


def _header_pairs(headers: Iterable[Mapping[str, Any]]) -> list[Header]:
    return [(header["key"], header["value"]) for header in headers]


def message_batches(record_batches: Iterable[pa.RecordBatch]) -> Iterator[MessageBatch]:
    """Message batches without holes: record batches of one partition in order, cut wherever an
    offset is missing.
    """
    for batch in record_batches:
        offsets = batch.column("offset").to_numpy(zero_copy_only=False)
        if len(offsets) == 0:
            continue
        # On the whole column at once, because every message passes here.
        steps = np.diff(offsets)
        ensure(
            bool((steps > 0).all()),
            "offsets rise",
            first=int(offsets[0]),
            last=int(offsets[-1]),
        )
        cuts = (np.flatnonzero(steps != 1) + 1).tolist()
        for begin, end in pairwise([0, *cuts, len(offsets)]):
            yield ArrowMessageBatch(batch.slice(begin, end - begin), int(offsets[begin]))


class ArrowDigests:
    """Digests of offsets, keys and values. They do not depend on how the messages were cut into
    batches.
    """

    def __init__(self) -> None:
        self._offsets = xxhash.xxh3_128()
        # For each column one digest of the bytes and one of the lengths: the bytes alone would not
        # tell "ab", "c" from "a", "bc".
        self._column_digests = {
            "key": (xxhash.xxh3_128(), xxhash.xxh3_128()),
            "value": (xxhash.xxh3_128(), xxhash.xxh3_128()),
        }

    def update(self, batch: MessageBatch) -> None:
        """Add the messages of a batch."""
        ensure(isinstance(batch, ArrowMessageBatch), "an Arrow digest is made of Arrow batches")
        assert isinstance(batch, ArrowMessageBatch)
        offsets = np.arange(batch.start, batch.start + len(batch), dtype="<i8")
        self._offsets.update(offsets.data)
        for name, (content_digest, length_digest) in self._column_digests.items():
            content, lengths = _content_and_lengths(batch.record_batch.column(name))
            content_digest.update(content)
            length_digest.update(lengths)

    def finish(self) -> dict[str, str]:
        """The digests as hexadecimal text, by name."""
        digests = {"offsets": self._offsets.hexdigest()}
        for name, (content_digest, length_digest) in self._column_digests.items():
            both = content_digest.digest() + length_digest.digest()
            digests[f"{name}s"] = xxhash.xxh3_128_hexdigest(both)
        return digests


def _content_and_lengths(column: pa.Array) -> tuple[Any, Any]:
    """The bytes of a binary column in one piece, and the length of each value, -1 for null."""
    count = len(column)
    if count == 0:
        return b"", b""
    offset_type = "<i8" if pa.types.is_large_binary(column.type) else "<i4"
    _, offset_buffer, data = column.buffers()
    all_edges = np.frombuffer(offset_buffer, dtype=offset_type)
    edges = all_edges[column.offset : column.offset + count + 1]
    lengths = np.diff(edges).astype("<i4")
    if column.null_count:
        nulls = column.is_null().to_numpy(zero_copy_only=False)
        if lengths[nulls].any():
            # Arrow allows bytes behind a null. They are no part of a message: copy without them.
            return _content_and_lengths(pa.array(column.to_pylist(), column.type))
        lengths[nulls] = -1
    if data is None:
        return b"", lengths
    content = memoryview(data)[int(edges[0]) : int(edges[-1])]
    return content, lengths
