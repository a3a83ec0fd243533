"""The contract of `Digests` and of stretches: the same numbers and messages from lists and from
Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from seriatim.engine.files import Digests
from seriatim.engine.messages import MessageBatch
from seriatim.errors import BrokenPromiseError
from seriatim.memory import MemoryDigests
from seriatim.storage.arrow import ArrowDigests, ArrowMessageBatch, message_batches

Content = list[tuple[bytes | None, bytes | None]]
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

content = st.lists(st.tuples(*[st.one_of(st.none(), st.binary(max_size=6))] * 2), max_size=12)
cuts = st.lists(st.integers(0, 12), max_size=4)
quick = settings(max_examples=60, derandomize=True, deadline=None, database=None)


def in_memory(start: int, messages: Content) -> MessageBatch:
    """Messages as the fake reader gives them."""
    keys, values = [key for key, _ in messages], [value for _, value in messages]
    return MessageBatch(
        start, list(range(len(messages))), keys, values, [[("h", None)] for _ in messages]
    )


def batch_of(
    offsets: Iterable[int], messages: Content, kind: pa.DataType | None = None
) -> pa.RecordBatch:
    """Messages as Spark gives them."""
    count, kind = len(messages), kind or pa.binary()
    columns = {
        "offset": pa.array(offsets, pa.int64()),
        "timestamp": pa.array([i * 1000 for i in range(count)], pa.timestamp("us", tz="UTC")),
        "key": pa.array([key for key, _ in messages], kind),
        "value": pa.array([value for _, value in messages], kind),
        "headers": pa.array([[{"key": "h", "value": None}]] * count, HEADERS),
    }
    return pa.RecordBatch.from_pydict(columns)


def from_spark(start: int, messages: Content, kind: pa.DataType | None = None) -> ArrowMessageBatch:
    """A stretch as the task sees it."""
    return ArrowMessageBatch(batch_of(range(start, start + len(messages)), messages, kind), start)


def pieces(whole: MessageBatch, edges: list[int]) -> Iterable[MessageBatch]:
    """A stretch cut at these places; Arrow's pieces share its buffers."""
    for begin, end in pairwise(
        sorted({0, len(whole), *(edge for edge in edges if edge < len(whole))})
    ):
        if isinstance(whole, ArrowMessageBatch):
            yield ArrowMessageBatch(
                whole.record_batch.slice(begin, end - begin), whole.start + begin
            )
        else:
            part = slice(begin, end)
            yield MessageBatch(
                whole.start + begin, whole.timestamps[part], whole.keys[part], whole.values[part]
            )


def digest(made: Digests, parts: Iterable[MessageBatch]) -> dict[str, str]:
    """The digests of these parts, one after the other."""
    for part in parts:
        made.update(part)
    return made.finish()


@given(content, st.integers(0, 2**40), cuts, cuts)
@quick
def test_digests_are_the_same_numbers_however_cut(
    messages: Content, start: int, some: list[int], other: list[int]
) -> None:
    """Fake and real, narrow and wide buffers, in one stretch or many."""
    expected = digest(MemoryDigests(), [in_memory(start, messages)])
    assert digest(MemoryDigests(), pieces(in_memory(start, messages), some)) == expected
    for kind in (pa.binary(), pa.large_binary()):
        assert digest(ArrowDigests(), pieces(from_spark(start, messages, kind), other)) == expected


KINDS: list[tuple[Callable[[], Digests], Callable[[int, Content], MessageBatch]]] = [
    (MemoryDigests, in_memory),
    (ArrowDigests, from_spark),
]


@pytest.mark.parametrize(("digests", "stretch"), KINDS, ids=["memory", "real"])
@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ((0, [(b"k", None)]), (0, [(b"k", b"")]), {"values"}),
        ((0, [(b"ab", b"v"), (b"", b"v")]), (0, [(b"a", b"v"), (b"b", b"v")]), {"keys"}),
        ((0, [(b"k", b"v")]), (1, [(b"k", b"v")]), {"offsets"}),
        ((0, [(b"a", b"1"), (b"b", b"2")]), (0, [(b"b", b"2"), (b"a", b"1")]), {"keys", "values"}),
    ],
    ids=["null is not empty", "lengths count", "offsets count", "order counts"],
)
def test_other_messages_have_other_digests(
    digests: Callable[[], Digests],
    stretch: Callable[[int, Content], MessageBatch],
    one: tuple[int, Content],
    other: tuple[int, Content],
    differ: set[str],
) -> None:
    """Each digest tells exactly its own column's difference."""
    first, second = digest(digests(), [stretch(*one)]), digest(digests(), [stretch(*other)])
    assert {name for name in first if first[name] != second[name]} == differ


@pytest.mark.parametrize("digests", [MemoryDigests, ArrowDigests])
def test_digests_of_nothing_are_those_of_no_bytes(digests: Callable[[], Digests]) -> None:
    """A certificate without messages has digests too."""
    nothing = xxhash.xxh3_128()
    both = xxhash.xxh3_128_hexdigest(nothing.digest() * 2)
    assert digests().finish() == {"offsets": nothing.hexdigest(), "keys": both, "values": both}


def test_bytes_behind_a_null_do_not_count() -> None:
    """Arrow allows a null with bytes behind it: the message has none."""
    hidden = pa.BinaryArray.from_buffers(
        pa.binary(),
        3,
        [pa.py_buffer(b"\x05"), pa.py_buffer(np.array([0, 1, 3, 4], "<i4")), pa.py_buffer(b"aXXb")],
    )
    assert hidden.to_pylist() == [b"a", None, b"b"]
    batch = pa.RecordBatch.from_arrays([hidden, hidden], ["key", "value"])
    expected = digest(MemoryDigests(), [in_memory(5, [(b"a", b"a"), (None, None), (b"b", b"b")])])
    assert digest(ArrowDigests(), [ArrowMessageBatch(batch, 5)]) == expected


@given(
    st.lists(st.tuples(*[st.one_of(st.none(), st.binary(max_size=3))] * 2), min_size=1, max_size=9),
    cuts,
)
@quick
def test_a_stretch_from_arrow_reads_as_one_of_lists(messages: Content, some: list[int]) -> None:
    """Names, times, keys, values and headers, whole and cut."""
    memory, real = in_memory(7, messages), from_spark(7, messages)
    for count in (len(messages), *(cut for cut in some if cut < len(messages))):
        left, right = memory.first_messages(count), real.first_messages(count)
        assert (len(left), left.start) == (len(right), right.start)
        for name in ("timestamps", "keys", "values", "headers"):
            assert list(getattr(left, name)) == list(getattr(right, name)), name
        assert left.session_names() == right.session_names()


@given(st.lists(st.booleans(), max_size=20), cuts)
@quick
def test_batches_are_cut_wherever_an_offset_is_missing(there: list[bool], some: list[int]) -> None:
    """However Spark cut them, every offset comes once, in order, in stretches without a hole
    inside.
    """
    offsets = [offset for offset, is_there in enumerate(there, 10) if is_there]
    batch = batch_of(offsets, [(b"k", b"%d" % offset) for offset in offsets])
    edges = sorted({0, len(offsets), *(edge for edge in some if edge < len(offsets))})
    found = list(message_batches([batch.slice(a, b - a) for a, b in pairwise(edges)]))
    seen = [
        (stretch.start + i, value) for stretch in found for i, value in enumerate(stretch.values)
    ]
    assert seen == [(offset, b"%d" % offset) for offset in offsets]


def test_offsets_that_go_back_are_refused() -> None:
    """Spark sorted them; if it did not, that is no hole but a broken promise."""
    with pytest.raises(BrokenPromiseError, match="offsets rise"):
        list(message_batches([batch_of([5, 4], [(b"k", b"v")] * 2)]))
