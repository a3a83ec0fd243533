"""The suites of a stream, read from `expectations/` beside the folder of stream files. The stock
suites are shipped with Seriatim.

Next: operations/prove/suite.py says what suites mean.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from seriatim.errors import ConfigError
from seriatim.operations.prove.suite import Expectation, Suites, join_suites, parse_suite
from seriatim.stream import Stream

STOCK_SUITES = ("records", "ledger", "state")


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
