"""Suites: what a check expects, as data in `expectations/*.json`, in the form of great-expectations,
and what a check finds that is not as expected.

`records.json` is about every record. `ledger.json` and `state.json` are about the evidence
(partition_rules.py). `NAME.json` is about the records of stream NAME: an expectation in it replaces
the stock one with the same `meta.name`. The files are in `expectations/`, beside the folder of
stream files; the stock suites are shipped with Seriatim.

Next: operations/prove/great_expectations_suites.py checks data by suites; operations/prove/check.py
makes a verdict of what they say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from seriatim.engine.files import File
from seriatim.engine.offsets import Partition
from seriatim.errors import ConfigError
from seriatim.operations.prove.partition_rules import Evidence
from seriatim.stream import Stream

Severity = Literal["critical", "warning", "info"]
"""critical: the verdict is bad. warning: it is reported, and the verdict stays good. info: it is
only counted.
"""
STOCK_SUITES = ("records", "ledger", "state")
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
        meta_name = self.meta.get("name")
        if meta_name:
            return str(meta_name)
        short_type = self.type.removeprefix("expect_")
        return " ".join([short_type, *map(str, self.columns() or ())])

    @property
    def text(self) -> str:
        """What is expected, in one line."""
        if self.description:
            return self.description
        short_type = self.type.removeprefix("expect_").replace("_", " ")
        arguments: list[str] = []
        for name, value in self.kwargs.items():
            if name != "row_condition":
                arguments.append(f"{name}={value!r}")
        return f"{short_type} ({', '.join(arguments)})"

    def columns(self) -> list[str] | None:
        """The columns it is about; None if it does not say, so that it may be about all."""
        condition = self.kwargs.get("row_condition")
        if isinstance(condition, str):
            return None
        columns: list[str] = []
        for argument in COLUMN_ARGUMENTS:
            if argument not in self.kwargs:
                continue
            value = self.kwargs[argument]
            columns += value if isinstance(value, list) else [value]
        if not any(argument in self.kwargs for argument in COLUMN_ARGUMENTS):
            return None
        columns += _condition_columns(condition)
        return list(dict.fromkeys(columns))

    def config(self) -> dict[str, Any]:
        """The expectation in the form that great-expectations takes."""
        return {
            "type": self.type,
            "kwargs": self.kwargs,
            "severity": self.severity,
            "meta": self.meta,
        }


class Suite(Struct, frozen=True):
    """Expectations that are checked together."""

    name: str
    expectations: tuple[Expectation, ...] = ()

    def columns(self) -> list[str] | None:
        """All columns that the suite is about; None if an expectation may be about any column."""
        columns: list[str] = []
        for expectation in self.expectations:
            expectation_columns = expectation.columns()
            if expectation_columns is None:
                return None
            columns += expectation_columns
        return list(dict.fromkeys(columns))


class _SuiteFile(Struct):
    expectations: list[Expectation]
    """Required: a file with a typing error in this word would expect nothing, and any data would be
    good.
    """
    name: str = ""


class Suites(Struct, frozen=True):
    """All that a stream is checked by."""

    records: Suite
    ledger: Suite
    state: Suite

    @property
    def count(self) -> int:
        """How many expectations there are."""
        suites = (self.records, self.ledger, self.state)
        return sum(len(suite.expectations) for suite in suites)


def parse_suite(content: bytes, file_name: str) -> list[Expectation]:
    """The expectations of a file. A file of another form is refused with a `ConfigError`."""
    try:
        suite_file = msgspec.json.decode(content, type=_SuiteFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file_name}: {error}", next=f"fix {file_name}: a great-expectations suite as JSON"
        ) from None
    for expectation in suite_file.expectations:
        if not expectation.type.startswith("expect_"):
            raise ConfigError(
                f"{file_name}: {expectation.type!r} is no expectation",
                next=f"fix `type` in {file_name}",
            )
    return [replace(expectation, suite=file_name) for expectation in suite_file.expectations]


def load_suites(stream: Stream, streams_folder: Path) -> Suites:
    """The suites that a stream is checked by.

    These are the stock suites, or the user's files of the same names, and `expectations/NAME.json`.
    """
    folder = streams_folder.parent / "expectations"
    stock_suites = {name: _read_stock_suite(folder, name) for name in STOCK_SUITES}
    own_expectations: list[Expectation] = []
    own_path = folder / f"{stream.name}.json"
    # A stream may be called "records": then the file of this name is the stock suite.
    if stream.name not in STOCK_SUITES and own_path.is_file():
        own_expectations = _parse_suite_file(own_path)
    return join_suites(stock_suites, own_expectations, stream.machine)


def _read_stock_suite(folder: Path, name: str) -> list[Expectation]:
    """A stock suite: the user's file of this name, or else the shipped one."""
    own_path = folder / f"{name}.json"
    if own_path.is_file():
        return _parse_suite_file(own_path)
    shipped_path = Path(str(files("seriatim") / "expectations" / f"{name}.json"))
    if shipped_path.is_file():
        return _parse_suite_file(shipped_path)
    raise ConfigError(
        f"expectations/{name}.json is missing",
        next=f"take it from Seriatim's repository, and put it at {own_path}",
    )


def _parse_suite_file(path: Path) -> list[Expectation]:
    return parse_suite(path.read_bytes(), f"expectations/{path.name}")


def join_suites(
    stock_expectations: Mapping[str, Iterable[Expectation]],
    own_expectations: Iterable[Expectation],
    machine: str,
) -> Suites:
    """The stock suites joined with the stream's own, without what is for another machine.

    An own expectation that replaces a stock one takes its place, also in another suite. All other
    own expectations are about records.
    """
    own_expectations = list(own_expectations)
    own_names = {expectation.name for expectation in own_expectations}
    suite_of_stock_name: dict[str, str] = {}
    for suite_name, expectations in stock_expectations.items():
        for expectation in expectations:
            suite_of_stock_name[expectation.name] = suite_name

    def join_suite(suite_name: str) -> Suite:
        stock = [
            expectation
            for expectation in stock_expectations[suite_name]
            if expectation.name not in own_names
        ]
        own = [
            expectation
            for expectation in own_expectations
            if suite_of_stock_name.get(expectation.name, "records") == suite_name
        ]
        of_machine = [
            expectation
            for expectation in stock + own
            if expectation.meta.get("machine", machine) == machine
        ]
        return Suite(suite_name, tuple(of_machine))

    return Suites(join_suite("records"), join_suite("ledger"), join_suite("state"))


def _condition_columns(condition: Any) -> Iterator[str]:
    """The columns that a row condition names, at any depth."""
    if isinstance(condition, dict):
        column = condition.get("column")
        if isinstance(column, dict):
            yield str(column.get("name"))
        for value in condition.values():
            yield from _condition_columns(value)
    elif isinstance(condition, list):
        for value in condition:
            yield from _condition_columns(value)


class Judgement(Struct, frozen=True, kw_only=True):
    """One expectation that one partition does not meet."""

    expectation: Expectation
    partition: Partition
    broken_count: int = 0
    """Rows that are not as expected; 1 if the expectation is about all rows together."""
    row_count: int = 0
    """Rows that were looked at."""
    example_offset: int = -1
    """The offset of one row that is not as expected."""
    found: str = ""
    """What was there instead, for people."""
    files: tuple[str, ...] = ()
    """Files with bad rows, as far as that is known."""

    @property
    def is_critical(self) -> bool:
        """Whether it makes the verdict bad."""
        return self.expectation.severity == "critical"


class BrokenCheckError(Exception):
    """An expectation that could not be checked. This is never a good verdict.

    The caller knows the stream, and raises `to_config_error` instead.
    """

    def __init__(self, expectation: Expectation, reason: str) -> None:
        super().__init__(reason)
        self.expectation = expectation
        self.reason = reason

    def to_config_error(self, stream: str) -> ConfigError:
        """The error for people."""
        name = self.expectation.name
        suite = self.expectation.suite
        return ConfigError(
            f"{stream}: the check itself is broken: {name} of {suite}",
            expects=self.expectation.text,
            cause=self.reason[:400],
            next=f"fix {suite}, then `seriatim check {stream}`: this check judged nothing",
        )


class Checker(Protocol):
    """Checks data by suites. Only what is not as expected comes back.

    Raises `BrokenCheckError`, and `UnreadableFileError` (ports.py).
    """

    def check_records(
        self,
        suite: Suite,
        partition: Partition,
        files: Sequence[File],
        first_new_offsets: Mapping[str, int],
    ) -> list[Judgement]:
        """Check the records of these files from the first new offset of their topic id on."""
        ...

    def check_evidence(self, suite: Suite, evidence: Sequence[Evidence]) -> list[Judgement]:
        """Check evidence, as a frame with topic, partition, promise, holds, broken, offset."""
        ...
