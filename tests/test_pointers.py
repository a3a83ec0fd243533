"""Module docstrings say where to read next, and that place exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("seriatim", "dags", "plugins", "spark_apps", "tests", "bench")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
POINTER = re.compile(r"[\w/]+\.(?:py|md|toml)\b")


def pointers(path: Path) -> list[str]:
    """The files that the last paragraph of a module's docstring names as the next to read."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    _, _, advice = docstring.partition("Next:")
    return POINTER.findall(advice.partition("\n\n")[0])


def leads_somewhere(path: Path, pointer: str) -> bool:
    """Whether a pointer names a file, from the root, from the package or beside the module."""
    return any((base / pointer).is_file() for base in (ROOT, ROOT / "seriatim", path.parent))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_to_read_next_exists(path: Path) -> None:
    """A reader who follows the docstring finds the file."""
    assert [name for name in pointers(path) if not leads_somewhere(path, name)] == []


def test_pointers_are_found() -> None:
    """The search itself works: most modules name a next one, and a wrong name is seen."""
    assert sum(bool(pointers(path)) for path in FILES) >= 100
    assert not leads_somewhere(ROOT / "seriatim/errors.py", "engine/nowhere.py")
