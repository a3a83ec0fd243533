"""Conditions: Python expressions that people type about a message, such as `message.price < 0`.

The text is Python, and everything that Python has can be used. Whoever may type a condition may
also name a machine or a function of their own to be loaded, so nothing is forbidden here. No form
and no page hands text to this module.

Before the text is compiled, some parts get a meaning that suits data better than Python's own:

- `message.price` is a field of a Struct, a dataclass or a mapping. A missing field is None.
- None is neither more nor less than anything, and arithmetic with None is None: a message without a
  price is no message with a price below 0.
- Values of two types are compared as people mean them. A price is 16.67 whether it is a decimal or
  a float. Beside a date, a time, bytes, a number or a boolean, text is read as one of these, as in
  `row.day >= '2026-02-01'`. A time without a zone is in UTC. Bytes are written in base64, as messages
  and traces have them. Text that is no date beside a date is an error; text that is no number is not
  equal to any number, and neither more nor less.
- A loop over a mapping goes through its values, and a loop over None through nothing.

Next: operations/inspect/tracing.py lists the names; cli/replay.py and cli/bisect.py take the text.
"""

from __future__ import annotations

import ast
import builtins
import operator
import re
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, localcontext
from enum import Enum
from math import isfinite
from types import CodeType
from typing import Any
from uuid import UUID

from msgspec import Struct

from seriatim.errors import ConfigError

DECIMAL_DIGITS = 80
"""The precision of calculations: enough for a product of two columns of 38 digits."""
ARITHMETIC_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Pow": operator.pow,
}
ORDER_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
}
NUMBER_TYPES = (int, float, Decimal)
# Bounded, since a number like 1e999999999 takes forever to calculate with.
NUMBER_PATTERN = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?", re.ASCII)
BOOLEANS = {"true": True, "false": False}
TYPE_NAMES: dict[type, str] = {
    str: "text",
    bytes: "bytes",
    bool: "true or false",
    int: "a number",
    float: "a number",
}
RENAMED_IN_ERRORS_MAX = 200
"""How many characters of a refused text an error shows."""


class Condition:
    """A condition that was compiled, to be evaluated any number of times."""

    def __init__(self, text: str, code: CodeType, names: frozenset[str], fields: set[str]) -> None:
        self.text = text
        self.names = names
        """The names of the message that it uses."""
        self.unseen_fields = fields
        """Fields that no value has had so far: perhaps they are misspelled."""
        self._code = code

    def evaluate(self, names: Mapping[str, Any]) -> Any:
        """The value of the condition for these names. A ConfigError is raised if it has none: a
        division by zero, a comparison of text with a number.
        """
        scope = {**HELPERS, "_field": self._field, **names}
        try:
            with localcontext(prec=DECIMAL_DIGITS):
                return eval(self._code, scope)  # noqa: S307  # the module's docstring says why
        except Exception as error:  # noqa: BLE001  # the text is the user's and may raise anything
            at_offset = f" at offset {names['offset']}" if "offset" in names else ""
            raise ConfigError(
                f"{self.text!r} cannot be worked out{at_offset}: {error}",
                next="change the condition",
            ) from None

    def is_true(self, names: Mapping[str, Any]) -> bool:
        """Whether the condition is true for these names."""
        return bool(self.evaluate(names))

    def _field(self, owner: Any, name: str) -> Any:
        has_field, value = get_field(owner, name)
        if has_field:
            self.unseen_fields.discard(name)
        return value


def parse_condition(text: str, root_names: Collection[str]) -> Condition:
    """Compile a condition over these names. A ConfigError says what is wrong with its text."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
        rewriter = _DataMeaning()
        rewritten = ast.fix_missing_locations(rewriter.visit(tree))
        code = compile(rewritten, "<condition>", "eval")
    except SyntaxError as error:
        raise _refusal_error(text, error.msg, root_names) from None
    except (ValueError, RecursionError, MemoryError) as error:
        # Python's parser raises these for zero bytes and for deep nesting.
        raise _refusal_error(text, str(error), root_names) from None
    # Names of loops and lambdas are not global names of the compiled code.
    used_names = _global_names(code) - HELPERS.keys() - {"_field"}
    unknown_names = used_names - set(root_names) - set(dir(builtins))
    if unknown_names:
        raise _refusal_error(text, f"there is no {min(unknown_names)!r}", root_names)
    return Condition(text, code, frozenset(used_names & set(root_names)), rewriter.field_names)


def _global_names(code: CodeType) -> set[str]:
    """The names that a compiled text takes from outside of it. Its attributes were rewritten, so all
    that is left are names.
    """
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names


def _refusal_error(text: str, reason: str, root_names: Collection[str]) -> ConfigError:
    printable_text = ""
    for character in text[:RENAMED_IN_ERRORS_MAX]:
        # Control characters could change what a terminal shows.
        printable_text += character if character.isprintable() else repr(character)[1:-1]
    example = "len(state.rows) < 100 and offset > 41000"
    if "message" in root_names:
        example = "message.price < 0 and offset > 41000"
    return ConfigError(
        f"the condition {printable_text!r} is refused: {reason}",
        names=", ".join(sorted(root_names)),
        allowed="a Python expression, like any(row.v < 0 for row in state.rows)",
        next=f"write it with these names, like '{example}'",
    )


class _DataMeaning(ast.NodeTransformer):
    """Replaces fields, items, comparisons, arithmetic and loops by calls of the functions below."""

    def __init__(self) -> None:
        self.field_names: set[str] = set()

    def visit_Call(self, node: ast.Call) -> ast.AST:  # the name that ast looks for
        """A method of a value, such as `text.startswith(…)`, is no field: it stays Python's."""
        if isinstance(node.func, ast.Attribute):
            owner = self.visit(node.func.value)
            method = _call("_method", owner, ast.Constant(node.func.attr))
            arguments = [self.visit(argument) for argument in node.args]
            keywords = [self.visit(keyword) for keyword in node.keywords]
            return ast.Call(method, arguments, keywords)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`owner.name` is a field of data."""
        self.field_names.add(node.attr)
        return _call("_field", self.visit(node.value), ast.Constant(node.attr))

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """`many[index]` is None where there is no such item."""
        return _call("_item", self.visit(node.value), self.visit(node.slice))

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        """`many[a:b]`: a slice is a value of its own."""
        limits = [node.lower, node.upper, node.step]
        arguments = [ast.Constant(None) if limit is None else self.visit(limit) for limit in limits]
        return _call("slice", *arguments)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Arithmetic with numbers as people mean them."""
        name = type(node.op).__name__
        if name not in ARITHMETIC_OPERATORS:
            return self.generic_visit(node)
        return _call(
            "_calculate", ast.Constant(name), self.visit(node.left), self.visit(node.right)
        )

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """`-x` is None where x is."""
        if isinstance(node.op, ast.USub):
            return _call("_negate", self.visit(node.operand))
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """A comparison, or a chain of them: `0 < message.price < 10`."""
        operands = [node.left, *node.comparators]
        names = [type(comparison).__name__ for comparison in node.ops]
        texts = [ast.unparse(operand) for operand in operands]
        values = [self.visit(operand) for operand in operands]
        return _call("_compare", _constants(names), _constants(texts), *values)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        """A loop over data."""
        self.generic_visit(node)
        node.iter = _call("_elements", node.iter)
        return node


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _constants(values: Iterable[str]) -> ast.expr:
    return ast.Tuple([ast.Constant(value) for value in values], ast.Load())


def get_field(owner: Any, name: str) -> tuple[bool, Any]:
    """Whether a value has a field, and the field's value; None if it has not.

    A mapping has its keys. A Struct also has the tag by which it is told from others of its union:
    messages are sent with it, as in `message.type`, although no field of that name is declared.
    """
    if isinstance(owner, Mapping):
        return name in owner, owner.get(name)
    if hasattr(owner, name):
        return True, getattr(owner, name)
    if isinstance(owner, Struct) and owner.__struct_config__.tag_field == name:
        return True, owner.__struct_config__.tag
    return False, None


def _item(container: Any, index: Any) -> Any:
    if isinstance(container, Mapping):
        return container.get(coerce_key(container, index))
    try:
        return container[index]
    except (IndexError, TypeError):
        return None


def _elements(value: Any) -> Iterable[Any]:
    """The elements of a list, or the values of a mapping. None has none."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return list(value.values())
    elements: Iterable[Any] = value
    return elements


def _present_elements(values: Sequence[Any]) -> list[Any]:
    """The values that min, max, sum and sorted work on, without None.

    A function with one argument works on the elements of it, else on its arguments.
    """
    candidates: Iterable[Any] = values
    if len(values) == 1:
        candidates = _elements(values[0])
    return [value for value in candidates if value is not None]


def _to_number(value: Any) -> Any:
    """A number, or the number that a text is: decimals are sent as text."""
    number = value
    if isinstance(value, str):
        number = parse_number(value)
    if not isinstance(number, NUMBER_TYPES):
        raise TypeError(f"{describe_type(value)} is no number")
    return number


def _calculate(name: str, left: Any, right: Any) -> Any:
    """The result of an operation; None if one of its values is None. Text beside a number is the
    number that it is written as.
    """
    if left is None or right is None:
        return None
    operation = ARITHMETIC_OPERATORS[name]
    if isinstance(left, NUMBER_TYPES) or isinstance(right, NUMBER_TYPES):
        return operation(*to_comparable(_to_number(left), _to_number(right)))
    return operation(left, right)


def _negate(value: Any) -> Any:
    if value is None:
        return None
    return -_to_number(value)


def _compare(names: Sequence[str], texts: Sequence[str], *values: Any) -> bool:
    """Whether each value is to the next as the comparison between them says."""
    for i, name in enumerate(names):
        if not _holds(name, values[i], values[i + 1], texts[i], texts[i + 1]):
            return False
    return True


def _holds(name: str, left: Any, right: Any, left_text: str, right_text: str) -> bool:
    """One comparison. The texts of both sides are for its error."""
    if name == "In":
        return _is_in(left, right)
    if name == "NotIn":
        return not _is_in(left, right)
    if name in ("Eq", "Is"):
        return _is_equal(left, right)
    if name in ("NotEq", "IsNot"):
        return not _is_equal(left, right)
    if left is None or right is None:
        return False
    comparable_left, comparable_right = to_comparable(left, right)
    try:
        return bool(ORDER_OPERATORS[name](comparable_left, comparable_right))
    except TypeError:
        raise TypeError(
            f"{left_text} is {describe_type(left)}"
            f" and {right_text} is {describe_type(right)}: neither is more or less"
        ) from None


def _is_equal(left: Any, right: Any) -> bool:
    comparable_left, comparable_right = to_comparable(left, right)
    return bool(comparable_left == comparable_right)


def _is_in(item: Any, container: Any) -> bool:
    """Whether a mapping has a key, a text has a part, or a list has an element."""
    if isinstance(container, Mapping):
        return coerce_key(container, item) in container
    if isinstance(container, str):
        return isinstance(item, str) and item in container
    return any(_is_equal(item, element) for element in _elements(container))


def _length(value: Any) -> int:
    return 0 if value is None else len(value)


def _absolute(value: Any) -> Any:
    return None if value is None else abs(_to_number(value))


def _smallest(*values: Any) -> Any:
    return min(_present_elements(values), default=None)


def _largest(*values: Any) -> Any:
    return max(_present_elements(values), default=None)


def _total(values: Any) -> Any:
    total: Any = 0
    for value in _present_elements([values]):
        total = _calculate("Add", total, value)
    return total


def _in_order(values: Any, **options: Any) -> list[Any]:
    return sorted(_present_elements([values]), **options)


HELPERS: dict[str, Callable[..., Any]] = {
    "_method": getattr,
    "_item": _item,
    "_calculate": _calculate,
    "_negate": _negate,
    "_compare": _compare,
    "_elements": _elements,
    "len": _length,
    "abs": _absolute,
    "min": _smallest,
    "max": _largest,
    "sum": _total,
    "sorted": _in_order,
}
"""What the rewritten text calls, and functions of Python that take None as well."""


# Values of two types


def to_comparable(left_value: Any, right_value: Any) -> tuple[Any, Any]:
    """Both values as values of one type, where that is possible; otherwise as they are."""
    if left_value is None or right_value is None:
        return left_value, right_value
    left_class = left_value.__class__
    # Two datetimes still have to agree on a time zone.
    if left_class is right_value.__class__ and left_class is not datetime:
        return left_value, right_value
    left_plain = _unwrap(left_value)
    right_plain = _unwrap(right_value)
    if isinstance(left_plain, str):
        return parse_like(right_plain, left_plain), right_plain
    if isinstance(right_plain, str):
        return left_plain, parse_like(left_plain, right_plain)
    left_number = _match_precision(left_plain, right_plain)
    right_number = _match_precision(right_plain, left_plain)
    return left_number, right_number


def parse_like(example: Any, text: str) -> Any:
    """Text as a value of the type of `example`; the text itself if it is no such value.

    A ValueError says that text is no time, date or base64 where one is needed.
    """
    # A bool is an int, and a datetime is a date: the special type is asked for first.
    if isinstance(example, bool):
        return BOOLEANS.get(text.lower(), text)
    if isinstance(example, NUMBER_TYPES):
        return _parse_number_like(example, text)
    if isinstance(example, datetime):
        return _parse_time(text)
    if isinstance(example, date):
        return _parse_date(text)
    if isinstance(example, bytes):
        return _parse_base64(text)
    return text


def _parse_number_like(example: Any, text: str) -> Any:
    number = parse_number(text)
    if number is None:
        return text
    if isinstance(example, float):
        return float(number)
    return number


def coerce_key(mapping: Mapping[Any, Any], wanted_key: Any) -> Any:
    """A key that somebody asks for, as a value of the type that the mapping's keys have."""
    if wanted_key is None:
        return None
    for key in mapping:
        # All keys of a mapping are of one type: the first one tells.
        return to_comparable(key, wanted_key)[1]
    return wanted_key


def parse_number(text: str) -> Decimal | None:
    """The number that is written in a text; None: it is no number."""
    if len(text) < 100 and NUMBER_PATTERN.fullmatch(text):
        return Decimal(text)
    return None


def describe_type(value: Any) -> str:
    """The type of a value in words for people."""
    return TYPE_NAMES.get(value.__class__, value.__class__.__name__)


def _match_precision(value: Any, counterpart: Any) -> Any:
    """A float beside a decimal becomes the decimal that it is written as.

    A decimal beside an infinite float or NaN becomes a float, since no decimal compares with those.
    """
    value_class = value.__class__
    counterpart_class = counterpart.__class__
    if value_class is float and counterpart_class is Decimal and isfinite(value):
        return Decimal(repr(value))
    if value_class is Decimal and counterpart_class is float and not isfinite(counterpart):
        return float(value)
    return value


def _unwrap(value: Any) -> Any:
    """The value of an enumeration's member, the text of a UUID; a time without a zone is in UTC."""
    if isinstance(value, datetime) and value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, UUID):
        return str(value)
    return value


def _parse_time(text: str) -> datetime:
    try:
        time: datetime = _unwrap(datetime.fromisoformat(text))
    except ValueError:
        raise ValueError(
            f"{text[:50]!r} is no time: write it like '2026-11-16T08:00:00Z'"
        ) from None
    return time


def _parse_date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text[:50]!r} is no date: write it like '2026-11-16'") from None


def _parse_base64(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise ValueError(f"{text[:50]!r} is not base64, in which bytes are written") from None
