"""The versions of Python that the project names: what was run, and what the locked packages allow."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUN_VERSION = "3.11"
"""The version on which all tests are run."""
RESOLVED_VERSIONS = ("3.12", "3.13")
"""Versions for which the lock has every package."""
FAST_VERSION = "3.12"
"""The version of these on which the tests of `make test-fast` were run by hand."""
WITHOUT_WHEELS = ("pyspark", "pyspark-client")
"""Packages that have no wheel for any version: Python alone is needed to build them."""


def test_every_file_names_the_same_versions_of_python() -> None:
    """What is required, what `make setup` takes, what the lock is made for, what README says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    next_minor = int(RESOLVED_VERSIONS[-1].removeprefix("3.")) + 1
    assert project["requires-python"] == f">={RUN_VERSION},<3.{next_minor}"
    makefile = (ROOT / "Makefile").read_text()
    candidates = [f"python{version}" for version in (RUN_VERSION, *RESOLVED_VERSIONS)]
    assert f"for p in {' '.join(candidates)} python3;" in makefile
    assert f"(3, {RUN_VERSION.removeprefix('3.')})" in makefile
    assert f"sys.version_info < (3, {next_minor})" in makefile
    assert f"--python-version {RUN_VERSION} " in makefile
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    resolved = " and ".join(RESOLVED_VERSIONS)
    assert f"You need Python {RUN_VERSION}, " in readme
    assert (
        f"(For {resolved} all packages exist. On {FAST_VERSION} only the fast tests were run"
        in readme
    )


@pytest.mark.full
@pytest.mark.parametrize("version", [RUN_VERSION, *RESOLVED_VERSIONS])
def test_the_lock_has_every_package_for(version: str, tmp_path: Path) -> None:
    """Each pin with its dependencies, as a wheel, by its hash. Nothing is downloaded but metadata."""
    command = [Path(sys.executable).parent / "uv", "pip", "install", "--dry-run", "--quiet"]
    command += ["--python-version", version, "--target", tmp_path / "packages"]
    command += ["--require-hashes", "--requirements", ROOT / "requirements.lock"]
    command += ["--only-binary", ":all:"]
    for package in WITHOUT_WHEELS:
        command += ["--no-binary", package]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
