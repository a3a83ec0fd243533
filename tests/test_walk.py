"""The way of one message from a run to its commit, and of a repair to its own, traced: how many files
they pass, and that docs/ARCHITECTURE.md tells the first one truly.

Next: docs/ARCHITECTURE.md, "The walk of a message".
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

import seriatim
from seriatim.engine.files import File
from seriatim.memory.check import MemoryChecker, MemorySight
from seriatim.operations.prove.check import check_stream
from seriatim.operations.repair.damage import RepairRequest, plan_repair
from seriatim.operations.repair.refold import RepairRun
from tests.operations.check_helper import run_check, shipped_suites
from tests.operations.memory_streams import A0, create_stream, send
from tests.operations.repair_helper import create_sliced_stream, remove_file

PACKAGE = Path(seriatim.__file__).parent
DOCUMENT = PACKAGE.parent / "docs" / "ARCHITECTURE.md"
FILES_MAX = 25
"""So many files of the package does one update pass between `run` and its commit."""
REPAIR_FILES_MAX = 29
"""So many files of the package does the repair of one lost file pass, from its plan to its commit. One of
them is workers.py: tables are joined by workers, here or on executors.
"""
NAMED_PLACE = re.compile(r"`([A-Za-z_][\w.]*)`\s+(?:\(|in\s+)`([\w/]+\.py)`")
REAL_WORLD = ("cli/", "context.py", "kafka/", "storage/", "ledger/delta_store.py", "fast/")
"""The trace is over the fakes, so it does not meet these."""
NOT_IN_EVERY_WALK = {
    "explain_hole": "only where offsets are missing",
    "check_stream": "a command of its own, after the run",
    "PartitionProver": "a part of the check",
    "publish_current": "a command of its own, after the run",
}


CHECK_FILES_MAX = 15
"""So many files of the package, without the fakes, does a check of one update pass."""


class Call(NamedTuple):
    """A function of the package that was called."""

    file: str
    """Below the package."""
    name: str
    """With its class."""


def trace_calls(work: Callable[[], Any]) -> tuple[list[Call], list[int], Any]:
    """Every call of the package while `work` runs, in order; how many of them began before each
    commit was over; and what `work` returned.
    """
    calls: list[Call] = []
    commit_ends: list[int] = []

    def note(frame: FrameType, kind: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(PACKAGE):
            return
        call = Call(str(path.relative_to(PACKAGE)), frame.f_code.co_qualname)
        if kind == "call":
            calls.append(call)
        elif kind == "return" and call == Call("ledger/commit.py", "commit"):
            commit_ends.append(len(calls))

    profiler = sys.getprofile()
    sys.setprofile(note)
    try:
        result = work()
    finally:
        sys.setprofile(profiler)
    return calls, commit_ends, result


@cache
def traced_update() -> tuple[list[Call], int]:
    """Every call of a run that folds one update, in order; and how many of them began before the
    commit was over. The session is in its state file: the ledger, the topic and the snapshot are
    there before.
    """
    memory_stream = create_stream()
    memory_stream.kafka.create("in-a", 1)
    send(memory_stream, A0, ["a", "b"])
    memory_stream.run()
    send(memory_stream, A0, 1)
    fold_run = memory_stream.folding()
    calls, commit_ends, outcome = trace_calls(lambda: fold_run.run(1_000))
    assert (outcome.messages, outcome.slices, len(commit_ends)) == (1, 1, 1)
    return calls, commit_ends[0]


def test_a_repair_passes_few_files_from_its_plan_to_its_commit() -> None:
    """One record file is lost: it is found, planned, held, folded again and replaced."""
    memory_stream = create_sliced_stream()
    remove_file(memory_stream, memory_stream.ledger.files_now()[3].path)
    open_stream = memory_stream.open()

    def repair() -> Any:
        plan = plan_repair(open_stream, RepairRequest())
        return RepairRun(open_stream).apply(plan, 1_000)

    calls, commit_ends, result = trace_calls(repair)
    # The hold and the repair.
    assert (result.removed_files, len(commit_ends)) == (1, 2)
    files = list(dict.fromkeys(call.file for call in calls[: commit_ends[-1]]))
    assert len(files) <= REPAIR_FILES_MAX, files


def test_an_update_passes_few_files_from_the_run_to_its_commit() -> None:
    """A reader who follows one message does not get lost."""
    calls, calls_until_commit = traced_update()
    files = list(dict.fromkeys(call.file for call in calls[:calls_until_commit]))
    assert len(files) <= FILES_MAX, files


def test_a_check_passes_few_files() -> None:
    """From `check_stream` to its verdict. The fakes are not counted: they stand for files of storage."""
    memory_stream = create_stream()
    memory_stream.kafka.create("in-a", 1)
    send(memory_stream, A0, ["a", "b"])
    memory_stream.run()
    assert run_check(memory_stream).verdict == {"in-a/0": "good"}
    send(memory_stream, A0, 1)
    memory_stream.run()
    open_stream = memory_stream.open()
    suites = shipped_suites(memory_stream.stream)

    def read(file: File) -> list[dict[str, Any]]:
        return memory_stream.files.files[file.path].rows

    files: dict[str, None] = {}

    def note(frame: FrameType, kind: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if kind == "call" and path.is_relative_to(PACKAGE):
            files[str(path.relative_to(PACKAGE))] = None

    profiler = sys.getprofile()
    sys.setprofile(note)
    try:
        done = check_stream(open_stream, suites, MemoryChecker(read), MemorySight(read))
    finally:
        sys.setprofile(profiler)
    assert (done.verdict, done.records) == ({"in-a/0": "good"}, 1)
    passed = [file for file in files if not file.startswith("memory/")]
    assert {file for file in passed if "prove" in file} == {
        "operations/prove/check.py",
        "operations/prove/partition_rules.py",
        "operations/prove/suite.py",
    }
    assert len(passed) <= CHECK_FILES_MAX, passed


def named_places() -> Iterator[tuple[str, str]]:
    """The names of the document's walk that say in which file they are, in order."""
    text = DOCUMENT.read_text()
    start = text.index("## The walk of a message")
    yield from NAMED_PLACE.findall(text[start : text.index("\n## ", start + 1)])


def test_the_walk_has_names() -> None:
    """The pattern finds what the document says: functions, methods and classes."""
    assert {name for name, _ in named_places()} >= {"FoldRun.run", "run_task", "TableMachine.apply"}


@pytest.mark.parametrize(("name", "path"), list(named_places()))
def test_every_name_of_the_walk_is_in_its_file(name: str, path: str) -> None:
    """A name that was changed or moved is found here."""
    value: Any = importlib.import_module(f"seriatim.{path[:-3].replace('/', '.')}")
    for part in name.split("."):
        value = getattr(value, part)
    assert value.__module__ == f"seriatim.{path[:-3].replace('/', '.')}"


def test_a_traced_update_meets_the_names_of_the_walk_in_order() -> None:
    """The document tells the steps as they are called."""
    calls, _ = traced_update()
    position = 0
    for name, path in named_places():
        if path.startswith(REAL_WORLD) or name in NOT_IN_EVERY_WALK:
            continue
        met = [
            number
            for number, call in enumerate(calls[position:], position)
            if call.file == path and f"{call.name}.".startswith(f"{name}.")
        ]
        assert met, f"{name} ({path}) is not called after the names before it"
        position = met[0]
