"""Style as a test: how densely the package is written, how it is named, docstrings, and words of
the glossary.

The measures are those of tests/style.py. Their limits are a ratchet: a figure may only become
better, and a limit follows it. Where they are to end is in CONTRIBUTING.md.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest

from tests.style import (
    StyleFigures,
    facts_of,
    facts_of_file,
    measure_package,
    small_modules_with_one_importer,
)

ROOT = Path(__file__).parent.parent
PRODUCT = sorted(
    path
    for room in ("seriatim", "dags", "plugins", "spark_apps")
    for path in (ROOT / room).rglob("*.py")
)
PACKAGE = [path for path in PRODUCT if path.is_relative_to(ROOT / "seriatim")]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


@dataclass(frozen=True)
class Limit:
    """How far a figure may go, and how much better than its limit it may be before the limit has to
    follow.
    """

    value: float
    tolerance: float
    may_only: Literal["fall", "rise"] = "fall"


LIMITS = {
    "nodes_per_code_line": Limit(8.1, tolerance=0.1),
    "function_nodes_p95": Limit(220, tolerance=5),
    "function_nodes_max": Limit(450, tolerance=10),
    "vague_names_percent": Limit(0.5, tolerance=0.3),
    "classes_sharing_a_name": Limit(0, tolerance=2),
    "comment_lines_percent": Limit(1.5, tolerance=0.2, may_only="rise"),
    "small_modules_with_one_importer": Limit(2, tolerance=0),
}

# Modules under 60 lines that only one other module imports, each with a reason. A reason is that it is
# one of several implementations of a Protocol, such as a channel that context.py chooses. Otherwise
# the list may only become shorter.
SMALL_MODULES = {
    "seriatim.fast.choose": "must not import numba, which the rest of fast does",
    "seriatim.operations.ask_for_snapshots": "a step is a module",
}

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
    "HTTPRedirectHandler": "the standard library",
    "HTTPSHandler": "the standard library",
    "Handler": "the standard library (logging)",
    "addHandler": "the standard library (logging)",
    "exception_handler": "FastAPI",
    "high_watermark": "Kafka",
}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def complaint_about(name: str, figure: float, limit: Limit) -> str:
    """What is wrong with a figure and its limit; empty if nothing is."""
    # Rounded, so that 0.04 + 0.2 is 0.24 and not a little more.
    slack = round(limit.value - figure if limit.may_only == "fall" else figure - limit.value, 6)
    if slack < 0:
        return f"{name} is {figure}, the limit is {limit.value}"
    if slack > limit.tolerance:
        verb = "lower" if limit.may_only == "fall" else "raise"
        return f"{name} is {figure}: {verb} the limit to {figure}"
    return ""


def module_name(path: Path) -> str:
    """The dotted name by which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if path.name == "__init__.py" else parts)


def _words(text: str) -> Iterator[str]:
    """The single words of a name or a comment: dead_letterQueue is dead, letter, queue."""
    for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text):
        yield word.lower().removesuffix("s")


@cache
def _banned_in(text: str) -> list[str]:
    words = list(_words(text))
    pairs = [first + second for first, second in pairwise(words)]
    return [word for word in (*words, *pairs) if word in BANNED]


def _own_words(path: Path) -> Iterator[tuple[int, str]]:
    """Every identifier, comment and docstring, with its line. Other strings may name others'
    things.
    """
    text = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.COMMENT) and token.string not in THEIRS:
            yield token.start[0], token.string
    for line, _, docstring in facts_of_file(path).docstrings:
        yield line, docstring


MODULES = {module_name(path): path for path in PRODUCT}


def test_every_module_says_what_it_is() -> None:
    """A stranger knows from the first line whether this is the module to read."""
    silent_modules = []
    for path in PRODUCT + TESTS:
        docstrings = {name: docstring for _, name, docstring in facts_of_file(path).docstrings}
        if not docstrings[""]:
            silent_modules.append(_name(path))
    assert silent_modules == []


def test_every_figure_is_at_its_limit() -> None:
    """No measure of the package is worse than its limit, and no limit is looser than today's figure
    asks for.
    """
    figures = asdict(measure_package(map(facts_of_file, PACKAGE))) | {
        "small_modules_with_one_importer": len(SMALL_MODULES)
    }
    assert set(figures) == set(LIMITS)
    complaints = [complaint_about(name, figures[name], LIMITS[name]) for name in LIMITS]
    assert [complaint for complaint in complaints if complaint] == []


def test_every_small_module_with_one_importer_is_listed() -> None:
    """A module under 60 lines that one other imports belongs into that one, unless the list says
    why not.
    """
    small_modules = small_modules_with_one_importer(MODULES)
    assert small_modules.keys() - SMALL_MODULES.keys() == set(), (
        "move it into its importer. If it is one of several implementations of a Protocol, list it"
        " with that reason, and count it in LIMITS"
    )
    assert SMALL_MODULES.keys() - small_modules.keys() == set(), (
        "no longer such a module: take it off the list"
    )


@pytest.mark.parametrize(
    ("figure", "limit", "complaint"),
    [
        (100, Limit(100, tolerance=5), ""),
        (95, Limit(100, tolerance=5), ""),
        (101, Limit(100, tolerance=5), "x is 101, the limit is 100"),
        (94, Limit(100, tolerance=5), "x is 94: lower the limit to 94"),
        (0.04, Limit(0.04, tolerance=0.2, may_only="rise"), ""),
        (0.03, Limit(0.04, tolerance=0.2, may_only="rise"), "x is 0.03, the limit is 0.04"),
        (0.30, Limit(0.04, tolerance=0.2, may_only="rise"), "x is 0.3: raise the limit to 0.3"),
    ],
)
def test_a_limit_follows_its_figure(figure: float, limit: Limit, complaint: str) -> None:
    """A worse figure is refused, and so is a limit that a better figure has left behind."""
    assert complaint_about("x", figure, limit) == complaint


PLAIN_SOURCE = '''"""A module."""


class Slice:
    """A slice."""


def add(left_number, right_number):
    # Why.
    total = left_number + right_number
    return total
'''


def test_the_measures_are_those_of_a_source_counted_by_hand() -> None:
    """22 nodes on 4 code lines, one function of 16, three bound names, one comment in eleven lines."""
    figures = measure_package([facts_of(PLAIN_SOURCE)])
    assert figures == StyleFigures(
        nodes_per_code_line=5.5,
        function_nodes_p95=16,
        function_nodes_max=16,
        vague_names_percent=0.0,
        classes_sharing_a_name=0,
        comment_lines_percent=9.09,
    )


@pytest.mark.parametrize(
    ("measure", "worse_source"),
    [
        (
            "nodes_per_code_line",
            PLAIN_SOURCE.replace("return total", "return [n if n else 0 for n in (total, 1)]"),
        ),
        ("function_nodes_p95", PLAIN_SOURCE.replace("return total", "return total + 1")),
        ("function_nodes_max", PLAIN_SOURCE.replace("return total", "return total + 1")),
        ("vague_names_percent", PLAIN_SOURCE.replace("left_number", "left")),
        ("vague_names_percent", PLAIN_SOURCE.replace("total", "found")),
        ("classes_sharing_a_name", PLAIN_SOURCE + "class Slice: pass"),
    ],
)
def test_every_measure_sees_what_it_measures(measure: str, worse_source: str) -> None:
    """A denser, larger or vaguer source has the higher figure."""
    before, after = (
        measure_package([facts_of(PLAIN_SOURCE)]),
        measure_package([facts_of(worse_source)]),
    )
    assert getattr(after, measure) > getattr(before, measure)


def test_a_comment_less_is_seen() -> None:
    """Without its comment the source has the lower share of comments, and its nodes per line stay."""
    before = measure_package([facts_of(PLAIN_SOURCE)])
    after = measure_package([facts_of(PLAIN_SOURCE.replace("    # Why.\n", ""))])
    assert after.comment_lines_percent < before.comment_lines_percent
    assert after.nodes_per_code_line == before.nodes_per_code_line


@pytest.mark.parametrize(
    "statement",
    ["import a.tiny", "from a import tiny", "from a.tiny import x", "from . import tiny"],
)
def test_a_small_module_with_one_importer_is_seen(tmp_path: Path, statement: str) -> None:
    """However it is imported; a second importer, or 60 lines, and it is none any more."""
    package = {
        "a": tmp_path / "__init__.py",
        "a.tiny": tmp_path / "tiny.py",
        "a.user": tmp_path / "user.py",
        "a.second": tmp_path / "second.py",
    }
    for path in package.values():
        path.write_text("")
    package["a.user"].write_text(f"def run():\n    {statement}\n")
    assert small_modules_with_one_importer(package) == {"a.tiny": "a.user"}
    facts_of_file.cache_clear()
    package["a.tiny"].write_text("\n" * 60)
    assert small_modules_with_one_importer(package) == {}
    facts_of_file.cache_clear()
    package["a.tiny"].write_text("")
    package["a.second"].write_text(statement)
    assert small_modules_with_one_importer(package) == {}


def test_one_word_for_one_thing() -> None:
    """Words that the glossary replaced are not used for our own things."""
    banned_uses = []
    for path in PRODUCT:
        for line, text in _own_words(path):
            banned_uses += [
                (f"{_name(path)}:{line}", word, BANNED[word]) for word in _banned_in(text)
            ]
    assert banned_uses == [], "say it with the word on the right; see docs/GLOSSARY.md"


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
    """The search itself can fail: plurals, camel case and two words are seen, parts of words are
    not.
    """
    assert _banned_in(text) == banned


def test_every_exception_to_the_words_is_needed() -> None:
    """A name on the list of others' names is used somewhere, and is one that would be refused."""
    used = {token for path in PRODUCT for token in re.findall(r"\w+", path.read_text())}
    assert {name for name in THEIRS if name not in used or not _banned_in(name)} == set()


def test_every_test_says_what_it_proves() -> None:
    """A test's docstring is the sentence it proves: one paragraph with a full stop."""
    without_sentence = []
    for path in TESTS:
        for line, name, text in facts_of_file(path).docstrings:
            is_sentence = text.endswith(".") and "\n\n" not in text
            if path.name.startswith("test_") and name.startswith("test_") and not is_sentence:
                without_sentence.append(f"{_name(path)}:{line} {name}")
    assert without_sentence == []
