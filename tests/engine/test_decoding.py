"""Decoding: what each format says of a value that is no message, and what a user's decoder may do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Struct

from seriatim.engine.decoding import JsonDecoder, PlainDecoder
from seriatim.engine.messages import Poison
from seriatim.errors import PlatformError


class Said(Struct):
    """A message."""

    a: int


class Noted(Struct):
    """A message with a text, which a `Poison` must never be taken for."""

    cause: str


decode_json = JsonDecoder().for_type(Said)
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
    one_by_one = [message for value in values for message in decode_json([value])]
    assert decode_json(values) == one_by_one


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
    (poison,) = decode_json([value])
    assert isinstance(poison, Poison)
    assert re.search(cause, poison.cause)
    assert len(poison.cause) < 300


def test_poison_does_not_spoil_its_neighbours() -> None:
    """The messages around a poison come out as themselves."""
    first, poison, last = decode_json([b'{"a":1}', b"?", b'{"a":3}'])
    assert (first, last) == (Said(1), Said(3))
    assert isinstance(poison, Poison)


class Giving(PlainDecoder):
    """Gives what it is told to, whatever the value is; an exception is raised."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def to_plain(self, value: bytes) -> Any:  # noqa: ARG002  # the value does not matter
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class UnspeakableError(Exception):
    """An exception that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


def endless_list() -> list[Any]:
    """A list that contains itself."""
    endless: list[Any] = []
    endless.append(endless)
    return endless


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (ValueError("3 fields"), "ValueError: 3 fields"),
        (SystemExit(3), "SystemExit: 3"),
        (UnspeakableError(), "UnspeakableError"),
        (ValueError("x" * 100_000), "ValueError: x+"),
        (ValueError("\ud800"), r"ValueError: \\ud800"),
        (Poison("not ours"), "not ours"),
        (Poison("\ud800" * 1_000), r"(\\ud800)+"),
        (None, "wrong schema: Expected `object`, got `None`"),
        ({"a": "1"}, r"wrong schema: Expected `int`, got `str` - at `\$.a`"),
        ({"a": True}, "wrong schema: Expected `int`, got `bool`.*"),
        ({}, "wrong schema: .*missing required field `a`"),
        ({"a": 2**70}, "OverflowError: .*"),
        ({"a": 1, "b": "\ud800"}, "UnicodeEncodeError: .*"),
        ({"a": object()}, "TypeError: .*"),
        (Said("no number"), "wrong schema: .*"),  # type: ignore[arg-type]
        ({"a": endless_list()}, "nested too deeply"),
    ],
)
def test_whatever_a_decoder_raises_or_gives_wrongly_is_poison(result: Any, cause: str) -> None:
    """It has a cause that can be stored, and the fold goes on."""
    messages = Giving(result).for_type(Said)([b"x"])
    (poison,) = messages
    assert isinstance(poison, Poison)
    assert re.fullmatch(cause, poison.cause), poison.cause
    assert len(poison.cause.encode()) < 5_000
    msgspec.json.encode(poison)


@pytest.mark.parametrize("error", [PlatformError("registry is down"), MemoryError()])
def test_what_says_nothing_about_the_value_is_raised(error: BaseException) -> None:
    """A run that fails for such a reason is started again; poison would stay."""
    with pytest.raises(type(error)):
        Giving(error).for_type(Said)([b"x"])


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"a": 1, "other": [b"\xff", None]}, Said(1)),
        (Said(1), Said(1)),
    ],
)
def test_plain_values_and_structs_become_the_machines_message(plain: Any, message: Said) -> None:
    """Fields that the machine does not know are ignored, as in JSON."""
    assert Giving(plain).for_type(Said)([b"x"]) == [message]


def test_values_keep_their_types() -> None:
    """Times, decimals, bytes and infinity come out as they went in."""

    class Typed(Struct):
        at: datetime
        amount: Decimal
        content: bytes
        number: float
        whole_as_float: float

    now = datetime(2024, 5, 1, 12, tzinfo=UTC)
    plain = {
        "at": now,
        "amount": Decimal("1.50"),
        "content": b"\xff\x00",
        "number": float("inf"),
        "whole_as_float": 2,
    }
    (message,) = Giving(plain).for_type(Typed)([b"x"])
    assert message == Typed(now, Decimal("1.50"), b"\xff\x00", float("inf"), 2.0)


class Batches(PlainDecoder):
    """Decodes many values at once, and is wrong in some way about some of them."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.calls = 0

    def to_plain(self, value: bytes) -> Any:
        return {"a": int(value)}

    def to_plain_values(self, values: Sequence[bytes | None]) -> Sequence[Any]:
        self.calls += 1
        results: list[Any] = []
        for value in values:
            if value is None:
                results.append({"a": -1})
            elif value == b"bad" and self.fault == "too many":
                results += [{"a": 0}, {"a": 0}]
            elif value == b"bad" and self.fault == "none":
                continue
            else:
                results.append(self.to_plain(value))
        return results


def test_a_decoder_may_give_null_values_a_meaning() -> None:
    """It overrides the method that gets all values; one call decodes them all."""
    decoder = Batches()
    assert decoder.for_type(Said)([b"1", None, b"3"]) == [Said(1), Said(-1), Said(3)]
    assert decoder.calls == 1


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raises", "ValueError: .*'bad'"),
        ("too many", "the decoder gave 2 results for one value"),
        ("none", "the decoder gave 0 results for one value"),
    ],
)
def test_a_batch_that_goes_wrong_is_decoded_one_by_one(fault: str, cause: str) -> None:
    """Only the value that is wrong becomes poison, in its own place."""
    first, poison, last = Batches(fault).for_type(Said)([b"1", b"bad", b"3"])
    assert (first, last) == (Said(1), Said(3))
    assert re.fullmatch(cause, poison.cause)


def test_a_poison_is_never_taken_for_a_message() -> None:
    """Also if the machine's message has the same field."""
    (poison,) = Giving(Poison("why")).for_type(Noted)([b"x"])
    assert poison == Poison("why")


@pytest.mark.parametrize("decoder", [JsonDecoder(), Giving(None)])
def test_a_type_that_cannot_be_decoded_is_refused_at_once(decoder: Any) -> None:
    """Not with the first message."""

    class Holder(Struct):
        first: int | list[int] | tuple[int, ...]

    with pytest.raises(TypeError):
        decoder.for_type(Holder)
