"""Options and arguments that several commands have, and how a command finds its stream.

Next: cli/__init__.py has the table of commands; cli/gaps.py is a simple command.
"""

from __future__ import annotations

import re
from typing import Annotated

import typer

from seriatim import config, stream_files
from seriatim.cli import Options
from seriatim.errors import ConfigError
from seriatim.stream_files import StreamFile


def _choose_json(value: bool) -> bool:
    Options.json = value
    return value


def _choose_all_findings(value: bool) -> bool:
    Options.all_findings = value
    return value


StreamName = Annotated[
    str,
    typer.Argument(
        metavar="STREAM", help="The name of a file in streams/, or a path to a TOML file."
    ),
]
# Eager: a refused value of any other option must be reported as JSON already.
Json = Annotated[
    bool,
    typer.Option("--json", callback=_choose_json, is_eager=True, help="Print JSON, for scripts."),
]
AllFindings = Annotated[
    bool,
    typer.Option(
        "--all",
        callback=_choose_all_findings,
        help="Print every finding. Without it many findings are put into groups.",
    ),
]
Because = Annotated[
    str,
    typer.Option(
        "--because", metavar="TEXT", help="The reason. It is required, and the ledger keeps it."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would happen, and change nothing.")
]


def load_stream(name: str) -> StreamFile:
    """The stream file that a person named."""
    settings = config.load_settings()
    # Only tests set a crash point: the process then dies there, to prove that a rerun goes on.
    config.arm_crash_point(settings.crash_point)
    return stream_files.load_stream(name, settings.streams)


def stream_names(stream: str | None) -> list[str]:
    """The stream that a person named, or all streams. No stream at all is refused."""
    folder = config.load_settings().streams
    names = [stream] if stream else stream_files.list_streams(folder)
    if not names:
        raise ConfigError(
            f"there are no stream files in {folder}",
            next="make one with `seriatim new NAME`, or set SERIATIM_STREAMS",
        )
    return names


def require_regex(text: str, name: str) -> None:
    """Refuse what cannot match names of topics. `name` is what a person calls the text."""
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"{name} {text!r} is not a regular expression: {error}", next="like 'orders-.*'"
        ) from None


def require_reason(because: str, *, dry_run: bool) -> None:
    """Refuse a decision without a reason. A dry run decides nothing, so it needs none."""
    if dry_run or because.strip():
        return
    raise ConfigError(
        "a decision needs its reason: --because is missing",
        next='add --because "…"; --dry-run needs none',
    )
