"""A machine that raises at a negative number."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from seriatim import Machine


class Sum(Struct):
    """The state: the sum so far."""

    total: int = 0


class Add(Struct):
    """Add a number."""

    seq: int
    add: int


class Total(Struct):
    """Record: the sum."""

    total: int


class Adder(Machine[Sum, Add, Total]):
    """Adds up."""

    def start(self, session: str) -> Sum:  # noqa: ARG002  # all begin at nothing
        """The sum is 0."""
        return Sum()

    def apply(self, state: Sum, message: Add) -> Iterable[Total]:
        """One record per message."""
        if message.add < 0:
            raise ValueError("I never subtract")
        state.total += message.add
        yield Total(state.total)
