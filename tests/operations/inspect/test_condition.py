"""Conditions: what people type means what they mean, and a slip is said before anything is folded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import Struct

from seriatim.errors import ConfigError
from seriatim.operations.inspect.bisect import INVARIANT_NAMES
from seriatim.operations.inspect.condition import parse_condition
from seriatim.operations.inspect.tracing import NAMES_AFTER_FOLD, NAMES_BEFORE_FOLD
from seriatim.operations.inspect.views import RowsView

ROOTS = ("offset", "message", "state", "records")


class Trade(Struct, tag_field="type", tag="trade"):
    """A message of a user's: its tag is no field of it."""

    side: str


class Book(Struct):
    """A state of a user's."""

    depth: int
    levels: dict[str, float]
    secret: str = "x"

    @property
    def computed(self) -> int:
        """Not a field of the data, but Python has it."""
        return 7


@dataclass
class Plain:
    """A state of another user's."""

    total: int


NAMES: dict[str, Any] = {
    "offset": 41337,
    "message": {
        "type": "update",
        "price": -1.5,
        "id": "b",
        "rows": [{"id": "a"}, {"id": "b", "size": 3}],
    },
    "state": Book(2, {"a": 1.0, "b": 2.5}),
    "records": [{"op": "delete"}, {"op": "insert"}],
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("offset == 41337", True),
        ("message.price < 0", True),
        ("message.size < 0", False),
        ("message.size is None and message.size != 3", True),
        ("len(message.rows) == 2 and message.rows[1].size == 3", True),
        ("message.rows[-1]['id'] in ('a', 'b')", True),
        ("message.rows[7] == None", True),
        ("any(row.size > 2 for row in message.rows)", True),
        ("all(record.op != 'update' for record in records)", True),
        ("sum(row.size for row in message.rows) + 1", 4),
        ("min(state.levels) if state.depth > 1 else 0", 1.0),
        ("max(1, offset, 3) // 2 % 10 - -1", 9),
        ("sorted([3, 1, 2])[0] ** 2 * 10 / 4", 2.5),
        ("0 <= offset < 50000 and not message.gone", True),
        ("'b' in state.levels and 'pdat' in message.type", True),
        ("abs(message.price)", 1.5),
        ("message.nothing.at.all", None),
        ("len(message.nothing) + 2", 2),
        ("message.nothing + 2", None),
    ],
)
def test_what_can_be_asked(text: str, value: Any) -> None:
    """Fields, comparisons, arithmetic and a few functions; what is not there is None, and neither
    more nor less.
    """
    assert parse_condition(text, ROOTS).evaluate(NAMES) == value


def test_a_tag_can_be_asked_for() -> None:
    """What tells messages of a user's own apart, by the name that it has in the message; nothing
    else of a Struct.
    """
    names = {"message": Trade("bid"), "state": Book(2, {})}
    assert parse_condition("message.type == 'trade' and message.side == 'bid'", ROOTS).is_true(
        names
    )
    assert parse_condition(
        "message.kind is None and message.price is None and state.type is None", ROOTS
    ).is_true(names)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("message.price <", "invalid syntax"),
        ("import os", "invalid syntax"),
        ("message.price; 1", "invalid syntax"),
        ("unknown == 1", "there is no 'unknown'"),
        ("any(row.v < limit for row in state.rows)", "there is no 'limit'"),
        ("", "invalid syntax"),
        ("offset == 1\x00", "null bytes"),
        ("((((" * 300, "too many nested parentheses"),
    ],
)
def test_what_is_refused(text: str, reason: str) -> None:
    """What is no Python, or uses a name that is not there, is refused before anything is folded."""
    with pytest.raises(ConfigError, match="is refused") as told:
        parse_condition(text, ROOTS)
    assert reason in told.value.message
    assert told.value.next.startswith("write it with these names")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("message.type.startswith('up') and message.id.upper() == 'B'", True),
        ("[level for name, level in sorted(state.levels.items()) if name != 'a']", [2.5]),
        ("(lambda price: price * 2)(message.price)", -3.0),
        ("{record.op for record in records} == {'delete', 'insert'}", True),
        ("message.rows[:1][0].id", "a"),
        ("sorted(message.rows, key=lambda row: -(row.size or 0))[0].size", 3),
        ("round(state.computed / 3, 1)", 2.3),
        ("[row.id for row in message.rows for again in (1, 2)]", ["a", "a", "b", "b"]),
        ("f'{message.id}-{offset}'", "b-41337"),
        ("offset >> 3 & 1", 41337 >> 3 & 1),
    ],
)
def test_all_of_python_can_be_used(text: str, value: Any) -> None:
    """Methods, lambdas, sets, slices, properties and nested loops: nothing is forbidden to somebody
    who may run any code anyway.
    """
    assert parse_condition(text, ROOTS).evaluate(NAMES) == value


def test_a_condition_changes_no_rows() -> None:
    """The rows of the table machine are shown as a view: the state itself has no dicts to change."""
    state = {"a": ("a", 1)}
    names = {"state": {"rows": RowsView(("id", "v"), state)}}
    assert parse_condition("state.rows[0].update(v=2) is None", ("state",)).is_true(names)
    assert state == {"a": ("a", 1)}


@pytest.mark.parametrize(
    "names", [(*NAMES_BEFORE_FOLD, *NAMES_AFTER_FOLD), INVARIANT_NAMES], ids=["break", "bisect"]
)
def test_the_example_of_the_advice_can_be_typed(names: tuple[str, ...]) -> None:
    """It is made of the names that the command has."""
    with pytest.raises(ConfigError) as refused:
        parse_condition("nobody == 1", names)
    example = refused.value.next.split("'")[1]
    parse_condition(example, names)
    assert "any(row.v < 0 for row in state.rows)" in refused.value.render()
    parse_condition("any(row.v < 0 for row in state.rows)", names)


@pytest.mark.parametrize("text", ["1 / 0", "'a' < 1", "len(offset)", "message.rows[0].id.nope()"])
def test_what_has_no_value(text: str) -> None:
    """Whatever Python raises is said as a mistake of the condition, not as one of ours."""
    with pytest.raises(ConfigError, match="cannot be worked out"):
        parse_condition(text, ROOTS).evaluate(NAMES)


def test_fields_of_dataclasses() -> None:
    """A state may be a dataclass, too."""
    assert parse_condition("state.total", ROOTS).evaluate({"state": Plain(7)}) == 7


def test_a_slip_of_the_pen_is_known() -> None:
    """Fields that no message ever had are named afterwards."""
    expression = parse_condition("message.prise < 0 or message.price > 100", ROOTS)
    assert not expression.is_true(NAMES)
    assert expression.unseen_fields == {"prise"}
    assert expression.names == {"message"}


def test_what_cannot_be_worked_out_says_where() -> None:
    """The message's offset, and in words of ours."""
    with pytest.raises(ConfigError, match="at offset 41337: object of type 'int' has no len"):
        parse_condition("len(offset)", ROOTS).is_true(NAMES)


def test_nothing_negated_is_nothing() -> None:
    """A message without a price aborts no search, however the condition is written."""
    for text in (
        "-message.cost < 0",
        "abs(message.cost) > 1",
        "message.cost - 1 < 0",
        "-(-message.cost) == 1",
    ):
        assert parse_condition(text, ROOTS).is_true(NAMES) is False


def test_what_cannot_be_compared_is_named() -> None:
    """By the words of whoever asked, with what each of them is."""
    names = {"message": {"price": "cheap", "id": "b"}, "offset": 7}
    told = "at offset 7: message.price is text and 0 is a number: neither is more or less"
    with pytest.raises(ConfigError, match=told):
        parse_condition("message.price < 0", ROOTS).is_true(names)
    with pytest.raises(ConfigError, match="at offset 7: text is no number"):
        parse_condition("message.price + 1 > 0", ROOTS).is_true(names)
    assert parse_condition("message.price != 0", ROOTS).is_true(names)
