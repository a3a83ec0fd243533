"""Expressions: what people may type as a condition, and what is refused whoever types it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import Struct

from seriatim.errors import ConfigError
from seriatim.operations.inspect.bisect import INVARIANT_NAMES
from seriatim.operations.inspect.expression import parse_expression
from seriatim.operations.inspect.trace_step import NAMES_AFTER_FOLD, NAMES_BEFORE_FOLD
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
        """Not a field: code would run."""
        raise AssertionError("code ran")


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
    assert parse_expression(text, ROOTS).evaluate(NAMES) == value


def test_a_tag_can_be_asked_for() -> None:
    """What tells messages of a user's own apart, by the name that it has in the message; nothing
    else of a Struct.
    """
    names = {"message": Trade("bid"), "state": Book(2, {})}
    assert parse_expression("message.type == 'trade' and message.side == 'bid'", ROOTS).is_true(
        names
    )
    assert parse_expression(
        "message.kind is None and message.tag is None and state.type is None", ROOTS
    ).is_true(names)


HOSTILE = [
    "__import__('os').system('id')",
    "().__class__.__bases__[0].__subclasses__()",
    "message.__class__",
    "state._secret",
    "state.computed.__globals__",
    "(lambda: 1)()",
    "open('/etc/passwd').read()",
    "eval('1')",
    "exec('import os')",
    "getattr(message, 'price')",
    "globals()",
    "print(1)",
    "f'{message}'",
    "'{0.__class__}'.format(message)",
    "(x := 1)",
    "[x for x in state.levels for y in state.levels]",
    "[_ for _ in records]",
    "[offset for offset in records]",
    "{1: 2}",
    "{x for x in records}",
    "max(*records)",
    "sorted(records, key=len)",
    "1 << 99999999",
    "~offset",
    "...",
    "b'bytes'",
    "1j",
    "message.price; import os",
    "import os",
    "lambda: 0",
    "yield 1",
    "await message",
    "message[0:5]",
    "unknown == 1",
    "<script>alert(1)</script>",
    "../../etc/passwd",
    "offset == 1\x00",
    "((((" * 300,
    "1" * 1001,
    "not " * 240 + "1",
    "",
]
HEAVY = [
    "9 ** 9 ** 9",
    "2 ** 64 ** 2",
    "'a' * 1000000000",
    "[1] * 1000000000",
    " * ".join(["10 ** 64"] * 20),
    "'%999999999d' % 1",
    "any(any(any(any(False for d in message.many) for c in message.many) for b in message.many) for a in message.many)",
    "1 / 0",
    "'a' < 1",
    "len(offset)",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_refused(text: str) -> None:
    """Whatever the grammar does not have is refused before anything is looked at, with what is
    allowed.
    """
    with pytest.raises(ConfigError, match="is refused") as told:
        parse_expression(text, ROOTS)
    assert told.value.next.startswith("write it with these")


@pytest.mark.parametrize(
    "names", [(*NAMES_BEFORE_FOLD, *NAMES_AFTER_FOLD), INVARIANT_NAMES], ids=["break", "bisect"]
)
def test_the_example_of_the_advice_can_be_typed(names: tuple[str, ...]) -> None:
    """It is made of the names that the command has."""
    with pytest.raises(ConfigError) as refused:
        parse_expression("nobody == 1", names)
    example = refused.value.next.split("'")[1]
    parse_expression(example, names)
    assert "any(row.v < 0 for row in state.rows)" in refused.value.render()
    parse_expression("any(row.v < 0 for row in state.rows)", names)


@pytest.mark.parametrize("text", HEAVY, ids=range(len(HEAVY)))
def test_what_takes_too_much(text: str) -> None:
    """Numbers that grow, text that is multiplied and loops without end are stopped, in words."""
    names = NAMES | {"message": {"many": list(range(100))}}
    with pytest.raises(ConfigError, match="cannot be worked out"):
        parse_expression(text, ROOTS).evaluate(names)


def test_only_declared_fields_are_read() -> None:
    """A property would be code: it is as if it were not there."""
    assert parse_expression("state.computed", ROOTS).evaluate(NAMES) is None
    assert parse_expression("state.total", ROOTS).evaluate({"state": Plain(7)}) == 7


def test_a_slip_of_the_pen_is_known() -> None:
    """Fields that no message ever had are named afterwards."""
    expression = parse_expression("message.prise < 0 or message.price > 100", ROOTS)
    assert not expression.is_true(NAMES)
    assert expression.unseen_fields == {"prise"}
    assert expression.names == {"message"}


@pytest.mark.parametrize(
    "text",
    [
        "all(r in state.rows for r in state.rows)",
        "all(message.rows == message.same for r in state.rows)",
        "all(max(message.rows) for r in state.rows)",
    ],
)
def test_work_is_bounded_wherever_it_is_done(text: str) -> None:
    """In a list that is searched, compared or counted again and again, too; a row by its number
    costs a step.
    """
    names = {
        "state": {"rows": RowsView(("id", "v"), {i: (str(i), i) for i in range(3_000)})},
        "message": {"rows": list(range(3_000)), "same": list(range(3_000))},
    }
    with pytest.raises(ConfigError, match=r"more than 1\d{6} steps"):
        parse_expression(text, ROOTS).is_true(names)
    assert parse_expression("all(state.rows[r.v].v == r.v for r in state.rows)", ROOTS).is_true(
        names
    )
    assert parse_expression("all(state.rows != None for r in state.rows)", ROOTS).is_true(names)


def test_what_cannot_be_worked_out_says_where() -> None:
    """The message's offset, and in words of ours."""
    with pytest.raises(ConfigError, match="at offset 41337: int has no length"):
        parse_expression("len(offset)", ROOTS).is_true(NAMES)


@pytest.mark.parametrize("text", ["len()", "len(1, 2)", "abs(1, 2, 3)", "min()"])
def test_a_function_takes_what_it_takes(text: str) -> None:
    """Refused before anything is folded."""
    with pytest.raises(ConfigError, match=r"takes one value, and (none is|[23] are) given"):
        parse_expression(text, ROOTS)


@pytest.mark.long
def test_one_look_at_each_row_is_always_possible() -> None:
    """However many rows there are, and however long their texts: what may be spent grows with what
    is asked.
    """
    rows = [{"id": f"{number:064d}", "price": 1.0} for number in range(30_000)]
    names = {"state": {"rows": rows}, "message": {"rows": rows}}
    assert parse_expression(
        "not any(row.id == 'x' or row.price < 0 for row in state.rows)", ROOTS
    ).is_true(names)
    assert parse_expression(
        f"not any(row.id == '{'x' * 64}' for row in state.rows)", ROOTS
    ).is_true(names)
    assert parse_expression("not any('x' in row.id for row in message.rows)", ROOTS).is_true(names)
    many = {"state": {"rows": [rows[0]] * 1_200_000}}
    assert not parse_expression("len(state.rows) < 500", ROOTS).is_true(many)
    assert parse_expression("all(row.price > 0 for row in state.rows)", ROOTS).is_true(many)
    held = {"state": Book(2, {str(number): 1.0 for number in range(1_100_000)})}
    assert parse_expression("max(state.levels) == 1", ROOTS).is_true(held)


def test_lists_cost_what_they_hold() -> None:
    """A list that is made in a loop is work, too."""
    names = {"state": {"rows": [{}] * 900}, "message": {"rows": []}}
    zeros = ", ".join("0" * 100)
    with pytest.raises(ConfigError, match="steps"):
        parse_expression(f"[[[{zeros}] for y in state.rows] for x in state.rows]", ROOTS).evaluate(
            names
        )


def test_nothing_negated_is_nothing() -> None:
    """A message without a price aborts no search, however the condition is written."""
    for text in (
        "-message.cost < 0",
        "abs(message.cost) > 1",
        "message.cost - 1 < 0",
        "-(-message.cost) == 1",
    ):
        assert parse_expression(text, ROOTS).is_true(NAMES) is False


def test_what_cannot_be_compared_is_named() -> None:
    """By the words of whoever asked, with what each of them is."""
    names = {"message": {"price": "cheap", "id": "b"}, "offset": 7}
    told = "at offset 7: message.price is text and 0 is a number: neither is more or less"
    with pytest.raises(ConfigError, match=told):
        parse_expression("message.price < 0", ROOTS).is_true(names)
    with pytest.raises(ConfigError, match="at offset 7: text is no number"):
        parse_expression("message.price + 1 > 0", ROOTS).is_true(names)
    assert parse_expression("message.price != 0", ROOTS).is_true(names)
