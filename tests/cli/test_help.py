"""Every command explains itself, at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from seriatim import __version__
from seriatim.cli import app

HEAVY = (
    "pyspark",
    "pyarrow",
    "confluent_kafka",
    "deltalake",
    "pandas",
    "numpy",
    "airflow",
    "rich.console",
)


def _commands() -> Iterator[tuple[str, str]]:
    """Every command with its help, as `kafka start`."""

    def walk(group: object, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for name, command in group.commands.items():  # type: ignore[attr-defined]
            if hasattr(command, "commands"):
                yield from walk(command, (*path, name))
            else:
                yield " ".join((*path, name)), command.help or ""

    yield from walk(typer.main.get_command(app), ())


COMMANDS = dict(_commands())


def _seriatim(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "seriatim", *arguments]
    return subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    """Help says what a command does and shows how it is typed."""
    assert f"Example: seriatim {name}" in COMMANDS[name]


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_nothing_heavy_is_imported_for_help(arguments: list[str]) -> None:
    """The reason why help is quick: none of the heavy modules is imported. `bench.answers` has the
    seconds.
    """
    command = [sys.executable, "-X", "importtime", "-m", "seriatim", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "seriatim.cli" in imported
    # Help itself is laid out by rich; the command line only must not need it before.
    allowed = {"rich.console"} if "--help" in arguments else set()
    assert imported.intersection(HEAVY) - allowed == set()


def test_version_is_printed() -> None:
    """One line, for scripts."""
    assert _seriatim("--version").stdout.strip() == f"seriatim {__version__}"


def test_java_home_nowhere_is_one_sentence_and_exit_2(tmp_path: Path) -> None:
    """No stack trace: the sentence, what to do, and the code for bad configuration."""
    run = _seriatim("kafka", "start", JAVA_HOME="/nowhere", SERIATIM_HOME=str(tmp_path))
    assert run.returncode == 2
    assert run.stderr.startswith("ConfigError: JAVA_HOME is /nowhere, but there is no Java in it")
    assert "Traceback" not in run.stderr


def test_no_broker_is_told_with_an_exit_code(tmp_path: Path) -> None:
    """Scripts can ask whether one runs."""
    run = _seriatim("kafka", "status", "--json", SERIATIM_HOME=str(tmp_path))
    assert run.returncode == 4
    assert json.loads(run.stdout) == {"bootstrap_servers": None, "pid": None, "data": None}
    assert "seriatim kafka start" in run.stderr


def test_stop_without_a_broker_is_no_error(tmp_path: Path) -> None:
    """Stopped is stopped."""
    run = _seriatim("kafka", "stop", SERIATIM_HOME=str(tmp_path))
    assert (run.returncode, run.stdout) == (0, "no broker was running\n")
