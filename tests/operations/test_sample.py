"""Guesses from a sample: each is made only if every message agrees with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seriatim.operations.sample import SampledMessage, StreamSample, guess_type, study_sample


def sampled(*contents: Any, key: str | None = "k", partition: int = 0) -> list[SampledMessage]:
    """Messages of one partition with these contents."""
    encoded_key = None if key is None else key.encode()
    return [
        SampledMessage(
            "t",
            partition,
            encoded_key,
            content if isinstance(content, bytes) else json.dumps(content).encode(),
        )
        for content in contents
    ]


def column_types(sample: StreamSample) -> dict[str, str]:
    """The guessed columns."""
    return {column.name: column.type_name for column in sample.fields}


@pytest.mark.parametrize(
    ("values", "type_name"),
    [
        ([1, 2], "int64"),
        ([1, 2.5], "float64"),
        ([True, False], "bool"),
        (["a", "2024-05-01"], "string"),
        (["2024-05-01", None], "date"),
        (["2024-05-01T12:00:00Z", "2024-05-01T12:00:00.5+02:00"], "timestamp"),
        (["2024-05-01T12:00:00"], "string"),
        (["2024-13-45"], "string"),
        ([["a"], ["b", "c"]], "list<string>"),
        ([[1, None]], ""),
        ([[[1]]], ""),
        ([1, "a"], ""),
        ([True, 1], ""),
        ([{"a": 1}], ""),
        ([None], ""),
        ([2**63], ""),
    ],
)
def test_a_type_fits_every_value(values: list[Any], type_name: str) -> None:
    """A time needs its zone, null fits every type, and what fits no type has none."""
    assert guess_type(values) == type_name


def test_a_field_that_counts_in_every_session_is_the_sequence() -> None:
    """Another that rises, but not by one, is not; nor one that counts in some sessions only."""
    first = [{"at": 10 * i, "nr": i, "half": i} for i in range(3)]
    second = [{"at": 10 * i, "nr": i + 7, "half": 0} for i in range(3)]
    sample = study_sample([*sampled(*first, key="a"), *sampled(*second, key="b")])
    assert (sample.session, sample.sequence) == ("key", "nr")


def test_a_few_steps_are_not_enough_for_a_sequence() -> None:
    """Two messages prove nothing, unless the field is called like one. That there is none is said."""
    sample = study_sample(sampled({"number": 1}, {"number": 2}))
    assert sample.sequence is None
    assert [guess.value for guess in sample.guesses if guess.about == "sequence"] == ["none"]
    assert study_sample(sampled({"seq": 1}, {"seq": 2})).sequence == "seq"


def test_a_field_called_sequence_may_have_gaps() -> None:
    """Finding gaps is what it is for. A field of another name with a gap is none; and the examples
    end at the gap, so that the test of the scaffold passes.
    """
    numbers = [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    sample = study_sample(sampled(*[{"seq": number} for number in numbers]))
    assert sample.sequence == "seq"
    assert sample.examples == [{"seq": 1}, {"seq": 2}]
    assert study_sample(sampled(*[{"count": number} for number in numbers])).sequence is None


def test_without_kafka_keys_a_field_or_the_partition_is_the_session() -> None:
    """The field is known by its name."""
    with_field = sampled({"session_id": "s", "a": 1}, {"session_id": "t", "a": 2}, key=None)
    assert study_sample(with_field).session == "field:session_id"
    assert study_sample(sampled({"a": 1}, key=None)).session == "partition"


def test_a_kafka_key_that_is_no_text_names_no_session() -> None:
    """Sessions have names that can be read."""
    assert study_sample([SampledMessage("t", 0, b"\xff", b"{}")]).session == "partition"


def test_messages_of_the_table_machine_are_recognized() -> None:
    """Rows of snapshots and of changes have the columns; the key is what every row has; a snapshot
    may count anew.
    """
    sample = study_sample(
        sampled(
            {"type": "snapshot", "seq": 1, "rows": [{"id": "a", "price": 1}, {"id": "b"}]},
            {"type": "update", "seq": 2, "id": "a", "price": 1.5},
            {"type": "insert", "seq": 3, "id": "c", "price": 2},
            {"type": "delete", "seq": 4, "id": "b"},
            {"type": "snapshot", "seq": 1, "rows": []},
            {"type": "insert", "seq": 2, "id": "d", "price": 1},
        )
    )
    assert sample.is_table
    assert column_types(sample) == {"id": "string", "price": "float64"}
    assert (sample.key, sample.sequence) == (("id",), "seq")
    assert [guess.about for guess in sample.guesses] == [
        "machine",
        "session",
        "sequence",
        "columns",
        "key",
    ]


def test_a_column_may_have_any_name() -> None:
    """The table machine renames what its records have already; only an endless name is left out."""
    rows = [{"id": "a", "timestamp": "x", "a b": 1, "c" * 200: 1}]
    sample = study_sample(sampled({"type": "snapshot", "rows": rows}))
    assert column_types(sample) == {"id": "string", "timestamp": "string", "a b": "int64"}
    assert sample.left_out["c" * 200].startswith("not the name of a column")


def test_a_table_without_a_key_is_for_a_machine_of_ones_own() -> None:
    """The table machine would refuse it."""
    rows = [{"price": 1.5}]
    assert not study_sample(sampled({"type": "snapshot", "rows": rows})).is_table


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_changes_by_debezium_are_pointed_out(is_wrapped: bool) -> None:
    """A newcomer learns that there is a decoder for them, with or without their schemas."""
    change: dict[str, Any] = {"op": "c", "before": None, "after": {"id": 1}, "ts_ms": 1}
    sample = study_sample(sampled({"schema": {}, "payload": change} if is_wrapped else change))
    assert "Debezium" in sample.guesses[0].because
    assert "Debezium" not in study_sample(sampled({"op": "c"})).guesses[0].because


def test_messages_that_are_no_objects_are_counted() -> None:
    """They do not spoil the guesses from the others."""
    sample = study_sample(sampled({"id": "a"}, b"no JSON", [1], {"id": "b"}))
    assert (sample.messages, sample.unreadable) == (4, 2)
    assert sample.key == ("id",)


def test_a_short_name_is_the_better_key() -> None:
    """`id` comes before `customer_id`."""
    assert study_sample(sampled({"customer_id": 1, "id": 2})).key == ("id",)
    assert study_sample(sampled({"price": 1})).key == ()


def test_examples_are_messages_of_one_session() -> None:
    """Then their sequences fit. Fields without a column are not in them."""
    first = sampled({"id": "a", "nr": 1, "deep": {"x": 1}}, {"id": "a", "nr": 2}, key="a")
    second = sampled({"id": "b", "nr": 7}, key="b")
    examples = study_sample([first[0], second[0], first[1]]).examples
    assert examples == [{"id": "a", "nr": 1}, {"id": "a", "nr": 2}]
