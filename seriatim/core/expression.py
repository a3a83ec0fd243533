"""Expressions: conditions that people type, such as `message.price < 0`, in a small grammar that can do no harm.

Text is parsed and every node of it is looked up in a list; what is not on it is refused by name. Nothing is ever
handed to `eval`. Fields are those that data has: no attribute of Python's own can be reached, no function beyond a
few can be called, and work and size are bounded. A field that is not there is None, and None is neither more nor
less than anything: a message without a price is no message with a price below 0. Work is counted in steps; how many
there may be grows with the state that is asked, never faster: one look at each row is always possible.

Next room: alike.py compares values of two kinds; trace.py says which names there are; cli/replay.py and cli/bisect.py
take what people type.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from decimal import localcontext
from functools import reduce
from typing import Any

from seriatim.core.alike import NUMBERS, alike, key, named, number
from seriatim.core.errors import ConfigError
from seriatim.core.fields import extent, field_of, size

TEXT_MAX, NODES_MAX, STEPS_MAX, BITS_MAX, POWER_MAX = 1_000, 200, 1_000_000, 4_096, 64
STEPS_EACH = 50
"""Steps beyond these for each row of the state, or part of whatever else is asked."""
DIGITS = 80
"""Of decimals that are reckoned with: two columns of 38 digits, and more."""

Compiled = Callable[["Scope"], Any]
ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
ORDER: dict[type, Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
SAME: dict[type, bool] = {ast.Eq: True, ast.NotEq: False, ast.Is: True, ast.IsNot: False}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": lambda value: 0 if value is None else len(_counted(value)),
    "min": lambda *values: min(_given(values), default=None),
    "max": lambda *values: max(_given(values), default=None),
    "abs": lambda value: None if value is None else abs(_number(value)),
    "sum": lambda value: reduce(lambda one, other: operator.add(*alike(one, other)), map(_number, _given([value])), 0),
    "any": lambda value: any(_many(value)),
    "all": lambda value: all(_many(value)),
    "sorted": lambda value: sorted(_given([value])),
}
ALLOWED = "comparisons, and, or, not, + - * / // % **, x if y else z, fields, [..], " + ", ".join(FUNCTIONS)


class Scope:
    """One evaluation: the names it knows, and the work that is left to it."""

    def __init__(self, names: Mapping[str, Any], left: int = STEPS_MAX) -> None:
        self.given, self.names, self.left, self.granted = names, dict(names), left, left

    def spend(self, steps: int = 1) -> None:
        """Refuse what would take too long."""
        self.left -= steps
        if self.left < 0 and self.granted == STEPS_MAX:
            more = STEPS_EACH * sum(map(extent, self.given.values()))
            self.granted, self.left = self.granted + more, self.left + more
        if self.left < 0:
            raise ValueError(f"it takes more than {self.granted} steps")


class Expression:
    """A condition, ready to be asked again and again."""

    def __init__(self, text: str, compiled: Compiled, names: frozenset[str], fields: set[str]) -> None:
        self.text, self.names, self._compiled = text, names, compiled
        self.unseen = fields
        """Fields that nothing has had so far: perhaps a slip of the pen."""

    def value(self, names: Mapping[str, Any]) -> Any:
        """What it comes to."""
        try:
            with localcontext(prec=DIGITS):
                return self._compiled(Scope(names))
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
            where = f" at offset {names['offset']}" if "offset" in names else ""
            told = f"{self.text!r} cannot be worked out{where}: {error}"
            raise ConfigError(told, next="change the expression") from None

    def holds(self, names: Mapping[str, Any]) -> bool:
        """Whether it is true."""
        return bool(self.value(names))


def parse(text: str, roots: Collection[str]) -> Expression:
    """An expression over these names. Whatever the grammar does not have is refused."""
    if len(text) > TEXT_MAX:
        raise _refused(text, f"it has {len(text)} characters, more than {TEXT_MAX}", roots)
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise _refused(text, what, roots) from None
    if sum(1 for _ in ast.walk(tree)) > NODES_MAX:
        raise _refused(text, f"it has more than {NODES_MAX} parts", roots)
    grammar = Grammar(roots)
    try:
        compiled = grammar.compile(tree.body)
    except Refused as refused:
        raise _refused(text, str(refused), roots) from None
    return Expression(text, compiled, frozenset(grammar.used), grammar.fields)


class Refused(Exception):  # noqa: N818  # an answer: `parse` tells it with the text
    """A part that the grammar does not have."""


def _refused(text: str, what: str, roots: Collection[str]) -> ConfigError:
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:200])
    return ConfigError(
        f"the expression {shown!r} is refused: {what}",
        names=", ".join(sorted(roots)),
        allowed=ALLOWED,
        next="write it with these, like 'message.price < 0 and offset > 41000'",
    )


class Grammar:
    """Turns the parts of an expression into functions, or refuses them."""

    def __init__(self, roots: Collection[str]) -> None:
        self.known = set(roots)
        self.used: set[str] = set()
        self.fields: set[str] = set()

    def compile(self, node: ast.expr) -> Compiled:
        """One part, and with it all parts below."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise Refused(f"{type(node).__name__} is not part of it")
        compiled: Compiled = method(node)
        return compiled

    def _constant(self, node: ast.Constant) -> Compiled:
        value = node.value
        if value is not None and not isinstance(value, str | int | float):
            raise Refused(f"{type(value).__name__} is not part of it")
        return lambda _: value

    def _name(self, node: ast.Name) -> Compiled:
        name = node.id
        if name not in self.known:
            raise Refused(f"there is no {name!r}")
        self.used.add(name)
        return lambda scope: scope.names[name]

    def _attribute(self, node: ast.Attribute) -> Compiled:
        name, of = node.attr, self.compile(node.value)
        if name.startswith("_"):
            raise Refused(f"{name!r} begins with an underscore")
        self.fields.add(name)

        def get(scope: Scope) -> Any:
            there, value = field_of(of(scope), name)
            if there:
                self.fields.discard(name)
            return value

        return get

    def _subscript(self, node: ast.Subscript) -> Compiled:
        if isinstance(node.slice, ast.Slice):
            raise Refused("Slice is not part of it")
        of, at = self.compile(node.value), self.compile(node.slice)
        return lambda scope: _item(scope, of(scope), at(scope))

    def _boolop(self, node: ast.BoolOp) -> Compiled:
        parts = [self.compile(part) for part in node.values]
        if isinstance(node.op, ast.And):
            return lambda scope: all(part(scope) for part in parts)
        return lambda scope: any(part(scope) for part in parts)

    def _unaryop(self, node: ast.UnaryOp) -> Compiled:
        part = self.compile(node.operand)
        if isinstance(node.op, ast.Not):
            return lambda scope: not part(scope)
        if isinstance(node.op, ast.USub):
            return lambda scope: None if (value := part(scope)) is None else -_number(value)
        raise Refused(f"{type(node.op).__name__} is not part of it")

    def _binop(self, node: ast.BinOp) -> Compiled:
        do, one, other = ARITHMETIC.get(type(node.op)), self.compile(node.left), self.compile(node.right)
        if do is None:
            raise Refused(f"{type(node.op).__name__} is not part of it")
        power = isinstance(node.op, ast.Pow)

        def reckon(scope: Scope) -> Any:
            scope.spend()
            return _reckoned(do, one(scope), other(scope), power=power)

        return reckon

    def _compare(self, node: ast.Compare) -> Compiled:
        nodes = (node.left, *node.comparators)
        parts = [self.compile(part) for part in nodes]
        tests = [
            _test(kind, ast.unparse(one), ast.unparse(other))
            for kind, one, other in zip(node.ops, nodes[:-1], nodes[1:], strict=True)
        ]

        def compare(scope: Scope) -> bool:
            left = parts[0](scope)
            for test, part in zip(tests, parts[1:], strict=True):
                right = part(scope)
                if not test(scope, left, right):
                    return False
                left = right
            return True

        return compare

    def _ifexp(self, node: ast.IfExp) -> Compiled:
        test, yes, no = (self.compile(part) for part in (node.test, node.body, node.orelse))
        return lambda scope: yes(scope) if test(scope) else no(scope)

    def _list(self, node: ast.List | ast.Tuple) -> Compiled:
        parts = [self.compile(part) for part in node.elts]

        def listed(scope: Scope) -> list[Any]:
            scope.spend(len(parts))
            return [part(scope) for part in parts]

        return listed

    _tuple = _list

    def _call(self, node: ast.Call) -> Compiled:
        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
            raise Refused("only " + ", ".join(FUNCTIONS) + " can be called")
        if node.keywords:
            raise Refused(f"{node.func.id} takes no {node.keywords[0].arg or '**'}= here")
        given = len(node.args)
        if not given or (given > 1 and node.func.id not in ("min", "max")):
            raise Refused(f"{node.func.id} takes one value, and {given or 'none'} {'are' if given else 'is'} given")
        function, parts = FUNCTIONS[node.func.id], [self.compile(part) for part in node.args]

        def call(scope: Scope) -> Any:
            given = [part(scope) for part in parts]
            scope.spend(1 if function is FUNCTIONS["len"] else sum(map(size, given)))
            return function(*given)

        return call

    def _generatorexp(self, node: ast.GeneratorExp | ast.ListComp) -> Compiled:
        """`row.price for row in state.rows if row.size`: one loop over what the data has."""
        loop, *more = node.generators
        if more or loop.is_async or not isinstance(loop.target, ast.Name) or loop.target.id.startswith("_"):
            raise Refused("a loop is `x for name in many`, one at a time")
        name, many = loop.target.id, self.compile(loop.iter)
        if name in self.known or name in FUNCTIONS:
            raise Refused(f"{name!r} means something already")
        self.known.add(name)
        tests, each = [self.compile(test) for test in loop.ifs], self.compile(node.elt)
        self.known.discard(name)
        self.used.discard(name)

        def run(scope: Scope) -> Iterator[Any]:
            for one in _many(many(scope)):
                scope.names[name] = one
                scope.spend()
                if all(test(scope) for test in tests):
                    yield each(scope)

        return lambda scope: list(run(scope))

    _listcomp = _generatorexp


def _item(scope: Scope, value: Any, at: Any) -> Any:
    scope.spend()
    if isinstance(value, Mapping):
        return value.get(key(value, at))
    if isinstance(value, Sequence) and not isinstance(value, str) and isinstance(at, int):
        return value[at] if -len(value) <= at < len(value) else None
    return None


def _counted(value: Any) -> Any:
    if not isinstance(value, str | Sequence | Mapping | set | frozenset):
        raise TypeError(f"{type(value).__name__} has no length")
    return value


def _many(value: Any) -> Iterable[Any]:
    """What can be gone through: lists and mappings (their values). None has nothing in it."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str):
        return value
    raise TypeError(f"{type(value).__name__} is not many")


def _given(values: Sequence[Any]) -> list[Any]:
    """What a function goes through: its one list, or what it was given; what is not there is left out."""
    many = _many(values[0]) if len(values) == 1 else values
    return [value for value in many if value is not None]


def _number(value: Any) -> Any:
    """A number, or a text that is one: decimals are sent as text."""
    found = number(value) if isinstance(value, str) else value
    if not isinstance(found, NUMBERS):
        raise TypeError(f"{named(value)} is no number")
    return found


def _reckoned(do: Callable[[Any, Any], Any], one: Any, other: Any, *, power: bool) -> Any:
    """Numbers alone, and none that grows without end."""
    if one is None or other is None:
        return None
    if power and abs(_number(other)) > POWER_MAX:
        raise ValueError(f"a power beyond {POWER_MAX}")
    value = do(*alike(_number(one), _number(other)))
    if isinstance(value, complex):
        raise ValueError("it is no real number")
    if isinstance(value, int) and value.bit_length() > BITS_MAX:
        raise ValueError("the number grows too large")
    return value


def _test(kind: ast.cmpop, one_text: str, other_text: str) -> Callable[[Scope, Any, Any], bool]:
    if isinstance(kind, ast.In | ast.NotIn):
        wanted = isinstance(kind, ast.In)
        return lambda scope, one, other: _is_in(scope, one, other) is wanted
    compare, same = ORDER.get(type(kind)), SAME.get(type(kind))

    def test(scope: Scope, one: Any, other: Any) -> bool:
        scope.spend(min(size(one), size(other)))
        if compare is None:
            return _same(one, other) is same
        if one is None or other is None:
            return False
        mine, yours = alike(one, other)
        try:
            return bool(compare(mine, yours))
        except TypeError:
            told = f"{one_text} is {named(one)} and {other_text} is {named(other)}: neither is more or less"
            raise TypeError(told) from None

    return test


def _same(one: Any, other: Any) -> bool:
    mine, yours = alike(one, other)
    return bool(mine == yours)


def _is_in(scope: Scope, one: Any, other: Any) -> bool:
    scope.spend(1 if isinstance(other, Mapping) else size(other))
    if isinstance(other, str):
        return isinstance(one, str) and one in other
    if isinstance(other, Mapping):
        return key(other, one) in other
    return any(_same(one, each) for each in _many(other))
