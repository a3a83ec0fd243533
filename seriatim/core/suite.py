"""Suites: what a check expects, as data in `expectations/*.json`, in great-expectations' own form.

`records.json` is about every record, `ledger.json` and `state.json` about the evidence (evidence.py), `NAME.json` about
the records of stream NAME. An expectation of `NAME.json` takes the place of the one with the same `meta.name`.

Next room: adapters/gx.py judges by them; seriatim/suites.py reads the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.core.errors import ConfigError

Severity = Literal["critical", "warning", "info"]
"""critical: the verdict is bad. warning: told, and the verdict stays good. info: counted."""
COLUMNS = ("column", "column_A", "column_B", "column_list")


class Expectation(Struct, frozen=True):
    """One expectation, as its file has it."""

    type: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    severity: Severity = "critical"
    meta: dict[str, Any] = field(default_factory=dict)
    description: str | None = None
    suite: str = ""
    """The file it is from."""

    @property
    def name(self) -> str:
        """What people call it: `meta.name`, or its type and columns."""
        named = self.meta.get("name")
        return str(named) if named else " ".join([self.type.removeprefix("expect_"), *map(str, self.columns() or ())])

    @property
    def says(self) -> str:
        """What is expected, in a line."""
        values = ", ".join(f"{name}={value!r}" for name, value in self.kwargs.items() if name != "row_condition")
        return self.description or f"{self.type.removeprefix('expect_').replace('_', ' ')} ({values})"

    def columns(self) -> list[str] | None:
        """The columns it looks at; None: it does not say, so it may be all."""
        named = [self.kwargs[name] for name in COLUMNS if name in self.kwargs]
        condition = self.kwargs.get("row_condition")
        if not named or isinstance(condition, str):
            return None
        flat = [column for one in named for column in (one if isinstance(one, list) else [one])]
        return list(dict.fromkeys([*flat, *_conditioned(condition)]))

    def config(self) -> dict[str, Any]:
        """As great-expectations takes it."""
        return {"type": self.type, "kwargs": self.kwargs, "severity": self.severity, "meta": self.meta}


class Suite(Struct, frozen=True):
    """Expectations that are judged together."""

    name: str
    expectations: tuple[Expectation, ...] = ()

    def columns(self) -> list[str] | None:
        """All columns that are looked at; None: any may be."""
        each = [one.columns() for one in self.expectations]
        if any(one is None for one in each):
            return None
        return list(dict.fromkeys(column for one in each for column in one or ()))


class _File(Struct):
    expectations: list[Expectation]
    """Required: a file with a slip in this word would expect nothing, and everything would be good."""
    name: str = ""


class Suites(Struct, frozen=True):
    """All that a stream is judged by."""

    records: Suite
    ledger: Suite
    state: Suite

    @property
    def count(self) -> int:
        """How many expectations there are."""
        return sum(len(suite.expectations) for suite in (self.records, self.ledger, self.state))


def parse(content: bytes, where: str) -> list[Expectation]:
    """The expectations of a file."""
    try:
        seen = msgspec.json.decode(content, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}", next=f"fix {where}: a great-expectations suite as JSON") from None
    for one in seen.expectations:
        if not one.type.startswith("expect_"):
            raise ConfigError(f"{where}: {one.type!r} is no expectation", next=f"fix `type` in {where}")
    return [replace(one, suite=where) for one in seen.expectations]


def suites(stock: Mapping[str, Iterable[Expectation]], own: Iterable[Expectation], machine: str) -> Suites:
    """The stock suites and the stream's own, joined; without what is for another machine."""
    own = list(own)
    taken = {one.name for one in own}
    stock_names = {one.name: room for room, many in stock.items() for one in many}

    def joined(room: str) -> Suite:
        mine = [one for one in own if stock_names.get(one.name, "records") == room]
        kept = [one for one in stock[room] if one.name not in taken]
        return Suite(room, tuple(one for one in [*kept, *mine] if one.meta.get("machine", machine) == machine))

    return Suites(joined("records"), joined("ledger"), joined("state"))


def _conditioned(condition: Any) -> Iterator[str]:
    """The columns that a row condition names."""
    if isinstance(condition, dict):
        if isinstance(named := condition.get("column"), dict):
            yield str(named.get("name"))
        for part in condition.values():
            yield from _conditioned(part)
    elif isinstance(condition, list):
        for part in condition:
            yield from _conditioned(part)
