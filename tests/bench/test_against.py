"""Ours against ours of an earlier commit: whose code runs, in which order, and what counts as
slower.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import against


def run_of(cpu_seconds: float, digest: str = "d") -> dict[str, Any]:
    return {
        "cpu_seconds": cpu_seconds,
        "wall_seconds": 1.0,
        "answer": {"records": 7, "digest": digest},
    }


def git(repository: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *words], cwd=repository, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose product says "before" in its only commit, and "now" in the working tree."""
    folder = tmp_path / "repository"
    for package in ("bench", "seriatim"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("")
    product = folder / "seriatim" / "__init__.py"
    product.write_text("WORD_MASK = 'before'")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "before")
    product.write_text("WORD_MASK = 'now'")
    return folder


def test_an_earlier_tree_imports_its_own_product(repository: Path) -> None:
    """Its processes see REF's package, not the working tree's and not the installed one; afterwards
    it is gone.
    """
    words = ("-c", "import seriatim; print(seriatim.WORD_MASK)")
    with against.checked_out(repository, "HEAD") as tree:
        against.refuse_other_product(tree)
        assert against._python(tree, *words).stdout.strip() == "before"
        assert against._python(repository, *words).stdout.strip() == "now"
    assert not tree.exists()
    listed = subprocess.run(
        ["git", "worktree", "list"], cwd=repository, check=True, capture_output=True, text=True
    )
    assert len(listed.stdout.splitlines()) == 1


def test_a_tree_without_the_product_is_refused(repository: Path) -> None:
    """Otherwise the installed product would be measured twice."""
    (repository / "seriatim" / "__init__.py").unlink()
    (repository / "seriatim").rmdir()
    with pytest.raises(SystemExit, match=r"imports .*seriatim|cannot be imported"):
        against.refuse_other_product(repository)


def test_a_name_that_is_no_commit_is_refused(repository: Path) -> None:
    """Before a broker is started."""
    with pytest.raises(SystemExit, match="rev-parse"):
        against.commit_of(repository, "no-such-branch")


def test_who_begins_changes_from_round_to_round() -> None:
    """Before and now directly after each other, so that a slow minute hurts both."""
    assert list(against.order_of_runs(["table", "machine"], 2)) == [
        (0, "table", "before"),
        (0, "table", "now"),
        (0, "machine", "before"),
        (0, "machine", "now"),
        (1, "table", "now"),
        (1, "table", "before"),
        (1, "machine", "now"),
        (1, "machine", "before"),
    ]


@pytest.mark.parametrize(
    ("now", "slower"), [([1.0, 1.05, 9.0], []), ([1.0, 1.06, 1.06], ["table"])]
)
def test_the_median_of_the_rounds_decides(now: list[float], slower: list[str]) -> None:
    """One slow round is none; a median above 1.05 is a loss."""
    measured: against.Measured = {
        "table": {"before": [run_of(1.0)] * 3, "now": [run_of(cpu) for cpu in now]}
    }
    contenders = against.compared(measured)
    assert contenders["table"]["ratios"] == now
    assert against.slower_contenders(contenders) == slower


def test_other_records_are_no_comparison() -> None:
    """Fast and different is no figure."""
    measured: against.Measured = {"table": {"before": [run_of(1.0)], "now": [run_of(0.5)]}}
    against.refuse_other_answers(measured)
    measured["table"]["now"].append(run_of(0.5, "other"))
    with pytest.raises(SystemExit, match="the answers of table differ"):
        against.refuse_other_answers(measured)


def test_the_table_names_commit_ratios_and_median() -> None:
    """What a person decides by."""
    figures = {"ratios": [0.9, 1.1, 1.0], "median": 1.0}
    result = {"messages": 1000, "machine": "m", "when": "w", "ref": "v1", "commit": "a" * 40}
    text = "\n".join(against.table_of({**result, "contenders": {"table": figures}}))
    assert "against v1" in text
    assert "| table | 0.900, 1.100, 1.000 | 1.000 |" in text
