"""The documents speak of what exists: every command they show can be typed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from seriatim.cli import COMMANDS, app
from seriatim.config import ENVIRONMENT_PREFIX, Settings
from tests.command_tree import is_group, load_commands

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md")


def _shown(program: str) -> Iterator[tuple[str, str]]:
    """Every command line of a program in a code block or between backticks, with its page."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        blocks = re.findall(r"```(?:console|bash|sh)?\n(.*?)```", text, re.DOTALL)
        lines = [
            line.removeprefix("$ ").split("#")[0].strip()
            for block in blocks
            for line in block.splitlines()
        ]
        for line in (*lines, *re.findall(r"`([^`\n]+)`", text)):
            if line.startswith(f"{program} "):
                yield page, line


def _unknown_options(line: str) -> list[str]:
    """Walk the words of a command line as far as they name commands; the options must be the last
    one's.
    """
    words = line.split()[1:]
    name, command = "", typer.main.get_command(app)
    while words and f"{name} {words[0]}".strip() in load_commands():
        name = f"{name} {words.pop(0)}".strip()
        command = load_commands()[name]
    # The first word after `produce` may be the name of a file.
    command = load_commands().get(f"{name} FILE", command) if words else command
    if is_group(command) and words and not words[0].startswith("-"):
        return [words[0]]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]


@pytest.mark.parametrize(("page", "line"), sorted(set(_shown("seriatim"))))
def test_every_command_shown_exists(page: str, line: str) -> None:
    """A reader who copies a line gets no `No such command` and no `No such option`."""
    assert _unknown_options(line) == [], f"{page}: {line}"


@pytest.mark.parametrize(("page", "line"), sorted(set(_shown("make"))))
def test_every_target_shown_exists(page: str, line: str) -> None:
    """The same for make."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line.split()[1] in targets, f"{page}: {line}"


def test_the_table_has_every_command() -> None:
    """With the line that help shows, in the same groups and the same order."""
    expected = []
    for title, commands in COMMANDS.items():
        expected.append(f"| **{title}** | |")
        expected += [
            f"| `seriatim {command.name}` | {command.short_help} |" for command in commands
        ]
    text = (ROOT / "README.md").read_text()
    assert "\n".join(expected) in text


def test_the_readme_opens_with_the_two_commands_that_a_newcomer_needs() -> None:
    """`make demo` runs everything, and `make test` tests everything; all else comes later."""
    makes = [line.split()[1] for page, line in _shown("make") if page == "README.md"]
    assert makes[:2] == ["demo", "test"]
    opening = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert re.findall(r"make ([a-z-]+)", opening) == ["demo", "test"]


def _settings_shown() -> set[str]:
    """The variables in the table of settings. `_USER` beside `SERIATIM_SMTP_FROM` is short for
    `SERIATIM_SMTP_USER`.
    """
    table = (ROOT / "README.md").read_text().partition("\n## Settings\n")[2].partition("\n## ")[0]
    variables = set()
    for line in table.splitlines():
        prefix = ""
        for word in re.findall(r"`(SERIATIM_[A-Z_]+|_[A-Z_]+)`", line):
            variable = prefix + word if word.startswith("_") else word
            variables.add(variable)
            prefix = variable.rpartition("_")[0]
    return variables


def test_every_setting_is_shown() -> None:
    """A setting that is in no table is found by nobody."""
    expected = {f"{ENVIRONMENT_PREFIX}{field.upper()}" for field in Settings.__struct_fields__}
    # Tests kill a run there; it is nothing for people.
    expected.remove("SERIATIM_CRASH_POINT")
    assert expected - _settings_shown() == set()
    assert "SERIATIM_NO_SUCH_SETTING" not in _settings_shown()


def test_the_search_finds_commands() -> None:
    """The pages do show commands: an empty list would prove nothing."""
    assert len(list(_shown("seriatim"))) >= 5
    assert len(list(_shown("make"))) >= 5


@pytest.mark.parametrize(
    "line", ["seriatim kafka fly", "seriatim nonsense", "seriatim kafka start --prot 1"]
)
def test_a_wrong_command_is_seen(line: str) -> None:
    """The check itself can fail."""
    assert _unknown_options(line)


@pytest.mark.parametrize(
    "page", [*PAGES, "docs/ARCHITECTURE.md", "docs/GLOSSARY.md", "CHANGELOG.md"]
)
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link in a page names a file that is there."""
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
