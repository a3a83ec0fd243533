"""Messages: what is decoded together is what each value says by itself."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Struct

from seriatim.engine.messages import (
    MessageBatch,
    Poison,
    decode_message,
    decode_messages,
    session_name_of_key,
)
from seriatim.errors import BrokenPromiseError


class Said(Struct):
    """A message."""

    a: int


DECODER = msgspec.json.Decoder(Said)
FRAGMENTS = [
    b'{"a":1}',
    b'{"a":',
    b"2}",
    b"",
    b" ",
    b"\n",
    b"}",
    b"{",
    b'{"x":"}',
    b'"}',
    b"\xc3",
    b"\xa9",
    b"\r",
]
values_drawn = st.lists(
    st.one_of(
        st.none(),
        st.binary(max_size=8),
        st.lists(st.sampled_from(FRAGMENTS), max_size=4).map(b"".join),
    ),
    max_size=6,
)


@given(values_drawn)
@example([b'{"a":1}{"a":2}', b""])
@example([b'{"a":', b'1}{"a":2}'])
@example([b'{"a":1}\n{"a":', b"2}"])
@example([b'{"a":1,"x":"\xc3', b'\xa9"}'])
def test_values_decode_together_as_they_do_one_by_one(values: list[bytes | None]) -> None:
    """Neither newlines nor blanks, nulls or halves of messages make one value's bytes another's."""
    assert decode_messages(DECODER, values) == [
        decode_message(DECODER.decode, value) for value in values
    ]


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (None, "null"),
        (b"", "0 bytes"),
        (b"{", "not JSON"),
        (b"NaN", "not JSON"),
        (b'{"a":"x"}', "wrong schema"),
        (b'{"b":1}', "wrong schema"),
        (b'{"a":1,"b":"\xff"}', "byte 12 is 0xff"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply|wrong schema"),
        (b'{"b":' + b"[" * 100_000, "nested too deeply"),
        (b'{"a":1} ' + b"x" * 10_000_000, "not JSON"),
    ],
)
def test_poison_says_why(value: bytes | None, cause: str) -> None:
    """Each way of being unreadable has its own words, and none of them raises."""
    (poison,) = decode_messages(DECODER, [value])
    assert isinstance(poison, Poison)
    assert re.search(cause, poison.cause)
    assert len(poison.cause) < 300


def test_poison_does_not_spoil_its_neighbours() -> None:
    """The messages around a poison come out as themselves."""
    first, poison, last = decode_messages(DECODER, [b'{"a":1}', b"?", b'{"a":3}'])
    assert (first, last) == (Said(1), Said(3))
    assert isinstance(poison, Poison)


def test_a_session_is_named_by_a_readable_key() -> None:
    """A key that is missing or not UTF-8 names nobody; an empty one is a name."""
    assert [session_name_of_key(key) for key in (b"a", b"", "é".encode(), None, b"\xff")] == [
        "a",
        "",
        "é",
        None,
        None,
    ]


def test_the_beginning_of_a_stretch_keeps_its_columns_together() -> None:
    """Cutting a stretch cuts all its columns, headers too."""
    stretch = MessageBatch(7, [1, 2], [b"k", None], [b"v", b"w"], [[("h", b"x")], []])
    cut = stretch.first_messages(1)
    assert (cut.start, cut.timestamps, cut.keys, cut.values, cut.headers) == (
        7,
        [1],
        [b"k"],
        [b"v"],
        [[("h", b"x")]],
    )


def test_columns_of_different_length_are_no_stretch() -> None:
    """A value without its key would shift every later one."""
    with pytest.raises(BrokenPromiseError, match="different length"):
        MessageBatch(0, [1], [b"k", b"l"], [b"v"])
