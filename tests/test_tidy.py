"""Style as a test: sizes, docstrings, and words we do not use for our concepts.

The limits are those of CONTRIBUTING.md. Counted with `ast`, docstrings included.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = sorted(path for room in ("seriatim", "dags", "plugins", "spark_apps") for path in (ROOT / room).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

FUNCTION_MAX, FUNCTION_P95, FUNCTION_MEDIAN = 70, 35, 8
FILE_MAX, FILE_MEDIAN = 400, 150

BANNED = {
    "event": "message",
    "processor": "machine",
    "handler": "machine",
    "watermark": "frontier, log start or log end",
    "cursor": "frontier",
    "shard": "partition",
    "journal": "ledger",
    "deadletter": "quarantine",
}
# Names that are not ours to choose, each with its owner.
THEIRS: dict[str, str] = {
    "BaseHTTPRequestHandler": "the standard library",
    "exception_handler": "FastAPI",
    "high_watermark": "Kafka",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _functions(path: Path) -> list[Function]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def _lines(function: Function) -> int:
    assert function.end_lineno
    return function.end_lineno - function.lineno + 1


def _words(text: str) -> Iterator[str]:
    """The single words of a name or a comment: dead_letterQueue is dead, letter, queue."""
    for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text):
        yield word.lower().removesuffix("s")


def _banned_in(text: str) -> list[str]:
    words = list(_words(text))
    pairs = [first + second for first, second in pairwise(words)]
    return [word for word in (*words, *pairs) if word in BANNED]


def _own_words(path: Path) -> Iterator[tuple[int, str]]:
    """Every identifier, comment and docstring, with its line. Other strings may name others' things."""
    text = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.COMMENT) and token.string not in THEIRS:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


@pytest.mark.parametrize("path", PRODUCT + TESTS, ids=_name)
def test_every_module_says_what_it_is(path: Path) -> None:
    """A stranger knows from the first line whether this is the room."""
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", PRODUCT, ids=_name)
def test_no_file_is_too_long(path: Path) -> None:
    """A file is one room, not a house."""
    assert len(path.read_text().splitlines()) <= FILE_MAX


@pytest.mark.parametrize("path", PRODUCT + TESTS, ids=_name)
def test_no_function_is_too_long(path: Path) -> None:
    """A function fits on a screen."""
    assert [function.name for function in _functions(path) if _lines(function) > FUNCTION_MAX] == []


def test_most_functions_are_short() -> None:
    """Half of them are a few lines, and nearly all are read in one look."""
    sizes = [_lines(function) for path in PRODUCT for function in _functions(path)]
    assert median(sizes) <= FUNCTION_MEDIAN
    assert quantiles(sizes, n=20)[-1] <= FUNCTION_P95


def test_most_files_are_short() -> None:
    """Half of the files fit on a few screens."""
    assert median(len(path.read_text().splitlines()) for path in PRODUCT) <= FILE_MEDIAN


@pytest.mark.parametrize("path", PRODUCT, ids=_name)
def test_one_word_for_one_thing(path: Path) -> None:
    """Words that the glossary replaced are not used for our own things."""
    found = [(line, word, BANNED[word]) for line, text in _own_words(path) for word in _banned_in(text)]
    assert found == [], "say it with the word on the right; see docs/GLOSSARY.md"


@pytest.mark.parametrize(
    ("text", "banned"),
    [
        ("on_events", ["event"]),
        ("DeadLetterQueue", ["deadletter"]),
        ("dead letters", ["deadletter"]),
        ("# the low watermark", ["watermark"]),
        ("prevent, seventh, faulthandler", []),
        ("StreamHandler", ["handler"]),
    ],
)
def test_banned_words_are_seen(text: str, banned: list[str]) -> None:
    """The search itself can fail: plurals, camel case and two words are seen, parts of words are not."""
    assert _banned_in(text) == banned


def test_every_exception_to_the_words_is_needed() -> None:
    """A name on the list of others' names is used somewhere, and is one that would be refused."""
    used = {token for path in PRODUCT for token in re.findall(r"\w+", path.read_text())}
    assert {name for name in THEIRS if name not in used or not _banned_in(name)} == set()


@pytest.mark.parametrize("path", [path for path in TESTS if path.name.startswith("test_")], ids=_name)
def test_every_test_says_what_it_proves(path: Path) -> None:
    """A test's docstring is the sentence it proves: one paragraph with a full stop."""
    tests = [function for function in _functions(path) if function.name.startswith("test_")]
    said = {function.name: ast.get_docstring(function) or "" for function in tests}
    assert [name for name, text in said.items() if not text.endswith(".") or "\n\n" in text] == []
