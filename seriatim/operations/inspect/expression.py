"""Expressions: conditions that people type, such as `message.price < 0`, in a small and safe
grammar.

1. The text is parsed by Python's own parser. Nothing is ever handed to `eval`.
2. `Grammar` turns each node of the tree into a function. A node that it has no method for is
   refused by name.
3. `Expression.evaluate` calls these functions with the values of one message.

Fields are those that data has: no attribute of a Python object can be reached, no function beyond
a few can be called, and work and size are bounded. Work is counted in steps; how many there may be
grows in proportion to the state, so that one look at each row is always possible.

A field that is missing is None, and None is neither more nor less than anything: a message without
a price is no message with a price below 0.

Next: operations/inspect/compare_values.py compares values of two types;
operations/inspect/trace_step.py lists the names; cli/replay.py and cli/bisect.py take the text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import localcontext
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

TEXT_MAX = 1_000
"""Characters of an expression, at most."""
NODES_MAX = 200
"""Nodes of the syntax tree, at most."""
STEPS_MAX = 1_000_000
"""Steps of one evaluation, at most, for a small state."""
STEPS_PER_PART = 50
"""Steps more than STEPS_MAX for each row of the state, or part of another value."""
BITS_MAX = 4_096
"""The size of an integer, at most."""
POWER_MAX = 64
"""The exponent of a power, at most."""
DECIMAL_DIGITS = 80
"""The precision of calculations: enough for a product of two columns of 38 digits."""

CompiledNode = Callable[["ExpressionScope"], Any]
BinaryOperation = Callable[[Any, Any], Any]
Comparison = Callable[["ExpressionScope", Any, Any], bool]
ARITHMETIC_OPERATORS: dict[type, BinaryOperation] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
ORDER_OPERATORS: dict[type, BinaryOperation] = {
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


def _length(value: Any) -> int:
    if value is None:
        return 0
    if not isinstance(value, str | Sequence | Mapping | set | frozenset):
        raise TypeError(f"{type(value).__name__} has no length")
    return len(value)


def _sum(value: Any) -> Any:
    total: Any = 0
    for number in map(_to_number, _present_values([value])):
        comparable_total, comparable_number = to_comparable(total, number)
        total = comparable_total + comparable_number
    return total


def _iterable_of(value: Any) -> Iterable[Any]:
    """The elements of a list, or the values of a mapping. None has none."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str):
        return value
    raise TypeError(f"{type(value).__name__} is not many")


def _present_values(values: Sequence[Any]) -> list[Any]:
    """The values that min, max, sum and sorted work on, without None.

    A function with one argument works on the elements of it, else on its arguments.
    """
    candidates: Iterable[Any] = values
    if len(values) == 1:
        candidates = _iterable_of(values[0])
    return [value for value in candidates if value is not None]


def _to_number(value: Any) -> Any:
    """A number, or the number that a text is: decimals are sent as text."""
    number = value
    if isinstance(value, str):
        number = parse_number(value)
    if not isinstance(number, NUMBER_TYPES):
        raise TypeError(f"{describe_type(value)} is no number")
    return number


def _min(*values: Any) -> Any:
    return min(_present_values(values), default=None)


def _max(*values: Any) -> Any:
    return max(_present_values(values), default=None)


def _abs(value: Any) -> Any:
    if value is None:
        return None
    return abs(_to_number(value))


def _any(value: Any) -> bool:
    return any(_iterable_of(value))


def _all(value: Any) -> bool:
    return all(_iterable_of(value))


def _sorted(value: Any) -> list[Any]:
    return sorted(_present_values([value]))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": _length,
    "min": _min,
    "max": _max,
    "abs": _abs,
    "sum": _sum,
    "any": _any,
    "all": _all,
    "sorted": _sorted,
}
"""The functions that an expression can call."""
ALLOWED_SYNTAX = (
    "comparisons, and, or, not, + - * / // % **, x if y else z, fields, [..], "
    + ", ".join(FUNCTIONS)
    + ", x for y in z (like any(row.v < 0 for row in state.rows))"
)


class ExpressionScope:
    """One evaluation: the values of its names, and how many steps it may still take."""

    def __init__(self, names: Mapping[str, Any], steps_left: int = STEPS_MAX) -> None:
        self.root_values = names
        self.names = dict(names)
        """The values of all names, including those of loops."""
        self.steps_left = steps_left
        self.steps_granted = steps_left

    def spend(self, steps: int = 1) -> None:
        """Count steps. A ValueError is raised when there are too many."""
        self.steps_left -= steps
        # The size of the state is counted only for an expression that needs it: most do not.
        if self.steps_left < 0 and self.steps_granted == STEPS_MAX:
            parts_in_values = sum(map(count_parts, self.root_values.values()))
            more_steps = STEPS_PER_PART * parts_in_values
            self.steps_granted += more_steps
            self.steps_left += more_steps
        if self.steps_left < 0:
            raise ValueError(f"it takes more than {self.steps_granted} steps")


class Expression:
    """A condition that was parsed, to be evaluated any number of times."""

    def __init__(
        self, text: str, compiled: CompiledNode, names: frozenset[str], fields: set[str]
    ) -> None:
        self.text = text
        self.names = names
        self._compiled = compiled
        self.unseen_fields = fields
        """Fields that no value has had so far: perhaps they are misspelled."""

    def evaluate(self, names: Mapping[str, Any]) -> Any:
        """The value of the expression for these names.

        A ConfigError is raised if it has none: a division by zero, a comparison of text with a
        number, too many steps.
        """
        try:
            with localcontext(prec=DECIMAL_DIGITS):
                return self._compiled(ExpressionScope(names))
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
            at_offset = f" at offset {names['offset']}" if "offset" in names else ""
            raise ConfigError(
                f"{self.text!r} cannot be worked out{at_offset}: {error}",
                next="change the expression",
            ) from None

    def is_true(self, names: Mapping[str, Any]) -> bool:
        """Whether the expression is true for these names."""
        return bool(self.evaluate(names))


def parse_expression(text: str, root_names: Collection[str]) -> Expression:
    """Parse an expression over these names. A ConfigError refuses what the grammar does not have."""
    if len(text) > TEXT_MAX:
        reason = f"it has {len(text)} characters, more than {TEXT_MAX}"
        raise _refusal_error(text, reason, root_names)
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise _refusal_error(text, error.msg, root_names) from None
    except (ValueError, RecursionError, MemoryError) as error:
        # Python's parser raises these for zero bytes and for deep nesting.
        raise _refusal_error(text, str(error), root_names) from None
    nodes = list(ast.walk(tree))
    if len(nodes) > NODES_MAX:
        raise _refusal_error(text, f"it has more than {NODES_MAX} parts", root_names)
    grammar = Grammar(root_names)
    try:
        compiled = grammar.compile(tree.body)
    except UnsupportedSyntaxError as refused:
        raise _refusal_error(text, str(refused), root_names) from None
    return Expression(text, compiled, frozenset(grammar.used_names), grammar.field_names)


class UnsupportedSyntaxError(Exception):
    """A part that the grammar does not have. `parse_expression` turns it into a ConfigError."""


def _not_in_grammar(unknown: Any) -> UnsupportedSyntaxError:
    return UnsupportedSyntaxError(f"{type(unknown).__name__} is not part of it")


def _refusal_error(text: str, reason: str, root_names: Collection[str]) -> ConfigError:
    printable_text = ""
    for character in text[:200]:
        # Control characters could change what a terminal shows.
        printable_text += character if character.isprintable() else repr(character)[1:-1]
    example = "len(state.rows) < 100 and offset > 41000"
    if "message" in root_names:
        example = "message.price < 0 and offset > 41000"
    return ConfigError(
        f"the expression {printable_text!r} is refused: {reason}",
        names=", ".join(sorted(root_names)),
        allowed=ALLOWED_SYNTAX,
        next=f"write it with these, like '{example}'",
    )


class Grammar:
    """Compiles the nodes of a syntax tree to functions, or refuses them.

    The method for a node is named like the node's class, in lower case, after an underscore.
    """

    def __init__(self, root_names: Collection[str]) -> None:
        self.known_names = set(root_names)
        self.used_names: set[str] = set()
        self.field_names: set[str] = set()

    def compile(self, node: ast.expr) -> CompiledNode:
        """Compile one node, and with it all nodes below it."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise _not_in_grammar(node)
        compiled: CompiledNode = method(node)
        return compiled

    def _constant(self, node: ast.Constant) -> CompiledNode:
        value = node.value
        if value is not None and not isinstance(value, str | int | float):
            raise _not_in_grammar(value)
        return lambda _: value

    def _name(self, node: ast.Name) -> CompiledNode:
        name = node.id
        if name not in self.known_names:
            raise UnsupportedSyntaxError(f"there is no {name!r}")
        self.used_names.add(name)
        return lambda scope: scope.names[name]

    def _attribute(self, node: ast.Attribute) -> CompiledNode:
        name = node.attr
        owner = self.compile(node.value)
        # No field of data begins so, and `__class__` would lead out of the data.
        if name.startswith("_"):
            raise UnsupportedSyntaxError(f"{name!r} begins with an underscore")
        self.field_names.add(name)

        def evaluate(scope: ExpressionScope) -> Any:
            has_field, value = get_field(owner(scope), name)
            if has_field:
                self.field_names.discard(name)
            return value

        return evaluate

    def _subscript(self, node: ast.Subscript) -> CompiledNode:
        if isinstance(node.slice, ast.Slice):
            raise _not_in_grammar(node.slice)
        container = self.compile(node.value)
        index = self.compile(node.slice)
        return lambda scope: _get_item(scope, container(scope), index(scope))

    def _boolop(self, node: ast.BoolOp) -> CompiledNode:
        conditions = [self.compile(condition) for condition in node.values]
        if isinstance(node.op, ast.And):
            return lambda scope: all(condition(scope) for condition in conditions)
        return lambda scope: any(condition(scope) for condition in conditions)

    def _unaryop(self, node: ast.UnaryOp) -> CompiledNode:
        operand = self.compile(node.operand)
        if isinstance(node.op, ast.Not):
            return lambda scope: not operand(scope)
        if not isinstance(node.op, ast.USub):
            raise _not_in_grammar(node.op)

        def negate(scope: ExpressionScope) -> Any:
            value = operand(scope)
            if value is None:
                return None
            return -_to_number(value)

        return negate

    def _binop(self, node: ast.BinOp) -> CompiledNode:
        operation = ARITHMETIC_OPERATORS.get(type(node.op))
        left_operand = self.compile(node.left)
        right_operand = self.compile(node.right)
        if operation is None:
            raise _not_in_grammar(node.op)
        is_power = isinstance(node.op, ast.Pow)

        def calculate(scope: ExpressionScope) -> Any:
            scope.spend()
            left_value = left_operand(scope)
            right_value = right_operand(scope)
            return _calculate(operation, left_value, right_value, is_power=is_power)

        return calculate

    def _compare(self, node: ast.Compare) -> CompiledNode:
        """A comparison, or a chain of them: `0 < message.price < 10`."""
        operand_nodes = [node.left, *node.comparators]
        operand_texts = [ast.unparse(operand) for operand in operand_nodes]
        operands = [self.compile(operand) for operand in operand_nodes]
        comparisons = [
            _comparison(comparison, operand_texts[i], operand_texts[i + 1])
            for i, comparison in enumerate(node.ops)
        ]

        def compare(scope: ExpressionScope) -> bool:
            left_value = operands[0](scope)
            for i, holds in enumerate(comparisons):
                right_value = operands[i + 1](scope)
                if not holds(scope, left_value, right_value):
                    return False
                left_value = right_value
            return True

        return compare

    def _ifexp(self, node: ast.IfExp) -> CompiledNode:
        condition = self.compile(node.test)
        value_if_true = self.compile(node.body)
        value_if_false = self.compile(node.orelse)

        def choose(scope: ExpressionScope) -> Any:
            if condition(scope):
                return value_if_true(scope)
            return value_if_false(scope)

        return choose

    def _list(self, node: ast.List | ast.Tuple) -> CompiledNode:
        elements = [self.compile(element) for element in node.elts]

        def build_list(scope: ExpressionScope) -> list[Any]:
            # Before the work: an expression that is too large must not be built first.
            scope.spend(len(elements))
            return [element(scope) for element in elements]

        return build_list

    _tuple = _list

    def _call(self, node: ast.Call) -> CompiledNode:
        name = self._called_function(node)
        function = FUNCTIONS[name]
        arguments = [self.compile(argument) for argument in node.args]

        def call(scope: ExpressionScope) -> Any:
            values = [argument(scope) for argument in arguments]
            # `len` does not go through its argument.
            steps = 1
            if name != "len":
                steps = sum(map(work_size, values))
            scope.spend(steps)
            return function(*values)

        return call

    def _called_function(self, node: ast.Call) -> str:
        """The name of the function that is called; what cannot be called so is refused."""
        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
            raise UnsupportedSyntaxError("only " + ", ".join(FUNCTIONS) + " can be called")
        name = node.func.id
        if node.keywords:
            keyword = node.keywords[0].arg or "**"
            raise UnsupportedSyntaxError(f"{name} takes no {keyword}= here")
        count = len(node.args)
        if count == 0:
            raise UnsupportedSyntaxError(f"{name} takes one value, and none is given")
        if count > 1 and name not in ("min", "max"):
            raise UnsupportedSyntaxError(f"{name} takes one value, and {count} are given")
        return name

    def _generatorexp(self, node: ast.GeneratorExp | ast.ListComp) -> CompiledNode:
        """One loop over a list or mapping: `row.price for row in state.rows if row.size`."""
        loop = node.generators[0]
        name = _loop_variable(node)
        iterable = self.compile(loop.iter)
        if name in self.known_names or name in FUNCTIONS:
            raise UnsupportedSyntaxError(f"{name!r} means something already")
        # The loop's name is known in its conditions and in its result only.
        self.known_names.add(name)
        conditions = [self.compile(condition) for condition in loop.ifs]
        element = self.compile(node.elt)
        self.known_names.discard(name)
        self.used_names.discard(name)

        def run_loop(scope: ExpressionScope) -> list[Any]:
            results = []
            for value in _iterable_of(iterable(scope)):
                scope.names[name] = value
                scope.spend()
                if all(condition(scope) for condition in conditions):
                    results.append(element(scope))
            return results

        return run_loop

    _listcomp = _generatorexp


def _loop_variable(node: ast.GeneratorExp | ast.ListComp) -> str:
    """The name of the loop's variable; loops in loops and other targets are refused."""
    loop = node.generators[0]
    target = loop.target
    is_simple = len(node.generators) == 1 and not loop.is_async
    if not is_simple or not isinstance(target, ast.Name) or target.id.startswith("_"):
        raise UnsupportedSyntaxError("a loop is `x for name in many`, one at a time")
    return target.id


def _get_item(scope: ExpressionScope, value: Any, index: Any) -> Any:
    """`value[index]`; None where there is no such item."""
    scope.spend()
    if isinstance(value, Mapping):
        return value.get(coerce_key(value, index))
    if isinstance(value, str) or not isinstance(value, Sequence) or not isinstance(index, int):
        return None
    if -len(value) <= index < len(value):
        return value[index]
    return None


def _calculate(
    operation: BinaryOperation, left_value: Any, right_value: Any, *, is_power: bool
) -> Any:
    """The result of an operation on numbers; None if one of them is None.

    Results that are too large are refused: `9**9**9` would take forever.
    """
    if left_value is None or right_value is None:
        return None
    if is_power and abs(_to_number(right_value)) > POWER_MAX:
        raise ValueError(f"a power beyond {POWER_MAX}")
    operands = to_comparable(_to_number(left_value), _to_number(right_value))
    value = operation(*operands)
    if isinstance(value, complex):
        raise ValueError("it is no real number")
    if isinstance(value, int) and value.bit_length() > BITS_MAX:
        raise ValueError("the number grows too large")
    return value


def _comparison(comparison: ast.cmpop, left_text: str, right_text: str) -> Comparison:
    """The function for one comparison. The texts of both sides are for its error."""
    if isinstance(comparison, ast.In):
        return _is_in
    if isinstance(comparison, ast.NotIn):
        return lambda scope, item, container: not _is_in(scope, item, container)
    is_ordered = ORDER_OPERATORS.get(type(comparison))
    expects_equal = EQUALITY_OPERATORS.get(type(comparison))

    def holds(scope: ExpressionScope, left_value: Any, right_value: Any) -> bool:
        scope.spend(min(work_size(left_value), work_size(right_value)))
        if is_ordered is None:
            return _is_equal(left_value, right_value) is expects_equal
        if left_value is None or right_value is None:
            return False
        operands = to_comparable(left_value, right_value)
        try:
            return bool(is_ordered(*operands))
        except TypeError:
            raise TypeError(
                f"{left_text} is {describe_type(left_value)}"
                f" and {right_text} is {describe_type(right_value)}: neither is more or less"
            ) from None

    return holds


def _is_equal(left_value: Any, right_value: Any) -> bool:
    comparable_left, comparable_right = to_comparable(left_value, right_value)
    return bool(comparable_left == comparable_right)


def _is_in(scope: ExpressionScope, item: Any, container: Any) -> bool:
    """Whether a mapping has a key, a text has a part, or a list has an element."""
    if isinstance(container, Mapping):
        scope.spend()
        return coerce_key(container, item) in container
    scope.spend(work_size(container))
    if isinstance(container, str):
        return isinstance(item, str) and item in container
    return any(_is_equal(item, element) for element in _iterable_of(container))
