"""How densely a Python package is written and how it is named: the measures that tests/test_tidy.py
holds to limits.

Every measure is taken from the syntax tree, so wrapping a dense expression over more lines changes
little.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

VAGUE_WORDS = frozenset({
    "found", "made", "one", "other", "others", "seen", "told", "said", "given", "wanted", "left", "kept", "there",
    "way", "place", "many", "some", "part", "parts", "now", "was", "whole", "who", "what", "words", "why", "how",
    "mine", "yours", "each", "done", "known", "last", "first", "next", "asked", "shown", "drawn",
})  # fmt: skip
"""Names that say nothing about a value. Nobody can search for them."""
SMALL_MODULE_LINES = 60


@dataclass(frozen=True)
class StyleFigures:
    """The measures of one package."""

    nodes_per_code_line: float
    function_nodes_p95: int
    function_nodes_max: int
    vague_names_percent: float
    classes_sharing_a_name: int
    comment_lines_percent: float


@dataclass
class SourceFacts:
    """What one walk over a source text finds; all measures and tests of style are made of these."""

    lines: int = 0
    code_lines: int = 0
    comment_lines: int = 0
    nodes: int = 0
    bound_names: list[str] = field(default_factory=list)
    """Every name that is assigned to, and every parameter; as often as it is bound."""
    function_nodes: list[int] = field(default_factory=list)
    public_classes: list[str] = field(default_factory=list)
    """Of the top level."""
    docstrings: list[tuple[int, str, str]] = field(default_factory=list)
    """Line, name and docstring of the module (which has no name), and of each class and function."""
    imports: list[tuple[int, str, str]] = field(default_factory=list)
    """Dots, module and name of `from ..module import name`; the name is empty for `import module`."""


@cache
def facts_of_file(path: Path) -> SourceFacts:
    """The facts of a file. They are kept; its syntax tree is not, since many large trees slow down
    the collector.
    """
    return facts_of(path.read_text())


def facts_of(source: str) -> SourceFacts:
    """The facts of a source text."""
    tree = ast.parse(source)
    facts = SourceFacts()
    text_lines: set[int] = set()
    facts.nodes = _walk(tree, facts, text_lines)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            facts.public_classes.append(node.name)
    for number, line in enumerate(source.splitlines(), start=1):
        facts.lines += 1
        stripped = line.strip()
        if stripped.startswith("#"):
            facts.comment_lines += 1
        elif stripped and number not in text_lines:
            facts.code_lines += 1
    return facts


def _walk(node: ast.AST, facts: SourceFacts, text_lines: set[int]) -> int:
    """Note the facts of a node and of all below it; returns how many nodes these are.

    `text_lines` gets the lines of docstrings and other free-standing texts.
    """
    size = 1
    for child in ast.iter_child_nodes(node):
        size += _walk(child, facts, text_lines)
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            facts.bound_names.append(name)
        case ast.Expr(value=ast.Constant(value=str())):
            text_lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            facts.function_nodes.append(size)
            facts.docstrings.append((node.lineno, node.name, ast.get_docstring(node) or ""))
        case ast.ClassDef():
            facts.docstrings.append((node.lineno, node.name, ast.get_docstring(node) or ""))
        case ast.Module():
            facts.docstrings.append((1, "", ast.get_docstring(node) or ""))
        case ast.Import():
            facts.imports += [(0, alias.name, "") for alias in node.names]
        case ast.ImportFrom():
            facts.imports += [(node.level, node.module or "", alias.name) for alias in node.names]
    return size


def measure_package(sources: Iterable[SourceFacts]) -> StyleFigures:
    """The figures of all source texts of a package together."""
    package = list(sources)
    bound_names = [name for facts in package for name in facts.bound_names]
    vague_count = sum(name in VAGUE_WORDS for name in bound_names)
    function_nodes = sorted(nodes for facts in package for nodes in facts.function_nodes)
    class_names = Counter(name for facts in package for name in facts.public_classes)
    nodes = sum(facts.nodes for facts in package)
    code_lines = sum(facts.code_lines for facts in package)
    comment_lines = sum(facts.comment_lines for facts in package)
    lines = sum(facts.lines for facts in package)
    return StyleFigures(
        nodes_per_code_line=round(nodes / code_lines, 2),
        function_nodes_p95=function_nodes[int(len(function_nodes) * 0.95)],
        function_nodes_max=function_nodes[-1],
        vague_names_percent=round(100 * vague_count / len(bound_names), 1),
        classes_sharing_a_name=sum(count for count in class_names.values() if count > 1),
        comment_lines_percent=round(100 * comment_lines / lines, 2),
    )


def small_modules_with_one_importer(paths: Mapping[str, Path]) -> dict[str, str]:
    """Modules that are shorter than SMALL_MODULE_LINES and imported by exactly one other: name →
    who imports it.

    `paths` has every module of the product by its dotted name. A package's `__init__` is not a
    module in this sense: importing anything below it imports it, too. Nor is a module that nobody
    imports: it is an entry point.
    """
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for dots, module, imported_name in facts_of_file(path).imports:
            imported = _imported_module(dots, module, imported_name, package, paths)
            if imported != name:
                importers[imported].add(name)
    small_modules = {}
    for name, path in paths.items():
        if path.name == "__init__.py" or len(importers[name]) != 1:
            continue
        if facts_of_file(path).lines < SMALL_MODULE_LINES:
            (small_modules[name],) = importers[name]
    return small_modules


def _imported_module(
    dots: int, module: str, name: str, package: str, modules: Mapping[str, Path]
) -> str:
    """The module that an import statement in `package` names: `from a import b` is a.b if that is a
    module, else a.
    """
    base = module
    if dots:
        # One dot is the package itself, every further dot is one level up.
        levels = package.split(".")
        parents = levels[: len(levels) - dots + 1]
        base = ".".join([*parents, module] if module else parents)
    submodule = f"{base}.{name}"
    return submodule if submodule in modules else base
