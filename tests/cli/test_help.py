"""Every command explains itself, at once."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from seriatim import __version__, cli
from tests.command_tree import is_group, load_commands

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
COMMANDS = {words: command for words, command in load_commands().items() if not is_group(command)}
LAZY_COMMANDS = {
    command.name: command for commands in cli.COMMANDS.values() for command in commands
}
COMPLETION = {
    "_SERIATIM_COMPLETE": "complete_bash",
    "COMP_WORDS": "seriatim re",
    "COMP_CWORD": "1",
}
"""What bash sets when a person types `seriatim re` and the tabulator key."""
CLI_MODULES = sorted(Path(cli.__file__).parent.glob("*.py"))


def _seriatim(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "seriatim", *arguments]
    return subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    """Help says what a command does and shows how it is typed."""
    assert f"Example: seriatim {name}" in COMMANDS[name].help


@pytest.mark.parametrize("name", LAZY_COMMANDS)
def test_the_table_says_what_the_command_says(name: str) -> None:
    """The line in the table of commands is the first line of the command's own help."""
    command = LAZY_COMMANDS[name]
    assert command.loaded.help.splitlines()[0] == command.short_help


def test_help_shows_the_commands_in_groups() -> None:
    """Each command is in exactly one group, and the commands of a group are sorted."""
    groups: dict[str, list[str]] = {}
    for line in _seriatim("--help").stdout.splitlines():
        if line and not line.startswith(" "):
            groups[line] = []
        elif line.startswith("  ") and groups:
            groups[list(groups)[-1]].append(line.split()[0])
    names = {title: groups[f"{title}:"] for title in cli.COMMANDS}
    assert names == {
        "Run": ["compact", "plan", "publish", "run"],
        "Look": ["gaps", "report", "status", "streams", "top", "topics", "version", "watch"],
        "Prove": ["check", "verify"],
        "Repair and decide": ["accept", "backfill", "quarantine", "rebuild", "repair", "retire"],
        "Hunt": ["bisect", "diff", "explain", "replay", "state", "trace"],
        "Set up": ["cluster", "doctor", "jars", "kafka", "new", "produce", "s3"],
    }


@pytest.mark.parametrize("path", CLI_MODULES, ids=lambda path: path.stem)
def test_commands_import_at_the_top(path: Path) -> None:
    """No function imports by itself: the table of commands is what makes help quick."""
    functions = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
    ]
    imports = (ast.Import, ast.ImportFrom)
    deferred = [
        node.lineno
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, imports)
    ]
    assert deferred == []


def _imported_modules(*arguments: str, **environ: str) -> set[str]:
    """The modules that a process has imported when its command ends."""
    code = """
import atexit, sys
atexit.register(lambda: print("", *sys.modules, sep="\\n", file=sys.stderr))
sys.argv[0] = "seriatim"
from seriatim.cli import main
main()
"""
    command = [sys.executable, "-c", code, *arguments]
    run = subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, check=True
    )
    return set(run.stderr.splitlines())


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["--help"], {}),
        (["--version"], {}),
        ([], COMPLETION),
    ],
    ids=["help", "version", "completion"],
)
def test_nothing_heavy_is_imported_for_help(arguments: list[str], environ: dict[str, str]) -> None:
    """The reason why help and the completion of names are quick: neither a command's module nor any
    heavy library is imported. `bench.answers` has the seconds.
    """
    imported = _imported_modules(*arguments, **environ)
    assert "seriatim.cli" in imported
    command_modules = {f"seriatim.cli.{path.stem}" for path in CLI_MODULES}
    assert imported.intersection({*HEAVY, *command_modules}) == set()


def test_a_command_imports_its_own_module_only(tmp_path: Path) -> None:
    """What one command needs, no other has to wait for."""
    imported = _imported_modules("kafka", "stop", SERIATIM_HOME=str(tmp_path))
    command_modules = {
        f"seriatim.cli.{command.target.partition(':')[0]}" for command in LAZY_COMMANDS.values()
    }
    assert imported & command_modules == {"seriatim.cli.set_up"}


def test_pandas_is_not_imported_with_a_command() -> None:
    """Arrow would import it with its first array, which the commands that look back prevent; but
    only before it has happened.
    """
    modules = ", ".join(f"seriatim.cli.{path.stem}" for path in CLI_MODULES[1:])
    code = f"import sys, {modules}; print('pandas' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


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
