"""The table of deaths in docs/ALERTS.md: every row has its tests, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECTION = (
    (ROOT / "docs" / "ALERTS.md")
    .read_text()
    .partition("\n## Ways to die\n")[2]
    .partition("\n## ")[0]
)
ROWS = re.findall(r"^\| (\d+) \|", SECTION, re.MULTILINE)
TESTS_BY_ROW = {
    number: re.findall(r"`(tests/[a-z_/]+\.py)::([a-z_0-9]+)`", text)
    for number, text in re.findall(r"^- \*\*(\d+)\*\*:(.*(?:\n  .*)*)", SECTION, re.MULTILINE)
}
WAYS = re.findall(r"`(exit|exception|broken_callback|killed|timeout|run_timeout|marked)`", SECTION)


def test_every_row_names_its_tests() -> None:
    """There are ten deaths and more, and none without a test."""
    assert len(ROWS) >= 10
    assert sorted(TESTS_BY_ROW, key=int) == ROWS
    assert all(TESTS_BY_ROW.values())


@pytest.mark.parametrize("row", ROWS)
def test_every_test_that_it_names_exists(row: str) -> None:
    """In that file; and it is marked for `--full` where the page says so, and only there."""
    text = SECTION.partition(f"\n- **{row}**:")[2].partition("\n- **")[0]
    _, _, full_part = text.partition("*full*:")
    for path, name in TESTS_BY_ROW[row]:
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path}::{name}"
        marks = [ast.unparse(mark) for mark in functions[name].decorator_list]
        is_whole_file_full = "pytestmark = pytest.mark.full" in (ROOT / path).read_text()
        if is_whole_file_full or "pytest.mark.full" in marks:
            assert f"{path}::{name}" in full_part


def test_all_ways_of_the_test_with_a_scheduler_are_in_the_table() -> None:
    """Each way in which a run dies in that test is in some row."""
    source = (ROOT / "tests" / "integration" / "test_airflow.py").read_text()
    (ways,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "WAYS"
    ]
    assert set(WAYS) == set(ways)
