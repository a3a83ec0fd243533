"""Suites: what a check expects, as data in `expectations/*.json`, in great-expectations' own form.

`records.json` is about every record, `ledger.json` and `state.json` about the evidence
(evidence.py), `NAME.json` about the records of stream NAME. An expectation of `NAME.json` takes the
place of the one with the same `meta.name`.

Next room: operations/prove/great_expectations_suites.py judges by them;
seriatim/operations/prove/suite_files.py reads the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.errors import ConfigError

Severity = Literal["critical", "warning", "info"]
"""critical: the verdict is bad. warning: told, and the verdict stays good. info: counted."""
COLUMN_ARGUMENTS = ("column", "column_A", "column_B", "column_list")


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
        return (
            str(named)
            if named
            else " ".join([self.type.removeprefix("expect_"), *map(str, self.columns() or ())])
        )

    @property
    def describe(self) -> str:
        """What is expected, in a line."""
        values = ", ".join(
            f"{name}={value!r}" for name, value in self.kwargs.items() if name != "row_condition"
        )
        return (
            self.description or f"{self.type.removeprefix('expect_').replace('_', ' ')} ({values})"
        )

    def columns(self) -> list[str] | None:
        """The columns it looks at; None: it does not say, so it may be all."""
        named = [self.kwargs[name] for name in COLUMN_ARGUMENTS if name in self.kwargs]
        condition = self.kwargs.get("row_condition")
        if not named or isinstance(condition, str):
            return None
        flat = [column for one in named for column in (one if isinstance(one, list) else [one])]
        return list(dict.fromkeys([*flat, *_condition_columns(condition)]))

    def config(self) -> dict[str, Any]:
        """As great-expectations takes it."""
        return {
            "type": self.type,
            "kwargs": self.kwargs,
            "severity": self.severity,
            "meta": self.meta,
        }


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


class _SuiteFile(Struct):
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


def parse_suite(content: bytes, file_name: str) -> list[Expectation]:
    """The expectations of a file."""
    try:
        seen = msgspec.json.decode(content, type=_SuiteFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file_name}: {error}", next=f"fix {file_name}: a great-expectations suite as JSON"
        ) from None
    for one in seen.expectations:
        if not one.type.startswith("expect_"):
            raise ConfigError(
                f"{file_name}: {one.type!r} is no expectation", next=f"fix `type` in {file_name}"
            )
    return [replace(one, suite=file_name) for one in seen.expectations]


def join_suites(
    stock_expectations: Mapping[str, Iterable[Expectation]],
    own_expectations: Iterable[Expectation],
    machine: str,
) -> Suites:
    """The stock suites and the stream's own, joined; without what is for another machine."""
    own_expectations = list(own_expectations)
    taken = {one.name for one in own_expectations}
    stock_names = {one.name: room for room, many in stock_expectations.items() for one in many}

    def joined(room: str) -> Suite:
        mine = [one for one in own_expectations if stock_names.get(one.name, "records") == room]
        kept = [one for one in stock_expectations[room] if one.name not in taken]
        return Suite(
            room,
            tuple(one for one in [*kept, *mine] if one.meta.get("machine", machine) == machine),
        )

    return Suites(joined("records"), joined("ledger"), joined("state"))


def _condition_columns(condition: Any) -> Iterator[str]:
    """The columns that a row condition names."""
    if isinstance(condition, dict):
        if isinstance(named := condition.get("column"), dict):
            yield str(named.get("name"))
        for part in condition.values():
            yield from _condition_columns(part)
    elif isinstance(condition, list):
        for part in condition:
            yield from _condition_columns(part)
