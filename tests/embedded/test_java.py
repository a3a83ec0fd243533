"""Java is found where Spark would look, and refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from seriatim.embedded import java
from seriatim.errors import ConfigError


def _java_home(folder: Path, answer: str, release: str = "") -> Path:
    """A folder that looks like a Java, with a program that says `answer`."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{answer}' >&2\n")
    program.chmod(0o755)
    if release:
        (folder / "release").write_text(release)
    return folder


def test_java_home_comes_before_path(tmp_path: Path) -> None:
    """JAVA_HOME wins, as it does for Spark."""
    home = _java_home(tmp_path / "chosen", 'openjdk version "17.0.1"')
    other = _java_home(tmp_path / "other", 'openjdk version "21.0.1"')
    assert (
        java.find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})
        == home / "bin" / "java"
    )


def test_java_on_path_is_taken_without_java_home(tmp_path: Path) -> None:
    """Without JAVA_HOME the java on PATH is good."""
    home = _java_home(tmp_path / "java", 'openjdk version "21.0.1" 2023-10-17')
    assert java.find_java({"PATH": str(home / "bin")}) == home / "bin" / "java"


def test_java_home_that_points_nowhere_is_named() -> None:
    """A JAVA_HOME without Java is an error that names it, even if PATH has one."""
    with pytest.raises(ConfigError, match="JAVA_HOME is /nowhere, but there is no Java in it"):
        java.find_java({"JAVA_HOME": "/nowhere", "PATH": "/usr/bin"})


def test_no_java_at_all_says_how_to_get_it() -> None:
    """The way out is part of the error."""
    with pytest.raises(ConfigError, match="no Java found") as caught:
        java.find_java({"PATH": "/nowhere"})
    assert "install Java 17" in caught.value.next


@pytest.mark.parametrize(
    ("answer", "release", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', "", 17),
        ('java version "1.8.0_392"', "", 8),
        ("never asked", 'IMPLEMENTOR="Debian"\nJAVA_VERSION="21.0.2"\n', 21),
        ('openjdk version "25" 2025-09-16', "", 25),
    ],
)
def test_versions_are_read(tmp_path: Path, answer: str, release: str, version: int) -> None:
    """Old and new ways of writing a version, from the release file or by asking."""
    assert (
        java.major_version(_java_home(tmp_path / "java", answer, release) / "bin" / "java")
        == version
    )


def test_old_java_is_refused(tmp_path: Path) -> None:
    """Java 11 would only fail later, inside Spark."""
    home = _java_home(tmp_path / "java", 'openjdk version "11.0.2"')
    with pytest.raises(ConfigError, match=r"Java 11 at .* is too old: Spark needs 17 or newer"):
        java.find_java({"JAVA_HOME": str(home)})


def test_what_is_no_java_is_refused(tmp_path: Path) -> None:
    """A program that is called java but is none gives a sentence, not a stack trace."""
    home = _java_home(tmp_path / "java", "hello")
    with pytest.raises(ConfigError, match="does not tell its version"):
        java.find_java({"JAVA_HOME": str(home)})
