"""`python -m bench.run --against REF`: our own contenders, of an earlier commit and of the working
tree, in turn.

Both work on the same broker and the same messages, each in processes of their own. REF's processes
run REF's own bench package on REF's own product, so modules may be renamed in between. What must
stay the same is the interface:

    python -m bench.contenders NAME FOLDER MESSAGES BROKER_DATA

started in the tree's folder, with the topics of bench/data.py, printing one JSON line with
`cpu_seconds` and `answer`.

Next: run.py, which starts the broker and the processes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

RATIO_MAX = 1.05
"""A median ratio above this is a loss of speed."""
ROUNDS = 5

Side = Literal["before", "now"]
Measured = dict[str, dict[Side, list[dict[str, Any]]]]
"""What each run of a contender printed, by contender and side, one per round."""
PROBE = "import bench, seriatim; print(bench.__file__); print(seriatim.__file__)"


@contextmanager
def checked_out(repository: Path, ref: str) -> Iterator[Path]:
    """A commit's files in a temporary folder, as a git worktree that is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="seriatim-against-") as folder:
        tree = Path(folder) / "tree"
        _git(repository, "worktree", "add", "--quiet", "--detach", str(tree), ref)
        try:
            yield tree
        finally:
            _git(repository, "worktree", "remove", "--force", str(tree))


def commit_of(repository: Path, ref: str) -> str:
    """The commit that a name stands for."""
    return _git(repository, "rev-parse", "--verify", f"{ref}^{{commit}}").strip()


def environment_of(tree: Path) -> dict[str, str]:
    """An environment in which Python, and Spark's workers below it, import from this tree first,
    before anything that is installed.
    """
    return {**os.environ, "PYTHONPATH": str(tree)}


def refuse_other_product(tree: Path) -> None:
    """Exit if the processes of a tree import another tree's product: figures would mean nothing."""
    probe = _python(tree, "-c", PROBE)
    if probe.returncode:
        raise SystemExit(
            f"bench and seriatim cannot be imported in {tree}:\n{probe.stderr[-3000:]}"
        )
    for file in probe.stdout.split():
        if not Path(file).is_relative_to(tree.resolve()):
            raise SystemExit(f"a process in {tree} imports {file}")


def make_ready(tree: Path, print_progress: Callable[[str], None]) -> None:
    """What `make setup` does for the tree: compile its fold, which would otherwise be compiled during
    the first round, and make the archive of Spark's classes, which came later than the fold.
    """
    if (tree / "seriatim" / "class_archive.py").exists():
        _python(tree, "-m", "seriatim.class_archive")
    # Until the packages were cut by subject, the compiled fold was `seriatim.bulk`.
    is_renamed = (tree / "seriatim" / "fast").is_dir()
    compilation = _python(tree, "-m", "seriatim.fast" if is_renamed else "seriatim.bulk")
    if compilation.returncode:
        reason = compilation.stderr.strip()[-300:]
        print_progress(f"the fold of {tree} was not compiled beforehand: {reason}")


def order_of_runs(names: list[str], rounds: int) -> Iterator[tuple[int, str, Side]]:
    """Before and now directly after each other; the side that begins changes with every round."""
    for number in range(rounds):
        sides: tuple[Side, Side] = ("before", "now") if number % 2 == 0 else ("now", "before")
        for name in names:
            for side in sides:
                yield number, name, side


def compared(measured: Measured) -> dict[str, Any]:
    """The ratio now/before of every round, and the median, by contender."""
    contenders = {}
    for name, runs in measured.items():
        seconds_before = [run["cpu_seconds"] for run in runs["before"]]
        seconds_now = [run["cpu_seconds"] for run in runs["now"]]
        ratios = []
        for before, after in zip(seconds_before, seconds_now, strict=True):
            ratios.append(after / before)
        contenders[name] = {
            "ratios": _rounded(ratios),
            "median": round(statistics.median(ratios), 3),
            "before_cpu_seconds": _rounded(seconds_before),
            "now_cpu_seconds": _rounded(seconds_now),
        }
    return contenders


def _rounded(figures: list[float]) -> list[float]:
    return [round(figure, 3) for figure in figures]


def slower_contenders(contenders: dict[str, Any]) -> list[str]:
    """The contenders whose median ratio is above the limit."""
    return [name for name, figures in contenders.items() if figures["median"] > RATIO_MAX]


def refuse_other_answers(measured: Measured) -> None:
    """Exit if before and now give other records of the same messages: the ratio would compare
    different work.
    """
    for name, runs in measured.items():
        all_runs = runs["before"] + runs["now"]
        answers = [run["answer"] for run in all_runs]
        if any(answer != answers[0] for answer in answers):
            raise SystemExit(
                f"the answers of {name} differ, so the figures mean nothing: {answers}"
            )


def table_of(result: dict[str, Any]) -> Iterator[str]:
    """The comparison for people, as Markdown."""
    circumstances = f"{result['messages']:,} messages, {result['machine']}, {result['when']}"
    yield f"{circumstances}; against {result['ref']}"
    yield f"({result['commit'][:12]}); CPU now/before, a median above {RATIO_MAX} is a loss\n"
    yield "| contender | ratio of each round | median |"
    yield "|---|---|---|"
    for name, figures in result["contenders"].items():
        ratios = ", ".join(f"{ratio:.3f}" for ratio in figures["ratios"])
        yield f"| {name} | {ratios} | {figures['median']:.3f} |"


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"git {' '.join(arguments)} failed: {result.stderr.strip()}")
    return result.stdout


def _python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=tree, env=environment_of(tree), capture_output=True, text=True, check=False
    )
