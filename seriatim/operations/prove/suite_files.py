"""Suites of a stream: read from `expectations/` beside the folder of stream files; the stock ones
are shipped along.

Next room: operations/prove/suite.py says what they mean.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from seriatim.errors import ConfigError
from seriatim.operations.prove.suite import Expectation, Suites, join_suites, parse_suite
from seriatim.stream import Stream

STOCK_SUITES = ("records", "ledger", "state")


def load_suites(stream: Stream, streams_folder: Path) -> Suites:
    """The stock suites, or your own of that name, and `expectations/NAME.json`. `streams`: the
    folder of its file.
    """
    folder = streams_folder.parent / "expectations"
    stock = {name: _read_stock_suite(folder, name) for name in STOCK_SUITES}
    own = (
        _parse_suite_file(path)
        if (path := folder / f"{stream.name}.json").is_file() and stream.name not in STOCK_SUITES
        else []
    )
    return join_suites(stock, own, stream.machine)


def _read_stock_suite(folder: Path, name: str) -> list[Expectation]:
    own, shipped = (
        folder / f"{name}.json",
        Path(str(files("seriatim") / "expectations" / f"{name}.json")),
    )
    path = own if own.is_file() else shipped
    if not path.is_file():
        raise ConfigError(
            f"expectations/{name}.json is missing",
            next=f"take it from Seriatim's repository, and put it at {own}",
        )
    return _parse_suite_file(path)


def _parse_suite_file(path: Path) -> list[Expectation]:
    return parse_suite(path.read_bytes(), f"expectations/{path.name}")
