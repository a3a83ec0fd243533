"""Expressions: conditions that people type, such as `message.price < 0`, in a small grammar that
can do no harm.

Text is parsed and every node of it is looked up in a list; what is not on it is refused by name.
Nothing is ever handed to `eval`. Fields are those that data has: no attribute of Python's own can
be reached, no function beyond a few can be called, and work and size are bounded. A field that is
not there is None, and None is neither more nor less than anything: a message without a price is no
message with a price below 0. Work is counted in steps; how many there may be grows with the state
that is asked, never faster: one look at each row is always possible.

Next room: alike.py compares values of two kinds; trace.py says which names there are; cli/replay.py
and cli/bisect.py take what people type.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from decimal import localcontext
from functools import reduce
from typing import Any

from seriatim.errors import ConfigError
from seriatim.operations.inspect.compare_values import (
    NUMBER_TYPES,
    coerce_key,
    describe_type,
    parse_number,
    to_comparable,
)
from seriatim.operations.inspect.fields import count_parts, get_field, work_size

TEXT_MAX, NODES_MAX, STEPS_MAX, BITS_MAX, POWER_MAX = 1_000, 200, 1_000_000, 4_096, 64
STEPS_PER_PART = 50
"""Steps beyond these for each row of the state, or part of whatever else is asked."""
DECIMAL_DIGITS = 80
"""Of decimals that are reckoned with: two columns of 38 digits, and more."""

CompiledNode = Callable[["ExpressionScope"], Any]
ARITHMETIC_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
ORDER_OPERATORS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
EQUALITY_OPERATORS: dict[type, bool] = {
    ast.Eq: True,
    ast.NotEq: False,
    ast.Is: True,
    ast.IsNot: False,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": lambda value: 0 if value is None else len(_require_sized(value)),
    "min": lambda *values: min(_present_values(values), default=None),
    "max": lambda *values: max(_present_values(values), default=None),
    "abs": lambda value: None if value is None else abs(_to_number(value)),
    "sum": lambda value: reduce(
        lambda one, other: operator.add(*to_comparable(one, other)),
        map(_to_number, _present_values([value])),
        0,
    ),
    "any": lambda value: any(_iterable_of(value)),
    "all": lambda value: all(_iterable_of(value)),
    "sorted": lambda value: sorted(_present_values([value])),
}
ALLOWED_SYNTAX = (
    "comparisons, and, or, not, + - * / // % **, x if y else z, fields, [..], "
    + ", ".join(FUNCTIONS)
)


class ExpressionScope:
    """One evaluation: the names it knows, and the work that is left to it."""

    def __init__(self, names: Mapping[str, Any], steps_left: int = STEPS_MAX) -> None:
        self.root_values, self.names, self.steps_left, self.steps_granted = (
            names,
            dict(names),
            steps_left,
            steps_left,
        )

    def spend(self, steps: int = 1) -> None:
        """Refuse what would take too long."""
        self.steps_left -= steps
        if self.steps_left < 0 and self.steps_granted == STEPS_MAX:
            more = STEPS_PER_PART * sum(map(count_parts, self.root_values.values()))
            self.steps_granted, self.steps_left = self.steps_granted + more, self.steps_left + more
        if self.steps_left < 0:
            raise ValueError(f"it takes more than {self.steps_granted} steps")


class Expression:
    """A condition, ready to be asked again and again."""

    def __init__(
        self, text: str, compiled: CompiledNode, names: frozenset[str], fields: set[str]
    ) -> None:
        self.text, self.names, self._compiled_functions = text, names, compiled
        self.unseen_fields = fields
        """Fields that nothing has had so far: perhaps a slip of the pen."""

    def evaluate(self, names: Mapping[str, Any]) -> Any:
        """What it comes to."""
        try:
            with localcontext(prec=DECIMAL_DIGITS):
                return self._compiled_functions(ExpressionScope(names))
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
            where = f" at offset {names['offset']}" if "offset" in names else ""
            told = f"{self.text!r} cannot be worked out{where}: {error}"
            raise ConfigError(told, next="change the expression") from None

    def is_true(self, names: Mapping[str, Any]) -> bool:
        """Whether it is true."""
        return bool(self.evaluate(names))


def parse_expression(text: str, root_names: Collection[str]) -> Expression:
    """An expression over these names. Whatever the grammar does not have is refused."""
    if len(text) > TEXT_MAX:
        raise _refusal_error(
            text, f"it has {len(text)} characters, more than {TEXT_MAX}", root_names
        )
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise _refusal_error(text, what, root_names) from None
    if sum(1 for _ in ast.walk(tree)) > NODES_MAX:
        raise _refusal_error(text, f"it has more than {NODES_MAX} parts", root_names)
    grammar = Grammar(root_names)
    try:
        compiled = grammar.compile(tree.body)
    except UnsupportedSyntaxError as refused:
        raise _refusal_error(text, str(refused), root_names) from None
    return Expression(text, compiled, frozenset(grammar.used_names), grammar.field_names)


class UnsupportedSyntaxError(Exception):  # an answer: `parse` tells it with the text
    """A part that the grammar does not have."""


def _refusal_error(text: str, reason: str, root_names: Collection[str]) -> ConfigError:
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:200])
    return ConfigError(
        f"the expression {shown!r} is refused: {reason}",
        names=", ".join(sorted(root_names)),
        allowed=ALLOWED_SYNTAX,
        next="write it with these, like 'message.price < 0 and offset > 41000'",
    )


class Grammar:
    """Turns the parts of an expression into functions, or refuses them."""

    def __init__(self, root_names: Collection[str]) -> None:
        self.known_names = set(root_names)
        self.used_names: set[str] = set()
        self.field_names: set[str] = set()

    def compile(self, node: ast.expr) -> CompiledNode:
        """One part, and with it all parts below."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise UnsupportedSyntaxError(f"{type(node).__name__} is not part of it")
        compiled: CompiledNode = method(node)
        return compiled

    def _constant(self, node: ast.Constant) -> CompiledNode:
        value = node.value
        if value is not None and not isinstance(value, str | int | float):
            raise UnsupportedSyntaxError(f"{type(value).__name__} is not part of it")
        return lambda _: value

    def _name(self, node: ast.Name) -> CompiledNode:
        name = node.id
        if name not in self.known_names:
            raise UnsupportedSyntaxError(f"there is no {name!r}")
        self.used_names.add(name)
        return lambda scope: scope.names[name]

    def _attribute(self, node: ast.Attribute) -> CompiledNode:
        name, of = node.attr, self.compile(node.value)
        if name.startswith("_"):
            raise UnsupportedSyntaxError(f"{name!r} begins with an underscore")
        self.field_names.add(name)

        def get(scope: ExpressionScope) -> Any:
            there, value = get_field(of(scope), name)
            if there:
                self.field_names.discard(name)
            return value

        return get

    def _subscript(self, node: ast.Subscript) -> CompiledNode:
        if isinstance(node.slice, ast.Slice):
            raise UnsupportedSyntaxError("Slice is not part of it")
        of, at = self.compile(node.value), self.compile(node.slice)
        return lambda scope: _get_item(scope, of(scope), at(scope))

    def _boolop(self, node: ast.BoolOp) -> CompiledNode:
        parts = [self.compile(part) for part in node.values]
        if isinstance(node.op, ast.And):
            return lambda scope: all(part(scope) for part in parts)
        return lambda scope: any(part(scope) for part in parts)

    def _unaryop(self, node: ast.UnaryOp) -> CompiledNode:
        part = self.compile(node.operand)
        if isinstance(node.op, ast.Not):
            return lambda scope: not part(scope)
        if isinstance(node.op, ast.USub):
            return lambda scope: None if (value := part(scope)) is None else -_to_number(value)
        raise UnsupportedSyntaxError(f"{type(node.op).__name__} is not part of it")

    def _binop(self, node: ast.BinOp) -> CompiledNode:
        do, one, other = (
            ARITHMETIC_OPERATORS.get(type(node.op)),
            self.compile(node.left),
            self.compile(node.right),
        )
        if do is None:
            raise UnsupportedSyntaxError(f"{type(node.op).__name__} is not part of it")
        power = isinstance(node.op, ast.Pow)

        def reckon(scope: ExpressionScope) -> Any:
            scope.spend()
            return _calculate(do, one(scope), other(scope), is_power=power)

        return reckon

    def _compare(self, node: ast.Compare) -> CompiledNode:
        nodes = (node.left, *node.comparators)
        parts = [self.compile(part) for part in nodes]
        tests = [
            _comparison(kind, ast.unparse(one), ast.unparse(other))
            for kind, one, other in zip(node.ops, nodes[:-1], nodes[1:], strict=True)
        ]

        def compare(scope: ExpressionScope) -> bool:
            left = parts[0](scope)
            for test, part in zip(tests, parts[1:], strict=True):
                right = part(scope)
                if not test(scope, left, right):
                    return False
                left = right
            return True

        return compare

    def _ifexp(self, node: ast.IfExp) -> CompiledNode:
        test, yes, no = (self.compile(part) for part in (node.test, node.body, node.orelse))
        return lambda scope: yes(scope) if test(scope) else no(scope)

    def _list(self, node: ast.List | ast.Tuple) -> CompiledNode:
        parts = [self.compile(part) for part in node.elts]

        def listed(scope: ExpressionScope) -> list[Any]:
            scope.spend(len(parts))
            return [part(scope) for part in parts]

        return listed

    _tuple = _list

    def _call(self, node: ast.Call) -> CompiledNode:
        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
            raise UnsupportedSyntaxError("only " + ", ".join(FUNCTIONS) + " can be called")
        if node.keywords:
            raise UnsupportedSyntaxError(
                f"{node.func.id} takes no {node.keywords[0].arg or '**'}= here"
            )
        given = len(node.args)
        if not given or (given > 1 and node.func.id not in ("min", "max")):
            raise UnsupportedSyntaxError(
                f"{node.func.id} takes one value, and {given or 'none'} {'are' if given else 'is'} given"
            )
        function, parts = FUNCTIONS[node.func.id], [self.compile(part) for part in node.args]

        def call(scope: ExpressionScope) -> Any:
            given = [part(scope) for part in parts]
            scope.spend(1 if function is FUNCTIONS["len"] else sum(map(work_size, given)))
            return function(*given)

        return call

    def _generatorexp(self, node: ast.GeneratorExp | ast.ListComp) -> CompiledNode:
        """`row.price for row in state.rows if row.size`: one loop over what the data has."""
        loop, *more = node.generators
        if (
            more
            or loop.is_async
            or not isinstance(loop.target, ast.Name)
            or loop.target.id.startswith("_")
        ):
            raise UnsupportedSyntaxError("a loop is `x for name in many`, one at a time")
        name, many = loop.target.id, self.compile(loop.iter)
        if name in self.known_names or name in FUNCTIONS:
            raise UnsupportedSyntaxError(f"{name!r} means something already")
        self.known_names.add(name)
        tests, each = [self.compile(test) for test in loop.ifs], self.compile(node.elt)
        self.known_names.discard(name)
        self.used_names.discard(name)

        def run(scope: ExpressionScope) -> Iterator[Any]:
            for one in _iterable_of(many(scope)):
                scope.names[name] = one
                scope.spend()
                if all(test(scope) for test in tests):
                    yield each(scope)

        return lambda scope: list(run(scope))

    _listcomp = _generatorexp


def _get_item(scope: ExpressionScope, value: Any, index: Any) -> Any:
    scope.spend()
    if isinstance(value, Mapping):
        return value.get(coerce_key(value, index))
    if isinstance(value, Sequence) and not isinstance(value, str) and isinstance(index, int):
        return value[index] if -len(value) <= index < len(value) else None
    return None


def _require_sized(value: Any) -> Any:
    if not isinstance(value, str | Sequence | Mapping | set | frozenset):
        raise TypeError(f"{type(value).__name__} has no length")
    return value


def _iterable_of(value: Any) -> Iterable[Any]:
    """What can be gone through: lists and mappings (their values). None has nothing in it."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str):
        return value
    raise TypeError(f"{type(value).__name__} is not many")


def _present_values(values: Sequence[Any]) -> list[Any]:
    """What a function goes through: its one list, or what it was given; what is not there is left
    out.
    """
    many = _iterable_of(values[0]) if len(values) == 1 else values
    return [value for value in many if value is not None]


def _to_number(value: Any) -> Any:
    """A number, or a text that is one: decimals are sent as text."""
    found = parse_number(value) if isinstance(value, str) else value
    if not isinstance(found, NUMBER_TYPES):
        raise TypeError(f"{describe_type(value)} is no number")
    return found


def _calculate(
    operation: Callable[[Any, Any], Any], left: Any, right: Any, *, is_power: bool
) -> Any:
    """Numbers alone, and none that grows without end."""
    if left is None or right is None:
        return None
    if is_power and abs(_to_number(right)) > POWER_MAX:
        raise ValueError(f"a power beyond {POWER_MAX}")
    value = operation(*to_comparable(_to_number(left), _to_number(right)))
    if isinstance(value, complex):
        raise ValueError("it is no real number")
    if isinstance(value, int) and value.bit_length() > BITS_MAX:
        raise ValueError("the number grows too large")
    return value


def _comparison(
    comparison: ast.cmpop, left_text: str, right_text: str
) -> Callable[[ExpressionScope, Any, Any], bool]:
    if isinstance(comparison, ast.In | ast.NotIn):
        wanted = isinstance(comparison, ast.In)
        return lambda scope, one, other: _is_in(scope, one, other) is wanted
    compare, same = ORDER_OPERATORS.get(type(comparison)), EQUALITY_OPERATORS.get(type(comparison))

    def test(scope: ExpressionScope, one: Any, other: Any) -> bool:
        scope.spend(min(work_size(one), work_size(other)))
        if compare is None:
            return _is_equal(one, other) is same
        if one is None or other is None:
            return False
        mine, yours = to_comparable(one, other)
        try:
            return bool(compare(mine, yours))
        except TypeError:
            told = f"{left_text} is {describe_type(one)} and {right_text} is {describe_type(other)}: neither is more or less"
            raise TypeError(told) from None

    return test


def _is_equal(left: Any, right: Any) -> bool:
    mine, yours = to_comparable(left, right)
    return bool(mine == yours)


def _is_in(scope: ExpressionScope, item: Any, container: Any) -> bool:
    scope.spend(1 if isinstance(container, Mapping) else work_size(container))
    if isinstance(container, str):
        return isinstance(item, str) and item in container
    if isinstance(container, Mapping):
        return coerce_key(container, item) in container
    return any(_is_equal(item, each) for each in _iterable_of(container))
