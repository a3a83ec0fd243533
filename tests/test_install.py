"""Who has installed Seriatim finds its types from a folder of their own: mypy and editors follow a
path, not an import hook.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from seriatim.operations.scaffold import EXAMPLE_SAMPLE, Scaffold, render_machine, render_test

ROOT = Path(__file__).parent.parent
BUILD = "import sys, setuptools.build_meta as meta; meta.build_editable(sys.argv[1])"


@pytest.fixture(scope="module")
def installed_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python into which a copy of this repository was installed as `make setup` does: editable.
    All other packages are those of this Python.
    """
    folder = tmp_path_factory.mktemp("install")
    clone = folder / "clone"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    without_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "seriatim", clone / "seriatim", ignore=without_caches)
    (clone / "dags").mkdir()
    subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=clone, capture_output=True, check=True
    )
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return environment / "bin" / "python"


def test_mypy_checks_a_scaffolded_machine_in_a_users_folder(
    installed_python: Path, tmp_path: Path
) -> None:
    """Strictly: the classes of Seriatim are known, and a wrong type is seen."""
    scaffold = Scaffold(stream="mine", module="mine", topics="mine", sample=EXAMPLE_SAMPLE)
    (tmp_path / "mine.py").write_text(render_machine(scaffold))
    (tmp_path / "test_mine.py").write_text(render_test(scaffold, "test_mine.py"))
    (tmp_path / "wrong.py").write_text(
        "from seriatim import Machine\n\nMachine.state_version = ''\n"
    )
    environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    mypy = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    mypy += ["--python-executable", str(installed_python), "--cache-dir", str(tmp_path / "cache")]
    checked = subprocess.run(
        [*mypy, "mine.py", "test_mine.py", "wrong.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    (error,) = checked.stdout.splitlines()
    assert error.startswith("wrong.py:3: error: Incompatible types in assignment")


def test_the_installed_package_is_the_clone(installed_python: Path, tmp_path: Path) -> None:
    """A file that is added to the clone is there at once."""
    clone = installed_python.parent.parent.parent / "clone"
    (clone / "seriatim" / "added.py").write_text("here = True\n")
    code = "import seriatim.added; print(seriatim.__file__)"
    answer = subprocess.run(
        [installed_python, "-I", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == str(clone / "seriatim" / "__init__.py")
