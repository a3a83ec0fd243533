"""`seriatim bisect --invariant module:function`: which functions are called, and which never are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from seriatim.cli.bisect import load_function
from seriatim.errors import ConfigError

TRAP = """
raise RuntimeError("it was imported")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of streams that is on the path of no other test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    (tmp_path / "streams").mkdir()
    yield tmp_path / "streams"
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.mark.parametrize(
    "text",
    [
        "os:system",
        "sys:exit",
        "os.path:exists",
        "shutil:rmtree",
        "pytest:main",
        "seriatim.cli:main",
    ],
)
def test_a_function_from_elsewhere_is_refused_by_name(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not called, and the message says where an invariant must be."""
    monkeypatch.chdir(
        folder
    )  # modules that are part of Python have no folder, which must not be taken for this one
    with pytest.raises(ConfigError) as refused:
        load_function(str(folder), text)
    assert refused.value.exit_code == 2
    assert text in refused.value.message
    assert str(folder) in refused.value.next


def test_a_module_from_elsewhere_is_not_even_imported(folder: Path, tmp_path: Path) -> None:
    """To import a module runs it: one that is on the path, but not beside the stream file, is left
    alone.
    """
    (tmp_path / "elsewhere_trap.py").write_text(TRAP)
    (folder / "deeper").mkdir()
    (folder / "deeper" / "deeper_trap.py").write_text(TRAP)
    sys.path += [str(tmp_path), str(folder / "deeper")]
    for text in ("elsewhere_trap:good", "deeper_trap:good"):
        with pytest.raises(ConfigError, match="is not beside the stream file"):
            load_function(str(folder), text)


def test_a_file_that_has_the_name_of_another_module_does_not_open_the_door(folder: Path) -> None:
    """Python would take its own `shutil`, whatever lies beside the stream file."""
    (folder / "shutil.py").write_text("def rmtree(state): return True")
    with pytest.raises(ConfigError, match="is not beside the stream file"):
        load_function(str(folder), "shutil:rmtree")


def test_functions_beside_the_stream_file_are_taken(folder: Path) -> None:
    """From a module, and from a package in the same folder."""
    (folder / "bisect_rules.py").write_text("def good(state): return state == 1")
    (folder / "bisect_more").mkdir()
    (folder / "bisect_more" / "rules.py").write_text("def bad(state): return state == 2")
    assert load_function(str(folder), "bisect_rules:good")(1) is True
    assert load_function(str(folder), "bisect_more.rules:bad")(1) is False


def test_what_is_not_there_is_told(folder: Path) -> None:
    """A module that nobody has, and a function that a module lacks."""
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_function(str(folder), "nobody_has_this:good")
    (folder / "bisect_empty.py").write_text("")
    with pytest.raises(ConfigError, match="has no function 'good'"):
        load_function(str(folder), "bisect_empty:good")
