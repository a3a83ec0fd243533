"""Sentences are for people: no code of ours reads one back.

Errors, findings and outcomes cross modules and processes as typed values (errors.py, engine/failure.py). A
regex over an error text, a name put into advice afterwards, two texts in one string: each is
refused here, by the syntax.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("seriatim", "dags", "plugins", "spark_apps")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

SENTENCES = {"message", "next", "cause", "found", "expected", "advice", "said", "text", "trouble"}
"""Attributes that hold what a person reads."""
ERRORS = {
    "error",
    "damage",
    "failure",
    "finding",
    "halt",
    "note",
    "failed",
    "failed_run",
    "refused",
    "trouble",
    "fenced",
    "concern",
}
"""Names under which errors, findings and notes go."""
READS = {
    "startswith",
    "endswith",
    "replace",
    "split",
    "rpartition",
    "partition",
    "removeprefix",
    "removesuffix",
}
READS |= {"find", "rfind", "index", "rindex", "rsplit", "match", "search", "fullmatch"}
PLACEHOLDER = re.compile(r"\bSTREAM\b")
"""A word that stands for a value in help texts. In an error the value itself is at hand."""
HELP = {"metavar", "help"}

HEADLINE, FIRST_LINE = (
    "a screen's headline is shown apart",
    "a table has room for the first line of advice alone",
)
TEMPLATE = "a template, filled in once where its value is rendered"
COUNTED = re.compile(
    r" (?:more )?(messages|records|sessions|files|rows|entries|streams|partitions|findings|slices|runs|mails|topics)\b"
)
COUNTED_IN_TEMPLATE = re.compile(r"\}\}" + COUNTED.pattern)
"""What is counted in sentences for people. A count has the form that its number asks for."""
EDGES = ("cli", "web", "alerts", "airflow", "embedded", "demo")
"""The packages that write sentences for people."""
EXCEPTIONS = {
    ("seriatim/alerts/incidents.py", "failed_run.text.partition"): HEADLINE,
    ("seriatim/alerts/mail.py", "failed_run.text.partition"): HEADLINE,
    ("seriatim/operations/prove/partition_rules.py", "self.next.replace"): TEMPLATE,
}


def told(node: ast.expr) -> bool:
    """Whether an expression is a sentence: `error.message`, `finding.found`, `error.render()`."""
    if isinstance(node, ast.Attribute):
        owner = node.value
        name = (
            owner.attr
            if isinstance(owner, ast.Attribute)
            else owner.id
            if isinstance(owner, ast.Name)
            else ""
        )
        is_ours = name in ERRORS or node.attr in ("message", "next")
        return node.attr in SENTENCES and is_ours and name not in ("touch", "turn", "step")
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "render"
    )


def parsed_sentences(tree: ast.AST) -> Iterator[str]:
    """Places at which a sentence is taken apart or looked through."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in READS
        ):
            texts = [node.func.value, *node.args]
            yield from (ast.unparse(node.func) for text in texts if told(text))
        if isinstance(node, ast.Compare) and any(
            isinstance(one, ast.In | ast.NotIn) for one in node.ops
        ):
            yield from (ast.unparse(node) for text in node.comparators if told(text))


def placeholders(tree: ast.AST) -> Iterator[str]:
    """Texts that have a placeholder where a value belongs; docstrings and help texts may."""
    allowed = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in HELP:
            allowed |= {id(inner) for inner in ast.walk(node.value)}
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.Constant)
            or not isinstance(node.value, str)
            or id(node) in allowed
        ):
            continue
        if PLACEHOLDER.search(node.value):
            yield node.value


def packed_texts(tree: ast.AST) -> Iterator[str]:
    """Texts joined by a NUL, to be split where they arrive."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield from (
                str(part.value)
                for part in node.values
                if isinstance(part, ast.Constant) and "\0" in part.value
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            texts = [node.func.value, *node.args] if node.func.attr in {*READS, "join"} else []
            for text in texts:
                if (
                    isinstance(text, ast.Constant)
                    and isinstance(text.value, str)
                    and "\0" in text.value
                ):
                    yield ast.unparse(node)


def name_of(path: Path) -> str:
    """A file as it is named in the repository."""
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_sentence_is_parsed(path: Path) -> None:
    """Whoever needs a number, a name or a kind out of an error is given a field."""
    tree = ast.parse(path.read_text())
    places = [place for place in parsed_sentences(tree) if (name_of(path), place) not in EXCEPTIONS]
    assert places == []
    assert list(placeholders(tree)) == []
    assert list(packed_texts(tree)) == []


def test_every_exception_is_needed() -> None:
    """A place that was mended is off the list."""
    used = {
        (name_of(path), place)
        for path in FILES
        for place in parsed_sentences(ast.parse(path.read_text()))
    }
    assert set(EXCEPTIONS) - used == set()


@pytest.mark.parametrize(
    "code",
    [
        'int(finding.found.rpartition(" ")[2])',
        "[path for path in paths if path in damage.message]",
        'error.next = error.next.replace("STREAM", name)',
        'error.message.startswith("Kafka ")',
        "f\"--{error.message.replace('_', '-')}\"",
        "HEADLINE.match(error.render())",
        '"--forward" in finding.next',
        "FINDINGS_FAILURE_PATTERN.search(failed.text)",
    ],
)
def test_a_parsed_sentence_is_seen(code: str) -> None:
    """As they were once written."""
    assert list(parsed_sentences(ast.parse(code)))


@pytest.mark.parametrize(
    "code", ['f"{cause}\\0{next}"', 'detail.partition("\\0")', '"\\0".join(texts)']
)
def test_packed_texts_are_seen(code: str) -> None:
    """Two texts are two fields."""
    assert list(packed_texts(ast.parse(code)))


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ('raise ConfigError("m", next="seriatim repair STREAM: it makes")', True),
        ('raise ConfigError("m", next="seriatim repair STREAM --partition x")', True),
        ('raise ConfigError("m", next="`seriatim verify STREAM` says")', True),
        ('typer.Argument(metavar="STREAM")', False),
        ('"""`seriatim accept STREAM` is the way out."""', False),
    ],
)
def test_a_placeholder_in_advice_is_seen(code: str, refused: bool) -> None:
    """In help and documentation it is what people expect."""
    assert bool(list(placeholders(ast.parse(code)))) == refused


def _counted_by_hand(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Numbers in f-strings that a noun in the plural follows, with their lines."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        for number, rest in zip(node.values, node.values[1:], strict=False):
            if not isinstance(number, ast.FormattedValue) or not isinstance(rest, ast.Constant):
                continue
            if number.format_spec is None and COUNTED.match(str(rest.value)):
                yield number.lineno, ast.unparse(number.value) + str(rest.value)


def test_nobody_reads_of_1_streams() -> None:
    """`count_of` and `noun_of` make the noun that fits, in sentences and in templates."""
    by_hand = []
    for folder in EDGES:
        for path in sorted((ROOT / "seriatim" / folder).rglob("*.py")):
            by_hand += [(path.name, *use) for use in _counted_by_hand(ast.parse(path.read_text()))]
    for path in sorted((ROOT / "seriatim" / "web" / "templates").glob("*.html")):
        by_hand += [
            (path.name, use.group()) for use in COUNTED_IN_TEMPLATE.finditer(path.read_text())
        ]
    assert by_hand == []
