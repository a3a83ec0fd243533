"""The glossary leads from each word to a class or function that exists."""

from __future__ import annotations

import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

GLOSSARY = Path(__file__).parent.parent / "docs" / "GLOSSARY.md"
HEADER = ["word", "means", "class or function", "module", "not"]
WORDS_MIN = 80
"""Fewer words than this mean that the tables were not recognized."""


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _glossary_rows() -> list[list[str]]:
    """The rows of all tables, without headers and rules."""
    lines = GLOSSARY.read_text().splitlines()
    rows = [_cells(line) for line in lines if line.startswith("|")]
    return [row for row in rows if row != HEADER and not row[0].startswith("---")]


def _row_error(row: list[str]) -> str:
    """Why the names of a row cannot be imported from its modules; empty if they can."""
    if len(row) != len(HEADER):
        return f"{row[0]}: {len(row)} cells"
    names = re.findall(r"`([^`]+)`", row[2])
    paths = re.findall(r"`([^`]+)`", row[3])
    if len(paths) == 1:
        paths *= len(names)
    if not names or len(names) != len(paths):
        return f"{row[0]}: {len(names)} names, {len(paths)} modules"
    for name, path in zip(names, paths, strict=True):
        module = "seriatim." + path.removesuffix(".py").replace("/", ".")
        try:
            attrgetter(name)(import_module(module))
        except (ImportError, AttributeError) as error:
            return f"{row[0]}: {error}"
    return ""


def test_every_word_leads_to_code() -> None:
    """Each word of the glossary names a class or function that can be imported from its module."""
    rows = _glossary_rows()
    assert len(rows) >= WORDS_MIN
    assert [error for error in map(_row_error, rows) if error] == []
