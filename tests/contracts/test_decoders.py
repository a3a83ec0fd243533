"""The contract of every decoder: one result per value, in order, and poison where there is no
message. Nothing that a producer sends makes it raise.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seriatim.engine.messages import Poison
from tests.contracts.decoder_cases import DecoderCase, Update, cases, write_example_files

NAMES = ["json", "comma-separated", "debezium", "avro", "protobuf", "json-schema"]
GARBAGE = [
    b"",
    b"\x00",
    b"\xff\xfe\xfd",
    b"\x00\x00\x00\x00\x01abc",
    b"[" * 100_000,
    b"null",
    b"x" * 10_000_000,
]


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> DecoderCase:
    """Each format by its name."""
    write_example_files(tmp_path)
    return next(case for case in cases(tmp_path) if case.name == request.param)


def test_every_case_is_run(tmp_path: Path) -> None:
    """A case that is not in the list of names would prove nothing."""
    write_example_files(tmp_path)
    assert [case.name for case in cases(tmp_path)] == NAMES


def test_good_values_are_messages_of_the_type(case: DecoderCase) -> None:
    """Each value is the message that it says."""
    decode = case.decoder.for_type(Update)
    assert decode(list(case.good)) == list(case.good.values())


def test_no_value_is_no_message(case: DecoderCase) -> None:
    """An empty batch is decoded to nothing."""
    assert case.decoder.for_type(Update)([]) == []


def test_a_value_that_is_no_message_is_poison_that_says_why(case: DecoderCase) -> None:
    """The cause names what is wrong; it is short, and a text that can be stored."""
    decode = case.decoder.for_type(Update)
    for value, cause in case.wrong.items():
        (poison,) = decode([value])
        assert isinstance(poison, Poison), value
        assert re.search(cause, poison.cause), poison.cause
        assert len(poison.cause.encode()) < 5_000


@pytest.mark.parametrize("value", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_poison(case: DecoderCase, value: bytes) -> None:
    """Empty, binary, huge and deep values are decoded to poison with a short cause."""
    (poison,) = case.decoder.for_type(Update)([value])
    assert isinstance(poison, Poison)
    assert len(poison.cause) < 1_000


def test_a_null_value_gives_one_result(case: DecoderCase) -> None:
    """Poison or a message: a tombstone is never skipped, since its offset must be accounted for."""
    (result,) = case.decoder.for_type(Update)([None])
    assert isinstance(result, Poison | Update)


def test_poison_stands_where_its_value_stood(case: DecoderCase) -> None:
    """Each result has the place of its value, whatever is between them."""
    decode = case.decoder.for_type(Update)
    good_value, message = next(iter(case.good.items()))
    bad_value = next(iter(case.wrong))
    values = [good_value, bad_value, good_value, None, b"", good_value]
    results = decode(values)
    assert len(results) == len(values)
    assert [results[i] for i in (0, 2, 5)] == [message] * 3
    assert all(isinstance(results[i], Poison | Update) for i in (3, 4))
    assert isinstance(results[1], Poison)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_values_decode_together_as_they_do_one_by_one(
    case: DecoderCase, data: st.DataObject
) -> None:
    """How Kafka cuts batches has no effect, for whatever bytes."""
    known = [*case.good, *case.wrong]
    value = st.none() | st.binary(max_size=20) | st.sampled_from(known)
    values = data.draw(st.lists(value, max_size=6))
    decode = case.decoder.for_type(Update)
    one_by_one = [result for value in values for result in decode([value])]
    assert decode(values) == one_by_one


def test_values_are_not_changed(case: DecoderCase) -> None:
    """The list of values is the caller's: it is quarantined and hashed afterwards."""
    values = [*case.good, None, *case.wrong]
    before = list(values)
    case.decoder.for_type(Update)(values)
    assert values == before


def test_good_values_can_be_shown(case: DecoderCase) -> None:
    """As plain values with the fields of the message."""
    for value, message in case.good.items():
        assert case.decoder.to_plain(value)["id"] == message.id


def test_two_types_do_not_disturb_each_other(case: DecoderCase) -> None:
    """A decoder is asked for functions for several types, as the table machine does."""

    class Counted(Update, tag_field="type", tag="update"):
        """The same message as another type."""

    decode = case.decoder.for_type(Update)
    decode_counted = case.decoder.for_type(Counted)
    value = next(iter(case.good))
    assert type(decode([value])[0]) is Update
    assert type(decode_counted([value])[0]) is Counted
