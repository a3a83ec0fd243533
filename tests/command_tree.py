"""The commands of the command line with their parameters, each loaded from its module."""

from __future__ import annotations

from functools import cache
from typing import Any

import typer.main

from seriatim import cli


@cache
def load_commands() -> dict[str, Any]:
    """Every command and every group of commands, by the words that a person types: `kafka start`."""
    loaded: dict[str, Any] = {}

    def add(group: Any, words: tuple[str, ...]) -> None:
        for name, entry in group.commands.items():
            command = entry.loaded if isinstance(entry, cli.LazyCommand) else entry
            loaded[" ".join((*words, name))] = command
            if is_group(command):
                add(command, (*words, name))

    add(typer.main.get_command(cli.app), ())
    return loaded


def is_group(command: Any) -> bool:
    """Whether it has commands of its own."""
    return hasattr(command, "commands")
